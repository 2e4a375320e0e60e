"""Parses a request body: with orjson if it agrees with RapidJSON, else with the standard library.

Clients of TensorFlow Serving may send what RapidJSON reads beyond JSON:

- NaN, Inf and Infinity are numbers.
- Bytes after the value are ignored.
- Strings may be invalid UTF-8. Here such bytes become surrogate escapes.
- Of a repeated key the first counts.

Nesting has a limit of about 1,000 levels, that of both libraries.
"""

import json
import math
import re
from typing import Any, NamedTuple

import orjson

from tpuembed_serving.core.noop import noop
from tpuembed_serving.core.pipeline import Check
from tpuembed_serving.core.status import StatusError, invalid_argument
from tpuembed_serving.http.json.debug import debug_string

__all__ = [
    "LEAST_DECODING_BYTES",
    "Document",
    "JsonObject",
    "decoding_bytes",
    "format_error",
    "long_integers",
    "parse_document",
]

LEAST_DECODING_BYTES = 12
"""The least memory that is estimated for each byte of a body: the text, Python's values, lists and arrays."""
_VALUE_BYTES, _LIST_BYTES, _OBJECT_BYTES = 56, 120, 320
"""About the memory of a value in a list and in an array, and of an empty list and object (measured)."""


class JsonObject(dict[str, Any]):
    """An object with repeated keys. Of equal keys the first counts; the others are in `repeats`."""

    repeats: tuple[tuple[str, Any], ...] = ()


class Document(NamedTuple):
    """A parsed body.

    Attributes:
        members: the members of the top-level object. Of equal keys the first counts, at every level.
        text: the body.
    """

    members: dict[str, Any]
    text: bytes


def parse_document(body: bytes, check: Check = noop) -> Document:
    """Parse `body`.

    Args:
        body: the body of a request.
        check: called before slow work.

    Raises:
        StatusError: the body is not JSON, not an object, or nested too deeply.
    """
    root = _parse(body, check)
    if not isinstance(root, dict):
        raise format_error(root, "Is not object")
    return Document(root, body)


def decoding_bytes(body: bytes) -> int:
    """Return about how many bytes it takes to parse and decode `body`, from the number of its values, lists and objects."""
    values, lists, objects = (body.count(mark) for mark in (b",", b"[", b"{"))
    estimate = len(body) + values * _VALUE_BYTES + lists * _LIST_BYTES + objects * _OBJECT_BYTES
    return max(estimate, len(body) * LEAST_DECODING_BYTES)


def long_integers(text: bytes | memoryview) -> dict[float, str]:
    """Return the integers beyond 64 bits in `text`, by the double that the parser makes of each, as RapidJSON does."""
    found = (digits[0].decode("ascii") for digits in _LONG_INTEGER.finditer(text))
    return {float(digits): digits for digits in found if not -(2**63) <= int(digits) < 2**64}


def format_error(value: Any, text: str) -> StatusError:
    """Return an INVALID_ARGUMENT error about a JSON value."""
    return invalid_argument(f"JSON Value: {debug_string(value)} {text}")


def _parse(body: bytes, check: Check) -> Any:
    """Parse with orjson, unless a key may be repeated: orjson keeps the last value, and RapidJSON the first."""
    try:
        root = orjson.loads(body)
    except orjson.JSONDecodeError:
        check(len(body))
        return _parse_loosely(body)
    if type(root) is dict and body.count(b":") > _count_members(root):
        check(len(body))
        return _parse_loosely(body)
    return root


def _count_members(root: dict[str, Any]) -> int:
    """Count the members at the known levels. As many colons in the body prove that no key is repeated."""
    count = len(root)
    for key, value in root.items():
        if key in _LISTS and type(value) is list:
            count += sum([len(row) for row in value if type(row) is dict])
        elif key in _OBJECTS and type(value) is dict:
            count += len(value)
        elif key in _TENSORS and type(value) is list and value and type(value[0]) is dict:
            rows = [row for row in value if type(row) is dict]
            count += sum([len(row) + _size(row.get("parameters")) for row in rows])
    return count


def _size(value: Any) -> int:
    return len(value) if type(value) is dict else 0


def _parse_loosely(body: bytes) -> Any:
    """Parse with the standard library, configured to agree with RapidJSON."""
    text = body.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape").lstrip(" \t\n\r")
    if not text:
        raise _parse_error("The document is empty." if body else "The document is empty")
    if "Inf" in text or "-NaN" in text:
        text = _SPECIAL.sub(_standard_name, text)
    try:
        root, end = _LOOSE.raw_decode(text)
    except json.JSONDecodeError as error:
        raise _parse_error(_reason(error)) from None
    except RecursionError:
        raise invalid_argument(f"the JSON is nested too deeply (limit: {_LEVELS} levels)") from None
    if any(match[1] for match in _ESCAPES.finditer(text, 0, end)):
        raise _parse_error("The surrogate pair in string is invalid.")
    return root


def _standard_name(match: re.Match[str]) -> str:
    token = match[0]
    if token.startswith('"'):
        return token
    return "NaN" if token.endswith("NaN") else f"{'-' * token.startswith('-')}Infinity"


def _reason(error: json.JSONDecodeError) -> str:
    """Return RapidJSON's message."""
    if not error.msg.startswith("Expecting ',' delimiter"):
        reason = error.msg.replace("before the end", "before end")  # Python 3.13.0 lacks "the".
        return next((text for start, text in _REASONS.items() if reason.startswith(start)), f"{reason}.")
    before, after = error.doc[: error.pos], error.doc[error.pos : error.pos + 1]
    if before[-1:].isdigit() and after and after in ".eE":
        return "Miss fraction part in number." if after == "." else "Miss exponent in number."
    closed = 0
    for mark in reversed(_MARKS.sub("", _STRINGS.sub("", before))):
        closed += 1 if mark in "]}" else -1
        if closed < 0 and mark == "{":
            return "Missing a comma or '}' after an object member."
        if closed < 0:
            break
    return "Missing a comma or ']' after an array element."


def _parse_error(text: str) -> StatusError:
    return invalid_argument(f"JSON Parse error: {text}")


def _number(text: str) -> int | float:
    """Return an integer if it fits into 64 bits, signed or unsigned, else a double."""
    if len(text) <= 20 and text.lstrip("-").isdigit() and -(2**63) <= int(text) < 2**64:
        return int(text)
    if math.isinf(value := float(text)):
        raise _parse_error("Number too big to be stored in double.")
    return value


def _first_wins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) == len(pairs):
        return members
    found, repeats = JsonObject(), []
    for key, value in pairs:
        if key in found:
            repeats.append((key, value))
        else:
            found[key] = value
    found.repeats = tuple(repeats)
    return found


_LONG_INTEGER = re.compile(rb"-?\d{19,400}")
_LISTS = frozenset({"instances", "examples"})
_OBJECTS = frozenset({"inputs", "context", "parameters"})
_TENSORS = frozenset({"inputs", "outputs"})
"""The lists of the Open Inference Protocol."""
_LEVELS = 1000
# Matches a string, also one without an end. Otherwise each of its quotes would be tried as a start, in quadratic time.
_STRING = r'"(?:[^"\\]++|\\.?)*+(?:"|\Z)'
_STRINGS = re.compile(_STRING, re.DOTALL)
_SPECIAL = re.compile(rf"{_STRING}|-?(?:NaN|Inf(?:inity|(?!i)))", re.DOTALL)
_MARKS = re.compile(r"[^][{}]+")
_ESCAPES = re.compile(r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]|(u[dD][89a-fA-F])|.)", re.DOTALL)
"""Matches escapes. The group is a surrogate that has no other half."""
_REASONS = {
    "Expecting value": "Invalid value.",
    "Illegal trailing comma before end of array": "Invalid value.",
    "Expecting property name": "Missing a name for object member.",
    "Illegal trailing comma before end of object": "Missing a name for object member.",
    "Expecting ':' delimiter": "Missing a colon after a name of object member.",
    "Unterminated string": "Missing a closing quotation mark in string.",
    "Invalid control character": "Invalid escape character in string.",
    "Invalid \\escape": "Invalid escape character in string.",
    "Invalid \\uXXXX escape": "Incorrect hex digit after \\u escape in string.",
}
"""RapidJSON's messages, by the beginning of the standard library's."""
_LOOSE = json.JSONDecoder(object_pairs_hook=_first_wins, parse_float=_number, parse_int=_number)
