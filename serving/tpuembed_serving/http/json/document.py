"""A request body as a JSON document: by a fast library where that agrees with RapidJSON, else by our own parser."""

import json
import math
import re
from typing import Any, NamedTuple

import orjson

from tpuembed_serving.core.status import StatusError, invalid_argument
from tpuembed_serving.http.json.debug import debug_string
from tpuembed_serving.http.json.parser import JsonObject, parse, to_integer

__all__ = ["Document", "format_error", "parse_document"]


class Document(NamedTuple):
    """A parsed body.

    Attributes:
        members: of the top-level object; of equal keys the first counts, here and below.
    """

    members: dict[str, Any]


def parse_document(body: bytes, max_depth: int | None = None) -> Document:
    """Parse `body`.

    Args:
        body: of a request.
        max_depth: how deep it may be nested, where that is more than the fast parser takes; None is any depth.

    Raises:
        StatusError: it is not JSON, no object, or nested too deep.
    """
    root = _parse(body, max_depth)
    if not isinstance(root, dict):
        raise format_error(root, "Is not object")
    return Document(root)


def format_error(value: Any, text: str) -> StatusError:
    """INVALID_ARGUMENT about a JSON value."""
    return invalid_argument(f"JSON Value: {debug_string(value)} {text}")


def _parse(body: bytes, max_depth: int | None) -> Any:
    """What orjson accepts it reads as RapidJSON does, but for repeated keys, of which it keeps the last."""
    try:
        root = orjson.loads(body)
    except orjson.JSONDecodeError:
        return parse(body, max_depth) if _SURROGATE_ESCAPE.search(body) else _parse_loosely(body, max_depth)
    if type(root) is dict and body.count(b":") > _count_members(root):
        return _parse_loosely(body, max_depth)
    return root


def _count_members(root: dict[str, Any]) -> int:
    """Members in plain sight. Each has a colon, so that as many colons in the body prove that no key is repeated."""
    count = len(root)
    for key, value in root.items():
        if key in _LISTS and type(value) is list:
            count += sum([len(row) for row in value if type(row) is dict])
        elif key in _OBJECTS and type(value) is dict:
            count += len(value)
    return count


def _parse_loosely(body: bytes, max_depth: int | None) -> Any:
    """By the standard library, told to do as RapidJSON does; what it refuses is left to our own parser.

    It knows NaN and Infinity, and stops after the first value. The one thing it accepts and RapidJSON does not, an
    unpaired surrogate escape, must not be in the body.
    """
    try:
        root, _ = _LOOSE.raw_decode(body.decode("utf-8", "surrogateescape").lstrip(" \t\n\r"))
    except (ValueError, RecursionError):
        return parse(body, max_depth)
    if not isinstance(root, dict) or (max_depth is not None and _is_deeper(root, body, max_depth)):
        return parse(body, max_depth)  # which refuses it
    return root


def _is_deeper(root: Any, body: bytes, max_depth: int) -> bool:
    """Returns True if `root`, which `body` says, is nested deeper. Python's parser has no limit of its own from 3.13 on."""
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
