"""Tables of checkpoints without an embedding layer: every matrix of floats."""

from collections.abc import Iterator

from tpuembed.checkpoint.keras_2_slots import keras_2_slots
from tpuembed.checkpoint.keras_saved_model import archive_copies, variable_names
from tpuembed.checkpoint.object_graph import ObjectGraph
from tpuembed.checkpoint.partitioned import partitioned_rows
from tpuembed.checkpoint.table_keys import TableKeys, is_table, optimizer_slots
from tpuembed.tensor_bundle import Bundle

__all__ = ["graph_variables", "named_variables"]


def graph_variables(bundle: Bundle, graph: ObjectGraph) -> Iterator[TableKeys]:
    """The matrices of floats of a TensorFlow 2 checkpoint by object path, with what Keras optimizers keep for them.

    Of a SavedModel that Keras 3 exported, by the variables' names, where they are different.
    """
    by_name = keras_2_slots(bundle, graph)
    left_out, names = graph.optimizer_variables | archive_copies(bundle, graph), variable_names(bundle, graph)
    for number in (0, *graph.parents):
        key = graph.nodes[number].value_key
        if key is None or number in left_out or key not in bundle.entries or not is_table(bundle.entries[key]):
            continue
        slots = {**by_name.get(number, {}), **optimizer_slots(bundle, graph, number)}
        yield TableKeys(names.get(number) or graph.path(number), key, slots)


def named_variables(bundle: Bundle, strategy: str | None) -> Iterator[TableKeys]:
    """The matrices of floats of a TensorFlow 1 checkpoint by variable name.

    Args:
        bundle: the checkpoint.
        strategy: "mod" or "div", by which ids were dealt to the parts of partitioned variables; None for not stated.

    Raises:
        CheckpointFormatError: a variable is partitioned, and nothing was stated or its parts are uneven.
    """
    for name, entry in bundle.entries.items():
        if is_table(entry):
            yield TableKeys(name, name, rows=partitioned_rows(bundle, name, strategy))
