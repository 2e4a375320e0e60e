"""Exports that are slow and log what they read."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

import tpuembed.export.run as steps
from tests.support.export.fakes import LoggedReads
from tpuembed.checkpoint import Checkpoint, open_checkpoint
from tpuembed.export.plan import planner
from tpuembed.export.plan.plan import ExportPlan
from tpuembed.export.plan.planner import plan_export
from tpuembed.export.stream import resume_log as recording
from tpuembed.export.stream.shard import Source

SHARD_BYTES = 64 << 10
READ_SECONDS = 0.1


def open_logged(path: str, **options: Any) -> Checkpoint:
    """The checkpoint at `path`, every read of which is logged beside it."""
    return cast("Checkpoint", LoggedReads(open_checkpoint(path, **options), f"{path}.log", READ_SECONDS))


def slow_down(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Have exports of this process read slowly, in small shards, and record them soon; `put` sets what decides that."""
    opener = "tests.support.export.killed_export:open_logged"  # workers open the source so
    put(planner, "_SHARD_BYTES", SHARD_BYTES)
    put(recording, "_SECONDS_BETWEEN_FLUSHES", 0.05)
    put(steps, "Source", functools.partial(Source, opener=opener))


def plan_of(prefix: Path) -> ExportPlan:
    """Small shards of one chunk each."""
    from tests.support.export.fakes import FakeCheckpoint
    from tpuembed.export.plan import planner

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "_SHARD_BYTES", 6_000)
        tables = FakeCheckpoint(str(prefix)).tables().values()
        return plan_export(list(tables), workers=3, max_memory_bytes=3 * 40_000)


def recorded_shards(model_dir: Path) -> dict[int, int]:
    """Index -> how often it is recorded, of all staging folders; a last line that was cut short is none."""
    counts: dict[int, int] = {}
    for record in model_dir.glob(".staging-*/tables/record"):
        whole, _, _ = record.read_bytes().rpartition(b"\n")
        for line in whole.split(b"\n")[1:]:
            index = json.loads(line[9:])["index"]
            counts[index] = counts.get(index, 0) + 1
    return counts
