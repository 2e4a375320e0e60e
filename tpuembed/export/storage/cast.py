"""Storage types that are casts: float32, bfloat16, float16."""

from typing import Any

import numpy as np
import numpy.typing as npt

from tpuembed.export.storage.types import UnstorableRowError, block_rows

__all__ = ["CastBlocks"]

_Floats = npt.NDArray[np.float32]


class CastBlocks:
    """Casts blocks of rows and measures the error."""

    def __init__(self, dim: int, *, exact: bool) -> None:
        """Create buffers. `exact`: rows are read straight into their place, so there is nothing to cast."""
        self._exact = exact
        self._error: _Floats = np.empty((0 if exact else block_rows(dim), dim), np.float32)

    def encode(self, block: _Floats, out: npt.NDArray[Any], start: int) -> float:
        """See BlockEncoder."""
        if self._exact:
            return 0.0
        out[...] = block
        error = self._error[: len(block)]
        error[...] = out
        error -= block
        worst = float(max(error.max(), -error.min()))
        return worst if np.isfinite(worst) else _worst_of_finite(block, out, error, start)


def _worst_of_finite(block: _Floats, out: npt.NDArray[Any], error: _Floats, start: int) -> float:
    """Return the largest error of a block that contains infinities or NaN, which a cast keeps.

    Raises:
        UnstorableRowError: a finite value became infinite.
    """
    finite = np.isfinite(block)
    overflown = finite & ~np.isfinite(error)
    if overflown.any():
        row, column = np.argwhere(overflown)[0]
        raise UnstorableRowError(start + int(row), f"{block[row, column]:g}, which overflows {out.dtype.name}")
    return float(np.abs(error, where=finite, out=np.zeros_like(error)).max())
