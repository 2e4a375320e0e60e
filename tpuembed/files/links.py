"""Gives a file a second name, or a second copy that shares its blocks."""

import errno
import os
import sys
from pathlib import Path
from typing import Final

from tpuembed.errors import ExportError

__all__ = ["clone", "link_or_clone"]

_NO_LINKS: Final = frozenset(
    (errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV, errno.EMLINK, errno.EACCES, errno.ENOSYS, errno.EINVAL)
)
"""What file systems answer that have no hard links, or none between these places."""
_FICLONE: Final = 0x40049409
"""The ioctl that makes a file share the blocks of another. Source: linux/fs.h."""


def link_or_clone(source: Path, target: Path) -> None:
    """Create `target` as a hard link of `source`, or as a clone where the file system has no hard links.

    Raises:
        ExportError: the file system has neither.
        OSError: `source` cannot be read, or the disk is full.
    """
    try:
        os.link(source, target)
        return
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        fault = error.strerror
    if clone(source, target):
        return
    raise ExportError(f"file {source}: cannot be linked to {target}: {fault}. Leave base out for a full version.")


def clone(source: Path, target: Path) -> bool:
    """Create `target` as a copy that shares the blocks of `source`. Returns False if the file system cannot do that.

    Raises:
        OSError: `source` cannot be read, or `target` exists.
    """
    if sys.platform != "linux":
        return False
    import fcntl

    with open(source, "rb") as one, open(target, "xb") as other:
        try:
            fcntl.ioctl(other, _FICLONE, one.fileno())
        except OSError:
            target.unlink()
            return False
    return True
