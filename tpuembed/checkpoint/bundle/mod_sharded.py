"""Mod-sharded rows, as SparseCores and partitioned variables store them, read back in order.

Of n parts, part m has the rows m, m + n, m + 2n ... of a table, adjacent. So a range of rows is one run in each part.
The runs are read into a buffer of bounded size. One strided copy moves them from there to their places. Both the read
and the copy move every byte at the speed of one core, so two threads share a long range of rows on a disk.
"""

import dataclasses
import functools
import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

import numpy as np

from tpuembed.checkpoint.types import Array
from tpuembed.cpus import available_cpus

__all__ = ["DISK", "STORE", "BufferSizes", "ModSharded", "ReadRuns", "buffer_bytes", "read_mod_sharded"]


@dataclasses.dataclass(frozen=True)
class BufferSizes:
    """The sizes of reads: `run_bytes` from each of as many parts as fill `buffer_bytes`."""

    run_bytes: int
    buffer_bytes: int


DISK: Final = BufferSizes(512 << 10, 2 << 20)
"""Runs and blocks long enough to make calls cheap, and short enough for a processor's cache."""
STORE: Final = BufferSizes(4 << 20, 64 << 20)
"""A few long requests in parallel."""

_SHARED_BYTES: Final = 8 << 20
_KEPT_BYTES: Final = 5 << 20
_kept = threading.local()

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


def read_mod_sharded(source: ModSharded, start: int, out: Array, read: ReadRuns, sizes: BufferSizes = DISK) -> None:
    """Fill `out`, [n, dim] with any strides, with the existing rows [start, start + n) of the table."""
    if not len(out):
        return
    if source.count == 1 and source.stored_dim == out.shape[1] and out.flags.c_contiguous:
        read(source.first_rows(np.zeros(1, np.int64)) + start, [_bytes_of(out)])
    elif len(out) <= source.count:
        _read_single_rows(source, start, out, read)
    elif out.nbytes < _SHARED_BYTES or sizes is not DISK:
        _read_blocks(source, start, out, read, sizes)
    else:
        _read_by_two(functools.partial(_read_blocks, source, read=read, sizes=sizes), start, out)


def buffer_bytes(source: ModSharded, rows: int, dim: int, itemsize: int, sizes: BufferSizes = DISK) -> int:
    """Return the most bytes that reading [rows, dim] of a table holds beside them. It does not decrease with more rows."""
    if source.count == 1 and source.stored_dim == dim:
        return 0
    row_bytes = source.stored_dim * itemsize
    single_rows = min(source.count, rows) * row_bytes
    if rows <= source.count:
        return single_rows
    threads = 1 if rows * dim * itemsize < _SHARED_BYTES or sizes is not DISK else 2
    # A buffer full of groups of two rows has room for a third.
    full, all_groups = max(sizes.buffer_bytes * 3 // 2, 2 * row_bytes), (rows + 3 * source.count) * row_bytes
    return max(single_rows, threads * min(full, all_groups))


def _read_by_two(read_blocks: Callable[[int, Array], None], start: int, out: Array) -> None:
    """Read one half here and one in another thread. Raise an error of either after both have stopped writing to `out`."""
    half = len(out) // 2
    other = _helpers().submit(read_blocks, start + half, out[half:])
    try:
        read_blocks(start, out[:half])
    finally:
        other.exception()
    other.result()


@functools.cache
def _helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(4, available_cpus()), thread_name_prefix="tpuembed-rows")


os.register_at_fork(after_in_child=_helpers.cache_clear)  # threads do not survive a fork


def _read_single_rows(source: ModSharded, start: int, out: Array, read: ReadRuns) -> None:
    """Read rows of which no two are in the same part."""
    stored = np.empty((len(out), source.stored_dim), out.dtype)
    view, step = _bytes_of(stored), source.stored_dim * out.itemsize
    groups, parts = np.divmod(np.arange(start, start + len(out)), source.count)
    read(source.first_rows(parts) + groups, [view[i : i + step] for i in range(0, len(view), step)])
    out[...] = stored[:, : out.shape[1]]


def _read_blocks(source: ModSharded, start: int, out: Array, read: ReadRuns, sizes: BufferSizes) -> None:
    """Read block by block. A group is one row of every part; a block is some groups of some parts."""
    row_bytes = source.stored_dim * out.itemsize
    first, last = start // source.count, -(-(start + len(out)) // source.count)
    groups = min(last - first, max(1, sizes.run_bytes // row_bytes))
    parts = min(source.count, max(1, sizes.buffer_bytes // (groups * row_bytes)))
    # An odd number: if the addresses of successive copies were a power of two apart, they would evict each other from
    # the cache.
    shape = parts, groups | 1, source.stored_dim
    buffer = _scratch(math.prod(shape) * out.itemsize).view(out.dtype).reshape(shape)
    for group in range(first, last, groups):
        skipped = max(0, group * source.count - start)
        rows = out[skipped : (group + groups) * source.count - start]
        for part in range(0, source.count, parts):
            block = _Block(source.count, group, part, buffer[: source.count - part])
            read(*block.runs(source, start + skipped, start + skipped + len(rows)))
            block.scatter(start + skipped, rows)


@dataclasses.dataclass(frozen=True)
class _Block:
    """Rows of the parts from `part` on, from group `group` on, in `buffer`: [parts, groups, stored_dim]."""

    count: int
    group: int
    part: int
    buffer: Array

    def runs(self, source: ModSharded, first: int, last: int) -> tuple[Array, list[memoryview]]:
        """Return the run of the rows [first, last) in each part: its first stored row, and its place in the buffer."""
        parts = np.arange(self.part, self.part + len(self.buffer))
        low, high = -((parts - first) // self.count), -((parts - last) // self.count)  # groups, rounded up
        parts, low, high = (array[low < high] for array in (parts, low, high))
        row_bytes, view = self.buffer[0, 0].nbytes, _bytes_of(self.buffer)
        places = (parts - self.part) * self.buffer.shape[1] - self.group
        begins, ends = (((places + end) * row_bytes).tolist() for end in (low, high))
        return source.first_rows(parts) + low, [view[begin:end] for begin, end in zip(begins, ends, strict=True)]

    def scatter(self, first: int, out: Array) -> None:
        """Copy the rows of this block to `out`, whose first row is `first`: a partial group, whole groups, a partial
        group.
        """
        done = 0
        while done < len(out):
            group, low = divmod(first + done, self.count)
            left = len(out) - done
            groups, high = (left // self.count, self.count) if not low and left >= self.count else (1, low + left)
            high = min(high, self.count)
            rows = out[done : done + groups * (high - low)].reshape(
                groups, high - low, -1
            )  # one of both axes has length 1: no copy
            self._scatter_groups(group, low, rows)
            done += groups * (high - low)

    def _scatter_groups(self, group: int, low: int, rows: Array) -> None:
        """Copy to `rows`, [groups, parts, dim], from `group` and part `low` on."""
        begin, end = max(low, self.part), min(low + rows.shape[1], self.part + len(self.buffer))
        if begin < end:
            here = self.buffer[begin - self.part : end - self.part, group - self.group :].swapaxes(0, 1)
            _copy(here[: len(rows), :, : rows.shape[2]], rows[:, begin - low : end - low])


def _scratch(size: int) -> Array:
    """Return bytes to overwrite, reused for every read of a thread: new pages cost as much as reading into them."""
    kept: Array | None = getattr(_kept, "bytes", None)
    if kept is None or len(kept) < size:
        _kept.bytes = kept = None  # never hold two of them
        kept = np.empty(size, np.uint8)
        if size <= _KEPT_BYTES:
            _kept.bytes = kept
    return kept[:size]


def _bytes_of(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _copy(source: Array, target: Array) -> None:
    """Copy the last axis as one item if it is contiguous in both."""
    if {source.strides[-1], target.strides[-1]} == {source.itemsize}:
        item = np.dtype((np.void, source.shape[-1] * source.itemsize))
        source, target = source.view(item)[..., 0], target.view(item)[..., 0]
    target[...] = source
