"""Which tables a bundle holds: asked of the object graph, never of the spelling of keys."""

from typing import Final

from tpuembed.checkpoint.bundle.keras_graph import check_keras_model, keras_rs_tables
from tpuembed.checkpoint.bundle.layer_config import merge_configs
from tpuembed.checkpoint.bundle.mid_level import keras_layer_tables, mid_level_tables
from tpuembed.checkpoint.bundle.mid_level_variables import mid_level_nodes
from tpuembed.checkpoint.bundle.object_graph import VALUE, ObjectGraph
from tpuembed.checkpoint.bundle.own_layer import own_layer_configs, own_layer_tables
from tpuembed.checkpoint.bundle.plain_variables import graph_variables, named_variables
from tpuembed.checkpoint.bundle.table_keys import Discovery, merge_tables
from tpuembed.errors import CheckpointCorruptError, CheckpointFormatError, ConfigError
from tpuembed.tensor_bundle import Bundle

__all__ = ["discover"]

_OBJECT_VALUE: Final = f"/.ATTRIBUTES/{VALUE}"
"""How TensorFlow 2 ends the keys of variables."""


def discover(bundle: Bundle, graph: ObjectGraph | None, partition_strategy: str | None = None) -> Discovery:
    """The tables of embedding layers; where the checkpoint has no such layer, all matrices of floats.

    Args:
        bundle: the checkpoint.
        graph: its object graph; None for a TensorFlow 1 checkpoint, which has none.
        partition_strategy: how ids were dealt to the parts of a TensorFlow 1 checkpoint's partitioned variables.

    Raises:
        ConfigError: a partition strategy for a checkpoint with an object graph, where rows lie in order.
        CheckpointFormatError: there is no table, two of one name, or a layer in a format that is not supported.
        CheckpointCorruptError: graph, config and bundle contradict each other.
        MalformedError: the graph is absurdly deep.
    """
    if graph is not None and partition_strategy is not None:
        raise ConfigError(
            f"checkpoint {bundle.prefix}: partition_strategy is for checkpoints of TensorFlow 1, and this one has an object "
            "graph, which says how its rows lie; leave it out"
        )
    if graph is not None:
        _check_no_holes(bundle)
    found = _discover(bundle, graph, partition_strategy)
    if not found.tables:
        _check_no_holes(bundle)
        raise CheckpointFormatError(
            f"checkpoint {bundle.prefix}: holds no table, neither an embedding layer's nor a variable that is a matrix "
            f"of floats, among {len(bundle.entries)} tensors; was the layer built before the checkpoint was saved? (Of "
            "keras_rs.layers.DistributedEmbedding TensorFlow saves nothing: use model.save_weights)"
        )
    _check_all_there(bundle, graph)
    return found


def _check_no_holes(bundle: Bundle) -> None:
    """Raise CheckpointCorruptError for a tensor with holes. TensorFlow 1 alone writes such; see `Entry.holes`."""
    for key, entry in bundle.entries.items():
        if entry.holes:
            bundle.entry(key)


def _check_all_there(bundle: Bundle, graph: ObjectGraph | None) -> None:
    """Raise CheckpointCorruptError where graph or values are lost: what is left may read well, and lack a table or slot."""
    if graph is None:
        for key in bundle.entries:
            if key.endswith(_OBJECT_VALUE):
                raise CheckpointCorruptError(
                    f"checkpoint {bundle.prefix}: {key} is the value of an object, and the index has no object graph, which "
                    "says how its rows lie; restore it from another copy"
                )
        return
    for number, node in enumerate(graph.nodes):
        if node.value_key is not None and node.value_key not in bundle.entries:
            raise CheckpointCorruptError(
                f"checkpoint {bundle.prefix}: its object graph puts {graph.path(number)} at {node.value_key}, which the index "
                "does not have; restore it from another copy"
            )


def _discover(bundle: Bundle, graph: ObjectGraph | None, partition_strategy: str | None) -> Discovery:
    if graph is None:
        return Discovery(merge_tables(bundle, named_variables(bundle, partition_strategy)))
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
        return Discovery(layers, merge_configs({graph.path(number): config for number, config in configs.items()}))
    check_keras_model(bundle, graph)
    return Discovery(merge_tables(bundle, graph_variables(bundle, graph)))
