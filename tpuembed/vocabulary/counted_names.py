"""Names with numbers, how often each was seen, and which new ones get a number."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tpuembed.vocabulary.index import NONE
from tpuembed.vocabulary.name_arrays import Batch, DType
from tpuembed.vocabulary.numbered_names import NumberedNames
from tpuembed.vocabulary.saved import SavedNames
from tpuembed.vocabulary.sightings import Sightings
from tpuembed.vocabulary.sketch import Sketch

__all__ = ["CountedNames"]

_Integers = npt.NDArray[np.int64]


class CountedNames(NumberedNames):
    """Names by their numbers, with the count and the last update of each, if they are counted.

    Attributes:
        sightings: the counts and last updates. Empty, but for its `update`, if names are not counted.
    """

    def __init__(self, dtype: DType, *, counted: bool) -> None:
        """Have no names."""
        super().__init__(dtype)
        self.sightings = Sightings()
        self._counted = counted
        self._sketch: Sketch | None = None

    def fill(self, batch: Batch, numbers: npt.NDArray[Any] | None = None, size: int = 0) -> int:
        """Give names numbers, see `NumberedNames.fill`. None of them was seen."""
        count = super().fill(batch, numbers, size)
        if self._counted:
            self.sightings.extend(count)
        return count

    def admit(
        self, batch: Batch, keys: _Integers, found: _Integers, missing: _Integers, *, room: int, least: int
    ) -> None:
        """Give numbers to new names, and put them into `found`.

        Args:
            batch, keys: many names.
            found: int64 [n], the number of each, or NONE.
            missing: the places of those of them that have none and may get one.
            room: numbers are lower.
            least: how often a name has to be seen.
        """
        if not len(missing) or not self.has_room(room):
            return
        new, new_keys = self.store.take(batch, missing), keys[missing]
        order, first = self.different(new, new_keys)
        chosen, before = np.arange(len(first)), np.zeros(len(first), np.int64)
        if least > 1:
            self._sketch = self._sketch or Sketch()
            times = np.bincount(order)
            counts = self._sketch.count(new_keys[first], times)
            before = np.maximum(counts - times, 0)
            chosen = np.flatnonzero(counts >= least)
        numbers = self.unused(len(chosen), room)
        chosen = chosen[: len(numbers)]
        self.give(self.store.take(new, first[chosen]), new_keys[first[chosen]], numbers)
        if self._counted:
            self.sightings.extend(self.size)
            self.sightings.put(numbers, before[chosen], self.sightings.update)
        given = np.full(len(first), NONE, np.int64)
        given[chosen] = numbers
        found[missing] = given[order]

    def drop(self, numbers: _Integers) -> None:
        """Free numbers, which have names and are ascending. What was counted of names without a number is forgotten."""
        super().drop(numbers)
        self._sketch = None
        if self._counted:
            self.sightings.forget(numbers)

    def save(self, options: Mapping[str, Any], *, copy: bool = False) -> SavedNames:
        """Return all of it: views, or, with `copy`, what later changes leave as it is."""
        alive: Any = slice(None)
        if len(self.free) or copy:
            alive = np.setdiff1d(np.arange(self.size), self.free, assume_unique=True)
        seen = self.sightings
        counts, last_seen = (seen.counts[alive], seen.last_seen[alive]) if self._counted else (None, None)
        return SavedNames(dict(options), self.store.get(alive), self.free, seen.update, counts, last_seen)

    def load(self, saved: SavedNames, *, is_own: bool) -> None:
        """Take the names of `saved`, and have none before. Its arrays are kept if they are the caller's own."""
        self.sightings.update = saved.update
        size = len(saved.names) + len(saved.free)
        self.fill(saved.names, None if is_own and not len(saved.free) else saved.numbers(), size)
        self.free = saved.free
        if self._counted:
            if saved.counts is not None and saved.last_seen is not None:
                self.sightings.put(saved.numbers(), saved.counts, saved.last_seen)
            self.sightings.forget(saved.free)
