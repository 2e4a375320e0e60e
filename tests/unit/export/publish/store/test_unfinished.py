"""What killed and failed exports leave, and who goes on with it."""

import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.export.fakes import write_checkpoint
from tests.support.export.store_exports import (
    TABLES,
    assert_complete,
    export,
    fail_half_way,
    fill,
    leftovers,
    plan_of,
    stage,
)
from tests.support.messages import refused
from tests.support.stores import S3, S3Proxy
from tpuembed.errors import ExportError
from tpuembed.export.publish.store import lease
from tpuembed.export.publish.store.record import Owner, StoreRecord
from tpuembed.export.publish.store.writer import StoreWriter


def test_restart_begins_anew_and_leaves_nothing(server: S3, proxy: S3Proxy, bucket: str, prefix: Path) -> None:
    fail_half_way(proxy, f"s3://{bucket}/m", prefix)
    assert len(server.uploads(bucket)) == 2
    _, report = export(f"s3://{bucket}/m", prefix, resume=False)
    assert report.bytes_reused == 0
    assert_complete(server, bucket, "m/1")
    assert leftovers(server, bucket) == []


def test_an_export_of_something_else_is_kept_and_named(
    server: S3, proxy: S3Proxy, bucket: str, prefix: Path, tmp_path: Path
) -> None:
    fail_half_way(proxy, f"s3://{bucket}/m", prefix)
    write_checkpoint(tmp_path / "other", TABLES)
    plan = plan_of(tmp_path / "other")
    with stage(f"s3://{bucket}/m", plan, tmp_path / "other") as staging:
        (kept,) = staging.kept
        assert f"s3://{bucket}/m/.staging-1 (" in kept
        assert f"from {prefix})" in kept
        fill(staging, plan, tmp_path / "other")
        assert str(staging.publish()) == f"s3://{bucket}/m/2"
    below = f"MODEL_DIR s3://{bucket}/m: .* as version 1. Version 2 already exists.* version 3 instead, start over with --restart"
    with pytest.warns(UserWarning, match=below):
        assert export(f"s3://{bucket}/m", prefix)[1].bytes_reused > 0
    assert_complete(server, bucket, "m/1")


def test_a_version_that_something_else_has_reserved_is_refused(
    server: S3, proxy: S3Proxy, bucket: str, prefix: Path, tmp_path: Path
) -> None:
    fail_half_way(proxy, f"s3://{bucket}/m", prefix)
    write_checkpoint(tmp_path / "other", TABLES)
    held = rf"version 1: an unfinished export has reserved it: s3://{bucket}/m/.staging-1 \(.*Choose another version, such as 2"
    with pytest.raises(ExportError, match=held):
        export(f"s3://{bucket}/m", tmp_path / "other", version=1)
    assert len(server.uploads(bucket)) == 2


def test_what_another_version_was_asked_for_is_not_taken_over(proxy: S3Proxy, bucket: str, prefix: Path) -> None:
    """Its uploads have their names."""
    fail_half_way(proxy, f"s3://{bucket}/m", prefix, version=5)
    assert export(f"s3://{bucket}/m", prefix, version=6)[1].bytes_reused == 0
    assert export(f"s3://{bucket}/m", prefix, version=5)[1].bytes_reused > 0


def test_a_source_that_changed_leaves_nothing_to_go_on_with(
    server: S3, proxy: S3Proxy, bucket: str, prefix: Path
) -> None:
    fail_half_way(proxy, f"s3://{bucket}/m", prefix)
    later = prefix.with_suffix(".index").stat().st_mtime + 5
    os.utime(prefix.with_suffix(".index"), (later, later))
    url, report = export(f"s3://{bucket}/m", prefix)
    assert (url, report.bytes_reused) == (f"s3://{bucket}/m/1", 0), "its stale version was removed, its number is free"
    assert leftovers(server, bucket) == []


def edit_record(server: S3, bucket: str, key: str, **changes: Any) -> None:
    record = StoreRecord.parse(server.get(bucket, key))
    assert record
    server.put(bucket, key, dataclasses.replace(record, **changes).to_bytes())


def elsewhere() -> Owner:
    return Owner(token="t", machine="another", process=1, started="1")


@contextlib.contextmanager
def heartbeats(server: S3, bucket: str, key: str) -> Iterator[None]:
    """Somebody far away who renews the record."""
    is_over, beats = threading.Event(), 0

    def run() -> None:
        nonlocal beats
        while not is_over.wait(0.1):
            beats += 1
            edit_record(server, bucket, key, beats=beats)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def test_what_lives_on_another_machine_is_left_alone(server: S3, proxy: S3Proxy, bucket: str, prefix: Path) -> None:
    url, key = f"s3://{bucket}/m", "m/.staging-1/record"
    fail_half_way(proxy, url, prefix)
    edit_record(server, bucket, key, owner=elsewhere())
    may_live = "may still run on another machine"
    with heartbeats(server, bucket, key):
        with pytest.warns(UserWarning, match=may_live):
            assert export(url, prefix)[0] == f"{url}/2"
        taken = refused(ExportError, match="version 1")
        with pytest.warns(UserWarning, match=may_live), taken:
            export(url, prefix, version=1)


def test_what_died_on_another_machine_is_taken_over_when_it_was_silent(
    server: S3, proxy: S3Proxy, bucket: str, prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_half_way(proxy, f"s3://{bucket}/m", prefix)
    edit_record(server, bucket, "m/.staging-1/record", owner=elsewhere())
    monkeypatch.setattr(lease, "LEASE_SECONDS", 2.0)
    with pytest.warns(UserWarning, match="Waiting up to 2 seconds"):
        url, report = export(f"s3://{bucket}/m", prefix)
    assert url == f"s3://{bucket}/m/1"
    assert report.bytes_reused > 0
    assert_complete(server, bucket, "m/1")


def test_who_was_taken_over_stops(server: S3, bucket: str, prefix: Path) -> None:
    def lose(_: StoreWriter) -> None:
        edit_record(server, bucket, "m/.staging-1/record", owner=elsewhere())

    with refused(ExportError):
        export(f"s3://{bucket}/m", prefix, meanwhile=lose)
    assert server.keys(bucket) == ["m/.staging-1/record"]
    assert len(server.uploads(bucket)) == 2, "they are the other's now"


@pytest.mark.parametrize("notices", ["the commit", "a worker"])
def test_whose_record_was_removed_keeps_nothing_and_says_so(
    server: S3, bucket: str, prefix: Path, notices: str
) -> None:
    """No other export has taken it over, and none can go on with it."""

    def run() -> None:
        plan = plan_of(prefix)
        with stage(f"s3://{bucket}/m", plan, prefix) as staging:
            fill(staging, plan, prefix)
            staging._lease.stop()  # which may notice it first
            server.delete(bucket, "m/.staging-1/record")
            if notices == "a worker":
                raise ExportError("a part is gone")
            staging.publish()

    removed = "version 1: its record, .staging-1/record, was removed meanwhile. Nothing is kept. Export again.$"
    message = removed if notices == "the commit" else "^a part is gone$"
    with pytest.raises(ExportError, match=message):
        run()
    assert leftovers(server, bucket) == []


def test_a_bucket_that_was_removed_is_named(server: S3, proxy: S3Proxy, bucket: str, prefix: Path) -> None:
    def lose(_: StoreWriter) -> None:
        proxy.fault = lambda _: (404, "NoSuchBucket")

    with refused(ExportError, match=f"'{bucket}'"):
        export(f"s3://{bucket}/m", prefix, meanwhile=lose)


def test_a_commit_that_was_killed_half_way_is_gone_on_with(
    server: S3, proxy: S3Proxy, bucket: str, prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uploads are completed, and so gone; the objects that they became are known by their ETags."""

    def die(staging: StoreWriter) -> None:
        staging._complete()
        server.put(bucket, "m/1/assets.extra/stray", b"of the one who was killed")
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoreWriter, "_leave", lambda *_, **__: None)  # as one who was killed
        with pytest.raises(KeyboardInterrupt):
            export(f"s3://{bucket}/m", prefix, meanwhile=die)
    url, report = export(f"s3://{bucket}/m", prefix)
    assert (url, report.bytes_reused) == (f"s3://{bucket}/m/1", plan_of(prefix).table_bytes)
    assert_complete(server, bucket, "m/1")
    assert "m/1/assets.extra/stray" not in server.keys(bucket)
    assert leftovers(server, bucket) == []


def test_a_reservation_that_outlived_its_version_is_removed(server: S3, bucket: str, prefix: Path) -> None:
    """Its export was killed between its last object and the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoreWriter, "_leave", lambda *_, **__: None)
        export(f"s3://{bucket}/m", prefix)
    before = {key: server.get(bucket, key) for key in server.keys(bucket, "m/1/")}
    with refused(ExportError, match="version 1 exists"):
        export(f"s3://{bucket}/m", prefix, version=1)
    assert export(f"s3://{bucket}/m", prefix)[0] == f"s3://{bucket}/m/2"
    assert {key: server.get(bucket, key) for key in server.keys(bucket, "m/1/")} == before
    assert leftovers(server, bucket) == []


def test_parts_that_were_not_checked_are_streamed_again(server: S3, proxy: S3Proxy, bucket: str, prefix: Path) -> None:
    fail_half_way(proxy, f"s3://{bucket}/m", prefix)
    plan = plan_of(prefix, require_finite=True)
    with stage(f"s3://{bucket}/m", plan, prefix) as staging:
        assert fill(staging, plan, prefix).bytes_reused == 0
        staging.publish()
    assert_complete(server, bucket, "m/1")
    assert leftovers(server, bucket) == []
