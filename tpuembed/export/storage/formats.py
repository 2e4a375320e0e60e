"""How a table's rows are stored in an export: one codec per storage type, and the form of a table's rows.

float32, bfloat16 and float16 are casts to the nearest value, ties to even, as `tf.cast` rounds. An int8 row has codes
and two numbers that turn them into values; see `encoders`. Lookups return float32 for all types.
"""

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
from tpuembed.export.storage.encoders import BlockEncoder, CastBlocks, Int8Blocks, block_rows, quantize
from tpuembed.export.storage.error import SAMPLE_VALUE_BYTES, sampled_rows
from tpuembed.formats.saved_model.stack_rows import PARAMETER_BYTES, decode_int8

__all__ = [
    "OTHERS",
    "SOURCE_DTYPES",
    "STORAGES",
    "Codec",
    "RowEncoder",
    "RowFormat",
    "Storage",
    "most_rows",
    "storage_by_table",
]

_Array = npt.NDArray[Any]
_Tensor = Any

# The supported dtypes of a table in a checkpoint, by the name that plans and manifests use.
SOURCE_DTYPES: Mapping[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Codec:
    """A storage type.

    Attributes:
        dtype: of the stored variable.
        columns: returns the elements of one stored row of a table of width `dim`.
        blocks: returns an encoder for blocks of rows of width `dim`, given the table's quantization in training, or
            None.
        decode: returns stored rows [n, columns(dim)] as float32 [n, dim], as a lookup computes them.
        decode_in_graph: the same for tensors; takes the stored rows and `dim`.
        scratch: returns the bytes that `blocks` needs per row of a block, beside rows and stored rows.
    """

    dtype: np.dtype[Any]
    columns: Callable[[int], int]
    blocks: Callable[[int, QuantizationConfig | None], BlockEncoder]
    decode: Callable[[_Array], npt.NDArray[np.float32]]
    decode_in_graph: Callable[[_Tensor, int], _Tensor]
    scratch: Callable[[int], int]

    def row_bytes(self, dim: int) -> int:
        """Return the bytes of one stored row of a table of width `dim`."""
        return self.columns(dim) * self.dtype.itemsize


def _cast(name: str) -> Codec:
    exact = name == "float32"
    return Codec(
        dtype=SOURCE_DTYPES[name],
        columns=lambda dim: dim,
        blocks=lambda dim, _: CastBlocks(dim, exact=exact),
        decode=lambda stored: stored.astype(np.float32),
        decode_in_graph=_cast_in_graph,
        scratch=lambda dim: 0 if exact else 4 * dim,
    )


def _cast_in_graph(stored: _Tensor, _: int) -> _Tensor:
    import tensorflow as tf  # here, because the processes that write shards import this module

    return tf.cast(stored, tf.float32)


def _int8_in_graph(stored: _Tensor, dim: int) -> _Tensor:
    import tensorflow as tf

    codes, parameters = tf.split(stored, [dim, PARAMETER_BYTES], axis=1)
    scale, centre = tf.split(tf.bitcast(tf.reshape(parameters, [-1, 2, 4]), tf.float32), 2, axis=1)
    return tf.cast(codes, tf.float32) * scale + centre


STORAGES: Mapping[str, Codec] = {
    **{name: _cast(name) for name in SOURCE_DTYPES},
    "int8": Codec(
        dtype=np.dtype(np.int8),
        columns=lambda dim: dim + PARAMETER_BYTES,
        blocks=Int8Blocks,
        decode=decode_int8,
        decode_in_graph=_int8_in_graph,
        scratch=Int8Blocks.scratch_bytes,
    ),
}

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
        scratch = STORAGES[self.storage].scratch(self.dim) + 4 * self.dim * is_widened
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
        self._blocks = STORAGES[storage].blocks(dim, quantization)
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
                worst = max(worst, self._blocks.encode(wide, out[block], start))
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
