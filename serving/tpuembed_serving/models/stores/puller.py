"""Pulls the versions that are to be served from their stores into the cache, in a thread of one process of the server."""

import contextlib
import dataclasses
import errno
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import google_crc32c
import numpy as np

from tpuembed.errors import ConfigError, ServingError, TpuEmbedError, reason
from tpuembed.files import FileVersion, UrlPath, open_bytes, subfolders
from tpuembed.files.types import finish
from tpuembed.manifest import Manifest
from tpuembed.saved_model import GRAPH_FILE
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.models.policies import VersionPolicy
from tpuembed_serving.models.stores.cache import (
    LAST_FILE,
    STATE_FILE,
    Cache,
    Pulled,
    StoreState,
    VersionState,
    read_state,
    remove,
    sync,
    write_files,
)
from tpuembed_serving.models.stores.version import IncompleteError, StoredVersion, fault_of, find_objects
from tpuembed_serving.models.verification import verify_checksums
from tpuembed_serving.models.versions import parse_version
from tpuembed_serving.settings import CacheSettings, ModelSettings

__all__ = ["Puller"]

logger = logging.getLogger(__name__)

_WINDOW_BYTES: Final = 32 << 20
"""A file is downloaded in windows: one is on its way while the one before is written."""
_PROGRESS_SECONDS: Final = 10.0


class _StoppedError(Exception):
    """The server stops."""


@dataclasses.dataclass
class _Seen:
    """A version as the polls before found it.

    Attributes:
        polls: how many successive polls before the last one found the same objects.
        fault: why these objects could not be pulled; None if they were not tried.
        retry_at: when to pull them again, by `time.monotonic`.
    """

    digest: str
    polls: int = 0
    fault: StatusError | None = None
    retry_at: float = 0.0


class Puller:
    """Follows the stores of the configured models. Any thread may call `configure`."""

    def __init__(self, settings: CacheSettings, poll_seconds: float, retry_seconds: float) -> None:
        """Prepare to poll every `poll_seconds`, and to pull a damaged version again after `retry_seconds`."""
        self._cache = Cache(settings)
        self._poll_seconds, self._retry_seconds = poll_seconds, retry_seconds
        self._lock = threading.Lock()
        self._stores: dict[UrlPath, _Store] = {}
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="puller", daemon=True)

    @contextlib.contextmanager
    def running(self, models: Sequence[ModelSettings]) -> Iterator[None]:
        """Reserve the cache, and pull for `models` until the context ends. A pull in progress is given up then.

        Raises:
            ServingError: the cache cannot be used.
        """
        self._cache.open()
        try:
            self.configure(models)
            self._thread.start()
            yield
        finally:
            self._stopping.set()
            self._wake.set()
            if self._thread.is_alive():
                self._thread.join()
            self._cache.close()

    def configure(self, models: Sequence[ModelSettings]) -> None:
        """Pull for `models` from now on, and for no others.

        A store that was not configured before has no state for its readers when this returns.

        Raises:
            ServingError: the cache cannot be written.
        """
        wanted: dict[UrlPath, list[ModelSettings]] = {}
        for model in models:
            if isinstance(model.base_path, UrlPath):
                wanted.setdefault(model.base_path, []).append(model)
        with self._lock:
            stores = {}
            for url, users in wanted.items():
                try:
                    known = self._stores.get(url) or _Store(url, self._cache, self._retry_seconds, self._stopping)
                except OSError as error:
                    raise ServingError(
                        f"cache folder {self._cache.folder}: cannot be written: {reason(error)}"
                    ) from None
                known.policies = [user.policy for user in users]
                known.users = ", ".join(user.name for user in users)
                stores[url] = known
            self._stores = stores
        self._wake.set()

    def poll(self) -> None:
        """Poll every store once, and pull what is missing."""
        with self._lock:
            stores = list(self._stores.values())
        for store in stores:
            try:
                store.poll(lambda: {path for one in stores for path in one.kept})
            except _StoppedError:
                return
            except Exception:  # polling must survive anything that a store can hold
                logger.exception("model %s: the poll of %s failed", store.users, store.url)
        try:
            self._cache.trim({path for store in stores for path in store.kept})
        except OSError as error:
            logger.warning("cache folder %s: cannot be cleaned: %s", self._cache.folder, reason(error))

    def _watch(self) -> None:
        while not self._stopping.is_set():
            self.poll()
            self._wake.wait(self._poll_seconds)
            self._wake.clear()


class _Store:
    """The versions at one URL. One thread calls `poll`."""

    def __init__(self, url: UrlPath, cache: Cache, retry_seconds: float, stopping: threading.Event) -> None:
        self.url, self._cache, self._retry_seconds, self._stopping = url, cache, retry_seconds, stopping
        self.policies: Sequence[VersionPolicy] = ()
        self.users = ""
        self.kept: set[Path] = set()
        self._place = cache.prepare(url)
        self._pulled = {(one.number, one.digest): one for one in cache.pulled(self._place)}
        self._proven: set[Path] = set()
        self._current: dict[int, Pulled] = {}
        self._seen: dict[int, _Seen] = {}
        self._state: StoreState | None = None
        self._noted = self._unwritten = ""

    def poll(self, kept: Callable[[], set[Path]]) -> None:
        """List the store, pull what the policies select, and write the state for the readers.

        `kept` returns the versions of all stores that stay in the cache.
        """
        try:
            found = self._list()
        except (OSError, TpuEmbedError) as error:
            self._keep_last(reason(error))
            return
        self._seen = {number: seen for number, seen in self._seen.items() if number in found}
        self._current = self._known(found)
        faults: dict[int, StatusError] = {}
        candidates, done = set(found), set[int]()
        while True:
            wanted = {number for policy in self.policies for number in policy.wanted(candidates)}
            self.kept = {self._current[number].place for number in wanted & self._current.keys()} | self._stand_ins(
                wanted
            )
            due = sorted(wanted - done, reverse=True)
            if not due:
                break
            self._write(wanted, faults, pulling=True)
            try:
                self._current[due[0]] = self._bring(due[0], self.url / found[due[0]], kept)
            except _StoppedError:
                raise
            except Exception as error:
                faults[due[0]] = self._note(due[0], error)
                if due[0] not in self._current:  # the next older one may be selected in its place
                    candidates.discard(due[0])
            done.add(due[0])
        self._write(wanted, faults, pulling=False)

    def _list(self) -> dict[int, str]:
        """Return the folders whose names are integers. Of two names of one integer, the last in order counts."""
        names = sorted(subfolders(self.url))
        found = {number: name for name in names if (number := parse_version(name)) is not None}
        if not found and (self.url / GRAPH_FILE).is_file():
            where = f"Give the URL of its parent, {self.url.parent}" if self.url.key else ""
            raise ConfigError(
                f"{self.url} contains {GRAPH_FILE}, so it is one version, not a folder of versions (1/, 2/, ...). {where}"
            )
        return found

    def _known(self, found: Collection[int]) -> dict[int, Pulled]:
        """Return the versions that the policies select from those of `found` in the cache that are whole."""
        known = {number: one for number, one in self._current.items() if number in found and one.place.is_dir()}
        last = self._state or read_state(self._place / LAST_FILE)
        served = {one.folder for one in last.versions.values()} if last else set()
        while True:
            cached = {number for number, _ in self._pulled if number in found}
            chosen = {number for policy in self.policies for number in policy.wanted(cached)}
            due = chosen - known.keys()
            if not due:
                return known
            for number in due:
                copies = [one for one in self._pulled.values() if one.number == number]
                copies.sort(key=lambda one: self._inside(one) not in served)
                if (whole := next(filter(self._is_whole, copies), None)) is not None:
                    known[number] = whole

    def _is_whole(self, copy: Pulled) -> bool:
        """Read a version in the cache, once. One that is damaged is removed."""
        if copy.place in self._proven and copy.place.is_dir():
            return True
        if copy.is_whole(self._stop_if_due):
            self._proven.add(copy.place)
            return True
        del self._pulled[copy.number, copy.digest]
        self._proven.discard(copy.place)
        if copy.place.is_dir():
            logger.warning("model %s: version %d in the cache is damaged: %s", self.users, copy.number, copy.folder)
            remove(copy.place)
        return False

    def _stand_ins(self, wanted: set[int]) -> set[Path]:
        """Return the versions to keep while others of `wanted` are pulled: those that the policies select of the rest."""
        if wanted <= self._current.keys():
            return set()
        chosen = {number for policy in self.policies for number in policy.wanted(self._current.keys())}
        return {self._current[number].place for number in chosen}

    def _bring(self, number: int, url: UrlPath, kept: Callable[[], set[Path]]) -> Pulled:
        """Return the version as it is in the store now, and pull it if it is not in the cache.

        Raises:
            StatusError, OSError: it is not complete, or damaged, or does not fit, or the store fails.
        """
        version = find_objects(number, url)
        digest = version.digest
        if (copy := self._pulled.get((number, digest))) and self._is_whole(copy):
            return copy
        seen = self._seen.get(number)
        if seen is None or seen.digest != digest:
            seen = self._seen[number] = _Seen(digest)
        else:
            seen.polls += 1
        if seen.fault is not None and time.monotonic() < seen.retry_at:
            raise seen.fault
        try:
            manifest = version.manifest(unchanged_polls=seen.polls)
            # Links to files that were damaged in the cache would damage the version again.
            same = self._same_files(manifest) if manifest is not None and seen.fault is None else {}
            copy = self._pull(version, digest, manifest, same, kept)
        except StatusError as error:
            if error.code is Code.DATA_LOSS:
                text = f"{error.message.rstrip('.')}. Retried in {self._retry_seconds:g} s, or when its objects change"
                seen.fault = error = StatusError(Code.DATA_LOSS, text)
                seen.retry_at = time.monotonic() + self._retry_seconds
            raise error from None
        if (before := self._current.get(number)) and before.digest != digest:
            text = "model %s: version %d has changed in its store. Who has loaded it keeps what was loaded. Publish a new version"
            logger.warning(text, self.users, number)
        self._pulled[number, digest] = copy
        self._proven.add(copy.place)
        return copy

    def _pull(
        self,
        version: StoredVersion,
        digest: str,
        manifest: Manifest | None,
        same: Mapping[str, tuple[Pulled, str]],
        kept: Callable[[], set[Path]],
    ) -> Pulled:
        """Download a version into a folder with a temporary name, prove it, and rename it. Files of `same` are linked."""
        sizes = {name: one.size for name, one in version.objects.items()}
        size = sum(bytes_ for name, bytes_ in sizes.items() if name not in same)
        started, whole = time.monotonic(), sum(sizes.values())
        self._cache.make_room(version.number, size, whole, kept() | {copy.place for copy, _ in same.values()})
        fields = {"model": self.users, "version": version.number, "bytes": size, "bytes_linked": whole - size}
        text = "pulling %s version %d from %s: %d files, %d bytes, and %d bytes linked from other versions"
        logger.info(
            text, self.users, version.number, version.url, len(sizes), size, whole - size, extra={"fields": fields}
        )
        progress = _Progress(self.users, version.number, size, self._stopping)
        part = self._place / f".pulling-{secrets.token_hex(8)}"
        folder = part / str(version.number)
        try:
            folder.mkdir(parents=True)
            files = {}
            for name, one in sorted(version.objects.items()):
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                copy, there = same.get(name, (None, ""))
                if copy is not None and _link(copy.folder / there, target):
                    files[name] = copy.files[there]
                else:
                    files[name] = one.size, _download(version.url / name, one, target, progress.note)
            if manifest is not None:
                verify_checksums(folder, progress.check)
            if find_objects(version.number, version.url).digest != digest:
                raise StatusError(
                    Code.ABORTED, f"version {version.number}: its objects have changed while it was pulled"
                )
            for place, _, _ in os.walk(folder):
                sync(Path(place))
            write_files(part, files)
            sync(part)
            target = self._place / f"{version.number}-{digest}"
            if target.exists():  # a damaged one, which a process still holds
                target.rename(self._place / f".removed-{secrets.token_hex(8)}")
            part.rename(target)
            sync(self._place)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        seconds = round(time.monotonic() - started, 2)
        logger.info(
            "pulled %s version %d in %.2f s",
            self.users,
            version.number,
            seconds,
            extra={"fields": {**fields, "seconds": seconds}},
        )
        return Pulled(target, version.number, digest, files)

    def _same_files(self, manifest: Manifest) -> dict[str, tuple[Pulled, str]]:
        """Return the files of `manifest` that versions in the cache have, and their names there, by all checksums."""
        wanted, same = _proofs(manifest), dict[str, tuple[Pulled, str]]()
        for copy in self._current.values():
            try:
                other = Manifest.read(copy.folder)
            except ConfigError:
                other = None
            held = {proof: file for file, proof in _proofs(other).items()} if other else {}
            for file, proof in wanted.items():
                if proof in held and held[proof] in copy.files:
                    same.setdefault(file, (copy, held[proof]))
        return same

    def _note(self, number: int, error: Exception) -> StatusError:
        """Return why a version was not pulled. If an older copy of it is served, log the reason, which nobody else shows."""
        if not isinstance(error, StatusError | OSError | EOFError | TpuEmbedError):
            logger.exception("model %s: the pull of version %d failed", self.users, number)
        fault = fault_of(number, error)
        if fault.code not in (Code.DATA_LOSS, Code.NOT_FOUND):
            fault = StatusError(fault.code, f"{fault.message.rstrip('.')}. Retried at the next poll")
        what = f"{number} {fault.message}"
        if what != self._noted and (number in self._current or isinstance(error, IncompleteError)):
            text = "model %s: %s"
            level = logging.INFO if isinstance(error, IncompleteError) else logging.WARNING
            logger.log(level, text, self.users, fault.message)
            self._noted = what
        return fault if not isinstance(error, IncompleteError) else error

    def _keep_last(self, error: str) -> None:
        """Report that the store cannot be listed. The versions of its last listing stay."""
        last = self._state or read_state(self._place / LAST_FILE)
        if not self._current and last is not None:
            self._current = self._known([number for number, one in last.versions.items() if one.folder])
        versions = {number: VersionState(folder=self._inside(one)) for number, one in self._current.items()}
        chosen = {number for policy in self.policies for number in policy.wanted(self._current.keys())}
        self.kept = {self._current[number].place for number in chosen}
        self._publish(StoreState(settled=True, error=error, versions=versions))

    def _write(self, wanted: set[int], faults: Mapping[int, StatusError], *, pulling: bool) -> None:
        versions = {number: VersionState() for number in wanted}
        waits = pulling
        for number, fault in faults.items():
            incomplete = isinstance(fault, IncompleteError)
            versions[number] = VersionState(code=None if incomplete else int(fault.code), fault=fault.message)
            waits |= isinstance(fault, IncompleteError) and fault.settles
        for number, copy in self._current.items():
            if copy.place in self.kept or self._cache.keeps_unused or number in wanted:
                versions[number] = VersionState(folder=self._inside(copy))
        settled = bool(self._current) or not waits or (self._state is not None and self._state.settled)
        self._publish(StoreState(settled=settled, error="", versions=versions))

    def _publish(self, state: StoreState) -> None:
        """Write the state for the readers. A disk without room for it may get some from the pulls, so they go on."""
        if state == self._state:
            return
        try:
            state.write(self._place / STATE_FILE)
        except OSError as error:
            if (why := reason(error)) != self._unwritten:
                text = "model %s: %s cannot be written: %s. No version is loaded or unloaded until it can; retried at each poll"
                logger.warning(text, self.users, self._place / STATE_FILE, why)
                self._unwritten = why
            return
        self._state, self._unwritten = state, ""

    def _stop_if_due(self, _: int = 0) -> None:
        if self._stopping.is_set():
            raise _StoppedError

    def _inside(self, copy: Pulled) -> str:
        return str(copy.folder.relative_to(self._place))


class _Progress:
    """Logs a pull now and then, and ends it if the server stops."""

    def __init__(self, users: str, number: int, size: int, stopping: threading.Event) -> None:
        self._users, self._number, self._size, self._stopping = users, number, size, stopping
        self._done, self._next = 0, time.monotonic() + _PROGRESS_SECONDS

    def note(self, count: int) -> None:
        self.check()
        self._done += count
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _PROGRESS_SECONDS
            share = 100 * self._done // max(1, self._size)
            logger.info("pulling %s version %d: %d%% of %d bytes", self._users, self._number, share, self._size)

    def check(self, _: int = 0) -> None:
        if self._stopping.is_set():
            raise _StoppedError


def _proofs(manifest: Manifest) -> dict[str, Any]:
    """Return file -> what its bytes are by the manifest: its size and its checksum, or those of the stacks that fill it.

    The graph is left out: its checksum does not cover the paths in it.
    """
    proofs: dict[str, Any] = {
        file: ("file", entry.size, entry.crc32c) for file, entry in manifest.files.items() if file != str(GRAPH_FILE)
    }
    for file, size in manifest.table_files().items():
        stacks = sorted((one.offset, one.size, one.crc32c) for one in manifest.arrays if one.file == file)
        if sum(length for _, length, _ in stacks) == size:  # stacks share no byte, so they fill it
            proofs.setdefault(file, ("stacks", *stacks))
    return proofs


def _link(source: Path, target: Path) -> bool:
    """Link a file. Returns False if the file system does not."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno in (errno.EMLINK, errno.EXDEV, errno.EPERM, errno.ENOENT, errno.ENOTSUP):
            return False
        raise
    return True


def _download(url: UrlPath, version: FileVersion, target: Path, on_bytes: Callable[[int], None]) -> int:
    """Write an object, as `version` says that it is, to the new file `target`. Returns its CRC32C.

    Two windows of the object are in memory at a time.
    """
    object_ = open_bytes(url)
    if object_.version.size != version.size:
        raise OSError(
            errno.ESTALE, f"it has {object_.version.size} bytes, and {version.size} when it was listed", str(url)
        )
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444)
    checksum, windows = 0, [np.empty(min(_WINDOW_BYTES, version.size), np.uint8) for _ in range(2)]
    with open(descriptor, "wb", buffering=0) as file:
        offsets = range(0, version.size, _WINDOW_BYTES)
        with contextlib.ExitStack() as reads:
            ahead: Any = None
            for index, offset in enumerate(offsets):
                ahead = ahead or _begin(object_, offset, windows[0], version.size, reads)
                ahead.close()  # waits for this window, and raises if it failed
                arrived = windows[index % 2][: min(_WINDOW_BYTES, version.size - offset)]
                following = offset + _WINDOW_BYTES
                ahead = (
                    _begin(object_, following, windows[(index + 1) % 2], version.size, reads)
                    if following < version.size
                    else None
                )
                checksum = google_crc32c.extend(checksum, arrived)
                _write_all(file.fileno(), arrived.data)
                on_bytes(len(arrived))
        os.fsync(file.fileno())
    return int(checksum)


def _begin(object_: Any, offset: int, window: Any, size: int, reads: contextlib.ExitStack) -> contextlib.ExitStack:
    """Request a window. The returned context ends when it has arrived; `reads` ends it too."""
    one = reads.enter_context(contextlib.ExitStack())
    pending = one.enter_context(finish())
    pending += object_.begin([(offset, window[: min(len(window), size - offset)].data)])
    return one


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
