"""Checks the data files of an export: their sizes, and their checksums."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import google_crc32c
import numpy as np

from tpuembed.errors import ConfigError
from tpuembed.files import FilePath, open_stream, versions
from tpuembed.manifest import Manifest

__all__ = [
    "GRAPH_FILE",
    "check_sizes",
    "file_crc32c",
    "size_faults",
]

GRAPH_FILE: Final = Path("saved_model.pb")
_PIECE_BYTES: Final = 8 << 20


def size_faults(version_dir: FilePath, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield (file, fault) for every data file of tables that is missing or has the wrong size."""
    for file, size in manifest.table_files().items():
        held = ", ".join(repr(array.name) for array in manifest.arrays if array.file == file)
        try:
            [found] = versions([version_dir / file])
        except FileNotFoundError:
            yield file, f"which holds stack {held}, is missing"
        except OSError as error:
            yield file, f"which holds stack {held}, cannot be read: {error.strerror}"
        else:
            if found.size != size:
                yield file, f"which holds stack {held}, has {found.size} bytes, but the manifest has {size}"


def check_sizes(version_dir: FilePath, manifest: Manifest) -> None:
    """Raise ConfigError for the first data file of tables that is missing or has the wrong size."""
    for file, fault in size_faults(version_dir, manifest):
        raise ConfigError(f"export {version_dir}: {file}, {fault}. Copy the version again, or export it again.")


def file_crc32c(
    path: FilePath, on_read: Callable[[int], None] | None = None, offset: int = 0, size: int | None = None
) -> int:
    """Return the CRC32C of a whole file, or of `size` bytes of it at `offset`, which are read in pieces.

    `on_read` is called with the bytes of each piece.

    Raises:
        OSError: the file cannot be read. EOFError: it is too short.
    """
    checksum, buffer, done = 0, np.empty(_PIECE_BYTES, np.uint8), 0
    with open(path, "rb", buffering=0) if isinstance(path, Path) else open_stream(path) as file:
        file.seek(offset)
        while done != size:
            count = file.readinto(buffer.data[: None if size is None else size - done])  # type: ignore[attr-defined]
            if not count and size is not None:
                raise EOFError(f"the file ends at byte {offset + done}")
            if not count:
                break
            checksum = google_crc32c.extend(checksum, buffer[:count])
            done += count
            if on_read is not None:
                on_read(count)
    return int(checksum)
