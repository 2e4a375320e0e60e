"""Parses a large body piece by piece, so that other threads get Python's lock in between.

The pieces are parts of a long list: of the rows, or of a column. A piece ends at a comma that looks like the end of an
element. Whether it is one is proven: `[`, the piece and `]` together are one list only if the comma stands between two
elements of the long list. What is left of the body is then parsed as the same body with fewer elements. So each error is
found there, with the text that it has if the body is parsed at once.
"""

import re
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from tpuembed_serving.core.noop import noop
from tpuembed_serving.core.pipeline import Check
from tpuembed_serving.core.status import StatusError

__all__ = ["LARGE_BYTES", "LongList", "pause", "read_pieces"]

LARGE_BYTES: Final = 512 * 2**10
"""A smaller body is parsed at once, which takes at most about 20 milliseconds."""
_PIECE_BYTES: Final = 64 * 2**10
_LONGEST_BYTES: Final = 4 * _PIECE_BYTES
"""A list is cut after elements of up to this length."""
_CANDIDATES: Final = 4
"""How many commas are tried for a piece."""
_AROUND_BYTES: Final = 64
_PAUSE_SECONDS: Final = 0.0001
_STAND_IN: Final = b"0,"
"""Stands for the elements before the rest of a list."""

_HEAD: Final = re.compile(
    rb'\s*\{\s*(?:"signature_name"\s*:\s*"[^"\\]*"\s*,\s*)?'
    rb'"(instances|examples|inputs)"\s*:\s*(?:\{\s*"([^"\\]*)"\s*:\s*)?\['
)
"""Matches a body up to its first list. The groups are the names of the member and of the column."""
_NEXT: Final = re.compile(rb'\]\s*,\s*"([^"\\]*)"\s*:\s*\[')
"""Matches the end of a column and the beginning of the next one."""
_TOKEN: Final = re.compile(rb'"(?:[^"\\]++|\\.?)*+(?:"|\Z)|[\]\[{},]', re.DOTALL)
"""Matches a string, also one without an end, which is then read only once."""
_BEFORE: Final = re.compile(rb'[\]}"\s]*\Z')
_AFTER: Final = re.compile(rb'[\[{"\s]*')


class LongList:
    """A list that is parsed again, piece by piece, each time that it is read. Its values never exist all at once.

    Attributes:
        rest: the last elements, which were parsed with the rest of the body.
    """

    def __init__(self, body: bytes, parse_list: Callable[[bytes], list[Any]]) -> None:
        self.rest: list[Any] = []
        self._body, self._parse_list = body, parse_list
        self._cuts: list[tuple[int, int]] = []
        self._size = 0

    def cut(self, start: int, end: int, size: int) -> None:
        """Add the piece from `start` to `end` of the body, which has `size` elements."""
        self._cuts.append((start, end))
        self._size += size

    def pieces(self, check: Check = noop) -> Iterator[list[Any]]:
        """Yield lists of successive elements. Other threads run in between."""
        for start, end in self._cuts:
            yield self._parse_list(b"[%b]" % self._body[start:end])
            pause(check)
        yield self.rest

    def __len__(self) -> int:
        """Return the number of elements."""
        return self._size + len(self.rest)

    def __iter__(self) -> Iterator[Any]:
        """Yield the elements."""
        for piece in self.pieces():
            yield from piece


def pause(check: Check) -> None:
    """Let other threads run, and check."""
    time.sleep(_PAUSE_SECONDS)  # with 0 seconds, this thread often has the lock again before another one wakes up
    check()


def read_pieces(
    body: bytes, parse_list: Callable[[bytes], list[Any]], check: Check
) -> tuple[bytes, dict[tuple[str, ...], LongList]]:
    """Return the rest of a body, and its lists that were cut, by their keys in the document.

    In the rest, one element stands before the other elements of each of them, so that it has a comma before the next element too.

    Args:
        body: the body of a request.
        parse_list: parses a list. Raises StatusError if the text is not one list and nothing else.
        check: called after each piece.
    """
    found: dict[tuple[str, ...], LongList] = {}
    seen: set[tuple[str, ...]] = set()
    match = _HEAD.match(body, 0, _PIECE_BYTES)
    head, start = b"", 0
    member, column = (match[1].decode("ascii"), match[2]) if match else ("", None)
    while match:
        key = (member,) if column is None else (member, column.decode("utf-8", "surrogateescape"))
        if key in seen:  # of equal keys the first counts
            break
        seen.add(key)
        head += body[start : match.end()]
        start, elements = match.end(), LongList(body, parse_list)
        mark, comma = _end_of_element(body, start)
        while mark and len(body) - start > _PIECE_BYTES:
            end, size = _read_piece(body, start, mark, comma, parse_list)
            if not size:
                break
            elements.cut(start, end, size)
            start = end + 1
            pause(check)
        if len(elements):
            head, found[key] = head + _STAND_IN, elements
        match = _next_column(body, start, parse_list) if column is not None else None
        column = match and match[1]
    return head + body[start:], found


def _end_of_element(body: bytes, start: int) -> tuple[bytes, int]:
    """Return what surrounds the comma after the first element, and the comma's index in it. b"" if the element is too long."""
    depth = 0
    for token in _TOKEN.finditer(body, start, start + _LONGEST_BYTES):
        mark, at = token[0], token.start()
        if mark == b"," and not depth:
            before = _BEFORE.search(body, max(start, at - _AROUND_BYTES), at)
            after = _AFTER.match(body, at + 1, at + _AROUND_BYTES)
            assert before is not None
            assert after is not None
            return body[before.start() : after.end()], at - before.start()
        depth += (mark in b"[{") - (mark in b"]}")
        if depth < 0:
            break
    return b"", 0


def _read_piece(
    body: bytes, start: int, mark: bytes, comma: int, parse_list: Callable[[bytes], list[Any]]
) -> tuple[int, int]:
    """Return the index of the comma after the piece from `start`, and the number of its elements. 0 if none is found."""
    end = start + _PIECE_BYTES
    for _ in range(_CANDIDATES):
        at = body.rfind(mark, start, end)
        if at < 0:
            at = body.find(mark, start, start + _LONGEST_BYTES)
        if at < 0:
            break
        at += comma
        try:
            return at, len(parse_list(b"[%b]" % body[start:at]))
        except StatusError:
            end = at
    return start, 0


def _next_column(body: bytes, start: int, parse_list: Callable[[bytes], list[Any]]) -> re.Match[bytes] | None:
    """Return the match of `_NEXT` at the end of the list whose rest starts at `start`, if it is near."""
    match = _NEXT.search(body, start, start + _LONGEST_BYTES)
    try:
        return match if match and parse_list(b"[%b]" % body[start : match.start()]) else None
    except StatusError:
        return None
