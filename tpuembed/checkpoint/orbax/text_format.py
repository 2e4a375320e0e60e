"""Protocol buffers' text format, as far as a message of numbers, strings and messages needs it.

Source: https://protobuf.dev/reference/protobuf/textformat-spec/
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from tpuembed.protobuf import MalformedError

__all__ = ["Fields", "Value", "parse_text"]

Value: TypeAlias = "int | str | Fields"
Fields: TypeAlias = "Mapping[str, Sequence[Value]]"

_TOKEN: Final = re.compile(
    r"""\s+ | \#[^\n]*
    | (?P<name>[A-Za-z_][A-Za-z0-9_]*) | (?P<number>-?(?:0[xX][0-9a-fA-F]+|\d+(?![.\w])))
    | (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*') | (?P<mark>[{}<>:\[\],;])""",
    re.VERBOSE,
)
_ESCAPE: Final = re.compile(rb"\\(?:([0-7]{1,3})|[xX]([0-9a-fA-F]{1,2})|(.))", re.DOTALL)
_ESCAPED: Final = dict(zip(b"abfnrtv", b"\a\b\f\n\r\t\v", strict=True))
_CLOSING: Final = {"{": "}", "<": ">"}
_MAX_DEPTH: Final = 32
_MAX_DIGITS: Final = 20


def parse_text(text: str) -> Fields:
    """Return the values of each field, in order. A name without quotes (true, an enum's) is a string.

    Raises:
        MalformedError: it is not text format, or has unsupported parts: floats, extensions, Any.
    """
    return _TextParser(text).message("", 0)


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise MalformedError(f"line {text.count(chr(10), 0, position) + 1}: {text[position : position + 20]!r}")
        position = match.end()
        if match.lastgroup is not None:
            yield match.lastgroup, match.group()
    yield "end", ""


class _TextParser:
    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._kind, self._text = next(self._tokens)

    def _take(self, kind: str, text: str | None = None) -> str:
        taken = self._text
        if self._kind != kind or text not in {None, taken}:
            raise MalformedError(f"{text or kind} expected, found {taken[:20] or 'its end'!r}")
        self._kind, self._text = next(self._tokens, ("end", ""))
        return taken

    def _skip(self, *marks: str) -> bool:
        found = self._kind == "mark" and self._text in marks
        if found:
            self._take("mark")
        return found

    def message(self, closing: str, depth: int) -> Fields:
        """Return the fields up to `closing`. The outermost message ends with the text."""
        if depth > _MAX_DEPTH:
            raise MalformedError(f"messages are nested more than {_MAX_DEPTH} deep")
        fields: dict[str, list[Value]] = {}
        while self._kind == "name":
            values = fields.setdefault(self._take("name"), [])
            colon = self._skip(":")
            values.extend(self._list(depth) if colon and self._skip("[") else [self._value(depth, colon)])
            self._skip(",", ";")
        if closing:
            self._take("mark", closing)
        else:
            self._take("end")
        return fields

    def _list(self, depth: int) -> Iterator[Value]:
        if self._skip("]"):
            return
        yield self._value(depth, True)
        while self._skip(","):
            yield self._value(depth, True)
        self._take("mark", "]")

    def _value(self, depth: int, colon: bool) -> Value:
        if self._text in _CLOSING and self._kind == "mark":
            return self.message(_CLOSING[self._take("mark")], depth + 1)
        if not colon:
            raise MalformedError(f"':' expected, found {self._text[:20] or 'its end'!r}")
        if self._kind == "number":
            return _integer(self._take("number"))
        return self._string() if self._kind == "string" else self._take("name")

    def _string(self) -> str:
        """Read adjacent strings as one."""
        parts = []
        while self._kind == "string":
            parts.append(_unescape(self._take("string")[1:-1]))
        try:
            return b"".join(parts).decode()
        except UnicodeDecodeError:
            raise MalformedError("a string is not UTF-8") from None


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise MalformedError(f"a number has {len(text)} digits")
    digits = text.lstrip("-")
    octal = len(digits) > 1 and digits.isdigit() and digits.startswith("0")
    try:
        return int(text, 8 if octal else 0)
    except ValueError:
        raise MalformedError(f"{text} is not a number") from None


def _unescape(text: str) -> bytes:
    def replace(match: re.Match[bytes]) -> bytes:
        octal, hexadecimal, letter = match.groups()
        if octal or hexadecimal:
            return bytes([(int(octal, 8) if octal else int(hexadecimal, 16)) & 0xFF])
        return bytes([_ESCAPED[letter[0]]]) if letter[0] in _ESCAPED else letter

    return _ESCAPE.sub(replace, text.encode())
