"""MODEL_DIR in a bucket: its versions, and the lock that an export holds while it commits one.

The lock of a version is the object `MODEL_DIR/.staging-<version>`. It is created only if it does not exist, so of two commits
at once one fails. A commit that is killed leaves its lock. The next export of that version sees the lock when it begins. If it
is unchanged when that export commits, nobody else is committing any more, and the export takes the lock over.
"""

import dataclasses
import re
import secrets
from typing import Final

from tpuembed.errors import ExportError
from tpuembed.export.publish.version_writer import MAX_VERSION, PREFIX, check_version, versions_among
from tpuembed.files import MissingBucketError, UrlPath
from tpuembed.files.bucket import Bucket

__all__ = ["StoreModelDir", "StoreVersions"]

_LOCK: Final = re.compile(re.escape(PREFIX) + r"(\d{1,19})", re.ASCII)
_PROBE: Final = f"{PREFIX}probe"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreVersions:
    """What MODEL_DIR has.

    Attributes:
        versions: the versions that exist. A commit that was killed, or still runs, has made none.
        locks: version -> the ETag of its lock.
    """

    versions: frozenset[int]
    locks: dict[int, str]


@dataclasses.dataclass(frozen=True)
class StoreModelDir:
    """MODEL_DIR in a bucket."""

    path: UrlPath
    bucket: Bucket

    def key(self, name: str) -> str:
        """Return the key of the object `name` below it."""
        return (self.path / name).key

    def lock_key(self, version: int) -> str:
        """Return the key of the lock of a version."""
        return self.key(f"{PREFIX}{version}")

    def is_version(self, version: int) -> bool:
        """Returns True if the version is complete."""
        return self.bucket.head(self.key(f"{version}/saved_model.pb")) is not None

    def versions(self) -> StoreVersions:
        """List the versions and the locks that exist now."""
        names = self.bucket.children(f"{self.path.key}/" if self.path.key else "")
        locks = {}
        for version in (int(match[1]) for match in map(_LOCK.fullmatch, names) if match):
            lock = self.bucket.head(self.lock_key(version))
            if lock is not None:
                locks[version] = lock.tag
        # A folder without a lock may be another program's, which is copying a version. It counts, so that nobody writes there.
        versions = {version for version in versions_among(names) if version not in locks or self.is_version(version)}
        return StoreVersions(versions=frozenset(versions), locks=locks)

    def choose(self, version: int | None, found: StoreVersions) -> int:
        """Return `version`, or the next free one for None.

        Raises:
            ConfigError: it is not a positive integer that a server can read.
            ExportError: it exists, or there is no higher number.
        """
        check_version(version)
        free = max(found.versions, default=0) + 1
        if version in found.versions:
            raise ExportError(f"MODEL_DIR {self.path}: version {version} exists. Choose another one, such as {free}.")
        if version is None and free > MAX_VERSION:
            raise ExportError(
                f"MODEL_DIR {self.path}: it has version {MAX_VERSION}, the highest possible one. Export to another "
                "MODEL_DIR."
            )
        return version or free

    def check_conditions(self) -> None:
        """Raise ExportError if the store ignores the condition not to replace an object. Then a lock would lock nothing."""
        key = self.key(_PROBE)
        try:
            for _ in range(3):  # a third time, because another export may remove the object between two of them
                self.bucket.create(key, _token())
        except FileExistsError:
            return
        finally:
            self.bucket.delete([key])
        raise ExportError(
            f"MODEL_DIR {self.path}: the store ignores If-None-Match, so two exports could write the same version. "
            "Export to a disk and copy the version, saved_model.pb last."
        )

    def lock(self, version: int, seen: str | None) -> str:
        """Lock a version, and return the lock's ETag.

        Args:
            version: its number.
            seen: the ETag of the lock when this export began; None if there was none. Such a lock is taken over.

        Raises:
            ExportError: another export has begun to commit the version since.
        """
        try:
            try:
                return self.bucket.create(self.lock_key(version), _token())
            except FileExistsError:
                if seen is None:
                    raise
                return self.bucket.replace(self.lock_key(version), _token(), seen)
        except MissingBucketError:
            raise
        except (FileExistsError, FileNotFoundError):
            raise ExportError(
                f"MODEL_DIR {self.path}: version {version}: another export is publishing it now. Export again."
            ) from None

    def has_lock(self, version: int, tag: str) -> bool:
        """Returns True if the lock of a version still has the ETag `tag`."""
        lock = self.bucket.head(self.lock_key(version))
        return lock is not None and lock.tag == tag


def _token() -> bytes:
    """Return bytes that no other export writes, so that each lock has an ETag of its own."""
    return secrets.token_hex(16).encode()
