"""Object stores on this machine: moto's S3, and a stub of Google Cloud Storage's XML API, which its client speaks."""

import base64
import contextlib
import functools
import hashlib
import http.client
import http.server
import os
import re
import ssl
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self
from xml.sax.saxutils import escape

__all__ = ["S3", "GcsStub", "S3Proxy", "S3Request", "moto_server"]


class S3:
    """moto's S3 at `url`, written with Amazon's own client."""

    def __init__(self, url: str) -> None:
        import boto3

        self.environment = {
            "AWS_ENDPOINT_URL": url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }
        secrets = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
        self._client: Any = boto3.client("s3", endpoint_url=url, **secrets)

    def make_bucket(self, bucket: str) -> None:
        self._client.create_bucket(Bucket=bucket)

    def put(self, bucket: str, key: str, data: bytes) -> None:
        self._client.put_object(Bucket=bucket, Key=key, Body=data)

    def publish(self, bucket: str) -> None:
        """Let anyone list it, and read what is in it."""
        self._client.put_bucket_acl(Bucket=bucket, ACL="public-read")
        for found in self._client.list_objects_v2(Bucket=bucket).get("Contents", ()):
            self._client.put_object_acl(Bucket=bucket, Key=found["Key"], ACL="public-read")

    def delete(self, bucket: str, key: str) -> None:
        self._client.delete_object(Bucket=bucket, Key=key)

    def get(self, bucket: str, key: str) -> bytes:
        data: bytes = self._client.get_object(Bucket=bucket, Key=key)["Body"].read()
        return data

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        return [
            found["Key"] for found in self._client.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", ())
        ]

    def uploads(self, bucket: str) -> list[str]:
        """Keys of the uploads that are neither completed nor aborted."""
        return [found["Key"] for found in self._client.list_multipart_uploads(Bucket=bucket).get("Uploads", ())]

    def download(self, bucket: str, prefix: str, folder: Path) -> Path:
        """Every object below `prefix`/ as a file below `folder`, which it returns."""
        for key in self.keys(bucket, f"{prefix}/"):
            path = folder / key.removeprefix(f"{prefix}/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.get(bucket, key))
        return folder

    def upload(self, folder: Path, bucket: str, prefix: str) -> str:
        """Every file below `folder`, as `prefix`/...; the URL of what then is the folder."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(bucket, f"{prefix}/{path.relative_to(folder)}", path.read_bytes())
        return f"s3://{bucket}/{prefix}"


_MOTO = """
import threading
from moto import server

lock, answer = threading.Lock(), server.DomainDispatcherApplication.__call__

def in_turn(app, environ, start_response):
    if "HTTP_IF_MATCH" in environ or "HTTP_IF_NONE_MATCH" in environ:
        with lock:
            return answer(app, environ, start_response)
    return answer(app, environ, start_response)

server.DomainDispatcherApplication.__call__ = in_turn
server.main()
"""
"""Moto checks a condition and writes in two steps. Two requests at once could both succeed, which a store rules out."""


@contextlib.contextmanager
def moto_server(min_part_bytes: int = 5 << 20) -> Iterator[S3]:
    """A process of moto's server on a free port of the loopback, which takes no smaller parts but an upload's last."""
    environment = {**os.environ, "S3_UPLOAD_PART_MIN_SIZE": str(min_part_bytes)}
    command = [sys.executable, "-c", _MOTO, "-H", "127.0.0.1", "-p", "0"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stderr=pipe, stdout=subprocess.DEVNULL, text=True, env=environment) as server:
        assert server.stderr is not None
        for line in server.stderr:
            if found := re.search(r"Running on (http://127\.0\.0\.1:\d+)", line):
                break
        else:
            raise AssertionError("moto's server did not start")
        # Its log would fill the pipe.
        reader = threading.Thread(target=lambda: [None for _ in server.stderr or ()], daemon=True)
        reader.start()
        try:
            yield S3(found[1])
        finally:
            server.terminate()
            reader.join()


class S3Request(NamedTuple):
    """A request as it came.

    Attributes:
        number: how many came before it.
        part: of an upload; 0 where it is of none.
    """

    number: int
    method: str
    key: str
    part: int
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


class _Running:
    """A context in which `_server` serves, in a thread of its own."""

    _server: http.server.ThreadingHTTPServer

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class S3Proxy(_Running):
    """In front of a store: it checks Content-MD5, as Amazon's does and moto does not, and can misbehave.

    Attributes:
        requests: all that came, their bodies left out.
        fault: asked about every request: a status and an error code to answer with instead; a body of "drop" for
            a connection that ends without an answer.
        damage: what a body is on its way.
        forgets: a header that it does not pass on.
        loses: whether a request's answer is lost.
        environment: what points clients here.
    """

    def __init__(self, store: S3, tls: ssl.SSLContext | None = None) -> None:
        """In front of `store`; with `tls` its URL is of https, of localhost."""
        self.requests: list[S3Request] = []
        self.fault: Callable[[S3Request], tuple[int, str] | None] = lambda _: None
        self.damage: Callable[[S3Request], bytes] = lambda request: request.body
        self.forgets = ""
        self.loses: Callable[[S3Request], bool] = lambda _: False
        self.upstream = urllib.parse.urlsplit(store.environment["AWS_ENDPOINT_URL"]).netloc
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _ProxyRequest)
        self._server.daemon_threads = True
        self._server.proxy = self  # type: ignore[attr-defined]
        url = f"http://127.0.0.1:{self._server.server_address[1]}"
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
            url = f"https://localhost:{self._server.server_address[1]}"
        self.environment = {**store.environment, "AWS_ENDPOINT_URL": url}


class _ProxyRequest(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
        pass

    def _handle(self) -> None:
        proxy: S3Proxy = self.server.proxy  # type: ignore[attr-defined]
        if self.headers.get("Expect", "") == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        place = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(place.query, keep_blank_values=True))
        key = urllib.parse.unquote(place.path).lstrip("/").partition("/")[2]
        part = int(query.get("partNumber", 0))
        request = S3Request(len(proxy.requests), self.command, key, part, query, dict(self.headers), body)
        proxy.requests.append(request._replace(body=b""))
        fault = proxy.fault(request)
        if fault is not None:
            self._answer_fault(*fault)
            return
        body = proxy.damage(request)
        stated = self.headers.get("Content-MD5")
        if stated and stated != base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode():
            self._answer_fault(400, "BadDigest")
            return
        reply, content = self._forward(proxy, body)
        if proxy.loses(request):
            self.close_connection = True
        else:
            self._answer(reply.status, dict(reply.getheaders()), content)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _handle  # noqa: N815 - their names there

    def _answer_fault(self, status: int, code: str) -> None:
        if code == "drop":
            self.close_connection = True
            return
        self._answer(status, {}, f"<Error><Code>{code}</Code><Message>as the test wants it</Message></Error>".encode())

    def _forward(self, proxy: S3Proxy, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection(proxy.upstream, timeout=60)
        try:
            headers = {name: value for name, value in self.headers.items() if name not in ("Expect", proxy.forgets)}
            connection.request(self.command, self.path, body, headers)
            reply = connection.getresponse()
            return reply, reply.read()
        finally:
            connection.close()

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        size = (
            headers.get("content-length", headers.get("Content-Length", "0")) if self.command == "HEAD" else len(body)
        )
        self.send_header("Content-Length", str(size))
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(ConnectionError):
                self.wfile.write(body)


Fault = Callable[["_Request"], bool]
"""Answers a request in a wrong way and says True, or leaves it to the stub."""


class GcsStub(_Running):
    """Objects by "bucket/key", served as storage.googleapis.com does.

    Attributes:
        objects: what is served.
        requests: method and range of every request, in order.
        fault: asked first about every request.
        page_entries: how many keys and folders a page of a listing has.
        environment: what points the client here.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, str]] = []
        self.fault: Fault | None = None
        self.page_entries = 1000
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Request)
        self._server.stub = self  # type: ignore[attr-defined]
        url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.environment = {"GOOGLE_BASE_URL": url, "GOOGLE_SKIP_SIGNATURE": "true", "GOOGLE_ALLOW_HTTP": "true"}

    def upload(self, folder: Path, bucket: str, prefix: str) -> str:
        """Every file below `folder`, as `prefix`/...; the URL of what then is the folder."""
        for path in folder.rglob("*"):
            if path.is_file():
                self.objects[f"{bucket}/{prefix}/{path.relative_to(folder)}"] = path.read_bytes()
        return f"gs://{bucket}/{prefix}"


@functools.lru_cache(maxsize=64)
def _tag_of(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


class _Request(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
        pass

    @property
    def stub(self) -> GcsStub:
        found: GcsStub = self.server.stub  # type: ignore[attr-defined]
        return found

    @property
    def object_name(self) -> str:
        return urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).lstrip("/")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.stub.requests.append((self.command, self.object_name, self.headers.get("Range", "")))
        if self.stub.fault and self.stub.fault(self):
            return
        query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query))
        if "list-type" in query and not any(
            key.startswith(self.object_name.rstrip("/") + "/") for key in self.stub.objects
        ):
            self.answer(404, b"<Error><Code>NoSuchBucket</Code><Message>There is no such bucket.</Message></Error>")
        elif "list-type" in query:
            self.answer(200, self._listing(query).encode())
        elif self.object_name not in self.stub.objects:
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            self._serve(self.stub.objects[self.object_name])

    def _serve(self, data: bytes) -> None:
        tag = _tag_of(data)
        headers = {"ETag": tag, "Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT", "Accept-Ranges": "bytes"}
        if self.headers.get("If-Match", tag) != tag:
            self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        elif found := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            start, last = int(found[1]), int(found[2])
            headers["Content-Range"] = f"bytes {start}-{last}/{len(data)}"
            self.answer(206, data[start : last + 1], headers)
        else:
            self.answer(200, data, headers)

    def _listing(self, query: dict[str, str]) -> str:
        """A page of keys and folders in their common order; the token is the last one of the page before."""
        bucket, prefix = self.object_name.rstrip("/"), query.get("prefix", "")
        keys = [name.removeprefix(f"{bucket}/") for name in self.stub.objects if name.startswith(f"{bucket}/{prefix}")]
        names = {
            prefix + "".join(key.removeprefix(prefix).partition("/")[:2]) if "delimiter" in query else key
            for key in keys
        }
        left = sorted(name for name in names if name > query.get("continuation-token", ""))
        page = left[: self.stub.page_entries]
        entries = "".join(self._listed(bucket, name) for name in page)
        more = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if len(page) < len(left) else ""
        truncated = f"<IsTruncated>{str(bool(more)).lower()}</IsTruncated>{more}"
        return f'<?xml version="1.0"?><ListBucketResult>{truncated}{entries}</ListBucketResult>'

    def _listed(self, bucket: str, name: str) -> str:
        if name.endswith("/"):
            return f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
        data = self.stub.objects[f"{bucket}/{name}"]
        when = "<LastModified>2015-10-21T07:28:00.000Z</LastModified>"
        return f"<Contents><Key>{escape(name)}</Key>{when}<ETag>{escape(_tag_of(data))}</ETag><Size>{len(data)}</Size></Contents>"

    def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
