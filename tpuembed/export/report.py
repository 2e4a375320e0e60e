"""What an export did."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpuembed.export.storage.error import TableError
from tpuembed.manifest import VocabularyEntry

__all__ = ["ExportReport"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportReport:
    """One finished export.

    Attributes:
        path: of the version. In a store it is a `tpuembed.files.UrlPath`, which offers what readers use of a Path; it is typed as
            what it is everywhere else.
        version: its number.
        tables: names, in the order of the plan.
        dropped_features: features that were left out because `tables` left out theirs.
        vocabularies: of a whole model's preprocessing layers, sorted by layer.
        bytes_written: of table data.
        bytes_reused: of them, what an export that did not end had written, or another version in MODEL_DIR shares.
        errors: of what is looked up against float32, by table.
        seconds: in all.
        stream_seconds: of them, from the first table byte to the last one's fsync.
        peak_rss_bytes: of this process so far; TensorFlow's own import is about 520 MB of it.
        worker_peak_rss_bytes: the largest of the processes that streamed.
    """

    path: Path
    version: int
    tables: tuple[str, ...]
    dropped_features: tuple[str, ...]
    vocabularies: tuple[VocabularyEntry, ...]
    bytes_written: int
    bytes_reused: int
    errors: Mapping[str, TableError]
    seconds: float
    stream_seconds: float
    peak_rss_bytes: int
    worker_peak_rss_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {**dataclasses.asdict(self), "path": str(self.path)}
