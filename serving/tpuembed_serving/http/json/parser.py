"""A JSON parser that accepts the same input as TensorFlow Serving's, with the same messages and offsets.

TensorFlow Serving uses RapidJSON 1.1.0, iterative, with NaN and Infinity, and stops after the first value. Differences
from strict JSON:

- NaN, Inf and Infinity are numbers.
- Bytes after the value are ignored.
- Strings may be invalid UTF-8. Here such bytes become surrogate escapes.
- Of a repeated key the first counts.
- Nesting has no limit.

This parser is slow. It only reads bodies that a library refuses.
"""

import itertools
import math
import re
from typing import Any, NoReturn

from tpuembed_serving.core.noop import noop
from tpuembed_serving.core.pipeline import Check
from tpuembed_serving.core.status import invalid_argument

__all__ = ["JsonObject", "parse", "to_integer"]


class JsonObject(dict[str, Any]):
    """An object. Of equal keys the first counts; the others are in `repeats`."""

    repeats: tuple[tuple[str, Any], ...] = ()

    @property
    def repeated(self) -> bool:
        """Returns True if a key was repeated."""
        return bool(self.repeats)

    def add(self, key: str, value: Any) -> None:
        """Append a member."""
        if key in self:
            self.repeats += ((key, value),)
        else:
            self[key] = value


_BOM = b"\xef\xbb\xbf"
_SPACE = re.compile(rb"[ \t\n\r]*")
_PLAIN = re.compile(rb'[^"\\\x00-\x1f]*')
_INTEGER = re.compile(rb"-?(?:0|[1-9][0-9]*)")
_FRACTION = re.compile(rb"\.[0-9]+")
_EXPONENT = re.compile(rb"[eE][+-]?[0-9]+")
_SPECIAL = re.compile(rb"(-?)(NaN|Infinity|Inf(?!i))")
_HEX4 = re.compile(rb"[0-9A-Fa-f]{4}")
_WORDS: dict[int, tuple[bytes, Any]] = {
    ord("n"): (b"null", None),
    ord("t"): (b"true", True),
    ord("f"): (b"false", False),
}
_ESCAPES = {
    ord(key): value
    for key, value in {
        '"': b'"', "\\": b"\\", "/": b"/", "b": b"\b", "f": b"\f", "n": b"\n", "r": b"\r", "t": b"\t",
    }.items()
}  # fmt: skip

_EMPTY = "The document is empty."
_INVALID_VALUE = "Invalid value."
_MISSING_NAME = "Missing a name for object member."
_MISSING_COLON = "Missing a colon after a name of object member."
_MISSING_MEMBER_END = "Missing a comma or '}' after an object member."
_MISSING_ELEMENT_END = "Missing a comma or ']' after an array element."
_BAD_HEX = "Incorrect hex digit after \\u escape in string."
_BAD_SURROGATE = "The surrogate pair in string is invalid."
_BAD_ESCAPE = "Invalid escape character in string."
_MISSING_QUOTE = "Missing a closing quotation mark in string."
_TOO_BIG = "Number too big to be stored in double."
_MISSING_FRACTION = "Miss fraction part in number."
_MISSING_EXPONENT = "Miss exponent in number."

_STEPS_BETWEEN_CHECKS = 1024
_CLOSED = object()
_STRUCTURAL = frozenset(b"]},:\0")


def parse(body: bytes, max_depth: int | None = None, check: Check = noop) -> Any:
    """Return the first JSON value of `body`. Its nesting is at most `max_depth`; None is no limit.

    Raises:
        StatusError: INVALID_ARGUMENT with RapidJSON's message and the byte offset, or with the depth.
    """
    if not body:
        raise invalid_argument("JSON Parse error: The document is empty")
    return _JsonParser(body).document(math.inf if max_depth is None else max_depth, check)


class _JsonParser:
    """Reads a body in one pass. `_at` is the offset of the next byte. A NUL byte ends the body."""

    def __init__(self, body: bytes) -> None:
        self._body = body + b"\0"
        self._at = len(_BOM) if body.startswith(_BOM) else 0

    def document(self, max_depth: float, check: Check) -> Any:
        """Return the first value. Reads without recursion: open containers are on a stack."""
        if self._token() in _STRUCTURAL:
            self._fail(_EMPTY)
        value = self._value()
        stack = [value] if isinstance(value, list | JsonObject) else []
        for step in itertools.count():
            if not stack:
                break
            if step % _STEPS_BETWEEN_CHECKS == 0:
                check()
            container = stack[-1]
            child = self._next_member(container) if isinstance(container, JsonObject) else self._next_element(container)
            if child is _CLOSED:
                stack.pop()
            elif isinstance(child, list | JsonObject):
                stack.append(child)
                if len(stack) > max_depth:
                    raise invalid_argument(f"the JSON is nested too deeply (limit: {max_depth} levels)")
        return value

    def _fail(self, message: str, at: int | None = None) -> NoReturn:
        offset = self._at if at is None else at
        raise invalid_argument(f"JSON Parse error: {message} at offset: {offset}")

    def _token(self) -> int:
        """Skip whitespace, and return the next byte without consuming it."""
        self._at = _match(_SPACE, self._body, self._at).end()
        return self._body[self._at]

    def _next_element(self, array: list[Any]) -> Any:
        """Read the next element or the end of the array. A container is returned empty."""
        token = self._token()
        if token == ord("]"):
            self._at += 1
            return _CLOSED
        if array:
            if token != ord(","):
                self._fail(_MISSING_ELEMENT_END)
            self._at += 1
        array.append(self._value())
        return array[-1]

    def _next_member(self, container: JsonObject) -> Any:
        """Read the next member or the end of the object. A container is returned empty."""
        token = self._token()
        if token == ord("}"):
            self._at += 1
            return _CLOSED
        if container:
            if token != ord(","):
                self._fail(_MISSING_MEMBER_END)
            self._at += 1
        key = self._key()
        value = self._value()
        container.add(key, value)
        return value

    def _key(self) -> str:
        if self._token() != ord('"'):
            self._fail(_MISSING_NAME)
        key = self._string()
        if self._token() != ord(":"):
            self._fail(_MISSING_COLON)
        self._at += 1
        return key

    def _value(self) -> Any:
        """Read a scalar, or the beginning of a container, which is returned empty."""
        token = self._token()
        if token in _STRUCTURAL:
            self._fail(_INVALID_VALUE)
        if token == ord('"'):
            return self._string()
        if token in _WORDS:
            return self._word(*_WORDS[token])
        if token in b"[{":
            self._at += 1
            return [] if token == ord("[") else JsonObject()
        return self._number()

    def _word(self, word: bytes, value: Any) -> Any:
        for byte in word:
            if self._body[self._at] != byte:
                self._fail(_INVALID_VALUE)
            self._at += 1
        return value

    def _number(self) -> int | float:
        start = self._at
        integer = _INTEGER.match(self._body, start)
        if integer is None:
            return self._special()
        self._at = integer.end()
        is_double = self._optional(b".", _FRACTION, _MISSING_FRACTION)
        is_double |= self._optional(b"eE", _EXPONENT, _MISSING_EXPONENT)
        text = self._body[start : self._at].decode("ascii")
        value = float(text) if is_double else to_integer(text)
        if math.isinf(value):
            self._fail(_TOO_BIG, start)
        return value

    def _optional(self, begins: bytes, pattern: re.Pattern[bytes], error: str) -> bool:
        """Read a number's fraction or exponent. Returns True if there was one."""
        if self._body[self._at] not in begins:
            return False
        match = pattern.match(self._body, self._at)
        if match is None:
            has_sign = self._body[self._at + 1] in b"+-" and begins != b"."
            self._fail(error, self._at + (2 if has_sign else 1))
        self._at = match.end()
        return True

    def _special(self) -> float:
        match = _SPECIAL.match(self._body, self._at)
        if match is None:
            self._fail(_INVALID_VALUE, self._at + _common_prefix(self._body[self._at : self._at + 10]))
        self._at = match.end()
        value = math.nan if match[2] == b"NaN" else math.inf
        return -value if match[1] else value

    def _string(self) -> str:
        self._at += 1
        pieces: list[bytes] = []
        while True:
            plain = _match(_PLAIN, self._body, self._at)
            pieces.append(plain[0])
            self._at = plain.end()
            byte = self._body[self._at]
            if byte == ord('"'):
                self._at += 1
                return b"".join(pieces).decode("utf-8", "surrogateescape")
            if byte != ord("\\"):
                self._fail(_BAD_ESCAPE if byte else _MISSING_QUOTE)
            pieces.append(self._escape())

    def _escape(self) -> bytes:
        start = self._at
        kind = self._body[start + 1]
        self._at += 2
        if kind in _ESCAPES:
            return _ESCAPES[kind]
        if kind != ord("u"):
            self._fail(_BAD_ESCAPE, start)
        code = self._hex4(start)
        if 0xD800 <= code <= 0xDBFF:
            code = self._low_surrogate(code, start)
        return chr(code).encode("utf-8", "surrogatepass")

    def _low_surrogate(self, high: int, start: int) -> int:
        if self._body[self._at : self._at + 2] != b"\\u":
            self._fail(_BAD_SURROGATE, start)
        self._at += 2
        low = self._hex4(start)
        if not 0xDC00 <= low <= 0xDFFF:
            self._fail(_BAD_SURROGATE, start)
        return 0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00)

    def _hex4(self, start: int) -> int:
        match = _HEX4.match(self._body, self._at)
        if match is None:
            self._fail(_BAD_HEX, start)
        self._at = match.end()
        return int(match[0], 16)


def _match(pattern: re.Pattern[bytes], body: bytes, at: int) -> re.Match[bytes]:
    """Return the match of a pattern that always matches, at least the empty bytes."""
    match = pattern.match(body, at)
    assert match is not None
    return match


def to_integer(text: str) -> int | float:
    """Return an integer if it fits into 64 bits, signed or unsigned, else a double."""
    if len(text) <= 20:
        integer = int(text)
        if -(2**63) <= integer < 2**64:
            return integer
    return float(text)


def _common_prefix(text: bytes) -> int:
    """Return how many bytes of `text` begin a special number. RapidJSON reports the byte after them."""
    signed = text.startswith(b"-")
    rest = text[signed:]
    return signed + max(sum(rest.startswith(word[: n + 1]) for n in range(len(word))) for word in (b"NaN", b"Infinity"))
