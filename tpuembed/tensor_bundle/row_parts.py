"""The parts of a tensor in order of their rows, to find the bytes of many runs of rows at once."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import numpy as np

from tpuembed.tensor_bundle.entries import Entry

__all__ = ["RowParts"]

Array = np.ndarray[Any, Any]
Ranges = Iterable[tuple[int, memoryview]]
"""(offset in a data file, the bytes to fill)."""


class RowParts:
    """The parts of a tensor that is not empty, and whose slices, if any, have whole rows."""

    def __init__(self, entry: Entry) -> None:
        parts = sorted((part for part in entry.parts() if part.size), key=lambda part: part.start[0])
        self._starts, self._shards, self._offsets, self._ends = (
            np.array(numbers, np.int64)
            for numbers in zip(*((p.start[0], p.shard, p.offset, p.offset + p.size) for p in parts), strict=True)
        )
        self._rows = entry.shape[0]
        self._row_bytes = sum(part.size for part in parts) // self._rows

    @classmethod
    def of(cls, entry: Entry) -> Self | None:
        """Return the parts of a tensor, or None if it is empty, or if its slices cut more than rows."""
        if not entry.shape or 0 in entry.shape or any(part.shape[1:] != entry.shape[1:] for part in entry.parts()):
            return None
        return cls(entry)

    def locate(self, rows: Array, views: Sequence[memoryview]) -> Iterator[tuple[int, Ranges]]:
        """Yield, by data file, the place of the bytes of every view, which starts with the row in `rows` (int64).

        Raises:
            IndexError: rows are outside of the tensor.
        """
        sizes = np.fromiter(map(len, views), np.int64, len(views))
        if len(rows) and (rows.min() < 0 or (rows + sizes // self._row_bytes).max() > self._rows):
            raise IndexError(f"{len(rows)} runs from row {rows.min()} on are not all inside its {self._rows} rows")
        parts = np.searchsorted(self._starts, rows, "right") - 1
        offsets = self._offsets[parts] + (rows - self._starts[parts]) * self._row_bytes
        if (offsets + sizes > self._ends[parts]).any():
            runs = zip(parts.tolist(), offsets.tolist(), views, strict=True)
            return (place for run in runs for place in self._split(*run))
        return _by_file(self._shards[parts], offsets.tolist(), views)

    def _split(self, part: int, offset: int, view: memoryview) -> Iterator[tuple[int, Ranges]]:
        """Yield the places of a run that may continue in the next parts."""
        while len(view):
            room = int(self._ends[part]) - offset
            yield int(self._shards[part]), [(offset, view[:room])]
            view, part = view[room:], part + 1
            offset = int(self._offsets[part]) if len(view) else 0


def _by_file(shards: Array, offsets: list[int], views: Sequence[memoryview]) -> Iterator[tuple[int, Ranges]]:
    """Group neighbours in one data file."""
    changes = (np.flatnonzero(shards[1:] != shards[:-1]) + 1).tolist()
    for begin, end in itertools.pairwise((0, *changes, len(views)) if views else ()):
        yield int(shards[begin]), zip(offsets[begin:end], views[begin:end], strict=True)
