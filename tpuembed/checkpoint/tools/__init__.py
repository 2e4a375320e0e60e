"""Tools to inspect a checkpoint or export before using it.

    describe    tables, dtypes, slots, sizes, layout
    verify      every checksum, of checkpoints and exports
    diff        tables and rows that differ between two checkpoints
    head        a few rows

All of them hold a few megabytes, for tables of any size.
"""

from tpuembed.checkpoint.tools.describe import CheckpointDescription, TableDescription, describe_checkpoint
from tpuembed.checkpoint.tools.describe_export import describe_export
from tpuembed.checkpoint.tools.diff import CheckpointDiff, LargestChange, TableDiff, diff_checkpoints
from tpuembed.checkpoint.tools.exports import find_export
from tpuembed.checkpoint.tools.head import Rows, read_rows, stream_rows
from tpuembed.checkpoint.tools.verify import VerifyReport, verify_files

__all__ = [
    "CheckpointDescription",
    "CheckpointDiff",
    "LargestChange",
    "Rows",
    "TableDescription",
    "TableDiff",
    "VerifyReport",
    "describe_checkpoint",
    "describe_export",
    "diff_checkpoints",
    "find_export",
    "read_rows",
    "stream_rows",
    "verify_files",
]
