"""Which shards are uploaded together, and what a store takes."""

from pathlib import Path

import pytest

from tests.support.export.fakes import info
from tests.support.export.store_exports import PART_BYTES, plan_of
from tests.support.messages import refused
from tpuembed.errors import ExportError
from tpuembed.export.plan.planner import plan_export
from tpuembed.export.publish.store import parts as parting
from tpuembed.export.publish.store.parts import parts_of
from tpuembed.export.stream.shard import Batch


def size_of(part: Batch) -> int:
    return sum(shard.size for shard in part.shards)


def test_small_shards_are_one_part_and_large_tables_many(prefix: Path, bucket: str) -> None:
    plan = plan_of(prefix)
    for file, parts in parts_of(plan).items():
        (stack,) = (stack for stack in plan.stacks if stack.file == file)
        offset = 0
        for part in parts:
            assert part.shards[0].file_offset == offset
            offset += size_of(part)
        assert offset == stack.size
        assert all(size_of(part) >= PART_BYTES for part in parts[:-1])
    shards = [shard for parts in parts_of(plan).values() for part in parts for shard in part.shards]
    assert shards == list(plan.shards)
    assert max(len(part.shards) for parts in parts_of(plan).values() for part in parts) > 1


@pytest.mark.parametrize("terabytes", [0.1, 1, 5])
def test_plans_of_any_size_keep_the_stores_limits(terabytes: float) -> None:
    """Of Amazon's user guide: 10,000 parts of 5 MiB to 5 GiB, 5 TiB in all."""
    rows = int(terabytes * 2**40) // 256
    plan = plan_export([info("t", rows - 1000, 64), *(info(f"s{i}", 1, 64) for i in range(1000))], workers=1)
    (parts,) = parts_of(plan).values()
    parting.check_sizes(plan)
    assert len(parts) <= 10_000
    assert sum(map(size_of, parts)) == plan.table_bytes
    assert all(5 * 2**20 <= size_of(part) <= 5 * 2**30 for part in parts[:-1])


def test_a_file_that_no_object_can_be_is_refused_by_name() -> None:
    plan = plan_export([info("t", 2**40 // 256 * 6, 64)], workers=1)
    with refused(ExportError, match="stack 'stack_float32_64'"):
        parting.check_sizes(plan)
