"""`--engine ray`: the same bytes from a cluster, also when a node of it dies half way."""

import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.export.writers import TablesWriter
from tests.support.messages import said
from tests.support.serving.process import SCRIPT, run_command
from tests.support.stores import S3Proxy, moto_server
from tpuembed.checkpoint import open_checkpoint
from tpuembed.errors import ExportError
from tpuembed.export.plan.planner import plan_export
from tpuembed.export.stream.engines import choose_engine
from tpuembed.export.stream.shard import Source
from tpuembed.formats.tensor_bundle import Entry, crc, index_path, shard_path, write_index

DIM = 64
RAY = Path(sys.executable).with_name("ray")
TOKEN = secrets.token_hex(32)
ENVIRONMENT = {
    **os.environ,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ADDRESS": "",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": TOKEN,
}

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray, of the extra [ray]")


def write_checkpoint(prefix: Path, rows: int) -> None:
    """One table whose every row begins with its number."""
    piece_rows, checksum = min(rows, 1 << 16), 0
    with open(shard_path(prefix, 0, 1), "wb") as file:
        for start in range(0, rows, piece_rows):
            piece = np.zeros((piece_rows, DIM), np.float32)
            piece[:, 0] = np.arange(start, start + piece_rows)
            piece[:, 1:] = start % 251
            checksum = crc.extend(checksum, piece.reshape(-1).view(np.uint8))
            file.write(piece.data)
    entry = Entry(dtype="float32", shape=(rows, DIM), size=rows * DIM * 4, crc32c=checksum)
    write_index(index_path(prefix), {"table": entry}, 1)


class Node:
    """A raylet with one CPU, and the cluster's head where it is the first; `with` kills all of its processes."""

    def __init__(self, place: Path, *arguments: str) -> None:
        command = [
            str(RAY),
            "start",
            "--block",
            "--num-cpus=1",
            "--node-ip-address=127.0.0.1",
            "--object-store-memory=100000000",
            *arguments,
        ]
        with open(place, "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=ENVIRONMENT)

    def kill(self) -> None:
        """All of its processes, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def cluster(place: Path) -> Iterator[tuple[str, Node]]:
    """(its address, its second node)."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    # The nodes' sockets lie in its folder, and the path of a socket has at most 107 bytes.
    folder, second = tempfile.mkdtemp(prefix="ray-"), None
    head = Node(place / "head.log", "--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}")
    try:
        _wait_for(place / "head.log")
        second = Node(place / "second.log", f"--address={address}")
        _wait_for(place / "second.log")
        yield address, second
    finally:
        for node in (second, head):
            if node is not None:
                node.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for(log: Path) -> None:
    """Until the node says that it is there."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if log.exists() and "Ray runtime started" in log.read_text(encoding="utf-8"):
            return
        time.sleep(0.2)
    raise TimeoutError(log)


@pytest.mark.nightly
def test_a_cluster_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    write_checkpoint(tmp_path / "ckpt", 100)
    config = tmp_path / "config.json"
    config.write_text('{"features": {"f": {"table": "table"}}}', encoding="utf-8")
    arguments = ("--serving-config", config, "--engine", "ray")
    done = run_command("export", tmp_path / "ckpt", tmp_path / "models", *arguments)
    assert done.returncode == 1
    said(done.stderr)
    assert len(done.stderr.splitlines()) <= 5


@pytest.mark.nightly
def test_a_cluster_that_loses_a_node(tmp_path: Path) -> None:
    rows = 1 << 23  # 2 GiB
    write_checkpoint(tmp_path / "ckpt", rows)
    config = tmp_path / "config.json"
    config.write_text('{"features": {"f": {"table": "table", "input": "id"}}}', encoding="utf-8")
    with cluster(tmp_path) as (address, second):
        command = [str(SCRIPT), "export", str(tmp_path / "ckpt"), str(tmp_path / "models"), "--json", "--workers", "2"]
        command += ["--serving-config", str(config), "--engine", "ray"]
        environment = {**ENVIRONMENT, "RAY_ADDRESS": address}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True
        ) as export:
            _wait_until_half(tmp_path / "models", rows * DIM * 4, export)
            second.kill()
            out, err = export.communicate(timeout=600)
        assert export.returncode == 0, err
    report = json.loads(out)
    assert report["bytes_written"] == rows * DIM * 4
    (data,) = (tmp_path / "models" / "1" / "variables").glob("*.data-*1-of-*")
    with open(data, "rb") as written, open(shard_path(tmp_path / "ckpt", 0, 1), "rb") as source:
        while piece := written.read(1 << 24):
            assert piece == source.read(1 << 24)
        assert not source.read(1)


def _wait_until_half(models: Path, size: int, export: "subprocess.Popen[str]") -> None:
    """Until about half of the shards are recorded, and tasks are under way on both nodes."""
    shards = max(1, size // (64 << 20))
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert export.poll() is None, "it ended before a node could be killed"
        lines = sum(len(record.read_bytes().splitlines()) for record in models.glob(".*/tables/record"))
        if lines > shards // 3:
            return
        time.sleep(0.01)
    raise TimeoutError("no shard was finished")


@pytest.mark.nightly
def test_a_node_that_does_not_see_the_folder(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "ckpt", 100)
    with open_checkpoint(tmp_path / "ckpt") as checkpoint:
        plan = plan_export(list(checkpoint.tables().values()))
        source = Source(path=str(tmp_path / "ckpt"), fingerprint=checkpoint.fingerprint())
    engine = choose_engine("ray", 1)
    with pytest.raises(ExportError, match="Every node of the cluster must see"):
        engine.run(plan.shards, source, TablesWriter(tmp_path / "elsewhere" / ".staging" / "tables", plan, source))


@pytest.mark.nightly
def test_a_cluster_writes_into_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The main process hands out signed URLs; workers have no credentials, and table bytes go past it."""
    rows = 1 << 21  # 512 MiB
    write_checkpoint(tmp_path / "ckpt", rows)
    config = tmp_path / "config.json"
    config.write_text('{"features": {"f": {"table": "table", "input": "id"}}}', encoding="utf-8")
    with moto_server() as server, cluster(tmp_path) as (address, _):
        server.make_bucket("bucket")
        with S3Proxy(server) as proxy:
            command = [str(SCRIPT), "export", str(tmp_path / "ckpt"), "s3://bucket/m", "--json", "--workers", "2"]
            command += ["--serving-config", str(config), "--engine", "ray"]
            environment = {**ENVIRONMENT, **proxy.environment, "RAY_ADDRESS": address}
            done = subprocess.run(command, capture_output=True, env=environment, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        (key,) = (key for key in server.keys("bucket") if ".data-00001-of-" in key)
        written = server.get("bucket", key)
        assert server.uploads("bucket") == []
    assert report["path"] == "s3://bucket/m/1"
    assert report["worker_peak_rss_bytes"] < 200_000_000, "Ray's own worker is about 100 MB of it"
    assert written == shard_path(tmp_path / "ckpt", 0, 1).read_bytes()
    parts = [request for request in proxy.requests if request.part]
    assert len(parts) == 8
    assert all("Authorization" not in request.headers and "X-Amz-Signature" in request.query for request in parts)
