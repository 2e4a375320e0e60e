"""Finds NaN and infinities in rows, without a copy of them, in blocks that stay in a core's cache.

Read as integers, IEEE 754 numbers of one sign are in the order of their sizes, and infinities and NaN are the last. So the
largest signed integer shows whether there is one with a plus, and the largest unsigned integer one with a minus.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpuembed.export.storage.encoders import block_rows

__all__ = ["first_not_finite"]

_INFINITY: Final[dict[str, tuple[Any, Any, int]]] = {
    "float32": (np.int32, np.uint32, 0x7F80_0000),
    "bfloat16": (np.int16, np.uint16, 0x7F80),
    "float16": (np.int16, np.uint16, 0x7C00),
}
"""The integers to read a dtype as, and its infinity read so."""


def first_not_finite(rows: npt.NDArray[Any]) -> int | None:
    """Return the index of the first of `rows` [n, dim] with a NaN or an infinity, or None if all values are finite."""
    signed, unsigned, plus = _INFINITY[rows.dtype.name]
    minus = plus | 1 << (8 * rows.dtype.itemsize - 1)
    step = block_rows(rows.shape[1])
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        if block.view(signed).max() >= plus or block.view(unsigned).max() >= minus:
            bad = (block.view(signed).max(axis=1) >= plus) | (block.view(unsigned).max(axis=1) >= minus)
            return start + int(np.argmax(bad))
    return None
