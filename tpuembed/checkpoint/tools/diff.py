"""Compares two checkpoints or exports: tables, shapes, and rows by value, streamed side by side."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np

from tpuembed.checkpoint.tools.exports import ReadableTables, open_tables
from tpuembed.checkpoint.types import Array, TableInfo
from tpuembed.files import FilePath

__all__ = ["CheckpointDiff", "LargestChange", "TableDiff", "diff_checkpoints"]

Progress = Callable[[int, int], None]

_PIECE_BYTES: Final = 4 << 20
"""Bytes of a piece of rows as float64, of which a few are held."""


@dataclasses.dataclass(frozen=True)
class LargestChange:
    """The row with the largest change, by its number in the first checkpoint, and the size of the change."""

    row: int
    by: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableDiff:
    """A table, or a slot of one, that both checkpoints have.

    Attributes:
        name: of the table.
        slot: of the table; None for its rows.
        shapes, dtypes: in the first and in the second checkpoint.
        rows_compared: number of rows that both have; 0 if the widths differ.
        rows_changed: number of those that differ by value; NaN is equal to NaN, -0 to 0.
        rows_nan: number of changed rows with a NaN on one side only; their change has no size.
        largest_l2, largest_abs: the largest change by Euclidean norm and by one element; None if nothing changed.
    """

    name: str
    slot: str | None
    shapes: tuple[tuple[int, int], tuple[int, int]]
    dtypes: tuple[str, str]
    rows_compared: int
    rows_changed: int
    rows_nan: int
    largest_l2: LargestChange | None
    largest_abs: LargestChange | None

    @property
    def differs(self) -> bool:
        """Returns True if anything differs."""
        return bool(self.rows_changed or self.shapes[0] != self.shapes[1] or self.dtypes[0] != self.dtypes[1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointDiff:
    """The differences of two checkpoints.

    Attributes:
        paths: of both.
        added, removed: tables that only the second, or only the first, has.
        slots_added, slots_removed: "table/slot", of tables that both have.
        tables: tables and slots that both have.
    """

    paths: tuple[str, str]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    slots_added: tuple[str, ...]
    slots_removed: tuple[str, ...]
    tables: tuple[TableDiff, ...]

    @property
    def differs(self) -> bool:
        """Returns True if anything differs."""
        lists = (self.added, self.removed, self.slots_added, self.slots_removed)
        return any(lists) or any(table.differs for table in self.tables)

    def to_dict(self) -> dict[str, Any]:
        """Return the differences as JSON values, except for infinities."""
        return {**dataclasses.asdict(self), "differs": self.differs}


def diff_checkpoints(
    first: str | FilePath,
    second: str | FilePath,
    *,
    slots: bool = False,
    checkpoint_options: Mapping[str, Any] | None = None,
    second_options: Mapping[str, Any] | None = None,
    on_progress: Progress | None = None,
) -> CheckpointDiff:
    """Compare the tables of two checkpoints or exports, of any formats, by name and row.

    Args:
        first, second: as for `open_checkpoint`; or versions of exports, or MODEL_DIRs, whose highest version is read.
            If an export has only some rows of a table, the rows that both sides have are compared.
        slots: also compare the rows of slots.
        checkpoint_options: further arguments of `open_checkpoint`.
        second_options: the same for the second; by default those of the first.
        on_progress: called with (bytes done, total bytes) of the first checkpoint's rows.

    Raises:
        TpuEmbedError: one of them cannot be read.
    """
    options = checkpoint_options or {}
    others = options if second_options is None else second_options
    with open_tables(first, options) as a, open_tables(second, others) as b:
        tables = a.tables(), b.tables()
        common = [name for name in tables[0] if name in tables[1]]
        pairs = [
            _Pair(a, b, tables[0][name], tables[1][name], slot)
            for name in common
            for slot in (None, *(_common_slots(tables[0][name], tables[1][name]) if slots else ()))
        ]
        return CheckpointDiff(
            paths=(a.path, b.path),
            added=tuple(sorted(tables[1].keys() - tables[0].keys())),
            removed=tuple(sorted(tables[0].keys() - tables[1].keys())),
            slots_added=_extra_slots(tables[1], tables[0], common),
            slots_removed=_extra_slots(tables[0], tables[1], common),
            tables=tuple(_compare_all(pairs, on_progress)),
        )


def _common_slots(a: TableInfo, b: TableInfo) -> list[str]:
    return [slot for slot in a.slots if slot in b.slots]


def _extra_slots(of: dict[str, TableInfo], over: dict[str, TableInfo], names: list[str]) -> tuple[str, ...]:
    return tuple(f"{name}/{slot}" for name in names for slot in of[name].slots if slot not in over[name].slots)


@dataclasses.dataclass(frozen=True)
class _Pair:
    """The same table, or slot, of two checkpoints."""

    a: ReadableTables
    b: ReadableTables
    info_a: TableInfo
    info_b: TableInfo
    slot: str | None

    @property
    def rows(self) -> int:
        """Return the number of rows that both have; 0 if the widths differ."""
        return min(self.info_a.rows, self.info_b.rows) if self.info_a.dim == self.info_b.dim else 0

    def pieces(self) -> Iterator[tuple[int, Array, Array]]:
        """Yield (first row, rows of a, rows of b) as float64, one piece at a time."""
        step = max(1, _PIECE_BYTES // max(1, 8 * self.info_a.dim))
        for start in range(0, self.rows, step):
            stop = min(start + step, self.rows)
            a, b = (tables.read(self.info_a.name, start, stop, self.slot) for tables in (self.a, self.b))
            yield start, a.astype(np.float64), b.astype(np.float64)


def _compare_all(pairs: list[_Pair], on_progress: Progress | None) -> Iterator[TableDiff]:
    total, done = sum(pair.rows * pair.info_a.dim * pair.info_a.dtype.itemsize for pair in pairs), 0
    for pair in pairs:
        comparison = _Comparison()
        for start, a, b in pair.pieces():
            comparison.add(start, a, b)
            done += a.size * pair.info_a.dtype.itemsize
            if on_progress:
                on_progress(done, total)
        yield comparison.of(pair)


class _Comparison:
    """Counts and largest changes of the pieces so far."""

    def __init__(self) -> None:
        self._changed = self._nan = 0
        self._l2: LargestChange | None = None
        self._abs: LargestChange | None = None

    def add(self, start: int, a: Array, b: Array) -> None:
        """Compare rows `a` and `b`, [n, dim], from row `start` on."""
        equal = (a == b) | (np.isnan(a) & np.isnan(b))
        rows = np.flatnonzero(~equal.all(axis=1))
        if not len(rows):
            return
        with np.errstate(
            over="ignore", invalid="ignore"
        ):  # infinities of the same sign are equal; others are infinite changes
            change = np.where(equal[rows], 0.0, np.abs(b[rows] - a[rows]))
        sized = ~np.isnan(change).any(axis=1)
        self._changed += len(rows)
        self._nan += len(rows) - int(sized.sum())
        rows, change = start + rows[sized], change[sized]
        if len(rows):
            self._abs = _larger(self._abs, rows, change.max(axis=1))
            self._l2 = _larger(self._l2, rows, _norms(change))

    def of(self, pair: _Pair) -> TableDiff:
        """Return the result for `pair`."""
        a, b = pair.info_a, pair.info_b
        return TableDiff(
            name=a.name,
            slot=pair.slot,
            shapes=((a.rows, a.dim), (b.rows, b.dim)),
            dtypes=(str(a.dtype), str(b.dtype)),
            rows_compared=pair.rows,
            rows_changed=self._changed,
            rows_nan=self._nan,
            largest_l2=self._l2,
            largest_abs=self._abs,
        )


def _norms(change: Array) -> Array:
    """Return the norm of every row, without overflow: the largest element is factored out of the squares."""
    scale = change.max(axis=1, keepdims=True)
    finite = np.where((scale > 0) & np.isfinite(scale), scale, 1.0)
    norms: Array = np.sqrt(((change / finite) ** 2).sum(axis=1)) * finite[:, 0]
    return norms


def _larger(best: LargestChange | None, rows: Array, sizes: Array) -> LargestChange:
    at = int(sizes.argmax())
    if best is not None and (best.by >= sizes[at] or math.isinf(best.by)):
        return best
    return LargestChange(int(rows[at]), float(sizes[at]))
