"""Which bytes an export writes, where, and in which pieces: a plan is data, made without touching a file.

Tables of one width and storage type are stacked into one variable, because one gather then serves all their
features. Each stack is a data file of its own and starts at its first byte: the bytes that a TensorFlow bundle loads
can so be mapped as they are too (`ImmutableConst` maps whole files only).
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from tpuembed.config import QuantizationConfig
from tpuembed.config.checks import check_choice, check_count
from tpuembed.errors import ConfigError
from tpuembed.export.plan.row_ranges import RowRanges, check_row_ranges
from tpuembed.export.storage.choice import Storage, storage_by_table
from tpuembed.export.storage.formats import SOURCE_DTYPES, STORAGES
from tpuembed.export.stream.chunk import chunk_bytes, most_rows, rows_within
from tpuembed.manifest import LAYOUTS

if TYPE_CHECKING:  # a worker reads tasks, not tables
    from tpuembed.checkpoint import TableInfo

__all__ = [
    "BYTES_PER_SECOND_AND_WORKER",
    "DEFAULT_MAX_MEMORY_BYTES",
    "ExportPlan",
    "Placement",
    "ShardTask",
    "StackPlan",
    "plan_export",
]

DEFAULT_MAX_MEMORY_BYTES = 512 << 20

# Chunks that stay in a core's cache between the read, the checksum and the write.
_CHUNK_BYTES = 4 << 20
# A shard is the unit of balancing, of retrying and of resuming: less than a second of work, and never so many that a plan
# grows with the data. It is the same for any number of workers, so that an export is resumed with fewer of them.
_SHARD_BYTES = 64 << 20
_MAX_SHARDS = 16_384

BYTES_PER_SECOND_AND_WORKER = 500 * 10**6
"""What plans estimate by, in bytes read or written, whichever is more: a processor of 2025 and a disk that keeps up."""

ReadBuffers = Callable[[str, int], int]
"""The most bytes that a reader of a table, by its name, holds beside so many rows at a time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """A table's rows in its stack: [row_offset, row_offset + rows) are its rows from `first_row` on.

    `quantization`: the fields of the QuantizationConfig that its values are passed through, or None.
    """

    table: str
    rows: int
    row_offset: int
    source_dtype: str
    quantization: Mapping[str, Any] | None = None
    first_row: int = 0
    is_whole: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackPlan:
    """One stacked variable.

    Attributes:
        name: of the variable, and with `.data` of its file while it is streamed.
        dim: width of its tables, in elements of the source.
        storage: key of STORAGES.
        rows: of all its tables together.
        size: of its file, in bytes.
        tables: in row order, sorted by name; one, where it is read whole.
    """

    name: str
    dim: int
    storage: str
    rows: int
    size: int
    tables: tuple[Placement, ...]

    @property
    def file(self) -> str:
        """Name of the data file that holds it while it is streamed."""
        return f"{self.name}.data"

    @property
    def row_bytes(self) -> int:
        """Bytes of one stored row."""
        return STORAGES[self.storage].row_bytes(self.dim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardTask:
    """Rows [start, stop) of one table, written at `file_offset` of `file` in chunks of `chunk_rows`.

    Shards are numbered in the order of the bytes they write. Everything in it is a JSON value.

    Attributes:
        reader_bytes: the most that the checkpoint's reader holds beside a chunk.
        written_crc32c: of its bytes, where an earlier export has recorded that they are in the file.
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
    written_crc32c: int | None = None

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk as it is stored."""
        return self.chunk_rows * STORAGES[self.storage].row_bytes(self.dim)

    @property
    def buffer_bytes(self) -> int:
        """The most that a worker holds for it: the chunk, what makes it what is stored, and the reader's."""
        is_quantized = self.quantization is not None
        own = chunk_bytes(self.source_dtype, self.storage, is_quantized, self.dim, self.chunk_rows)
        return own + self.reader_bytes

    @property
    def size(self) -> int:
        """Bytes it writes."""
        return (self.stop - self.start) * STORAGES[self.storage].row_bytes(self.dim)

    @property
    def source_size(self) -> int:
        """Bytes it reads."""
        return (self.stop - self.start) * self.dim * SOURCE_DTYPES[self.source_dtype].itemsize

    def __str__(self) -> str:
        """As error messages name it."""
        return f"shard {self.index} (table {self.table!r}, rows {self.start} to {self.stop})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportPlan:
    """Everything that streaming and assembling need to know, and nothing that they find out.

    Attributes:
        layout: one of LAYOUTS.
        workers: processes that stream; never more than there are shards.
        max_memory_bytes: bound on all their buffers together.
        stacks: sorted by storage and width.
        shards: every row to export of every table exactly once.
    """

    layout: str
    workers: int
    max_memory_bytes: int
    stacks: tuple[StackPlan, ...]
    shards: tuple[ShardTask, ...]

    @property
    def table_bytes(self) -> int:
        """Bytes of table data that will be written."""
        return sum(stack.size for stack in self.stacks)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of buffers that all workers hold at most."""
        return self.workers * max(task.buffer_bytes for task in self.shards)

    @property
    def estimated_seconds(self) -> float:
        """Of streaming, at BYTES_PER_SECOND_AND_WORKER: a stated rate, measured nowhere near."""
        moved = sum(max(task.size, task.source_size) for task in self.shards)
        return moved / (self.workers * BYTES_PER_SECOND_AND_WORKER)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON values."""
        estimate = {
            "estimated_seconds": round(self.estimated_seconds, 3),
            "stated_bytes_per_second": self.workers * BYTES_PER_SECOND_AND_WORKER,
        }
        counts = {"table_bytes": self.table_bytes, "buffer_bytes": self.buffer_bytes}
        return {**dataclasses.asdict(self), **counts, **estimate}

    def describe(self) -> str:
        """The plan in lines for people: a summary, then one per stack and table."""
        from tpuembed.export.plan.text import describe

        return describe(self)


def plan_export(
    tables: Sequence["TableInfo"],
    *,
    storage: Storage = "float32",
    quantization: Mapping[str, QuantizationConfig] | None = None,
    row_ranges: RowRanges | None = None,
    whole: Collection[str] = (),
    layout: str = "variables",
    max_memory_bytes: int = DEFAULT_MAX_MEMORY_BYTES,
    workers: int = 1,
    may_use_fewer: bool = False,
    read_buffers: ReadBuffers = lambda table, rows: 0,  # noqa: ARG005
) -> ExportPlan:
    """Plan the export of `tables`, in the order of their names whatever order they come in.

    Args:
        tables: what the checkpoint says about the tables to export.
        storage: key of STORAGES for all of them, or one by table; see `storage_by_table`.
        quantization: by table, of those whose activations were quantized in training.
        row_ranges: table -> (start, stop), of tables of which only these rows are exported.
        whole: tables that the graph reads whole. Each is a stack of its own, as a slice of a stack would be a copy.
        layout: one of LAYOUTS.
        max_memory_bytes: bound on the buffers of all workers together.
        workers: processes that may stream at once.
        may_use_fewer: take as many of them as the memory is enough for.
        read_buffers: what the checkpoint's reader holds.

    Raises:
        ConfigError: no table, a table twice or of a shape or dtype that cannot be exported, an unknown storage or
            layout, fewer than one worker, or a budget that does not hold one row, and the reader's buffers, for every worker.
        UnknownTableError: `storage` or `row_ranges` name another table.
        RowRangeError: rows outside of a table.
    """
    _check_options(layout, max_memory_bytes, workers)
    _check_tables(tables)
    ranges = check_row_ranges(row_ranges or {}, tables)
    storages = storage_by_table(storage, [table.name for table in tables])
    _check_whole(whole, storages, quantization or {}, ranges, tables)
    stacks = _stack_tables(tables, storages, quantization or {}, ranges, whole)
    shard_bytes = max(_SHARD_BYTES, -(-sum(stack.size for stack in stacks) // _MAX_SHARDS))
    pieces = [piece for stack in stacks for piece in _split(stack, shard_bytes)]
    workers = min(workers, len(pieces))
    if may_use_fewer:
        workers = max(1, min(workers, max_memory_bytes // max(_least_bytes(stacks, read_buffers))))
    chunks = _chunks(stacks, max_memory_bytes // workers, read_buffers)
    shards = tuple(_task(index, *piece, chunks[piece[1].table]) for index, piece in enumerate(pieces))
    plan = ExportPlan(
        layout=layout, workers=workers, max_memory_bytes=max_memory_bytes, stacks=tuple(stacks), shards=shards
    )
    _check_budget(plan)
    return plan


def _check_options(layout: str, max_memory_bytes: int, workers: int) -> None:
    check_choice("layout", layout, LAYOUTS)
    check_count("workers", workers)
    check_count("max_memory_bytes", max_memory_bytes)


def _check_tables(tables: Sequence["TableInfo"]) -> None:
    if not tables:
        raise ConfigError("no table to export: name at least one table of the checkpoint")
    seen: set[str] = set()
    for table in tables:
        if table.name in seen:
            raise ConfigError(f"table {table.name!r} is given twice; give every table once")
        seen.add(table.name)
        if table.rows < 1 or table.dim < 1:
            raise ConfigError(f"table {table.name!r}: [{table.rows}, {table.dim}] has no elements; leave it out")
        if table.dtype.name not in SOURCE_DTYPES:
            raise ConfigError(
                f"table {table.name!r}: its dtype is {table.dtype.name} and an export reads "
                f"{', '.join(SOURCE_DTYPES)}; cast it before the checkpoint is written"
            )


def _check_whole(
    whole: Collection[str],
    storages: Mapping[str, str],
    quantization: Mapping[str, QuantizationConfig],
    ranges: RowRanges,
    tables: Sequence["TableInfo"],
) -> None:
    """Raise ConfigError for a table that is read whole and would not be stored as the model reads it."""
    for table in tables:
        name = table.name
        if name not in whole:
            continue
        reads = f"table {name!r}: the model reads it whole, and"
        if storages[name] != "float32":
            raise ConfigError(
                f"{reads} storage {storages[name]} would be decoded whole at every request; store it as float32 "
                f"(--storage '{name}=float32')"
            )
        start, stop = ranges.get(name, (0, table.rows))
        if (start, stop) != (0, table.rows):
            raise ConfigError(
                f"{reads} rows {start} to {stop} are not all of its {table.rows}; leave `rows` out for it"
            )
        if name in quantization:
            raise ConfigError(
                f"{reads} it was trained with a quantization_config, which is for looked up rows alone; look its rows up instead"
            )


def _stack_tables(
    tables: Sequence["TableInfo"],
    storages: Mapping[str, str],
    quantization: Mapping[str, QuantizationConfig],
    ranges: RowRanges,
    whole: Collection[str],
) -> list[StackPlan]:
    def kind(table: "TableInfo") -> tuple[str, int, str]:
        return storages[table.name], table.dim, table.name if table.name in whole else ""

    in_order = sorted(tables, key=lambda table: (*kind(table), table.name))
    groups = [(of_kind, list(group)) for of_kind, group in groupby(in_order, key=kind)]
    alone = sorted(whole)
    names = [
        f"stack_{storage}_{dim}" + (f"_whole_{alone.index(table)}" if table else "")
        for (storage, dim, table), _ in groups
    ]
    return [
        _stack(name, storage, dim, group, quantization, ranges)
        for name, ((storage, dim, _), group) in zip(names, groups, strict=True)
    ]


def _stack(
    name: str,
    storage: str,
    dim: int,
    tables: Sequence["TableInfo"],
    quantization: Mapping[str, QuantizationConfig],
    ranges: RowRanges,
) -> StackPlan:
    placements, rows = [], 0
    for table in tables:
        simulated = quantization.get(table.name)
        start, stop = ranges.get(table.name, (0, table.rows))
        placement = Placement(
            table=table.name,
            rows=stop - start,
            row_offset=rows,
            first_row=start,
            is_whole=stop - start == table.rows,
            source_dtype=table.dtype.name,
            quantization=None if simulated is None else dataclasses.asdict(simulated),
        )
        placements.append(placement)
        rows += stop - start
    size = rows * STORAGES[storage].row_bytes(dim)
    return StackPlan(name=name, dim=dim, storage=storage, rows=rows, size=size, tables=tuple(placements))


def _split(stack: StackPlan, shard_bytes: int) -> Iterator[tuple[StackPlan, Placement, int, int]]:
    """Row ranges (stack, table, start, stop) of about `shard_bytes` each, and of nearly equal size within a table."""
    for table in stack.tables:
        pieces = min(table.rows, max(1, round(table.rows * stack.row_bytes / shard_bytes)))
        bounds = [table.rows * i // pieces for i in range(pieces + 1)]
        for start, stop in pairwise(bounds):
            yield stack, table, table.first_row + start, table.first_row + stop


@dataclasses.dataclass(frozen=True)
class _ChunkSize:
    """Of a table: rows that are read at a time, and what its reader holds beside them."""

    rows: int
    reader_bytes: int


def _chunks(stacks: Sequence[StackPlan], budget: int, read_buffers: ReadBuffers) -> dict[str, _ChunkSize]:
    """By table: as large as fits in `budget` bytes, and no larger than pays."""
    return {table.table: _chunk(stack, table, budget, read_buffers) for stack in stacks for table in stack.tables}


def _chunk(stack: StackPlan, table: Placement, budget: int, read_buffers: ReadBuffers) -> _ChunkSize:
    kind = table.source_dtype, stack.storage, table.quantization is not None, stack.dim
    rows = min(table.rows, rows_within(min(_CHUNK_BYTES, budget), *kind))
    reader_bytes = read_buffers(table.table, rows)
    if reader_bytes and chunk_bytes(*kind, rows) + reader_bytes > budget:
        rows = most_rows(budget, lambda rows: chunk_bytes(*kind, rows) + read_buffers(table.table, rows), rows)
        reader_bytes = read_buffers(table.table, rows)
    return _ChunkSize(rows, reader_bytes)


def _least_bytes(stacks: Sequence[StackPlan], read_buffers: ReadBuffers) -> Iterator[int]:
    """By table: what a worker holds that reads one row at a time."""
    for stack in stacks:
        for table in stack.tables:
            kind = table.source_dtype, stack.storage, table.quantization is not None, stack.dim
            yield chunk_bytes(*kind, 1) + read_buffers(table.table, 1)


def _task(index: int, stack: StackPlan, table: Placement, start: int, stop: int, chunk: _ChunkSize) -> ShardTask:
    return ShardTask(
        index=index,
        stack=stack.name,
        table=table.table,
        start=start,
        stop=stop,
        dim=stack.dim,
        source_dtype=table.source_dtype,
        storage=stack.storage,
        file=stack.file,
        file_offset=(table.row_offset + start - table.first_row) * stack.row_bytes,
        chunk_rows=min(stop - start, chunk.rows),
        quantization=table.quantization,
        reader_bytes=chunk.reader_bytes,
    )


def _check_budget(plan: ExportPlan) -> None:
    if plan.buffer_bytes <= plan.max_memory_bytes:
        return
    widest = max(plan.shards, key=lambda task: task.buffer_bytes)
    own = plan.workers * (widest.buffer_bytes - widest.reader_bytes)
    reader = f" and the checkpoint's reader {plan.buffer_bytes - own} bytes" if widest.reader_bytes else ""
    workers = "1 worker" if plan.workers == 1 else f"{plan.workers:,} workers"
    fewer = "" if plan.workers == 1 else " or use fewer workers"
    raise ConfigError(
        f"table {widest.table!r}: one row in each of {workers} needs {own} bytes of buffers{reader}, and max_memory_bytes is "
        f"{plan.max_memory_bytes}; raise it{fewer}"
    )
