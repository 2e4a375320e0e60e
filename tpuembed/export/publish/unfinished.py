"""Exports that were killed or failed: which one the next export resumes, and what happens to the others.

A staging folder without an exporter is
- resumed, if it is of the same export: the same source, tables, storage, layout and version of tpuembed;
- stale, and removed, if no run can resume it (no record, another version's record, a source that has changed since), or
if it
  was not resumed for a week;
- kept otherwise, and named in a warning: another export may have hours of work in it.
"""

import dataclasses
import functools
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tpuembed.export.formatting import format_bytes
from tpuembed.export.stream.resume_log import Header, Record, read_record

__all__ = ["MAX_AGE_SECONDS", "PREFIX", "TABLES", "VERSION", "StagingFolders", "Unfinished", "classify_staging"]

PREFIX: Final = ".staging-"
TABLES: Final = "tables"
VERSION: Final = "version"
MAX_AGE_SECONDS: Final = 7 * 86400
"""An unfinished export is stale if nothing was added to it for this time."""


@dataclasses.dataclass(frozen=True)
class Unfinished:
    """A staging folder."""

    folder: Path

    @functools.cached_property
    def record(self) -> Record | None:
        """Return the record of finished shards, read once."""
        return read_record(self.folder / TABLES)

    @property
    def bytes(self) -> int:
        """Return the disk space that its tables use."""
        return sum(file.stat().st_blocks * 512 for file in (self.folder / TABLES).glob("*.data"))

    def __str__(self) -> str:
        """Return the name of it in messages."""
        assert self.record
        done = sum(result.bytes for result in self.record.finished.values())
        total = self.record.header.table_bytes
        return f"{self.folder} ({format_bytes(done)} of {format_bytes(total)}, from {self.record.header.source})"

    @property
    def _is_published(self) -> bool:
        """Returns True if a version shares its data: its export was killed between the commit and the end."""
        if (self.folder / VERSION).is_dir():
            return False
        return any(file.stat().st_nlink > 1 for file in (self.folder / TABLES).glob("*.data"))

    def is_resumable(self, header: Header) -> bool:
        """Returns True if the export of `header` may resume it."""
        return self.record is not None and self.record.header == header and not self._is_published

    def is_stale(self, header: Header | None) -> bool:
        """Returns True if no later run can resume it, as far as the export of `header` can tell."""
        if self.record is None or self._is_published or time.time() - self.record.written > MAX_AGE_SECONDS:
            return True
        its = self.record.header
        return header is not None and its.source == header.source and its.fingerprint != header.fingerprint


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagingFolders:
    """Staging folders without an exporter, by what to do with them."""

    resumable: Unfinished | None
    stale: tuple[Unfinished, ...]
    kept: tuple[Unfinished, ...]


def classify_staging(found: Iterable[Unfinished], header: Header | None, *, restart: bool = False) -> StagingFolders:
    """Classify the staging folders in `found`. The export of `header` resumes the one with most shards, with `restart`
    none.

    Others that it could resume are stale.
    """
    mine, others = list[Unfinished](), list[Unfinished]()
    for unfinished in found:
        (mine if header and unfinished.is_resumable(header) else others).append(unfinished)
    mine.sort(key=_finished_shards)
    resumable = None if restart or not mine else mine.pop()
    stale = [unfinished for unfinished in others if unfinished.is_stale(header)]
    kept = tuple(unfinished for unfinished in others if unfinished not in stale)
    return StagingFolders(resumable=resumable, stale=(*mine, *stale), kept=kept)


def _finished_shards(unfinished: Unfinished) -> int:
    return len(unfinished.record.finished) if unfinished.record else 0
