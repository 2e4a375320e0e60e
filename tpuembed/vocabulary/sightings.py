"""How often, and when, training saw the names of a vocabulary that grows."""

from typing import Final

import numpy as np
import numpy.typing as npt

from tpuembed.vocabulary.text import GrowingArray

__all__ = ["MOST_UPDATE", "NEVER", "Sightings"]

_Integers = npt.NDArray[np.int64]

NEVER: Final = -1
"""The last update of a row without a name."""
_MOST_COUNT: Final = 2**32 - 1
MOST_UPDATE: Final = 2**31 - 1


class Sightings:
    """The count and the last update of each name, by its number, in 8 bytes a name.

    Attributes:
        update: the latest update that is known.
    """

    def __init__(self, update: int = 0) -> None:
        self.update = update
        self._counts, self._last_seen = GrowingArray(np.uint32), GrowingArray(np.int32)

    @property
    def counts(self) -> npt.NDArray[np.uint32]:
        """Return how often each name was seen, uint32 [n]. The result is no copy."""
        return self._counts.values

    @property
    def last_seen(self) -> npt.NDArray[np.int32]:
        """Return the update in which each name was last seen, int32 [n]; NEVER where there is no name. It is no copy."""
        return self._last_seen.values

    def extend(self, size: int) -> None:
        """Let there be `size` names. New ones were not seen, and are as young as the latest update."""
        self._counts.extend(size, 0)
        self._last_seen.extend(size, self.update)

    def put(
        self, numbers: _Integers, counts: npt.NDArray[np.generic], last_seen: npt.NDArray[np.generic] | int
    ) -> None:
        """Set the counts and the last updates of `numbers`."""
        self.counts[numbers], self.last_seen[numbers] = counts, last_seen

    def forget(self, numbers: _Integers) -> None:
        """Let `numbers` have no name."""
        self.counts[numbers], self.last_seen[numbers] = 0, NEVER

    def mark(self, numbers: _Integers, update: int) -> None:
        """Count names as seen in `update`, once for each time that a number is there."""
        self.begin(update)
        self.update = max(self.update, int(update))
        different, times = np.unique(numbers, return_counts=True)
        self.counts[different] = np.minimum(self.counts[different] + times, _MOST_COUNT)
        self.last_seen[different] = np.maximum(self.last_seen[different], update)

    def begin(self, update: int) -> None:
        """Let the names that no update has seen yet be as young as the one before `update`, if it is the first that is known.

        So the names of a vocabulary that did not count are not old when it begins to.
        """
        if not self.update and update > 1 and not self.counts.any():
            np.maximum(self.last_seen, update - 1, out=self.last_seen, where=self.last_seen != NEVER)

    def start_at(self, update: int) -> None:
        """Let no name be counted, and all be as young as `update`."""
        self.update = min(int(update), MOST_UPDATE)
        self.counts[:] = 0
        np.copyto(self.last_seen, self.update, where=self.last_seen != NEVER)

    def renumber(self, update: int) -> None:
        """Renumber the updates, so that the latest one is `update`. No name is older than the first update then."""
        moved = np.maximum(self.last_seen.astype(np.int64) + (int(update) - self.update), 0)
        np.copyto(self.last_seen, moved.astype(np.int32), where=self.last_seen != NEVER)
        self.update = int(update)

    def chosen(self, not_seen_for: int | None, min_count: int | None, update: int | None) -> _Integers:
        """Return the numbers of names that are old, or rare, or, if both are given, old and rare. See `Vocabulary.evict`."""
        if update is not None:
            self.begin(update + 1)
        found = self.last_seen != NEVER
        if not_seen_for is not None:
            found &= self.last_seen <= (self.update if update is None else update) - not_seen_for
        if min_count is not None:
            found &= self.counts < min_count
        return np.flatnonzero(found)
