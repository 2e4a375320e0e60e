"""The files of an export's version: their sizes and checksums, and the graph rewritten for another folder."""

import contextlib
import dataclasses
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Final

import google_crc32c
import numpy as np

from tpuembed.errors import ConfigError
from tpuembed.files import FilePath, flush, open_stream, versions
from tpuembed.formats.saved_model.mapped_paths import mapped_from
from tpuembed.manifest import Manifest

__all__ = [
    "GRAPH_FILE",
    "Relocation",
    "check_root",
    "check_sizes",
    "file_crc32c",
    "relocate_export",
    "replace_file",
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Relocation:
    """The result of `relocate_export`.

    Attributes:
        path: of the version.
        files: name of a stack, or of an overlay's array -> the path that it is now mapped from.
        changed: whether saved_model.pb was rewritten.
        found: whether the new folder exists on this machine, and its files were checked.
    """

    path: Path
    files: dict[str, str]
    changed: bool
    found: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the relocation as JSON values."""
        return {**dataclasses.asdict(self), "path": str(self.path)}


def relocate_export(version_dir: Path, manifest: Manifest, root: str) -> Relocation:
    """Make the export at `version_dir` map its tables from `root`/<name of version_dir>/.

    saved_model.pb is replaced by one rename. If the new folder exists on this machine, the data files must be in it.
    Otherwise it is on another machine, and they must be in `version_dir`. `root` is the absolute MODEL_DIR as the
    serving machine or container sees it.

    Raises:
        ConfigError: the export maps no files, its graph or data files do not match the manifest, or `root` is
            relative.
    """
    check_root(root)
    if manifest.layout != "mmap" or not manifest.arrays:
        cause = f"its layout is {manifest.layout}" if manifest.layout != "mmap" else "its rows are in Redis"
        raise ConfigError(
            f"export {version_dir}: {cause}, so it maps no files and loads from any folder. You can relocate exports of "
            "layout mmap only."
        )
    target = PurePosixPath(root) / version_dir.absolute().name
    found = Path(target).is_dir()
    check_sizes(Path(target) if found else version_dir, manifest)
    try:
        graph = (version_dir / GRAPH_FILE).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"export {version_dir}: {GRAPH_FILE} cannot be read: {error.strerror}. Export again."
        ) from None
    moved = mapped_from(graph, manifest, target)
    if moved != graph:
        replace_file(version_dir / GRAPH_FILE, moved)
    files = {array.name: str(target / array.file) for array in manifest.arrays}
    return Relocation(path=version_dir, files=files, changed=moved != graph, found=found)


def check_root(root: str) -> None:
    """Raise ConfigError unless `root` is absolute. A relative path would depend on the server's working directory."""
    if not PurePosixPath(root).is_absolute():
        raise ConfigError(f"ROOT {root!r} is relative. Give the absolute path of MODEL_DIR as the server sees it.")


def replace_file(path: Path, content: bytes) -> None:
    """Write `content` to the file `path` by one rename, so that a reader sees either the old bytes or the new ones."""
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):  # the file is a new one
            shutil.copymode(path, temporary)
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    flush(path.parent)
