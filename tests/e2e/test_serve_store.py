"""`tpuembed serve s3://...`: versions are pulled whole, followed, and served as from a folder."""

import os
import signal
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.contract_serve import eventually
from tests.support.export.fakes import random_table, write_checkpoint
from tests.support.messages import said
from tests.support.serving.process import ServerProcess, run_command
from tests.support.stores import S3, S3Proxy, moto_server
from tpuembed import export_saved_model

ROWS = 20_000
CONFIG: dict[str, Any] = {"features": {"a": {"table": "a", "input": "id"}, "b": {"table": "b", "input": "id"}}}


@pytest.fixture(scope="module")
def store() -> Iterator[S3]:
    with moto_server() as server:
        yield server


@pytest.fixture
def proxy(store: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    """The way to the store of this process and of its servers, which tests can disturb."""
    with S3Proxy(store) as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        yield running


@pytest.fixture
def bucket(store: S3, request: pytest.FixtureRequest) -> str:
    name = f"bucket-{zlib.crc32(request.node.name.encode())}"
    store.make_bucket(name)
    return name


def export(folder: Path, version: int, layout: str = "mmap", *, changed: int | None = None) -> dict[str, Any]:
    """An export of tables a and b, of which only b differs between versions, or what `changed` seeds."""
    tables = {"a": random_table(ROWS, 16, seed=0), "b": random_table(ROWS, 8, seed=changed or version)}
    write_checkpoint(folder / f"ckpt-{version}", tables)
    export_saved_model(
        folder / f"ckpt-{version}", folder / "m", serving_config=CONFIG, layout=layout, version=version, workers=1
    )
    return tables


def publish(store: S3, bucket: str, folder: Path, version: int) -> None:
    """As an exporter does: saved_model.pb last."""
    version_dir = folder / "m" / str(version)
    graph = version_dir / "saved_model.pb"
    for path in sorted((path for path in version_dir.rglob("*") if path.is_file()), key=lambda path: path == graph):
        store.put(bucket, f"m/{version}/{path.relative_to(version_dir)}", path.read_bytes())


def remove(store: S3, bucket: str, prefix: str) -> None:
    for key in store.keys(bucket, prefix):
        store.delete(bucket, key)


def assert_answers(server: ServerProcess, tables: dict[str, Any], version: str = "") -> None:
    ids = [0, 1, ROWS // 2, ROWS - 1]
    status, reply = server.predict({"inputs": {"a": ids, "b": ids}}, version)
    assert status == 200, reply
    for name, rows in tables.items():
        np.testing.assert_array_equal(np.float32(reply["outputs"][name]), rows[ids])


def start(bucket: str, tmp_path: Path, *options: str, log: str = "log") -> ServerProcess:
    url: Any = f"s3://{bucket}/m"
    return ServerProcess(url, tmp_path / log, "--cache-dir", str(tmp_path / "cache"), *options)


def cached(tmp_path: Path) -> set[str]:
    """Names of the versions in the cache, and what else is there but its own files."""
    (place,) = (tmp_path / "cache").glob("m-*")
    return {path.name.partition("-")[0] for path in place.iterdir() if path.is_dir()}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["mmap", "variables"])
@pytest.mark.parametrize("processes", [1, 2])
def test_versions_come_and_go(
    proxy: S3Proxy, store: S3, bucket: str, tmp_path: Path, layout: str, processes: int
) -> None:
    first = export(tmp_path, 1, layout)
    with start(bucket, tmp_path, "--workers", str(processes)) as server:
        eventually(lambda: f"s3://{bucket}/m has no version yet" in server.log)
        publish(store, bucket, tmp_path, 1)
        server.wait_for(1)
        assert_answers(server, first)
        second = export(tmp_path, 2, layout)
        publish(store, bucket, tmp_path, 2)
        server.wait_for(2)
        server.wait_for(1, "END")
        assert_answers(server, second)
        remove(store, bucket, "m/2/")
        server.wait_for(1)
        server.wait_for(2, "END")
        assert_answers(server, first)
        assert server.stop() == 0
    assert "pulling m version 1 from s3://" in server.log
    gets = [
        request.key for request in proxy.requests if request.method == "GET" and request.key.endswith("saved_model.pb")
    ]
    assert gets.count("m/2/saved_model.pb") == 1, "one process downloads"
    assert gets.count("m/1/saved_model.pb") <= 2, "again if it was removed from the cache before it was needed again"


@pytest.mark.nightly
def test_a_restart_downloads_nothing_and_works_without_the_store(
    proxy: S3Proxy, store: S3, bucket: str, tmp_path: Path
) -> None:
    tables = export(tmp_path, 1)
    publish(store, bucket, tmp_path, 1)
    with start(bucket, tmp_path) as server:
        server.wait_for(1)
        assert server.stop() == 0
    before = len(proxy.requests)
    with start(bucket, tmp_path) as server:
        server.wait_for(1)
        assert_answers(server, tables)
        assert server.stop() == 0
    assert {request.key for request in proxy.requests[before:] if request.method == "GET"} <= {"", "m/", "m/1/"}
    proxy.fault = lambda _: (403, "ExpiredToken")
    with start(bucket, tmp_path) as server:
        server.wait_for(1)
        assert_answers(server, tables)
        assert "ExpiredToken" in server.log
        proxy.fault = lambda _: None
        tables = export(tmp_path, 2)
        publish(store, bucket, tmp_path, 2)
        server.wait_for(2)
        assert_answers(server, tables)


@pytest.mark.nightly
def test_of_an_overlay_only_the_changed_rows_are_downloaded(
    proxy: S3Proxy, store: S3, bucket: str, tmp_path: Path
) -> None:
    tables = export(tmp_path, 1)
    publish(store, bucket, tmp_path, 1)
    with start(bucket, tmp_path) as server:
        server.wait_for(1)
        tables["b"][[0, ROWS - 1]] += 1
        write_checkpoint(tmp_path / "ckpt-2", tables)
        export_saved_model(
            tmp_path / "ckpt-2", tmp_path / "m", serving_config=CONFIG, layout="mmap", base="latest", workers=1
        )
        publish(store, bucket, tmp_path, 2)
        server.wait_for(2)
        assert_answers(server, tables)
    sizes = {f"m/2/{path.relative_to(tmp_path / 'm/2')}": path.stat().st_size for path in (tmp_path / "m/2").rglob("*")}
    got = {request.key for request in proxy.requests if request.method == "GET"} & sizes.keys()
    assert {sizes.pop(key) for key in sizes.keys() - got} >= {ROWS * 64, ROWS * 32}, "of both tables"
    assert max(sizes.values()) < ROWS * 32


@pytest.mark.nightly
def test_one_changed_byte_in_the_store(proxy: S3Proxy, store: S3, bucket: str, tmp_path: Path) -> None:
    first = export(tmp_path, 1)
    publish(store, bucket, tmp_path, 1)
    with start(bucket, tmp_path) as server:
        server.wait_for(1)
        second = export(tmp_path, 2)
        (data,) = (path for path in (tmp_path / "m/2/variables").iterdir() if path.stat().st_size == ROWS * 32)
        good = data.read_bytes()
        data.chmod(0o644)
        data.write_bytes(good[:5000] + bytes([good[5000] ^ 1]) + good[5001:])
        publish(store, bucket, tmp_path, 2)
        server.wait_for(2, "END")
        said(server.statuses()[2]["status"]["error_message"])
        assert_answers(server, first)
        data.write_bytes(good)
        publish(store, bucket, tmp_path, 2)
        server.wait_for(2)
        assert_answers(server, second)
        assert cached(tmp_path) <= {"1", "2"}


@pytest.mark.nightly
def test_a_server_that_is_killed_in_a_pull(proxy: S3Proxy, store: S3, bucket: str, tmp_path: Path) -> None:
    tables = export(tmp_path, 1)
    publish(store, bucket, tmp_path, 1)
    stuck: list[str] = []

    def hang(request: Any) -> None:
        if request.method == "GET" and "variables.data" in request.key:
            stuck.append(request.key)
            time.sleep(5)

    proxy.fault = hang
    server = start(bucket, tmp_path)
    while not stuck:
        time.sleep(0.01)
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait()
    assert any(name.startswith(".pulling") for name in cached(tmp_path))
    proxy.fault = lambda _: None
    with start(bucket, tmp_path, log="log2") as server:
        server.wait_for(1)
        assert_answers(server, tables)
        assert cached(tmp_path) == {"1"}


def test_models_of_others(proxy: S3Proxy, store: S3, bucket: str, tmp_path: Path) -> None:
    module = tf.Module()
    module.half = tf.Variable(0.5)
    double = tf.function(lambda x: {"y": x * module.half + 2})
    spec = tf.TensorSpec([None], tf.float32, name="x")
    tf.saved_model.save(module, tmp_path / "m" / "1", signatures=double.get_concrete_function(spec))
    publish(store, bucket, tmp_path, 1)
    with start(bucket, tmp_path) as server:
        server.wait_for(1)
        assert server.predict({"instances": [1.0, 2.0]}) == (200, {"predictions": [2.5, 3.0]})


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (["ftp://host/m"], ["s3://"]):
        done = run_command("serve", *arguments)
        assert done.returncode == 2
        said(done.stderr)
    (tmp_path / "file").touch()
    done = run_command("serve", "s3://bucket/m", "--no-grpc", "--rest-port", "0", "--cache-dir", tmp_path / "file")
    assert done.returncode == 1
    said(done.stderr)
