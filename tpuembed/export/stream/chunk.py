"""The one chunk of rows that a worker holds: as read, as stored, and the buffers for the conversion."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tpuembed.checkpoint.types import PartialChecksum, SmallPieces, SummedReads
from tpuembed.config import QuantizationConfig
from tpuembed.errors import ExportError
from tpuembed.export.storage.error import SAMPLE_VALUE_BYTES, ErrorSums, sample_step, sampled_rows
from tpuembed.export.storage.formats import SOURCE_DTYPES, STORAGES, RowEncoder, is_exact, scratch_bytes
from tpuembed.export.storage.types import UnstorableRowError, block_rows

if TYPE_CHECKING:  # TYPE_CHECKING avoids a cycle: plans import this module
    from tpuembed.checkpoint import Checkpoint
    from tpuembed.export.plan.plan import ShardTask

__all__ = ["Chunk", "chunk_bytes", "most_rows", "rows_within"]

_Array = npt.NDArray[Any]
_Bytes = npt.NDArray[np.uint8]


def chunk_bytes(source_dtype: str, storage: str, is_quantized: bool, dim: int, rows: int) -> int:
    """Return the bytes of buffers for a chunk of `rows`: as stored, as read if that differs, and scratch of a block."""
    stored, read = STORAGES[storage].row_bytes(dim), SOURCE_DTYPES[source_dtype].itemsize * dim
    if source_dtype == storage and not is_quantized:
        return rows * stored
    scratch = min(rows, block_rows(dim)) * scratch_bytes(source_dtype, storage, is_quantized, dim)
    sample = 0 if is_exact(source_dtype, storage) else sampled_rows(rows, dim) * dim * SAMPLE_VALUE_BYTES
    return rows * (stored + read) + scratch + sample


@functools.lru_cache(maxsize=1 << 12)
def rows_within(budget: int, source_dtype: str, storage: str, is_quantized: bool, dim: int) -> int:
    """Return the most rows whose chunk fits in `budget` bytes; 1 if none fits."""
    return most_rows(budget, functools.partial(chunk_bytes, source_dtype, storage, is_quantized, dim), budget)


def most_rows(budget: int, cost: Callable[[int], int], limit: int) -> int:
    """Return the most rows, up to `limit`, whose `cost` is at most `budget` bytes; 1 if there are none."""
    fitting, too_many = 1, max(2, limit + 1)
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        if cost(middle) <= budget:
            fitting = middle
        else:
            too_many = middle
    return fitting


class Chunk:
    """The chunk of a shard.

    Attributes:
        errors: errors of all rows loaded so far.
    """

    def __init__(self, task: "ShardTask", checkpoint: "Checkpoint") -> None:
        quantization = None if task.quantization is None else QuantizationConfig(**task.quantization)
        self.errors = ErrorSums()
        self._task, self._codec = task, STORAGES[task.storage]
        self._checkpoint = checkpoint
        self._reader = checkpoint.summed(task.table) if isinstance(checkpoint, SummedReads) else None
        self._read: _Array = np.empty((task.chunk_rows, task.dim), SOURCE_DTYPES[task.source_dtype])
        self._stored: _Array | None = None
        if task.source_dtype != task.storage or quantization is not None:
            self._stored = np.empty((task.chunk_rows, self._codec.columns(task.dim)), self._codec.dtype)
            self._encoder = RowEncoder(task.storage, task.dim, quantization)

    def load(self, start: int, stop: int) -> tuple[_Bytes, _Bytes]:
        """Load rows [start, stop). Return the bytes read and the bytes to store, perhaps the same object; valid until
        the next call.

        Raises:
            ExportError: the storage cannot hold a row.
        """
        rows = self._read[: stop - start]
        if self._reader is None:
            self._checkpoint.read_into(self._task.table, start, rows)
        else:
            self._reader.read_into(start, rows)
        if self._stored is None:
            read = _bytes_of(rows)
            return read, read
        stored = self._stored[: stop - start]
        self._store(rows, stored, start)
        return _bytes_of(rows), _bytes_of(stored)

    @property
    def rows_at_once(self) -> int:
        """Return the number of rows to load at a time; at most those of the chunk."""
        best = self._checkpoint.piece_rows(self._task.table) if isinstance(self._checkpoint, SmallPieces) else None
        return min(best or self._task.chunk_rows, self._task.chunk_rows)

    def source_sums(self) -> dict[str, PartialChecksum]:
        """Return the checksums of what was read of the checkpoint's tensors, if it offers them; see SummedReads."""
        return {} if self._reader is None else dict(self._reader.sums())

    def _store(self, rows: _Array, stored: _Array, start: int) -> None:
        try:
            worst = self._encoder.encode(rows, stored)
        except UnstorableRowError as unstorable:
            raise ExportError(
                f"table {self._task.table!r}: row {start + unstorable.index} contains {unstorable}. Store this "
                "table as float32, or find out why training produced this value."
            ) from None
        if not is_exact(self._task.source_dtype, self._task.storage):
            picked = slice(None, None, sample_step(len(rows), self._task.dim))
            true, looked_up = self._encoder.widen(rows[picked]), self._codec.decode(stored[picked])
            self.errors += ErrorSums.of(worst, true, looked_up)


def _bytes_of(rows: _Array) -> _Bytes:
    return rows.reshape(-1).view(np.uint8)
