"""Finds the versions in a model's folder, and checks that a version is complete before it is loaded."""

import os
import re
import zlib
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Final

from tpuembed.errors import ConfigError
from tpuembed.formats.saved_model import GRAPH_FILE, file_crc32c, size_faults
from tpuembed.manifest import MANIFEST_PATH, FileEntry, Manifest
from tpuembed_serving.core.status import Code, StatusError

__all__ = [
    "GRAPH_FILE",
    "INDEX_FILE",
    "Identity",
    "check_files",
    "find_versions",
    "fingerprint",
    "identity",
    "is_free",
    "parse_version",
    "replaces",
]

INDEX_FILE = Path("variables") / "variables.index"

_EXTRA = MANIFEST_PATH.parent
_LITE_FILE = "model.tflite"
_LOOKED_AT = (Path(), GRAPH_FILE, INDEX_FILE.parent, INDEX_FILE, _EXTRA, MANIFEST_PATH)

_INTEGER = re.compile(r"\s*[+-]?[0-9]+\s*", re.ASCII)
_INT64 = range(-(2**63), 2**63)


Identity = frozenset[tuple[str, int, int]]
"""Path, time and size of each file of a version, but the checksum of the manifest; -1 and -1 of what cannot be read. Inodes are
not stable on every file system.
"""
_UNREADABLE: Final = (-1, -1)


def parse_version(name: str) -> int | None:
    """Return the version number in a folder's name, read as `absl::SimpleAtoi` reads an int64, or None."""
    if not _INTEGER.fullmatch(name):
        return None
    try:
        version = int(name)
    except ValueError:  # more digits than Python converts
        return None
    return version if version in _INT64 else None


def find_versions(base_path: Path) -> dict[int, Path]:
    """Return the children of `base_path` whose names are integers. Of two names of one integer, the last in order counts.

    Raises:
        OSError: the folder cannot be listed.
    """
    named = ((parse_version(path.name), path) for path in sorted(base_path.iterdir()))
    return {version: path for version, path in named if version is not None}


def fingerprint(version_dir: Path) -> tuple[tuple[int, int] | None, ...]:
    """Return the times and sizes of the files that a load reads first. They change when a version is written again."""
    return tuple(_stamp(version_dir / path) for path in _LOOKED_AT)


def identity(version_dir: Path) -> Identity:
    """Return what a load reads.

    Of the extra assets, only the manifest is among them: others may be added to a version that is served.
    """
    return frozenset(_identities(str(version_dir), "", set()))


def replaces(found: Identity, loaded: Identity) -> bool:
    """Return True if files have replaced those that are `loaded`: if there is a graph, and a file that was not loaded.

    Files that are missing, or that cannot be read for a moment, replace none.
    """
    new = [one for one in found - loaded if one[1:] != _UNREADABLE]
    return bool(new) and any(name == str(GRAPH_FILE) for name, *_ in found)


def _identities(folder: str, prefix: str, visited: set[tuple[int, int]]) -> Iterator[tuple[str, int, int]]:
    """Yield the files in `folder`, unless it is one of the folders that were visited: links may lead anywhere."""
    try:
        status = Path(folder).stat()
        if (status.st_dev, status.st_ino) in visited:
            return
        visited.add((status.st_dev, status.st_ino))
        entries = sorted(os.scandir(folder), key=attrgetter("name"))
    except OSError:
        yield prefix, *_UNREADABLE
        return
    for entry in entries:
        name = prefix + entry.name
        try:
            if entry.is_dir():
                yield from _identities(entry.path, f"{name}/", visited)
            elif prefix != f"{_EXTRA}/":
                status = entry.stat()
                yield name, status.st_mtime_ns, status.st_size
            elif entry.name == MANIFEST_PATH.name:  # it has the checksums of all others, whose times may be equal
                content = Path(entry.path).read_bytes()
                yield name, zlib.crc32(content), len(content)
        except OSError:  # a link to nothing
            yield name, *_UNREADABLE


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def check_files(version_dir: Path) -> Manifest | None:
    """Return the manifest of a version, or None if it has none. Refuses an incomplete version before it is loaded.

    Raises:
        StatusError: the graph is missing; or a file that the manifest names is missing or has another size; or the
            variables' index has another checksum.
    """
    if not (version_dir / GRAPH_FILE).is_file():
        if (version_dir / _LITE_FILE).is_file():
            reason = (
                f"{GRAPH_FILE} is missing, and {_LITE_FILE} is there. This server runs SavedModels, not TFLite models"
            )
            raise StatusError(Code.NOT_FOUND, f"version {version_dir.name}: {reason}. Save the model as a SavedModel")
        raise StatusError(
            Code.NOT_FOUND, f"version {version_dir.name}: {GRAPH_FILE} is missing. Write the version again"
        )
    try:
        manifest = Manifest.read(version_dir)
    except ConfigError as error:  # clients see this status, and not where the server keeps its models
        fault = str(error).removeprefix(f"manifest {version_dir / MANIFEST_PATH}: ").removesuffix(". Export again.")
        raise _damaged(version_dir, f"{MANIFEST_PATH}: {fault}") from None
    for file, fault in size_faults(version_dir, manifest) if manifest else ():
        raise _damaged(version_dir, f"{file}, {fault}")
    for file, entry in manifest.files.items() if manifest else ():
        if not is_free(file) and (fault := _fault(version_dir, file, entry)):
            raise _damaged(version_dir, f"{file} {fault}")
    return manifest


def is_free(file: str) -> bool:
    """Returns True if a file of an export may be replaced: warmup requests and other files beside the manifest."""
    return _EXTRA in Path(file).parents


def _fault(version_dir: Path, file: str, entry: FileEntry) -> str:
    """Return what is wrong with a file's size, or with the checksum of the variables' index. Empty if nothing is.

    The graph is not compared: its bytes depend on its folder.
    """
    if Path(file) == GRAPH_FILE:
        return ""
    try:
        size = (version_dir / file).stat().st_size
        found = file_crc32c(version_dir / file) if Path(file) == INDEX_FILE and size == entry.size else entry.crc32c
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if size != entry.size:
        return f"has {size} bytes, but the manifest has {entry.size}"
    return "" if found == entry.crc32c else f"has CRC32C {found:#010x}, but the manifest has {entry.crc32c:#010x}"


def _damaged(version_dir: Path, what: str) -> StatusError:
    return StatusError(Code.DATA_LOSS, f"version {version_dir.name}: {what}. Export it again")
