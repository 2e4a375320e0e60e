"""Objects in stores: moto's S3, and a stub of Google's, which can also misbehave."""

import errno
import io
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.messages import refused
from tests.support.stores import S3, GcsStub, moto_server
from tpuembed.files import as_path, open_bytes, open_stream, read_all, remote, versions

DATA = np.random.default_rng(0).bytes(10_000_000)


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with moto_server() as server:
        yield server


@pytest.fixture
def gcs(monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsStub]:
    with GcsStub() as stub:
        for name, value in stub.environment.items():
            monkeypatch.setenv(name, value)
        remote._store.cache_clear()
        yield stub
    remote._store.cache_clear()


class Store:
    """One of the two, filled alike."""

    def __init__(self, put: Any, url: str) -> None:
        self.put, self.url = put, url


@pytest.fixture(params=["s3", "gs"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Store:
    bucket = "bucket-" + str(abs(hash(request.node.name)))
    if request.param == "gs":
        stub: GcsStub = request.getfixturevalue("gcs")
        return Store(lambda key, data: stub.objects.update({f"{bucket}/{key}": data}), f"gs://{bucket}")
    server: S3 = request.getfixturevalue("s3")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    server.make_bucket(bucket)
    return Store(lambda key, data: server.put(bucket, key, data), f"s3://{bucket}")


def read(file: Any, offset: int, size: int) -> bytes:
    out = bytearray(size)
    file.read_into(offset, memoryview(out))
    return bytes(out)


def test_exact_ranges(store: Store) -> None:
    store.put("dir/object", DATA)
    file = open_bytes(as_path(f"{store.url}/dir/object"))
    assert file.version.size == len(DATA)
    for offset, size in [(0, len(DATA)), (0, 0), (len(DATA), 0), (17, 1), (len(DATA) - 1, 1), (4 << 20, 4 << 20)]:
        assert read(file, offset, size) == DATA[offset : offset + size]
    outs = [bytearray(size) for size in (5, 5_000_000, 0, 9)]
    offsets = [1_000_000, 4_000_000, 3, 0]
    read_all([(file, [(offset, memoryview(out)) for offset, out in zip(offsets, outs, strict=True)])])
    for offset, out in zip(offsets, outs, strict=True):
        assert out == DATA[offset : offset + len(out)]
    other = [bytearray(7), bytearray(8)]
    read_all([(file, [(7, memoryview(other[0]))]), (file, [(2, memoryview(other[1]))])])
    assert other == [DATA[7:14], DATA[2:10]]
    with refused(EOFError, match="10000000, 3 bytes"):
        read(file, len(DATA) - 2, 5)
    with refused(EOFError, match="10000000, 1 bytes"):
        read(file, len(DATA) - 1, 2)


def test_names_that_the_client_cannot_spell_are_not_there(store: Store) -> None:
    path = as_path(store.url) / "a\x01b"
    assert not path.exists()
    with pytest.raises(FileNotFoundError, match="illegal character"):
        versions([path])


@pytest.mark.parametrize("name", ["plain", "a b", "a%20b", "é", "a:b=c&d?e#f", "x.data-00000-of-00001"])
def test_names_letter_by_letter(store: Store, name: str) -> None:
    store.put(f"dir/{name}", b"right")
    path = as_path(f"{store.url}/dir/{name}")
    assert path.read_bytes() == b"right"
    assert list(path.parent.iterdir()) == [path]


def test_listings(store: Store) -> None:
    for key in ("a/1", "a/2", "a/b/3", "ab", "top"):
        store.put(key, b"x")
    root = as_path(store.url)
    assert {path.name for path in root.iterdir()} == {"a", "ab", "top"}
    assert {path.name for path in (root / "a").iterdir()} == {"1", "2", "b"}
    assert list((root / "none").iterdir()) == []
    assert [(root / "a" / name).is_file() for name in ("1", "b", "", "4")] == [True, False, False, False]
    assert [(root / name).is_dir() for name in ("a", "a/b", "ab", "none", ".")] == [True, True, False, False, True]
    assert root.is_dir()
    assert not root.is_file()
    assert (root / "a/b").exists()
    assert not (root / "a/c").exists()


def test_listings_of_many_pages(gcs: GcsStub) -> None:
    names = {f"{number:02}" for number in range(20)}
    gcs.objects.update({f"bucket/a/{name}": b"x" for name in names} | {f"bucket/a/{name}b/c": b"x" for name in names})
    gcs.page_entries = 7
    found = [path.name for path in as_path("gs://bucket/a").iterdir()]
    assert sorted(found) == sorted(names | {f"{name}b" for name in names})
    assert len(gcs.requests) == 6


def test_buckets_that_are_missing(store: Store) -> None:
    """A folder of a bucket that is there is empty; a bucket that is not is an error, and of the missing."""
    with refused(FileNotFoundError, match="'no-such-bucket'") as caught:
        list((as_path(store.url[:5] + "no-such-bucket") / "a").iterdir())
    assert caught.value.filename.endswith("://no-such-bucket/a")


def test_what_is_missing(store: Store) -> None:
    store.put("there", b"x")
    there, missing = as_path(f"{store.url}/there"), as_path(f"{store.url}/missing")
    assert [version.size for version in versions([there, there])] == [1, 1]
    for call in (lambda: open_bytes(missing), lambda: versions([there, missing])):
        with pytest.raises(FileNotFoundError) as caught:
            call()
        assert caught.value.filename == str(missing)


def test_an_object_that_changes_is_noticed(store: Store) -> None:
    """Never rows of the old one and of the new."""
    store.put("object", b"a" * 100)
    path = as_path(f"{store.url}/object")
    file = open_bytes(path)
    [before] = versions([path])
    store.put("object", b"b" * 100)
    assert versions([path]) != [before]
    with refused(OSError) as caught:
        read(file, 0, 10)
    assert (caught.value.errno, caught.value.filename) == (errno.ESTALE, str(path))


def test_a_stream(store: Store) -> None:
    store.put("object", DATA)
    with open_stream(as_path(f"{store.url}/object")) as file:
        assert file.seek(-48, io.SEEK_END) == len(DATA) - 48
        assert file.read(100) == DATA[-48:]
        file.seek(3)
        assert file.read(5) == DATA[3:8]
        file.seek(2, io.SEEK_CUR)
        assert file.read() == DATA[10:]
        file.seek(5, io.SEEK_END)
        assert (file.read(), file.read(3)) == (b"", b"")
        with pytest.raises(ValueError, match="negative seek"):
            file.seek(-1)


def test_one_byte_budget(gcs: GcsStub) -> None:
    """However many threads ask for however much: at most 16 requests are under way, of 4 MiB at most."""
    running, most, lock = 0, 0, threading.Lock()
    gate = threading.Semaphore(0)

    def count(request: Any) -> bool:
        nonlocal running, most
        if request.command == "HEAD":
            return False
        with lock:
            running += 1
            most = max(most, running)
        gate.acquire(timeout=0.05)
        with lock:
            running -= 1
        return False

    gcs.objects["bucket/object"] = DATA
    gcs.fault = count
    file = open_bytes(as_path("gs://bucket/object"))
    outs = [np.zeros(len(DATA), np.uint8) for _ in range(8)]
    threads = [threading.Thread(target=file.read_into, args=(0, out.data)) for out in outs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(out.tobytes() == DATA for out in outs)
    assert 4 < most <= 16
    sizes = [
        int(last) - int(first) + 1
        for _, _, range_ in gcs.requests
        if "=" in range_
        for first, last in [range_.removeprefix("bytes=").split("-")]
    ]
    assert sum(sizes) == 8 * len(DATA)
    assert max(sizes) == 4 << 20


def test_a_server_that_is_busy_at_first(gcs: GcsStub) -> None:
    gcs.objects["bucket/object"] = DATA[:1000]
    failures = iter([503, 500, 429])

    def fail(request: Any) -> bool:
        status = next(failures, None)
        if status:
            request.answer(status)
        return status is not None

    gcs.fault = fail
    assert as_path("gs://bucket/object").read_bytes() == DATA[:1000]


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (403, PermissionError, "403"),
        (401, PermissionError, "401"),
        (400, OSError, "400"),
        (200, OSError, ""),
    ],
)
def test_a_server_that_refuses(gcs: GcsStub, status: int, kind: type[OSError], message: str) -> None:
    """One line that names the object; a whole object in answer to a range is no range."""
    gcs.objects["bucket/object"] = DATA[:1000]
    file = open_bytes(as_path("gs://bucket/object"))

    def refuse(request: Any) -> bool:
        request.answer(status, b"a" * 1000)
        return True

    gcs.fault = refuse
    with pytest.raises(kind) as caught:
        read(file, 10, 20)
    assert caught.value.filename == "gs://bucket/object"
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


NOT_ALLOWED = "the store answers 403 {}. The credentials are wrong, or may not read there"
XML = b'<?xml version="1.0"?><Error><Code>AccessDenied</Code><Message>No.</Message><HostId>x</HostId></Error>'


@pytest.mark.parametrize(
    ("status", "body", "line"),
    [
        (403, XML, NOT_ALLOWED.format("AccessDenied: No")),
        (403, XML.replace(b"No.", b"Not\n  you"), NOT_ALLOWED.format("AccessDenied: Not you")),
        (403, XML[: XML.index(b"age>No")], NOT_ALLOWED.format("AccessDenied")),
        (403, b"<html>" + bytes(2000), NOT_ALLOWED.format("Forbidden")),
        (400, b"<html>\n<title>Bad</title>", "the store answers 400 Bad Request"),
    ],
)
def test_bodies_of_refusals_are_not_shown(gcs: GcsStub, status: int, body: bytes, line: str) -> None:
    """Of a listing, for which the client has no class of errors, and of bytes."""
    gcs.objects["bucket/object"] = DATA[:1000]
    file = open_bytes(as_path("gs://bucket/object"))

    def refuse(request: Any) -> bool:
        request.answer(status, body)
        return True

    gcs.fault = refuse
    for call in (lambda: read(file, 10, 20), lambda: list(as_path("gs://bucket").iterdir())):
        with pytest.raises(PermissionError if status == 403 else OSError) as caught:
            call()
        assert caught.value.strerror == line


def test_a_body_that_is_cut_is_asked_for_again_or_refused(gcs: GcsStub) -> None:
    gcs.objects["bucket/object"] = DATA[:1000]
    file = open_bytes(as_path("gs://bucket/object"))

    def cut(request: Any) -> bool:
        request.send_response(206)
        request.send_header("Content-Length", "1000")
        request.send_header("Content-Range", "bytes 0-999/1000")
        request.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        request.end_headers()
        request.wfile.write(DATA[:500])
        request.close_connection = True
        return True

    gcs.fault = cut
    with pytest.raises((OSError, EOFError)) as caught:
        read(file, 0, 1000)
    assert "gs://bucket/object" in str(caught.value) + str(getattr(caught.value, "filename", ""))


def test_an_answer_shorter_than_asked_for(gcs: GcsStub) -> None:
    gcs.objects["bucket/object"] = DATA[:1000]
    file = open_bytes(as_path("gs://bucket/object"))

    def short(request: Any) -> bool:
        headers = {"Content-Range": "bytes 0-999/1000", "Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}
        headers["ETag"] = request.headers["If-Match"]
        request.answer(206, DATA[:500], headers)
        return True

    gcs.fault = short
    with refused(EOFError, match="gs://bucket/object: .* 500, 500 bytes"):
        read(file, 0, 1000)


def test_the_first_failure_leaves_no_writer_behind(gcs: GcsStub) -> None:
    """Once a read has raised, its buffer is the caller's again."""
    gcs.objects["bucket/object"] = DATA
    file = open_bytes(as_path("gs://bucket/object"))
    slow = threading.Event()

    def fail_first(request: Any) -> bool:
        if request.headers["Range"].startswith("bytes=0-"):
            request.answer(403)
            return True
        slow.wait(0.3)
        return False

    gcs.fault = fail_first
    out = bytearray(len(DATA))
    with pytest.raises(PermissionError):
        file.read_into(0, memoryview(out))
    before = bytes(out)
    slow.wait(0.5)
    assert bytes(out) == before


def test_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in S3("http://127.0.0.1:1").environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OSError, match="S3 error") as caught:
        versions([as_path("s3://no-server/object")])
    assert caught.value.filename == "s3://no-server/object"
    assert len(str(caught.value)) < 400


def test_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    with refused(OSError, match="AWS_ACCESS_KEY_ID"):
        versions([as_path("s3://no-credentials/object")])


def test_without_the_package() -> None:
    script = """
import sys
sys.modules["obstore"] = None
from tpuembed.checkpoint import open_checkpoint
open_checkpoint("s3://bucket/ckpt-1")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == (
        "tpuembed.errors.MissingExtraError: s3:// needs obstore, which is not installed: pip install 'tpuembed[cloud]'"
    )


def test_local_reads_do_not_import_it() -> None:
    script = "import sys, tpuembed.checkpoint, tpuembed.files; assert 'obstore' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
