"""Exports into a store: one that is killed, and one of a live model."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.export.fakes import random_table, write_checkpoint
from tests.support.export.processes import wait_for_end
from tests.support.stores import S3, S3Proxy, S3Request, moto_server
from tpuembed import export_saved_model
from tpuembed.files import remote

TABLES = {f"small{i}": random_table(3 + i, 64, seed=i) for i in range(10)}
TABLES |= {"large": random_table(100_000, 64, seed=100), "narrow": random_table(100, 8)}
"""24 MiB in shards of 7, of which the store wants parts of 5 MiB at least."""
CONFIG: dict[str, Any] = {"features": {name: {"table": name, "input": "id"} for name in TABLES}}


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    with moto_server() as running:
        yield running


@pytest.fixture
def bucket(server: S3, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """A new one, where clients find it."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tpuembed.export.plan.planner._SHARD_BYTES", 7 << 20)
    name = re.sub(r"\W|_", "-", request.node.name).strip("-")[:60]
    server.make_bucket(name)
    remote._store.cache_clear()
    yield name
    remote._store.cache_clear()


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "ckpt", TABLES)
    return tmp_path / "ckpt"


def export(prefix: Path | str, url: str | Path, **options: Any) -> Any:
    return export_saved_model(prefix, url, **{"serving_config": CONFIG, "workers": 2, **options})


def assert_answers(version: Path) -> None:
    """TensorFlow finds the rows of the source in `version`."""
    loaded = tf.saved_model.load(str(version))  # which a mapped table lives as long as
    signature = loaded.signatures["serving_default"]
    ids = {name: np.array([0, len(rows) - 1, len(rows) // 2]) for name, rows in TABLES.items()}
    found = signature(**{name: tf.constant(rows) for name, rows in ids.items()})
    assert found.keys() == TABLES.keys()
    for name, rows in TABLES.items():
        np.testing.assert_array_equal(found[name], rows[ids[name]])


@pytest.mark.nightly
def test_an_export_that_is_killed_shows_no_version_and_runs_again(
    prefix: Path, server: S3, bucket: str, tmp_path: Path
) -> None:
    """kill -9 of the main process, when a part of the large table is there, and another one is held up."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    arguments = [str(prefix), f"s3://{bucket}/m", "--serving-config", str(tmp_path / "config.json"), "--json"]
    held, is_held = threading.Event(), threading.Event()

    def hold(request: S3Request) -> tuple[int, str] | None:
        if request.part == 3:
            is_held.set()
            held.wait(60)
        return None

    with S3Proxy(server) as proxy:
        proxy.fault = hold
        command = [sys.executable, "-c", SMALL_SHARDS, "export", *arguments, "--workers", "1"]
        process = subprocess.Popen(
            command,
            env={**os.environ, **proxy.environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            assert is_held.wait(120), process.poll()
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
            held.set()
        wait_for_end(process.pid, 30)
    assert server.keys(bucket) == ["m/.staging-1"]
    assert server.uploads(bucket) != []
    report = export(prefix, f"s3://{bucket}/m", serving_config=str(tmp_path / "config.json"))
    assert (report.version, report.bytes_reused) == (2, 0)
    assert_answers(server.download(bucket, "m/2", tmp_path / "there"))
    assert all(key.startswith(("m/2/", "m/.staging-1")) for key in server.keys(bucket))


SMALL_SHARDS = """
from tpuembed.export.plan import planner
from tpuembed_cli.main import main
planner._SHARD_BYTES = 7 << 20
main()
"""


def test_a_live_model_is_exported_into_a_store(server: S3, bucket: str, tmp_path: Path) -> None:
    import tpuembed

    table = tpuembed.TableConfig(50, 4, name="t")
    layer = tpuembed.TPUEmbedding({"x": tpuembed.FeatureConfig(table)})
    layer.build({"x": (None, 1)})
    rows = layer.embedding_tables[table].numpy()
    report = tpuembed.export_saved_model(
        layer, f"s3://{bucket}/m", serving_config={"features": {"x": {"table": "t", "input": "id"}}}
    )
    assert report.version == 1
    loaded = tf.saved_model.load(str(server.download(bucket, "m/1", tmp_path / "there")))
    found = loaded.signatures["serving_default"](x=tf.range(50, dtype=tf.int64))["x"]
    np.testing.assert_array_equal(found, rows)
