"""Shared parts of the storage types: blocks of rows, and the error for a row that a type cannot hold."""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["BlockEncoder", "UnstorableRowError", "block_rows"]

# Elements of a block. With its scratch, a block fits in a core's cache, and numpy's call overhead stays small.
_BLOCK_ELEMENTS = 1 << 17
# What a row costs beside its elements: columns of numbers per row.
_ROW_ELEMENTS = 16


class UnstorableRowError(Exception):
    """A storage type cannot hold a row. The error has its index, and the reason as the end of a sentence."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index


class BlockEncoder(Protocol):
    """Stores blocks of rows."""

    def encode(self, block: npt.NDArray[np.float32], out: npt.NDArray[Any], start: int) -> float:
        """Store `block` [n, dim] in `out` [n, columns] and return the largest error. `start` is the number of its first
        row.

        Raises:
            UnstorableRowError: this storage cannot hold a row.
        """


def block_rows(dim: int) -> int:
    """Return the rows of a block of a table of width `dim`."""
    return max(1, _BLOCK_ELEMENTS // (dim + _ROW_ELEMENTS))
