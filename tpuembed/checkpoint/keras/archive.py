"""`.keras` files: zip archives of a model's config and its weights. The weights are read in place."""

import contextlib
import dataclasses
import json
import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any, Final

from tpuembed.checkpoint.keras.hdf5 import Window
from tpuembed.errors import CheckpointCorruptError, CheckpointError, CheckpointFormatError, reason
from tpuembed.files import ByteStream

__all__ = [
    "CONFIG_NAME",
    "MAX_CONFIG_BYTES",
    "WEIGHTS_NAME",
    "Archive",
    "check_crc32",
    "open_archive",
    "opened_archive",
    "parse_config",
]

WEIGHTS_NAME: Final = "model.weights.h5"
CONFIG_NAME: Final = "config.json"
_OTHER_WEIGHTS: Final = ("model.weights.npz", "model.weights.json")
_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")  # signature, and the lengths of name and extra field at byte 26
_SIGNATURE: Final = b"PK\x03\x04"
_MAX_READ_BYTES: Final = 64 << 20
"""The most bytes of the archive's directory to read at a time."""
MAX_CONFIG_BYTES: Final = 16 << 20
_MIN_ARCHIVE_BYTES: Final = 22
"""What the record at the end of every zip archive has (APPNOTE.TXT 4.3.16)."""
_CRC_PIECE_BYTES: Final = 2 << 20


@dataclasses.dataclass(frozen=True)
class Archive:
    """What a `.keras` file holds.

    Attributes:
        weights: an HDF5 file inside it.
        weights_crc32: of the bytes of `weights`, as the archive states it.
        config: the model's.
    """

    weights: Window
    weights_crc32: int
    config: dict[str, Any]


def open_archive(file: Window) -> Archive:
    """Return the parts of the `.keras` file `file`."""
    with opened_archive(file) as archive:
        names = archive.namelist()
        if len(set(names)) != len(names):
            raise _corrupt(file, f"has two files of the same name, among {len(names)}")
        if WEIGHTS_NAME not in names:
            other = next((name for name in _OTHER_WEIGHTS if name in names), None)
            if other is not None:
                raise CheckpointFormatError(
                    f"model file {file.name}: its weights are {other}, which is not supported. Save it again with "
                    "model.save(path), or its weights with model.save_weights('model.weights.h5')."
                )
            raise _corrupt(file, f"has no {WEIGHTS_NAME}, only {', '.join(sorted(names)[:5]) or 'nothing'}")
        member = archive.getinfo(WEIGHTS_NAME)
        if CONFIG_NAME not in names:
            raise _corrupt(file, f"has no {CONFIG_NAME}")
        with archive.open(CONFIG_NAME) as config:
            text = config.read(MAX_CONFIG_BYTES + 1)
        if len(text) > MAX_CONFIG_BYTES:
            raise _corrupt(file, f"has a {CONFIG_NAME} of over {MAX_CONFIG_BYTES} bytes")
        return Archive(_stored_member(file, member), member.CRC, parse_config(file.name, text))


@contextlib.contextmanager
def opened_archive(file: Window) -> Iterator[zipfile.ZipFile]:
    """Return a context with the archive. Every error of a damaged one becomes a CheckpointCorruptError."""
    if file.size < _MIN_ARCHIVE_BYTES:  # zipfile would look for its end before its beginning
        raise _corrupt(file, f"is no zip archive: it has {file.size} bytes" if file.size else "is empty, 0 bytes")
    try:
        with zipfile.ZipFile(_BoundedFile(file.read_into, file.size)) as archive:
            yield archive
    except (CheckpointError, OSError):
        raise
    except (ValueError, RuntimeError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error, struct.error) as error:
        raise _corrupt(file, f"cannot be read as a zip archive: {error}") from None


def check_crc32(window: Window, stated: int) -> None:
    """Read `window` through, and compare its CRC32 with `stated`."""
    checksum, buffer = 0, memoryview(bytearray(min(_CRC_PIECE_BYTES, window.size)))
    for start in range(0, window.size, _CRC_PIECE_BYTES):
        piece = buffer[: window.size - start]
        window.read_into(start, piece)
        checksum = zlib.crc32(piece, checksum)
    if checksum != stated:
        raise _corrupt(window, f"its bytes have the CRC32 {checksum:#010x}, and the archive says {stated:#010x}")


def parse_config(name: str, text: bytes) -> dict[str, Any]:
    """Return a model's config.json. Messages call the model file `name`."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointCorruptError.of(f"model file {name}: {CONFIG_NAME} does not parse: {reason(error)}") from None
    if not isinstance(config, dict):
        raise CheckpointCorruptError.of(f"model file {name}: {CONFIG_NAME} is not an object")
    return config


def _stored_member(file: Window, member: zipfile.ZipInfo) -> Window:
    """Return the bytes of a member that is not compressed.

    Source: APPNOTE.TXT 4.3.7, the local file header.
    """
    if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
        raise CheckpointFormatError(
            f"model file {file.name}: {member.filename} is compressed or encrypted in it, which Keras does not "
            f"do. Unpack it (unzip {file.name} {member.filename}) and give that file."
        )
    header = bytearray(_LOCAL_HEADER.size)
    if member.header_offset < 0 or member.header_offset + len(header) > file.size:
        raise _corrupt(file, f"puts a file at byte {member.header_offset} of {file.size}")
    file.read_into(member.header_offset, memoryview(header))
    signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
    start = member.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
    if signature != _SIGNATURE or member.file_size != member.compress_size or start + member.file_size > file.size:
        raise _corrupt(
            file, f"puts {member.filename} at bytes [{start}, {start + member.file_size}) of {file.size}, or elsewhere"
        )
    name = f"{file.name}[{member.filename}]"
    return dataclasses.replace(file, name=name, start=file.start + start, size=member.file_size)


def _corrupt(file: Window, what: str) -> CheckpointCorruptError:
    return CheckpointCorruptError.of(f"model file {file.name}: {what}")


class _BoundedFile(ByteStream):
    """A window with a position. It limits the size of a read, in case the archive's directory is damaged."""

    def read(self, size: int | None = -1) -> bytes:
        rest = max(0, self._size - self._position)
        count = rest if size is None or size < 0 else min(size, rest)
        if count > _MAX_READ_BYTES:
            raise ValueError(f"it requests {count} bytes of directory")
        out = bytearray(count)
        self.readinto(out)
        return bytes(out)
