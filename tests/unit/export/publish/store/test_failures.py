"""Stores that fail, for a moment or for good."""

import ssl
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import trustme

from tests.support.export.fakes import source_of
from tests.support.export.store_exports import assert_complete, export, plan_of, save_graph, stage
from tests.support.messages import refused
from tests.support.stores import S3, S3Proxy, S3Request
from tpuembed.errors import ExportError
from tpuembed.export.stream.engines import choose_engine
from tpuembed.export.stream.execute import stream_tables
from tpuembed.files import put

Trouble = Callable[[S3Request], tuple[int, str] | None]


def once_per_part(status: int, code: str) -> Trouble:
    """Every part fails once, whoever sends it."""
    seen = set[tuple[str, int]]()

    def fault(request: S3Request) -> tuple[int, str] | None:
        if request.method != "PUT" or not request.part or (request.key, request.part) in seen:
            return None
        seen.add((request.key, request.part))
        return status, code

    return fault


@pytest.mark.parametrize(
    ("status", "code"), [(503, "SlowDown"), (500, "InternalError"), (400, "RequestTimeout"), (0, "drop")]
)
def test_parts_are_sent_again_after_what_may_pass(
    server: S3, proxy: S3Proxy, bucket: str, prefix: Path, status: int, code: str
) -> None:
    proxy.fault = once_per_part(status, code)
    export(f"s3://{bucket}/m", prefix)
    assert_complete(server, bucket, "m/1")


def test_a_url_that_has_expired_is_signed_anew(
    server: S3, proxy: S3Proxy, bucket: str, prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the main process, which gives the part to another worker."""
    monkeypatch.setattr("tpuembed.export.stream.engines.local._RETRY_SECONDS", (0.0,))
    expired = list[str]()

    def expire(request: S3Request) -> tuple[int, str] | None:
        if request.part != 1 or expired:
            return None
        expired.append(request.key)
        return 403, "AccessDenied</Code><Message>Request has expired</Message><Code>"

    proxy.fault, plan = expire, plan_of(prefix)
    with stage(f"s3://{bucket}/m", plan, prefix) as staging:
        save_graph(staging)
        with pytest.warns(UserWarning, match="Request has expired.*Retrying"):
            stream_tables(source_of(prefix), staging, choose_engine("local", 1))
        staging.publish()
    assert expired
    assert_complete(server, bucket, "m/1")


def test_a_part_that_was_damaged_on_its_way_is_refused_by_the_store(
    server: S3, proxy: S3Proxy, bucket: str, prefix: Path
) -> None:
    damaged = set[tuple[str, int]]()

    def damage(request: S3Request) -> bytes:
        if not request.part or (request.key, request.part) in damaged:
            return request.body
        damaged.add((request.key, request.part))
        return b"\xff" + request.body[1:]

    proxy.damage = damage
    export(f"s3://{bucket}/m", prefix)
    assert damaged
    assert_complete(server, bucket, "m/1")


def test_what_does_not_pass_is_told(server: S3, proxy: S3Proxy, bucket: str, prefix: Path) -> None:
    proxy.fault = lambda request: (403, "AccessDenied") if request.part == 3 else None
    with pytest.raises(
        ExportError, match=r"part 3: cannot be uploaded: the store answers 403 AccessDenied: as the test"
    ):
        export(f"s3://{bucket}/m", prefix)
    assert (server.keys(bucket), server.uploads(bucket)) == ([], [])


def test_a_store_that_stays_busy_is_told_in_one_short_line(proxy: S3Proxy, bucket: str, prefix: Path) -> None:
    proxy.fault = lambda request: (503, "SlowDown") if request.part == 3 else None
    line = r"part 3: cannot be uploaded: the store answers 503 SlowDown: as the test wants it \(3 times in a row\)\.$"
    with pytest.raises(ExportError, match=line):
        export(f"s3://{bucket}/m", prefix)


def test_a_failed_commit_leaves_no_object_of_the_version(server: S3, proxy: S3Proxy, bucket: str, prefix: Path) -> None:
    proxy.fault = lambda request: (403, "AccessDenied") if request.key.endswith("variables.index") else None
    with refused(ExportError, match="403"):
        export(f"s3://{bucket}/m", prefix)
    assert server.keys(bucket) == []
    assert server.uploads(bucket) == []


def test_an_answer_that_was_lost_is_no_conflict(server: S3, proxy: S3Proxy, bucket: str, prefix: Path) -> None:
    """The client tries again, and meets what it has written."""
    lost = set[str]()

    def loses(request: S3Request) -> bool:
        """Once per object, of what the main process writes."""
        if request.method not in ("PUT", "POST") or request.part or request.key in lost:
            return False
        lost.add(request.key)
        return True

    proxy.loses = loses
    export(f"s3://{bucket}/m", prefix)
    assert {"m/.staging-1", "m/1/saved_model.pb"} <= lost
    assert_complete(server, bucket, "m/1")


NO_KEYS = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_EC2_METADATA_DISABLED": "true"}


@pytest.mark.parametrize(
    ("url", "changes"),
    [
        ("s3://no-such-bucket/m", {}),
        ("s3://{}/m", NO_KEYS),
        ("s3://{}/m", {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}),
    ],
)
def test_a_store_that_cannot_be_written_is_told_at_once(
    bucket: str, prefix: Path, url: str, changes: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tpuembed.files.bucket._TRIES", 1)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(prefix))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(prefix))
    for name, value in changes.items():
        if value:
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name)
    with refused(ExportError):
        export(url.format(bucket), prefix)


def test_a_store_that_refuses_is_told_at_once(proxy: S3Proxy, bucket: str, prefix: Path) -> None:
    proxy.fault = lambda _: (403, "AccessDenied")
    with refused(ExportError, match="403"):
        export(f"s3://{bucket}/m", prefix)
    assert not any(request.part for request in proxy.requests)


@pytest.mark.parametrize(
    ("method", "ending"),
    [("POST", "-00001-of-00003"), ("GET", "m/1/"), ("PUT", ".staging-1")],
    ids=["uploads", "listings", "the lock"],
)
def test_what_a_store_refuses_later_is_told_as_well(
    server: S3, proxy: S3Proxy, bucket: str, prefix: Path, method: str, ending: str
) -> None:
    """An ExportError, whichever request it is; where the store refuses to clear up too, a warning."""

    def refuse(request: S3Request) -> tuple[int, str] | None:
        where = request.query.get("prefix", request.key)
        late = len(server.uploads(bucket)) >= (2 if method == "GET" else 0)
        return (403, "AccessDenied") if request.method == method and where.endswith(ending) and late else None

    proxy.fault = refuse
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "MODEL_DIR .* cannot be removed")
        with refused(ExportError):
            export(f"s3://{bucket}/m", prefix)
    assert not any(key.startswith("m/1/") for key in server.keys(bucket))


def test_stores_behind_a_private_authority(
    server: S3, bucket: str, prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AWS_CA_BUNDLE names it, to the main process and to workers; without it nothing is sent."""
    authority, tls = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(tls)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setattr("tpuembed.files.bucket._TRIES", 1)
    with S3Proxy(server, tls) as secure:
        monkeypatch.setenv("AWS_ENDPOINT_URL", secure.environment["AWS_ENDPOINT_URL"])
        with pytest.raises(ExportError, match="certificate verify failed"):
            export(f"s3://{bucket}/m", prefix)
        assert secure.requests == []
        monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "ca.pem"))
        put._opener.cache_clear()
        export(f"s3://{bucket}/m", prefix)
    put._opener.cache_clear()
    assert any(request.part for request in secure.requests)
    assert_complete(server, bucket, "m/1")
