"""What the server can do for tables that are mapped: read them ahead of the first request, and have faults read one page.

A page of a mapping that is not in the page cache is read when it is first looked up, and with it as many as the disk's
readahead says: megabytes, on some machines, for one row of a few hundred bytes.
"""

import ctypes
import logging
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tpuembed.manifest import Manifest
from tpuembed.saved_model import file_crc32c
from tpuembed_serving.core.status import Code, StatusError

__all__ = ["advise_random_access", "read_ahead"]

logger = logging.getLogger(__name__)

_MAPS: Final = Path("/proc/self/maps")
_COPIED_BYTES: Final = 10 << 20
"""TensorFlow's optimizer may make an ordinary constant, which is a copy, of a smaller table."""


class _Mapping(NamedTuple):
    """A line of /proc/self/maps: see proc_pid_maps(5)."""

    start: int
    stop: int
    device: int
    inode: int


def read_ahead(version_dir: Path, manifest: Manifest, on_read: Callable[[int], None]) -> None:
    """Read every data file of tables into the page cache, and compare it with its checksum.

    `on_read` is told how many bytes were read; it may raise to give up.

    Raises:
        StatusError: a file is not what was exported.
        OSError: a file cannot be read.
    """
    for stack in manifest.stacks:
        found = file_crc32c(version_dir / stack.file, on_read)
        if found != stack.crc32c:
            raise StatusError(
                Code.DATA_LOSS,
                f"version {version_dir.name}: {stack.file}, which holds stack {stack.name!r}, has CRC32C {found:#010x} "
                f"and the manifest says {stack.crc32c:#010x}; copy the version again or export it again",
            )


def advise_random_access(files: Iterable[Path]) -> None:
    """Have a fault in this process' mappings of `files` read no more than the page that is asked for.

    The advice is to be on the mapping: `posix_fadvise` acts on an open file, and TensorFlow has closed its own.
    """
    mappings = list(_mappings())
    for path in files:
        status = path.stat()
        found = [one for one in mappings if (one.device, one.inode) == (status.st_dev, status.st_ino)]
        if not found and status.st_size > _COPIED_BYTES:
            logger.warning("random access: no mapping of %s was found; the disk's own readahead stays", path.name)
        for mapping in found:
            _advise(mapping)


def _advise(mapping: _Mapping) -> None:
    size = mapping.stop - mapping.start
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(mapping.start), ctypes.c_size_t(size), mmap.MADV_RANDOM):
        logger.warning("random access: madvise: %s", os.strerror(ctypes.get_errno()))


def _mappings() -> Iterator[_Mapping]:
    try:
        lines = _MAPS.read_text(errors="surrogateescape").splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        addresses, _, _, device, inode = line.split()[:5]
        start, stop = (int(address, 16) for address in addresses.split("-"))
        major, minor = (int(number, 16) for number in device.split(":"))
        yield _Mapping(start, stop, os.makedev(major, minor), int(inode))
