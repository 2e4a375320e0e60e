"""Lists, removes and publishes again the versions of a MODEL_DIR on a disk. Imports no TensorFlow.

A version's files may be hard links that it shares with other versions. So a removed version takes nothing from the others.
"""

from tpuembed.export.retention.listing import VersionInfo, list_versions
from tpuembed.export.retention.prune import InUse, PruneReport, prune_versions
from tpuembed.export.retention.rollback import RollbackReport, rollback_version

__all__ = [
    "InUse",
    "PruneReport",
    "RollbackReport",
    "VersionInfo",
    "list_versions",
    "prune_versions",
    "rollback_version",
]
