"""The saved form of a vocabulary.

First `MAGIC`, whose number is the version of the form. Then the length of the header, uint32, and the header, JSON: the
options of the vocabulary, `names` (how many), `bytes` (of all texts; 0 for int64), `free` (how many numbers have no name),
`update` and `is_counted`. Then little-endian arrays: the free numbers, uint32; the lengths of the texts, uint32,
and their bytes, or the integers, int64, in the order of their numbers; if `is_counted`, the count, uint32, and the last
update, int32, of each name. Then the CRC32C of all before it, uint32.

Everything is checked against the length of the file before an array is made.
"""

import dataclasses
import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final

import google_crc32c
import numpy as np
import numpy.typing as npt

from tpuembed.errors import CheckpointCorruptError, CheckpointFormatError, reason
from tpuembed.vocabulary.text import SLACK, Texts

__all__ = [
    "IDENTITY",
    "MAGIC",
    "MOST_NAMES",
    "OPTIONS",
    "SavedNames",
    "VocabularyHeader",
    "attribute_of",
    "check_version",
    "chunks",
    "parse",
]

_Integers = npt.NDArray[np.int64]

MAGIC: Final = b"tpuembed vocabulary 1\n"
_HEADER_BYTES: Final = 1 << 16
_AT_ONCE: Final = 1 << 20
MOST_NAMES: Final = 2**31 - 1
IDENTITY: Final = ("dtype", "oov_buckets")
"""The options that say which row a name has, beside the names."""
OPTIONS: Final = (*IDENTITY, "grows", "min_count")
_COUNTS: Final = ("names", "bytes", "free", "update")


@dataclasses.dataclass(frozen=True, eq=False)
class SavedNames:
    """All of a vocabulary.

    Attributes:
        options: its options.
        names: Texts, or int64 [n], in the order of their numbers.
        free: the numbers that have no name, int64, ascending.
        update: the latest that it knows.
        counts: how often each name was seen, uint32 [n]; None if it is not counted.
        last_seen: the update that each was last seen in, int32 [n]; None if it is not counted.
    """

    options: Mapping[str, Any]
    names: Any
    free: _Integers
    update: int
    counts: npt.NDArray[np.uint32] | None
    last_seen: npt.NDArray[np.int32] | None

    def numbers(self) -> _Integers:
        """Return the number of each name, int64 [n]."""
        alive = np.ones(len(self.names) + len(self.free), bool)
        alive[self.free] = False
        return np.flatnonzero(alive)


def attribute_of(table: str) -> str:
    """Return the name of the attribute that has the vocabulary of `table` in a TensorFlow checkpoint.

    TensorFlow does not find an attribute again whose name has "." or "/".
    """
    return table.replace("%", "%25").replace(".", "%2E").replace("/", "%2F")


@dataclasses.dataclass(frozen=True)
class VocabularyHeader:
    """What the first bytes of a saved vocabulary say.

    Attributes:
        names: number of names.
        dtype: of the names.
        oov_buckets: number of rows for unknown names.
        free: number of rows without a name.
    """

    MOST_BYTES: ClassVar[int] = len(MAGIC) + 4 + _HEADER_BYTES
    """The bytes that hold every header."""

    names: int
    dtype: str
    oov_buckets: int
    free: int = 0

    @property
    def rows(self) -> int:
        """Return the number of rows, those of buckets and those without a name included."""
        return self.oov_buckets + self.names + self.free

    @classmethod
    def from_bytes(cls, content: bytes, where: str = "vocabulary") -> "VocabularyHeader":
        """Return the header of what `Vocabulary.to_bytes` wrote. `content` may be the first MOST_BYTES of it.

        The checksum is not compared, which covers all names.

        Raises:
            CheckpointCorruptError: it is damaged, or is none.
        """
        try:
            check_version(content, where)
            fields, _ = _fields(content)
            buckets = fields.get("oov_buckets")
            if type(buckets) is not int or buckets < 0:
                raise ValueError(f"its header has oov_buckets {buckets!r}")
        except ValueError as error:
            raise CheckpointCorruptError(f"{where}: cannot be read: {reason(error)}. Restore it from a copy.") from None
        return cls(fields["names"], fields["dtype"], buckets, fields["free"])


def chunks(saved: SavedNames) -> Iterator[bytes]:
    """Yield the saved form, some megabytes at a time."""
    names = saved.names
    fields = dict(saved.options) | {
        "names": len(names),
        "bytes": int(names.lengths.sum(dtype=np.int64)) if isinstance(names, Texts) else 0,
        "free": len(saved.free),
        "update": saved.update,
        "is_counted": saved.counts is not None,
    }
    header = json.dumps(fields).encode()
    checksum = 0
    for chunk in (MAGIC, struct.pack("<I", len(header)), header, *_body(saved)):
        checksum = google_crc32c.extend(checksum, chunk)
        yield chunk
    yield struct.pack("<I", checksum)


def _body(saved: SavedNames) -> Iterator[bytes]:
    yield from _pieces(saved.free, "<u4")
    if isinstance(saved.names, Texts):
        yield from _pieces(saved.names.lengths, "<u4")
        for piece in saved.names.pieces():
            yield piece.packed().data[:-SLACK].tobytes()
    else:
        yield from _pieces(saved.names, "<i8")
    if saved.counts is not None and saved.last_seen is not None:
        yield from _pieces(saved.counts, "<u4")
        yield from _pieces(saved.last_seen, "<i4")


def _pieces(array: npt.NDArray[Any], dtype: str) -> Iterator[bytes]:
    for start in range(0, len(array), _AT_ONCE):
        yield array[start : start + _AT_ONCE].astype(dtype).tobytes()


def check_version(content: bytes, where: str) -> None:
    """Raise CheckpointFormatError if `content` is a vocabulary of another version. `where` begins the message."""
    begin, _, own = MAGIC[:-1].rpartition(b" ")
    found, _, version = content[: len(MAGIC) + 8].partition(b"\n")[0].rpartition(b" ")
    if found == begin and version != own and version.isdigit():
        raise CheckpointFormatError(
            f"{where}: has version {int(version)} of the form of vocabularies. This release reads version {int(own)}. Read it "
            "with the release that wrote it."
        )


def parse(content: bytes) -> SavedNames:
    """Return what `chunks` made. The names are not compared with each other.

    Raises:
        ValueError: it is damaged.
    """
    fields, body = _header(content)
    names, free = fields["names"], fields["free"]
    is_text, is_counted = fields["dtype"] == "string", fields["is_counted"]
    if names + free > MOST_NAMES:
        raise ValueError(f"{names + free} numbers are more than {MOST_NAMES}")
    own = 4 * names + fields["bytes"] if is_text else 8 * names
    expected = 4 * free + own + 8 * names * is_counted
    if len(body) != expected:
        raise ValueError(f"it has {len(body)} bytes, and its header says {expected}")
    read = _Arrays(body)
    holes = _numbers("free", read.take("<u4", free), names + free)
    texts: Any
    if is_text:
        lengths = read.take("<u4", names)
        total = int(lengths.sum(dtype=np.uint64))
        if total != fields["bytes"]:
            raise ValueError(f"its names have {fields['bytes']} bytes, and their lengths add up to {total}")
        data = np.zeros(total + SLACK, np.uint8)
        data[:total] = read.take("u1", total)
        texts = Texts(data, np.cumsum(lengths, dtype=np.int64) - lengths, lengths)
    else:
        texts = read.take("<i8", names).astype(np.int64)
    counts = read.take("<u4", names) if is_counted else None
    last_seen = read.take("<i4", names) if is_counted else None
    if last_seen is not None and len(last_seen) and (last_seen.min() < 0 or last_seen.max() > fields["update"]):
        raise ValueError(f"a name was last seen in an update outside of [0, {fields['update']}]")
    return SavedNames(fields["options"], texts, holes, fields["update"], counts, last_seen)


class _Arrays:
    """The arrays after the header, one after the other."""

    def __init__(self, body: memoryview) -> None:
        self._body, self._done = body, 0

    def take(self, dtype: str, count: int) -> npt.NDArray[Any]:
        """Return the next `count` values. They are not copied."""
        size = np.dtype(dtype).itemsize * count
        self._done += size
        return np.frombuffer(self._body[self._done - size : self._done], dtype)


def _header(content: bytes) -> tuple[dict[str, Any], memoryview]:
    """Return the fields of the header, with the options in `options`, and what follows it but for the checksum."""
    fields, size = _fields(content)
    if len(content) < size + 4:
        raise ValueError(f"it ends after {len(content)} bytes")
    view = memoryview(content)
    (checksum,) = struct.unpack("<I", content[-4:])
    if google_crc32c.value(np.frombuffer(view[:-4], np.uint8)) != checksum:
        raise ValueError("its checksum is wrong")
    return fields, view[size:-4]


def _fields(content: bytes) -> tuple[dict[str, Any], int]:
    """Return the fields of the header, and where it ends. `content` may lack what follows it."""
    start = len(MAGIC) + 4
    if not content.startswith(MAGIC) or len(content) < start:
        raise ValueError("it is no vocabulary")
    (size,) = struct.unpack("<I", content[start - 4 : start])
    if size > min(_HEADER_BYTES, len(content) - start):
        raise ValueError(f"its header has {size} bytes")
    try:
        fields = json.loads(content[start : start + size])
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError(f"its header is {_shown(fields)}")
    for name in _COUNTS:
        if type(fields.get(name)) is not int or not 0 <= fields[name] < 2**48:
            raise ValueError(f"its header has {name} {_shown(fields.get(name))}")
    if not isinstance(fields.get("is_counted"), bool) or fields["update"] >= 2**31:
        raise ValueError("its header has a wrong is_counted or update")
    options = {key: value for key, value in fields.items() if key not in (*_COUNTS, "is_counted")}
    if unknown := set(options) - set(OPTIONS):
        raise ValueError(f"its header has {_shown(min(unknown))}")
    if options.get("dtype") not in ("string", "int64"):
        raise ValueError(f"its header has dtype {_shown(options.get('dtype'))}")
    return fields | {"options": options}, start + size


def _numbers(what: str, numbers: npt.NDArray[Any], count: int) -> _Integers:
    found = numbers.astype(np.int64)
    if len(found) and ((np.diff(found) <= 0).any() or found[-1] >= count):
        raise ValueError(f"its {what} numbers are not ascending below {count}")
    return found


def _shown(value: Any) -> str:
    return f"{value!r}"[:60]
