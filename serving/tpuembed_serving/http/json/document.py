"""Parses a request body: with orjson if it agrees with RapidJSON, else with tpuembed's own parser."""

import json
import math
import re
from typing import Any, NamedTuple

import orjson

from tpuembed_serving.core.noop import noop
from tpuembed_serving.core.pipeline import Check
from tpuembed_serving.core.status import StatusError, invalid_argument
from tpuembed_serving.http.json.debug import debug_string
from tpuembed_serving.http.json.parser import JsonObject, parse, to_integer

__all__ = ["LEAST_DECODING_BYTES", "Document", "decoding_bytes", "format_error", "parse_document"]

LEAST_DECODING_BYTES = 12
"""The least memory that is estimated for each byte of a body: the text, Python's values, lists and arrays."""
_VALUE_BYTES, _LIST_BYTES, _OBJECT_BYTES = 56, 120, 320
"""About the memory of a value in a list and in an array, and of an empty list and object (measured)."""


class Document(NamedTuple):
    """A parsed body.

    Attributes:
        members: the members of the top-level object. Of equal keys the first counts, at every level.
    """

    members: dict[str, Any]


def parse_document(body: bytes, max_depth: int | None = None, check: Check = noop) -> Document:
    """Parse `body`.

    Args:
        body: the body of a request.
        max_depth: the deepest nesting, if it is more than the fast parser's limit; None is no limit.
        check: called before and during slow work.

    Raises:
        StatusError: the body is not JSON, not an object, or nested too deeply.
    """
    root = _parse(body, max_depth, check)
    if not isinstance(root, dict):
        raise format_error(root, "Is not object")
    return Document(root)


def decoding_bytes(body: bytes) -> int:
    """Return about how many bytes it takes to parse and decode `body`, from the number of its values, lists and objects."""
    values, lists, objects = (body.count(mark) for mark in (b",", b"[", b"{"))
    estimate = len(body) + values * _VALUE_BYTES + lists * _LIST_BYTES + objects * _OBJECT_BYTES
    return max(estimate, len(body) * LEAST_DECODING_BYTES)


def format_error(value: Any, text: str) -> StatusError:
    """Return an INVALID_ARGUMENT error about a JSON value."""
    return invalid_argument(f"JSON Value: {debug_string(value)} {text}")


def _parse(body: bytes, max_depth: int | None, check: Check) -> Any:
    """Parse with orjson, unless a key may be repeated: orjson keeps the last value, and RapidJSON the first."""
    try:
        root = orjson.loads(body)
    except orjson.JSONDecodeError:
        check(len(body))
        if _SURROGATE_ESCAPE.search(body):
            return parse(body, max_depth, check)
        return _parse_loosely(body, max_depth, check)
    if type(root) is dict and body.count(b":") > _count_members(root):
        check(len(body))
        return _parse_loosely(body, max_depth, check)
    return root


def _count_members(root: dict[str, Any]) -> int:
    """Count the members at the known levels. As many colons in the body prove that no key is repeated."""
    count = len(root)
    for key, value in root.items():
        if key in _LISTS and type(value) is list:
            count += sum([len(row) for row in value if type(row) is dict])
        elif key in _OBJECTS and type(value) is dict:
            count += len(value)
    return count


def _parse_loosely(body: bytes, max_depth: int | None, check: Check) -> Any:
    """Parse with the standard library, configured to agree with RapidJSON. If it fails, parse with tpuembed's parser.

    It reads NaN and Infinity, and stops after the first value. Unlike RapidJSON, it accepts an unpaired surrogate escape,
    so the body must not contain one.
    """
    try:
        root, _ = _LOOSE.raw_decode(body.decode("utf-8", "surrogateescape").lstrip(" \t\n\r"))
    except (ValueError, RecursionError):
        return parse(body, max_depth, check)
    if not isinstance(root, dict) or (max_depth is not None and _is_deeper(root, body, max_depth)):
        return parse(body, max_depth, check)  # to report the error
    return root


def _is_deeper(root: Any, body: bytes, max_depth: int) -> bool:
    """Returns True if `root`, parsed from `body`, is nested deeper. From 3.13 on, Python's parser has no own limit."""
    if body.count(b"[") + body.count(b"{") <= max_depth:
        return False
    level = [root]
    for _ in range(max_depth):
        inner = [value for one in level for value in (one.values() if isinstance(one, dict) else one)]
        level = [value for value in inner if isinstance(value, dict | list)]
        if not level:
            return False
    return True


def _finite(value: int | float) -> int | float:
    if math.isinf(value):
        raise ValueError("too big for a double")
    return value


def _first_wins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) == len(pairs):
        return members
    found = JsonObject()
    for key, value in pairs:
        found.add(key, value)
    return found


_LISTS = frozenset({"instances", "examples"})
_OBJECTS = frozenset({"inputs", "context"})
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_LOOSE = json.JSONDecoder(
    object_pairs_hook=_first_wins,
    parse_float=lambda text: _finite(float(text)),
    parse_int=lambda text: _finite(to_integer(text)),
)
