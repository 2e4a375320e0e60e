"""Which requests of a merged run may hold ids that fail it. They run alone, so that they fail nobody else."""

from collections.abc import Sequence

import numpy as np

from tpuembed_serving.batching.concat import Merged
from tpuembed_serving.core.servable import Array, IdRange

__all__ = ["IdGuard", "KnownIds", "LearntIds"]


class _Bounds:
    """Lowest and highest value of each integer input; replaced as a whole, because several threads read it."""

    def __init__(self, lowest: Sequence[int], highest: Sequence[int]) -> None:
        self.lowest = np.array(lowest, np.int64)[:, None]
        self.highest = np.array(highest, np.int64)[:, None]


class IdGuard:
    """Tells the requests apart whose ids are known not to fail from those of which that is not known."""

    def __init__(self, bounds: _Bounds) -> None:
        self._bounds = bounds

    def suspects(self, merged: Merged) -> set[int]:
        """Requests, by their index, that hold an id which may fail."""
        outside = self._outside(merged)
        if outside is None:
            return set()
        rows = np.flatnonzero(outside[: merged.stops[-1]])  # those that fill a run up are copies
        return set(np.searchsorted(merged.stops, rows, side="right").tolist())

    def _outside(self, merged: Merged) -> Array | None:
        """bool [rows], which rows hold such an id; None where none does."""
        lowest, highest = self._bounds.lowest, self._bounds.highest
        block = merged.block
        if block is not None:
            if (block >= lowest).all() and (block <= highest).all():
                return None
            return np.any((block < lowest) | (block > highest), axis=0)
        outside = np.zeros(merged.rows, bool)
        for array, low, high in zip(merged.inputs, lowest[:, 0], highest[:, 0], strict=True):
            if array.dtype.kind in "iu":
                outside |= np.any(((array < low) | (array > high)).reshape(merged.rows, -1), axis=1)
        return outside

    def learn(self, inputs: Sequence[Array]) -> None:
        """These inputs did not fail."""


class KnownIds(IdGuard):
    """The ranges are known."""

    def __init__(self, ranges: Sequence[IdRange | None]) -> None:
        """`ranges` by input; None where any value is accepted."""
        limits = np.iinfo(np.int64)
        lowest = [limits.min if accepted is None else accepted.start for accepted in ranges]
        highest = [limits.max if accepted is None else accepted.stop - 1 for accepted in ranges]
        super().__init__(_Bounds(lowest, highest))


class LearntIds(IdGuard):
    """The ranges are those of all values that were answered so far.

    It suits ranges: a value between two that were answered is taken to be answered as well. One that is not fails a merged
    run, and is then found in it.
    """

    def __init__(self, inputs: int) -> None:
        """`inputs`: how many the signature has."""
        limits = np.iinfo(np.int64)
        super().__init__(_Bounds([limits.max] * inputs, [limits.min] * inputs))

    def learn(self, inputs: Sequence[Array]) -> None:
        """Widen the ranges. Of two threads that do so at once, one may be forgotten, and is learnt another time."""
        bounds = self._bounds
        lowest, highest = bounds.lowest[:, 0].tolist(), bounds.highest[:, 0].tolist()
        for index, array in enumerate(inputs):
            if array.dtype.kind in "iu" and array.size:
                lowest[index] = min(lowest[index], _clipped(array.min()))
                highest[index] = max(highest[index], _clipped(array.max()))
        self._bounds = _Bounds(lowest, highest)


def _clipped(value: np.integer) -> int:
    """Of uint64, to what int64 holds: larger ones stay outside of every range."""
    return min(int(value), int(np.iinfo(np.int64).max) - 1)
