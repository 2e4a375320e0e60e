"""The reports of an export and of its tables."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpuembed.export.storage.error import TableError
from tpuembed.manifest import VocabularyEntry

__all__ = ["ExportReport", "StreamReport"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamReport:
    """The table data of a plan.

    Attributes:
        folder: has one file per stack, named StackPlan.file; a sparse file if the bytes are in a store.
        crc32c: of each stack's bytes, by its name; unmasked.
        bytes_written: bytes of table data.
        bytes_reused: the part of them that an earlier run had written.
        errors: differences from float32, by table.
        seconds: from the first file's creation to the end of the check of the source.
        worker_peak_rss_bytes: the largest peak of the processes that streamed.
    """

    folder: Path
    crc32c: Mapping[str, int]
    bytes_written: int
    bytes_reused: int
    errors: Mapping[str, TableError]
    seconds: float
    worker_peak_rss_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportReport:
    """One finished export.

    Attributes:
        path: path of the version. In a store it is a `tpuembed.files.UrlPath`, which has the methods of Path that
            readers use. It is typed as Path, which it is for all other exports.
        version: its number.
        tables: names, in the order of the plan.
        dropped_features: features that were left out because their tables were left out.
        vocabularies: vocabularies of a whole model's preprocessing layers, sorted by layer.
        bytes_written: bytes of table data.
        bytes_reused: the part of them that an interrupted export had written, or that is shared with another version in
            MODEL_DIR.
        errors: by table, the differences of looked up values from float32.
        seconds: duration of the whole export.
        stream_seconds: the part of it from the first table byte to the last fsync.
        peak_rss_bytes: peak of this process so far. TensorFlow's import alone is about 520 MB.
        worker_peak_rss_bytes: the largest peak of the processes that streamed.
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
        """Return the report as JSON values."""
        return {**dataclasses.asdict(self), "path": str(self.path)}
