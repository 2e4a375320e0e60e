"""What the storage types share: blocks of rows, and rows that one of them cannot hold."""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["BlockEncoder", "UnstorableRowError", "block_rows"]

# Elements of a block: with its scratch it stays in a core's cache, and numpy's calls cost less than their work.
_BLOCK_ELEMENTS = 1 << 17
# What a row costs beside its elements: columns of numbers per row.
_ROW_ELEMENTS = 16


class UnstorableRowError(Exception):
    """A row that a storage type cannot hold: its index, and why, as the end of a sentence about it."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index


class BlockEncoder(Protocol):
    """Stores one block of rows after another."""

    def encode(self, block: npt.NDArray[np.float32], out: npt.NDArray[Any], start: int) -> float:
        """Store `block` [n, dim] in `out` [n, columns]; the largest error. `start` is the row number of its first row.

        Raises:
            UnstorableRowError: this storage cannot hold a row.
        """


def block_rows(dim: int) -> int:
    """Rows of a block of a table of width `dim`."""
    return max(1, _BLOCK_ELEMENTS // (dim + _ROW_ELEMENTS))
