"""Checkpoints that have their process take no more memory than a plan promised; worker processes import this module."""

import ctypes
import json
import resource
import sys
from pathlib import Path

from tpuembed.checkpoint import Checkpoint, open_checkpoint
from tpuembed.export.stream import worker
from tpuembed.export.stream.shard import Source

SLACK_BYTES = 768 << 10
"""For the interpreter's own objects."""

EXACT_ALLOCATION = {"PYTHONMALLOC": "malloc", "MALLOC_MMAP_THRESHOLD_": str(64 << 10)}
"""Environment of a worker that takes what it needs, and gives back what it no longer needs.

CPython takes memory for small objects in arenas of 1 MiB. Whether a worker needs one more depends on how full the last one
is when the limit is set. Without this, shifting that by 90 KiB made a worker need 1 MiB more.
"""


def open_limited(path: str, budget: int, log: str) -> Checkpoint:
    """Open `path` in a worker process that may have `budget` bytes of data beside what it has then: imports and metadata.

    RLIMIT_DATA bounds private writable memory, whether it is touched or not; what asks for more gets a MemoryError.
    """
    if sys.modules["__main__"].__spec__ is None or sys.modules["__main__"].__spec__.name != worker.__name__:
        return open_checkpoint(path)  # the exporter itself, which has a look at it in the end
    checkpoint = open_checkpoint(path)
    ctypes.CDLL(None).malloc_trim(0)
    data = _data_bytes()
    limit = data + budget + SLACK_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with open(log, "a") as file:
        file.write(f"{limit}\n")
    return checkpoint


def _data_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData:"))


def limited_source(checkpoint: Checkpoint, budget: int, log: Path) -> Source:
    """`checkpoint` as workers of `budget` bytes each open it; every one of them adds a line to `log`."""
    return Source(
        path=checkpoint.path,
        fingerprint=checkpoint.fingerprint(),
        options=json.dumps({"budget": budget, "log": str(log)}),
        opener=f"{__name__}:{open_limited.__name__}",
    )
