"""Metrics of processes, under the names of every Prometheus client, and of their memory's limit. Only Linux has them."""

import contextlib
from pathlib import Path
from typing import Final

from prometheus_client import ProcessCollector

from tpuembed_serving.core.memory import memory_limit
from tpuembed_serving.telemetry.metric_types import Family, Snapshot

__all__ = ["process_snapshot"]

_FAMILIES: Final = {
    family.name: family
    for family in (
        Family("process_cpu_seconds_total", "counter", "Processor seconds of all processes of the server"),
        Family("process_resident_memory_bytes", "gauge", "Resident memory of all processes of the server"),
        Family("process_open_fds", "gauge", "Open files of all processes of the server"),
        Family("process_max_fds", "gauge", "The least limit of open files among the processes", least=True),
        Family("process_start_time_seconds", "gauge", "When the first process started, since 1970", least=True),
    )
}
_ANONYMOUS: Final = Family(
    ":tpuembed:serving:anonymous_memory_bytes", "gauge", "Memory of all processes without what they map from files"
)
_LIMIT: Final = Family(
    ":tpuembed:serving:memory_limit_bytes",
    "gauge",
    "The memory that the control group or the machine allows",
    least=True,
)


def process_snapshot(pid: int) -> Snapshot:
    """Return the metrics of a process of this user. Those that the system does not tell are left out."""
    found: dict[Family, float] = {}
    for metric in ProcessCollector(registry=None, pid=lambda: pid).collect():
        for sample in metric.samples:
            if sample.name in _FAMILIES:
                found[_FAMILIES[sample.name]] = sample.value
    with contextlib.suppress(OSError):  # it has exited, or this is not Linux
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("RssAnon:"):
                found[_ANONYMOUS] = int(line.split()[1]) * 1024
    limit = memory_limit()
    if limit is not None:
        found[_LIMIT] = limit.size
    return {family: {(family.name, ()): (value,)} for family, value in found.items()}
