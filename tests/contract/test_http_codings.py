"""Compressed bodies over a socket, on every route that takes a body: what is decoded, and what is refused with which status."""

import contextlib
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.messages import said
from tests.support.serving.doubles import DoublingServable, wait_for
from tests.support.serving.served import Served

BODY: Final = json.dumps({"instances": [1, 2]}).encode()
INFER: Final = json.dumps({"inputs": [{"name": "x", "datatype": "INT64", "shape": [2], "data": [1, 2]}]}).encode()
BODIES: Final = {
    "/v1/models/m:predict": BODY, "/v1/models/m/versions/1:predict": BODY, "/v1/models/m:classify": BODY,
    "/v1/models/m:regress": BODY, "/v2/models/m/infer": INFER, "/v2/models/m/versions/1/infer": INFER, "/invocations": BODY,
    "/vertex": BODY,
}  # fmt: skip
"""A body for each route. No signature of the model takes examples, so `classify` and `regress` decode it and refuse it."""


def compressed(body: bytes) -> bytes:
    return gzip.compress(body, mtime=0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("codings")
    options: dict[str, Any] = {"max_body_bytes": 100_000, "predict_route": "/vertex"}
    with (
        pytest.MonkeyPatch.context() as patch,
        Served(folder, patch, lambda _: DoublingServable(), **options) as running,
    ):
        wait_for(lambda: running.listens and running.ask("GET", "/readyz")[0] == 200)
        yield running


def post(
    server: Served, path: str, body: bytes, *codings: str, chunked: bool = False
) -> tuple[int, dict[str, str], str]:
    """Status, headers, and the text of an error."""
    with contextlib.closing(server.connect()) as connection:
        connection.putrequest("POST", path)
        for coding in codings:
            connection.putheader("content-encoding", coding)
        connection.putheader(*(("transfer-encoding", "chunked") if chunked else ("content-length", str(len(body)))))
        connection.endheaders([body] if chunked else body, encode_chunked=chunked)
        reply = connection.getresponse()
        return reply.status, dict(reply.getheaders()), json.loads(reply.read()).get("error", "")


@pytest.mark.parametrize(
    "codings", [["gzip"], ["GZIP"], ["x-gzip"], ["identity, gzip"], ["gzip", "identity"], [" gzip ,"]]
)
def test_gzip_is_decoded(server: Served, codings: list[str]) -> None:
    for path, body in BODIES.items():
        status, _, error = post(server, path, body)
        for packed in (compressed(body), compressed(body[:9]) + compressed(b"") + compressed(body[9:])):
            for chunked in (False, True):
                found = post(server, path, packed, *codings, chunked=chunked)
                assert (found[0], found[2]) == (status, error)


@pytest.mark.parametrize(
    "codings", [["deflate"], ["br"], ["zstd"], ["gzip, gzip"], ["gzip", "gzip"], ["br, gzip"], ["gzipped"]]
)
def test_other_codings_are_415(server: Served, codings: list[str]) -> None:
    errors = set()
    for path, body in BODIES.items():
        for sent in (body, zlib.compress(body), compressed(compressed(body))):
            status, headers, error = post(server, path, sent, *codings)
            assert (status, headers["accept-encoding"]) == (415, "gzip")
            errors.add(error)
    (error,) = errors
    said(error)


PACKED: Final = bytes.fromhex("1f8b0800000000000203ab56cacc2b2e49cc4b4e2d56b2528836d451308aad05003a98b40d15000000")
"""BODY. Written out, because messages name its sizes, which depend on the version of zlib."""
DAMAGED: Final = {
    "not gzip": BODY,
    "zlib": zlib.compress(BODY),
    "empty": b"",
    "in the header": PACKED[:5],
    "in the data": PACKED[:-9],
    "in the checksum": PACKED[:-5],
    "in the size": PACKED[:-1],
    "another checksum": PACKED[:-8] + bytes(8),
    "bad data": PACKED[:10] + b"\xff" * 9 + PACKED[19:],
    "bytes after it": PACKED + b"garbage",
    "zeros after it": PACKED + bytes(100),
    "a second member that is cut off": PACKED + PACKED[:-1],
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_gzip_is_400(server: Served, what: str) -> None:
    errors = set()
    for path in BODIES:
        status, _, error = post(server, path, DAMAGED[what], "gzip")
        assert (status, "gzip" in error) == (400, True)
        errors.add(error)
    (error,) = errors
    said(error)


def test_more_than_the_limit_is_413(server: Served) -> None:
    for path, body in BODIES.items():
        full = compressed(body + b" " * (100_000 - len(body)))
        for packed, status in (
            (full, post(server, path, body)[0]),
            (full + compressed(b" "), 413),
            (compressed(body + b" " * 50_000_000), 413),
            (compressed(b" " * 100_001)[:-8], 413),
        ):
            assert len(packed) < 100_000
            assert post(server, path, packed, "gzip")[0] == status


def test_a_body_that_says_that_it_is_over_the_limit_is_refused_before_it_comes(server: Served) -> None:
    with contextlib.closing(server.connect()) as connection:
        connection.putrequest("POST", "/v1/models/m:predict")
        connection.putheader("content-length", "100001")
        connection.endheaders(BODY)
        assert connection.getresponse().status == 413


def test_the_limits_of_a_server_without_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    too_much, large = b" " * ((32 << 20) + 1), compressed(BODY + b" " * (2 << 20))
    with Served(tmp_path, monkeypatch, lambda _: DoublingServable()) as server:
        wait_for(lambda: server.listens and server.ask("GET", "/readyz")[0] == 200)
        for body, coding in ((compressed(too_much), "gzip"), (too_much, "identity")):
            status, _, error = post(server, "/v1/models/m:predict", body, coding)
            assert (status, f"limit of {32 << 20} bytes" in error) == (413, True)
        assert post(server, "/v1/models/m:predict", large, "gzip")[0] == 200
