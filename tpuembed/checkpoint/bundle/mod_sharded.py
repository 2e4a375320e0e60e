"""Mod-sharded rows, as SparseCores and partitioned variables store them, read back in order.

Of n parts, part m has the rows m, m + n, m + 2n ... of a table, adjacent. So a range of rows is one run in each part.
"""

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
    """Fill `out`, [n, dim] with any strides, with the existing rows [start, start + n) of the table, block by block."""
    count, dim, row_bytes = source.count, out.shape[1], source.stored_dim * out.itemsize
    step = _block_rows(source, out.itemsize, block_bytes)
    for low in range(0, len(out), step):
        rows = out[low : low + step]
        # The first rows of a block are in different parts. Each begins the run of its part: [parts, groups].
        parts, groups = min(count, len(rows)), -(-len(rows) // count)
        buffer = np.empty((parts, groups, source.stored_dim), out.dtype)
        view = buffer.reshape(-1).view(np.uint8).data
        firsts = np.arange(parts)
        begins, held = firsts * groups * row_bytes, -((firsts - len(rows)) // count) * row_bytes
        group, part = np.divmod(start + low + firsts, count)
        ranges = zip(begins.tolist(), (begins + held).tolist(), strict=True)
        read(source.first_rows(part) + group, [view[begin:end] for begin, end in ranges])
        whole = len(rows) // count
        if whole:
            rows[: whole * count].reshape(whole, count, dim)[...] = buffer[:, :whole, :dim].swapaxes(0, 1)
        if whole < groups:  # the last group lacks parts
            rows[whole * count :] = buffer[: len(rows) - whole * count, whole, :dim]


def buffer_bytes(source: ModSharded, rows: int, itemsize: int, block_bytes: int) -> int:
    """Return the most bytes that reading `rows` rows of a table holds beside them. It does not decrease with more rows."""
    held = rows if rows < source.count else -(-rows // source.count) * source.count
    return min(_block_rows(source, itemsize, block_bytes), held) * source.stored_dim * itemsize


def _block_rows(source: ModSharded, itemsize: int, block_bytes: int) -> int:
    """Return the rows of a block: whole groups, each of which is one row of every part, if one fits."""
    rows = max(1, block_bytes // (source.stored_dim * itemsize))
    return rows if rows < source.count else rows // source.count * source.count
