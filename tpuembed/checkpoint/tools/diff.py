"""Compares two checkpoints or exports: tables, shapes, and rows by value, streamed side by side."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import numpy as np

from tpuembed.checkpoint.tools.exports import open_tables
from tpuembed.checkpoint.types import Array, Checkpoint, TableInfo
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
        mine, its = a.tables(), b.tables()
        common = [name for name in mine if name in its]
        pairs = [
            (mine[name], its[name], slot)
            for name in common
            for slot in (None, *(slot for slot in mine[name].slots if slots and slot in its[name].slots))
        ]
        total = sum(_common_rows(one, other) * one.dim * one.dtype.itemsize for one, other, _ in pairs)
        done = 0

        def on_read(size: int) -> None:
            nonlocal done
            done += size
            if on_progress:
                on_progress(done, total)

        return CheckpointDiff(
            paths=(a.path, b.path),
            added=tuple(sorted(its.keys() - mine.keys())),
            removed=tuple(sorted(mine.keys() - its.keys())),
            slots_added=_extra_slots(its, mine, common),
            slots_removed=_extra_slots(mine, its, common),
            tables=tuple(_compare(a, b, one, other, slot, on_read) for one, other, slot in pairs),
        )


def _extra_slots(of: Mapping[str, TableInfo], over: Mapping[str, TableInfo], names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{name}/{slot}" for name in names for slot in of[name].slots if slot not in over[name].slots)


def _common_rows(one: TableInfo, other: TableInfo) -> int:
    """Return the number of rows that both have; 0 if the widths differ."""
    return min(one.rows, other.rows) if one.dim == other.dim else 0


def _compare(
    a: Checkpoint, b: Checkpoint, one: TableInfo, other: TableInfo, slot: str | None, on_read: Callable[[int], None]
) -> TableDiff:
    """Compare the same table, or slot, of two checkpoints, a piece at a time."""
    count, changed, nan = _common_rows(one, other), 0, 0
    largest_l2: LargestChange | None = None
    largest_abs: LargestChange | None = None
    step = max(1, _PIECE_BYTES // max(1, 8 * one.dim))
    for start in range(0, count, step):
        stop = min(start + step, count)
        before, after = (tables.read(one.name, start, stop, slot).astype(np.float64) for tables in (a, b))
        on_read(before.size * one.dtype.itemsize)
        equal = (before == after) | (np.isnan(before) & np.isnan(after))
        rows = np.flatnonzero(~equal.all(axis=1))
        with np.errstate(over="ignore", invalid="ignore"):  # equal infinities are equal; others are infinite changes
            change = np.where(equal[rows], 0.0, np.abs(after[rows] - before[rows]))
        sized = ~np.isnan(change).any(axis=1)
        changed, nan = changed + len(rows), nan + len(rows) - int(sized.sum())
        rows, change = start + rows[sized], change[sized]
        if len(rows):
            largest_abs = _larger(largest_abs, rows, change.max(axis=1))
            largest_l2 = _larger(largest_l2, rows, _norms(change))
    return TableDiff(
        name=one.name,
        slot=slot,
        shapes=((one.rows, one.dim), (other.rows, other.dim)),
        dtypes=(str(one.dtype), str(other.dtype)),
        rows_compared=count,
        rows_changed=changed,
        rows_nan=nan,
        largest_l2=largest_l2,
        largest_abs=largest_abs,
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
