"""Reserves the version of an export: resumes what an interrupted run of the same export left, or reserves a new number.

A version being written has a record, `MODEL_DIR/.staging-<version>/record`. A store has no locks. A running owner
renews its record every fifteen seconds. The owner counts as dead if its process ran on this machine and has ended, or
if the record was not renewed for a minute.
"""

import dataclasses
import functools
import re
import time
import warnings
from collections.abc import Iterator, Sequence, Set
from typing import Final

from tpuembed.errors import ExportError
from tpuembed.export.formatting import format_bytes
from tpuembed.export.publish.folder import MAX_VERSION, check_version, versions_among
from tpuembed.export.publish.store.record import Owner, StoreRecord
from tpuembed.export.publish.unfinished import MAX_AGE_SECONDS, PREFIX
from tpuembed.export.stream.resume_log import Header
from tpuembed.files import UrlPath
from tpuembed.files.bucket import Bucket, Stored

__all__ = [
    "LEASE_SECONDS",
    "StoreModelDir",
    "StoreVersions",
    "VersionReservation",
    "check_free",
    "list_versions",
    "remove_unfinished",
    "reserve_version",
]

LEASE_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 2.0
_RESERVATION: Final = re.compile(re.escape(PREFIX) + r"(\d{1,19})", re.ASCII)


@dataclasses.dataclass(frozen=True)
class StoreModelDir:
    """MODEL_DIR in a bucket."""

    path: UrlPath
    bucket: Bucket

    def key(self, name: str) -> str:
        """Return the key of the object `name` below it."""
        return (self.path / name).key

    def record_key(self, version: int) -> str:
        """Return the key of the record of a version being written."""
        return self.key(f"{PREFIX}{version}/record")

    @property
    def prefix(self) -> str:
        """Return the prefix of the keys of all objects below it."""
        return f"{self.path.key}/" if self.path.key else ""

    def names(self) -> list[str]:
        """Return the names directly below it."""
        return self.bucket.children(self.prefix)

    def remove_version(self, version: int) -> None:
        """Remove the objects of a version, saved_model.pb first."""
        keys = self.bucket.keys(self.key(str(version)) + "/")
        self.bucket.delete(sorted(keys, key=lambda key: not key.endswith("/saved_model.pb")))

    def is_version(self, version: int) -> bool:
        """Returns True if the version is complete."""
        return self.bucket.head(self.key(f"{version}/saved_model.pb")) is not None


@dataclasses.dataclass(frozen=True)
class VersionReservation:
    """A version that only this export may write, and its record."""

    version: int
    record: StoreRecord
    tag: str


@dataclasses.dataclass(frozen=True)
class StoreUnfinished:
    """A version being written, as it was when it was listed."""

    root: StoreModelDir
    version: int
    stored: Stored
    is_published: bool = False
    """True if the version is complete: its export was killed after its last object and before the end."""

    @functools.cached_property
    def record(self) -> StoreRecord | None:
        """Return the record, or None if it cannot be parsed."""
        return StoreRecord.parse(self.stored.data)

    @property
    def is_dead(self) -> bool:
        """Returns True if no process writes it."""
        owner = self.record.owner if self.record else None
        if self.record and (owner is None or owner.is_gone):
            return True
        return self.stored.age_seconds > LEASE_SECONDS and not (owner and owner.is_here)

    def is_resumable(self, header: Header) -> bool:
        """Returns True if the export of `header` may resume it, once it is dead."""
        return self.record is not None and self.record.header == header and not self.is_published

    @property
    def finished(self) -> int:
        """Return the number of finished shards."""
        return len(self.record.finished) if self.record else 0

    def is_stale(self, header: Header | None) -> bool:
        """Returns True if no later run can resume it, as far as the export of `header` can tell, once it is dead."""
        if self.is_published or self.stored.age_seconds > MAX_AGE_SECONDS:
            return True
        its = self.record.header if self.record else None
        if its is None:
            return self.record is not None
        return header is not None and its.source == header.source and its.fingerprint != header.fingerprint

    def __str__(self) -> str:
        """Return the name of it in messages."""
        shown = self.root.path / f"{PREFIX}{self.version}"
        if self.record is None or self.record.header is None:
            return str(shown)
        total = self.record.header.table_bytes
        done = format_bytes(self.record.table_bytes)
        return f"{shown} ({done} of {format_bytes(total)}, from {self.record.header.source})"


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
    versions = frozenset(versions_among(names))
    reserved = [int(match[1]) for name in names if (match := _RESERVATION.fullmatch(name))]
    return StoreVersions(versions=versions, unfinished=tuple(_unfinished(root, reserved, versions)))


def _unfinished(root: StoreModelDir, reserved: Sequence[int], versions: Set[int]) -> Iterator[StoreUnfinished]:
    for version in reserved:
        stored = root.bucket.get(root.record_key(version))
        if stored is not None:
            yield StoreUnfinished(root, version, stored, version in versions and root.is_version(version))


def check_free(root: StoreModelDir, version: int | None, found: StoreVersions) -> None:
    """Raise ExportError if `version` exists; None is always free. Raise ConfigError if it is not a positive integer."""
    check_version(version)
    if version in found.versions and version not in {one.version for one in found.unfinished if not one.is_published}:
        raise ExportError(f"MODEL_DIR {root.path}: version {version} exists. Choose another one, such as {found.free}.")


def reserve_version(
    root: StoreModelDir, version: int | None, header: Header | None, *, restart: bool
) -> tuple[VersionReservation, tuple[str, ...]]:
    """Reserve a version to write. Return it with the names of other unfinished exports. Stale versions are removed.

    Raises:
        ExportError: `version` exists, or another export has reserved it, or the store does not support conditional
            writes.
    """
    found = list_versions(root)
    check_free(root, version, found)
    same = [one for one in found.unfinished if header and one.is_resumable(header) and version in (None, one.version)]
    mine = sorted((one for one in map(_wait_until_certain, same) if one.is_dead), key=lambda one: one.finished)
    others = [one for one in found.unfinished if one.is_dead and one not in mine and one not in same]
    resumable = None if restart or not mine else mine.pop()
    stale = [one for one in others if one.is_stale(header)]
    for one in (*mine, *stale):
        _remove(one)
    kept = tuple(str(one) for one in others if one not in stale)
    taken = None if resumable is None else _take_over(resumable)
    if taken is not None and version is None:
        _warn_below(root, taken.version, found)
    return taken or _reserve(root, version, header), kept


def _warn_below(root: StoreModelDir, version: int, found: StoreVersions) -> None:
    newest = max(found.versions, default=0)
    if version < newest:
        warnings.warn(
            f"MODEL_DIR {root.path}: resuming an interrupted export as version {version}. Version {newest} "
            f"already exists, so servers that load only the newest version will not load version {version}. To "
            f"export version {found.free} instead, start over with --restart (resume=False).",
            stacklevel=2,
        )


def _wait_until_certain(unfinished: StoreUnfinished) -> StoreUnfinished:
    """Wait until it is certain whether the same export still runs, for example on another machine. Return its latest
    state.
    """
    owner = unfinished.record.owner if unfinished.record else None
    if unfinished.is_dead or (owner and owner.is_here):
        return unfinished
    warnings.warn(
        f"MODEL_DIR {unfinished.root.path}: version {unfinished.version}: the same export may still run on "
        f"another machine. Waiting up to {LEASE_SECONDS:.0f} seconds to find out.",
        stacklevel=2,
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


def _remove(unfinished: StoreUnfinished) -> None:
    """Remove a dead version, unless another process has taken it over."""
    root, version = unfinished.root, unfinished.version
    if unfinished.record is not None and _take_over(unfinished) is None:
        return
    remove_unfinished(root, version, unfinished.record)


def remove_unfinished(root: StoreModelDir, version: int, record: StoreRecord | None) -> None:
    """Remove what an unfinished version consists of, its reservation last. A complete version is kept."""
    if not root.is_version(version):
        root.remove_version(version)
    uploads = [(upload.key, upload.id) for upload in record.uploads.values()] if record else []
    for key, upload in {*uploads, *root.bucket.uploads(root.key(str(version)) + "/")}:
        root.bucket.abort_upload(key, upload)
    root.bucket.delete([root.record_key(version)])


def _reserve(root: StoreModelDir, version: int | None, header: Header | None) -> VersionReservation:
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
