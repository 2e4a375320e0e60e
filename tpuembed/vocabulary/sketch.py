"""A count-min sketch: about how often names were seen, in 16 MiB, however many they are.

Source: Cormode and Muthukrishnan, "An improved data stream summary", with the conservative update of Estan and
Varghese, "New directions in traffic measurement and accounting"; the ageing is that of TinyLFU.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["MOST", "Sketch"]

_Integers = npt.NDArray[np.int64]

MOST: Final = 255
"""The highest count."""
_BITS: Final = 22
_FACTORS: Final = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93, 0xFF51AFD7ED558CCD], np.uint64)


class Sketch:
    """Counts keys. A count is never too low, unless it was halved, and seldom too high.

    When half of the cells are in use, all counts are halved, so that keys that are seen once do not fill it up.
    """

    def __init__(self) -> None:
        self._cells = np.zeros((len(_FACTORS), 1 << _BITS), np.uint8)
        self._used = 0

    def count(self, keys: _Integers, times: _Integers) -> _Integers:
        """Count that `keys`, all different, were seen `times` more. Returns how often each was seen, at most MOST."""
        mixed = keys.view(np.uint64)
        mixed = mixed ^ (mixed >> np.uint64(32))
        with np.errstate(over="ignore"):
            places = ((mixed[None] * _FACTORS[:, None]) >> np.uint64(64 - _BITS)).astype(np.int64)
        rows = range(len(_FACTORS))
        before = np.min([self._cells[row, places[row]] for row in rows], 0).astype(np.int64)
        counts = np.minimum(before + times, MOST)
        for row in rows:
            if row == 0:
                self._used += len(np.unique(places[0][self._cells[0, places[0]] == 0]))
            np.maximum.at(self._cells[row], places[row], counts.astype(np.uint8))
        if self._used > 1 << (_BITS - 1):
            self._cells >>= np.uint8(1)
            self._used = int(np.count_nonzero(self._cells[0]))
        return counts
