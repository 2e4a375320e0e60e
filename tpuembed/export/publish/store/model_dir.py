"""MODEL_DIR in a bucket: its versions, and the lock that an export holds while it writes one.

The lock of a version is the object `MODEL_DIR/.staging-<version>`. It is created only if it does not exist, so one export writes a
version. An export that is killed leaves its lock, and the next one takes the next number.
"""

import dataclasses
import re
import secrets
from typing import Final

from tpuembed.errors import ExportError
from tpuembed.export.publish.version_writer import MAX_VERSION, PREFIX, check_version, versions_among
from tpuembed.files import UrlPath
from tpuembed.files.bucket import Bucket

__all__ = ["StoreModelDir"]

_LOCK: Final = re.compile(re.escape(PREFIX) + r"(\d{1,19})", re.ASCII)
_PROBE: Final = f"{PREFIX}probe"


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

    def choose(self, version: int | None) -> int:
        """Return `version`, or the next free one for None. Locked versions are not free.

        Raises:
            ConfigError: it is not a positive integer that a server can read.
            ExportError: it exists or is locked, or there is no higher number.
        """
        check_version(version)
        names = self.bucket.children(f"{self.path.key}/" if self.path.key else "")
        locked = {int(match[1]) for match in map(_LOCK.fullmatch, names) if match}
        versions = versions_among(names) | locked
        free = max(versions, default=0) + 1
        if version in locked:
            raise ExportError(
                f"MODEL_DIR {self.path}: version {version}: an export is writing it, or was killed while it did. If none runs, "
                f"delete {PREFIX}{version} and what is below {version}/, or choose another version, such as {free}."
            )
        if version in versions:
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

    def lock(self, version: int | None) -> tuple[int, str]:
        """Lock `version`, or the next free one for None, and return it with the lock's ETag. Raises as `choose`."""
        while True:
            number = self.choose(version)
            try:
                tag = self.bucket.create(self.lock_key(number), _token())
            except FileExistsError:  # another export was faster; if it wrote this version, `choose` says so
                continue
            if not self.bucket.keys(self.key(str(number)) + "/"):
                return number, tag
            self.bucket.delete([self.lock_key(number)])  # it was complete before the lock was there

    def has_lock(self, version: int, tag: str) -> bool:
        """Returns True if the lock of a version still has the ETag `tag`."""
        lock = self.bucket.head(self.lock_key(version))
        return lock is not None and lock.tag == tag


def _token() -> bytes:
    """Return bytes that no other export writes, so that each lock has an ETag of its own."""
    return secrets.token_hex(16).encode()
