"""A checkpoint with one more table: the candidates, in the order of the index. The exporter streams it as any other."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tpuembed.checkpoint import open_checkpoint
from tpuembed.checkpoint.types import (
    Array,
    Checkpoint,
    Checksums,
    SavedLayers,
    SavedStamps,
    SavedVocabulary,
    TableInfo,
)
from tpuembed.errors import ConfigError
from tpuembed.export.stream.shard import Source

__all__ = ["ORDER", "WithCandidates"]

ORDER = "order"
"""The file with the number of the candidate at each place of the index, int64; -1 is a place of padding."""


class WithCandidates(Checkpoint):
    """The tables of a checkpoint, and `name`: row n is the vector of the candidate at place n, or zeros."""

    def __init__(self, checkpoint: Checkpoint, name: str, folder: Path, dim: int, digest: str) -> None:
        if name in checkpoint.tables():
            raise ConfigError(f"candidates: the checkpoint has a table {name!r}. Rename it.")
        self._of, self._name, self._folder, self._digest = checkpoint, name, folder, digest
        self.format, self.path, self.layer_config = checkpoint.format, checkpoint.path, checkpoint.layer_config
        self.options = checkpoint.options
        self._order: Array = np.memmap(folder / ORDER, np.int64, "r")
        self._vectors: Array = np.memmap(folder / "vectors", np.float32, "r").reshape(-1, dim)
        info = TableInfo(name, len(self._order), dim, np.dtype(np.float32))
        self._tables = {**checkpoint.tables(), name: info}

    def source(self, fingerprint: str) -> Source:
        """Return it as worker processes open it. `fingerprint` is that of the checkpoint before anything was read of it."""
        options = {
            "options": dict(self._of.options),
            "name": self._name,
            "folder": str(self._folder),
            "dim": self._tables[self._name].dim,
            "digest": self._digest,
        }
        return Source(
            path=self.path,
            fingerprint=json.dumps([fingerprint, self._digest]),
            options=json.dumps(options),
            opener=f"{__name__}:{_open.__name__}",
            lasts=False,  # the candidates' folder is removed
        )

    def fingerprint(self) -> str:
        """Return a text that changes when the checkpoint or the candidates change."""
        return json.dumps([self._of.fingerprint(), self._digest])

    def close(self) -> None:
        """Close the checkpoint's files."""
        self._of.close()

    def _dtype(self, table: str, slot: str | None) -> np.dtype[Any]:
        return np.dtype(np.float32) if table == self._name else self._of._dtype(table, slot)

    def _fill(self, table: str, slot: str | None, start: int, out: Array) -> None:
        if table != self._name:
            self._of._fill(table, slot, start, out)
            return
        numbers = self._order[start : start + len(out)]
        np.take(self._vectors, np.maximum(numbers, 0), axis=0, out=out, mode="clip")
        out[numbers < 0] = 0

    # Nothing is saved beside the candidates. For the other tables, the checkpoint answers.

    def verify(self, tables: Iterable[str], slot: str | None = None) -> None:
        """See Checkpoint."""
        self._of.verify([table for table in tables if table != self._name], slot)

    def read_buffer_bytes(self, table: str, rows: int) -> int:
        """See Checkpoint."""
        return 8 * rows if table == self._name else self._of.read_buffer_bytes(table, rows)

    @property
    def checksums(self) -> Checksums | None:
        """See Checkpoint."""
        return self._of.checksums

    @property
    def layers(self) -> SavedLayers | None:
        """See Checkpoint."""
        return self._of.layers

    @property
    def stamps(self) -> Mapping[str, SavedStamps]:
        """See Checkpoint."""
        return self._of.stamps

    @property
    def vocabularies(self) -> Mapping[str, SavedVocabulary]:
        """See Checkpoint."""
        return self._of.vocabularies


def _open(path: str, options: Mapping[str, Any], name: str, folder: str, dim: int, digest: str) -> WithCandidates:
    return WithCandidates(open_checkpoint(path, **options), name, Path(folder), dim, digest)
