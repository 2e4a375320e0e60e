"""Delta packages: an overlay without the files of its base, to be moved to machines that have the base.

A package is a folder whose name is the version to make. `package.json` lists every other file with its size and
SHA-256, and is written last. `package.sig` is the HMAC-SHA256 of its bytes, if there is a key.
"""

import contextlib
import dataclasses
import hashlib
import hmac
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

from tpuembed.errors import ConfigError, ExportError, TpuEmbedError, reason
from tpuembed.export.overlay.changes import rows_of_words
from tpuembed.export.publish.folder import temporary_staging
from tpuembed.export.publish.version_writer import MAX_VERSION, naming_model_dir, versions_among
from tpuembed.files import FilePath, UrlPath, flush, open_bytes, subfolders, versions
from tpuembed.manifest import MANIFEST_PATH, Manifest
from tpuembed.saved_model import PACKAGE_INDEX

__all__ = [
    "PackageFile",
    "PackageIndex",
    "ids_file",
    "next_package",
    "packages_in",
    "pull_file",
    "read_index",
    "read_key",
    "write_package",
]

_SIGNATURE: Final = "package.sig"
_FORMAT: Final = 1
_MAX_INDEX_BYTES: Final = 16 << 20
_LEAST_KEY_BYTES: Final = 16
_PART_BYTES: Final = 512 << 20
_PIECE_BYTES: Final = 4 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackageFile:
    """A file of a package: its size in bytes, and the SHA-256 of its content in hexadecimal digits."""

    size: int
    sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackageIndex:
    """What `package.json` says.

    Attributes:
        version: the version to make.
        files: all other files by their path inside the package.
    """

    version: int
    files: Mapping[str, PackageFile]

    @property
    def size(self) -> int:
        """Return the bytes of all files."""
        return sum(file.size for file in self.files.values())


def ids_file(stack: str) -> str:
    """Return the path of the file with the changed rows of a stack, int64 and sorted."""
    return f"overlay/{stack}.ids"


def read_key(path: str | Path) -> bytes:
    """Return the key in a file, without white space around it.

    Raises:
        ConfigError: the file cannot be read, or has fewer than 16 bytes.
    """
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"key file {path}: cannot be read: {reason(error)}.") from None
    if len(key) < _LEAST_KEY_BYTES:
        raise ConfigError(
            f"key file {path}: has {len(key)} bytes, and a key has at least {_LEAST_KEY_BYTES}. Write 32 random bytes to it: head "
            "-c 32 /dev/urandom | base64."
        )
    return key


def packages_in(place: FilePath) -> list[int]:
    """Return the numbers of the folders in `place` that may be packages, sorted. Empty if it does not exist.

    Raises:
        OSError: it cannot be listed.
    """
    if isinstance(place, UrlPath):
        return sorted(versions_among(subfolders(place)))
    with contextlib.suppress(FileNotFoundError):
        return sorted(versions_among(path.name for path in place.iterdir() if path.is_dir()))
    return []


def next_package(place: FilePath, base: int) -> int:
    """Return the number of the next package in `place`: above all packages there, and above the base."""
    highest = max([base, *packages_in(place)])
    if highest == MAX_VERSION:
        raise ExportError(f"delta_to {place}: package {highest} exists, and no higher number is possible.")
    return highest + 1


def write_package(version_dir: Path, manifest: Manifest, target: FilePath, key: bytes | None) -> None:
    """Write the overlay in `version_dir` as the package `target`, whose name is the version.

    Raises:
        ExportError: the package exists, or cannot be written.
    """
    linked = {stack.file for stack in manifest.stacks if stack.base_file}
    rebuilt = {array.file for stack in manifest.stacks if stack.overlay for array in stack.arrays[2:]}
    left_out = linked | rebuilt
    names = {
        path.relative_to(version_dir).as_posix(): path for path in sorted(version_dir.rglob("*")) if path.is_file()
    }
    files = {name: path for name, path in names.items() if name not in left_out}
    ids = version_dir / "overlay"
    ids.mkdir()
    for stack in manifest.stacks:
        if stack.overlay:
            path = version_dir / ids_file(stack.name)
            _write_ids(version_dir / stack.overlay.words.file, path)
            files[ids_file(stack.name)] = path
    listed = {name: {"size": path.stat().st_size, "sha256": _sha256(path)} for name, path in files.items()}
    index = json.dumps({"format": _FORMAT, "version": int(target.name), "files": listed}, indent=1).encode() + b"\n"
    signature = b"" if key is None else hmac.new(key, index, hashlib.sha256).hexdigest().encode() + b"\n"
    with naming_model_dir(target.parent):
        if isinstance(target, UrlPath):
            _upload(target, files, index, signature)
        else:
            _copy(target, files, index, signature)


def _write_ids(words: Path, target: Path) -> None:
    with open(target, "xb") as file:
        for rows in rows_of_words(words):
            file.write(rows.data)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _copy(target: Path, files: Mapping[str, Path], index: bytes, signature: bytes) -> None:
    """Write a package into a folder, which appears by one rename. What killed exports left beside it is removed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with temporary_staging(target.parent, "package", target.name) as staging:
        for name, path in files.items():
            copy = staging / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
            flush(copy)
        for name, content in ((_SIGNATURE, signature), (PACKAGE_INDEX, index)):
            if content:
                (staging / name).write_bytes(content)
                flush(staging / name)
        if target.exists():
            raise ExportError(f"package {target}: it exists. Choose another version, or remove it.")
        staging.rename(target)
        flush(target.parent)


def _upload(target: UrlPath, files: Mapping[str, Path], index: bytes, signature: bytes) -> None:
    """Write a package into a store, package.json last, and only if it does not exist yet."""
    from tpuembed.files.bucket import Bucket

    bucket = Bucket(target.bucket)
    if bucket.head((target / PACKAGE_INDEX).key) is not None:
        raise ExportError(f"package {target}: it exists. Choose another version, or remove it.")
    for name, path in files.items():
        _put(bucket, (target / name).key, path)
    if signature:
        bucket.create((target / _SIGNATURE).key, signature)
    try:
        bucket.create((target / PACKAGE_INDEX).key, index)
    except FileExistsError:
        raise ExportError(f"package {target}: another export wrote it just now. Export again.") from None


def _put(bucket: Any, key: str, path: Path) -> None:
    from tpuembed.files.put import put_file

    size = path.stat().st_size
    if size <= _PART_BYTES:
        bucket.put(key, path)
        return
    upload, tags = bucket.begin_upload(key), []
    try:
        with open(path, "rb") as file:
            for number, start in enumerate(range(0, size, _PART_BYTES), start=1):
                file.seek(start)
                tags.append(put_file(bucket.sign_part(key, upload, number), file, min(_PART_BYTES, size - start), {}))
        bucket.complete_upload(key, upload, tags)
    except BaseException:
        bucket.abort_upload(key, upload)
        raise


@contextlib.contextmanager
def _naming_package(package: FilePath) -> Iterator[None]:
    """Turn an error of reading a package's file into an ExportError that names the package."""
    try:
        yield
    except TpuEmbedError:
        raise
    except (OSError, EOFError) as error:
        raise ExportError(f"package {package}: cannot be read: {reason(error)}.") from error


def read_index(package: FilePath, key: bytes | None) -> PackageIndex | None:
    """Return the index of a package; None if the folder has none yet, so that it is not whole.

    Raises:
        ExportError: it cannot be read, is not the index of a package of this name, or is not signed with `key`, if that is
            given.
    """
    with _naming_package(package):
        try:
            content = _read_small(package, PACKAGE_INDEX)
        except FileNotFoundError:
            return None
        if key is not None:
            _check_signature(package, content, key)
    try:
        return _parse(content, package.name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, ConfigError) as error:
        text = f"it lacks the field {error}" if isinstance(error, KeyError) else reason(error)
        raise ExportError(
            f"package {package}: {PACKAGE_INDEX} is not valid: {text.removesuffix('.')}. Write it again."
        ) from None


def _check_signature(package: FilePath, content: bytes, key: bytes) -> None:
    try:
        given = _read_small(package, _SIGNATURE).strip()
    except FileNotFoundError:
        raise ExportError(
            f"package {package}: is not signed, and a trusted key was given. Write it with that key as sign_key."
        ) from None
    if not hmac.compare_digest(given, hmac.new(key, content, hashlib.sha256).hexdigest().encode()):
        raise ExportError(
            f"package {package}: its signature is not of the trusted key. Give the key that it was signed with, or do not use "
            "it."
        )


def _parse(content: bytes, name: str) -> PackageIndex:
    value = json.loads(content)
    if value["format"] != _FORMAT:
        raise ValueError(f"its format is {value['format']!r}, and this version reads {_FORMAT}")
    if type(value["version"]) is not int or str(value["version"]) != name:
        raise ValueError(f"its version is {value['version']!r}, and its folder is {name!r}")
    files = {file: PackageFile(**fields) for file, fields in value["files"].items()}
    for file, entry in files.items():
        _check_name(file)
        if type(entry.size) is not int or entry.size < 0 or type(entry.sha256) is not str:
            raise ValueError(f"file {file!r} has the size {entry.size!r} and the checksum {entry.sha256!r}")
    if MANIFEST_PATH.as_posix() not in files:
        raise ValueError(f"it has no file {MANIFEST_PATH}")
    return PackageIndex(version=value["version"], files=files)


def _check_name(name: str) -> None:
    parts = PurePosixPath(name).parts
    if not parts or "/".join(parts) != name or ".." in parts or parts[0] == "/" or "\0" in name or "\\" in name:
        raise ValueError(f"file {name!r} is not a path inside the package")


def _read_small(package: FilePath, name: str) -> bytes:
    """Return the content of a file of a package.

    Raises:
        FileNotFoundError: it does not exist.
        ExportError: it is no regular file, or has too many bytes.
    """
    path = package / name
    (version,) = versions([path])
    _check_regular(package, name)
    if version.size > _MAX_INDEX_BYTES:
        raise ExportError(f"file {path}: has {version.size} bytes, and at most {_MAX_INDEX_BYTES} are read.")
    return path.read_bytes()


def pull_file(package: FilePath, name: str, entry: PackageFile, target: Path) -> None:
    """Copy a file of a package to the new file `target`.

    Raises:
        ExportError: it cannot be read, is a link, or has another size or checksum than the index says.
        OSError: `target` cannot be written.
    """
    source, digest = package / name, hashlib.sha256()
    with _naming_package(package):
        _check_regular(package, name)
        (found,) = versions([source])
        if found.size != entry.size:
            raise ExportError(
                f"package {package}: {name} has {found.size} bytes, and its index says {entry.size}. Write the package again."
            )
        file = open_bytes(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(file), open(target, "xb") as out:
        for start in range(0, entry.size, _PIECE_BYTES):
            piece = bytearray(min(_PIECE_BYTES, entry.size - start))
            with _naming_package(package):
                file.read_into(start, memoryview(piece))  # a file that became shorter raises EOFError
            digest.update(piece)
            out.write(piece)
    if digest.hexdigest() != entry.sha256:
        raise ExportError(
            f"package {package}: {name} has the SHA-256 {digest.hexdigest()}, and its index says {entry.sha256}. Write the "
            "package again."
        )


def _check_regular(package: FilePath, name: str) -> None:
    """Raise ExportError if a file of a package on a disk is reached through a symbolic link, or is no regular file."""
    place = package
    is_link = False
    for part in PurePosixPath(name).parts:
        place /= part
        is_link |= isinstance(place, Path) and place.is_symlink()
    if is_link or not place.is_file():
        raise ExportError(f"package {package}: {name} is no regular file inside the package. Write the package again.")
