"""MODEL_DIR in a bucket, and the record of a version being written: its owner, its uploads, and its finished shards.

The record is one object. It is created only if it does not exist, so it reserves the version. It is replaced only with
the right ETag, so it has one owner at a time. It is removed when the version is published.
"""

import dataclasses
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

from tpuembed.export.publish.version_writer import PREFIX
from tpuembed.export.stream.resume_log import Header
from tpuembed.export.stream.shard import ShardResult
from tpuembed.files import UrlPath
from tpuembed.files.bucket import Bucket

__all__ = ["FORMAT", "Owner", "StoreModelDir", "StoreRecord", "Upload"]

FORMAT: Final = 1
_LIVING = set[str]()
"""Tokens of this process's running exports."""


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Owner:
    """A process that writes a version.

    Attributes:
        token: unique to this export.
        machine: equal for processes that can see each other.
        process, started: process id, and its start time by the machine's clock.
    """

    token: str
    machine: str
    process: int
    started: str

    @classmethod
    def this(cls) -> Self:
        """Return the owner of a new export of this process."""
        token = secrets.token_hex(8)
        _LIVING.add(token)
        return cls(token=token, machine=_machine(), process=os.getpid(), started=_started(os.getpid()))

    def end(self) -> None:
        """Mark this export of this process as ended."""
        _LIVING.discard(self.token)

    @property
    def is_here(self) -> bool:
        """Returns True if the owner's process would be visible to this process while it runs."""
        return bool(self.machine) and self.machine == _machine()

    @property
    def is_gone(self) -> bool:
        """Returns True if the owner was an export of this process or machine, and has ended."""
        if not self.is_here:
            return False
        if self.process == os.getpid() and self.token not in _LIVING:
            return True
        return _started(self.process) != self.started


@dataclasses.dataclass(frozen=True)
class Upload:
    """An upload of a data file."""

    key: str
    id: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreRecord:
    """A version being written.

    Attributes:
        header: identifies the export.
        owner: the process that writes it; None if it was given up.
        uploads: by data file.
        finished: shards by index; each has the ETag of its part.
        beats: a counter that grows with every renewal, to show that the owner is running.
    """

    header: Header
    owner: Owner | None
    uploads: Mapping[str, Upload] = dataclasses.field(default_factory=dict)
    finished: Mapping[int, ShardResult] = dataclasses.field(default_factory=dict)
    beats: int = 0

    @property
    def table_bytes(self) -> int:
        """Return the bytes of the finished shards."""
        return sum(result.bytes for result in self.finished.values())

    def to_bytes(self) -> bytes:
        """Return the content of the object."""
        facts = {**dataclasses.asdict(self), "finished": [vars(result) for result in self.finished.values()]}
        return json.dumps({"format": FORMAT, **facts}).encode()

    @classmethod
    def parse(cls, data: bytes) -> Self | None:
        """Return the record that `to_bytes` wrote, or None if `data` is something else or from another version of
        tpuembed.
        """
        try:
            facts: dict[str, Any] = json.loads(data)
            if facts.pop("format") != FORMAT:
                return None
            results = [ShardResult(**fields) for fields in facts.pop("finished")]
            uploads = {file: Upload(**fields) for file, fields in facts.pop("uploads").items()}
            header, owner = facts.pop("header"), facts.pop("owner")
            return cls(
                header=Header(**header),
                owner=None if owner is None else Owner(**owner),
                uploads=uploads,
                finished={result.index: result for result in results},
                **facts,
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


def _machine() -> str:
    """Return an id of this boot of this machine, and of the container in it; empty if the system does not provide one."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115 - not a path
    except OSError:
        return ""


def _started(process: int) -> str:
    """Return the start time of a process, in ticks since boot; empty if it does not run any more."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
