"""Writes a JSON value for an error message as TensorFlow Serving does (json_tensor.cc, JsonValueToDebugString)."""

import json
import math
from collections.abc import Iterator
from typing import Any

__all__ = ["debug_string", "quote", "type_name"]

_MAX_BYTES = 256
_NAMES = {
    "nan": "NaN",
    "inf": "Infinity",
    "-inf": "-Infinity",
}  # TensorFlow Serving's messages have nothing in their place

quote = json.JSONEncoder(ensure_ascii=False).encode
"""Returns a JSON string. Escapes only the characters that require it."""


def type_name(value: Any) -> str:
    """Return RapidJSON's name of a value's type."""
    if value is None:
        return "Null"
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, dict):
        return "Object"
    if isinstance(value, list):
        return "Array"
    return "String" if isinstance(value, str) else "Number"


def debug_string(value: Any) -> str:
    """Return `value` as indented JSON with arrays on one line. No token starts after 256 bytes."""
    parts, size = list[str](), 0
    for token in _tokens(value, 0):
        if size >= _MAX_BYTES:
            break
        parts.append(token)
        size += len(token.encode("utf-8", "surrogateescape"))
    return "".join(parts)


def _tokens(value: Any, depth: int, prefix: str = "") -> Iterator[str]:
    """Yield `prefix` with the first token of `value`, which is inside `depth` containers, then the others."""
    if isinstance(value, dict):
        yield prefix + "{"
        for index, (key, member) in enumerate(value.items()):
            yield f"{',' if index else ''}\n{'    ' * (depth + 1)}{quote(key)}"
            yield from _tokens(member, depth + 1, ": ")
        yield f"\n{'    ' * depth}}}" if value else "}"
    elif isinstance(value, list):
        yield prefix + "["
        for index, element in enumerate(value):
            yield from _tokens(element, depth + 1, ", " if index else "")
        yield "]"
    else:
        yield prefix + _scalar(value)


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, float):
        return repr(value).replace("e+", "e") if math.isfinite(value) else _NAMES[repr(value)]
    return (
        {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)
    )
