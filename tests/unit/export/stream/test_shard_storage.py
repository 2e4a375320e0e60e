"""Shards of every storage type, as a worker writes them: bytes, checksums, errors, and rows that cannot be stored."""

import json
from pathlib import Path
from typing import Any

import google_crc32c
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from tests.support.export.fakes import info, random_table, source_of, write_checkpoint
from tests.support.messages import refused
from tpuembed.config import QuantizationConfig
from tpuembed.errors import ConfigError, ExportError, UnknownTableError
from tpuembed.export.plan.plan import ExportPlan, ShardTask
from tpuembed.export.plan.planner import plan_export
from tpuembed.export.stream.execute import table_errors
from tpuembed.export.stream.shard import ShardResult, run_shard
from tpuembed.manifest import STORAGES

Array = npt.NDArray[Any]
QUANTIZATION = QuantizationConfig(16, -1.0, 1.5)


def stream(folder: Path, tables: dict[str, Array], **options: Any) -> tuple[ExportPlan, dict[int, ShardResult]]:
    """Every shard of the tables, one after another in this process, as JSON brings tasks and results."""
    plan = plan_export(list(write_checkpoint(folder / "ckpt", tables).values()), **options)
    for stack in plan.stacks:
        (folder / stack.file).write_bytes(bytes(stack.size))
    source = source_of(folder / "ckpt")
    tasks = [ShardTask(**json.loads(json.dumps(vars(task)))) for task in plan.shards]
    assert tasks == list(plan.shards)
    results = [run_shard(task, source, folder) for task in tasks]
    return plan, {result.index: ShardResult(**json.loads(json.dumps(vars(result)))) for result in results}


def rows_of(folder: Path, plan: ExportPlan, table: str) -> Array:
    """float32 rows of `table`, decoded from its data file."""
    stack, place = next((s, p) for s in plan.stacks for p in s.tables if p.table == table)
    codec = STORAGES[stack.storage]
    data = np.frombuffer((folder / stack.file).read_bytes(), codec.dtype).reshape(stack.rows, codec.columns(stack.dim))
    return codec.decode(data[place.row_offset : place.row_offset + place.rows])


@pytest.mark.parametrize("source", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("storage", STORAGES)
def test_shards_of_any_storage_and_source(tmp_path: Path, source: Any, storage: str) -> None:
    tables = {"a": random_table(700, 6, source, 1), "b": random_table(40, 6, source, 2)}
    budget = 6000 if np.dtype(source).name == storage else 20_000
    plan, results = stream(tmp_path, tables, storage=storage, max_memory_bytes=budget)
    assert all(task.chunk_rows < task.stop - task.start for task in plan.shards if task.table == "a")
    errors = table_errors(plan.shards, results)
    for task in plan.shards:
        assert results[task.index].source_crc32c == google_crc32c.value(tables[task.table].tobytes())
        piece = (tmp_path / task.file).read_bytes()[task.file_offset : task.file_offset + task.size]
        assert results[task.index].crc32c == google_crc32c.value(piece)
    for name, rows in tables.items():
        difference = np.abs(rows_of(tmp_path, plan, name).astype(np.float64) - rows.astype(np.float64))
        assert errors[name].max_abs == pytest.approx(difference.max(), rel=1e-6)
        assert errors[name].rms == pytest.approx(np.sqrt((difference**2).mean()), rel=0.1)
        assert 0.9999 < (errors[name].min_cosine or 0) <= (errors[name].cosine or 0) <= 1
        assert errors[name].storage == storage
        assert difference.max() == 0 or storage not in ("float32", rows.dtype.name)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_table_that_was_quantized_in_training_is_exported_so(tmp_path: Path, storage: str) -> None:
    tables = {"a": random_table(300, 5, seed=1), "plain": random_table(300, 5, seed=2)}
    plan, results = stream(tmp_path, tables, storage=storage, quantization={"a": QUANTIZATION})
    steps = np.floor((np.clip(tables["a"].astype(np.float64), -1.0, 1.5) + 1.0) / (2.5 / 15) + 0.5)
    tolerance = {"float32": 2e-7, "int8": 2e-7, "float16": 1e-3, "bfloat16": 5e-3}[storage]
    np.testing.assert_allclose(rows_of(tmp_path, plan, "a"), steps * (2.5 / 15) - 1.0, atol=tolerance)
    np.testing.assert_allclose(rows_of(tmp_path, plan, "plain"), tables["plain"], atol=0.02)
    error = table_errors(plan.shards, results)["a"]
    assert error.rms <= error.max_abs <= tolerance, "against what training saw"
    assert all(task.source_size == 6000 for task in plan.shards)
    assert results[0].source_crc32c == google_crc32c.value(tables["a"].tobytes())


def test_a_row_that_cannot_be_stored_is_named(tmp_path: Path) -> None:
    rows = random_table(500, 4)
    rows[321, 2] = np.nan
    with refused(ExportError, match="table 'a'"):
        stream(tmp_path, {"a": rows}, storage="int8", max_memory_bytes=8000)


def test_errors_are_numbers_whatever_a_table_holds(tmp_path: Path) -> None:
    rows = random_table(40, 4)
    rows[7, 1], rows[9], rows[11] = np.inf, np.nan, 0
    plan, results = stream(tmp_path, {"a": rows}, storage="bfloat16")
    json.dumps(dict(results[0].errors), allow_nan=False)
    error = table_errors(plan.shards, results)["a"]
    sound = rows[np.isfinite(rows).all(axis=1)].astype(np.float64)
    difference = sound.astype(ml_dtypes.bfloat16).astype(np.float64) - sound
    assert error.sampled_rows == 37
    assert error.max_abs == pytest.approx(np.abs(difference).max(), rel=0.3)
    assert error.rms == pytest.approx(np.sqrt((difference**2).mean()), rel=1e-6)


def test_storage_by_table_makes_stacks_by_storage_and_width() -> None:
    tables = [info("d", 5, 8), info("c", 3, 4), info("b", 7, 8), info("a", 2, 8), info("e", 2, 8)]
    made = plan_export(tables, storage={"a": "int8", "*": "bfloat16", "e": "float32", "d": "int8"})
    assert [(s.name, s.size, [t.table for t in s.tables]) for s in made.stacks] == [
        ("stack_bfloat16_4", 24, ["c"]),
        ("stack_bfloat16_8", 112, ["b"]),
        ("stack_float32_8", 64, ["e"]),
        ("stack_int8_8", 7 * 16, ["a", "d"]),
    ]
    assert made == plan_export(tables[::-1], storage={"*": "bfloat16", "d": "int8", "e": "float32", "a": "int8"})
    assert {s.storage for s in plan_export(tables, storage={"a": "int8"}).stacks} == {"int8", "float32"}


@pytest.mark.parametrize(
    ("storage", "error"),
    [
        ({"vidoes": "int8"}, UnknownTableError),
        ({"videos": "int4"}, ConfigError),
        ({"*": "int4"}, ConfigError),
        (["int8"], ConfigError),
        (None, ConfigError),
    ],
)
def test_storage_that_cannot_be_honoured_is_refused(storage: Any, error: type[Exception]) -> None:
    with refused(error):
        plan_export([info("videos", 5, 8)], storage=storage)
