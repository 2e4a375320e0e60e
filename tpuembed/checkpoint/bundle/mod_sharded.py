"""Mod-sharded rows, as SparseCores and partitioned variables store them, read back in order.

Of n parts, part m has the rows m, m + n, m + 2n ... of a table, adjacent. So a range of rows is one run in each part.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import numpy as np

from tpuembed.checkpoint.types import Array

__all__ = ["DISK_BLOCK_BYTES", "STORE_BLOCK_BYTES", "ModSharded", "ReadRuns", "buffer_bytes", "read_mod_sharded"]

DISK_BLOCK_BYTES: Final = 2 << 20
"""The runs of a block are long enough to make calls cheap, and the block is small enough for a processor's cache."""
STORE_BLOCK_BYTES: Final = 64 << 20
"""A few long requests in parallel."""

ReadRuns = Callable[[Array, Sequence[memoryview]], None]
"""Fills the bytes of every view with whole stored rows. The array (int64) has the first row of each view."""


class ModSharded(Protocol):
    """A mod-sharded table. Its row i is the columns [0, dim) of stored row `first_rows(i % count) + i // count`."""

    @property
    def count(self) -> int:
        """Return the number of parts."""

    @property
    def stored_dim(self) -> int:
        """Return the columns of a stored row. Those after the table's are padding."""

    def first_rows(self, parts: Array) -> Array:
        """Return the stored rows at which the table begins in `parts`; int64."""


def read_mod_sharded(source: ModSharded, start: int, out: Array, read: ReadRuns, block_bytes: int) -> None:
    """Fill `out`, [n, dim] with any strides, with the existing rows [start, start + n) of the table.

    It reads block by block: some groups, each of which is one row of every part.
    """
    count, stop = source.count, start + len(out)
    first, last = start // count, -(-stop // count)
    step = _block_groups(source, out.itemsize, block_bytes)
    buffer = np.empty((count, min(step, last - first), source.stored_dim), out.dtype)
    view, row_bytes = buffer.reshape(-1).view(np.uint8).data, source.stored_dim * out.itemsize
    for group in range(first, last, step):
        low, high = max(start, group * count), min(stop, (group + step) * count)
        parts = np.arange(count)
        begins, ends = -((parts - low) // count), -((parts - high) // count)  # the groups of each part, rounded up
        parts, begins, ends = (array[begins < ends] for array in (parts, begins, ends))
        places = parts * buffer.shape[1] - group
        ranges = zip(((places + begins) * row_bytes).tolist(), ((places + ends) * row_bytes).tolist(), strict=True)
        read(source.first_rows(parts) + begins, [view[begin:end] for begin, end in ranges])
        # Whole groups are copied at once. The first and the last one may lack parts.
        cuts = {low, min(high, -(-low // count) * count), max(low, high // count * count), high}
        for begin, end in itertools.pairwise(sorted(cuts)):
            (at, part), rows = divmod(begin, count), out[begin - start : end - start]
            if part or end - begin < count:
                rows[...] = buffer[part : part + len(rows), at - group, : out.shape[1]]
            else:
                groups = rows.reshape(-1, count, out.shape[1])
                groups[...] = buffer[:, at - group :][:, : len(groups), : out.shape[1]].swapaxes(0, 1)


def buffer_bytes(source: ModSharded, rows: int, itemsize: int, block_bytes: int) -> int:
    """Return the most bytes that reading `rows` rows of a table holds beside them. It does not decrease with more rows."""
    groups = min(_block_groups(source, itemsize, block_bytes), rows // source.count + 2)
    return groups * source.count * source.stored_dim * itemsize


def _block_groups(source: ModSharded, itemsize: int, block_bytes: int) -> int:
    return max(1, block_bytes // (source.count * source.stored_dim * itemsize))
