"""The place of a table on SparseCores inside its stack, as recorded in the checkpoint; never computed again.

Source: tensorflow/core/tpu/kernels/sparse_core_layout.proto; unshuffle_from_sc_to_cpu in
tensorflow/python/tpu/tpu_embedding_v3_utils.py.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Self

from tpuembed.checkpoint.types import Array
from tpuembed.formats.protobuf import MalformedError, Message

__all__ = ["TableLayout", "check_stack", "parse_layouts"]


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
        # Each condition, and the words for its violation.
        checks = (
            (bool(self.table and self.stack), "no name, or its stack has none"),
            (self.num_sparse_cores >= 1, f"{self.num_sparse_cores} SparseCores"),
            (self.num_partitions >= 1, f"{self.num_partitions} partitions"),
            (1 <= self.shape[0] <= rows, f"{self.shape[0]} rows in {rows} padded ones"),
            (1 <= self.shape[1] <= dim, f"{self.shape[1]} columns in {dim} padded ones"),
        )
        _check(self, checks)
        _check(self, self._shard_checks())

    def _shard_checks(self) -> Sequence[tuple[bool, str]]:
        cores = self.num_sparse_cores
        return (
            (cores % self.num_partitions == 0, f"{cores} SparseCores on {self.num_partitions} partitions"),
            (self.padded_shape[0] % cores == 0, f"{self.padded_shape[0]} padded rows on {cores} SparseCores"),
            (0 <= self.rotation < cores, f"rotation {self.rotation} of {cores} SparseCores"),
            (
                0 <= self.offset <= self.shard_rows - self.run_rows,
                f"rows [{self.offset}, {self.offset + self.run_rows}) in shards of {self.shard_rows}",
            ),
        )

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
    def count(self) -> int:
        """Return the number of shards; see `rows.ModSharded`."""
        return self.num_sparse_cores

    @property
    def stored_dim(self) -> int:
        """Return the columns of the stack."""
        return self.padded_shape[1]

    @property
    def words(self) -> str:
        """Return the stack, SparseCores and rotation as text."""
        words = [f"stack {self.stack}"] if self.stack != self.table else []
        words.append(f"{self.num_sparse_cores} SparseCore{'s' if self.num_sparse_cores > 1 else ''}")
        words += [f"rotation {self.rotation}"] if self.rotation else []
        return ", ".join(words)

    def first_rows(self, parts: Array) -> Array:
        """Return the stack's rows that hold the table rows `parts`, which are among the first `num_sparse_cores`."""
        return (parts + self.rotation) % self.num_sparse_cores * self.shard_rows + self.offset


def _check(layout: TableLayout, checks: Sequence[tuple[bool, str]]) -> None:
    for holds, words in checks:
        if not holds:
            raise MalformedError(f"the layout of table {layout.table!r} has {words}")


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
        _check_stack_name(stack, layouts)
    return stacks


def _check_stack_name(stack: str, layouts: Sequence[TableLayout]) -> None:
    """Raise MalformedError unless the stack is named after its tables in order, so that none is missing or misplaced.

    Source: SparseCoreLayoutStacker::GetLayouts in tensorflow/core/tpu/kernels/sparse_core_layout.cc.
    """
    names = "_".join(layout.table for layout in sorted(layouts, key=lambda layout: layout.offset))
    if stack != names:
        raise MalformedError(
            f"stack {stack!r} should be named after its tables, which are {names!r} in the order of their layouts"
        )


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
