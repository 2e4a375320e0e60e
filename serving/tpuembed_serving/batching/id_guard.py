"""Finds the requests of a batch whose ids may fail it. They run apart, so that other requests do not fail with them.

It is for signatures whose accepted ids are not known (`known_ids`), such as those of other programs' SavedModels. It compares
requests before a batch is formed. A request that it misses fails its batch, which is then halved until the request is found.
"""

from collections.abc import Sequence

import numpy as np

from tpuembed_serving.batching.concat import Merged
from tpuembed_serving.core.servable import Array

__all__ = ["LearntIds"]


class _Bounds:
    """The lowest and highest value of each integer input. Replaced as a whole, because several threads read it."""

    def __init__(self, lowest: Sequence[int], highest: Sequence[int]) -> None:
        self.lowest = np.array(lowest, np.int64)[:, None]
        self.highest = np.array(highest, np.int64)[:, None]


class LearntIds:
    """Separates requests whose ids are in ranges that cover all values which succeeded so far.

    A value between two that succeeded is assumed to succeed. If it fails its batch, the request is found by halving.
    """

    def __init__(self, inputs: int) -> None:
        """Start with empty ranges for so many inputs."""
        limits = np.iinfo(np.int64)
        self._bounds = _Bounds([limits.max] * inputs, [limits.min] * inputs)

    def suspects(self, merged: Merged) -> set[int]:
        """Return the indices of the requests that contain an id which may fail."""
        outside = self._outside(merged)
        if outside is None:
            return set()
        rows = np.flatnonzero(outside[: merged.stops[-1]])  # later rows are copies that fill up the batch
        return set(np.searchsorted(merged.stops, rows, side="right").tolist())

    def _outside(self, merged: Merged) -> Array | None:
        """Return which rows contain such an id, bool [rows]. None if no row does."""
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
        """Widen the ranges. If two threads do so at once, one update may be lost; a later request repeats it."""
        bounds = self._bounds
        lowest, highest = bounds.lowest[:, 0].tolist(), bounds.highest[:, 0].tolist()
        for index, array in enumerate(inputs):
            if array.dtype.kind in "iu" and array.size:
                lowest[index] = min(lowest[index], _clipped(array.min()))
                highest[index] = max(highest[index], _clipped(array.max()))
        self._bounds = _Bounds(lowest, highest)


def _clipped(value: np.integer) -> int:
    """Return `value` as an int64. Larger uint64 values are clipped so that they stay outside every range."""
    return min(int(value), int(np.iinfo(np.int64).max) - 1)
