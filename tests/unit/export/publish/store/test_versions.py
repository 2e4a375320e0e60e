"""Which export gets which version, and when it is seen."""

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.export.fakes import source_of
from tests.support.export.store_exports import assert_complete, export, fill, leftovers, plan_of, stage
from tests.support.messages import refused
from tests.support.stores import S3, S3Proxy
from tpuembed.errors import ConfigError, ExportError
from tpuembed.export.options import ExportOptions
from tpuembed.export.publish.store import lease
from tpuembed.export.publish.store.record import StoreModelDir
from tpuembed.export.run import choose_writer


def test_versions_follow_each_other(server: S3, bucket: str, prefix: Path) -> None:
    url = f"s3://{bucket}/deep/models"
    assert export(url, prefix)[0] == f"{url}/1"
    assert export(url, prefix, version=7)[0] == f"{url}/7"
    assert export(url, prefix)[0] == f"{url}/8"
    for version in (1, 7, 8):
        assert_complete(server, bucket, f"deep/models/{version}")
    assert leftovers(server, bucket) == []
    with refused(ExportError, match="version 7"):
        export(url, prefix, version=7)


def test_the_buckets_root_is_a_model_dir(server: S3, bucket: str, prefix: Path) -> None:
    assert export(f"s3://{bucket}", prefix)[0] == f"s3://{bucket}/1"
    assert_complete(server, bucket, "1")


def test_the_graph_is_written_last_and_nothing_is_listed_before_the_commit(
    server: S3, proxy: S3Proxy, bucket: str, prefix: Path
) -> None:
    plan = plan_of(prefix)
    with stage(f"s3://{bucket}/m", plan, prefix) as staging:
        fill(staging, plan, prefix)
        assert [key for key in server.keys(bucket) if not key.startswith("m/.staging-1/")] == []
        assert len(server.uploads(bucket)) == 2
        before = len(proxy.requests)
        staging.publish()
    written = [(one.method, one.key, one.headers) for one in proxy.requests[before:] if one.method in ("PUT", "POST")]
    version = [key for _, key, _ in written if not key.startswith("m/.staging")]
    assert version[-1] == "m/1/saved_model.pb"
    assert version.count("m/1/saved_model.pb") == 1
    (graph,) = (headers for _, key, headers in written if key == "m/1/saved_model.pb")
    assert graph["If-None-Match"] == "*"
    assert {method for method, key, _ in written if ".data-0000" in key and not key.endswith("00000-of-00001")} == {
        "POST"
    }


def after_looking(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Have every thread call `act` once, when it has seen which version is free and has not reserved it."""
    looks, look = Counter[int](), lease.list_versions

    def look_and_act(root: StoreModelDir) -> lease.StoreVersions:
        found = look(root)
        looks[threading.get_ident()] += 1
        if looks[threading.get_ident()] == 2:  # the first look is for what is unfinished
            act()
        return found

    monkeypatch.setattr(lease, "list_versions", look_and_act)


def test_two_exports_at_once_get_a_version_each(
    server: S3, bucket: str, prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, found = f"s3://{bucket}/m", list[str]()
    after_looking(monkeypatch, threading.Barrier(2).wait)
    threads = [threading.Thread(target=lambda: found.append(export(url, prefix)[0])) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [f"{url}/1", f"{url}/2"]
    assert_complete(server, bucket, "m/1")
    assert_complete(server, bucket, "m/2")
    assert leftovers(server, bucket) == []


def test_a_version_that_was_committed_a_moment_ago_is_not_written_over(
    server: S3, bucket: str, prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, first = f"s3://{bucket}/m", list[str]()
    after_looking(monkeypatch, lambda: first.append(export(url, prefix)[0]))
    second, _ = export(url, prefix)
    assert (first, second) == ([f"{url}/1"], f"{url}/2")
    assert_complete(server, bucket, "m/1")
    assert_complete(server, bucket, "m/2")
    assert leftovers(server, bucket) == []


def test_one_version_is_written_by_one_export(server: S3, bucket: str, prefix: Path) -> None:
    plan, url = plan_of(prefix), f"s3://{bucket}/m"
    with stage(url, plan, prefix, version=3) as first:
        with refused(ExportError, match="version 3"):
            stage(url, plan, prefix, version=3).reserve()
        with stage(url, plan, prefix) as second:
            fill(second, plan, prefix)
            assert str(second.publish()) == f"{url}/4"
        fill(first, plan, prefix)
        assert str(first.publish()) == f"{url}/3"
    assert_complete(server, bucket, "m/3")
    assert_complete(server, bucket, "m/4")


def test_a_graph_that_somebody_wrote_meanwhile_is_kept(server: S3, bucket: str, prefix: Path) -> None:
    with refused(ExportError, match="version 1"):
        export(f"s3://{bucket}/m", prefix, meanwhile=lambda _: server.put(bucket, "m/1/saved_model.pb", b"another one"))
    assert server.get(bucket, "m/1/saved_model.pb") == b"another one"


def test_a_store_that_ignores_conditions_is_refused(proxy: S3Proxy, bucket: str, prefix: Path) -> None:
    proxy.forgets = "If-None-Match"
    with refused(ExportError):
        export(f"s3://{bucket}/m", prefix)


@pytest.mark.parametrize("url", ["gs://bucket/m", "memory://bucket/m"])
def test_other_stores_are_refused_by_name(url: str, prefix: Path) -> None:
    with refused(ConfigError):
        choose_writer(url, plan_of(prefix), ExportOptions(), source_of(prefix))


def test_mapped_tables_in_a_store_need_to_know_where_they_will_lie(bucket: str, prefix: Path) -> None:
    plan = plan_of(prefix, layout="mmap")
    with refused(ConfigError):
        stage(f"s3://{bucket}/m", plan, prefix, layout="mmap").check()
    stage(f"s3://{bucket}/m", plan, prefix, layout="mmap", serving_root="/models").check()
