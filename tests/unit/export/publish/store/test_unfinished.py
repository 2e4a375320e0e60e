"""What killed, failed and concurrent exports leave: one version at most, whole, and nothing beside it."""

import threading
from collections.abc import Callable
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
    fill,
    leftovers,
    plan_of,
    stage,
)
from tests.support.messages import refused
from tests.support.stores import S3, S3Proxy, S3Request
from tpuembed.errors import ExportError
from tpuembed.export.publish.store.writer import StoreWriter

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


def at(proxy: S3Proxy, method: str, ending: str, act: Callable[[], object]) -> None:
    """Call `act` once, before the store gets the first request that writes an object whose key ends so."""
    pending = [act]

    def look(request: S3Request) -> tuple[int, str] | None:
        is_it = request.method == method and request.key.endswith(ending) and "uploads" not in request.query
        if not is_it or not pending:
            return None
        pending.pop()()
        return None

    proxy.fault = look


def test_an_export_that_fails_leaves_nothing(server: S3, proxy: S3Proxy, bucket: str, prefix: Path) -> None:
    fail_half_way(proxy, f"s3://{bucket}/m", prefix)
    assert (server.keys(bucket), server.uploads(bucket)) == ([], [])
    assert export(f"s3://{bucket}/m", prefix)[0] == f"s3://{bucket}/m/1"
    assert_complete(server, bucket, "m/1")


def test_an_export_that_was_killed_while_it_streamed(server: S3, proxy: S3Proxy, bucket: str, prefix: Path) -> None:
    proxy.fault = lambda request: (403, "AccessDenied") if request.part == 3 else None
    kill(f"s3://{bucket}/m", prefix)
    proxy.fault = lambda _: None
    assert server.keys(bucket) == []
    assert len(server.uploads(bucket)) == 2
    assert export(f"s3://{bucket}/m", prefix)[0] == f"s3://{bucket}/m/1"
    assert_complete(server, bucket, "m/1")
    assert leftovers(server, bucket) == []


@pytest.mark.parametrize(
    ("method", "ending"),
    [
        ("PUT", ".staging-1"),
        ("POST", "-00001-of-00003"),
        ("POST", "-00002-of-00003"),
        ("PUT", "variables.index"),
        ("PUT", "saved_model.pb"),
    ],
)
def test_an_export_that_was_killed_while_it_committed(
    server: S3, proxy: S3Proxy, bucket: str, prefix: Path, other: Path, method: str, ending: str
) -> None:
    """The next one takes its number, and removes its objects."""
    url = f"s3://{bucket}/m"
    committing: list[bool] = []

    def fault(request: S3Request) -> tuple[int, str] | None:
        is_it = request.method == method and request.key.endswith(ending) and "uploads" not in request.query
        return (403, "AccessDenied") if is_it and committing else None

    def commit(_: StoreWriter) -> None:
        committing.append(True)

    proxy.fault = fault
    kill(url, prefix, meanwhile=commit)
    if ending != ".staging-1":
        server.put(bucket, "m/1/assets.extra/stray", b"of the one who was killed")
    proxy.fault = lambda _: None
    assert export(url, other)[0] == f"{url}/1"
    assert_complete(server, bucket, "m/1", OTHERS)
    assert "m/1/assets.extra/stray" not in server.keys(bucket)
    assert leftovers(server, bucket) == []


def test_an_export_that_was_killed_after_its_commit(server: S3, bucket: str, prefix: Path) -> None:
    url = f"s3://{bucket}/m"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoreWriter, "abandon", lambda *_, **__: None)
        export(url, prefix)
    before = {key: server.get(bucket, key) for key in server.keys(bucket, "m/1/")}
    with refused(ExportError, match="version 1 exists"):
        export(url, prefix, version=1)
    assert export(url, prefix)[0] == f"{url}/2"
    assert {key: server.get(bucket, key) for key in server.keys(bucket, "m/1/")} == before
    assert leftovers(server, bucket) == []


def test_of_two_exports_at_once_one_gets_the_version(server: S3, bucket: str, prefix: Path, other: Path) -> None:
    url, found, errors = f"s3://{bucket}/m", list[Path](), list[str]()
    ready = threading.Barrier(2)

    def run(checkpoint: Path) -> None:
        try:
            export(url, checkpoint, meanwhile=lambda _: ready.wait(60))
            found.append(checkpoint)
        except ExportError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=run, args=(checkpoint,)) for checkpoint in (prefix, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(found), len(errors)) == (1, 1), errors
    assert errors[0].startswith(f"MODEL_DIR {url}: version 1")
    assert errors[0].endswith("Export again.")
    assert_complete(server, bucket, "m/1", TABLES if found == [prefix] else OTHERS)
    assert leftovers(server, bucket) == []
    assert all(key.startswith("m/1/") for key in server.keys(bucket))


def test_the_version_exists_when_an_export_commits(server: S3, bucket: str, prefix: Path, other: Path) -> None:
    url = f"s3://{bucket}/m"
    with refused(ExportError, match="version 1"):
        export(url, prefix, meanwhile=lambda _: export(url, other))
    assert_complete(server, bucket, "m/1", OTHERS)
    assert leftovers(server, bucket) == []


def test_the_version_exists_when_an_export_sends_its_parts(server: S3, bucket: str, prefix: Path, other: Path) -> None:
    """The one that got the version has removed all uploads below it. The other one names the reason."""
    url, plan = f"s3://{bucket}/m", plan_of(prefix)
    with refused(ExportError, match="version 1 exists"), stage(url, plan, prefix) as staging:
        begin = staging.open

        def slow() -> Any:
            tasks = begin()
            export(url, other)
            return tasks

        staging.open = slow  # type: ignore[method-assign]
        fill(staging, plan, prefix)
    assert_complete(server, bucket, "m/1", OTHERS)
    assert leftovers(server, bucket) == []


@pytest.mark.parametrize("ending", ["-00002-of-00003", "variables.index", "saved_model.pb"])
def test_a_commit_is_left_alone_by_an_export_that_had_begun(
    server: S3, proxy: S3Proxy, bucket: str, prefix: Path, other: Path, ending: str
) -> None:
    url, plan, tried = f"s3://{bucket}/m", plan_of(other), list[bool]()
    with stage(url, plan, other) as second:
        fill(second, plan, other)

        def publish() -> None:
            with refused(ExportError, match="is publishing it now"):
                second.publish()
            tried.append(True)

        at(proxy, "PUT" if "of" not in ending else "POST", ending, publish)
        assert export(url, prefix)[0] == f"{url}/1"
    assert tried
    assert_complete(server, bucket, "m/1")
    assert leftovers(server, bucket) == []


@pytest.mark.parametrize("ending", ["-00002-of-00003", "variables.index", "saved_model.pb"])
def test_a_commit_that_lasts_longer_than_a_whole_export(
    server: S3, proxy: S3Proxy, bucket: str, prefix: Path, other: Path, ending: str
) -> None:
    """The export that began later takes it for killed, and gets the version. The slow one changes nothing of it."""
    url = f"s3://{bucket}/m"
    at(proxy, "PUT" if "of" not in ending else "POST", ending, lambda: export(url, other))
    with refused(ExportError, match="version 1"):
        export(url, prefix)
    assert_complete(server, bucket, "m/1", OTHERS)
    assert leftovers(server, bucket) == []


def test_a_graph_whose_other_files_were_removed_is_taken_back(
    server: S3, proxy: S3Proxy, bucket: str, prefix: Path
) -> None:
    """Another export took the lock over, at the last moment."""

    def take_over() -> None:
        server.put(bucket, "m/.staging-1", b"the lock of another export")
        for key in server.keys(bucket, "m/1/"):
            server.delete(bucket, key)

    at(proxy, "PUT", "saved_model.pb", take_over)
    with refused(ExportError, match="took it over"):
        export(f"s3://{bucket}/m", prefix)
    assert server.keys(bucket) == ["m/.staging-1"]
    assert server.uploads(bucket) == []


def test_a_bucket_that_was_removed_is_named(proxy: S3Proxy, bucket: str, prefix: Path) -> None:
    def lose(_: StoreWriter) -> None:
        proxy.fault = lambda _: (404, "NoSuchBucket")

    with refused(ExportError, match=f"'{bucket}'"):
        export(f"s3://{bucket}/m", prefix, meanwhile=lose)
