"""The form of a table's rows, in the checkpoint and in an export; and their conversion. `STORAGES` has the storage types."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tpuembed.config import QuantizationConfig
from tpuembed.config.checks import check_choice, did_you_mean
from tpuembed.errors import ConfigError, UnknownTableError
from tpuembed.export.storage.error import SAMPLE_VALUE_BYTES, sampled_rows
from tpuembed.manifest.storages import STORAGES, Levels, block_rows

__all__ = [
    "OTHERS",
    "SOURCE_DTYPES",
    "RowEncoder",
    "RowFormat",
    "Storage",
    "first_not_finite",
    "most_rows",
    "quantize",
    "storage_by_table",
]

_Array = npt.NDArray[Any]

# The supported dtypes of a table in a checkpoint, by the name that plans and manifests use.
SOURCE_DTYPES: Mapping[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


_INFINITY: dict[str, tuple[Any, Any, int]] = {
    "float32": (np.int32, np.uint32, 0x7F80_0000),
    "bfloat16": (np.int16, np.uint16, 0x7F80),
    "float16": (np.int16, np.uint16, 0x7C00),
}
"""The integers to read a dtype as, and its infinity read so."""

OTHERS: Final = "*"
"""The key that stands for every table that is not named."""

Storage = str | Mapping[str, str]


def storage_by_table(storage: Storage, tables: Iterable[str]) -> dict[str, str]:
    """Return the key of STORAGES for each of `tables`.

    Args:
        storage: one type for all tables, or a mapping by name, with "*" for other tables. Without "*", they are
            float32.
        tables: the exported tables.

    Raises:
        ConfigError: unknown storage type.
        UnknownTableError: a table is not exported.
    """
    tables = list(tables)
    chosen = {OTHERS: storage} if isinstance(storage, str) else storage
    if not isinstance(chosen, Mapping):
        raise ConfigError(f"storage must be a storage type, or a mapping of tables to storage types, got {storage!r}.")
    for name, value in chosen.items():
        if name != OTHERS and name not in tables:
            raise UnknownTableError(f"storage: table {name!r} is not exported; {did_you_mean(str(name), tables)}")
        check_choice("storage" if name == OTHERS else f"storage: table {name!r}: it", value, STORAGES)
    return {table: chosen.get(table, chosen.get(OTHERS, "float32")) for table in tables}


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """The form of a table's rows, in the checkpoint and in the export.

    Attributes:
        source_dtype: key of SOURCE_DTYPES.
        storage: key of STORAGES.
        dim: width of the table.
        is_quantized: its values are quantized as in training.
    """

    source_dtype: str
    storage: str
    dim: int
    is_quantized: bool = False

    @property
    def source_bytes(self) -> int:
        """Return the bytes of a row in the checkpoint."""
        return SOURCE_DTYPES[self.source_dtype].itemsize * self.dim

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of a stored row."""
        return STORAGES[self.storage].row_bytes(self.dim)

    @property
    def is_copied(self) -> bool:
        """Returns True if the stored bytes are those of the checkpoint."""
        return self.source_dtype == self.storage and not self.is_quantized

    @property
    def is_exact(self) -> bool:
        """Returns True if lookups of the stored table equal those of a float32 table."""
        return self.storage in ("float32", self.source_dtype)

    def chunk_bytes(self, rows: int) -> int:
        """Return the bytes of buffers for a chunk of `rows`: as stored, as read if that differs, and scratch of a
        block.
        """
        if self.is_copied:
            return rows * self.stored_bytes
        is_widened = self.storage != "float32" and (self.source_dtype != "float32" or self.is_quantized)
        scratch = STORAGES[self.storage].scratch_bytes(self.dim) + 4 * self.dim * is_widened
        sample = 0 if self.is_exact else sampled_rows(rows, self.dim) * self.dim * SAMPLE_VALUE_BYTES
        return rows * (self.stored_bytes + self.source_bytes) + min(rows, block_rows(self.dim)) * scratch + sample

    def rows_within(self, budget: int) -> int:
        """Return the most rows whose chunk fits in `budget` bytes; 1 if none fits."""
        return _rows_within(self, budget)


@functools.lru_cache(maxsize=1 << 12)
def _rows_within(rows: RowFormat, budget: int) -> int:
    return most_rows(budget, rows.chunk_bytes, budget)


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


class RowEncoder:
    """Encodes rows of a checkpoint as stored rows, one block at a time. A block fits in a core's cache."""

    def __init__(self, storage: str, dim: int, quantization: QuantizationConfig | None) -> None:
        self._storage, self._quantization = storage, quantization
        self._block_rows = block_rows(dim)
        levels = None
        if quantization is not None:
            levels = Levels(quantization.lower, quantization.quantum, quantization.num_buckets)
        self._codec = STORAGES[storage](dim, levels)
        self._widened: npt.NDArray[np.float32] | None = None

    def encode(self, rows: _Array, out: _Array) -> float:
        """Store `rows` [n, dim] in `out` [n, columns(dim)]. Return the largest difference of a looked up value from
        float32.

        Infinities and NaN that are stored unchanged do not count.

        Raises:
            UnstorableRowError: this storage cannot hold a row; the error has its index in `rows`.
        """
        worst = 0.0
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            for start in range(0, len(rows), self._block_rows):
                block = slice(start, start + self._block_rows)
                wide = self.widen(rows[block], out[block] if self._storage == "float32" else None)
                worst = max(worst, self._codec.encode(wide, out[block], start))
        return worst

    def widen(self, rows: _Array, into: _Array | None = None) -> npt.NDArray[np.float32]:
        """Return `rows`, at most a block, as float32 storage holds them: quantized as in training. Valid until the next
        call.
        """
        if self._quantization is None and rows.dtype == np.float32 and into is None:
            return rows
        if into is None:
            if self._widened is None:
                self._widened = np.empty((self._block_rows, rows.shape[1]), np.float32)
            into = self._widened[: len(rows)]
        into[...] = rows
        if self._quantization is not None:
            quantize(into, self._quantization)
        return into


def quantize(values: npt.NDArray[np.float32], quantization: QuantizationConfig) -> None:
    """Replace `values` by the nearest of `num_buckets` levels from `lower` to `upper`. NaN stays NaN.

    Source: SimulatedQuantization in tensorflow/core/protobuf/tpu/optimization_parameters.proto, and the docstring of
    `tf.tpu.experimental.embedding.QuantizationConfig`; in float32, as accelerators compute.
    """
    np.clip(values, quantization.lower, quantization.upper, out=values)
    values -= np.float32(quantization.lower)
    values /= np.float32(quantization.quantum)
    values += np.float32(0.5)
    np.floor(values, out=values)
    values *= np.float32(quantization.quantum)
    values += np.float32(quantization.lower)


def first_not_finite(rows: npt.NDArray[Any]) -> int | None:
    """Return the index of the first of `rows` [n, dim] with a NaN or an infinity, or None if all values are finite.

    No copy is made. Read as integers, IEEE 754 numbers of one sign are in the order of their sizes, and infinities and NaN are the
    last. So the largest signed integer shows whether there is one with a plus, and the largest unsigned integer one with a minus.
    """
    signed, unsigned, plus = _INFINITY[rows.dtype.name]
    minus = plus | 1 << (8 * rows.dtype.itemsize - 1)
    step = block_rows(rows.shape[1])
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        if block.view(signed).max() >= plus or block.view(unsigned).max() >= minus:
            bad = (block.view(signed).max(axis=1) >= plus) | (block.view(unsigned).max(axis=1) >= minus)
            return start + int(np.argmax(bad))
    return None
