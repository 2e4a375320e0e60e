"""A whole export that is slow and logs what it reads, to be killed: `python -m tests.e2e.killed_export PREFIX MODEL_DIR CONFIG`."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import tpuembed.export.run as steps
from tests.unit.export.fakes import LoggedReads
from tpuembed.checkpoint import Checkpoint, open_checkpoint
from tpuembed.export import export_saved_model
from tpuembed.export.plan import plan as planner
from tpuembed.export.stream import resume_log as recording
from tpuembed.export.stream.shard import Source

SHARD_BYTES = 64 << 10
READ_SECONDS = 0.1


def open_logged(path: str, **options: Any) -> Checkpoint:
    """The checkpoint at `path`, every read of which is logged beside it."""
    opened: Checkpoint = LoggedReads(open_checkpoint(path, **options), f"{path}.log", READ_SECONDS)
    return opened


def slow_down(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Have exports of this process read slowly, in small shards, and record them soon; `put` sets what decides that."""
    opener = "tests.e2e.killed_export:open_logged"  # workers open the source so
    put(planner, "_SHARD_BYTES", SHARD_BYTES)
    put(recording, "_SECONDS_BETWEEN_FLUSHES", 0.05)
    put(steps, "Source", functools.partial(Source, opener=opener))


def main() -> None:
    slow_down()
    print("started", flush=True)
    report = export_saved_model(sys.argv[1], sys.argv[2], serving_config=sys.argv[3], workers=2)
    print(report.bytes_reused, flush=True)


if __name__ == "__main__":
    main()
