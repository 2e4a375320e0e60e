"""What killed, failed and concurrent exports leave: one version at most, whole, and nothing beside it."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.export.fakes import write_checkpoint
from tests.support.export.store_exports import (
    TABLES,
    assert_complete,
    export,
    fail_half_way,
    leftovers,
)
from tests.support.messages import refused
from tests.support.stores import S3, S3Proxy
from tpuembed.errors import ExportError
from tpuembed.export.publish.store.writer import StoreWriter
from tpuembed.files.bucket import Bucket

OTHERS = {name: table + np.float32(1) for name, table in TABLES.items()}


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A checkpoint with the same tables and other rows."""
    write_checkpoint(tmp_path / "other", OTHERS)
    return tmp_path / "other"


def kill(url: str, prefix: Path, **options: Any) -> None:
    """Export until an error, and leave everything as a killed process does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoreWriter, "abandon", lambda *_, **__: None)
        with pytest.raises(ExportError):
            export(url, prefix, **options)


def test_an_export_that_fails_leaves_nothing(server: S3, proxy: S3Proxy, bucket: str, prefix: Path) -> None:
    fail_half_way(proxy, f"s3://{bucket}/m", prefix)
    assert (server.keys(bucket), server.uploads(bucket)) == ([], [])
    assert export(f"s3://{bucket}/m", prefix)[0] == f"s3://{bucket}/m/1"
    assert_complete(server, bucket, "m/1")


@pytest.mark.parametrize(
    ("method", "ending"),
    [
        ("PUT", "-00001-of-00003"),
        ("POST", "-00002-of-00003"),
        ("PUT", "variables.index"),
        ("PUT", "saved_model.pb"),
    ],
)
def test_an_export_after_one_that_was_killed_takes_the_next_number(
    server: S3, proxy: S3Proxy, bucket: str, prefix: Path, other: Path, method: str, ending: str
) -> None:
    url = f"s3://{bucket}/m"
    proxy.fault = lambda request: (
        (403, "AccessDenied")
        if request.method == method and request.key.endswith(ending) and "uploads" not in request.query
        else None
    )
    kill(url, prefix)
    proxy.fault = lambda _: None
    assert "m/.staging-1" in server.keys(bucket)
    assert "m/1/saved_model.pb" not in server.keys(bucket)
    assert export(url, other)[0] == f"{url}/2"
    assert_complete(server, bucket, "m/2", OTHERS)
    with refused(ExportError, match="version 1: an export is writing it, or was killed"):
        export(url, other, version=1)
    for key in server.keys(bucket):  # as the message says
        if key.startswith(("m/1/", "m/.staging-1")):
            server.delete(bucket, key)
    assert export(url, other, version=1)[0] == f"{url}/1"
    assert_complete(server, bucket, "m/1", OTHERS)
    assert not any("/.staging" in key for key in server.keys(bucket))


def test_two_exports_at_once_get_a_version_each(server: S3, bucket: str, prefix: Path, other: Path) -> None:
    url, found = f"s3://{bucket}/m", dict[str, Any]()
    ready = threading.Barrier(2)

    def run(checkpoint: Path, tables: Any) -> None:
        found[export(url, checkpoint, meanwhile=lambda _: ready.wait(60))[0].rpartition("/")[2]] = tables

    threads = [threading.Thread(target=run, args=one) for one in ((prefix, TABLES), (other, OTHERS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == ["1", "2"]
    for version, tables in found.items():
        assert_complete(server, bucket, f"m/{version}", tables)
    assert leftovers(server, bucket) == []


def test_an_export_is_refused_the_version_that_another_one_writes(server: S3, bucket: str, prefix: Path) -> None:
    def second(_: StoreWriter) -> None:
        with refused(ExportError, match="version 4: an export is writing it"):
            export(f"s3://{bucket}/m", prefix, version=4)

    assert export(f"s3://{bucket}/m", prefix, meanwhile=second, version=4)[0] == f"s3://{bucket}/m/4"
    assert_complete(server, bucket, "m/4")


@pytest.mark.parametrize("request_", ["keys", "complete_upload", "head", "put", "create"])
def test_no_version_is_mixed_if_its_lock_is_deleted_under_an_export(
    server: S3, bucket: str, prefix: Path, other: Path, monkeypatch: pytest.MonkeyPatch, request_: str
) -> None:
    """Somebody believes that the first export is dead, and cleans up after it, as the message says."""
    url, original, taken = f"s3://{bucket}/m", getattr(Bucket, request_), list[str]()

    def clean_up_and_export(self: Bucket, *arguments: Any) -> Any:
        monkeypatch.setattr(Bucket, request_, original)
        for key in ("m/.staging-1", *server.keys(bucket, "m/1/")):
            server.delete(bucket, key)
        taken.append(
            export(url, other)[0].removeprefix(f"s3://{bucket}/")
        )  # 2 if the first one has written something since
        return original(self, *arguments)

    with pytest.raises(ExportError, match="version 1"):  # which of two messages depends on the threads of the first one
        export(url, prefix, meanwhile=lambda _: monkeypatch.setattr(Bucket, request_, clean_up_and_export))
    assert_complete(server, bucket, taken[0], OTHERS)
    graphs = [key for key in server.keys(bucket, "m/") if key.endswith("/saved_model.pb")]
    assert graphs == [f"{taken[0]}/saved_model.pb"]


def test_an_export_whose_lock_was_replaced_leaves_everything_to_the_other_one(
    server: S3, bucket: str, prefix: Path
) -> None:
    def take_over(_: StoreWriter) -> None:
        server.put(bucket, "m/.staging-1", b"the lock of another export")

    with refused(ExportError, match="was removed or replaced"):
        export(f"s3://{bucket}/m", prefix, meanwhile=take_over)
    assert "m/.staging-1" in server.keys(bucket)
    assert "m/1/saved_model.pb" not in server.keys(bucket)


def test_a_bucket_that_was_removed_is_named(proxy: S3Proxy, bucket: str, prefix: Path) -> None:
    def lose(_: StoreWriter) -> None:
        proxy.fault = lambda _: (404, "NoSuchBucket")

    with refused(ExportError, match=f"'{bucket}'"):
        export(f"s3://{bucket}/m", prefix, meanwhile=lose)
