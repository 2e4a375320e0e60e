"""`tpuembed export CKPT s3://...` by the engines that users get: TensorFlow loads the result, which is a local export's."""

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
from tests.support.messages import said
from tests.support.serving.process import SCRIPT, run_command
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
def test_two_exports_at_once(prefix: Path, server: S3, bucket: str, tmp_path: Path) -> None:
    """Two processes write a version each."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    command = [
        str(SCRIPT),
        "export",
        str(prefix),
        f"s3://{bucket}/m",
        "--serving-config",
        str(tmp_path / "config.json"),
    ]
    pipe, environment = subprocess.PIPE, {**os.environ, **server.environment}
    processes = [
        subprocess.Popen([*command, "--json"], env=environment, stdout=pipe, stderr=pipe, text=True) for _ in range(2)
    ]
    ended = [(*process.communicate(), process.returncode) for process in processes]
    assert [code for _, _, code in ended] == [0, 0], ended
    versions = [json.loads(out)["version"] for out, _, _ in ended]
    assert sorted(versions) == [1, 2]
    for version in versions:
        assert_answers(server.download(bucket, f"m/{version}", tmp_path / "there" / str(version)))
    assert server.uploads(bucket) == []
    assert {key.split("/")[1] for key in server.keys(bucket)} == set(map(str, versions))


@pytest.mark.nightly
def test_mapped_tables_lie_where_the_version_will_be_copied_to(
    prefix: Path, server: S3, bucket: str, tmp_path: Path
) -> None:
    root = tmp_path / "served"
    export(prefix, f"s3://{bucket}/m", layout="mmap", serving_root=str(root))
    server.download(bucket, "m/1", tmp_path / "elsewhere")
    (root).mkdir()
    (tmp_path / "elsewhere").rename(root / "1")
    assert_answers(root / "1")


@pytest.mark.nightly
def test_an_export_in_a_store_is_described_and_verified_there(prefix: Path, server: S3, bucket: str) -> None:
    url = f"s3://{bucket}/m"
    export(prefix, url)
    described = run_command("describe", url, "--json")
    assert described.returncode == 0, described.stderr
    found = json.loads(described.stdout)
    assert (found["path"], found["format"]) == (f"{url}/1", "export")
    assert {table["name"]: table["rows"] for table in found["tables"]} == {name: len(t) for name, t in TABLES.items()}
    sound = run_command("verify", f"{url}/1")
    assert sound.returncode == 0, sound.stdout + sound.stderr
    (key,) = (key for key in server.keys(bucket) if ".data-00002-" in key)
    data = bytearray(server.get(bucket, key))
    data[20_000_000] ^= 1
    server.put(bucket, key, bytes(data))
    server.put(bucket, "m/1/variables/stranger", b"x")
    damaged = run_command("verify", url)
    assert damaged.returncode == 1
    assert f"s3://{bucket}/{key}: stack_float32_64: bytes [0, {len(data)}) have CRC32C" in damaged.stdout
    assert "stranger: is not part of the export" in damaged.stdout
    moved = run_command("relocate", url, "/models")
    assert moved.returncode == 1
    said(moved.stderr)


@pytest.mark.nightly
def test_urls_that_are_not_written(prefix: Path, server: S3, bucket: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    for url in (f"gs://{bucket}/m", f"ftp://{bucket}/m", "s3://no-such-bucket-here/m"):
        done = run_command("export", prefix, url, "--serving-config", tmp_path / "config.json")
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
        said(done.stderr)


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
    report = tpuembed.export_model(
        layer, f"s3://{bucket}/m", serving_config={"features": {"x": {"table": "t", "input": "id"}}}
    )
    assert report.version == 1
    loaded = tf.saved_model.load(str(server.download(bucket, "m/1", tmp_path / "there")))
    found = loaded.signatures["serving_default"](x=tf.range(50, dtype=tf.int64))["x"]
    np.testing.assert_array_equal(found, rows)
