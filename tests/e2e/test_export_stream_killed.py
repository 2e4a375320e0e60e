"""A killed export leaves no version and no process; the next one goes on from the shards that were finished."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.export.fakes import random_table, write_checkpoint
from tests.support.export.killed_export import plan_of, recorded_shards
from tests.support.export.processes import wait_for_end
from tpuembed.export.plan.plan import ExportPlan

ROOT = Path(__file__).parents[2]
SCRIPT = """
import signal, sys
from pathlib import Path
from tests.support.export.killed_export import plan_of
from tests.support.export.fakes import LoggedCheckpoint, source_of
from tpuembed.export.stream import resume_log as record
from tpuembed.export.stream.engines import choose_engine
from tpuembed.export.options import ExportOptions
from tpuembed.export.publish.folder import FolderWriter
from tpuembed.export.stream.execute import stream_tables

signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
record._SECONDS_BETWEEN_FLUSHES = 0.01
prefix, model_dir = Path(sys.argv[1]), Path(sys.argv[2])
plan, source = plan_of(prefix), source_of(prefix, LoggedCheckpoint)
with FolderWriter(model_dir, plan, ExportOptions(), source) as writer:
    print("started", flush=True)
    stream_tables(source, writer, choose_engine("local", plan.workers))
    for stack in plan.stacks:
        (writer.path / stack.file).hardlink_to(writer.tables / stack.file)
    writer.publish()
"""
TABLES = {name: random_table(10_000, dim) for name, dim in (("a", 8), ("b", 9), ("c", 10))}


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "ckpt", TABLES)
    return tmp_path / "ckpt"


def start(prefix: Path, model_dir: Path) -> "subprocess.Popen[str]":
    """An export without a graph that streams for about two seconds, in a session of its own."""
    command = [sys.executable, "-c", SCRIPT, str(prefix), str(model_dir)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout
    assert process.stdout.readline() == "started\n"
    return process


def numeric(model_dir: Path) -> list[str]:
    return sorted(path.name for path in model_dir.iterdir() if path.name.isdigit())


def assert_complete(version: Path) -> None:
    for name, table in TABLES.items():
        assert (version / f"stack_float32_{table.shape[1]}.data").read_bytes() == table.tobytes(), name


def read_shards(prefix: Path, plan: ExportPlan) -> list[int]:
    """The shards of the rows that were read, in order, by the log that the reader keeps."""
    index = {(task.table, task.start): task.index for task in plan.shards}
    log = Path(f"{prefix}.log")
    lines = log.read_text().splitlines() if log.exists() else []
    return [index[table, int(start)] for table, start in map(str.split, lines)]


def wait_for_reads(prefix: Path, before: int, process: "subprocess.Popen[str]") -> None:
    """Until more reads were logged, or there is nothing left to read."""
    log = Path(f"{prefix}.log")
    while process.poll() is None and (not log.exists() or len(log.read_text().splitlines()) <= before):
        time.sleep(0.005)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_group_ends_everything_and_the_next_export_goes_on(
    prefix: Path, tmp_path: Path, signum: int
) -> None:
    """What a terminal does with Ctrl-C, and a scheduler with its other ways."""
    model_dir = tmp_path / "model"
    process = start(prefix, model_dir)
    wait_for_reads(prefix, 20, process)
    time.sleep(0.1)
    os.killpg(process.pid, signum)
    _, errors = process.communicate(timeout=30)
    wait_for_end(process.pid, 30)
    assert process.returncode == -signum
    assert numeric(model_dir) == []
    if signum == signal.SIGINT:
        assert errors.strip().endswith("KeyboardInterrupt")
    plan, done = plan_of(prefix), set(recorded_shards(model_dir))
    assert done, "what was finished is there for the next export"
    before = len(read_shards(prefix, plan))
    assert start(prefix, model_dir).communicate(timeout=60) == ("", "")
    assert set(read_shards(prefix, plan)[before:]) == {task.index for task in plan.shards} - done
    assert_complete(model_dir / "1")
