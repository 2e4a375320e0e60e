"""Writes a JSON value for an error message as TensorFlow Serving does (json_tensor.cc, JsonValueToDebugString)."""

import json
import math
from collections.abc import Iterable
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
    writer = _LimitedWriter()
    writer.value(value, 0)
    return "".join(writer.parts)


class _LimitedWriter:
    """Writes tokens until the limit is reached."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self._size = 0

    @property
    def _full(self) -> bool:
        return self._size >= _MAX_BYTES

    def _put(self, text: str) -> bool:
        """Append `text`, and return True if the limit was not reached before."""
        if self._full:
            return False
        self.parts.append(text)
        self._size += len(text.encode("utf-8", "surrogateescape"))
        return True

    def value(self, value: Any, depth: int, prefix: str = "") -> bool:
        """Write `prefix` and `value`, which is inside `depth` containers. Returns True if all of it was written."""
        if isinstance(value, dict):
            return self._object(value, depth, prefix)
        if isinstance(value, list):
            return self._array(value, depth, prefix)
        return self._put(prefix + _scalar(value))

    def _object(self, value: dict[str, Any], depth: int, prefix: str) -> bool:
        indent = "\n" + "    " * (depth + 1)
        written = self._put(prefix + "{")
        for index, (key, member) in enumerate(value.items()):
            written = written and self._put(("," if index else "") + indent + quote(key))
            written = written and self.value(member, depth + 1, ": ")
        return written and self._put(("\n" + "    " * depth if value else "") + "}")

    def _array(self, value: Iterable[Any], depth: int, prefix: str) -> bool:
        written = self._put(prefix + "[")
        for index, element in enumerate(value):
            written = written and self.value(element, depth + 1, ", " if index else "")
            if not written:
                return False
        return written and self._put("]")


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, float):
        return repr(value).replace("e+", "e") if math.isfinite(value) else _NAMES[repr(value)]
    return (
        {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)
    )
