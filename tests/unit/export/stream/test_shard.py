"""One shard, in this process: the bytes, their checksum, and what goes wrong with source and file."""

import dataclasses
import os
import resource
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest

from tests.support.export.fakes import random_table, source_of, write_checkpoint
from tests.support.messages import refused
from tpuembed.errors import CheckpointCorruptError, CheckpointMismatchError, ExportError
from tpuembed.export.plan.plan import ShardTask
from tpuembed.export.stream.shard import Source, run_shard
from tpuembed.formats.tensor_bundle import shard_path

OFFSET = 24


def task_for(start: int, stop: int, chunk_rows: int, dtype: str = "float32") -> ShardTask:
    return ShardTask(
        index=3,
        stack="s",
        table="t",
        start=start,
        stop=stop,
        dim=5,
        source_dtype=dtype,
        storage="float32",
        file="s.data",
        file_offset=OFFSET,
        chunk_rows=chunk_rows,
    )


def prepare(folder: Path, dtype: Any = np.float32) -> tuple[np.ndarray[Any, Any], Source]:
    """A checkpoint of one [100, 5] table, and an output file of zeros."""
    values = random_table(100, 5, dtype)
    write_checkpoint(folder / "ckpt", {"other": random_table(3, 5), "t": values})
    (folder / "s.data").write_bytes(bytes(3000))
    return values, source_of(folder / "ckpt")


@pytest.mark.parametrize("chunk_rows", [1, 7, 36, 73, 74, 100])
def test_a_shard_is_written_where_its_task_says_whatever_the_chunks(tmp_path: Path, chunk_rows: int) -> None:
    values, source = prepare(tmp_path)
    seen: list[int] = []
    result = run_shard(task_for(11, 84, chunk_rows), source, tmp_path, seen.append)
    expected = values[11:84].tobytes()
    written = (tmp_path / "s.data").read_bytes()
    assert written == bytes(OFFSET) + expected + bytes(3000 - OFFSET - len(expected))
    assert (result.index, result.bytes, result.crc32c) == (3, 1460, google_crc32c.value(expected))
    assert result.source_crc32c == result.crc32c
    assert seen == [min(rows, 73) * 20 for rows in range(chunk_rows, 73 + chunk_rows, chunk_rows)]


def test_every_bit_pattern_of_float32_passes_through(tmp_path: Path) -> None:
    patterns = np.array([0x7F800001, 0xFFC12345, 0x80000000, 0x00000001, 0x7F800000], np.uint32)
    values = np.tile(patterns, (100, 1)).view(np.float32)
    write_checkpoint(tmp_path / "ckpt", {"t": values})
    (tmp_path / "s.data").write_bytes(bytes(3000))
    run_shard(task_for(0, 100, 9), source_of(tmp_path / "ckpt"), tmp_path)
    assert (tmp_path / "s.data").read_bytes()[OFFSET : OFFSET + 2000] == values.tobytes()


def test_a_checkpoint_that_changed_since_it_was_planned_is_refused(tmp_path: Path) -> None:
    _, source = prepare(tmp_path)
    stale = dataclasses.replace(source, fingerprint="stale")
    with refused(CheckpointMismatchError):
        run_shard(task_for(0, 1, 1), stale, tmp_path)


def test_a_checkpoint_truncated_while_it_is_read_is_corrupt(tmp_path: Path) -> None:
    _, source = prepare(tmp_path)
    data = shard_path(tmp_path / "ckpt", 0, 1)

    def truncate(written: int) -> None:
        os.truncate(data, 1000)

    with refused(CheckpointCorruptError, match="00000"):
        run_shard(task_for(0, 100, 10), source, tmp_path, truncate)


def test_a_missing_data_file_is_named(tmp_path: Path) -> None:
    _, source = prepare(tmp_path)
    (tmp_path / "s.data").unlink()
    with refused(ExportError, match=r"s\.data"):
        run_shard(task_for(0, 1, 1), source, tmp_path)


def test_a_write_that_the_system_refuses_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on file sizes gives the error of a full disk: EFBIG in place of ENOSPC."""
    _, source = prepare(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with refused(ExportError, match=r"s\.data"):
            run_shard(task_for(0, 100, 10), source, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values, source = prepare(tmp_path)
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: whole(fd, data[:13], offset))
    run_shard(task_for(0, 100, 50), source, tmp_path)
    assert (tmp_path / "s.data").read_bytes()[OFFSET : OFFSET + 2000] == values.tobytes()
