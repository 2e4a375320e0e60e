"""moto behind a proxy that can misbehave, and a checkpoint."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.export.fakes import write_checkpoint
from tests.support.export.store_exports import PART_BYTES, SHARD_BYTES, TABLES
from tests.support.stores import S3, S3Proxy, moto_server
from tpuembed.export.plan import planner
from tpuembed.export.publish.store import parts as parting
from tpuembed.files import put, remote


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    with moto_server(PART_BYTES) as running:
        yield running


@pytest.fixture
def proxy(server: S3) -> Iterator[S3Proxy]:
    with S3Proxy(server) as running:
        yield running


@pytest.fixture
def bucket(
    server: S3, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[str]:
    """A new one, reached through the proxy; small parts and short pauses."""
    for name, value in proxy.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(planner, "_SHARD_BYTES", SHARD_BYTES)
    monkeypatch.setattr(parting, "MIN_PART_BYTES", PART_BYTES)
    monkeypatch.setattr(put, "_PAUSES_SECONDS", (0.01, 0.01))
    name = "bucket-" + hashlib.md5(request.node.name.encode()).hexdigest()[:12]
    server.make_bucket(name)
    remote._store.cache_clear()
    yield name
    remote._store.cache_clear()


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "ckpt", TABLES)
    return tmp_path / "ckpt"
