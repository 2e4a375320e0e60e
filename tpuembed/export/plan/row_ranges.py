"""Row ranges of tables, for servers that each hold a part of the rows."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from tpuembed.config.checks import check_count, did_you_mean
from tpuembed.errors import RowRangeError, UnknownTableError

if TYPE_CHECKING:  # TYPE_CHECKING keeps the readers out of the workers
    from tpuembed.checkpoint import TableInfo

__all__ = ["RowRanges", "check_row_ranges"]

RowRanges = Mapping[str, tuple[int, int]]
"""Table -> (start, stop), for its rows [start, stop)."""


def check_row_ranges(ranges: RowRanges, tables: Iterable["TableInfo"]) -> RowRanges:
    """Return `ranges` with plain integers.

    Raises:
        UnknownTableError: a name is not one of `tables`.
        RowRangeError: a range is empty or outside of its table.
        ConfigError: a bound is not an integer.
    """
    rows = {table.name: table.rows for table in tables}
    return {name: _checked(name, *bounds, rows) for name, bounds in ranges.items()}


def _checked(name: str, start: int, stop: int, rows: Mapping[str, int]) -> tuple[int, int]:
    if name not in rows:
        raise UnknownTableError(f"row ranges: table {name!r} is not exported; {did_you_mean(name, rows)}")
    for bound in (start, stop):
        check_count(f"row range of table {name!r}", bound, minimum=-(2**63))
    if not 0 <= start < stop <= rows[name]:
        raise RowRangeError(
            f"table {name!r}: rows [{start}, {stop}) are not a range inside its {rows[name]} rows. Give at least "
            f"one row inside [0, {rows[name]})."
        )
    return int(start), int(stop)
