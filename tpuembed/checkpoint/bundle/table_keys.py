"""The tensors of a bundle that form a table and its slots, and the checks that they can."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Final

from tpuembed.checkpoint.bundle.object_graph import Node, ObjectGraph
from tpuembed.checkpoint.bundle.rows import DENSE, RowLayout
from tpuembed.checkpoint.types import TableInfo
from tpuembed.errors import CheckpointCorruptError, CheckpointFormatError
from tpuembed.formats.protobuf import MalformedError
from tpuembed.formats.tensor_bundle import Bundle, Entry
from tpuembed.formats.tensor_bundle.dtypes import numpy_dtype

__all__ = [
    "TableKeys",
    "is_table",
    "mid_level_nodes",
    "mid_level_variables",
    "optimizer_slots",
    "table_info",
]

_FLOATS: Final = frozenset({"float32", "float64", "float16", "bfloat16"})
_MID_LEVEL: Final = {"_feature_config", "_table_config"}
"""Children of TensorFlow's mid-level embedding classes on any hardware. Source: tensorflow/python/tpu/tpu_embedding_base.py."""
_PARAMETERS: Final = "parameters"


@dataclasses.dataclass(frozen=True)
class TableKeys:
    """A table: the bundle's keys of its rows and of its slots by name, and the order of rows in these tensors."""

    name: str
    key: str
    slots: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rows: RowLayout = DENSE


def is_table(entry: Entry) -> bool:
    """Returns True if a tensor can be a table: a matrix of floats."""
    return len(entry.shape) == 2 and entry.dtype in _FLOATS


def table_info(bundle: Bundle, table: TableKeys) -> TableInfo:
    """Return shape, dtype, slots and layout of a table."""
    entry = _entry(bundle, table, table.key)
    if not is_table(entry):
        raise CheckpointCorruptError.of(
            f"checkpoint {bundle.prefix}: table {table.name!r} should be a matrix of floats, but {table.key} is "
            f"{entry.dtype} {list(entry.shape)}"
        )
    for slot, key in table.slots.items():
        found = _entry(bundle, table, key)
        if found.shape != entry.shape or not is_table(found):
            raise CheckpointCorruptError.of(
                f"checkpoint {bundle.prefix}: table {table.name!r} is {list(entry.shape)}, but its slot {slot!r} "
                f"({key}) is {found.dtype} {list(found.shape)}"
            )
    try:
        rows, dim = table.rows.shape(entry)
    except MalformedError as error:
        raise CheckpointCorruptError.of(f"checkpoint {bundle.prefix}: table {table.name!r}: {error}") from None
    slots = tuple(sorted(table.slots))
    return TableInfo(table.name, rows, dim, numpy_dtype(entry.dtype), slots, table.rows.describe(entry))


def _entry(bundle: Bundle, table: TableKeys, key: str) -> Entry:
    if key not in bundle.entries:
        raise CheckpointCorruptError.of(
            f"checkpoint {bundle.prefix}: its object graph puts table {table.name!r} at {key}, which the index does "
            "not have"
        )
    return bundle.entries[key]


def optimizer_slots(bundle: Bundle, graph: ObjectGraph, variable: int) -> dict[str, str]:
    """Return slot name -> key of the slots that the checkpoint's optimizers keep for variable node `variable`."""
    found: dict[str, str] = {}
    for slot, nodes in graph.slots.get(variable, {}).items():
        keys = {graph.nodes[node].value_key for node in nodes}
        if len(keys) > 1:
            raise CheckpointFormatError(
                f"checkpoint {bundle.prefix}: two optimizers keep {slot!r} for {graph.nodes[variable].value_key}. "
                "Save again with one of them."
            )
        key = keys.pop()
        # A slot without a saved value is not in the checkpoint.
        if key is not None:
            found[slot] = key
    return found


def mid_level_nodes(graph: ObjectGraph) -> list[int]:
    """Return the numbers of the mid-level objects' nodes."""
    return [number for number, node in enumerate(graph.nodes) if set(node.children) >= _MID_LEVEL]


def mid_level_variables(bundle: Bundle, graph: ObjectGraph, node: Node) -> Iterator[TableKeys]:
    """Yield the tables of a mid-level object, or its stacks if it was saved from SparseCores, with their slots."""
    variables = graph.nodes[node.children["_variables"]] if "_variables" in node.children else None
    for name, child in variables.children.items() if variables is not None else ():
        roles = graph.nodes[child].children  # `parameters`, and each slot of its own optimizer
        keys = {role: graph.nodes[number].value_key for role, number in roles.items()}
        key = keys.pop(_PARAMETERS, None)
        slots = {slot: value for slot, value in keys.items() if value is not None}
        if key is None or len(slots) < len(keys):
            raise CheckpointCorruptError(
                f"checkpoint {bundle.prefix}: table {name!r} has no value for {_PARAMETERS!r} or a slot, only for "
                f"{', '.join(sorted(slots)) or 'nothing'}. Save it again."
            )
        yield TableKeys(name, key, {**optimizer_slots(bundle, graph, roles[_PARAMETERS]), **slots})
