"""Statistics of tables: what tells a healthy one from a broken one, as figures and as a page."""

from tpuembed.stats.page import stats_page
from tpuembed.stats.table import (
    BadRows,
    LargeRow,
    NormBin,
    Norms,
    PathStats,
    StorageError,
    TableStats,
    UntouchedRows,
    read_stats,
)

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
    "stats_page",
]
