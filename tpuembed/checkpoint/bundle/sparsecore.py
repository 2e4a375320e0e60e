"""Tables that `TPUEmbeddingV2` saved from SparseCores: stacked, sharded row by row, rotated and padded.

Source: tensorflow/python/tpu/tpu_embedding_v3.py, tpu_embedding_for_serving.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from tpuembed.checkpoint.bundle.object_graph import Node, ObjectGraph
from tpuembed.checkpoint.bundle.rows import RowLayout
from tpuembed.checkpoint.bundle.sparsecore_layouts import TableLayout, parse_layouts
from tpuembed.checkpoint.bundle.table_keys import TableKeys, mid_level_variables
from tpuembed.errors import CheckpointCorruptError, CheckpointFormatError
from tpuembed.formats.protobuf import MalformedError
from tpuembed.formats.tensor_bundle import Bundle, Entry

__all__ = ["LAYOUTS", "SparseCoreRows", "sparse_core_layouts", "sparse_core_tables"]

LAYOUTS: Final = "_sparse_core_table_layouts"
"""The child with the places of the tables in their stacks."""


class SparseCoreRows(RowLayout):
    """The rows of one table of a stack, at the places in its `layout`."""

    def __init__(self, layout: TableLayout) -> None:
        super().__init__("sparsecore", "", layout)
        self.layout = layout

    def shape(self, entry: Entry) -> tuple[int, int]:
        """Return the table's shape. Raises MalformedError unless the stack has the shape in the layout."""
        if entry.shape != self.layout.stack_shape:
            raise MalformedError(
                f"stack {self.layout.stack!r} is {list(entry.shape)}, but its SparseCore layout has "
                f"{list(self.layout.stack_shape)}"
            )
        return self.layout.shape

    def describe(self, entry: Entry) -> str:  # noqa: ARG002 - the layout says it
        """Return the stack, SparseCores and rotation as text."""
        return self.layout.words


def sparse_core_layouts(bundle: Bundle, graph: ObjectGraph, node: Node) -> Mapping[str, Sequence[TableLayout]]:
    """Return the layouts of a mid-level object's stacks, by name; empty if it was not saved from SparseCores.

    Raises:
        CheckpointCorruptError: the layouts are missing, do not parse, or contradict themselves.
    """
    if LAYOUTS not in node.children:
        return {}
    attributes = graph.nodes[node.children[LAYOUTS]].attributes.values()
    try:
        return parse_layouts(b"".join(_read(bundle, attribute.checkpoint_key) for attribute in attributes))
    except MalformedError as error:
        raise CheckpointCorruptError.of(f"checkpoint {bundle.prefix}: {LAYOUTS}: {error}") from None


def _read(bundle: Bundle, key: str) -> bytes:
    if key not in bundle.entries:
        raise CheckpointCorruptError.of(
            f"checkpoint {bundle.prefix}: its object graph puts {LAYOUTS} at {key}, which the index does not have"
        )
    return bundle.read_string(key)


def sparse_core_tables(
    bundle: Bundle, graph: ObjectGraph, node: Node, layouts: Mapping[str, Sequence[TableLayout]]
) -> Iterator[TableKeys]:
    """Yield the tables of a mid-level object whose stacks have these `layouts`.

    Raises:
        CheckpointFormatError: the layouts are older than the variables.
        CheckpointCorruptError: a stack has no layout.
    """
    if any(_is_stale(graph, node, stack) for stack in layouts):
        raise CheckpointFormatError(
            f"checkpoint {bundle.prefix}: its SparseCore layouts are stale. (It was saved again on CPU after a restore "
            "from SparseCores. TensorFlow cannot restore it either.) Use the checkpoint it was restored from."
        )
    for stack in mid_level_variables(bundle, graph, node):
        if stack.name not in layouts:
            raise CheckpointCorruptError.of(
                f"checkpoint {bundle.prefix}: has a stack {stack.name!r}, but its SparseCore layouts only have "
                f"{', '.join(sorted(layouts))}"
            )
        for layout in layouts[stack.name]:
            yield TableKeys(layout.table, stack.key, stack.slots, SparseCoreRows(layout))


def _is_stale(graph: ObjectGraph, node: Node, stack: str) -> bool:
    """Returns True unless a stack is one variable, which TPUEmbeddingV2 holds both as a child and among its
    `_variables`.

    TPUEmbeddingForServing keeps restored layouts. Its stacks are then scalars, and its variables are tables in order.
    """
    variables = graph.nodes[node.children["_variables"]].children if "_variables" in node.children else {}
    if stack not in variables or stack not in node.children:
        return True
    return graph.nodes[variables[stack]].children.get("parameters") != node.children[stack]
