"""How a table's rows are stored in an export: one codec per storage type.

float32, bfloat16 and float16 are casts, to the nearest value and of two to the even one, as `tf.cast` rounds. int8 is a
row of codes and two numbers that turn them into values; see `storage_int8`. All of them are looked up as float32.
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

# The dtypes a table may have in a checkpoint, by the name that plans and manifests use.
SOURCE_DTYPES: Mapping[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


@dataclasses.dataclass(frozen=True)
class Codec:
    """A storage type.

    Attributes:
        name: as `--storage` names it.
        dtype: of the stored variable.
        columns: elements of one stored row of a table of width `dim`.
        blocks: makes what encodes blocks of rows of width `dim`, of a table that was quantized in training or not.
        decode: float32 [n, dim] of stored rows [n, columns(dim)], as a lookup computes them.
        scratch: bytes that `blocks` needs per row of a block, beside rows and stored rows.
    """

    name: str
    dtype: np.dtype[Any]
    columns: Callable[[int], int]
    blocks: Callable[[int, QuantizationConfig | None], BlockEncoder]
    decode: Callable[[_Array], npt.NDArray[np.float32]]
    scratch: Callable[[int], int]

    def row_bytes(self, dim: int) -> int:
        """Bytes of one stored row of a table of width `dim`."""
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
    """Whether lookups of a table that is stored so are those of a float32 table."""
    return storage in ("float32", source_dtype)


def scratch_bytes(source_dtype: str, storage: str, is_quantized: bool, dim: int) -> int:
    """Bytes that a RowEncoder needs per row of a block; it never has more than `block_rows(dim)` of them."""
    is_widened = storage != "float32" and (source_dtype != "float32" or is_quantized)
    return STORAGES[storage].scratch(dim) + 4 * dim * is_widened


class RowEncoder:
    """Turns rows of a checkpoint into stored rows, a block that stays in a core's cache at a time."""

    def __init__(self, storage: str, dim: int, quantization: QuantizationConfig | None) -> None:
        self._storage, self._quantization = storage, quantization
        self._block_rows = block_rows(dim)
        self._blocks = STORAGES[storage].blocks(dim, quantization)
        self._widened: npt.NDArray[np.float32] | None = None

    def encode(self, rows: _Array, out: _Array) -> float:
        """Store `rows` [n, dim] in `out` [n, columns(dim)]; the largest difference that a lookup will find to float32.

        Values that are not finite, and are stored as they are, do not count.

        Raises:
            UnstorableRowError: a row holds what this storage cannot; its index is that in `rows`.
        """
        worst = 0.0
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            for start in range(0, len(rows), self._block_rows):
                block = slice(start, start + self._block_rows)
                wide = self.widen(rows[block], out[block] if self._storage == "float32" else None)
                worst = max(worst, self._blocks.encode(wide, out[block], start))
        return worst

    def widen(self, rows: _Array, into: _Array | None = None) -> npt.NDArray[np.float32]:
        """`rows` as float32 storage would hold them: quantized as in training. At most a block; valid until the next call."""
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
