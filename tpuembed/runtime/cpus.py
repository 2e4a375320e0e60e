"""Counts the processors that this process may use."""

import math
import os
from pathlib import Path

__all__ = ["available_cpus"]

_CGROUP = Path("/sys/fs/cgroup")


def available_cpus() -> int:
    """Return the number of processors: of the machine, of the process's affinity, or of the container's limit, the least.

    A part of a processor counts as one. The limit of a container is that of its control group (`docker run --cpus`,
    `resources.limits.cpu` of Kubernetes), of version 1 or 2.
    """
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = _limit(_CGROUP / "cpu.max") or _limit(_CGROUP / "cpu/cpu.cfs_quota_us", _CGROUP / "cpu/cpu.cfs_period_us")
    return max(1, min(processors, math.ceil(limit))) if limit else processors


def _limit(*files: Path) -> float | None:
    """Return the quota over the period that the files hold, or None where there is no limit."""
    try:
        quota, period = " ".join(path.read_text() for path in files).split()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):  # no such control group, or "max"
        return None
