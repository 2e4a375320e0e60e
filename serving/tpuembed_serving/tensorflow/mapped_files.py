"""Turns the readahead of page faults in mapped tables off.

A page that is not in the page cache is read at its first lookup, and the disk's readahead reads more with it. On some
machines that is megabytes for one row of a few hundred bytes.
"""

import ctypes
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tpuembed_serving.core.log_once import ONCE

__all__ = ["advise"]

logger = logging.getLogger(__name__)

_MAPS: Final = Path("/proc/self/maps")
_COPIED_BYTES: Final = 10 << 20
"""TensorFlow's optimizer may copy a smaller table into an ordinary constant."""


class _Mapping(NamedTuple):
    """A line of /proc/self/maps; see proc_pid_maps(5)."""

    start: int
    stop: int
    device: int
    inode: int


def advise(files: Iterable[Path], advice: int) -> None:
    """Call madvise for this process's mappings of `files`: with MADV_RANDOM, a page fault reads one page only.

    This needs `madvise` on the mapping: `posix_fadvise` acts on an open file, and TensorFlow has closed its own.
    """
    mappings = list(_mappings())
    for path in files:
        try:
            status = path.stat()
        except OSError:  # the version was deleted while it is served
            continue
        found = [one for one in mappings if (one.device, one.inode) == (status.st_dev, status.st_ino)]
        if not found and status.st_size > _COPIED_BYTES:
            text = "mapped tables: %s is not mapped by this process. The disk's readahead stays as it is for it"
            logger.warning(text, path.name, extra=ONCE)
        for mapping in found:
            size = mapping.stop - mapping.start
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.madvise(ctypes.c_void_p(mapping.start), ctypes.c_size_t(size), advice):
                logger.warning("mapped tables: madvise failed: %s", os.strerror(ctypes.get_errno()))


def _mappings() -> Iterator[_Mapping]:
    try:
        lines = _MAPS.read_text(errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        addresses, _, _, device, inode = line.split()[:5]
        start, stop = (int(address, 16) for address in addresses.split("-"))
        major, minor = (int(number, 16) for number in device.split(":"))
        yield _Mapping(start, stop, os.makedev(major, minor), int(inode))
