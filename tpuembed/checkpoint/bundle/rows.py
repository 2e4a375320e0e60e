"""The order of a table's rows in its tensor, chosen once per table: in the order of ids, or mod-sharded.

SparseCores and partitioned variables store rows mod-sharded. Of n parts, part m has the rows m, m + n, m + 2n ... of a table,
adjacent. So a range of rows is one run in each part.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from tpuembed.checkpoint.types import Array
from tpuembed.files import IN_FLIGHT_BYTES
from tpuembed.formats.dtypes import numpy_dtype
from tpuembed.formats.tensor_bundle import Bundle, Entry
from tpuembed.formats.tensor_bundle.reader import strided_bytes

__all__ = ["DENSE", "ModSharded", "RowLayout", "read_mod_sharded"]

_DISK_BLOCK_BYTES: Final = 2 << 20
"""The runs of a block are long enough to make calls cheap, and the block is small enough for a processor's cache."""
_STORE_BLOCK_BYTES: Final = 64 << 20
"""A few long requests in parallel."""


@dataclasses.dataclass(frozen=True)
class ModSharded:
    """A mod-sharded table. Its row i is the columns [0, dim) of stored row `first_rows(i % count) + i // count`.

    Attributes:
        count: the number of parts.
        stored_dim: the columns of a stored row. Those after the table's are padding.
        first_rows: returns the stored rows, int64, at which the table begins in some parts.
    """

    count: int
    stored_dim: int
    first_rows: Callable[[Array], Array]

    def block_rows(self, bundle: Bundle, itemsize: int) -> int:
        """Return the rows to read at a time: whole groups, each of which is one row of every part, if one fits."""
        block_bytes = _DISK_BLOCK_BYTES if isinstance(bundle.prefix, Path) else _STORE_BLOCK_BYTES
        rows = max(1, block_bytes // (self.stored_dim * itemsize))
        return rows if rows < self.count else rows // self.count * self.count


def read_mod_sharded(
    source: ModSharded,
    bundle: Bundle,
    key: str,
    start: int,
    out: Array,
    read: Callable[[Array, Sequence[memoryview]], None] | None = None,
) -> None:
    """Fill `out`, [n, dim] with any strides, with the existing rows [start, start + n) of a table, block by block.

    `read` fills each view with whole rows of tensor `key`, given the first row of each; None is `bundle.read_runs`.
    """
    read = read or partial(bundle.read_runs, key)
    count, dim, row_bytes = source.count, out.shape[1], source.stored_dim * out.itemsize
    step = source.block_rows(bundle, out.itemsize)
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


class RowLayout:
    """Finds the rows of one table, and of its slots, in a tensor of a bundle: in the order of their ids, or mod-sharded.

    Attributes:
        format: the name of the on-disk format.
        mod_sharding: of the rows, or None. If there is one, the tensor's checksums cover runs of rows in another order.
    """

    def __init__(self, format: str, pieces: str, mod_sharding: ModSharded | None = None) -> None:  # noqa: A002
        """Take the words for the tensor's slices as `pieces`."""
        self.format, self._pieces, self.mod_sharding = format, pieces, mod_sharding

    def shape(self, entry: Entry) -> tuple[int, int]:
        """Return (rows, dim) of the table in a tensor, which is a matrix. Raises MalformedError if it cannot hold it."""
        rows, dim = entry.shape
        return rows, dim

    def describe(self, entry: Entry) -> str:
        """Return a short description of the layout; empty for rows in order in one piece."""
        return f"{len(entry.slices)} {self._pieces}" if entry.slices else ""

    def read_into(self, bundle: Bundle, key: str, start: int, out: Array) -> None:
        """Fill `out`, [n, dim], with the existing rows [start, start + n) of the table, from tensor `key`."""
        if self.mod_sharding is None:
            bundle.read_rows(key, start, start + len(out), out)
        else:
            read_mod_sharded(self.mod_sharding, bundle, key, start, out)

    def buffer_bytes(self, bundle: Bundle, entry: Entry, rows: int) -> int:
        """Return the most bytes that reading `rows` rows holds beside them. It does not decrease with more rows."""
        held = strided_bytes(entry, rows) + (0 if isinstance(bundle.prefix, Path) else IN_FLIGHT_BYTES)
        if (source := self.mod_sharding) is None:
            return held
        itemsize = numpy_dtype(entry.dtype).itemsize
        block = min(
            source.block_rows(bundle, itemsize),
            rows if rows < source.count else -(-rows // source.count) * source.count,
        )
        return held + block * source.stored_dim * itemsize


DENSE: Final = RowLayout("dense", "slices")
