"""Reads every row of tables once, a few megabytes at a time, and counts and measures them."""

import collections
import concurrent.futures
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpuembed.checkpoint.tools.exports import open_tables
from tpuembed.checkpoint.types import Checkpoint, TableInfo
from tpuembed.config.checks import did_you_mean
from tpuembed.config.optimizers import optimizer_from
from tpuembed.errors import ConfigError, UnknownTableError
from tpuembed.export.storage.error import ErrorSums, TableError, sample_step
from tpuembed.export.storage.formats import SOURCE_DTYPES, RowEncoder
from tpuembed.files import FilePath
from tpuembed.manifest.storages import STORAGES, UnstorableRowError
from tpuembed.runtime.cpus import available_cpus

__all__ = [
    "BadRows",
    "LargeRow",
    "NormBin",
    "Norms",
    "PathStats",
    "StorageError",
    "TableStats",
    "UntouchedRows",
    "read_stats",
]

Progress = Callable[[int, int], None]

_PIECE_BYTES: Final = 4 << 20
"""Bytes of a piece of rows as float32. A thread holds a few times as much."""
_MAX_THREADS: Final = 4
_PIECES_AHEAD: Final = 64
"""Pieces that are given to the threads at once. What is known of a piece takes 200 KB until it is added."""
_LISTED_ROWS: Final = 10
_PERCENTILES: Final = (1, 5, 25, 50, 75, 95, 99)
_BASE: Final = 1.01
"""Norms are counted in bins; the end of a bin is this many times its start."""
_LOWEST: Final = -12_000
"""The number of the lowest bin. Its norm, 1e-52, is below every norm of float32 rows."""
_BINS: Final = 24_000
_SHOWN_BINS: Final = 50


@dataclasses.dataclass(frozen=True)
class BadRows:
    """Rows with a NaN, or with an infinity.

    Attributes:
        count: how many there are.
        first: the numbers of the first ten.
    """

    count: int
    first: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class UntouchedRows:
    """Rows whose optimizer slots all have their initial value. Training has never updated them, or only by zero gradients.

    Attributes:
        count: how many there are; None if the initial values are not known.
        reason: why they are not known; empty if they are.
    """

    count: int | None
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class NormBin:
    """How many rows have a norm of at least `start` and below `stop`."""

    start: float
    stop: float
    rows: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norms:
    """Euclidean norms of the rows without NaN and infinities.

    Attributes:
        min, max, mean: of the norms, computed in float64.
        percentiles: by percent, within 0.5% of the norm of the row at that rank.
        histogram: of the rows that are not zero; at most 50 bins, equally wide in the logarithm.
    """

    min: float
    max: float
    mean: float
    percentiles: Mapping[int, float]
    histogram: tuple[NormBin, ...]


@dataclasses.dataclass(frozen=True)
class LargeRow:
    """A row, by its number, and its norm."""

    row: int
    norm: float


@dataclasses.dataclass(frozen=True)
class StorageError:
    """What storing the table as a type does to its rows.

    Attributes:
        error: compared with float32; None if the type cannot hold a row.
        reason: the first such row, and what it contains; empty if there is none.
    """

    error: TableError | None
    reason: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableStats:
    """A table.

    Attributes:
        name, dim, dtype, slots: as in `TableInfo`, the dtype by name.
        rows, bytes: that were read, without slots.
        nan, infinite: rows with a NaN, and rows with an infinity. A row with both counts in both.
        zero_rows: number of rows of zeros.
        untouched: see UntouchedRows.
        norms: None if no row is finite.
        largest: up to ten rows of the largest norms.
        storage: by storage type.
    """

    name: str
    rows: int
    dim: int
    dtype: str
    slots: tuple[str, ...]
    bytes: int
    nan: BadRows
    infinite: BadRows
    zero_rows: int
    untouched: UntouchedRows
    norms: Norms | None
    largest: tuple[LargeRow, ...]
    storage: Mapping[str, StorageError]


@dataclasses.dataclass(frozen=True)
class PathStats:
    """Tables of a checkpoint or an export.

    Attributes:
        path: what was read.
        tables: by name.
    """

    path: str
    tables: tuple[TableStats, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values. All numbers are finite."""
        return dataclasses.asdict(self)


def read_stats(
    path: str | FilePath,
    table: str | None = None,
    *,
    checkpoint_options: Mapping[str, Any] | None = None,
    on_progress: Progress | None = None,
) -> PathStats:
    """Read every row of the tables of a checkpoint or an export once, and return their statistics.

    Memory is bounded, whatever the sizes of the tables: a few pieces of 4 MB for each of up to four threads. The threads call
    BLAS. If it has threads of its own too, they get in each other's way: set OPENBLAS_NUM_THREADS=1 before numpy is imported.

    Args:
        path: as for `open_checkpoint`; or a version of an export, or a MODEL_DIR, whose highest version is read.
        table: the only table to read; None is all.
        checkpoint_options: further arguments of `open_checkpoint`.
        on_progress: called with (bytes done, total bytes), slots included.

    Raises:
        UnknownTableError: there is no such table.
        ConfigError: a table is neither float32, bfloat16 nor float16.
        TpuEmbedError: as `open_checkpoint`.
    """
    with open_tables(path, checkpoint_options or {}) as tables:
        infos = tables.tables()
        if table is not None:
            if table not in infos:
                raise UnknownTableError(f"{tables.path}: has no table {table!r}; {did_you_mean(table, infos)}")
            infos = {table: infos[table]}
        for info in infos.values():
            if info.dtype.name not in SOURCE_DTYPES:
                raise ConfigError(
                    f"{tables.path}: table {info.name!r} is {info.dtype.name}, and statistics are of {', '.join(SOURCE_DTYPES)}. "
                    "Name another table"
                )
        jobs = [_Table(tables, info) for info in infos.values()]
        total, done = sum(job.bytes for job in jobs), 0
        found = []
        threads = min(_MAX_THREADS, available_cpus())
        with concurrent.futures.ThreadPoolExecutor(threads, "stats") as pool:
            for job in jobs:
                counts, starts = _Tally(), range(0, job.rows, job.step)
                for first in range(0, len(starts), _PIECES_AHEAD):
                    some = starts[first : first + _PIECES_AHEAD]
                    for start, piece in zip(some, pool.map(job.count, some), strict=True):
                        counts.add(piece)
                        done += job.bytes * min(job.step, job.rows - start) // job.rows
                        if on_progress:
                            on_progress(done, total)
                found.append(job.stats(counts))
        return PathStats(tables.path, tuple(found))


class _Tally:
    """What is known of some rows in the order of their numbers."""

    def __init__(self) -> None:
        self.rows = collections.Counter[str]()  # how many: nan, infinite, zero, finite, untouched
        self.nan, self.infinite, self.largest = list[int](), list[int](), list[LargeRow]()
        self.min, self.max, self.sum = math.inf, -math.inf, 0.0
        self.bins = np.zeros(_BINS, np.int64)
        self.errors: dict[str, ErrorSums] = dict.fromkeys(STORAGES, ErrorSums())
        self.refused: dict[str, str] = {}

    def add(self, other: "_Tally") -> None:
        """Add those of the rows that follow."""
        self.rows += other.rows
        self.nan = (self.nan + other.nan)[:_LISTED_ROWS]
        self.infinite = (self.infinite + other.infinite)[:_LISTED_ROWS]
        self.min, self.max, self.sum = min(self.min, other.min), max(self.max, other.max), self.sum + other.sum
        self.bins += other.bins
        both = self.largest + other.largest
        self.largest = sorted(both, key=lambda one: (-one.norm, one.row))[:_LISTED_ROWS]
        self.errors = {name: sums + other.errors[name] for name, sums in self.errors.items()}
        self.refused = other.refused | self.refused


class _Table:
    """Reads one table."""

    def __init__(self, tables: Checkpoint, info: TableInfo) -> None:
        self._tables, self._info = tables, info
        # The initial value of each slot, or why they are not known.
        self._initial, self._unknown = dict[str, Any](), ""
        if not info.slots:
            is_export = tables.format == "export"
            self._unknown = "exports have no slots" if is_export else "the checkpoint has no slots of this table"
        elif given := ((tables.layer_config or {}).get("tables", {}).get(info.name, {})).get("optimizer"):
            optimizer = optimizer_from(given)
            self._initial = {slot: np.float32(optimizer.slot_initial_value(slot)) for slot in info.slots}
        else:
            self._unknown = f"the checkpoint does not say which values {', '.join(info.slots)} had at first"
        self._row_bytes = info.dim * info.dtype.itemsize
        self.bytes = info.rows * self._row_bytes * (1 + len(self._initial))
        self.rows, self.step = info.rows, max(1, _PIECE_BYTES // max(1, 4 * info.dim))  # rows of a piece

    def stats(self, counts: _Tally) -> TableStats:
        """Return the statistics by the counts of all rows."""
        info = self._info
        return TableStats(
            name=info.name,
            rows=info.rows,
            dim=info.dim,
            dtype=info.dtype.name,
            slots=info.slots,
            bytes=info.rows * self._row_bytes,
            nan=BadRows(counts.rows["nan"], tuple(counts.nan)),
            infinite=BadRows(counts.rows["infinite"], tuple(counts.infinite)),
            zero_rows=counts.rows["zero"],
            untouched=UntouchedRows(None if self._unknown else counts.rows["untouched"], self._unknown),
            norms=_norms(counts) if counts.rows["finite"] else None,
            largest=tuple(counts.largest),
            storage={
                name: StorageError(None, counts.refused[name])
                if name in counts.refused
                else StorageError(
                    TableError(storage=name) if self._is_exact(name) else TableError.of(name, counts.errors[name])
                )
                for name in STORAGES
            },
        )

    def _is_exact(self, storage: str) -> bool:
        return storage in ("float32", self._info.dtype.name)

    def count(self, start: int) -> _Tally:
        """Read and count the rows of the piece from `start` on."""
        info, counts, stop = self._info, _Tally(), min(start + self.step, self.rows)
        rows = self._tables.read(info.name, start, stop)
        wide = rows.astype(np.float32, copy=False)
        with np.errstate(invalid="ignore"):  # the squares of float32 neither overflow nor vanish in float64
            norms = np.sqrt(np.einsum("ij,ij->i", wide, wide, dtype=np.float64))
        finite = np.isfinite(norms)
        if not finite.all():
            bad = wide[~finite]
            numbers = start + np.flatnonzero(~finite)
            with_nan, with_infinity = np.isnan(bad).any(1), np.isinf(bad).any(1)
            counts.rows.update(nan=int(with_nan.sum()), infinite=int(with_infinity.sum()))
            counts.nan = numbers[with_nan][:_LISTED_ROWS].tolist()
            counts.infinite = numbers[with_infinity][:_LISTED_ROWS].tolist()
        sound = norms[finite]
        if len(sound):
            counts.min, counts.max, counts.sum = float(sound.min()), float(sound.max()), float(sound.sum())
            positive = sound[sound > 0]
            counts.rows.update(finite=len(sound), zero=len(sound) - len(positive))
            numbers = np.floor(np.log(positive) / math.log(_BASE)).astype(np.int64) - _LOWEST
            counts.bins = np.bincount(numbers, minlength=_BINS)
            counts.largest = _largest(start + np.flatnonzero(finite), sound)
        for name, codec in STORAGES.items():  # store the rows as each type, and measure the error
            if self._is_exact(name) or not rows.size:
                continue
            encoder, stored = (
                RowEncoder(name, info.dim, None),
                np.empty((len(rows), codec.columns(info.dim)), codec.dtype),
            )
            try:
                worst = encoder.encode(rows, stored)
            except UnstorableRowError as error:
                counts.refused[name] = f"row {start + error.index} contains {error}"
                continue
            picked = slice(None, None, sample_step(len(rows), info.dim))
            counts.errors[name] = ErrorSums.of(worst, rows[picked].astype(np.float32), codec.decode(stored[picked]))
        if self._initial:
            untouched = np.ones(stop - start, bool)
            for slot, value in self._initial.items():
                slots = self._tables.read(info.name, start, stop, slot)
                untouched &= (slots == value.astype(slots.dtype)).all(1)
            counts.rows["untouched"] = int(untouched.sum())
        return counts


def _largest(numbers: npt.NDArray[np.int64], norms: npt.NDArray[np.float64]) -> list[LargeRow]:
    """Return the rows of the ten largest norms; of equal ones, those of the lowest numbers."""
    if len(norms) > _LISTED_ROWS:
        least = np.partition(norms, -_LISTED_ROWS)[-_LISTED_ROWS]
        more, same = np.flatnonzero(norms > least), np.flatnonzero(norms == least)
        kept = np.concatenate([more, same[: _LISTED_ROWS - len(more)]])
        numbers, norms = numbers[kept], norms[kept]
    return [LargeRow(row, norm) for row, norm in zip(numbers.tolist(), norms.tolist(), strict=True)]


def _norms(counts: _Tally) -> Norms:
    zeros, finite = counts.rows["zero"], counts.rows["finite"]
    below, percentiles = zeros + np.cumsum(counts.bins), dict[int, float]()
    for percent in _PERCENTILES:
        rank = max(1, math.ceil(percent / 100 * finite))
        middle = _BASE ** (int(np.searchsorted(below, rank)) + _LOWEST + 0.5)
        percentiles[percent] = 0.0 if rank <= zeros else min(max(middle, counts.min), counts.max)
    used = np.flatnonzero(counts.bins)
    histogram: tuple[NormBin, ...] = ()
    if len(used):
        first, last = int(used[0]), int(used[-1])
        width = -(-(last + 1 - first) // _SHOWN_BINS)
        histogram = tuple(
            NormBin(_BASE ** (at + _LOWEST), _BASE ** (at + width + _LOWEST), int(counts.bins[at : at + width].sum()))
            for at in range(first, last + 1, width)
        )
    mean = counts.sum / finite
    return Norms(min=counts.min, max=counts.max, mean=mean, percentiles=percentiles, histogram=histogram)
