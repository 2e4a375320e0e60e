"""Parses a large body piece by piece, so that other threads get Python's lock in between.

The pieces are parts of long lists. A piece ends at a comma that looks like the end of an element. Whether it is one is
proven: `[`, the piece and `]` together are one list only if the comma stands between two elements of the long list.

In the rest of the body a name, which occurs nowhere else, stands for each run of pieces. The rest is parsed as the same body
with fewer elements. So each error is found there, with the text that it has if the body is parsed at once.
"""

import functools
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from tpuembed_serving.core.noop import noop
from tpuembed_serving.core.pipeline import Check
from tpuembed_serving.core.status import StatusError

__all__ = ["LARGE_BYTES", "STRING", "LongList", "PieceRun", "pause", "read_pieces", "with_runs"]

LARGE_BYTES: Final = 512 * 2**10
"""A smaller body is parsed at once, which takes at most about 20 milliseconds."""
_PIECE_BYTES: Final = 64 * 2**10
_LONGEST_BYTES: Final = 4 * _PIECE_BYTES
"""A list is cut after elements of up to this length."""
_CANDIDATES: Final = 4
"""How many commas are tried for a piece."""
_AROUND_BYTES: Final = 64
_PAUSE_SECONDS: Final = 0.0001
_PLAIN: Final = frozenset({int, float, bool, type(None)})
_MOST_LEVELS: Final = 8
"""Nothing is cut where more containers are open."""

STRING: Final = r'"(?:[^"\\]++|\\.?)*+(?:"|\Z)'
"""Matches a string, also one without an end. Otherwise each of its quotes would be tried as a start, in quadratic time."""
_TOKEN: Final = re.compile(STRING.encode("ascii") + rb"|[\]\[{},]", re.DOTALL)
_SHORT: Final = re.compile(rb'[^][{}"]*+\]')
"""Matches a list without strings and containers, after its bracket."""
_BEFORE: Final = re.compile(rb'[\]}"\s]*\Z')
_AFTER: Final = re.compile(rb'[\[{"\s]*')


class PieceRun(NamedTuple):
    """Pieces that follow one another in a body.

    Attributes:
        parse: parses a list.
        cuts: where each piece starts and ends.
        size: the number of their elements.
    """

    body: bytes
    parse: Callable[[bytes], list[Any]]
    cuts: list[tuple[int, int]]
    size: int

    def lists(self) -> Iterator[list[Any]]:
        """Yield the elements of each piece."""
        for start, end in self.cuts:
            yield self.parse(b"[%b]" % self.body[start:end])


class LongList:
    """A list that is parsed again, piece by piece, each time that it is read. Its values never exist all at once."""

    def __init__(
        self,
        parts: Sequence[PieceRun | list[Any]],
        change: Callable[[list[Any]], list[Any]] | None = None,
        most: int = sys.maxsize,
    ) -> None:
        """Create the list of the elements of `parts`, in pieces of up to `most`, each changed by `change`."""
        self._parts, self._change, self._most = parts, change, most
        self._size = sum([part.size if isinstance(part, PieceRun) else len(part) for part in parts])

    def mapped(self, change: Callable[[list[Any]], list[Any]], most: int = sys.maxsize) -> "LongList":
        """Return this list with each piece changed. `change` returns as many elements. Pieces have up to `most`."""
        before, most = self._change, min(most, self._most)
        return LongList(self._parts, change if before is None else lambda piece: change(before(piece)), most)

    def pieces(self, check: Check = noop) -> Iterator[list[Any]]:
        """Yield lists of successive elements. Other threads run in between."""
        is_first = True
        for part in self._parts:
            for whole in part.lists() if isinstance(part, PieceRun) else (part,):
                for start in range(0, len(whole), self._most):
                    if not is_first:
                        pause(check)
                    is_first = False
                    piece = whole[start : start + self._most] if len(whole) > self._most else whole
                    yield piece if self._change is None else self._change(piece)

    def __len__(self) -> int:
        """Return the number of elements."""
        return self._size

    def __iter__(self) -> Iterator[Any]:
        """Yield the elements."""
        for piece in self.pieces():
            yield from piece


def pause(check: Check) -> None:
    """Let other threads run, and check."""
    time.sleep(_PAUSE_SECONDS)  # with 0 seconds, this thread often has the lock again before another one wakes up
    check()


def read_pieces(
    body: bytes, parse_list: Callable[[int, bytes], list[Any]], check: Check
) -> tuple[bytes, dict[str, PieceRun]]:
    """Return the rest of a body, and the runs of pieces that were cut out, by the names that stand for them.

    Args:
        body: the body of a request.
        parse_list: parses a list inside so many containers. Raises StatusError if the text is not one list and nothing else.
        check: called after each piece.
    """
    name, found, kept = secrets.token_hex(16), dict[str, PieceRun](), list[bytes]()
    opened, tried = list[bytes](), list[int]()  # the containers at this place, and where a cut in each was tried last
    at, copied, unread = 0, 0, 4 * _LONGEST_BYTES
    while len(body) - at > _PIECE_BYTES and (token := _TOKEN.search(body, at, at + max(0, unread))):
        mark, unread, at = token[0], unread - token.end() + at, token.end()
        if mark in b"[{":
            opened.append(mark)
            tried.append(-_PIECE_BYTES)
            if len(opened) > _MOST_LEVELS:
                break
        elif mark in b"]}":
            if len(opened) < 2:
                break  # bytes after the value are ignored
            opened.pop()
            tried.pop()
        if mark not in b"[," or opened[-1:] != [b"["] or at - tried[-1] < _PIECE_BYTES:
            continue
        if short := _SHORT.match(body, at, at + _PIECE_BYTES):
            at = short.end() - 1  # at its bracket: to look at each comma of a short list takes quadratic time
            continue
        tried[-1], start = at, at
        run = _cut(body, at, functools.partial(parse_list, len(opened) - 1), check)
        if run.cuts:
            at = tried[-1] = run.cuts[-1][1] + 1
            key = f"{name}{len(found)}"
            kept += [body[copied:start], b'"%b",' % key.encode("ascii")]
            found[key], copied = run, at
            unread += at - start
        else:
            unread -= _PIECE_BYTES
    return b"".join([*kept, body[copied:]]), found


def _cut(body: bytes, start: int, parse_list: Callable[[bytes], list[Any]], check: Check) -> PieceRun:
    """Return the pieces of a list from an element's start, as far as they are found."""
    cuts, size = list[tuple[int, int]](), 0
    mark, comma = _end_of_element(body, start)
    while mark and len(body) - start > _PIECE_BYTES:
        end, count = _read_piece(body, start, mark, comma, parse_list)
        if not count:
            break
        cuts.append((start, end))
        start, size = end + 1, size + count
        pause(check)
    return PieceRun(body, parse_list, cuts, size)


def with_runs(value: Any, runs: Mapping[str, PieceRun], levels: int = _MOST_LEVELS) -> Any:
    """Return a value of the rest of a body, with LongLists in the place of the lists that have runs."""
    if not levels:
        return value
    if isinstance(value, dict):
        found: Any = value
        found.update({key: with_runs(member, runs, levels - 1) for key, member in value.items()})
        if repeats := getattr(found, "repeats", None):
            found.repeats = tuple([(key, with_runs(member, runs, levels - 1)) for key, member in repeats])
        return found
    if type(value) is not list or _PLAIN.issuperset(map(type, value)):
        return value
    last = list[Any]()
    parts: list[PieceRun | list[Any]] = [last]
    for element in value:
        if type(element) is str and element in runs:
            last = []
            parts += [runs[element], last]
        else:
            last.append(with_runs(element, runs, levels - 1))
    return last if len(parts) == 1 else LongList([part for part in parts if part])


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
        if not 0 <= depth <= _MOST_LEVELS:
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
