"""Worker processes: their results, their deaths, and that none is left."""

import ctypes
import dataclasses
import errno
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.export import fakes
from tests.support.export.fakes import random_table, source_of, write_checkpoint
from tests.support.export.processes import children
from tests.support.export.writers import stream_tables
from tests.support.messages import refused
from tpuembed.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    ConfigError,
    ExportError,
    WorkerError,
)
from tpuembed.export import plan_saved_model
from tpuembed.export.plan import planner
from tpuembed.export.plan.plan import ExportPlan
from tpuembed.export.plan.planner import plan_export
from tpuembed.export.stream.engines import Engine, choose_engine, default_workers, local
from tpuembed.export.stream.shard import ShardResult
from tpuembed.formats.tensor_bundle import shard_path

WORKERS = 2


@pytest.fixture
def values() -> np.ndarray[Any, Any]:
    return random_table(6000, 16)


@pytest.fixture
def plan(tmp_path: Path, values: np.ndarray[Any, Any], monkeypatch: pytest.MonkeyPatch) -> ExportPlan:
    """One table in six shards of ten chunks."""
    monkeypatch.setattr(planner, "_SHARD_BYTES", 64_000)
    infos = write_checkpoint(tmp_path / "ckpt", {"t": values})
    made = plan_export(list(infos.values()), workers=WORKERS, max_memory_bytes=WORKERS * 6400)
    assert len(made.shards) == 6
    return made


@pytest.fixture(autouse=True)
def retries_without_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_RETRY_SECONDS", (0.0, 0.0))


@pytest.fixture(autouse=True)
def no_worker_is_left() -> Iterator[None]:
    before = children(os.getpid())  # of other tests, which last as long as the session
    yield
    assert set(children(os.getpid())) <= set(before)


def stream(plan: ExportPlan, folder: Path, reader: Any = fakes.FakeCheckpoint, **callbacks: Any) -> Any:
    engine = choose_engine("local", plan.workers)
    return stream_tables(plan, source_of(folder / "ckpt", reader), folder / "out", engine, **callbacks)


def test_workers_write_the_table_and_report(tmp_path: Path, plan: ExportPlan, values: np.ndarray[Any, Any]) -> None:
    progress: list[tuple[int, int]] = []
    finished: list[ShardResult] = []
    report = stream(
        plan,
        tmp_path,
        fakes.SlowCheckpoint,
        on_progress=lambda done, total: progress.append((done, total)),
        on_result=finished.append,
    )
    assert (tmp_path / "out" / "stack_float32_16.data").read_bytes() == values.tobytes()
    assert report.bytes_written == values.nbytes
    assert sorted(result.index for result in finished) == list(range(6))
    assert progress[-1] == (values.nbytes, values.nbytes)
    done = [bytes_done for bytes_done, _ in progress]
    assert done == sorted(done)
    assert len(set(done)) > 6, "progress within shards"


def test_workers_that_were_started_before_their_tasks_were_known_do_them(tmp_path: Path, plan: ExportPlan) -> None:
    source = source_of(tmp_path / "ckpt")
    engine = local.LocalEngine(plan.workers)
    before = set(children(os.getpid()))
    with engine.starting(source, len(plan.shards)):
        started = set(children(os.getpid())) - before
        assert len(started) == plan.workers
        seen = set[int]()
        stream_tables(
            plan,
            source,
            tmp_path / "out",
            engine,
            on_result=lambda _: seen.update(set(children(os.getpid())) - before),
        )
        assert seen <= started, "no others"
    assert set(children(os.getpid())) <= before


def test_a_worker_imports_no_tensorflow_and_little_else(tmp_path: Path, plan: ExportPlan) -> None:
    report = stream(plan, tmp_path)
    assert 0 < report.worker_peak_rss_bytes < 48_000_000
    script = "import sys, tpuembed.export.stream.worker; print(*(m for m in ('tensorflow', 'keras', 'jax') if m in sys.modules))"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == ""


def test_a_worker_imports_from_where_its_parent_does(
    tmp_path: Path, plan: ExportPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "users_reader.py").write_text("from tests.support.export.fakes import FakeCheckpoint\n")
    monkeypatch.syspath_prepend(tmp_path / "path")
    source = dataclasses.replace(source_of(tmp_path / "ckpt"), opener="users_reader:FakeCheckpoint")
    report = stream_tables(plan, source, tmp_path / "out", choose_engine("local", 1))
    assert report.bytes_written == plan.table_bytes


def test_a_workers_error_passes_through(tmp_path: Path, plan: ExportPlan) -> None:
    with pytest.raises(CheckpointCorruptError, match=r"^table 't': bad rows at \d+$"):
        stream(plan, tmp_path, fakes.CorruptCheckpoint)


def test_a_killed_worker_names_its_shard_and_the_signal(tmp_path: Path, plan: ExportPlan) -> None:
    message = r"^shard \d \(table 't', rows \d+ to \d+\): .*killed by SIGKILL.*. It failed 3 times.$"
    with pytest.warns(UserWarning, match="Retrying"), pytest.raises(WorkerError, match=message):
        stream(plan, tmp_path, fakes.DyingCheckpoint)


def test_a_worker_that_exits_is_quoted(tmp_path: Path, plan: ExportPlan) -> None:
    message = r"shard \d .* exited with code 7: last words. It failed 3 times.$"
    with pytest.warns(UserWarning, match="Retrying"), pytest.raises(WorkerError, match=message):
        stream(plan, tmp_path, fakes.ExitingCheckpoint)


@pytest.mark.parametrize("troubles", [["kill"], ["EIO", "ETIMEDOUT"], ["kill", "ECONNRESET"]], ids=str)
@pytest.mark.sampled(1)
def test_what_may_pass_is_tried_again(
    tmp_path: Path, plan: ExportPlan, values: np.ndarray[Any, Any], troubles: list[str]
) -> None:
    """On as many shards as it happens, so long as none of them fails three times."""
    for number, trouble in enumerate(troubles):
        (tmp_path / f"{number}.trouble-{trouble}").touch()
    with pytest.warns(UserWarning, match=r"(killed by SIGKILL|cannot be read).*. Retrying.$"):
        report = stream(plan, tmp_path, fakes.FlakyCheckpoint)
    assert not list(tmp_path.glob("*.trouble-*"))
    assert (tmp_path / "out" / "stack_float32_16.data").read_bytes() == values.tobytes()
    assert report.bytes_written == values.nbytes


@pytest.mark.parametrize("trouble", ["EACCES", "ENOENT", "ESTALE"])
@pytest.mark.sampled(1)
def test_what_will_not_pass_is_not_tried_again(tmp_path: Path, plan: ExportPlan, trouble: str) -> None:
    (tmp_path / f"1.trouble-{trouble}").touch()
    with refused(CheckpointError):
        stream(plan, tmp_path, fakes.FlakyCheckpoint)


def test_a_defect_in_a_worker_is_a_worker_error(tmp_path: Path, plan: ExportPlan) -> None:
    with pytest.raises(WorkerError, match=r"shard \d .*: ZeroDivisionError: a defect\. "):
        stream(plan, tmp_path, fakes.BuggyCheckpoint)


def test_an_interpreter_that_is_missing_is_named(
    tmp_path: Path, plan: ExportPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with refused(WorkerError):
        stream(plan, tmp_path)


def test_an_interrupt_stops_the_workers(tmp_path: Path, plan: ExportPlan) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stream(plan, tmp_path, fakes.SlowCheckpoint, on_progress=interrupt)


def test_a_signal_stops_the_workers_while_the_engine_waits(tmp_path: Path, plan: ExportPlan) -> None:
    timers: list[threading.Timer] = []

    def interrupt_soon(done: int, total: int) -> None:
        if not timers:
            timers.append(threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGINT)))
            timers[0].start()

    # A shell that starts its jobs in the background has them ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            stream(plan, tmp_path, fakes.SlowCheckpoint, on_progress=interrupt_soon)
    finally:
        timers[0].join()
        signal.signal(signal.SIGINT, before)


def test_a_worker_ends_when_its_input_does() -> None:
    command = [sys.executable, "-m", "tpuembed.export.stream.worker"]
    assert subprocess.run(command, input=b"", timeout=20, check=True).returncode == 0


def test_an_orphaned_worker_ends_at_its_next_chunk(tmp_path: Path, plan: ExportPlan) -> None:
    """Its pipes may be held open by others: it asks who its parent is."""
    (tmp_path / "stack_float32_16.data").touch()
    source = dataclasses.asdict(source_of(tmp_path / "ckpt"))
    for parent, outcome in ((os.getpid(), (0, "results")), (1, (1, ""))):
        job = {"source": source, "parent": parent, "delay_seconds": 0}
        batch = {"shards": [dataclasses.asdict(plan.shards[0])], "target": {"kind": "folder", "place": str(tmp_path)}}
        lines = json.dumps(job) + "\n" + json.dumps(batch) + "\n"
        command = [sys.executable, "-m", "tpuembed.export.stream.worker"]
        ended = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=20, check=False)
        said = [key for line in ended.stdout.splitlines() for key in json.loads(line) if key != "progress"]
        assert (ended.returncode, "".join(said)) == outcome


def test_workers_leave_an_interrupt_to_their_parent(tmp_path: Path, plan: ExportPlan) -> None:
    interrupted: set[int] = set()

    def interrupt_workers(done: int, total: int) -> None:
        for worker in set(children(os.getpid())) - interrupted:
            if ignores_interrupts(worker):
                os.kill(worker, signal.SIGINT)
                interrupted.add(worker)

    report = stream(plan, tmp_path, fakes.SlowCheckpoint, on_progress=interrupt_workers)
    assert interrupted
    assert report.bytes_written == plan.table_bytes


def ignores_interrupts(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(mask, 16) >> (signal.SIGINT - 1) & 1)


def test_a_source_that_changes_while_it_is_streamed_is_an_error(tmp_path: Path, plan: ExportPlan) -> None:
    """After the last worker has opened it, too."""
    finished: list[int] = []

    def touch_at_the_end(result: ShardResult) -> None:
        finished.append(result.index)
        if len(finished) == len(plan.shards):
            os.utime(tmp_path / "ckpt.index")

    with refused(CheckpointMismatchError):
        stream(plan, tmp_path, on_result=touch_at_the_end)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_flipped_byte_in_the_source_is_found(tmp_path: Path, dtype: Any) -> None:
    """By the checksum that the source states, so that it does not get a valid one in the export."""
    infos = write_checkpoint(tmp_path / "ckpt", {"good": random_table(50, 3, dtype), "t": random_table(999, 5, dtype)})
    made = plan_export(list(infos.values()))
    data = bytearray(shard_path(tmp_path / "ckpt", 0, 1).read_bytes())
    data[-1000] ^= 4
    shard_path(tmp_path / "ckpt", 0, 1).write_bytes(data)
    with refused(CheckpointCorruptError, match="'t'"):
        stream(made, tmp_path)


def test_damage_that_only_the_first_reading_met(tmp_path: Path, plan: ExportPlan) -> None:
    """Such as of a flaky memory: what the source states is not what was read, and its file is sound."""
    with refused(CheckpointCorruptError, match="table 't'"):
        stream(plan, tmp_path, fakes.OtherChecksumCheckpoint)


def test_a_shard_is_recorded_when_its_data_is_on_the_disk(
    tmp_path: Path, plan: ExportPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the record has of shards never exceeds what had been written when the data file was last flushed."""
    finished: list[int] = []
    flushed = recorded = 0
    fsync = os.fsync

    def synced(descriptor: int) -> None:
        nonlocal flushed, recorded
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        if name == "stack_float32_16.data":
            flushed = len(finished)
        if name == "record":
            recorded = len((tmp_path / "out" / "record").read_bytes().splitlines()) - 1
            assert recorded <= flushed
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    stream(plan, tmp_path, on_result=lambda result: finished.append(result.index))
    assert recorded == flushed == 6


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="needs Linux, whose page cache can be asked")
def test_what_was_written_does_not_stay_in_memory(tmp_path: Path) -> None:
    """Neither what other programs read, nor a small machine, makes room for it."""
    if not can_be_dropped(tmp_path / "probe"):
        pytest.skip("needs a temporary folder on a disk")
    infos = write_checkpoint(tmp_path / "ckpt", {"t": random_table(200_000, 16)})
    stream(plan_export(list(infos.values()), workers=WORKERS), tmp_path)
    written = tmp_path / "out" / "stack_float32_16.data"
    assert written.stat().st_size == 12_800_000
    assert cached_bytes(written) == 0
    assert cached_bytes(shard_path(tmp_path / "ckpt", 0, 1)) > 0, "what others may read stays"


def can_be_dropped(path: Path) -> bool:
    with open(path, "wb") as file:
        file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return cached_bytes(path) == 0


def cached_bytes(path: Path) -> int:
    """Of a file, how much the page cache holds. See mincore(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        pages = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), pages) == 0
        return mmap.PAGESIZE * sum(page & 1 for page in pages)


def test_a_file_system_that_reserves_nothing_will_do(
    tmp_path: Path, plan: ExportPlan, values: np.ndarray[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    stream(plan, tmp_path)
    assert (tmp_path / "out" / "stack_float32_16.data").read_bytes() == values.tobytes()


def test_a_disk_that_is_full_shows_before_anything_is_read(
    tmp_path: Path, plan: ExportPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with refused(ExportError, match="384000"):
        stream(plan, tmp_path, fakes.CorruptCheckpoint)


class ForgetfulEngine(Engine):
    """Loses the last shard."""

    def run(self, tasks: Any, source: Any, writer: Any, **callbacks: Any) -> list[ShardResult]:
        return choose_engine("local", 1).run(tasks[:-1], source, writer, **callbacks)


def test_an_engine_that_loses_a_shard_is_found_out(tmp_path: Path, plan: ExportPlan) -> None:
    with refused(ExportError, match="shard 5"):
        stream_tables(plan, source_of(tmp_path / "ckpt"), tmp_path / "out", ForgetfulEngine())


def test_engines_are_chosen_by_name(tmp_path: Path, plan: ExportPlan) -> None:
    config = {"features": {"f": {"table": "t"}}}
    with refused(ConfigError, match="'slurm'"):
        plan_saved_model(tmp_path / "ckpt", serving_config=config, engine="slurm")
    assert 1 <= default_workers() <= (os.cpu_count() or 1)
