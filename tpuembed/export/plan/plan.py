"""The plan of an export as data: which rows are written to which file, in which format.

Tables of one width and storage type are stacked into one variable, so that one gather serves all their features. Each
stack is a data file of its own and starts at the file's first byte. So the files of a TensorFlow bundle can also be
mapped in place: `ImmutableConst` maps whole files only.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from tpuembed.export.storage.formats import RowFormat
from tpuembed.formats.dtypes import numpy_dtype
from tpuembed.manifest import STORAGES

__all__ = [
    "ArrayPlan",
    "ExportPlan",
    "Placement",
    "ShardTask",
    "StackPlan",
    "format_bytes",
]


_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def format_bytes(count: int) -> str:
    """Format `count` bytes in decimal units with three significant digits: 999 B, 1.5 kB, 10 TB."""
    size = float(count)
    for unit in _UNITS:
        if size < 999.5 or unit == _UNITS[-1]:
            break
        size /= 1000
    return f"{count} B" if unit == "B" else f"{size:.3g} {unit}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """The place of a table's rows in its stack: rows [row_offset, row_offset + rows) are its rows.

    `quantization`: the fields of the QuantizationConfig to apply to its values, or None.
    """

    table: str
    rows: int
    row_offset: int
    source_dtype: str
    quantization: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayPlan:
    """An array of the graph whose data is a file.

    Attributes:
        name: name of the variable; its file is `name`.data until it is a part of the version.
        dtype: by numpy's name.
        shape: of the array.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def file(self) -> str:
        """Return the name of the data file while it is written."""
        return f"{self.name}.data"

    @property
    def size(self) -> int:
        """Return the bytes of the data file."""
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackPlan:
    """One stacked variable.

    Attributes:
        name: name of the variable; its file is `name`.data while it is streamed.
        dim: width of its tables, in elements of the source.
        storage: key of STORAGES.
        rows: number of rows of all its tables together.
        size: size of its file, in bytes.
        tables: in row order, sorted by name; exactly one if the model reads it whole.
        overlay_rows: how many rows replace rows of the base; None if its own file has all rows.
    """

    name: str
    dim: int
    storage: str
    rows: int
    size: int
    tables: tuple[Placement, ...]
    overlay_rows: int | None = None

    @property
    def file(self) -> str:
        """Return the name of the stack's data file while it is streamed."""
        return f"{self.name}.data"

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one stored row."""
        return STORAGES[self.storage].row_bytes(self.dim)

    @property
    def arrays(self) -> tuple[ArrayPlan, ...]:
        """Return the arrays of the graph that hold its rows.

        With an overlay: the base's rows, the rows that replace them, and the words to find them; see OverlayEntry.
        """
        codec, columns = STORAGES[self.storage], STORAGES[self.storage].columns(self.dim)
        own = ArrayPlan(name=self.name, dtype=codec.dtype.name, shape=(self.rows, columns))
        if self.overlay_rows is None:
            return (own,)
        return (
            own,
            dataclasses.replace(own, name=f"{self.name}_rows", shape=(self.overlay_rows, columns)),
            ArrayPlan(name=f"{self.name}_words", dtype="int64", shape=(-(-self.rows // 32),)),
        )

    def row_format(self, table: Placement) -> RowFormat:
        """Return the form of the rows of one of its tables."""
        return RowFormat(table.source_dtype, self.storage, self.dim, table.quantization is not None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardTask:
    """A task to write rows [start, stop) of one table at `file_offset` of `file`, in chunks of `chunk_rows`.

    Shards are numbered in the order of the bytes they write. Every field is a JSON value.

    Attributes:
        reader_bytes: the most bytes that the checkpoint's reader holds beside a chunk.
        require_finite: fail at a NaN or an infinity in the source.
        written_crc32c: checksum of the shard's bytes if an earlier run has recorded that they are in the file.
    """

    index: int
    stack: str
    table: str
    start: int
    stop: int
    dim: int
    source_dtype: str
    storage: str
    file: str
    file_offset: int
    chunk_rows: int
    quantization: Mapping[str, Any] | None = None
    reader_bytes: int = 0
    require_finite: bool = False
    written_crc32c: int | None = None

    @property
    def row_format(self) -> RowFormat:
        """Return the form of its rows."""
        return RowFormat(self.source_dtype, self.storage, self.dim, self.quantization is not None)

    @property
    def buffer_bytes(self) -> int:
        """Return the most bytes that a worker holds for this shard: the chunk, the conversion buffers, and the
        reader's.
        """
        return self.row_format.chunk_bytes(self.chunk_rows) + self.reader_bytes

    @property
    def size(self) -> int:
        """Return the bytes that the shard writes."""
        return (self.stop - self.start) * self.row_format.stored_bytes

    @property
    def source_size(self) -> int:
        """Return the bytes that the shard reads."""
        return (self.stop - self.start) * self.row_format.source_bytes

    def __str__(self) -> str:
        """Return the name of the shard in error messages."""
        return f"shard {self.index} (table {self.table!r}, rows {self.start} to {self.stop})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportPlan:
    """Everything that streaming and assembling need to know before they start.

    Attributes:
        layout: one of LAYOUTS.
        workers: processes that stream; never more than there are shards.
        max_memory_bytes: bound on all their buffers together.
        stacks: sorted by storage and width.
        shards: cover every row to export exactly once.
        require_finite: fail at a NaN or an infinity in a table or a dense weight.
        base: in the result of `plan_saved_model`: the version that the export will be an overlay of, unless too many rows
            differ. None for a full version.
    """

    layout: str
    workers: int
    max_memory_bytes: int
    stacks: tuple[StackPlan, ...]
    shards: tuple[ShardTask, ...]
    require_finite: bool = False
    base: int | None = None

    @property
    def table_bytes(self) -> int:
        """Return the bytes of table data that will be written."""
        return sum(stack.size for stack in self.stacks)

    @property
    def buffer_bytes(self) -> int:
        """Return the most bytes of buffers that all workers hold together."""
        return self.workers * max(task.buffer_bytes for task in self.shards)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return {**dataclasses.asdict(self), "table_bytes": self.table_bytes, "buffer_bytes": self.buffer_bytes}

    def describe(self) -> str:
        """Return the plan as lines of text: a summary, then one line per stack and table."""
        return "\n".join(_description(self))


def _description(plan: ExportPlan) -> Iterator[str]:
    tables = sum(len(stack.tables) for stack in plan.stacks)
    yield (
        f"{_count(tables, 'table')} in {_count(len(plan.stacks), 'stack')}, {format_bytes(plan.table_bytes)}, layout "
        f"{plan.layout}: {_count(len(plan.shards), 'shard')} by {_count(plan.workers, 'worker')}, "
        f"{format_bytes(plan.buffer_bytes)} of buffers (at most {format_bytes(plan.max_memory_bytes)})"
    )
    if plan.base is not None:
        yield f"an overlay of version {plan.base}: only rows that differ are written, and the figures are of a full version"
    shards = Counter(task.table for task in plan.shards)
    for stack in plan.stacks:
        yield f"  {stack.name}: {stack.storage} [{stack.rows:,}, {stack.dim}], {format_bytes(stack.size)}"
        for table in stack.tables:
            yield f"    {table.table}: {_placed(stack, table, shards[table.table])}"


def _placed(stack: StackPlan, table: Placement, shards: int) -> str:
    first = table.row_offset * stack.row_bytes
    last = first + table.rows * stack.row_bytes - 1
    cast = "" if table.source_dtype == stack.storage else f", from {table.source_dtype}"
    levels = "" if table.quantization is None else f", quantized to {table.quantization['num_buckets']} values"
    return (
        f"{table.rows:,} rows from row {table.row_offset:,}{cast}{levels}; bytes {first:,} to {last:,} in "
        f"{_count(shards, 'shard')}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
