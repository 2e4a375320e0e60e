"""Compares every file of an export with the checksums of its manifest, before the export is loaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import google_crc32c

from tpuembed.errors import ConfigError
from tpuembed.formats.saved_model import GRAPH_FILE, file_crc32c, relative_graph
from tpuembed.manifest import ArrayEntry, FileEntry, Manifest
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.models.versions import check_files, is_free

__all__ = ["verify_checksums"]

_PIECE_BYTES: Final = 8 << 20

OnRead = Callable[[int], None]


def verify_checksums(version_dir: Path, on_read: OnRead) -> None:
    """Read every file of a version that has a manifest. A version without one is not read.

    `on_read` is called with the number of bytes of each read. It may raise to stop.

    Raises:
        StatusError: DATA_LOSS, a file differs from the exported one.
    """
    manifest = check_files(version_dir)
    if manifest is None:
        return
    try:
        for array in manifest.arrays:
            _check_array(version_dir, array, on_read)
        for file, entry in manifest.files.items():
            if not is_free(file):
                _check_file(version_dir, file, entry, manifest, on_read)
    except OSError as error:
        raise _damaged(version_dir, f"{Path(str(error.filename)).name} cannot be read: {error.strerror}") from None


def _check_array(version_dir: Path, array: ArrayEntry, on_read: OnRead) -> None:
    found = _range_crc32c(version_dir / array.file, array.offset, array.size, on_read)
    if found != array.crc32c:
        what = f"{array.file}, bytes [{array.offset}, {array.offset + array.size}) of stack {array.name!r}"
        raise _damaged(version_dir, f"{what} have CRC32C {found:#010x}, but the manifest has {array.crc32c:#010x}")


def _check_file(version_dir: Path, file: str, entry: FileEntry, manifest: Manifest, on_read: OnRead) -> None:
    path = version_dir / file
    found = _graph_crc32c(path, manifest) if path == version_dir / GRAPH_FILE else file_crc32c(path, on_read)
    if found != entry.crc32c:
        what = "does not fit the manifest" if found is None else f"has CRC32C {found:#010x}"
        raise _damaged(version_dir, f"{file} {what}, but the manifest has {entry.crc32c:#010x}")


def _graph_crc32c(path: Path, manifest: Manifest) -> int | None:
    try:
        return int(google_crc32c.value(relative_graph(path.read_bytes(), manifest)))
    except ConfigError:
        return None


def _range_crc32c(path: Path, offset: int, size: int, on_read: OnRead) -> int:
    checksum = 0
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while size and (piece := file.read(min(size, _PIECE_BYTES))):
            checksum = google_crc32c.extend(checksum, piece)
            size -= len(piece)
            on_read(len(piece))
    return int(checksum)


def _damaged(version_dir: Path, what: str) -> StatusError:
    return StatusError(Code.DATA_LOSS, f"version {version_dir.name}: {what}. Copy the version again or export it again")
