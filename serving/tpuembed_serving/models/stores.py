"""Models in object stores: one thread of a server downloads the wanted versions, and its processes load the copies.

CACHE/.lock                    held by the server that downloads into it
CACHE/NAME-HASH/url            the store's URL
CACHE/NAME-HASH/state.json     which versions are here, and why others are not
CACHE/NAME-HASH/3-DIGEST/3/    a version, as it is in the store; it appears by one rename
CACHE/NAME-HASH/3-DIGEST/objects.json    size and ETag of each of its objects, so that other versions can share its files
"""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from tpuembed.errors import ConfigError, ServingError, TpuEmbedError, first_few, printable, reason
from tpuembed.files import FilePath, FileVersion, UrlPath, flush, listing, open_bytes, subfolders
from tpuembed.formats.saved_model import GRAPH_FILE
from tpuembed.manifest import MANIFEST_PATH, Manifest
from tpuembed_serving.core.log_once import ONCE
from tpuembed_serving.core.reload_paths import ReloadPaths
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.models.policies import VersionPolicy
from tpuembed_serving.models.verification import verify_checksums
from tpuembed_serving.models.versions import Identity, is_free, parse_version
from tpuembed_serving.settings import ModelSettings

__all__ = ["Puller", "StoreFolder"]

logger = logging.getLogger(__name__)

_STATE_FILE: Final = "state.json"
_URL_FILE: Final = "url"
_OBJECTS_FILE: Final = "objects.json"
_SUCCESS_FILE: Final = "_SUCCESS"
"""An object that the writer of a version creates last. It says that the version is complete."""
_QUIET_POLLS: Final = 2
"""Without a manifest and without `_SUCCESS`, the objects of a version have to stay the same for so many polls."""
_ENTRY: Final = re.compile(r"(-?\d+)-[0-9a-f]{16}")
_WINDOW_BYTES: Final = 32 << 20
_ROOM: Final = 1.1
_RETRY_SECONDS: Final = 60.0
"""The pause before a version that does not fit its manifest is downloaded again, if its objects stay the same."""
_MAX_NAME_BYTES: Final = 255
_MAX_PATH_BYTES: Final = 2048


class _StoppedError(Exception):
    """The server stops."""


class _IncompleteError(StatusError):
    """A version is not complete in its store, or cannot be proven to be. It may be being written."""


@dataclasses.dataclass(frozen=True)
class _State:
    """What is known about a store: written by the thread that downloads, read by the processes that load.

    Attributes:
        settled: whether a version can be loaded, or all downloads that are due have failed.
        error: why the store cannot be listed; empty if it can.
        folders: of the versions that are here, relative to the store's folder.
        faults: of the versions that are not: a code, a text, and whether that is a failure. The text is empty during a download.
    """

    settled: bool
    error: str
    folders: Mapping[int, str]
    faults: Mapping[int, tuple[int, str, bool]]

    def write(self, path: Path) -> None:
        temporary = path.with_name(f".{path.name}")
        temporary.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")
        temporary.replace(path)

    @classmethod
    def read(cls, path: Path) -> "_State | None":
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        folders, faults = ({int(number): one for number, one in found[name].items()} for name in ("folders", "faults"))
        return cls(found["settled"], found["error"], folders, faults)


class StoreFolder:
    """The versions of a store as a process that loads them sees them. Has the methods of a model's folder."""

    within: ReloadPaths | None = None  # as in the folder of a model; URLs have no links that may change

    def __init__(self, model: str, url: UrlPath, cache: Path) -> None:
        self._model, self._url = model, url
        self._place = _place(cache, url)
        self.error = ""
        self.settled = False
        self.waiting: Mapping[int, tuple[FilePath, StatusError | None, bool]] = {}

    def versions(self) -> dict[int, Path] | None:
        """Return every version that is here, or None if there is none yet and one may come."""
        state = _State.read(self._place / _STATE_FILE)
        if state is None:
            return None
        if state.error and not self.error:
            text = "model %s: %s cannot be listed: %s. Versions that the cache has are served"
            logger.error(text, self._model, self._url, state.error, extra=ONCE)
        if state.settled > self.settled and not (state.folders or state.faults or state.error):
            logger.warning("model %s: %s has no version yet. Waiting for one", self._model, self._url, extra=ONCE)
        self.settled, self.error = state.settled, state.error
        self.waiting = {
            number: (self._url / str(number), StatusError(Code(code), text) if text else None, failed)
            for number, (code, text, failed) in state.faults.items()
        }
        found = {number: self._place / folder for number, folder in state.folders.items()}
        return None if not found and (self.waiting or state.error) else found

    def hold(self, path: Path, /) -> contextlib.ExitStack:
        """Keep the version at `path` in the cache until the returned context is closed, or the process ends.

        Raises:
            StatusError: UNAVAILABLE, the version is being removed.
        """
        held = contextlib.ExitStack()
        try:
            descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            held.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_ino == path.parent.stat().st_ino:
                return held
        except OSError:
            pass
        held.close()
        raise StatusError(Code.UNAVAILABLE, f"version {path.name}: it is being removed from the cache")

    def identity(self, _: Path, /) -> Identity:
        """Return the same of all versions: one that is loaded stays as it was downloaded."""
        return frozenset()


class Puller:
    """Downloads the versions of the configured models from their stores. Any thread may call `configure`."""

    def __init__(self, folder: Path, poll_seconds: float) -> None:
        """Prepare to poll every `poll_seconds`, and to download into `folder`."""
        self._folder, self._poll_seconds = folder, poll_seconds
        self._lock = threading.Lock()
        self._stores: dict[UrlPath, _Store] = {}
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="puller", daemon=True)

    @contextlib.contextmanager
    def running(self, models: Sequence[ModelSettings]) -> Iterator[None]:
        """Reserve the folder, and follow the stores of `models` until the context ends, which ends a download in progress.

        Raises:
            ServingError: the folder cannot be written, or another server uses it.
        """
        with self.reserved():
            try:
                self.configure(models)
                self._thread.start()
                yield
            finally:
                self._stopping.set()
                self._wake.set()
                if self._thread.is_alive():
                    self._thread.join()

    @contextlib.contextmanager
    def reserved(self) -> Iterator[None]:
        """Create and reserve the folder inside the block, and remove what a killed server has left half done. See `running`."""
        where = f"cache folder {self._folder}"
        with contextlib.ExitStack() as held:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                lock = os.open(self._folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                held.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ServingError(f"{where}: another server uses it. Give --cache-dir another folder") from None
            except OSError as error:
                raise ServingError(f"{where}: cannot be written: {reason(error)}. Give another --cache-dir") from None
            for place in self._places():
                for path in place.iterdir():
                    if path.name.startswith(".") and path.is_dir():
                        shutil.rmtree(path, ignore_errors=True)
            yield

    def configure(self, models: Sequence[ModelSettings]) -> None:
        """Follow the stores of `models` from now on, and no others. A new store has no state when this returns.

        Raises:
            ServingError: the folder cannot be written.
        """
        policies: dict[UrlPath, list[VersionPolicy]] = {}
        users: dict[UrlPath, list[str]] = {}
        for model in models:
            if isinstance(model.base_path, UrlPath):
                policies.setdefault(model.base_path, []).append(model.policy)
                users.setdefault(model.base_path, []).append(model.name)
        with self._lock:
            try:
                stores = {url: self._stores.get(url) or _Store(url, self._folder, self._stopping) for url in policies}
            except OSError as error:
                raise ServingError(f"cache folder {self._folder}: cannot be written: {reason(error)}") from None
            for url, store in stores.items():
                store.policies, store.users = policies[url], ", ".join(users[url])
            self._stores = stores
        self._wake.set()

    def poll(self) -> None:
        """Poll every store once, download what is missing, and remove what is no longer wanted."""
        with self._lock:
            stores = list(self._stores.values())
        for store in stores:
            try:
                store.poll()
            except _StoppedError:
                return
            except Exception:  # polling must survive anything that a store can hold
                logger.exception("model %s: the poll of %s failed", store.users, store.url)
        try:
            for place in self._places() - {store.place for store in stores}:
                _remove_all(place, ())
        except OSError as error:
            logger.warning("cache folder %s: cannot be cleaned: %s", self._folder, reason(error))

    def _places(self) -> set[Path]:
        """Return the folders of stores, also of those that are not configured any more."""
        return {path.parent for path in self._folder.glob(f"*/{_URL_FILE}")}

    def _watch(self) -> None:
        while not self._stopping.is_set():
            self.poll()
            self._wake.wait(self._poll_seconds)
            self._wake.clear()


@dataclasses.dataclass
class _Seen:
    """The objects of a version that is not here: how often they were the same, and why they are damaged until when."""

    digest: str
    polls: int = 0
    fault: StatusError | None = None
    retry_at: float = 0.0


class _Store:
    """The versions at one URL. One thread calls `poll`."""

    def __init__(self, url: UrlPath, cache: Path, stopping: threading.Event) -> None:
        self.url, self._stopping = url, stopping
        self.policies: Sequence[VersionPolicy] = ()
        self.users = ""
        self.place = _place(cache, url)
        self.place.mkdir(exist_ok=True)
        (self.place / _URL_FILE).write_text(f"{url}\n", encoding="utf-8")
        (self.place / _STATE_FILE).unlink(missing_ok=True)
        self._here: dict[int, Path] | None = None
        self._proven: set[Path] = set()
        self._seen: dict[int, _Seen] = {}
        self._state: _State | None = None
        self._noted = ""

    def poll(self) -> None:
        """List the store, download what the policies select, and write the state for the processes that load."""
        if self._here is None:
            self._here = self._find_copies()
        here = self._here
        try:
            found = self._list()
        except (OSError, TpuEmbedError) as error:  # what is here is served
            self._publish({}, error=reason(error), pulling=False)
            return
        self._seen = {number: seen for number, seen in self._seen.items() if number in found}
        for number in here.keys() - found:
            del here[number]
        faults: dict[int, StatusError | None] = {}
        candidates, tried = set(found), set[int]()
        while due := self._wanted(candidates) - tried:
            number = max(due)
            faults |= dict.fromkeys(self._wanted(candidates) - here.keys() - faults.keys())
            self._publish(faults, pulling=True)
            tried.add(number)
            try:
                here[number] = self._bring(number, self.url / found[number])
                faults.pop(number, None)
            except (OSError, EOFError, TpuEmbedError) as error:
                faults[number] = self._fault(number, error)
                if number not in here:  # the next older one may be selected in its place
                    candidates.discard(number)
        wanted = self._wanted(candidates)
        _remove_all(self.place, [here[number] for number in wanted | self._wanted(here) if number in here])
        for number in [number for number, path in here.items() if not path.is_dir()]:
            del here[number]
        self._publish(faults, pulling=False)

    def _wanted(self, numbers: Collection[int]) -> set[int]:
        return {number for policy in self.policies for number in policy.wanted(numbers)}

    def _find_copies(self) -> dict[int, Path]:
        """Return the versions that the server before has left. Of two copies of one version, the newer one."""
        entries = [path for path in self.place.iterdir() if _ENTRY.fullmatch(path.name)]
        entries.sort(key=lambda one: one.stat().st_mtime_ns)
        found = [(int(path.name.rpartition("-")[0]), path) for path in entries]
        return {number: path for number, path in found if self._is_whole(number, path)}

    def _list(self) -> dict[int, str]:
        """Return the folders whose names are integers. Of two names of one integer, the last in order counts."""
        names = sorted(subfolders(self.url))
        found = {number: name for name in names if (number := parse_version(name)) is not None}
        if not found and (self.url / GRAPH_FILE).is_file():
            where = f"Give the URL of its parent, {self.url.parent}" if self.url.key else ""
            text = f"{self.url} contains {GRAPH_FILE}, so it is one version, not a folder of versions (1/, 2/, ...)"
            raise ConfigError(f"{text}. {where}")
        return found

    def _is_whole(self, number: int, place: Path) -> bool:
        """Compare a copy with its manifest, once. One that is damaged is removed."""
        if place in self._proven or not place.is_dir():
            return place.is_dir()
        try:
            verify_checksums(place / str(number), self._stop_if_due)
        except StatusError:
            logger.warning("model %s: version %d in the cache is damaged: %s", self.users, number, place)
            _remove(place)
            return False
        self._proven.add(place)
        return True

    def _bring(self, number: int, url: UrlPath) -> Path:
        """Return the copy of a version as it is in the store now. Download it if it is not here.

        Raises:
            StatusError, OSError, EOFError: it is not complete, or damaged, or does not fit, or the store fails.
        """
        objects = _find_objects(number, url)
        target = self.place / f"{number}-{_digest(objects)}"
        if self._is_whole(number, target):
            return target
        seen = self._seen.get(number)
        if seen is None or seen.digest != target.name:
            seen = self._seen[number] = _Seen(target.name)
        else:
            seen.polls += 1
        if seen.fault is not None and time.monotonic() < seen.retry_at:
            raise seen.fault
        try:
            self._pull(number, url, objects, seen, target)
        except StatusError as error:
            if error.code is Code.DATA_LOSS:
                text = f"{error.message.rstrip('.')}. Retried in {_RETRY_SECONDS:g} s, or when its objects change"
                seen.fault = error = StatusError(Code.DATA_LOSS, text)
                seen.retry_at = time.monotonic() + _RETRY_SECONDS
            raise error from None
        if self._here and number in self._here:
            text = "model %s: version %d has changed in its store. Who has loaded it keeps what was loaded. Publish a new version"
            logger.warning(text, self.users, number)
        self._proven.add(target)
        return target

    def _cached(self, objects: Mapping[str, FileVersion], names: Collection[str]) -> dict[str, Path]:
        """Return the files of proven copies that have the size and the ETag of an object in `names`, by its name.

        Their own names may differ: an overlay has other names for the files of its base.
        """
        files: dict[FileVersion, Path] = {}
        for copy in self._proven:
            with contextlib.suppress(OSError, ValueError):  # the copy is gone, or its list is missing or damaged
                known = json.loads((copy / _OBJECTS_FILE).read_text(encoding="utf-8"))
                files |= {FileVersion(size, tag): copy / name for name, (size, tag) in known.items() if tag}
        return {name: files[objects[name]] for name in names if objects[name] in files}

    def _pull(self, number: int, url: UrlPath, objects: Mapping[str, FileVersion], seen: _Seen, target: Path) -> None:
        """Bring a version into a folder with a temporary name, compare it with its manifest, and rename it.

        Files that the cache has are hard links, unless a try before has failed: one of them may have been the damaged one.
        """
        names = _check_complete(number, url, objects, seen.polls)
        linked = self._cached(objects, names) if seen.fault is None else {}
        size = sum(one.size for name, one in objects.items() if name not in linked)
        needed, free = int(size * _ROOM), shutil.disk_usage(self.place).free
        if free < needed:
            text = f"it needs {needed} bytes ({size} and a tenth), and {self.place} has {free} bytes free. Free some"
            raise StatusError(Code.RESOURCE_EXHAUSTED, f"version {number}: cannot be pulled: {text}")
        started = time.monotonic()
        fields = {"model": self.users, "version": number, "bytes": size}
        text = "pulling %s version %d from %s: %d files, %d of them linked from the cache, and %d bytes"
        logger.info(text, self.users, number, url, len(objects), len(linked), size, extra={"fields": fields})
        part = self.place / f".pulling-{secrets.token_hex(8)}"
        folder = part / str(number)
        try:
            folder.mkdir(parents=True)
            for name, one in sorted(objects.items()):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                if name in linked:
                    with contextlib.suppress(OSError):  # the disk allows no more links: it is downloaded
                        os.link(linked[name], folder / name)
                        continue
                self._download(url / name, one, folder / name)
            known = {f"{number}/{name}": dataclasses.astuple(one) for name, one in objects.items()}
            (part / _OBJECTS_FILE).write_text(json.dumps(known), encoding="utf-8")
            verify_checksums(folder, self._stop_if_due)
            if _find_objects(number, url) != objects:
                raise StatusError(Code.ABORTED, f"version {number}: its objects have changed while it was pulled")
            for place, _, _ in os.walk(part):
                flush(Path(place))
            if target.exists():  # a damaged one, which a process still holds
                target.rename(self.place / f".removed-{secrets.token_hex(8)}")
            part.rename(target)
            flush(self.place)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        seconds = round(time.monotonic() - started, 2)
        text = "pulled %s version %d in %.2f s"
        logger.info(text, self.users, number, seconds, extra={"fields": {**fields, "seconds": seconds}})

    def _download(self, url: UrlPath, version: FileVersion, target: Path) -> None:
        """Write an object, as `version` says that it is, to a new file. One window of it is in memory at a time."""
        with contextlib.closing(open_bytes(url)) as source, target.open("xb") as file:
            if source.version.size != version.size:
                text = f"it has {source.version.size} bytes, and {version.size} when it was listed"
                raise OSError(errno.ESTALE, text, str(url))
            window = memoryview(bytearray(min(_WINDOW_BYTES, version.size)))
            for offset in range(0, version.size, _WINDOW_BYTES):
                self._stop_if_due()
                piece = window[: version.size - offset]
                source.read_into(offset, piece)
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())

    def _fault(self, number: int, error: Exception) -> StatusError:
        """Return why a version was not downloaded. Log it if the state of the version does not show it."""
        fault = _fault_of(number, error)
        if number in (self._here or ()) or isinstance(fault, _IncompleteError):
            level = logging.INFO if isinstance(fault, _IncompleteError) else logging.WARNING
            self._note(level, f"model {self.users}: {fault.message}")
        return fault

    def _note(self, level: int, text: str) -> None:
        """Log what every poll finds, once."""
        if text != self._noted:
            logger.log(level, "%s", text)
            self._noted = text

    def _publish(self, faults: Mapping[int, StatusError | None], *, pulling: bool, error: str = "") -> None:
        """Write the state for the processes that load. A version whose fault is None is being downloaded or waits for that."""
        here = self._here or {}
        incomplete = [fault for fault in faults.values() if isinstance(fault, _IncompleteError)]
        waits = pulling or any(fault.code is Code.UNAVAILABLE for fault in incomplete)
        state = _State(
            settled=bool(here) or not waits or (self._state is not None and self._state.settled),
            error=error,
            folders={number: str((path / str(number)).relative_to(self.place)) for number, path in here.items()},
            faults={
                number: (int(fault.code), fault.message, not isinstance(fault, _IncompleteError))
                if fault
                else (0, "", False)
                for number, fault in faults.items()
                if number not in here
            },
        )
        if state == self._state:
            return
        try:
            state.write(self.place / _STATE_FILE)
            self._state = state
        except OSError as failure:
            text = f"{self.place / _STATE_FILE} cannot be written: {reason(failure)}. No version is loaded or unloaded until it can"
            self._note(logging.WARNING, f"model {self.users}: {text}")

    def _stop_if_due(self, _: int = 0) -> None:
        if self._stopping.is_set():
            raise _StoppedError


def _place(cache: Path, url: UrlPath) -> Path:
    """Return the folder of a store in the cache."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", url.name or url.bucket)[:64].lstrip(".") or "model"
    return cache / f"{name}-{hashlib.sha256(str(url).encode()).hexdigest()[:16]}"


def _remove_all(place: Path, keep: Collection[Path]) -> None:
    """Remove the versions in a store's folder that nobody holds, but those to keep."""
    for path in place.iterdir():
        if _ENTRY.fullmatch(path.name) and path not in keep:
            _remove(path)


def _remove(path: Path) -> None:
    """Remove a version, unless a process holds it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        gone = path.with_name(f".removed-{secrets.token_hex(8)}")
        path.rename(gone)
    except BlockingIOError:
        return
    finally:
        os.close(descriptor)
    shutil.rmtree(gone, ignore_errors=True)


def _digest(objects: Mapping[str, FileVersion]) -> str:
    """Return a name for this content: it differs if a name, a size or an ETag does."""
    text = "\n".join(f"{name}\0{one.size}\0{one.tag}" for name, one in sorted(objects.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _find_objects(number: int, url: UrlPath) -> dict[str, FileVersion]:
    """Return the objects of a version by their paths in it. Objects that stand for folders are left out.

    Raises:
        StatusError: INVALID_ARGUMENT, an object has a name that no file in the version's folder can have.
        OSError: the store fails.
    """
    inside = f"{url.key}/"
    found = {key.removeprefix(inside): one for key, one in listing(url).items() if key != url.key}
    folders = {name[:at] for name in found for at, char in enumerate(name) if char == "/"}
    for name, one in sorted(found.items()):
        fault = _name_fault(name)
        if name in folders and one.size:
            fault = "is a file and a folder. Remove one of them"
        if fault:
            raise StatusError(Code.INVALID_ARGUMENT, f"version {number}: object {printable(name)[:200]!r} {fault}")
    return {name: one for name, one in found.items() if name not in folders}


def _name_fault(name: str) -> str:
    """Return why `name` cannot be the path of a file inside a folder. Empty if it can."""
    parts = name.split("/")
    if {"", ".", ".."} & set(parts):
        return "would leave the version's folder. Rename it"
    if any(ord(char) < 32 or ord(char) == 127 for char in name):
        return "has control characters. Rename it"
    if len(name.encode()) > _MAX_PATH_BYTES or max(len(part.encode()) for part in parts) > _MAX_NAME_BYTES:
        return f"has a longer name than a file can have ({_MAX_NAME_BYTES} bytes a part, {_MAX_PATH_BYTES} in all)"
    return ""


def _check_complete(number: int, url: UrlPath, objects: Mapping[str, FileVersion], quiet_polls: int) -> Collection[str]:
    """Check that a version is complete in its store: there is a graph, and each file that its manifest names, at its size.

    Return the files whose checksums are compared after the download, but the graph. A version without a manifest has none. It needs
    the graph and an object `_SUCCESS`, or the same objects at `_QUIET_POLLS` polls before this one.

    Raises:
        StatusError: it is not, or its manifest is none (DATA_LOSS).
        OSError: the store fails.
    """
    incomplete = f"version {number}: is not complete in its store:"
    if str(GRAPH_FILE) not in objects:
        raise _IncompleteError(Code.NOT_FOUND, f"{incomplete} {GRAPH_FILE} is missing")
    try:
        manifest = Manifest.read(url) if str(MANIFEST_PATH) in objects else None
    except ConfigError as error:
        raise StatusError(Code.DATA_LOSS, f"version {number}: {error}") from None
    if manifest is None:
        if _SUCCESS_FILE not in objects and quiet_polls < _QUIET_POLLS:
            text = f"{incomplete} its objects have to stay the same for two polls"
            raise _IncompleteError(Code.UNAVAILABLE, text)
        return ()
    sizes = {file: entry.size for file, entry in manifest.files.items()} | manifest.table_files()
    sizes.pop(str(GRAPH_FILE), None)  # its bytes depend on its folder
    if missing := sorted(sizes.keys() - objects.keys()):
        text = f"{incomplete} {first_few(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        raise _IncompleteError(Code.NOT_FOUND, text)
    for file, size in sorted(sizes.items()):
        if objects[file].size != size:
            text = f"{incomplete} {file} has {objects[file].size} bytes, but the manifest has {size}"
            raise _IncompleteError(Code.NOT_FOUND, text)
    return [file for file in sizes if not is_free(file)]


def _fault_of(number: int, error: Exception) -> StatusError:
    """Return why a version cannot be downloaded, with the code for clients."""
    if isinstance(error, StatusError):
        if isinstance(error, _IncompleteError) or error.code is Code.DATA_LOSS:
            return error
        return StatusError(error.code, f"{error.message.rstrip('.')}. Retried at the next poll")
    code = Code.RESOURCE_EXHAUSTED if isinstance(error, OSError) and error.errno == errno.ENOSPC else Code.UNAVAILABLE
    where = f"{error.filename}: " if isinstance(error, OSError) and "://" in str(error.filename) else ""
    return StatusError(code, f"version {number}: cannot be pulled: {where}{reason(error)}. Retried at the next poll")
