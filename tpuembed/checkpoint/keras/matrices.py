"""Matrices of floats in HDF5 files, read by row range: contiguous bytes, or chunks decoded one at a time.

The need: h5py would parse the file in this process, which a hostile file can crash. Here memory is bounded by one chunk.
"""

import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import ml_dtypes
import numpy as np

from tpuembed.checkpoint.keras.h5_listing import Dataset
from tpuembed.checkpoint.types import Array
from tpuembed.errors import CheckpointCorruptError, CheckpointFormatError

__all__ = ["MAX_CHUNK_BYTES", "ChunkCache", "Matrix", "matrix_dtype", "open_matrix"]

MAX_CHUNK_BYTES: Final = 128 << 20
"""The largest chunk that is decoded: a read of one row holds its whole chunk."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Places = np.ndarray[Any, np.dtype[np.int64]]

_PIECE_BYTES: Final = 1 << 20
_DTYPES: Final = {"<f4": "float32", "<f8": "float64", "<f2": "float16"}
_DEFLATE, _SHUFFLE = 1, 2


class Matrix:
    """The rows of a matrix in a file: contiguous ones.

    Attributes:
        layout: a short description; empty if rows are contiguous.
    """

    layout = ""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def buffer_bytes(self, rows: int) -> int:  # noqa: ARG002 - no buffer, or one chunk
        """Return the most bytes that a read of `rows` rows holds beside them. It does not decrease with more rows."""
        return 0

    def read_into(self, start: int, out: Array) -> None:
        """Fill `out`, [n, columns] of the matrix' dtype, with the existing rows [start, start + n)."""
        if not out.size:
            return
        file, row_bytes = self._dataset.file, out.shape[1] * out.itemsize
        first = (self._dataset.offset or 0) + start * row_bytes
        if out.flags.c_contiguous:
            file.read_into(first, _bytes(out))
            return
        step = max(1, _PIECE_BYTES // row_bytes)
        buffer = np.empty((min(step, len(out)), out.shape[1]), out.dtype)
        for row in range(0, len(out), step):
            piece = buffer[: len(out) - row]
            file.read_into(first + row * row_bytes, _bytes(piece))
            out[row : row + step] = piece


class ChunkCache:
    """The one chunk that a checkpoint keeps: the last that was decoded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: tuple[Dataset, int, Array] | None = None

    def get(self, dataset: Dataset, number: int, decode: Callable[[int], Array]) -> Array:
        """Return chunk `number` of `dataset`, decoded by `decode` unless it is kept."""
        with self._lock:
            if self._kept is None or self._kept[0] is not dataset or self._kept[1] != number:
                self._kept = None  # never hold two of them
                self._kept = dataset, number, decode(number)
            return self._kept[2]


def matrix_dtype(dataset: Dataset) -> np.dtype[Any] | None:
    """Return the dtype of a matrix of floats; None for any other dataset."""
    if dataset.shape is None or len(dataset.shape) != 2:
        return None
    if dataset.dtype == "|V2" and dataset.stated_dtype == "bfloat16":
        return np.dtype(ml_dtypes.bfloat16)
    name = _DTYPES.get(dataset.dtype)
    return None if name is None else np.dtype(name)


def open_matrix(dataset: Dataset, dtype: np.dtype[Any], cache: ChunkCache) -> Matrix:
    """Return the rows of `dataset`, whose `matrix_dtype` is `dtype`.

    Raises:
        CheckpointFormatError: it is stored in a way that is not supported, or its chunks are too large.
        CheckpointCorruptError: some of it was never written.
    """
    if dataset.layout == "chunked":
        return _Chunks(dataset, dtype, cache)
    dataset.check_contiguous()
    return Matrix(dataset)


class _Chunks(Matrix):
    """Rows in chunks, which may be compressed."""

    def __init__(self, dataset: Dataset, dtype: np.dtype[Any], cache: ChunkCache) -> None:
        super().__init__(dataset)
        self._dtype, self._cache = dtype, cache
        self._filters = [code for code, _ in dataset.filters]
        self._places = _proven_places(dataset, dtype, self._filters)
        packed = ", deflated" if _DEFLATE in self._filters else ""
        self.layout = f"chunks of {dataset.chunk[0]} x {dataset.chunk[1]}{packed}"

    def buffer_bytes(self, rows: int) -> int:  # noqa: ARG002 - the signature of Matrix
        """Return the bytes of a decoded chunk and of the pieces held while it is decoded."""
        return self._dataset.chunk[0] * self._dataset.chunk[1] * self._dtype.itemsize + 8 * _PIECE_BYTES

    def read_into(self, start: int, out: Array) -> None:
        rows, columns = self._dataset.chunk
        for number, row, column in self._touched(start, start + len(out)) if out.size else ():
            chunk = self._cache.get(self._dataset, number, self._decode)
            first, last = max(start, row), min(start + len(out), row + rows)
            target = out[first - start : last - start, column : column + columns]
            target[:] = chunk[first - row : last - row, : target.shape[1]]

    def _touched(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (number, first row, first column) of the chunks with rows [start, stop)."""
        rows, columns = self._dataset.chunk
        width = (self._dataset.shape or (0, 0))[1]
        across = -(-width // columns)
        for down in range(start // rows, -(-stop // rows)):
            for side in range(across):
                yield down * across + side, down * rows, side * columns

    def _decode(self, number: int) -> Array:
        out = np.empty(self._dataset.chunk, self._dtype)
        # The shuffle filter writes the first bytes of all elements, then the second ones, and so on.
        planes = self._dtype.itemsize if _SHUFFLE in self._filters else 1
        target = out.reshape(-1).view(np.uint8).reshape(-1, planes).T
        offset, size = self._places[number].tolist()
        done = 0
        for piece in self._inflated(offset, size) if _DEFLATE in self._filters else self._stored(offset, size):
            if done + len(piece) > out.nbytes:
                raise self._corrupt(offset, f"is longer than {out.nbytes} bytes")
            _fill(target, done, piece)
            done += len(piece)
        if done < out.nbytes:
            raise self._corrupt(offset, f"ends after {done} of {out.nbytes} bytes")
        return out

    def _inflated(self, offset: int, size: int) -> Iterator[bytes]:
        inflater = zlib.decompressobj()
        try:
            for stored in self._stored(offset, size):
                piece = inflater.decompress(stored, _PIECE_BYTES)
                while piece or inflater.unconsumed_tail:
                    yield piece
                    piece = inflater.decompress(inflater.unconsumed_tail, _PIECE_BYTES)
        except zlib.error as error:
            raise self._corrupt(offset, f"does not inflate: {error}") from None
        if not inflater.eof:
            raise self._corrupt(offset, "ends before its deflate stream ends")

    def _stored(self, offset: int, size: int) -> Iterator[bytes]:
        for done in range(0, size, _PIECE_BYTES):
            piece = bytearray(min(_PIECE_BYTES, size - done))
            self._dataset.file.read_into(offset + done, memoryview(piece))
            yield bytes(piece)

    def _corrupt(self, offset: int, what: str) -> CheckpointCorruptError:
        return CheckpointCorruptError.of(f"{self._dataset.shown}: the chunk at byte {offset} {what}")


def _proven_places(dataset: Dataset, dtype: np.dtype[Any], filters: list[int]) -> Places:
    """Return the places of the chunks. Checks that all of them were written and that their size is supported."""
    if filters not in ([], [_SHUFFLE], [_DEFLATE], [_SHUFFLE, _DEFLATE]):
        raise CheckpointFormatError(
            f"{dataset.shown} has HDF5 filters {filters}, but only {_SHUFFLE} (shuffle) and {_DEFLATE} "
            "(deflate) are supported. Save the weights again with Keras."
        )
    chunk_bytes = dataset.chunk[0] * dataset.chunk[1] * dtype.itemsize
    if not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
        raise CheckpointFormatError(
            f"{dataset.shown} has chunks of {chunk_bytes} bytes, but at most {MAX_CHUNK_BYTES} can be held at a "
            "time. Save the weights again with Keras, which does not cut them."
        )
    places = np.empty((0, 2), np.int64) if dataset.places is None else dataset.places
    unwritten = int((places[:, 0] < 0).sum())
    if unwritten:
        raise CheckpointCorruptError(
            f"{dataset.shown}: {unwritten} of its {len(places)} chunks were never written. Restore the file "
            "from another copy."
        )
    if _DEFLATE not in filters and (places[:, 1] != chunk_bytes).any():
        raise CheckpointCorruptError.of(
            f"{dataset.shown}: its chunks are {chunk_bytes} bytes, but one is stored in "
            f"{places[places[:, 1] != chunk_bytes][0, 1]}"
        )
    return places


def _fill(target: Bytes, start: int, data: bytes) -> None:
    """Write `data` at position `start` of `target` [planes, n], counted row by row."""
    source, side = np.frombuffer(data, np.uint8), target.shape[1]
    while len(source):
        plane, column = divmod(start, side)
        part = source[: side - column]
        target[plane, column : column + len(part)] = part
        source, start = source[len(part) :], start + len(part)


def _bytes(array: Array) -> memoryview:
    """Return the bytes of a C-contiguous array."""
    return array.reshape(-1).view(np.uint8).data
