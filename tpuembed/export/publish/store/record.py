"""What is known of a version in the making, in one object: who writes it, its uploads, and its finished shards.

The object is made only where none is, and so reserves the version; it is replaced only by whoever knows its ETag, and so has
one owner at a time; it is removed when the version is there.
"""

import dataclasses
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

from tpuembed.export.stream.resume_log import Header
from tpuembed.export.stream.shard import ShardResult

__all__ = ["FORMAT", "Owner", "StoreRecord", "Upload"]

FORMAT: Final = 1
_LIVING = set[str]()
"""Tokens of this process's exports that are under way."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Owner:
    """A process that writes a version.

    Attributes:
        token: of this export alone.
        machine: equal for processes that see each other.
        process, started: its number, and when it began, as the machine counts.
    """

    token: str
    machine: str
    process: int
    started: str

    @classmethod
    def this(cls) -> Self:
        """A new export of this process."""
        token = secrets.token_hex(8)
        _LIVING.add(token)
        return cls(token=token, machine=_machine(), process=os.getpid(), started=_started(os.getpid()))

    def end(self) -> None:
        """This export of this process is over."""
        _LIVING.discard(self.token)

    @property
    def is_here(self) -> bool:
        """Whether it is, or was, a process that this one would see."""
        return bool(self.machine) and self.machine == _machine()

    @property
    def is_gone(self) -> bool:
        """Whether it was an export of this process, or a process of this machine, that has ended."""
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
    """A version in the making.

    Attributes:
        header: of what is exported; None where nobody can go on with it.
        owner: who writes it; None where it was given up.
        uploads: by data file.
        finished: shards by index; each has the ETag of its part.
        beats: grows with time, so that an owner who has nothing to say is seen to live.
    """

    header: Header | None
    owner: Owner | None
    uploads: Mapping[str, Upload] = dataclasses.field(default_factory=dict)
    finished: Mapping[int, ShardResult] = dataclasses.field(default_factory=dict)
    beats: int = 0

    @property
    def table_bytes(self) -> int:
        """Bytes of the finished shards."""
        return sum(result.bytes for result in self.finished.values())

    def to_bytes(self) -> bytes:
        """As the object has it."""
        facts = {**dataclasses.asdict(self), "finished": [vars(result) for result in self.finished.values()]}
        return json.dumps({"format": FORMAT, **facts}).encode()

    @classmethod
    def parse(cls, data: bytes) -> Self | None:
        """What `to_bytes` wrote; None where another version of tpuembed wrote it, or nobody."""
        try:
            facts: dict[str, Any] = json.loads(data)
            if facts.pop("format") != FORMAT:
                return None
            results = [ShardResult(**fields) for fields in facts.pop("finished")]
            uploads = {file: Upload(**fields) for file, fields in facts.pop("uploads").items()}
            header, owner = facts.pop("header"), facts.pop("owner")
            return cls(
                header=None if header is None else Header(**header),
                owner=None if owner is None else Owner(**owner),
                uploads=uploads,
                finished={result.index: result for result in results},
                **facts,
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


def _machine() -> str:
    """This start of this machine, and of it the container; empty where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115 - it is no path
    except OSError:
        return ""


def _started(process: int) -> str:
    """When a process began, in ticks since the machine did; empty where there is none, or only what is left of one."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
