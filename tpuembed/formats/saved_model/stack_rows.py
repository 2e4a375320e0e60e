"""Reads the stored rows of a stack of an export. Rows of an overlay replace those of its base."""

from typing import Any

import numpy as np
import numpy.typing as npt

from tpuembed.files import FilePath, open_bytes
from tpuembed.manifest import ArrayEntry, OverlayEntry, StackEntry

__all__ = ["StackRows"]

_Bytes = npt.NDArray[np.uint8]


class StackRows:
    """The rows of one stack, in any pieces. A read uses the memory of its rows."""

    def __init__(self, version: FilePath, stack: StackEntry) -> None:
        self._version, self._stack = version, stack

    def read(self, first: int, count: int) -> _Bytes:
        """Return the bytes [count, row_bytes] of the stack's rows from `first` on. Raises OSError or EOFError."""
        out = np.empty((count, self._stack.row_bytes), np.uint8)
        self._fill(self._stack.arrays[0], first, out)
        if self._stack.overlay is not None:
            self._replace(self._stack.overlay, first, out)
        return out

    def _replace(self, overlay: OverlayEntry, first: int, out: _Bytes) -> None:
        """Replace the rows in `out`, which are those of the stack from `first` on, that are in the overlay."""
        if not len(out):
            return
        words = np.empty(((first + len(out) - 1) // 32 - first // 32 + 1, 2), np.int32)
        self._fill(overlay.words, first // 32, words)
        bits = np.unpackbits(words[:, 0].copy().view(np.uint8), bitorder="little")
        before = first % 32
        places = np.flatnonzero(bits[before : before + len(out)])
        if len(places):
            rows = np.empty((len(places), out.shape[1]), np.uint8)
            self._fill(overlay.rows, int(words[0, 1]) + 1 + int(bits[:before].sum()), rows)
            out[places] = rows

    def _fill(self, array: ArrayEntry, start: int, out: npt.NDArray[Any]) -> None:
        """Fill `out` with the rows of `array` from `start` on."""
        file = open_bytes(self._version / array.file)
        try:
            file.read_into(array.offset + start * (array.size // array.rows), out.reshape(-1).view(np.uint8).data)
        finally:
            file.close()
