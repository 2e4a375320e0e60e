"""Arrays as bytes on the wire: a header in JSON that says what there is, and the arrays behind each other.

    bytes 0-3     "TPEB"
    bytes 4-7     1, the version of this format; uint32, little-endian like every number here
    bytes 8-11    length of the header in bytes; uint32
    bytes 12-15   0
    the header    JSON in UTF-8, an object; may end in spaces
    the arrays    each in C order, from the first multiple of 8 behind what was before it; between them are zeros

    {"signature_name": "serving_default",
     "tensors": [{"name": "ids", "dtype": "int64", "shape": [64, 8], "offset": 0, "size": 4096}, ...], ...}

`offset` counts from the first multiple of 8 behind the header. `size`, in bytes, is that of shape and dtype, and the last array
ends where the frame does. Members that a reader does not know are ignored. All of this is proven before an array is made; an
array is then a view of the frame.

Standard library and numpy alone: the client has this module too.
"""

import dataclasses
import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpuembed.errors import ServingError

__all__ = ["CONTENT_TYPE", "Frame", "FrameError", "decode_frame", "encode_frame", "wire_dtype"]

Array = npt.NDArray[Any]

CONTENT_TYPE: Final = "application/octet-stream"

_PREFIX: Final = struct.Struct("<4sIII")
_MAGIC: Final = b"TPEB"
_VERSION: Final = 1
_ALIGNMENT: Final = 8
_MAX_HEADER_BYTES: Final = 2**20
_MAX_TENSORS: Final = 4096
_MAX_RANK: Final = 32
_NAMES: Final = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "complex64", "complex128",
)  # fmt: skip
_DTYPES: Final = {name: np.dtype(name).newbyteorder("<") for name in _NAMES}


class FrameError(ServingError):
    """Bytes that are no frame, or arrays that cannot be in one."""


@dataclasses.dataclass(frozen=True)
class Frame:
    """What a frame holds: read-only arrays by name, in its order, and the other members of its header."""

    tensors: Mapping[str, Array]
    members: Mapping[str, Any]


def wire_dtype(dtype: np.dtype[Any] | None) -> str:
    """What frames call a dtype; empty for one that they have no form for, such as strings."""
    name = "" if dtype is None else dtype.name
    return name if name in _DTYPES or name == "bfloat16" else ""


def encode_frame(tensors: Mapping[str, Array], members: Mapping[str, Any]) -> bytes:
    """The frame of `tensors`, with `members` in its header as well.

    Raises:
        FrameError: a dtype has no form in frames.
    """
    described: list[dict[str, Any]] = []
    parts: list[bytes | memoryview] = []
    end = 0
    for name, given in tensors.items():
        array = _little_endian(name, given)
        gap = -end % _ALIGNMENT
        entry = {
            "name": name,
            "dtype": array.dtype.name,
            "shape": array.shape,
            "offset": end + gap,
            "size": array.nbytes,
        }
        described.append(entry)
        parts += [bytes(gap), array.reshape(-1).view(np.uint8).data]
        end += gap + array.nbytes
    header = json.dumps({**members, "tensors": described}, separators=(",", ":")).encode("utf-8")
    header += b" " * (-(_PREFIX.size + len(header)) % _ALIGNMENT)
    return b"".join([_PREFIX.pack(_MAGIC, _VERSION, len(header), 0), header, *parts])


def _little_endian(name: str, array: Array) -> Array:
    if not wire_dtype(array.dtype):
        raise FrameError(f"tensor {name}: dtype {array.dtype} has no binary form; use JSON or gRPC for it")
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(array.shape)


def decode_frame(data: bytes) -> Frame:
    """The arrays that `data` is a frame of; they are views of it.

    Raises:
        FrameError: it is none, or does not agree with its own header.
    """
    members, start = _header(data)
    entries = members.pop("tensors", None)
    if not isinstance(entries, list) or len(entries) > _MAX_TENSORS:
        raise FrameError(f"the header's `tensors` is no list of at most {_MAX_TENSORS}")
    tensors: dict[str, Array] = {}
    end = 0
    for entry in entries:
        one = _entry(entry, end, len(data) - start)
        if one.name in tensors:
            raise FrameError(f"tensor {one.name}: is there twice")
        tensors[one.name] = _view(data, start, one)
        end = one.offset + one.size
    if start + end != len(data):
        raise FrameError(f"the frame has {len(data)} bytes, and its header describes {start + end}")
    return Frame(tensors, members)


def _header(data: bytes) -> tuple[dict[str, Any], int]:
    """Its members, and where the arrays begin."""
    if len(data) < _PREFIX.size:
        raise FrameError(f"a frame has at least {_PREFIX.size} bytes, not {len(data)}")
    magic, version, length, reserved = _PREFIX.unpack_from(data)
    if magic != _MAGIC:
        raise FrameError(f"no frame: it begins with {magic!r} instead of {_MAGIC!r}")
    if version != _VERSION or reserved:
        raise FrameError(f"a frame of version {version}.{reserved}, where version {_VERSION}.0 is understood")
    if length > min(_MAX_HEADER_BYTES, len(data) - _PREFIX.size):
        raise FrameError(f"a header of {length} bytes, in a frame of {len(data)}; {_MAX_HEADER_BYTES} are the most")
    end = _PREFIX.size + length
    try:
        members = json.loads(data[_PREFIX.size : end])
    except (ValueError, RecursionError):
        raise FrameError("the header is no JSON") from None
    if not isinstance(members, dict):
        raise FrameError("the header is no JSON object")
    return members, min(end + -end % _ALIGNMENT, len(data))


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    dtype: np.dtype[Any]
    shape: Sequence[int]
    offset: int
    size: int


def _entry(entry: Any, end: int, room: int) -> _Entry:
    """One of the header's tensors, proven; `end` is where the one before it does, and `room` is of all."""
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not entry["name"].isprintable():
        raise FrameError("a tensor of the header has no printable name")
    name, shape = entry["name"], entry.get("shape")
    dtype = _dtype(name, entry.get("dtype"))
    if not isinstance(shape, list) or len(shape) > _MAX_RANK or not all(_is_size(size) for size in shape):
        raise FrameError(f"tensor {name}: its shape is no list of at most {_MAX_RANK} sizes")
    if not _is_size(math.prod(max(size, 1) for size in shape) * dtype.itemsize):
        raise FrameError(f"tensor {name}: its shape is too large")
    size, offset = math.prod(shape) * dtype.itemsize, end + -end % _ALIGNMENT
    if not (_is_size(entry.get("offset")) and _is_size(entry.get("size"))) or entry["size"] != size:
        raise FrameError(f"tensor {name}: size is {entry.get('size')}, and dtype and shape make {size}")
    if entry["offset"] != offset or offset + size > room:
        text = f"lies at {entry['offset']} with {size} bytes, where it has to lie at {offset} and to end by {room}"
        raise FrameError(f"tensor {name}: {text}")
    return _Entry(name, dtype, shape, offset, size)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _dtype(name: str, dtype: Any) -> np.dtype[Any]:
    found = _DTYPES.get(dtype) if isinstance(dtype, str) else None
    if found is None and dtype == "bfloat16":
        import ml_dtypes

        found = np.dtype(ml_dtypes.bfloat16)
    if found is None:
        raise FrameError(f"tensor {name}: dtype {dtype!r} is none of {', '.join((*_NAMES, 'bfloat16'))}")
    return found


def _view(data: bytes, start: int, one: _Entry) -> Array:
    raw = np.frombuffer(data, np.uint8, one.size, start + one.offset) if one.size else np.empty(0, np.uint8)
    if one.dtype == np.bool_ and raw.size and raw.max() > 1:
        raise FrameError(f"tensor {one.name}: a byte of a bool is neither 0 nor 1")
    return raw.view(one.dtype).reshape(one.shape)
