"""What a killed or failed export leaves, and what the next one makes of it."""

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.export import fakes
from tests.support.export.fakes import Array, random_table, source_of, write_checkpoint
from tests.support.export.writers import HEADER, stream_tables, version_writer
from tests.support.messages import refused
from tpuembed.errors import CheckpointCorruptError, ExportError, TpuEmbedError
from tpuembed.export.plan import planner
from tpuembed.export.plan.plan import ExportPlan
from tpuembed.export.plan.planner import plan_export
from tpuembed.export.report import StreamReport
from tpuembed.export.stream import resume_log as recording
from tpuembed.export.stream.engines import choose_engine
from tpuembed.export.stream.resume_log import Header
from tpuembed.export.stream.shard import ShardResult
from tpuembed.formats.tensor_bundle import crc

SHARDS = 6


@pytest.fixture
def values() -> Array:
    return random_table(6000, 16)


@pytest.fixture
def plan(tmp_path: Path, values: Array, monkeypatch: pytest.MonkeyPatch) -> ExportPlan:
    """One table in six shards of two chunks; every one is recorded at once."""
    monkeypatch.setattr(planner, "_SHARD_BYTES", 64_000)
    monkeypatch.setattr(recording, "_SECONDS_BETWEEN_FLUSHES", 0)
    infos = write_checkpoint(tmp_path / "ckpt", {"t": values})
    made = plan_export(list(infos.values()), max_memory_bytes=32_000)
    assert len(made.shards) == SHARDS
    return made


def stream(plan: ExportPlan, folder: Path, **callbacks: Any) -> StreamReport:
    source = source_of(folder / "ckpt", fakes.LoggedCheckpoint)
    return stream_tables(plan, source, folder / "out", choose_engine("local", plan.workers), **callbacks)


def stop_after(plan: ExportPlan, folder: Path, shards: int) -> None:
    """An export that is interrupted when `shards` are finished and recorded."""

    def on_result(result: ShardResult) -> None:
        while result.index == shards - 1:
            if len(record_lines(folder / "out")) > shards:
                raise KeyboardInterrupt
            time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        stream(plan, folder, on_result=on_result)


def record_lines(folder: Path) -> list[bytes]:
    return (folder / "record").read_bytes().splitlines()


def rows_read(folder: Path) -> list[int]:
    """Where the shards begin that were read since this was asked last."""
    log = folder / "ckpt.log"
    starts = [int(line.split()[1]) for line in log.read_text().splitlines()] if log.exists() else []
    log.unlink(missing_ok=True)
    return sorted({start // 1000 * 1000 for start in starts})


def data_of(folder: Path) -> bytes:
    return (folder / "out" / "stack_float32_16.data").read_bytes()


def test_finished_shards_are_not_streamed_again(tmp_path: Path, plan: ExportPlan, values: Array) -> None:
    stop_after(plan, tmp_path, 4)
    rows_read(tmp_path)
    progress: list[int] = []
    report = stream(plan, tmp_path, on_progress=lambda done, _: progress.append(done))
    assert rows_read(tmp_path) == [4000, 5000]
    assert data_of(tmp_path) == values.tobytes()
    assert (report.bytes_written, report.bytes_reused) == (values.nbytes, 4 * 64_000)
    assert progress[-1] == values.nbytes
    assert report.crc32c == {"stack_float32_16": crc.value(values.tobytes())}
    assert [json.loads(line[9:])["index"] for line in record_lines(tmp_path / "out")[1:]] == list(range(SHARDS))


def test_fewer_workers_and_less_memory_go_on_too(tmp_path: Path, plan: ExportPlan, values: Array) -> None:
    stop_after(plan, tmp_path, 4)
    rows_read(tmp_path)
    table = fakes.FakeCheckpoint(str(tmp_path / "ckpt")).tables()["t"]
    stream(plan_export([table], workers=2, max_memory_bytes=5000), tmp_path)
    assert rows_read(tmp_path) == [4000, 5000]
    assert data_of(tmp_path) == values.tobytes()


def test_a_recorded_shard_whose_bytes_were_damaged_is_streamed_again(
    tmp_path: Path, plan: ExportPlan, values: Array
) -> None:
    stop_after(plan, tmp_path, 4)
    with open(tmp_path / "out" / "stack_float32_16.data", "r+b") as file:
        file.seek(2 * 64_000 + 63_999)
        file.write(b"\x00" if values[2999, 15].tobytes()[3:] != b"\x00" else b"\x01")
    rows_read(tmp_path)
    stream(plan, tmp_path)
    assert rows_read(tmp_path) == [2000, 4000, 5000]
    assert data_of(tmp_path) == values.tobytes()


@pytest.mark.parametrize(
    ("damage", "left"),
    [
        (lambda lines: [*lines[:-1], lines[-1][:-5]], 3),
        (lambda lines: [*lines[:2], lines[2].replace(b'"index"', b'"indey"'), *lines[3:]], 1),
        (lambda lines: [lines[0].replace(b'"t', b'"u'), *lines[1:]], 0),
        (lambda _: [], 0),
    ],
    ids=["cut short", "changed line", "changed header", "empty"],
)
@pytest.mark.sampled(2)
def test_what_the_record_does_not_prove_is_streamed_again(
    tmp_path: Path, plan: ExportPlan, values: Array, damage: Any, left: int
) -> None:
    stop_after(plan, tmp_path, 4)
    lines = record_lines(tmp_path / "out")
    (tmp_path / "out" / "record").write_bytes(b"\n".join(damage(lines)))
    rows_read(tmp_path)
    stream(plan, tmp_path)
    assert rows_read(tmp_path) == [1000 * index for index in range(left, SHARDS)]
    assert data_of(tmp_path) == values.tobytes()
    rows_read(tmp_path)
    stream(plan, tmp_path)
    assert rows_read(tmp_path) == [], "what was recorded after the damage counts"


def test_a_data_file_of_another_size_is_no_beginning(tmp_path: Path, plan: ExportPlan, values: Array) -> None:
    stop_after(plan, tmp_path, 4)
    os.truncate(tmp_path / "out" / "stack_float32_16.data", 100_000)
    rows_read(tmp_path)
    assert stream(plan, tmp_path).bytes_reused == 0
    assert rows_read(tmp_path) == [1000 * index for index in range(SHARDS)]
    assert data_of(tmp_path) == values.tobytes()


def test_another_export_begins_anew(tmp_path: Path, plan: ExportPlan, values: Array) -> None:
    stop_after(plan, tmp_path, 4)
    (tmp_path / "out" / "litter.data").touch()
    os.utime(tmp_path / "ckpt.index", ns=(1, 1))
    rows_read(tmp_path)
    assert stream(plan, tmp_path).bytes_reused == 0
    assert data_of(tmp_path) == values.tobytes()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["record", "stack_float32_16.data"]


def test_a_disk_that_fails_when_it_is_flushed_ends_the_export(
    tmp_path: Path, plan: ExportPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(path: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(recording, "flush_data", failing)
    with refused(ExportError):
        stream(plan, tmp_path)
    assert len(record_lines(tmp_path / "out")) == 1, "nothing is recorded that may be lost"


def leave(model_dir: Path, header: Header, shards: int = 2, error: BaseException | None = None) -> Path:
    """An export that fails with `shards` recorded; its staging folder."""
    failure = error or ExportError("failed")
    with contextlib.suppress(type(failure)), version_writer(model_dir, None, header) as staging:
        staging.tables.mkdir()
        (staging.tables / "s.data").write_bytes(bytes(50_000))
        with recording.Recorder(staging.tables, recording.start_record(staging.tables, header)) as recorder:
            for index in range(shards):
                recorder.add("s.data", finished(index))
        raise failure
    return staging.folder


def finished(index: int) -> ShardResult:
    return ShardResult(index=index, crc32c=0, source_crc32c=0, bytes=7, peak_rss_bytes=0)


OTHER = Header(key="o", source="other", fingerprint="f", table_bytes=140)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_same_export_takes_over_what_a_failed_one_left(tmp_path: Path) -> None:
    left = leave(tmp_path, HEADER)
    assert names(left) == ["tables"]
    with version_writer(tmp_path, None, HEADER) as staging:
        assert staging.folder == left
        assert (staging.finished, list(staging.kept)) == (2, [])
        assert names(staging.path) == []
        with version_writer(tmp_path, None, HEADER) as at_once:
            assert at_once.folder != left, "the first one holds it"
            assert at_once.finished == 0
        (staging.path / "saved_model.pb").touch()
        staging.publish()
    assert names(tmp_path) == ["1"]


def test_an_export_without_a_finished_shard_leaves_nothing(tmp_path: Path) -> None:
    leave(tmp_path, HEADER, shards=0)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "shards", "text"),
    [
        (ExportError("disk full"), 2, "disk full. 2 finished shards were kept. Run the same export again to resume."),
        (ExportError("disk full"), 1, "disk full. 1 finished shard was kept. Run the same export again to resume."),
        (CheckpointCorruptError("bad rows"), 2, "bad rows"),
    ],
)
def test_an_error_says_what_is_not_lost(tmp_path: Path, error: TpuEmbedError, shards: int, text: str) -> None:
    leave(tmp_path, HEADER, shards=shards)
    with pytest.raises(type(error)) as caught, version_writer(tmp_path, None, HEADER):
        raise error
    assert str(caught.value) == text


def test_restart_removes_it(tmp_path: Path) -> None:
    left, other = leave(tmp_path, HEADER), leave(tmp_path, OTHER)
    with version_writer(tmp_path, None, HEADER, restart=True) as staging:
        assert not left.exists()
        assert other.exists()
        assert staging.finished == 0


def test_another_exports_work_is_kept_and_named(tmp_path: Path) -> None:
    left = leave(tmp_path, HEADER)
    with version_writer(tmp_path, None, OTHER) as staging:
        (kept,) = staging.kept
        assert str(kept) == f"{left} (14 B of 14 B, from ckpt)"
    assert names(tmp_path) == [left.name]


@pytest.mark.parametrize(
    "why", ["its source changed", "a week ago", "another version's", "already published", "its source is gone"]
)
def test_what_nobody_will_resume_is_removed(tmp_path: Path, why: str) -> None:
    left = leave(tmp_path, HEADER)
    header = OTHER
    if why == "its source changed":
        header = Header(key="n", source="ckpt", fingerprint="g", table_bytes=14)
    if why == "a week ago":
        past = time.time() - 7.01 * 86400
        os.utime(left / "tables" / "record", (past, past))
    if why == "another version's":
        (left / "tables" / "record").write_bytes(recording._line({**HEADER.__dict__, "format": recording.FORMAT + 1}))
    if why == "its source is gone":  # a model in memory, whose process was killed
        (left / "tables" / "record").write_bytes(recording._line({**HEADER.__dict__, "lasts": False}))
    if why == "already published":
        (tmp_path / "1").mkdir()
        (tmp_path / "1" / "data").hardlink_to(left / "tables" / "s.data")
        header = HEADER
    with version_writer(tmp_path, None, header) as staging:
        assert not left.exists()
        assert staging.folder != left
        assert list(staging.kept) == []


def test_killed_between_the_links_and_the_commit_it_goes_on(tmp_path: Path) -> None:
    left = leave(tmp_path, HEADER)
    (left / "version" / "variables").mkdir(parents=True)
    (left / "version" / "variables" / "data").hardlink_to(left / "tables" / "s.data")
    with version_writer(tmp_path, None, HEADER) as staging:
        assert staging.folder == left
        assert names(staging.path) == []
        assert (left / "tables" / "s.data").stat().st_nlink == 1
