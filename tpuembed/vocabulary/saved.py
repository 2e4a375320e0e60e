"""The saved form of a vocabulary.

First `MAGIC`, whose number is the version of the form. Then the length of the header, uint32, and the header, JSON: the
options of the vocabulary, `names` (how many) and `bytes` (of all texts; 0 for int64). Then little-endian arrays: the lengths
of the texts, uint32, and their bytes, or the integers, int64, in the order of their numbers. Then the CRC32C of all before
it, uint32.

Everything is checked against the length of the file before an array is made.
"""

import dataclasses
import itertools
import json
import struct
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import google_crc32c
import numpy as np

from tpuembed.errors import CheckpointCorruptError, CheckpointFormatError, reason
from tpuembed.vocabulary.names import Names

__all__ = ["MOST_NAMES", "OPTIONS", "VocabularyHeader", "attribute_of", "check_version", "parse", "saved_form"]

MAGIC: Final = b"tpuembed vocabulary 1\n"
_HEADER_BYTES: Final = 1 << 16
MOST_NAMES: Final = 2**31 - 1
OPTIONS: Final = ("dtype", "oov_buckets")
"""The options that say which row a name has, beside the names."""


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
    """

    MOST_BYTES: ClassVar[int] = len(MAGIC) + 4 + _HEADER_BYTES
    """The bytes that hold every header."""

    names: int
    dtype: str
    oov_buckets: int

    @property
    def rows(self) -> int:
        """Return the number of rows, those of buckets included."""
        return self.oov_buckets + self.names

    @classmethod
    def from_bytes(cls, content: bytes, where: str = "vocabulary") -> "VocabularyHeader":
        """Return the header of what `Vocabulary.to_bytes` wrote. `content` may be the first MOST_BYTES of it.

        The checksum is not compared, which covers all names.

        Raises:
            CheckpointCorruptError: it is damaged, or is none.
        """
        check_version(content, where)
        try:
            return _header_of(content)[0]
        except ValueError as error:
            raise CheckpointCorruptError(f"{where}: cannot be read: {reason(error)}. Restore it from a copy.") from None


def saved_form(options: Mapping[str, Any], names: Names) -> bytes:
    """Return the saved form of names, which are shorter than 4 GiB each."""
    if names.dtype == object:
        lengths = np.fromiter(map(len, names.tolist()), "<u4", len(names))
        size, body = int(lengths.sum(dtype=np.int64)), [lengths.tobytes(), *names.tolist()]
    else:
        size, body = 0, [names.astype("<i8").tobytes()]
    header = json.dumps({**options, "names": len(names), "bytes": size}).encode()
    content = b"".join([MAGIC, struct.pack("<I", len(header)), header, *body])
    return content + struct.pack("<I", google_crc32c.value(content))


def check_version(content: bytes, where: str) -> None:
    """Raise CheckpointFormatError if `content` is a vocabulary of another version. `where` begins the message."""
    begin, _, own = MAGIC[:-1].rpartition(b" ")
    found, _, version = content[: len(MAGIC) + 8].partition(b"\n")[0].rpartition(b" ")
    if found == begin and version != own and version.isdigit():
        raise CheckpointFormatError(
            f"{where}: has version {int(version)} of the form of vocabularies. This release reads version {int(own)}. Read it "
            "with the release that wrote it."
        )


def parse(content: bytes) -> tuple[VocabularyHeader, Names]:
    """Return the options and names of what `saved_form` made, not compared with each other. Raises ValueError for damage."""
    header, text_bytes, size = _header_of(content)
    if len(content) < size + 4:
        raise ValueError(f"it ends after {len(content)} bytes")
    view = memoryview(content)
    (checksum,) = struct.unpack("<I", content[-4:])
    if google_crc32c.value(np.frombuffer(view[:-4], np.uint8)) != checksum:
        raise ValueError("its checksum is wrong")
    body, names = view[size:-4], header.names
    expected = 4 * names + text_bytes if header.dtype == "string" else 8 * names
    if len(body) != expected:
        raise ValueError(f"it has {len(body)} bytes, and its header says {expected}")
    if header.dtype != "string":
        return header, np.frombuffer(body, "<i8").astype(np.int64)
    lengths = np.frombuffer(body[: 4 * names], "<u4").astype(np.uint32)
    total = int(lengths.sum(dtype=np.uint64))
    if total != text_bytes:
        raise ValueError(f"its names have {text_bytes} bytes, and their lengths add up to {total}")
    texts, ends = body[4 * names :], np.cumsum(lengths, dtype=np.int64).tolist()
    found = np.empty(names, object)
    found[:] = [bytes(texts[start:end]) for start, end in itertools.pairwise([0, *ends])]
    return header, found


def _header_of(content: bytes) -> tuple[VocabularyHeader, int, int]:
    """Return the header, the bytes of all texts, and where the header ends. `content` may lack what follows it."""
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
    for name in ("oov_buckets", "names", "bytes"):
        if type(fields.get(name)) is not int or not 0 <= fields[name] < 2**48:
            raise ValueError(f"its header has {name} {_shown(fields.get(name))}")
    if unknown := set(fields) - {*OPTIONS, "names", "bytes"}:
        raise ValueError(f"its header has {_shown(min(unknown))}")
    if fields.get("dtype") not in ("string", "int64"):
        raise ValueError(f"its header has dtype {_shown(fields.get('dtype'))}")
    header = VocabularyHeader(fields["names"], fields["dtype"], fields["oov_buckets"])
    return header, fields["bytes"], start + size


def _shown(value: Any) -> str:
    return f"{value!r}"[:60]
