"""Reserves the version of an export, and renews the lease on it while it is written.

An export resumes what an interrupted run of the same export left, or reserves a new number. A version being written has
a record, `MODEL_DIR/.staging-<version>/record`. A store has no locks. A running owner renews its record every fifteen
seconds, in a thread of its own. The owner counts as dead if its process ran on this machine and has ended, or if the
record was not renewed for a minute.
"""

import contextlib
import dataclasses
import re
import threading
import time
from collections.abc import Mapping
from typing import Any, Final, Self

from tpuembed.errors import ExportError, warn
from tpuembed.export.publish.store.record import Owner, StoreModelDir, StoreRecord
from tpuembed.export.publish.version_writer import (
    MAX_VERSION,
    PREFIX,
    Unfinished,
    check_version,
    classify,
    naming_model_dir,
    versions_among,
)
from tpuembed.export.stream.resume_log import Header
from tpuembed.export.stream.shard import ShardResult
from tpuembed.files import MissingBucketError
from tpuembed.files.bucket import Stored

__all__ = [
    "LEASE_SECONDS",
    "LeaseRenewer",
    "StoreVersions",
    "VersionReservation",
    "check_free",
    "list_versions",
    "remove_unfinished",
    "reserve_version",
]

LEASE_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 2.0
_SECONDS_BETWEEN_WRITES: Final = 3.0
_SECONDS_BETWEEN_BEATS: Final = 15.0
"""A fraction of LEASE_SECONDS."""
_RESERVATION: Final = re.compile(re.escape(PREFIX) + r"(\d{1,19})", re.ASCII)


@dataclasses.dataclass(frozen=True)
class VersionReservation:
    """A version that only this export may write, and its record."""

    version: int
    record: StoreRecord
    tag: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreUnfinished(Unfinished):
    """A version being written, as it was when it was listed."""

    root: StoreModelDir
    version: int
    stored: Stored
    record: StoreRecord | None
    """None if it cannot be parsed."""

    @classmethod
    def of(cls, root: StoreModelDir, version: int, stored: Stored, *, is_published: bool) -> Self:
        """Return the version whose record is `stored`."""
        record = StoreRecord.parse(stored.data)
        return cls(
            root=root,
            version=version,
            stored=stored,
            record=record,
            place=str(root.path / f"{PREFIX}{version}"),
            header=record.header if record else None,
            finished=len(record.finished) if record else 0,
            finished_bytes=record.table_bytes if record else 0,
            is_published=is_published,
            is_useless=record is not None and not record.header.lasts,
            age_seconds=stored.age_seconds,
        )

    @property
    def is_dead(self) -> bool:
        """Returns True if no process writes it."""
        owner = self.record.owner if self.record else None
        if self.record and (owner is None or owner.is_gone):
            return True
        return self.stored.age_seconds > LEASE_SECONDS and not (owner and owner.is_here)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreVersions:
    """The versions in MODEL_DIR.

    Attributes:
        versions: versions that servers see.
        unfinished: versions being written.
    """

    versions: frozenset[int]
    unfinished: tuple[StoreUnfinished, ...]

    @property
    def free(self) -> int:
        """Return the next version that is neither published nor reserved."""
        return max((*self.versions, *(one.version for one in self.unfinished)), default=0) + 1


def list_versions(root: StoreModelDir) -> StoreVersions:
    """List the versions that exist now."""
    names = root.names()
    versions, unfinished = frozenset(versions_among(names)), []
    for match in filter(None, map(_RESERVATION.fullmatch, names)):
        version = int(match[1])
        stored = root.bucket.get(root.record_key(version))
        if stored is not None:
            is_published = version in versions and root.is_version(version)
            unfinished.append(StoreUnfinished.of(root, version, stored, is_published=is_published))
    return StoreVersions(versions=versions, unfinished=tuple(unfinished))


def check_free(root: StoreModelDir, version: int | None, found: StoreVersions) -> None:
    """Raise ExportError if `version` exists; None is always free. Raise ConfigError if it is not a positive integer."""
    check_version(version)
    if version in found.versions and version not in {one.version for one in found.unfinished if not one.is_published}:
        raise ExportError(f"MODEL_DIR {root.path}: version {version} exists. Choose another one, such as {found.free}.")


def reserve_version(
    root: StoreModelDir, version: int | None, header: Header, *, restart: bool
) -> tuple[VersionReservation, tuple[str, ...]]:
    """Reserve a version to write. Return it with the names of other unfinished exports. Stale versions are removed.

    Raises:
        ExportError: `version` exists, or another export has reserved it, or the store does not support conditional
            writes.
    """
    found = list_versions(root)
    check_free(root, version, found)
    same = [one for one in found.unfinished if one.is_resumable(header) and version in (None, one.version)]
    mine = [one for one in map(_wait_until_certain, same) if one.is_dead]
    others = [one for one in found.unfinished if one.is_dead and one not in mine and one not in same]
    dead = classify(mine, others, header, restart=restart)
    for one in dead.stale:
        # Another process may have taken it over.
        if one.record is None or _take_over(one) is not None:
            remove_unfinished(root, one.version, one.record)
    taken = None if dead.resumable is None else _take_over(dead.resumable)
    if taken is not None and version is None:
        _warn_below(root, taken.version, found)
    return taken or _reserve(root, version, header), tuple(str(one) for one in dead.kept)


def _warn_below(root: StoreModelDir, version: int, found: StoreVersions) -> None:
    newest = max(found.versions, default=0)
    if version < newest:
        warn(
            f"MODEL_DIR {root.path}: resuming an interrupted export as version {version}. Version {newest} "
            f"already exists, so servers that load only the newest version will not load version {version}. To "
            f"export version {found.free} instead, start over with --restart (resume=False).",
        )


def _wait_until_certain(unfinished: StoreUnfinished) -> StoreUnfinished:
    """Wait until it is certain whether the same export still runs, for example on another machine. Return its latest
    state.
    """
    owner = unfinished.record.owner if unfinished.record else None
    if unfinished.is_dead or (owner and owner.is_here):
        return unfinished
    warn(
        f"MODEL_DIR {unfinished.root.path}: version {unfinished.version}: the same export may still run on "
        f"another machine. Waiting up to {LEASE_SECONDS:.0f} seconds to find out.",
    )
    while not unfinished.is_dead:
        time.sleep(_POLL_SECONDS)
        stored = unfinished.root.bucket.get(unfinished.root.record_key(unfinished.version))
        if stored is None or stored.tag != unfinished.stored.tag:
            return unfinished  # it was renewed or removed, so it counts as alive
        unfinished = dataclasses.replace(unfinished, stored=stored)
    return unfinished


def _take_over(unfinished: StoreUnfinished) -> VersionReservation | None:
    """Make this export the owner of the version. Returns None if another process was faster."""
    assert unfinished.record
    record = dataclasses.replace(unfinished.record, owner=Owner.this())
    key, tag = unfinished.root.record_key(unfinished.version), unfinished.stored.tag
    try:
        return VersionReservation(
            unfinished.version, record, unfinished.root.bucket.replace(key, record.to_bytes(), tag)
        )
    except (FileExistsError, FileNotFoundError):
        return None


def remove_unfinished(root: StoreModelDir, version: int, record: StoreRecord | None) -> None:
    """Remove what an unfinished version consists of, its reservation last. A complete version is kept."""
    if not root.is_version(version):
        root.remove_version(version)
    uploads = [(upload.key, upload.id) for upload in record.uploads.values()] if record else []
    for key, upload in {*uploads, *root.bucket.uploads(root.key(str(version)) + "/")}:
        root.bucket.abort_upload(key, upload)
    root.bucket.delete([root.record_key(version)])


def _reserve(root: StoreModelDir, version: int | None, header: Header) -> VersionReservation:
    while True:
        found = list_versions(root)
        check_free(root, version, found)
        number = version or found.free
        if number > MAX_VERSION:
            raise ExportError(
                f"MODEL_DIR {root.path}: it has version {MAX_VERSION}, the highest possible one. Export to another "
                "MODEL_DIR."
            )
        record = StoreRecord(header=header, owner=Owner.this())
        try:
            tag = root.bucket.create(root.record_key(number), record.to_bytes())
        except FileExistsError:
            if version is None:
                continue
            raise _is_taken(root, version, found) from None
        _check_conditions(root, number, record)
        if not root.bucket.keys(root.key(str(number)) + "/"):
            return VersionReservation(number, record, tag)
        root.bucket.delete([root.record_key(number)])  # the version was committed a moment ago


def _check_conditions(root: StoreModelDir, version: int, record: StoreRecord) -> None:
    """Raise ExportError if the store ignores the condition not to replace an object."""
    probe = dataclasses.replace(record, owner=Owner.this(), beats=-1)
    try:
        root.bucket.create(root.record_key(version), probe.to_bytes())
    except FileExistsError:
        return
    root.bucket.delete([root.record_key(version)])
    raise ExportError(
        f"MODEL_DIR {root.path}: the store ignores If-None-Match, so two exports could write the same version. "
        "Export to a disk and copy the version, saved_model.pb last."
    )


def _is_taken(root: StoreModelDir, version: int, found: StoreVersions) -> ExportError:
    """Return the error for a version that another export has reserved."""
    one = next((one for one in found.unfinished if one.version == version), None)
    state = f"an unfinished export has reserved it: {one}" if one and one.is_dead else "another export is writing it"
    return ExportError(
        f"MODEL_DIR {root.path}: version {version}: {state}. Choose another version, such as "
        f"{max(found.free, version + 1)}."
    )


class LeaseRenewer:
    """Owns the record of a reserved version, and renews it between `start` and `stop`.

    Attributes:
        version: the reserved version.
    """

    def __init__(self, root: StoreModelDir, reserved: VersionReservation) -> None:
        self.version = reserved.version
        self._root, self._record, self._tag = root, reserved.record, reserved.tag
        self._finished: dict[int, ShardResult] = dict(reserved.record.finished)
        self._error: OSError | None = None
        self._has_news = self._is_over = False
        self._write_seconds = 0.0
        self._changed = threading.Condition()
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="tpuembed-lease", daemon=True)

    def start(self) -> None:
        """Start to renew the record."""
        self._thread.start()

    def stop(self) -> None:
        """Stop to renew the record. Call it again for no effect."""
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join()

    @property
    def record(self) -> StoreRecord:
        """Return the record as it will be written next."""
        with self._changed:
            return dataclasses.replace(self._record, finished=dict(self._finished))

    @property
    def is_taken(self) -> bool:
        """Returns True if this process has noticed that another export took the version."""
        return isinstance(self._error, FileExistsError)

    @property
    def is_gone(self) -> bool:
        """Returns True if the store no longer has a record of the version. Asks the store unless an earlier write
        failed.
        """
        if self._error is None:
            with contextlib.suppress(OSError):
                return self._root.bucket.head(self._root.record_key(self.version)) is None
        return isinstance(self._error, FileNotFoundError)

    def add(self, result: ShardResult) -> None:
        """Record `result`, whose part is in the store.

        Raises:
            ExportError: earlier results could not be written, or the version was taken by another export, or its record
                is gone.
        """
        with self._changed:
            self._finished[result.index] = result
            self._has_news = True
            self._changed.notify()
        with naming_model_dir(self._root.path):
            self._raise_error()

    def update(self, finished: Mapping[int, ShardResult] | None = None, **changes: Any) -> None:
        """Change fields of the record, and write it now.

        Raises:
            OSError: the record cannot be written.
            ExportError: the version was taken by another export, or its record is gone.
        """
        with self._changed:
            self._record = dataclasses.replace(self._record, **changes)
            if finished is not None:
                self._finished = dict(finished)
        self._raise_error()
        self._write()

    def _raise_error(self) -> None:
        if isinstance(self._error, FileExistsError):
            raise ExportError(
                f"MODEL_DIR {self._root.path}: version {self.version}: another export has taken it over, because "
                "this one did not renew its lease for a minute. Export again."
            )
        if isinstance(self._error, FileNotFoundError):
            what = f"its record, {PREFIX}{self.version}/record, was removed meanwhile"
            if isinstance(self._error, MissingBucketError):
                what = str(self._error.strerror)
            raise ExportError(
                f"MODEL_DIR {self._root.path}: version {self.version}: {what}. Nothing is kept. Export again."
            )
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while self._wait():
            try:
                self._write()
            except (OSError, ExportError):  # the next call of add or update raises it
                return

    def _wait(self) -> bool:
        """Wait until it is time to write. Returns False at the end."""
        with self._changed:
            # Writing a record of thousands of shards takes time: spend at most a tenth of this process's time on it.
            pause = min(max(_SECONDS_BETWEEN_WRITES, 10 * self._write_seconds), _SECONDS_BETWEEN_BEATS)
            self._changed.wait_for(lambda: self._is_over, pause)
            self._changed.wait_for(lambda: self._is_over or self._has_news, _SECONDS_BETWEEN_BEATS - pause)
            self._has_news = False
            return not self._is_over

    def _write(self) -> None:
        started = time.monotonic()
        with self._writing:
            with self._changed:
                self._record = dataclasses.replace(self._record, beats=self._record.beats + 1)
            try:
                self._tag = self._root.bucket.replace(
                    self._root.record_key(self.version), self.record.to_bytes(), self._tag
                )
            except OSError as error:
                self._error = error
                self._raise_error()
        self._write_seconds = time.monotonic() - started
