"""Which export gets which version, and when it is seen."""

from pathlib import Path

import pytest

from tests.support.export.fakes import source_of
from tests.support.export.store_exports import assert_complete, export, fill, leftovers, plan_of, stage
from tests.support.messages import refused
from tests.support.stores import S3, S3Proxy
from tpuembed.errors import ConfigError, ExportError
from tpuembed.export.options import ExportOptions
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
        assert server.keys(bucket) == ["m/.staging-1"]
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


@pytest.mark.parametrize("name", ["saved_model.pb", "variables/variables.index"])
def test_what_another_program_wrote_meanwhile_is_kept(server: S3, bucket: str, prefix: Path, name: str) -> None:
    key = f"m/1/{name}"
    with refused(ExportError, match="version 1"):
        export(f"s3://{bucket}/m", prefix, meanwhile=lambda _: server.put(bucket, key, b"another one"))
    assert server.keys(bucket) == [key]
    assert server.get(bucket, key) == b"another one"
    assert server.uploads(bucket) == []


def test_a_folder_that_another_program_fills_is_no_free_version(server: S3, bucket: str, prefix: Path) -> None:
    server.put(bucket, "m/4/variables/variables.index", b"another one")
    assert export(f"s3://{bucket}/m", prefix)[0] == f"s3://{bucket}/m/5"
    with refused(ExportError, match="version 4 exists"):
        export(f"s3://{bucket}/m", prefix, version=4)
    assert server.keys(bucket, "m/4/") == ["m/4/variables/variables.index"]


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
