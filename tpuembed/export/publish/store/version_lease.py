"""How an export comes by its version: it goes on with what a killed export of the same left, or reserves a number.

A version in the making is its record, `MODEL_DIR/.staging-<version>/record`. A store has no locks, so its owner is dead where
its process was one of this machine and has ended, or where the record was not renewed for a minute; a living one renews it
every fifteen seconds.
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

__all__ = ["LEASE_SECONDS", "Claim", "Found", "Root", "check_free", "claim", "forget", "look"]

LEASE_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 2.0
_RESERVATION: Final = re.compile(re.escape(PREFIX) + r"(\d{1,19})", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Root:
    """MODEL_DIR in a bucket."""

    path: UrlPath
    bucket: Bucket

    def key(self, name: str) -> str:
        """Of an object below it."""
        return (self.path / name).key

    def record_key(self, version: int) -> str:
        """Of the record of a version in the making."""
        return self.key(f"{PREFIX}{version}/record")

    @property
    def prefix(self) -> str:
        """With which the keys of all objects below it begin."""
        return f"{self.path.key}/" if self.path.key else ""

    def names(self) -> list[str]:
        """What is right below it."""
        return self.bucket.children(self.prefix)

    def remove_version(self, version: int) -> None:
        """Remove what is written of a version; first what makes it one."""
        keys = self.bucket.keys(self.key(str(version)) + "/")
        self.bucket.delete(sorted(keys, key=lambda key: not key.endswith("/saved_model.pb")))

    def is_version(self, version: int) -> bool:
        """Whether it is complete."""
        return self.bucket.head(self.key(f"{version}/saved_model.pb")) is not None


@dataclasses.dataclass(frozen=True)
class Claim:
    """A version that is this export's alone to write, and the record of it."""

    version: int
    record: StoreRecord
    tag: str


@dataclasses.dataclass(frozen=True)
class StoreUnfinished:
    """A version in the making, as it was when it was looked at."""

    root: Root
    version: int
    stored: Stored
    is_published: bool = False
    """Whether the version is there: its export was killed between its last object and the end."""

    @functools.cached_property
    def record(self) -> StoreRecord | None:
        """What is known of it."""
        return StoreRecord.parse(self.stored.data)

    @property
    def is_dead(self) -> bool:
        """Whether nobody writes it."""
        owner = self.record.owner if self.record else None
        if self.record and (owner is None or owner.is_gone):
            return True
        return self.stored.age_seconds > LEASE_SECONDS and not (owner and owner.is_here)

    def is_resumable(self, header: Header) -> bool:
        """Whether the export of `header` may go on with it, once it is dead."""
        return self.record is not None and self.record.header == header and not self.is_published

    @property
    def finished(self) -> int:
        """How many shards are."""
        return len(self.record.finished) if self.record else 0

    def is_litter(self, header: Header | None) -> bool:
        """Whether nobody will resume it, as the export of `header` can tell, once it is dead."""
        if self.is_published or self.stored.age_seconds > MAX_AGE_SECONDS:
            return True
        its = self.record.header if self.record else None
        if its is None:
            return self.record is not None
        return header is not None and its.source == header.source and its.fingerprint != header.fingerprint

    def __str__(self) -> str:
        """As messages name it."""
        shown = self.root.path / f"{PREFIX}{self.version}"
        if self.record is None or self.record.header is None:
            return str(shown)
        total = self.record.header.table_bytes
        done = format_bytes(self.record.table_bytes)
        return f"{shown} ({done} of {format_bytes(total)}, from {self.record.header.source})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What lies in MODEL_DIR.

    Attributes:
        versions: that servers see.
        unfinished: versions in the making.
    """

    versions: frozenset[int]
    unfinished: tuple[StoreUnfinished, ...]

    @property
    def free(self) -> int:
        """The next version that nobody has or makes."""
        return max((*self.versions, *(one.version for one in self.unfinished)), default=0) + 1


def look(root: Root) -> Found:
    """What there is now."""
    names = root.names()
    versions = frozenset(versions_among(names))
    reserved = [int(match[1]) for name in names if (match := _RESERVATION.fullmatch(name))]
    return Found(versions=versions, unfinished=tuple(_unfinished(root, reserved, versions)))


def _unfinished(root: Root, reserved: Sequence[int], versions: Set[int]) -> Iterator[StoreUnfinished]:
    for version in reserved:
        stored = root.bucket.get(root.record_key(version))
        if stored is not None:
            yield StoreUnfinished(root, version, stored, version in versions and root.is_version(version))


def check_free(root: Root, version: int | None, found: Found) -> None:
    """Raise ExportError where `version` exists; None is always free. ConfigError where it is no positive integer."""
    check_version(version)
    if version in found.versions and version not in {one.version for one in found.unfinished if not one.is_published}:
        raise ExportError(f"MODEL_DIR {root.path}: version {version} exists; choose another one, {found.free} is free")


def claim(root: Root, version: int | None, header: Header | None, *, restart: bool) -> tuple[Claim, tuple[str, ...]]:
    """A version to write, and what other exports have left; what nobody can go on with is removed.

    Raises:
        ExportError: `version` exists, or another export has it; or the store knows no conditional writes.
    """
    found = look(root)
    check_free(root, version, found)
    same = [one for one in found.unfinished if header and one.is_resumable(header) and version in (None, one.version)]
    mine = sorted((one for one in map(_settled, same) if one.is_dead), key=lambda one: one.finished)
    others = [one for one in found.unfinished if one.is_dead and one not in mine and one not in same]
    resumable = None if restart or not mine else mine.pop()
    litter = [one for one in others if one.is_litter(header)]
    for one in (*mine, *litter):
        _remove(one)
    kept = tuple(str(one) for one in others if one not in litter)
    taken = None if resumable is None else _take(resumable)
    if taken is not None and version is None:
        _warn_below(root, taken.version, found)
    return taken or _reserve(root, version, header), kept


def _warn_below(root: Root, version: int, found: Found) -> None:
    newest = max(found.versions, default=0)
    if version < newest:
        warnings.warn(
            f"MODEL_DIR {root.path}: a killed export is gone on with as version {version}, and version {newest} exists: servers "
            f"of the newest version will not serve it; for version {found.free}, begin anew with --restart (resume=False)",
            stacklevel=2,
        )


def _settled(unfinished: StoreUnfinished) -> StoreUnfinished:
    """It, when it is known whether it lives: the same export was perhaps killed a moment ago, on another machine."""
    owner = unfinished.record.owner if unfinished.record else None
    if unfinished.is_dead or (owner and owner.is_here):
        return unfinished
    warnings.warn(
        f"MODEL_DIR {unfinished.root.path}: version {unfinished.version}: the same export may still run on another machine; "
        f"waiting {LEASE_SECONDS:.0f} seconds at most to see whether it does",
        stacklevel=2,
    )
    while not unfinished.is_dead:
        time.sleep(_LOOK_SECONDS)
        stored = unfinished.root.bucket.get(unfinished.root.record_key(unfinished.version))
        if stored is None or stored.tag != unfinished.stored.tag:
            return unfinished  # which does not look dead
        unfinished = dataclasses.replace(unfinished, stored=stored)
    return unfinished


def _take(unfinished: StoreUnfinished) -> Claim | None:
    """The version, with another owner; None where somebody else was faster."""
    assert unfinished.record
    record = dataclasses.replace(unfinished.record, owner=Owner.this())
    key, tag = unfinished.root.record_key(unfinished.version), unfinished.stored.tag
    try:
        return Claim(unfinished.version, record, unfinished.root.bucket.replace(key, record.to_bytes(), tag))
    except (FileExistsError, FileNotFoundError):
        return None


def _remove(unfinished: StoreUnfinished) -> None:
    """Forget a version in the making, of which nobody else knows by now that it is dead."""
    root, version = unfinished.root, unfinished.version
    if unfinished.record is not None and _take(unfinished) is None:
        return
    forget(root, version, unfinished.record)


def forget(root: Root, version: int, record: StoreRecord | None) -> None:
    """Remove all of a version in the making but what is complete, and at last its reservation."""
    if not root.is_version(version):
        root.remove_version(version)
    uploads = [(upload.key, upload.id) for upload in record.uploads.values()] if record else []
    for key, upload in {*uploads, *root.bucket.uploads(root.key(str(version)) + "/")}:
        root.bucket.abort_upload(key, upload)
    root.bucket.delete([root.record_key(version)])


def _reserve(root: Root, version: int | None, header: Header | None) -> Claim:
    while True:
        found = look(root)
        check_free(root, version, found)
        number = version or found.free
        if number > MAX_VERSION:
            raise ExportError(f"MODEL_DIR {root.path}: it has version {MAX_VERSION}, the last one; export elsewhere")
        record = StoreRecord(header=header, owner=Owner.this())
        try:
            tag = root.bucket.create(root.record_key(number), record.to_bytes())
        except FileExistsError:
            if version is None:
                continue
            raise _is_taken(root, version, found) from None
        _check_conditions(root, number, record)
        if not root.bucket.keys(root.key(str(number)) + "/"):
            return Claim(number, record, tag)
        root.bucket.delete([root.record_key(number)])  # it was committed a moment ago


def _check_conditions(root: Root, version: int, record: StoreRecord) -> None:
    """Raise ExportError where the store writes over what is there though it is told not to."""
    probe = dataclasses.replace(record, owner=Owner.this(), beats=-1)
    try:
        root.bucket.create(root.record_key(version), probe.to_bytes())
    except FileExistsError:
        return
    root.bucket.delete([root.record_key(version)])
    raise ExportError(
        f"MODEL_DIR {root.path}: the store ignores If-None-Match, so that two exports could write one version; "
        "export to a disk and copy the version, saved_model.pb last"
    )


def _is_taken(root: Root, version: int, found: Found) -> ExportError:
    """The error of a version that another export has reserved."""
    one = next((one for one in found.unfinished if one.version == version), None)
    state = f"an unfinished export holds it: {one}" if one and one.is_dead else "another export is writing it"
    return ExportError(
        f"MODEL_DIR {root.path}: version {version}: {state}; choose another version, {max(found.free, version + 1)} is free"
    )
