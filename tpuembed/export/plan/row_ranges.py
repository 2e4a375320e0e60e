"""Parts of tables: serving shards by row."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from tpuembed.config.checks import check_count, did_you_mean
from tpuembed.errors import RowRangeError, UnknownTableError

if TYPE_CHECKING:  # a worker reads tasks, not tables
    from tpuembed.checkpoint import TableInfo

__all__ = ["RowRanges", "check_row_ranges"]

RowRanges = Mapping[str, tuple[int, int]]
"""Table -> (start, stop): its rows [start, stop)."""


def check_row_ranges(ranges: RowRanges, tables: Iterable["TableInfo"]) -> RowRanges:
    """`ranges` as plain integers.

    Raises:
        UnknownTableError: none of `tables` is called so.
        RowRangeError: an empty range, or rows outside of the table.
        ConfigError: bounds that are no integers.
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
            f"table {name!r} has {rows[name]} rows, and rows [{start}, {stop}) are asked for; "
            f"give a range of at least one row inside [0, {rows[name]})"
        )
    return int(start), int(stop)
