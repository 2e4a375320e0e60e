"""How a table's rows are stored in an export: one codec per storage type.

float32, bfloat16 and float16 are casts to the nearest value, ties to even, as `tf.cast` rounds. An int8 row has codes
and two numbers that turn them into values; see `tpuembed.export.storage.int8`. Lookups return float32 for all types.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tpuembed.config import QuantizationConfig
from tpuembed.export.storage.cast import CastBlocks
from tpuembed.export.storage.int8 import Int8Blocks
from tpuembed.export.storage.training_quantization import quantize
from tpuembed.export.storage.types import BlockEncoder, block_rows
from tpuembed.saved_model.stored_rows import PARAMETER_BYTES, decode_int8

__all__ = ["SOURCE_DTYPES", "STORAGES", "Codec", "RowEncoder", "is_exact", "scratch_bytes"]

_Array = npt.NDArray[Any]

# The supported dtypes of a table in a checkpoint, by the name that plans and manifests use.
SOURCE_DTYPES: Mapping[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


@dataclasses.dataclass(frozen=True)
class Codec:
    """A storage type.

    Attributes:
        name: its name in `--storage`.
        dtype: of the stored variable.
        columns: returns the elements of one stored row of a table of width `dim`.
        blocks: returns an encoder for blocks of rows of width `dim`, given the table's quantization in training, or
            None.
        decode: returns stored rows [n, columns(dim)] as float32 [n, dim], as a lookup computes them.
        scratch: returns the bytes that `blocks` needs per row of a block, beside rows and stored rows.
    """

    name: str
    dtype: np.dtype[Any]
    columns: Callable[[int], int]
    blocks: Callable[[int, QuantizationConfig | None], BlockEncoder]
    decode: Callable[[_Array], npt.NDArray[np.float32]]
    scratch: Callable[[int], int]

    def row_bytes(self, dim: int) -> int:
        """Return the bytes of one stored row of a table of width `dim`."""
        return self.columns(dim) * self.dtype.itemsize


def _cast(name: str) -> Codec:
    dtype, exact = SOURCE_DTYPES[name], name == "float32"
    return Codec(
        name,
        dtype,
        columns=lambda dim: dim,
        blocks=lambda dim, _: CastBlocks(dim, exact=exact),
        decode=lambda stored: stored.astype(np.float32),
        scratch=lambda dim: 0 if exact else 4 * dim,
    )


STORAGES: Mapping[str, Codec] = {
    **{name: _cast(name) for name in SOURCE_DTYPES},
    "int8": Codec(
        "int8",
        np.dtype(np.int8),
        columns=lambda dim: dim + PARAMETER_BYTES,
        blocks=Int8Blocks,
        decode=decode_int8,
        scratch=Int8Blocks.scratch_bytes,
    ),
}


def is_exact(source_dtype: str, storage: str) -> bool:
    """Returns True if lookups of a table stored in this type equal those of a float32 table."""
    return storage in ("float32", source_dtype)


def scratch_bytes(source_dtype: str, storage: str, is_quantized: bool, dim: int) -> int:
    """Return the bytes that a RowEncoder needs per row of a block, of at most `block_rows(dim)` rows."""
    is_widened = storage != "float32" and (source_dtype != "float32" or is_quantized)
    return STORAGES[storage].scratch(dim) + 4 * dim * is_widened


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
