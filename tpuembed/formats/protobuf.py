"""The wire format of protocol buffers, as far as tensor bundles, object graphs and SavedModels need it.

Source: https://protobuf.dev/programming-guides/encoding/
"""

from collections.abc import Callable
from typing import Final

__all__ = [
    "MalformedError",
    "Message",
    "UnsupportedError",
    "bytes_field",
    "edit_messages",
    "fixed32_field",
    "read_varint",
    "shown",
    "varint",
    "varint_field",
]

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES: Final = 10


class MalformedError(Exception):
    """The bytes are malformed. A caller that knows the file's name turns this into a CheckpointError."""


class UnsupportedError(MalformedError):
    """The bytes are valid, but of a kind that is not supported."""


def shown(key: bytes) -> str:
    """Return a key for a message: readable, and at most one line long."""
    try:
        text: str | bytes = key.decode()
    except UnicodeDecodeError:
        text = key
    return repr(text) if len(text) <= 100 else f"{text[:100]!r}..."


def read_varint(buffer: bytes, position: int) -> tuple[int, int]:
    """Return (the unsigned 64-bit varint at `position`, the position after it)."""
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        if position + index >= len(buffer):
            raise MalformedError("it ends inside a varint")
        byte = buffer[position + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            if value >= 1 << 64:
                raise MalformedError("a varint is over 64 bits")
            return value, position + index + 1
    raise MalformedError("a varint is over 10 bytes")


def varint(value: int) -> bytes:
    """Encode `value` as a varint; a negative one as its 64-bit two's complement."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def varint_field(number: int, value: int) -> bytes:
    """Encode an integer field; nothing for 0, proto3's default."""
    return varint(number << 3 | _VARINT) + varint(value) if value else b""


def bytes_field(number: int, value: bytes) -> bytes:
    """Encode a bytes, string or message field, even if it is empty."""
    return varint(number << 3 | _BYTES) + varint(len(value)) + value


def fixed32_field(number: int, value: int) -> bytes:
    """Encode a fixed32 field; nothing for 0, proto3's default."""
    return varint(number << 3 | _FIXED32) + value.to_bytes(4, "little") if value else b""


def edit_messages(buffer: bytes, path: tuple[int, ...], edit: Callable[[bytes], bytes]) -> bytes:
    """Return `buffer` with every message at `path`, field numbers from the outside in, replaced by `edit` of it.

    All other fields stay byte for byte the same. The lengths of the enclosing messages are adjusted.

    Raises:
        MalformedError: the bytes do not parse.
    """
    if not path:
        return edit(buffer)
    pieces, position = [], 0
    while position < len(buffer):
        start = position
        tag, position = read_varint(buffer, position)
        value, position = _read_value(buffer, position, tag & 7)
        if tag >> 3 == path[0] and isinstance(value, bytes):
            pieces.append(bytes_field(path[0], edit_messages(value, path[1:], edit)))
        else:
            pieces.append(buffer[start:position])
    return b"".join(pieces)


class Message:
    """A decoded message: the values of each field number, in order. Unknown fields are kept and ignored.

    Raises:
        MalformedError: on construction, if the bytes do not parse; on access, if a field is of another type.
    """

    def __init__(self, buffer: bytes) -> None:
        self._fields: dict[int, list[int | bytes]] = {}
        position = 0
        while position < len(buffer):
            tag, position = read_varint(buffer, position)
            value, position = _read_value(buffer, position, tag & 7)
            self._fields.setdefault(tag >> 3, []).append(value)

    def has(self, number: int) -> bool:
        """Returns True if the message has the field."""
        return number in self._fields

    def integer(self, number: int) -> int:
        """Return an unsigned integer, 0 if absent."""
        value = self._fields.get(number, [0])[-1]
        if not isinstance(value, int):
            raise MalformedError(f"field {number} should be an integer")
        return value

    def signed(self, number: int) -> int:
        """Return an int32 or int64, 0 if absent."""
        return _signed(self.integer(number))

    def signed_integers(self, number: int) -> list[int]:
        """Return a repeated int32 or int64, packed or not."""
        values: list[int] = []
        for field in self._fields.get(number, []):
            if isinstance(field, int):
                values.append(_signed(field))
                continue
            position = 0
            while position < len(field):
                value, position = read_varint(field, position)
                values.append(_signed(value))
        return values

    def data(self, number: int) -> bytes:
        """Return a bytes field, empty if absent."""
        value = self._fields.get(number, [b""])[-1]
        if not isinstance(value, bytes):
            raise MalformedError(f"field {number} should be bytes")
        return value

    def text(self, number: int) -> str:
        """Return a string field, empty if absent."""
        try:
            return self.data(number).decode()
        except UnicodeDecodeError:
            raise MalformedError(f"field {number} is not UTF-8") from None

    def message(self, number: int) -> "Message":
        """Return a message field, empty if absent."""
        return Message(self.data(number))

    def messages(self, number: int) -> "list[Message]":
        """Return a repeated message field."""
        values = self._fields.get(number, [])
        if not all(isinstance(value, bytes) for value in values):
            raise MalformedError(f"field {number} should be a message")
        return [Message(value) for value in values if isinstance(value, bytes)]


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _read_value(buffer: bytes, position: int, wire_type: int) -> tuple[int | bytes, int]:
    if wire_type == _VARINT:
        return read_varint(buffer, position)
    if wire_type == _BYTES:
        size, position = read_varint(buffer, position)
    elif wire_type in (_FIXED32, _FIXED64):
        size = 4 if wire_type == _FIXED32 else 8
    else:
        raise MalformedError(f"a field has wire type {wire_type}")
    end = position + size
    if end > len(buffer):
        raise MalformedError(f"a field of {size} bytes starts {len(buffer) - position} bytes before the end")
    value = buffer[position:end]
    return value if wire_type == _BYTES else int.from_bytes(value, "little"), end
