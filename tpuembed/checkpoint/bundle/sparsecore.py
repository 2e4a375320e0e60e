"""Tables that `TPUEmbeddingV2` saved from SparseCores: stacked, sharded row by row, rotated and padded.

The place of a table in its stack is recorded in the checkpoint, and never computed again.

Source: tensorflow/core/tpu/kernels/sparse_core_layout.proto; unshuffle_from_sc_to_cpu in
tensorflow/python/tpu/tpu_embedding_v3_utils.py; tpu_embedding_v3.py, tpu_embedding_for_serving.py.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Self

from tpuembed.checkpoint.bundle.object_graph import Node, ObjectGraph
from tpuembed.checkpoint.bundle.rows import ModSharded, RowLayout
from tpuembed.checkpoint.bundle.table_keys import TableKeys, mid_level_variables
from tpuembed.errors import CheckpointCorruptError, CheckpointFormatError
from tpuembed.formats.protobuf import MalformedError, Message
from tpuembed.formats.tensor_bundle import Bundle, Entry

__all__ = ["LAYOUTS", "SparseCoreRows", "TableLayout", "check_stack", "sparse_core_layouts", "sparse_core_tables"]

LAYOUTS: Final = "_sparse_core_table_layouts"
"""The child with the places of the tables in their stacks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableLayout:
    """A table in a stack, of which every SparseCore keeps one shard.

    Row i is in shard `(i % num_sparse_cores + rotation) % num_sparse_cores`, where the table's rows begin at `offset`.

    Attributes:
        table: its name.
        stack: the name of the variable that holds it, perhaps with others; its own name if it is alone.
        num_sparse_cores: of all devices.
        num_partitions: devices.
        shard_rows: rows of the stack in one SparseCore (`total_rows_per_sparse_core_shard`).
        shape: [rows, dim] of the table (`unsharded_shape`).
        padded_shape: the rows and columns it takes in the stack (`unsharded_padded_shape`).
        offset: its first row in every shard (`sparse_core_shard_row_offset`).
        rotation: the shard that holds row 0 (`sparse_core_shard_rotation`).
    """

    table: str
    stack: str
    num_sparse_cores: int
    num_partitions: int
    shard_rows: int
    shape: tuple[int, int]
    padded_shape: tuple[int, int]
    offset: int
    rotation: int

    def __post_init__(self) -> None:
        rows, dim = self.padded_shape
        cores = self.num_sparse_cores
        # Each condition, and the words for its violation. The first ones keep the next ones from a division by zero.
        self._check(
            (bool(self.table and self.stack), "no name, or its stack has none"),
            (cores >= 1, f"{cores} SparseCores"),
            (self.num_partitions >= 1, f"{self.num_partitions} partitions"),
            (1 <= self.shape[0] <= rows, f"{self.shape[0]} rows in {rows} padded ones"),
            (1 <= self.shape[1] <= dim, f"{self.shape[1]} columns in {dim} padded ones"),
        )
        last = self.offset + self.run_rows
        self._check(
            (cores % self.num_partitions == 0, f"{cores} SparseCores on {self.num_partitions} partitions"),
            (rows % cores == 0, f"{rows} padded rows on {cores} SparseCores"),
            (0 <= self.rotation < cores, f"rotation {self.rotation} of {cores} SparseCores"),
            (
                0 <= self.offset <= last <= self.shard_rows,
                f"rows [{self.offset}, {last}) in shards of {self.shard_rows}",
            ),
        )

    def _check(self, *checks: tuple[bool, str]) -> None:
        for holds, words in checks:
            if not holds:
                raise MalformedError(f"the layout of table {self.table!r} has {words}")

    @classmethod
    def parse(cls, message: Message) -> Self:
        """Parse a SparseCoreTableLayout. Raises MalformedError if it contradicts itself."""
        return cls(
            table=message.text(1),
            stack=message.text(2),
            num_sparse_cores=message.signed(3),
            num_partitions=message.signed(4),
            shard_rows=message.signed(5),
            shape=_shape(message, 6),
            padded_shape=_shape(message, 7),
            offset=message.signed(8),
            rotation=message.signed(9),
        )

    @property
    def run_rows(self) -> int:
        """Return the rows that the table takes in one shard."""
        return self.padded_shape[0] // self.num_sparse_cores

    @property
    def stack_shape(self) -> tuple[int, int]:
        """Return [rows, columns] of the stack: the shards one after another."""
        return self.num_sparse_cores * self.shard_rows, self.padded_shape[1]

    @property
    def rows(self) -> ModSharded:
        """Return where the table's rows are in the stack."""
        cores, rotation = self.num_sparse_cores, self.rotation
        return ModSharded(
            cores, self.padded_shape[1], lambda parts: (parts + rotation) % cores * self.shard_rows + self.offset
        )

    @property
    def words(self) -> str:
        """Return the stack, SparseCores and rotation as text."""
        words = [f"stack {self.stack}"] if self.stack != self.table else []
        words.append(f"{self.num_sparse_cores} SparseCore{'s' if self.num_sparse_cores > 1 else ''}")
        words += [f"rotation {self.rotation}"] if self.rotation else []
        return ", ".join(words)


def _shape(message: Message, number: int) -> tuple[int, int]:
    sizes = message.signed_integers(number)
    if len(sizes) != 2:
        raise MalformedError(f"the layout of table {message.text(1)!r} has a shape of {len(sizes)} dimensions")
    return sizes[0], sizes[1]


def parse_layouts(data: bytes) -> dict[str, list[TableLayout]]:
    """Return the layouts in a serialized SparseCoreTableLayouts, by stack.

    Raises:
        MalformedError: they do not parse, or contradict themselves or each other.
    """
    stacks: dict[str, list[TableLayout]] = {}
    tables = set()
    for message in Message(data).messages(1):
        layout = TableLayout.parse(message)
        if layout.table in tables:
            raise MalformedError(f"table {layout.table!r} has two layouts")
        tables.add(layout.table)
        stacks.setdefault(layout.stack, []).append(layout)
    for stack, layouts in stacks.items():
        check_stack(stack, layouts)
        # Named after its tables in order, so that none is missing or misplaced.
        # Source: SparseCoreLayoutStacker::GetLayouts in tensorflow/core/tpu/kernels/sparse_core_layout.cc.
        names = "_".join(layout.table for layout in sorted(layouts, key=lambda layout: layout.offset))
        if stack != names:
            raise MalformedError(
                f"stack {stack!r} should be named after its tables, which are {names!r} in the order of their layouts"
            )
    return stacks


def check_stack(stack: str, layouts: Sequence[TableLayout]) -> None:
    """Raise MalformedError unless the tables of a stack agree on its shape and do not overlap."""
    ordered = sorted(layouts, key=lambda layout: layout.offset)
    for before, layout in itertools.pairwise(ordered):
        shape, other_shape = ((item.num_sparse_cores, *item.stack_shape) for item in (layout, before))
        if shape != other_shape:
            raise MalformedError(
                f"stack {stack!r} has (SparseCores, rows, columns) {shape} for table {layout.table!r}, but "
                f"{other_shape} for {before.table!r}"
            )
        if layout.offset < before.offset + before.run_rows:
            raise MalformedError(f"tables {before.table!r} and {layout.table!r} overlap in stack {stack!r}")


class SparseCoreRows(RowLayout):
    """The rows of one table of a stack, at the places in its `layout`."""

    def __init__(self, layout: TableLayout) -> None:
        super().__init__("sparsecore", "", layout.rows)
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
    """Return the layouts of a mid-level object's stacks, by name; empty if it was not saved from SparseCores."""
    if LAYOUTS not in node.children:
        return {}
    attributes = graph.nodes[node.children[LAYOUTS]].attributes.values()
    data = b""
    for attribute in attributes:
        if (key := attribute.checkpoint_key) not in bundle.entries:
            raise CheckpointCorruptError.of(
                f"checkpoint {bundle.prefix}: its object graph puts {LAYOUTS} at {key}, which the index does not have"
            )
        data += bundle.read_string(key)
    try:
        return parse_layouts(data)
    except MalformedError as error:
        raise CheckpointCorruptError.of(f"checkpoint {bundle.prefix}: {LAYOUTS}: {error}") from None


def sparse_core_tables(
    bundle: Bundle, graph: ObjectGraph, node: Node, layouts: Mapping[str, Sequence[TableLayout]]
) -> Iterator[TableKeys]:
    """Yield the tables of a mid-level object whose stacks have these `layouts`."""
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
