"""Rows that SparseCores dealt out are proven while they are streamed: their files are not read a second time."""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.export.writers import stream_tables
from tests.support.goldens import Golden, read_golden
from tests.support.messages import refused
from tpuembed.checkpoint import Checkpoint, open_checkpoint
from tpuembed.checkpoint.bundle.checkpoint import BundleCheckpoint
from tpuembed.errors import CheckpointCorruptError
from tpuembed.export.plan.planner import plan_export
from tpuembed.export.report import StreamReport
from tpuembed.export.stream.engines import choose_engine
from tpuembed.export.stream.shard import Source

GOLDENS = ["sparse_cores_8_adam", "sparse_cores_2_adagrad_momentum", "partitioned_mod"]


class NotReadTwice(BundleCheckpoint):
    def verify(self, tables: Iterable[str], slot: str | None = None) -> None:
        assert not list(tables), "the files are read once more"


class ReadTwice(BundleCheckpoint):
    def verify(self, tables: Iterable[str], slot: str | None = None) -> None:
        raise CheckpointCorruptError(f"read once more: {', '.join(sorted(tables))}")


def open_not_read_twice(path: str, **options: Any) -> Checkpoint:
    return _of(NotReadTwice, path, options)


def open_read_twice(path: str, **options: Any) -> Checkpoint:
    return _of(ReadTwice, path, options)


def open_misreading(path: str, **options: Any) -> Checkpoint:
    """A bit of every run is flipped on its way."""
    opened = _of(BundleCheckpoint, path, options)
    read = opened.bundle.read_runs

    def misread(key: str, rows: Any, views: Sequence[memoryview]) -> None:
        read(key, rows, views)
        views[0][0] ^= 1

    vars(opened.bundle)["read_runs"] = misread
    return opened


def _of(kind: type[BundleCheckpoint], path: str, options: dict[str, Any]) -> BundleCheckpoint:
    opened = open_checkpoint(path, **options)
    assert isinstance(opened, BundleCheckpoint)
    return kind(opened.bundle, options)


def stream(
    golden: Golden, folder: Path, opener: str, tables: Sequence[str] | None = None, **options: Any
) -> StreamReport:
    with open_checkpoint(golden.path, **golden.options) as checkpoint:
        chosen = [info for name, info in checkpoint.tables().items() if tables is None or name in tables]
        plan = plan_export(chosen, workers=1, **options)
        source = Source(
            path=checkpoint.path,
            fingerprint=checkpoint.fingerprint(),
            options=json.dumps(dict(golden.options)),
            opener=f"{__name__}:{opener}",
        )
    return stream_tables(plan, source, folder, choose_engine("local", 1))


@pytest.mark.parametrize(("name", "storage"), list(zip(GOLDENS, ("float32", "int8", "float32"), strict=True)))
@pytest.mark.nightly
def test_files_of_dealt_rows_are_read_once(tmp_path: Path, name: str, storage: str) -> None:
    golden = read_golden(f"tpu/{name}")
    stream(golden, tmp_path / "all", "open_not_read_twice", storage=storage)
    table = min(golden.tables)
    stream(golden, tmp_path / "one", "open_not_read_twice", [table], storage=storage)


def test_what_an_earlier_export_streamed_is_proven_by_its_record(tmp_path: Path) -> None:
    golden = read_golden(f"tpu/{GOLDENS[0]}")
    first = stream(golden, tmp_path / "out", "open_not_read_twice")
    again = stream(golden, tmp_path / "out", "open_not_read_twice")
    assert again.bytes_reused == first.bytes_written
    assert dataclasses.replace(again, seconds=0, bytes_reused=0, worker_peak_rss_bytes=0) == dataclasses.replace(
        first, seconds=0, worker_peak_rss_bytes=0
    )


def test_bits_that_flip_on_their_way_are_noticed(tmp_path: Path) -> None:
    golden = read_golden(f"tpu/{GOLDENS[0]}")
    with refused(CheckpointCorruptError):
        stream(golden, tmp_path / "out", "open_misreading")


def test_a_record_without_sums_has_the_files_read_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = read_golden(f"tpu/{GOLDENS[0]}")
    stream(golden, tmp_path / "out", "open_not_read_twice")
    from tpuembed.checkpoint.types import PartialChecksum

    monkeypatch.setattr(PartialChecksum, "__add__", lambda _, __: PartialChecksum(1, 2))
    with refused(CheckpointCorruptError):
        stream(golden, tmp_path / "again", "open_read_twice")


def test_the_rows_are_those_of_the_writer(tmp_path: Path) -> None:
    golden = read_golden(f"tpu/{GOLDENS[1]}")
    table = min(golden.tables)
    stream(golden, tmp_path / "out", "open_not_read_twice", [table])
    (file,) = (path for path in (tmp_path / "out").iterdir() if "data" in path.name)
    rows = golden.tables[table][None]
    np.testing.assert_array_equal(np.fromfile(file, np.float32).reshape(rows.shape), rows)
