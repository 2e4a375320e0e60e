"""Reads the candidates and the index of an export, without TensorFlow."""

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpuembed.checkpoint.tools import require_export
from tpuembed.checkpoint.tools.exports import ReadableTables, open_tables
from tpuembed.errors import ConfigError
from tpuembed.files import FilePath
from tpuembed.manifest import Manifest
from tpuembed.retrieval.partitions import BLOCK_ROWS, Floats
from tpuembed.tensor_bundle.reader import Bundle

__all__ = ["OpenedRetrieval", "open_retrieval"]

Integers = npt.NDArray[np.int64]

_BATCH_BYTES: Final = 32 << 20
_TYPES: Final = {"names": np.uint8, "centroids": np.float32}
"""Of the arrays that are not int64."""


class OpenedRetrieval:
    """The candidates of an export, in the order of their places.

    Attributes:
        version: its folder.
        manifest: of the version.
        entry: its retrieval.
        arrays: see RetrievalEntry.
        places: of the candidates, int64 [candidates]: those of padding are left out.
    """

    def __init__(self, version: FilePath, manifest: Manifest, tables: ReadableTables) -> None:
        if manifest.retrieval is None:
            raise ConfigError(f"{version}: it has no candidates. Name an export of export_retrieval.")
        self.version, self.manifest, self.entry, self._tables = version, manifest, manifest.retrieval, tables
        self.arrays: dict[str, npt.NDArray[Any]] = {}
        for name, array in self.entry.arrays.items():
            flat: npt.NDArray[Any] = np.frombuffer(
                (version / array.file).read_bytes(), np.dtype(_TYPES.get(name, np.int64))
            )
            self.arrays[name] = flat.reshape(array.rows, -1) if name == "centroids" else flat
        if not self.entry.arrays:
            with Bundle.open(version / "variables" / "variables") as bundle:
                keys = [key for key in bundle.entries if key.startswith("index/")]
                self.arrays = {key.split("/")[1]: bundle.read(key) for key in keys}
        self.places: Integers = np.flatnonzero(self.arrays["ids"] != -1)

    @property
    def dim(self) -> int:
        """Return the width of the vectors."""
        return self._tables.tables()[self.entry.table].dim

    def batches(self) -> Iterator[tuple[int, Floats]]:
        """Yield the number of the first candidate, and the vectors from there on, [n, dim]."""
        rows, step, first = self._tables.tables()[self.entry.table].rows, max(1, _BATCH_BYTES // (4 * self.dim)), 0
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            read = self._tables.read(self.entry.table, start, stop).astype(np.float32)
            there = self.arrays["ids"][start:stop] != -1
            yield first, read[there]
            first += int(there.sum())

    def partitions(self) -> npt.NDArray[np.int32]:
        """Return the partition of each candidate, int32 [candidates]."""
        found = np.searchsorted(self.arrays["first_blocks"], self.places // BLOCK_ROWS, side="right") - 1
        return found.astype(np.int32)


@contextlib.contextmanager
def open_retrieval(path: str | FilePath) -> Iterator[OpenedRetrieval]:
    """Open the retrieval at `path`, a version or a MODEL_DIR, whose highest version is read.

    Raises:
        ConfigError: it is none.
    """
    export = require_export(path)
    with open_tables(export[0], {}) as tables:
        yield OpenedRetrieval(*export, tables)
