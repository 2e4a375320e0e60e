"""Commands about many keys of one length, encoded by numpy: one matrix has all arguments, and a command is some of its lines.

The format is RESP, the Redis serialization protocol: an array of bulk strings.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["Calls", "KeySpan"]

_Bytes = npt.NDArray[np.uint8]

_MOST_KEYS: Final = 4096
"""Keys of one command. Redis serves nobody else while it runs one."""


@dataclasses.dataclass(frozen=True)
class KeySpan:
    """The lines [start, stop) of `Calls`: one command. All its keys have the tag of `bucket`."""

    start: int
    stop: int
    bucket: int


class Calls:
    """One verb for many keys, such as MGET, ordered by bucket.

    Attributes:
        verb: MGET, MSET or UNLINK.
        order: int64 [n], the place of each line among the keys as they were given. None if they are in that order.
        spans: the commands.
    """

    def __init__(self, verb: bytes, keys: _Bytes, buckets: _Bytes | None, values: _Bytes | None = None) -> None:
        """Take `keys` [n, length], their buckets unless one node has all, and for MSET their `values` [n, row_bytes]."""
        self.verb = verb
        self.order = None if buckets is None else np.argsort(buckets, kind="stable")
        self._keys = keys if self.order is None else keys[self.order]
        self._values = values if values is None or self.order is None else values[self.order]
        framed = [_framed(cells) for cells in (self._keys, self._values) if cells is not None]
        self._lines = np.concatenate(framed, axis=1) if len(framed) > 1 else framed[0]
        self.spans = tuple(_spans(np.zeros(len(keys), np.uint8) if buckets is None else buckets[self.order]))

    def encoded(self, span: KeySpan) -> bytes:
        """Return a command as it is sent."""
        words = 1 + (span.stop - span.start) * (1 if self._values is None else 2)
        head = b"*%d\r\n$%d\r\n%s\r\n" % (words, len(self.verb), self.verb)
        return head + self._lines[span.start : span.stop].tobytes()

    def one_by_one(self, span: KeySpan) -> Iterator[tuple[Any, ...]]:
        """Yield a command for each key of `span`, as words."""
        for line in range(span.start, span.stop):
            key = self._keys[line].tobytes()
            if self._values is not None:
                yield "SET", key, self._values[line].tobytes()
            else:
                yield "GET" if self.verb == b"MGET" else "UNLINK", key


def _framed(cells: _Bytes) -> _Bytes:
    """Return each line of `cells` [n, length] as a bulk string."""
    head, end = (np.frombuffer(text, np.uint8) for text in (b"$%d\r\n" % cells.shape[1], b"\r\n"))
    around = [np.broadcast_to(text, (len(cells), len(text))) for text in (head, end)]
    return np.concatenate([around[0], cells, around[1]], axis=1)


def _spans(buckets: _Bytes) -> Iterator[KeySpan]:
    """Yield the commands for sorted `buckets`: each has keys of one bucket, and at most so many."""
    bounds = [0, *(np.flatnonzero(np.diff(buckets)) + 1).tolist(), len(buckets)]
    for first, last in itertools.pairwise(bounds):
        for start in range(first, last, _MOST_KEYS):
            yield KeySpan(start, min(start + _MOST_KEYS, last), int(buckets[first]))
