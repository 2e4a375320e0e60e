"""The cache folder: versions that were pulled from stores, and what their servers know about each store.

CACHE/.lock                       held by the server that pulls into it
CACHE/NAME-HASH/url               the store's URL
CACHE/NAME-HASH/state.json        what the processes of the server read; last.json is that of the run before
CACHE/NAME-HASH/3-DIGEST/3/       a version, as it is in the store; it appears by one rename
CACHE/NAME-HASH/3-DIGEST/pull.json    its files with sizes and checksums
"""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tpuembed.errors import ServingError, reason
from tpuembed.files import UrlPath
from tpuembed.saved_model import file_crc32c
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.settings import CacheSettings

__all__ = [
    "LAST_FILE",
    "STATE_FILE",
    "Cache",
    "Pulled",
    "StoreState",
    "VersionState",
    "folder_of",
    "hold",
    "read_state",
    "remove",
    "sync",
    "write_files",
]

STATE_FILE: Final = "state.json"
LAST_FILE: Final = "last.json"
PULL_FILE: Final = "pull.json"
_URL_FILE: Final = "url"
_ROOM: Final = 1.1
_ENTRY: Final = re.compile(r"(-?\d+)-([0-9a-f]{16})")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VersionState:
    """A version in a store.

    Attributes:
        folder: of the version in the cache, relative to the store's folder; empty if it was not pulled.
        code: of `fault`; None if nothing failed, and the version is being pulled or waited for.
        fault: why it is not in the cache.
    """

    folder: str = ""
    code: int | None = None
    fault: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreState:
    """What is known about a store: written by the process that pulls, read by those that load.

    Attributes:
        settled: whether a version can be loaded, or all pulls that are due have failed.
        error: why the store cannot be listed; empty if it can.
        versions: by number.
    """

    settled: bool
    error: str
    versions: Mapping[int, VersionState]

    def write(self, path: Path) -> None:
        """Write the file by one rename."""
        value = {**dataclasses.asdict(self), "versions": {n: dataclasses.asdict(v) for n, v in self.versions.items()}}
        _write(path, value)


def read_state(path: Path) -> StoreState | None:
    """Return the state in the file `path`, or None if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        versions = {int(number): VersionState(**one) for number, one in value["versions"].items()}
        return StoreState(settled=value["settled"], error=value["error"], versions=versions)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


@dataclasses.dataclass(frozen=True)
class Pulled:
    """A version in the cache.

    Attributes:
        place: CACHE/NAME-HASH/NUMBER-DIGEST.
        files: size and CRC32C of each file, unmasked.
    """

    place: Path
    number: int
    digest: str
    files: Mapping[str, tuple[int, int]]

    @property
    def folder(self) -> Path:
        """Return the version's folder."""
        return self.place / str(self.number)

    def is_whole(self, on_read: Callable[[int], None]) -> bool:
        """Read every file. Returns True if all are as they were downloaded. `on_read` may raise to stop."""
        try:
            return all(
                (self.folder / name).stat().st_size == size and file_crc32c(self.folder / name, on_read) == crc
                for name, (size, crc) in self.files.items()
            )
        except OSError:
            return False


class Cache:
    """The folder of one server. `open` reserves it."""

    def __init__(self, settings: CacheSettings) -> None:
        self.folder, self._max_bytes = settings.folder, settings.max_bytes
        self.keeps_unused = settings.max_bytes is not None
        self._lock = -1

    def open(self) -> None:
        """Create and reserve the folder, and remove what a killed server has left half done.

        Raises:
            ServingError: it cannot be created or written, or another server uses it.
        """
        where = f"cache folder {self.folder}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ServingError(f"{where}: another server uses it. Give --cache-dir another folder") from None
        except OSError as error:
            raise ServingError(f"{where}: cannot be written: {reason(error)}. Give another --cache-dir") from None
        for store in self._stores():
            for path in store.iterdir():
                if path.name.startswith(".") and path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Let other servers use the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def prepare(self, url: UrlPath) -> Path:
        """Create the folder of a store, keep its state as that of the run before, and return it."""
        store = folder_of(self.folder, url)
        store.mkdir(exist_ok=True)
        (store / _URL_FILE).write_text(f"{url}\n", encoding="utf-8")
        with contextlib.suppress(FileNotFoundError):
            (store / STATE_FILE).replace(store / LAST_FILE)
        return store

    def pulled(self, store: Path) -> Iterator[Pulled]:
        """Yield the versions in a store's folder. Their files are not read."""
        for path in store.iterdir():
            if not (match := _ENTRY.fullmatch(path.name)):
                continue
            try:
                files = json.loads((path / PULL_FILE).read_text(encoding="utf-8"))
                known = {name: (int(size), int(crc)) for name, (size, crc) in files.items()}
            except (OSError, ValueError, TypeError, AttributeError):
                remove(path)
                continue
            yield Pulled(path, int(match[1]), match[2], known)

    def make_room(self, number: int, size: int, whole: int, keep: Collection[Path]) -> None:
        """Remove unused versions until `size` more bytes fit, and the disk has room for them and a tenth.

        Args:
            number: the version that is pulled, for messages.
            size: bytes that are downloaded.
            whole: bytes of the version, with the files that it shares with others.
            keep: versions that stay.

        Raises:
            StatusError: RESOURCE_EXHAUSTED, it does not fit.
        """
        needed = int(size * _ROOM)
        unused = [path for path in self._oldest_first() if path not in keep]
        while True:
            used, free = self._used(), shutil.disk_usage(self.folder).free
            over = self._max_bytes is not None and used + size > self._max_bytes
            if not over and free >= needed:
                return
            while unused:
                if remove(unused.pop(0)):
                    break
            else:
                break
        if over:
            text = (
                f"it needs {size} bytes in the cache, and {used} of its {self._max_bytes} bytes are versions in use "
                f"(the version has {whole} bytes). Give a larger --cache-bytes"
            )
        else:
            text = f"it needs {needed} bytes ({size} and a tenth), and {self.folder} has {free} bytes free. Free some"
        raise StatusError(Code.RESOURCE_EXHAUSTED, f"version {number}: cannot be pulled: {text}")

    def trim(self, keep: Collection[Path]) -> None:
        """Remove versions that are neither in `keep` nor in use: all, or with a limit only those that are beyond it."""
        for path in self._oldest_first():
            if path not in keep and (self._max_bytes is None or self._used() > self._max_bytes):
                remove(path)

    def _stores(self) -> Iterator[Path]:
        return (path.parent for path in self.folder.glob(f"*/{_URL_FILE}"))

    def _oldest_first(self) -> list[Path]:
        found = [path for store in self._stores() for path in store.iterdir() if _ENTRY.fullmatch(path.name)]
        return sorted(found, key=lambda path: path.stat().st_mtime_ns)

    def _used(self) -> int:
        """Return the bytes of all versions. Files that versions share count once."""
        sizes: dict[tuple[int, int], int] = {}
        for store in self._stores():
            for place, _, names in os.walk(store):
                for name in names:
                    found = os.lstat(Path(place, name))
                    sizes[found.st_dev, found.st_ino] = found.st_size
        return sum(sizes.values())


def folder_of(cache: Path, url: UrlPath) -> Path:
    """Return the folder of a store in the cache."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", url.name or url.bucket)[:64].lstrip(".") or "model"
    return cache / f"{name}-{hashlib.sha256(str(url).encode()).hexdigest()[:16]}"


def hold(version_dir: Path) -> contextlib.ExitStack:
    """Keep a version in the cache until the returned context is closed, or the process ends.

    Raises:
        StatusError: UNAVAILABLE, the version is being removed.
    """
    held = contextlib.ExitStack()
    try:
        descriptor = os.open(version_dir.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        held.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_ino == version_dir.parent.stat().st_ino:
            return held
    except OSError:
        pass
    held.close()
    raise StatusError(Code.UNAVAILABLE, f"version {version_dir.name}: it is being removed from the cache")


def remove(place: Path) -> bool:
    """Remove a version that nobody holds. Returns False if it is in use."""
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        gone = place.with_name(f".removed-{secrets.token_hex(8)}")
        place.rename(gone)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    shutil.rmtree(gone, ignore_errors=True)
    return True


def write_files(place: Path, files: Mapping[str, tuple[int, int]]) -> None:
    """Write the list of a pulled version's files."""
    _write(place / PULL_FILE, {name: list(one) for name, one in files.items()})


def sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def _write(path: Path, value: Any) -> None:
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            json.dump(value, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
