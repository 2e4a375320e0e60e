"""Decides whether the mapped tables of all loaded versions are larger than the memory, and how their pages are read then."""

import contextlib
import dataclasses
import logging
import mmap
import threading
from collections.abc import Callable
from pathlib import Path

from tpuembed_serving.core.log_once import ONCE
from tpuembed_serving.core.memory import MemoryLimit, memory_limit, own_bytes
from tpuembed_serving.tensorflow.mapped_files import advise

__all__ = ["MAPPED", "MappedTables", "MappedVersion"]

logger = logging.getLogger(__name__)


@dataclasses.dataclass(kw_only=True, eq=False)
class MappedVersion:
    """A loaded version that maps tables.

    Attributes:
        files: of its tables.
        set_reads_ahead: called with whether its lookups read all pages of a request at once.
        reads_ahead: what `set_reads_ahead` was last called with.
    """

    files: tuple[Path, ...]
    set_reads_ahead: Callable[[bool], None]
    reads_ahead: bool = False


class MappedTables:
    """The versions of a process that map tables.

    If their tables are larger than the memory, a page fault reads one page, without the disk's readahead, and lookups read
    all pages of a request at once. Otherwise the kernel's defaults stay, and a request does nothing more. All versions count
    together, and a file that several link counts once.
    """

    def __init__(
        self, limit: Callable[[], MemoryLimit | None] = memory_limit, own: Callable[[], int] = own_bytes
    ) -> None:
        """`limit` returns the memory of this process, and `own` how much of it is not of files."""
        self._limit, self._own = limit, own
        self._lock = threading.Lock()
        self._versions: list[MappedVersion] = []
        self._are_larger = False

    def add(self, version: MappedVersion) -> None:
        """Count a version that has mapped its files."""
        with self._lock:
            self._versions.append(version)
            self._decide()

    def remap(self, version: MappedVersion) -> None:
        """Note that a version has mapped its files again. `add` advises those of a version that is not added yet."""
        with self._lock:
            if version in self._versions and version.reads_ahead:
                advise(version.files, mmap.MADV_RANDOM)

    def remove(self, version: MappedVersion) -> None:
        """Forget a version. A version that was not added is none."""
        with self._lock:
            if version in self._versions:
                self._versions.remove(version)
                self._decide()

    def _decide(self) -> None:
        self._compare()
        for version in self._versions:
            if version.reads_ahead != self._are_larger:
                version.reads_ahead = self._are_larger
                advise(version.files, mmap.MADV_RANDOM if self._are_larger else mmap.MADV_NORMAL)
                version.set_reads_ahead(self._are_larger)

    def _compare(self) -> None:
        """Find whether the tables are larger than the memory. Log it when that changes."""
        limit, were_larger = self._limit(), self._are_larger
        if limit is None:
            return
        sizes = {}
        for path in {path for version in self._versions for path in version.files}:
            with contextlib.suppress(OSError):  # the version was deleted while it is served
                status = path.stat()
                sizes[status.st_dev, status.st_ino] = status.st_size
        mapped = sum(sizes.values())
        free = max(limit.size - self._own(), 0)
        self._are_larger = mapped > free
        if self._are_larger != were_larger:
            what = (
                "readahead is off, and native lookups read all pages of a request at once"
                if self._are_larger
                else "readahead is on again"
            )
            logger.info(
                "the loaded versions map %.2f GiB of tables, and %s has %.2f GiB of memory for them: %s",
                mapped / 2**30,
                limit.source,
                free / 2**30,
                what,
                extra={**ONCE, "fields": {"mapped_bytes": mapped, "free_bytes": free}},
            )


MAPPED = MappedTables()
"""Those of this process."""
