"""The reports of an export, of its tables and of its graph."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpuembed.export.storage.error import TableError
from tpuembed.manifest import (
    BaseEntry,
    FeatureEntry,
    FromActivations,
    NamesEntry,
    Packing,
    RetrievalEntry,
    RowProofEntry,
    TensorSpec,
    VocabularyEntry,
)

__all__ = ["ExportReport", "SavedGraph", "StreamReport", "VersionReport"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamReport:
    """The table data of a plan.

    Attributes:
        folder: has one file per array of a stack, named ArrayPlan.file; a sparse file if the bytes are in a store.
        crc32c: of each array's bytes, by its name; unmasked.
        bytes_written: bytes of table data.
        bytes_reused: the part of them that an earlier run had written.
        errors: differences from float32, by table.
        seconds: from the first file's creation to the end of the check of the source.
        worker_peak_rss_bytes: the largest peak of the processes that streamed.
        base: the version whose files `folder` links; None if there is none.
        base_files: stack -> the path in the base of the file that is linked.
        full_crc32c: stack -> the checksum that all its rows would have in one file, if it is known.
        rows_changed, rows_compared: of an overlay, see ExportReport.
    """

    folder: Path
    crc32c: Mapping[str, int]
    bytes_written: int
    bytes_reused: int
    errors: Mapping[str, TableError]
    seconds: float = 0.0
    worker_peak_rss_bytes: int = 0
    base: BaseEntry | None = None
    base_files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    full_crc32c: Mapping[str, int] = dataclasses.field(default_factory=dict)
    rows_changed: int | None = None
    rows_compared: int | None = None


@dataclasses.dataclass(frozen=True)
class SavedGraph:
    """The saved graph.

    Attributes:
        array_keys: name of a stack's array -> checkpoint key of its variable.
        signatures, features, vocabularies, padding, packing, from_activations, names, retrieval: as the manifest lists them.
        row_proof: without `sha256`, because the paths in the graph are not final. None if nobody proved anything.
    """

    array_keys: Mapping[str, str]
    signatures: Mapping[str, Mapping[str, Mapping[str, TensorSpec]]]
    features: tuple[FeatureEntry, ...]
    vocabularies: tuple[VocabularyEntry, ...]
    padding: Mapping[str, int | str]
    packing: Packing
    from_activations: FromActivations
    names: tuple[NamesEntry, ...] = ()
    retrieval: RetrievalEntry | None = None
    row_proof: RowProofEntry | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class VersionReport:
    """A version that a command wrote, or lists.

    Attributes:
        path: of the version. In a store it is a `tpuembed.files.UrlPath`, which has the methods of Path that readers use. It is
            typed as Path, which it is everywhere else.
        version: its number.
    """

    path: Path
    version: int

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {**dataclasses.asdict(self), "path": str(self.path)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportReport(VersionReport):
    """One finished export.

    Attributes:
        removed: versions that the option `keep` removed.
        tables: names, in the order of the plan.
        dropped_features: features that were left out because their tables were left out.
        vocabularies: vocabularies of a whole model's preprocessing layers, sorted by layer.
        bytes_written: bytes of table data.
        bytes_reused: the part of them that an interrupted export had written, or that is shared with another version in
            MODEL_DIR as its base.
        base: the version that this one is an overlay of; None for a full version.
        rows_changed: number of rows in the overlay; None for a full version.
        rows_compared: number of rows that were compared with those of the base; stamps told about the others. None for
            a full version.
        retrieval: the index of candidates of `export_retrieval`; None for other exports.
        errors: by table, the differences of looked up values from float32.
        seconds: duration of the whole export.
        stream_seconds: the part of it from the first table byte to the last fsync.
        peak_rss_bytes: peak of this process so far. TensorFlow's import alone is about 520 MB.
        worker_peak_rss_bytes: the largest peak of the processes that streamed.
    """

    tables: tuple[str, ...]
    dropped_features: tuple[str, ...]
    vocabularies: tuple[VocabularyEntry, ...]
    bytes_written: int
    bytes_reused: int
    errors: Mapping[str, TableError]
    stream_seconds: float
    worker_peak_rss_bytes: int
    removed: tuple[int, ...] = ()
    seconds: float = 0.0
    peak_rss_bytes: int = 0
    base: int | None = None
    rows_changed: int | None = None
    rows_compared: int | None = None
    retrieval: RetrievalEntry | None = None
