"""Finds the tables in a bundle, by its object graph and never by the spelling of keys."""

from typing import Any, Final

from tpuembed.checkpoint.bundle.keras_graph import check_keras_model, keras_rs_tables
from tpuembed.checkpoint.bundle.layer_config import merge_configs
from tpuembed.checkpoint.bundle.mid_level import keras_layer_tables, mid_level_tables
from tpuembed.checkpoint.bundle.mid_level_variables import mid_level_nodes
from tpuembed.checkpoint.bundle.object_graph import VALUE, ObjectGraph
from tpuembed.checkpoint.bundle.own_layer import own_layer_configs, own_layer_tables
from tpuembed.checkpoint.bundle.plain_variables import graph_variables, named_variables
from tpuembed.checkpoint.bundle.table_keys import TableKeys, merge_tables
from tpuembed.errors import CheckpointCorruptError, CheckpointFormatError, ConfigError
from tpuembed.tensor_bundle import Bundle

__all__ = ["discover"]

_OBJECT_VALUE: Final = f"/.ATTRIBUTES/{VALUE}"
"""The end of the keys of variables in TensorFlow 2."""

Found = tuple[dict[str, TableKeys], dict[str, Any] | None]
"""Tables by name, and the config of the layers that wrote them, if the checkpoint has it."""


def discover(bundle: Bundle, graph: ObjectGraph | None, partition_strategy: str | None = None) -> Found:
    """Return the tables of embedding layers. If the checkpoint has no such layer, return all matrices of floats.

    A TensorFlow 1 checkpoint has no `graph`, and may need the `partition_strategy` of its partitioned variables.

    Raises:
        ConfigError: a partition strategy is given for a checkpoint with an object graph, whose rows are in order.
        CheckpointFormatError: there is no table, two have the same name, or a layer's format is not supported.
        CheckpointCorruptError: graph, config and bundle contradict each other.
        MalformedError: the graph is far too deep.
    """
    if graph is not None and partition_strategy is not None:
        raise ConfigError(
            f"checkpoint {bundle.prefix}: partition_strategy is only for checkpoints of TensorFlow 1. This one "
            "has an object graph, which determines the order of its rows. Leave it out."
        )
    if graph is not None:
        _check_no_holes(bundle)
    tables, config = _discover(bundle, graph, partition_strategy)
    if not tables:
        _check_no_holes(bundle)
        raise CheckpointFormatError(
            f"checkpoint {bundle.prefix}: has no table, neither an embedding layer's nor a variable that is a matrix "
            f"of floats, among {len(bundle.entries)} tensors. Check that the layer was built before the checkpoint was "
            "saved. (TensorFlow does not save keras_rs.layers.DistributedEmbedding: use model.save_weights.)"
        )
    _check_all_there(bundle, graph)
    return tables, config


def _check_no_holes(bundle: Bundle) -> None:
    """Raise CheckpointCorruptError for a tensor with holes. Only TensorFlow 1 writes such; see `Entry.holes`."""
    for key, entry in bundle.entries.items():
        if entry.holes:
            bundle.entry(key)


def _check_all_there(bundle: Bundle, graph: ObjectGraph | None) -> None:
    """Raise CheckpointCorruptError if the graph or values are missing: the rest could be read, but lack a table or
    slot.
    """
    if graph is None:
        for key in bundle.entries:
            if key.endswith(_OBJECT_VALUE):
                raise CheckpointCorruptError.of(
                    f"checkpoint {bundle.prefix}: {key} is the value of an object, but the index has no object graph, "
                    "which determines the order of its rows"
                )
        return
    for number, node in enumerate(graph.nodes):
        if node.value_key is not None and node.value_key not in bundle.entries:
            raise CheckpointCorruptError.of(
                f"checkpoint {bundle.prefix}: its object graph puts {graph.path(number)} at {node.value_key}, which "
                "the index does not have"
            )


def _discover(bundle: Bundle, graph: ObjectGraph | None, partition_strategy: str | None) -> Found:
    if graph is None:
        return merge_tables(bundle, named_variables(bundle, partition_strategy)), None
    configs = own_layer_configs(bundle, graph)
    layers = merge_tables(
        bundle,
        [
            *own_layer_tables(bundle, graph, configs),
            *mid_level_tables(bundle, graph),
            *keras_layer_tables(bundle, graph),
            *keras_rs_tables(bundle, graph),
        ],
    )
    if layers or configs or mid_level_nodes(graph):
        return layers, merge_configs({graph.path(number): config for number, config in configs.items()})
    check_keras_model(bundle, graph)
    return merge_tables(bundle, graph_variables(bundle, graph)), None
