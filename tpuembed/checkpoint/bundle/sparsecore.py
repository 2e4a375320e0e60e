"""Tables that `TPUEmbeddingV2` saved from SparseCores: stacked, sharded row by row, rotated and padded.

Source: tensorflow/python/tpu/tpu_embedding_v3.py, tpu_embedding_for_serving.py.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Final

from tpuembed.checkpoint.bundle.mid_level_variables import mid_level_variables
from tpuembed.checkpoint.bundle.mod_sharded import Interleaved
from tpuembed.checkpoint.bundle.object_graph import Node, ObjectGraph
from tpuembed.checkpoint.bundle.rows import dealt_bytes, read_dealt_rows
from tpuembed.checkpoint.bundle.sparsecore_layouts import TableLayout, parse_layouts
from tpuembed.checkpoint.bundle.table_keys import TableKeys
from tpuembed.checkpoint.types import Array
from tpuembed.errors import CheckpointCorruptError, CheckpointFormatError
from tpuembed.protobuf import MalformedError
from tpuembed.tensor_bundle import Bundle, Entry

__all__ = ["LAYOUTS", "SparseCoreRows", "sparse_core_layouts", "sparse_core_tables"]

LAYOUTS: Final = "_sparse_core_table_layouts"
"""The child that says where in their stacks the tables lie."""


@dataclasses.dataclass(frozen=True)
class SparseCoreRows:
    """One table of a stack."""

    layout: TableLayout
    format: ClassVar[str] = "sparsecore"

    def shape(self, entry: Entry) -> tuple[int, int]:
        """The table's, once the stack's is what the layout says."""
        if entry.shape != self.layout.stack_shape:
            raise MalformedError(
                f"stack {self.layout.stack!r} is {list(entry.shape)} and its SparseCore layout says "
                f"{list(self.layout.stack_shape)}"
            )
        return self.layout.shape

    def describe(self, _: Entry, /) -> str:
        """Stack, SparseCores, rotation."""
        return self.layout.words

    def read_into(self, bundle: Bundle, key: str, start: int, out: Array) -> None:
        """One run of bytes per SparseCore."""
        read_dealt_rows(self.layout, bundle, key, start, out)

    def checksum(self, entry: Entry) -> None:
        """The stack's checksums are over rows in another order."""

    @property
    def dealt(self) -> Interleaved:
        """To the SparseCores."""
        return self.layout

    def buffer_bytes(self, bundle: Bundle, entry: Entry, rows: int) -> int:
        """A block of the runs of some SparseCores."""
        return dealt_bytes(self.layout, bundle, entry, rows, self.layout.shape[1])


def sparse_core_layouts(bundle: Bundle, graph: ObjectGraph, node: Node) -> Mapping[str, Sequence[TableLayout]]:
    """What a mid-level object says of its stacks, by name; empty for one that was not saved from SparseCores.

    Raises:
        CheckpointCorruptError: it is missing, does not parse, or contradicts itself.
    """
    if LAYOUTS not in node.children:
        return {}
    attributes = graph.nodes[node.children[LAYOUTS]].attributes.values()
    try:
        return parse_layouts(b"".join(_read(bundle, attribute.checkpoint_key) for attribute in attributes))
    except MalformedError as error:
        raise CheckpointCorruptError(
            f"checkpoint {bundle.prefix}: {LAYOUTS}: {error}; restore it from another copy"
        ) from None


def _read(bundle: Bundle, key: str) -> bytes:
    if key not in bundle.entries:
        raise CheckpointCorruptError(
            f"checkpoint {bundle.prefix}: its object graph puts {LAYOUTS} at {key}, which the index does not have; "
            "restore it from another copy"
        )
    return bundle.read_string(key)


def sparse_core_tables(
    bundle: Bundle, graph: ObjectGraph, node: Node, layouts: Mapping[str, Sequence[TableLayout]]
) -> Iterator[TableKeys]:
    """The tables of a mid-level object whose stacks lie as `layouts` say.

    Raises:
        CheckpointFormatError: the layouts are older than the variables.
        CheckpointCorruptError: a stack has no layout.
    """
    if any(_is_stale(graph, node, stack) for stack in layouts):
        raise CheckpointFormatError(
            f"checkpoint {bundle.prefix}: its SparseCore layouts are stale (saved again on CPU after a restore from "
            "SparseCores, which TensorFlow cannot restore either); use the checkpoint it was restored from"
        )
    for stack in mid_level_variables(bundle, graph, node):
        if stack.name not in layouts:
            raise CheckpointCorruptError(
                f"checkpoint {bundle.prefix}: holds a stack {stack.name!r}, and its SparseCore layouts only know "
                f"{', '.join(sorted(layouts))}; restore it from another copy"
            )
        for layout in layouts[stack.name]:
            yield TableKeys(layout.table, stack.key, stack.slots, SparseCoreRows(layout))


def _is_stale(graph: ObjectGraph, node: Node, stack: str) -> bool:
    """Whether a stack is not one variable, which TPUEmbeddingV2 holds both as a child and among its `_variables`.

    TPUEmbeddingForServing keeps restored layouts; its stacks are then scalars, and its variables are tables in order.
    """
    variables = graph.nodes[node.children["_variables"]].children if "_variables" in node.children else {}
    if stack not in variables or stack not in node.children:
        return True
    return graph.nodes[variables[stack]].children.get("parameters") != node.children[stack]
