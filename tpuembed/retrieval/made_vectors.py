"""Keeps the vectors that a tower has made, so that an export that was interrupted does not make them again.

A file has a header, JSON, and a record for each batch: the digest of the tower's inputs, the number of vectors, their width and
checksum, and the vectors. A vector is used again only if the tower's graph and weights, the checkpoint, and all inputs of its batch
are the same.
"""

import dataclasses
import json
import struct
from pathlib import Path
from typing import Final, Self

import google_crc32c
import numpy as np

from tpuembed.retrieval.partitions import Floats

__all__ = ["FILE", "MadeVectors"]

FILE: Final = "made_vectors"
_RECORD: Final = struct.Struct("<32sQII")


@dataclasses.dataclass
class MadeVectors:
    """The vectors of one tower, in a file.

    Attributes:
        path: of the file. It may have vectors of an interrupted run.
        identity: of the tower. Vectors of another one are removed.
    """

    path: Path
    identity: str

    def __enter__(self) -> Self:
        header = json.dumps(self.identity).encode() + b"\n"
        self.path.touch()
        self._file = self.path.open("r+b")
        self._may_be_there = self._file.readline() == header
        if not self._may_be_there:
            self._cut(0)
            self._file.write(header)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def found(self, digest: bytes) -> Floats | None:
        """Return the vectors of the next batch, float32 [n, dim]; None if the file does not have them, nor those of later ones.

        `digest` is that of the batch's inputs, 32 bytes.
        """
        if not self._may_be_there:
            return None
        start = self._file.tell()
        vectors = self._read(digest)
        if vectors is None:
            self._may_be_there = False
            self._cut(start)
        return vectors

    def add(self, digest: bytes, vectors: Floats) -> None:
        """Append the vectors of the batch after the last one that is there, float32 [n, dim]."""
        data = np.ascontiguousarray(vectors, np.float32).tobytes()
        self._file.write(_RECORD.pack(digest, *vectors.shape, google_crc32c.value(data)) + data)
        self._file.flush()

    def _read(self, digest: bytes) -> Floats | None:
        head = self._file.read(_RECORD.size)
        if len(head) < _RECORD.size:
            return None
        own, rows, dim, checksum = _RECORD.unpack(head)
        if own != digest:
            return None
        data = self._file.read(4 * rows * dim)
        if len(data) < 4 * rows * dim or google_crc32c.value(data) != checksum:
            return None
        return np.frombuffer(data, np.float32).reshape(rows, dim).copy()

    def _cut(self, size: int) -> None:
        self._file.seek(size)
        self._file.truncate()
