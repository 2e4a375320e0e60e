"""Statistics of tables: what tells a healthy one from a broken one, as figures, as a page, and as files for TensorBoard."""

from tpuembed.stats.page import stats_page
from tpuembed.stats.projector import ProjectorFiles, write_projector
from tpuembed.stats.table import (
    BadRows,
    LargeRow,
    NearDuplicates,
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
    "NearDuplicates",
    "NormBin",
    "Norms",
    "PathStats",
    "ProjectorFiles",
    "StorageError",
    "TableStats",
    "UntouchedRows",
    "read_stats",
    "stats_page",
    "write_projector",
]
