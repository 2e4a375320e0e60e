"""The planner: every row once, in its place, within the budget."""

import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.export.fakes import info
from tests.support.messages import refused
from tpuembed.checkpoint import TableInfo
from tpuembed.errors import ConfigError
from tpuembed.export.plan import planner
from tpuembed.export.plan.plan import ExportPlan, ShardTask
from tpuembed.export.plan.planner import plan_export
from tpuembed.export.stream.resume_log import Header
from tpuembed.export.stream.shard import Source

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
DTYPES = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


def plan(*tables: TableInfo, **options: Any) -> ExportPlan:
    return plan_export(tables, **options)


def key_of(made: ExportPlan, source: Source) -> str:
    return Header.of(made, source).key


def buffers(task: ShardTask) -> int:
    """Bytes one worker holds for `task`: a float32 chunk, and one of the source's dtype where that differs."""
    source = 0 if task.source_dtype == "float32" else ITEM_BYTES[task.source_dtype]
    return task.chunk_rows * task.dim * (4 + source)


def test_tables_of_one_width_share_a_stack_in_the_order_of_their_names() -> None:
    made = plan(info("users", 5, 8), info("ads", 3, 4), info("movies", 7, 8), info("clips", 2, 8))
    assert [(s.name, s.dim, s.rows, s.size) for s in made.stacks] == [
        ("stack_float32_4", 4, 3, 48),
        ("stack_float32_8", 8, 14, 448),
    ]
    assert [(t.table, t.row_offset, t.rows) for t in made.stacks[1].tables] == [
        ("clips", 0, 2),
        ("movies", 2, 7),
        ("users", 9, 5),
    ]
    assert made.table_bytes == 496
    assert [(t.table, t.file, t.file_offset, t.size) for t in made.shards] == [
        ("ads", "stack_float32_4.data", 0, 48),
        ("clips", "stack_float32_8.data", 0, 64),
        ("movies", "stack_float32_8.data", 64, 224),
        ("users", "stack_float32_8.data", 288, 160),
    ]


def test_a_plan_does_not_depend_on_the_order_of_the_tables() -> None:
    tables = [info(f"t{i}", 10 + i, 4 + 4 * (i % 3)) for i in range(9)]
    assert plan(*tables) == plan(*reversed(tables))


@st.composite
def table_sets(draw: st.DrawFn) -> list[TableInfo]:
    names = draw(st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=6, unique=True))
    sizes, dims = st.integers(1, 5000), st.sampled_from([1, 3, 16])
    return [info(name, draw(sizes), draw(dims), draw(st.sampled_from(DTYPES))) for name in names]


@given(table_sets(), st.integers(1, 5), st.integers(1 << 10, 1 << 16), st.integers(500, 20_000))
def test_every_row_is_written_once_and_buffers_stay_in_the_budget(
    tables: list[TableInfo], workers: int, budget: int, shard_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "_SHARD_BYTES", shard_bytes)
        made = plan(*tables, workers=workers, max_memory_bytes=budget)
    rows = {table.name: np.zeros(table.rows, int) for table in tables}
    written = {stack.file: np.zeros(stack.size, int) for stack in made.stacks}
    for task in made.shards:
        assert task.size < 2 * shard_bytes + 64
        rows[task.table][task.start : task.stop] += 1
        written[task.file][task.file_offset : task.file_offset + task.size] += 1
    assert all((counts == 1).all() for counts in [*rows.values(), *written.values()])
    assert [task.index for task in made.shards] == list(range(len(made.shards)))
    assert made.workers <= min(workers, len(made.shards))
    assert made.workers * max(buffers(task) for task in made.shards) == made.buffer_bytes <= budget


@given(table_sets())
def test_tables_of_a_stack_follow_each_other(tables: list[TableInfo]) -> None:
    made = plan(*tables)
    for stack in made.stacks:
        following = 0
        for table in stack.tables:
            assert table.row_offset == following
            following += table.rows
        assert following == stack.rows
        assert stack.size == stack.rows * stack.dim * 4
    planned = sorted((t.table, t.rows, s.dim) for s in made.stacks for t in s.tables)
    assert planned == sorted((t.name, t.rows, t.dim) for t in tables)


def test_a_thousand_tables_and_ten_terabytes_plan_in_a_second() -> None:
    tables = [info(f"table_{i}", 10**10 // 256, 64) for i in range(999)] + [info("huge", 10**6, 10**4)]
    started = time.process_time()
    made = plan(*tables, workers=64)
    assert time.process_time() - started < 1
    assert made.table_bytes == 999 * (10**10 // 256) * 256 + 4 * 10**10
    key = key_of(made, Source(path="ckpt", fingerprint="f"))
    assert time.process_time() - started < 1.5
    assert len(key) == 64
    assert len(made.shards) < 20_000
    assert max(task.size for task in made.shards) < 2 * made.table_bytes / 16_384


def test_a_killed_export_is_the_same_with_less_memory_and_fewer_workers() -> None:
    """And not with other bytes in other places."""
    source = Source(path="ckpt", fingerprint="f")
    key = key_of(plan(info("t", 10**7, 64), workers=8), source)
    assert key == key_of(plan(info("t", 10**7, 64), workers=2, max_memory_bytes=1 << 20), source)
    others = [
        key_of(plan(info("t", 10**7 + 1, 64)), source),
        key_of(plan(info("u", 10**7, 64)), source),
        key_of(plan(info("t", 10**7, 64), info("u", 1, 64)), source),
        key_of(plan(info("t", 10**7, 64), storage="bfloat16"), source),
        key_of(plan(info("t", 10**7, 64), layout="mmap"), source),
        key_of(plan(info("t", 10**7, 64)), Source(path="ckpt", fingerprint="g")),
        key_of(plan(info("t", 10**7, 64)), Source(path="other", fingerprint="f")),
    ]
    assert len({key, *others}) == 8


def test_large_tables_are_cut_into_pieces_for_all_workers() -> None:
    made = plan(info("t", 8 << 20, 64), workers=4)  # 2 GiB
    sizes = [task.size for task in made.shards]
    assert len(sizes) == 32
    assert set(sizes) == {64 << 20}


@pytest.mark.parametrize(
    ("tables", "options", "words"),
    [
        ([], {}, []),
        ([info("t", 1, 2), info("t", 2, 2)], {}, ["'t'"]),
        ([info("t", 0, 2)], {}, ["'t'", "[0, 2]"]),
        ([info("t", 5, 2, np.dtype(np.float64))], {}, ["'t'", "float64", "float32, bfloat16, float16"]),
        ([info("t", 5, 2)], {"storage": "float31"}, ["storage", "float31", "float32"]),
        ([info("t", 5, 2)], {"layout": "rows"}, ["layout", "rows", "variables"]),
        ([info("t", 5, 2)], {"workers": 0}, ["workers", "0"]),
        ([info("t", 5, 2)], {"max_memory_bytes": 0}, ["max_memory_bytes", "0"]),
        ([info("t", 5, 1000)], {"max_memory_bytes": 3999}, ["'t'", "4000", "3999", "1 worker"]),
    ],
)
def test_what_cannot_be_planned_is_refused(tables: list[TableInfo], options: dict[str, Any], words: list[str]) -> None:
    with refused(ConfigError) as caught:
        plan_export(tables, **options)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_budget_counts_a_row_of_every_worker() -> None:
    wide = [info("a", 1000, 1 << 20), info("b", 1000, 1 << 20)]
    assert plan(*wide, workers=2, max_memory_bytes=8 << 20).buffer_bytes == 8 << 20
    with refused(ConfigError, match="8388608"):
        plan(*wide, workers=2, max_memory_bytes=(8 << 20) - 1)
