"""What reads of dealt rows prove of the tensors they are from, whose checksums are over the bytes in another order.

A read adds up what the runs that it met contribute to their tensor's CRC32C. When all rows of some tables of a stack were read,
and what else lies in it is read too, the sum is the tensor's own checksum, or something is wrong. So a table that is streamed
need not be read a second time to be proven.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from tpuembed.checkpoint.bundle.mod_sharded import Interleaved
from tpuembed.checkpoint.bundle.rows import read_dealt_rows, stated_checksum
from tpuembed.checkpoint.types import Array, ReadSum
from tpuembed.tensor_bundle import Bundle, Entry, crc
from tpuembed.tensor_bundle.crc_pieces import sum_of_pieces

__all__ = ["DealtReader", "is_as_stated"]

_PIECE_BYTES = 1 << 20


class DealtReader:
    """Reads a table that is dealt out in tensor `key` as `source` says; see SummedReader."""

    def __init__(self, source: Interleaved, bundle: Bundle, key: str) -> None:
        self._source, self._bundle, self._key, self._runs = source, bundle, key, _RunSums(bundle, key)

    def read_into(self, start: int, out: Array) -> None:
        """Fill `out`, [n, dim], with the rows [start, start + n)."""
        read_dealt_rows(self._source, self._bundle, self._key, start, out, self._runs.read)

    def sums(self) -> Mapping[str, ReadSum]:
        """Of the one tensor."""
        return {self._key: self._runs.total()}


class _RunSums:
    """Reads runs of tensor `key`, and remembers their checksums. Several threads may read."""

    def __init__(self, bundle: Bundle, key: str) -> None:
        entry = bundle.entries[key]
        self._bundle, self._key = bundle, key
        self._row_bytes, self._size = _row_bytes(entry), _size(entry)
        self._runs: list[tuple[Array, list[int], list[int]]] = []

    def read(self, rows: Array, views: Sequence[memoryview]) -> None:
        """See ReadRuns."""
        self._bundle.read_runs(self._key, rows, views)
        self._runs.append((rows, [len(view) for view in views], [crc.value(view) for view in views]))

    def total(self) -> ReadSum:
        """Of all runs so far."""
        if not self._runs:
            return ReadSum()
        rows, sizes, checksums = (np.concatenate(column) for column in zip(*self._runs, strict=True))
        after = self._size - rows * self._row_bytes - sizes
        return ReadSum(sum_of_pieces(checksums.astype(np.uint32), after), int(sizes.sum()))


def is_as_stated(
    bundle: Bundle, key: str, tables: Sequence[tuple[Interleaved | None, int]], met: ReadSum
) -> bool | None:
    """Whether tensor `key` has the checksum that its entry states; None where `met` cannot say it.

    What lies beside the tables is read here: padding, and other tables of the stack.

    Args:
        tables: how each table whose rows were all read is dealt, one at least, and its rows.
        met: what was read of them.
    """
    entry = bundle.entries[key]
    stated = stated_checksum(entry)
    if stated is None or not met.bytes:
        return None
    runs = np.concatenate([_runs(source, rows) for source, rows in tables if source is not None])
    runs = runs[np.argsort(runs[:, 0])]
    ends = runs[:, 0] + runs[:, 1]
    if (ends[:-1] > runs[1:, 0]).any() or int(runs[:, 1].sum()) * _row_bytes(entry) != met.bytes:
        return None
    between = zip([0, *ends.tolist()], [*runs[:, 0].tolist(), entry.shape[0]], strict=True)
    return (met + _sum_of(bundle, key, between)).checksum == stated


def _runs(source: Interleaved, rows: int) -> Array:
    """The stored rows of a table: [parts, 2], the first of each part and how many."""
    parts = np.arange(min(source.count, rows))
    return np.stack([source.first_rows(parts), (rows - parts + source.count - 1) // source.count], 1)


def _sum_of(bundle: Bundle, key: str, ranges: Iterable[tuple[int, int]]) -> ReadSum:
    """Of ranges of stored rows."""
    sums = _RunSums(bundle, key)
    row_bytes = _row_bytes(bundle.entries[key])
    step = max(1, _PIECE_BYTES // max(1, row_bytes))
    buffer = memoryview(bytearray(step * row_bytes))
    for begin, end in ranges:
        for row in range(begin, end, step):
            sums.read(np.array([row]), [buffer[: (min(row + step, end) - row) * row_bytes]])
    return sums.total()


def _size(entry: Entry) -> int:
    return sum(part.size for part in entry.parts())


def _row_bytes(entry: Entry) -> int:
    return _size(entry) // max(1, entry.shape[0])
