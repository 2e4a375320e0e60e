"""Inspects a checkpoint or an export before it is used: `describe`, `verify`, `diff`, `head`.

Each needs a few megabytes of memory for tables of any size.
"""

from tpuembed.checkpoint.tools.describe import describe_checkpoint, describe_export
from tpuembed.checkpoint.tools.diff import CheckpointDiff, LargestChange, TableDiff, diff_checkpoints
from tpuembed.checkpoint.tools.exports import find_export, require_export
from tpuembed.checkpoint.tools.head import Rows, read_rows, stream_named_rows, stream_rows
from tpuembed.checkpoint.tools.verify import VerifyReport, verify_files

__all__ = [
    "CheckpointDiff",
    "LargestChange",
    "Rows",
    "TableDiff",
    "VerifyReport",
    "describe_checkpoint",
    "describe_export",
    "diff_checkpoints",
    "find_export",
    "read_rows",
    "require_export",
    "stream_named_rows",
    "stream_rows",
    "verify_files",
]
