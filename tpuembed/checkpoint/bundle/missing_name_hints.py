"""Hints for the error message about an unknown table or slot: other things in the checkpoint that the name may mean."""

from collections.abc import Mapping
from typing import Final

from tpuembed.checkpoint.bundle.keras_graph import may_lack_tables
from tpuembed.checkpoint.bundle.object_graph import ObjectGraph
from tpuembed.checkpoint.bundle.table_keys import TableKeys
from tpuembed.errors import first_few
from tpuembed.protobuf import MalformedError
from tpuembed.tensor_bundle import Bundle

__all__ = ["about_missing_slot", "about_missing_table"]

_SHOWN: Final = 4
_MAX_NAME: Final = 100


def about_missing_table(bundle: Bundle, graph: ObjectGraph | None, tables: Mapping[str, TableKeys], name: str) -> str:
    """Return a clause that follows "has no table `name`"; empty where there is nothing to say."""
    for table in tables.values():
        for slot, key in table.slots.items():
            if key == name:
                return f" (it is slot {slot!r} of table {table.name!r})"
    if graph is None:
        return ""
    for number in sorted(graph.optimizer_variables & graph.parents.keys()):
        node = graph.nodes[number]
        if name in {node.value_key, node.full_name} or name == _path(graph, number):
            return f" (it belongs to an optimizer: {node.full_name[:_MAX_NAME]!r} at {node.value_key})"
    if may_lack_tables(bundle, graph):
        return (
            " (TensorFlow saves a keras_rs.layers.DistributedEmbedding only in the optimizer of a compiled and "
            "trained model. model.save_weights('model.weights.h5') saves all of it)"
        )
    return ""


def _path(graph: ObjectGraph, number: int) -> str | None:
    try:
        return graph.path(number)
    except MalformedError:  # far too deep: there is no table
        return None


def about_missing_slot(bundle: Bundle, graph: ObjectGraph | None, tables: Mapping[str, TableKeys], table: str) -> str:
    """Return a clause that follows "table `table` has no slot ...": optimizer variables of its shape without a proven
    table.
    """
    if graph is None:
        return ""
    taken = {key for keys in tables.values() for key in keys.slots.values()}
    kept = {graph.nodes[number].value_key: graph.nodes[number].full_name for number in graph.optimizer_variables}
    shape = bundle.entries[tables[table].key].shape
    alike = sorted(
        f"{name[:_MAX_NAME]!r} at {key}"
        for key, name in kept.items()
        if key is not None and key not in taken and key in bundle.entries and bundle.entries[key].shape == shape
    )
    if not alike:
        return ""
    shown = first_few(alike, _SHOWN)
    return f" (optimizers have {shown}, but it cannot be proven that it is that slot of this table)"
