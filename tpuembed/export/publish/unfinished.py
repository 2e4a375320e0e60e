"""Exports that were killed or failed: which one the next export goes on with, and what becomes of the others.

A staging folder that no exporter holds is
- resumed, where it is of the same export: the same source, tables, storage, layout and version of tpuembed;
- litter, and removed, where nobody can resume it (no record, another version's, a source that has changed since) or nobody
  has for a week;
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

__all__ = ["MAX_AGE_SECONDS", "PREFIX", "TABLES", "VERSION", "Sorted", "Unfinished", "sort_out"]

PREFIX: Final = ".staging-"
TABLES: Final = "tables"
VERSION: Final = "version"
MAX_AGE_SECONDS: Final = 7 * 86400
"""An unfinished export to which nothing was added for so long is litter."""


@dataclasses.dataclass(frozen=True)
class Unfinished:
    """A staging folder."""

    folder: Path

    @functools.cached_property
    def record(self) -> Record | None:
        """What is finished in it, as it was when this was first asked for."""
        return read_record(self.folder / TABLES)

    @property
    def bytes(self) -> int:
        """What its tables take on the disk."""
        return sum(file.stat().st_blocks * 512 for file in (self.folder / TABLES).glob("*.data"))

    def __str__(self) -> str:
        """As messages name it."""
        assert self.record
        done = sum(result.bytes for result in self.record.finished.values())
        total = self.record.header.table_bytes
        return f"{self.folder} ({format_bytes(done)} of {format_bytes(total)}, from {self.record.header.source})"

    @property
    def _is_published(self) -> bool:
        """Whether a version shares its data: it was killed between its commit and the end."""
        if (self.folder / VERSION).is_dir():
            return False
        return any(file.stat().st_nlink > 1 for file in (self.folder / TABLES).glob("*.data"))

    def is_resumable(self, header: Header) -> bool:
        """Whether the export of `header` may go on with it."""
        return self.record is not None and self.record.header == header and not self._is_published

    def is_litter(self, header: Header | None) -> bool:
        """Whether nobody will resume it, as the export of `header` can tell."""
        if self.record is None or self._is_published or time.time() - self.record.written > MAX_AGE_SECONDS:
            return True
        its = self.record.header
        return header is not None and its.source == header.source and its.fingerprint != header.fingerprint


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sorted:
    """What to do with staging folders that nobody holds."""

    resumable: Unfinished | None
    litter: tuple[Unfinished, ...]
    kept: tuple[Unfinished, ...]


def sort_out(found: Iterable[Unfinished], header: Header | None, *, restart: bool = False) -> Sorted:
    """Which of `found` the export of `header` goes on with, the one with most shards; with `restart` none.

    What it could go on with and does not is litter.
    """
    mine, others = list[Unfinished](), list[Unfinished]()
    for unfinished in found:
        (mine if header and unfinished.is_resumable(header) else others).append(unfinished)
    mine.sort(key=_finished_shards)
    resumable = None if restart or not mine else mine.pop()
    litter = [unfinished for unfinished in others if unfinished.is_litter(header)]
    kept = tuple(unfinished for unfinished in others if unfinished not in litter)
    return Sorted(resumable=resumable, litter=(*mine, *litter), kept=kept)


def _finished_shards(unfinished: Unfinished) -> int:
    return len(unfinished.record.finished) if unfinished.record else 0
