"""One model: finds its versions on disk, loads them, and unloads each after its last request."""

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from tpuembed.files import FilePath, UrlPath
from tpuembed_serving.core.log_once import ONCE
from tpuembed_serving.core.noop import noop
from tpuembed_serving.core.reload_paths import ReloadPaths
from tpuembed_serving.core.servable import LoadedVersion, Servable, State, VersionProgress, VersionStatus
from tpuembed_serving.core.status import Code, LoadStopped, StatusError, invalid_argument, servable_not_found
from tpuembed_serving.models.policies import SpecificVersions, VersionPolicy
from tpuembed_serving.models.stores import StoreFolder
from tpuembed_serving.models.versions import Identity, find_versions, fingerprint, identity, replaces
from tpuembed_serving.settings import ModelSettings

__all__ = ["Lease", "Loader", "ServedModel", "outside"]

logger = logging.getLogger(__name__)

Loader = Callable[[Path], Servable]

_MOST_RETRIES: Final = 5
_RETRY_SECONDS: Final = 60.0
"""TensorFlow Serving's: a version that fails to load is retried five times, a minute apart, and when its files change."""
_UNAVAILABLE_RETRY_SECONDS: Final = 5.0
"""A version that waits for another server, such as Redis, is retried so often until that one answers."""


@dataclasses.dataclass
class _Version:
    """The record of one version.

    Attributes:
        path: its folder; its URL until it is pulled from a store.
        users: how many leases are open.
        held: keeps its folder while it is loaded.
        tried: the fingerprint of the files at the last load.
        identity: that of the files that are loaded.
        settling: the identity of files that have replaced them, or changed during a load, at the last poll.
        tries: how many loads of those files failed.
        fault: why the last one failed, and what happens next.
        retry_at: when the next load is due, by `time.monotonic`.
    """

    state: State
    path: FilePath
    servable: Servable | None = None
    held: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    error: StatusError | None = None
    users: int = 0
    tried: object = None
    identity: Identity = frozenset()
    settling: Identity | None = None
    tries: int = 0
    fault: str = ""
    retry_at: float = 0.0


class Lease:
    """Keeps a version loaded while the context is open."""

    __slots__ = ("_label", "_model", "_record", "_version")

    def __init__(self, model: "ServedModel", version: int | None, label: str | None) -> None:
        self._model, self._version, self._label = model, version, label
        self._record: _Version | None = None

    def __enter__(self) -> LoadedVersion:
        self._record, loaded = self._model._take(self._version, self._label)
        return loaded

    def __exit__(self, *_: object) -> None:
        assert self._record is not None
        self._model._give_back(self._record)


class _ChangedError(StatusError):
    """Files of a version changed while it was loaded."""


class _ModelFolder:
    """The folder of a model's versions. Logs each problem once.

    Attributes:
        settled: whether the versions are known. In a store, the first pulls may not have ended yet.
        waiting: versions that cannot be loaded yet: where they are, why, and whether that is a failure.
        within: where the folder must be whenever it is listed; None if the operator chose it.
    """

    settled = True
    waiting: Mapping[int, tuple[FilePath, StatusError | None, bool]] = MappingProxyType({})

    def __init__(self, model: str, path: Path, within: ReloadPaths | None) -> None:
        self._model, self._path, self.within = model, path, within
        self.error = ""

    def versions(self) -> dict[int, Path] | None:
        """Return every version in the folder, or None if it cannot be listed."""
        # A link may have changed since the reload. Versions are loaded by the path without links, so that none can change now.
        path = self._path if self.within is None else self.within.find(self._path)
        if not isinstance(path, Path):
            self._refuse()
            return None
        self.waiting = MappingProxyType({})
        try:
            found = find_versions(path)
        except OSError as error:
            reason = error.strerror or str(error)
            if not self.error:
                text = "model %s: its folder cannot be listed: %s. The loaded versions are still served"
                logger.error(text, self._model, reason, extra=ONCE)
            self.error = reason
            return None
        self.error = ""
        return found

    def _refuse(self) -> None:
        """Report that the base path leads outside now, as the state of the newest version there."""
        fault = outside(self._model, self._path)
        if self.error != fault.message:
            logger.error("%s", fault.message, extra=ONCE)
        self.error = fault.message
        with contextlib.suppress(OSError):
            newest = max(find_versions(self._path), default=None)
            self.waiting = {} if newest is None else {newest: (self._path / str(newest), fault, True)}

    def hold(self, _: Path, /) -> contextlib.ExitStack:
        """Return a context without an effect: the folder belongs to its user."""
        return contextlib.ExitStack()

    def identity(self, path: Path) -> Identity:
        """Return what tells the files at `path` from those that replace them."""
        return identity(path)


class _VersionLabels:
    """The labels of one model. The caller of a method holds the lock of the model's versions.

    Labels of the first config wait until their versions are available. TensorFlow Serving would not start with them.
    """

    def __init__(self, model: str, labels: Mapping[str, int]) -> None:
        self._model = model
        self._assigned: dict[str, int] = {}
        self._waiting: dict[str, int] = dict(labels)

    def version(self, label: str) -> int:
        """Return the version that `label` names.

        Raises:
            StatusError: INVALID_ARGUMENT, the label is unknown.
        """
        if label not in self._assigned:
            raise invalid_argument(f"Unrecognized servable version label: {label}")
        return self._assigned[label]

    @property
    def assigned(self) -> dict[str, int]:
        """Return label -> version, in the order of labels, as requests may use them now."""
        return dict(sorted(self._assigned.items()))

    def fault(self, labels: Mapping[str, int], available: Collection[int]) -> str:
        """Return why `labels` cannot be assigned now, in TensorFlow Serving's words. Empty if they can."""
        for version in labels.values():
            if version not in available:
                what = f"Request to assign label to version {version} of model {self._model}"
                return f"{what}, which is not currently available for inference"
        return ""

    def assign(self, labels: Mapping[str, int]) -> None:
        """Replace all labels with these."""
        self._assigned, self._waiting = dict(labels), {}

    def settle(self, available: Collection[int]) -> None:
        """Assign the waiting labels whose version is available now."""
        due = {label: version for label, version in self._waiting.items() if version in available}
        self._assigned.update(due)
        self._waiting = {label: version for label, version in self._waiting.items() if label not in due}


class ServedModel:
    """The versions of one model. A version is loaded before the one that it replaces is unloaded.

    One thread calls `poll`, `configure`, `retire` and `unload`. Any thread may call the other methods.
    """

    def __init__(
        self,
        settings: ModelSettings,
        load: Loader,
        released: Callable[[], None],
        *,
        changed: Callable[[], None] = noop,
        cache: Path | None = None,
    ) -> None:
        """Prepare the model; nothing is loaded yet.

        Args:
            settings: its name, folder, policy and labels.
            load: loads a version from its folder.
            released: called when a version that is to be unloaded has finished its last request.
            changed: called after every change of a version's state.
            cache: the folder into which a `Puller` pulls versions from stores.
        """
        self.name = settings.name
        self.base_path = settings.base_path
        self._policy: VersionPolicy = settings.policy
        self._request_logging = settings.request_logging
        self._load, self._released, self._changed = load, released, changed
        self._lock = threading.Lock()
        self._versions: dict[int, _Version] = {}
        self._missing: frozenset[int] = frozenset()
        self._replaced: list[_Version] = []
        self._labels = _VersionLabels(settings.name, settings.labels)
        self._folder: _ModelFolder | StoreFolder
        if isinstance(settings.base_path, UrlPath):
            assert cache is not None
            self._folder = StoreFolder(settings.name, settings.base_path, cache)
        else:
            self._folder = _ModelFolder(settings.name, settings.base_path, settings.within)

    @property
    def available(self) -> bool:
        """Returns True if any version answers requests."""
        with self._lock:
            return any(record.state is State.AVAILABLE for record in self._versions.values())

    @property
    def listing_error(self) -> str:
        """Return why the last poll could not list the folder. Empty if it could."""
        return self._folder.error

    @property
    def settled(self) -> bool:
        """Returns True unless the first versions are still being pulled from a store."""
        return self._folder.settled

    @property
    def idle(self) -> bool:
        """Returns True if no version is loaded."""
        with self._lock:
            return all(record.servable is None for record in (*self._versions.values(), *self._replaced))

    def lease(self, version: int | None, label: str | None = None) -> Lease:
        """Return a lease of version `version`, or of the one that `label` names, or of the newest available one.

        Opening it raises StatusError: NOT_FOUND if no such version is available, INVALID_ARGUMENT if the label is unknown.
        """
        return Lease(self, version, label)

    def _take(self, version: int | None, label: str | None) -> tuple[_Version, LoadedVersion]:
        with self._lock:
            version = version if label is None else self._labels.version(label)
            number = self._newest() if version is None else version
            record = self._versions.get(number)
            if record is None or record.state is not State.AVAILABLE or record.servable is None:
                raise servable_not_found(self.name, version)
            record.users += 1
            return record, LoadedVersion(number, record.servable, self._request_logging)

    def _newest(self) -> int:
        """Return the newest available version, or -1 if there is none. A plain loop, because every request calls it."""
        newest = -1
        for number, record in self._versions.items():
            if number > newest and record.state is State.AVAILABLE:
                newest = number
        return newest

    def _available_numbers(self) -> Iterator[int]:
        return (number for number, record in self._versions.items() if record.state is State.AVAILABLE)

    def _give_back(self, record: _Version) -> None:
        with self._lock:
            record.users -= 1
            last = record.users == 0 and record.state is State.UNLOADING
        if last:
            self._released()

    def statuses(self) -> list[VersionStatus]:
        """Return the status of every version that was ever wanted, newest first."""
        with self._lock:
            newest_first = sorted(self._versions.items(), reverse=True)
            return [VersionStatus(number, record.state, record.error) for number, record in newest_first]

    def progress(self) -> list[VersionProgress]:
        """Return how far every version is that was ever wanted, oldest first."""
        with self._lock:
            return [
                VersionProgress(self.name, number, one.path, one.state, one.fault if one.error else "", one.tries)
                for number, one in sorted(self._versions.items())
            ]

    @property
    def labels(self) -> dict[str, int]:
        """Return label -> version, as requests may use them now."""
        with self._lock:
            return self._labels.assigned

    def label_fault(self, labels: Mapping[str, int]) -> str:
        """Return why `labels` cannot be assigned now. Empty if they can."""
        with self._lock:
            return self._labels.fault(labels, set(self._available_numbers()))

    def assign(self, labels: Mapping[str, int]) -> None:
        """Replace all labels with `labels`."""
        with self._lock:
            self._labels.assign(labels)

    def configure(self, settings: ModelSettings) -> None:
        """Use the policy of `settings` from the next poll on, and log requests as they say from now on.

        The operator may have taken over a folder that a client chose.
        """
        self._policy, self._request_logging = settings.policy, settings.request_logging
        self._folder.within = settings.within

    def poll(self) -> None:
        """Scan the folder once: load new versions, newest first, and unload unused ones that the policy drops."""
        found = self._folder.versions()
        self._note_waiting(found or {})
        if found is None:
            self.unload()
            return
        self._warn_of_missing({*found, *self._folder.waiting})
        wanted = self._policy.wanted(found)
        self._retire_others(wanted)
        for number in sorted(wanted, reverse=True):
            self._ensure_loaded(number, found[number])
            self._retire_others(wanted)
        with self._lock:
            self._labels.settle(set(self._available_numbers()))

    def _warn_of_missing(self, there: Collection[int]) -> None:
        missing = self._policy.versions.difference(there) if isinstance(self._policy, SpecificVersions) else frozenset()
        for number in sorted(missing - self._missing):
            text = "model %s: its config names version %d, which is not in %s"
            logger.warning(text, self.name, number, self.base_path, extra=ONCE)
        self._missing = missing

    def retire(self) -> None:
        """Stop answering requests. `unload` then frees the versions that no request uses."""
        self._retire_all_but(frozenset())

    def unload(self) -> None:
        """Free the retired versions that no request uses."""
        with self._lock:
            leaving = [record for record in self._versions.values() if record.state is State.UNLOADING]
            unused = [record for record in (*leaving, *self._replaced) if record.users == 0]
            self._replaced = [record for record in self._replaced if record.users]
            servables = [(record.servable, record.held) for record in unused]
            for record in unused:
                record.servable = None
        for servable, held in servables:
            if servable is not None:
                servable.close()
            held.close()
        with self._lock:
            for record in unused:
                record.state = State.END
        if unused:
            self._changed()

    def _note_waiting(self, found: Mapping[int, Path]) -> None:
        """Record the versions that cannot be loaded yet, and those that will not be loaded any more."""
        waiting = self._folder.waiting
        with self._lock:
            for number, (path, _, _) in waiting.items():
                record = self._versions.setdefault(number, _Version(State.START, path))
                if record.servable is None:
                    record.path = path
            pending = [
                (number, one)
                for number, one in self._versions.items()
                if one.servable is None and number not in found and (number in waiting or isinstance(one.path, UrlPath))
            ]
        for number, record in pending:
            gone = StatusError(Code.NOT_FOUND, f"version {number}: is not in its store any more")
            _, error, failed = waiting.get(number, (record.path, gone, True))
            record.fault = error.message if error is not None else ""
            self._enter(record, State.END if failed else State.START, error)

    def _ensure_loaded(self, number: int, path: Path) -> None:
        """Load `number` unless it is loaded. After a failure, wait for the next retry or for changed files."""
        with self._lock:
            record = self._versions.setdefault(number, _Version(State.START, path))
            loaded = record.servable is not None
        found = self._folder.identity(path)
        if loaded and not replaces(found, record.identity):
            self._enter(record, State.AVAILABLE, None)
            return
        # A copy may be in progress.
        if found != record.settling and (loaded or record.settling is not None):
            record.settling = found
            return
        tried = path, found, fingerprint(path)
        if record.tried != tried:
            record.tried, record.tries = tried, 0
        elif record.tries and (record.tries > _MOST_RETRIES or time.monotonic() < record.retry_at):
            return
        self._try_load(number, record, path, found)

    def _try_load(self, number: int, record: _Version, path: Path, found: Identity) -> None:
        """Load a version with the files that were `found`. If they replace others, those are served until then."""
        replaced = record.servable is not None
        if replaced:
            text = "model %s version %d: its files were replaced. It is loaded again"
            logger.warning(text, self.name, number, extra=ONCE)
        else:
            record.path = path
            self._enter(record, State.LOADING, None)
        held = contextlib.ExitStack()
        try:
            held = self._folder.hold(path)
            servable = self._load(path)
            if (after := self._folder.identity(path)) != found:  # it may have rows of both
                servable.close()
                record.settling = after
                text = f"version {number}: {min(found ^ after)[0]} changed while the version was read"
                raise _ChangedError(Code.UNAVAILABLE, text)
        except _ChangedError as error:
            held.close()
            text = "It is loaded once its files stay as they are"
            self._note_failure(number, record, _without_traceback(number, error), text)
            return
        except LoadStopped as stop:
            held.close()
            if not replaced:
                record.fault = ""
                self._enter(record, State.END, _without_traceback(number, stop))
            return
        except Exception as error:  # whatever a model does, the server and its other versions go on
            held.close()
            self._note_failure(number, record, _without_traceback(number, error))
            return
        with self._lock:
            if replaced:
                record.state = State.UNLOADING
                self._replaced.append(record)
                record = dataclasses.replace(record, path=path, users=0, error=None, fault="")
            record.servable, record.held, record.tries, record.state = servable, held, 0, State.AVAILABLE
            record.identity, record.settling = found, None
            record.error = None
            self._versions[number] = record
        self._changed()

    def _note_failure(self, number: int, record: _Version, status: StatusError, more: str = "") -> None:
        waits = status.code is Code.UNAVAILABLE
        record.tries = 1 if waits else record.tries + 1
        seconds = _UNAVAILABLE_RETRY_SECONDS if waits else _RETRY_SECONDS
        record.retry_at = time.monotonic() + seconds
        left = _MOST_RETRIES + 1 - record.tries
        more = more or (f"Next retry in {seconds:g} s" if left else "No retry until its files change")
        record.fault = f"{status.message.rstrip('.')}. {more}"
        if record.servable is not None:
            text = (
                "model %s version %d: the files that replaced its own cannot be loaded: %s. Those of before are served"
            )
            logger.error(text, self.name, number, record.fault, extra=ONCE)
        else:
            self._enter(record, State.END, status)

    def _enter(self, record: _Version, state: State, error: StatusError | None) -> None:
        with self._lock:
            changed = record.state is not state or str(record.error) != str(error)
            record.state, record.error = state, error
        if changed:
            self._changed()

    def _retire_others(self, wanted: frozenset[int]) -> None:
        """Retire all but `wanted` once one of these is available, as TensorFlow Serving's AvailabilityPreservingPolicy."""
        with self._lock:
            replaced = not wanted or not wanted.isdisjoint(self._available_numbers())
        if replaced:
            self._retire_all_but(wanted)
        self.unload()

    def _retire_all_but(self, wanted: frozenset[int]) -> None:
        with self._lock:
            leaving = [
                record
                for number, record in self._versions.items()
                if number not in wanted and record.state is State.AVAILABLE
            ]
            for record in leaving:
                record.state = State.UNLOADING
        if leaving:
            self._changed()


def outside(model: str, base_path: FilePath) -> StatusError:
    """Return the error of a client's base path that is outside its folders. It does not say whether the folder exists."""
    return StatusError(
        Code.PERMISSION_DENIED,
        f"model {model}: base_path {base_path} is outside the folders that a reload may choose: those beside the models of the "
        "server's start. Put the model there, or into --config",
    )


def _without_traceback(number: int, error: Exception) -> StatusError:
    """Return a copy of `error` without its traceback, whose frames would keep a half-loaded model in memory."""
    if isinstance(error, StatusError):
        return StatusError(error.code, error.message)
    return StatusError(Code.UNKNOWN, f"version {number}: {type(error).__name__}: {error}")
