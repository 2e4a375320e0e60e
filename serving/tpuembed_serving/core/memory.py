"""Finds how much memory a process may use: the machine's, or less if a control group limits it."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["MemoryLimit", "memory_limit", "own_bytes"]

_ROOT: Final = Path("/sys/fs/cgroup")
_OWN_GROUP: Final = Path("/proc/self/cgroup")


class MemoryLimit(NamedTuple):
    """A limit in bytes, and what sets it."""

    size: int
    source: str


def memory_limit(own_group: Path = _OWN_GROUP, root: Path = _ROOT) -> MemoryLimit | None:
    """Return the least limit that applies to this process, or None if none is known. See cgroups(7)."""
    limits = [MemoryLimit(size, "the control group (container)") for size in _group_limits(own_group, root)]
    with contextlib.suppress(ValueError, OSError):
        limits.append(MemoryLimit(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "the machine"))
    return min((limit for limit in reversed(limits) if limit.size > 0), key=lambda limit: limit.size, default=None)


def own_bytes() -> int:
    """Return the memory of this process that is not of files. See proc_pid_statm(5)."""
    try:
        _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text(encoding="ascii").split())
    except OSError:  # not Linux
        return 0
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def _group_limits(own_group: Path, root: Path) -> Iterator[int]:
    """Yield the limits of this process's group and of the groups that contain it, of both versions of cgroups."""
    try:
        lines = own_group.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, file = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        group = base / name.lstrip("/")
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                yield int((folder / file).read_text(encoding="ascii"))
            if folder == base:
                break
