"""`max_memory_bytes` is a promise: workers that may have no more than their share finish, readers' buffers included."""

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.sparse_core_files import write_sparse_core_checkpoint
from tests.support.checkpoint.keras_files import write_tables
from tests.support.export.fakes import info, random_table, write_checkpoint
from tests.support.export.limited import EXACT_ALLOCATION, limited_source
from tests.support.export.writers import stream_tables
from tests.support.messages import refused
from tpuembed.checkpoint import open_checkpoint
from tpuembed.errors import ConfigError, WorkerError
from tpuembed.export.plan.plan import ExportPlan
from tpuembed.export.plan.planner import plan_export
from tpuembed.export.stream.engines import choose_engine
from tpuembed.formats.tensor_bundle import crc, shard_path

MIB = 1 << 20
ROWS, DIM, WORKERS = 98_304, 64, 2  # 24 MiB


def dense(folder: Path) -> Path:
    """Rows side by side."""
    write_checkpoint(folder / "ckpt", {"table": random_table(ROWS, DIM)})
    return folder / "ckpt"


def weights(folder: Path) -> Path:
    """Keras weights."""
    return write_tables(folder / "m.weights.h5", {"table": random_table(ROWS, DIM)})


def sparse_core(folder: Path) -> Path:
    """A table dealt out to 32 SparseCores."""
    devices, data = 8, random_table(ROWS, DIM).tobytes()
    step = len(data) // devices
    checksums = [crc.value(data[step * device : step * (device + 1)]) for device in range(devices)]
    write_sparse_core_checkpoint(folder / "ckpt", ROWS, DIM, 4 * devices, checksums)
    shard_path(folder / "ckpt", 0, 2).write_bytes(data)
    return folder / "ckpt"


def plan_of(path: Path, storage: str, max_memory_bytes: int) -> ExportPlan:
    with open_checkpoint(path) as checkpoint:
        return plan_export(
            list(checkpoint.tables().values()),
            storage=storage,
            max_memory_bytes=max_memory_bytes,
            workers=WORKERS,
            read_buffers=checkpoint.read_buffer_bytes,
        )


@pytest.fixture(autouse=True)
def shards_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpuembed.export.plan.planner._SHARD_BYTES", 3 * MIB)
    monkeypatch.setattr("tpuembed.export.stream.engines.local._RETRY_SECONDS", ())
    for name, value in EXACT_ALLOCATION.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("storage", ["float32", "int8"])
@pytest.mark.parametrize(
    ("write", "share"),
    [(dense, 3 * MIB), (weights, 4 * MIB), (sparse_core, 5 * MIB)],
    ids=["side by side", "weights", "SparseCores"],
)
@pytest.mark.sampled(1)
def test_workers_that_may_have_no_more_than_their_share_finish(
    tmp_path: Path, write: Callable[[Path], Path], share: int, storage: str
) -> None:
    path = write(tmp_path)
    plan = plan_of(path, storage, WORKERS * share)
    assert plan.workers == WORKERS
    assert 0.8 * WORKERS * share < plan.buffer_bytes <= WORKERS * share, "a share that is used"
    with open_checkpoint(path) as checkpoint:
        source = limited_source(checkpoint, share, tmp_path / "log")
        rows = checkpoint.read(plan.shards[0].table)
    stream_tables(plan, source, tmp_path / "out", choose_engine("local", WORKERS))
    assert len((tmp_path / "log").read_text().splitlines()) == WORKERS, "every worker had a limit"
    if storage == "float32":
        assert (tmp_path / "out" / plan.stacks[0].file).read_bytes() == rows.tobytes()


def test_workers_that_may_have_less_fail(tmp_path: Path) -> None:
    """So that the limit is one."""
    path = sparse_core(tmp_path)
    plan = plan_of(path, "float32", WORKERS * 5 * MIB)
    with open_checkpoint(path) as checkpoint:
        source = limited_source(checkpoint, 3 * MIB, tmp_path / "log")
    with pytest.raises(WorkerError, match="MemoryError"):
        stream_tables(plan, source, tmp_path / "out", choose_engine("local", WORKERS))


def test_a_reader_that_needs_more_than_there_is_is_refused_by_name(tmp_path: Path) -> None:
    path = weights(tmp_path)
    needed = MIB  # what a read holds beside its rows
    with refused(ConfigError, match=f"512 bytes .* {WORKERS * needed} bytes, .* {WORKERS * needed}[.]"):
        plan_of(path, "float32", WORKERS * needed)


def test_as_many_workers_as_the_memory_is_enough_for() -> None:
    made = plan_export(
        [info("t", 10**6, 64)],
        workers=8,
        may_use_fewer=True,
        max_memory_bytes=35 * MIB,
        read_buffers=lambda *_: 10 * MIB,
    )
    assert made.workers == 3
    assert made.buffer_bytes <= 35 * MIB
