"""Versions are pulled whole or not at all, by a server, from moto's S3, which misbehaves."""

import dataclasses
import errno
import os
import shutil
import subprocess
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.messages import said
from tests.support.serving.doubles import export_files, wait_for
from tests.support.serving.folders import Folders
from tests.support.serving.served import Served
from tests.support.stores import S3, S3Proxy, S3Request, moto_server
from tpuembed.errors import ServingError
from tpuembed.files import FileVersion, UrlPath, as_path, listing, remote
from tpuembed.manifest import MANIFEST_PATH, FileEntry, Manifest
from tpuembed_serving import AllVersions, LatestVersions, ModelSettings

DATA = bytes(range(256)) * 40


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with moto_server() as server:
        yield server


class World:
    """A store, a cache, and a server of its model `m`."""

    def __init__(self, tmp_path: Path, patch: pytest.MonkeyPatch, s3: S3, proxy: S3Proxy, bucket: str) -> None:
        self.tmp_path, self.proxy, self.url = tmp_path, proxy, f"s3://{bucket}/m"
        self._s3, self._bucket = s3, bucket
        self.cache = tmp_path / "cache"
        self._patch = patch
        self._server: Folders | None = None

    def put(self, key: str, data: bytes) -> None:
        self._s3.put(self._bucket, key, data)

    def delete(self, key: str) -> None:
        self._s3.delete(self._bucket, key)

    @property
    def server(self) -> Folders:
        """The server, which starts when a test first asks for it."""
        return self._server or self.start()

    def start(self, policy: Any = None, **options: Any) -> Folders:
        """Start a server, after the one that runs."""
        self.end()
        settings = ModelSettings(name="m", base_path=as_path(self.url), policy=policy or LatestVersions())
        self._server = Folders(self.tmp_path / "other", self._patch, [settings], cache=self.cache, **options)
        return self._server.__enter__()

    def end(self) -> None:
        if self._server is not None:
            self._server.__exit__(None, None, None)
            self._server = None

    def publish(self, version: int | str, files: dict[str, bytes]) -> None:
        """Put its objects into the store. Of those that make it complete, the last one is last."""
        for name, data in files.items():
            self.put(f"m/{version}/{name}", data)

    def serves(self, *versions: int) -> None:
        """Wait until these versions, newest first, are those that are served."""
        wait_for(lambda: self.served() == list(versions))

    def statuses(self) -> dict[int, dict[str, Any]]:
        """The versions, also while the first load has not ended."""
        (found,) = (one for one in self.server.send("GET", "/models").value["models"] if one["name"] == "m")
        return {int(one["version"]): one for one in found["model_version_status"]}

    def served(self) -> list[int]:
        return [version for version, one in self.statuses().items() if one["state"] == "AVAILABLE"]

    def fault(self, version: int, part: str = "") -> str:
        """Wait for an error of a version that has these words."""
        texts = [""]

        def has_it() -> bool:
            texts.append(self.statuses().get(version, {"status": {"error_message": ""}})["status"]["error_message"])
            return bool(texts[-1]) and part in texts[-1]

        try:
            wait_for(has_it)
        except AssertionError:
            pytest.fail(f"{part!r} is not in {set(texts)}")
        return texts[-1]

    def polls(self) -> None:
        """Wait until the store has been listed twice more."""
        before = len(self.proxy.requests)
        wait_for(lambda: sum("list-type" in one.query for one in self.proxy.requests[before:]) > 1)

    def folders(self) -> list[str]:
        return sorted(path.name.partition("-")[0] for path in self.cache.glob("m-*/*") if path.is_dir())

    def has(self, *folders: str) -> None:
        """Wait until the cache has these versions."""
        wait_for(lambda: self.folders() == list(folders))

    def file(self, version: int, name: str) -> bytes:
        (path,) = self.cache.glob(f"m-*/{version}-*/{version}/{name}")
        return path.read_bytes()


@pytest.fixture
def proxy(s3: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    with S3Proxy(s3) as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        remote._store.cache_clear()
        yield running
    remote._store.cache_clear()


@pytest.fixture
def world(
    s3: S3, proxy: S3Proxy, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    bucket = f"bucket-{zlib.crc32(request.node.name.encode())}"
    s3.make_bucket(bucket)
    (tmp_path / "other").mkdir()
    made = World(tmp_path, monkeypatch, s3, proxy, bucket)
    yield made
    made.end()


def whole(graph: bytes = b"graph", data: bytes = DATA) -> dict[str, bytes]:
    return {"data": data, "saved_model.pb": graph, "_SUCCESS": b""}


def test_a_success_object_says_that_a_version_is_complete(world: World) -> None:
    world.publish(1, {"saved_model.pb": b"no variables", "_SUCCESS": b""})
    world.serves(1)


@pytest.mark.parametrize(
    "name",
    [
        "../../x", "variables/../../../x", "/abs", "a//b", "./x", "nul\0x", "line\nend", "x" * 300, "/".join(["x" * 90] * 25),
    ],
)  # fmt: skip
def test_names_that_would_leave_the_cache(world: World, name: str) -> None:
    world.publish(1, whole())
    world.serves(1)
    world.polls()
    before = sorted(world.tmp_path.rglob("*"))
    try:
        world.publish(2, {"saved_model.pb": b"2", name: b"evil", "_SUCCESS": b""})
    except Exception:
        pytest.skip("the emulator refuses the name itself")
    assert world.fault(2)
    wait_for(lambda: sorted(world.tmp_path.rglob("*")) == before)
    assert world.served() == [1]


def test_a_file_that_is_a_folder_too(world: World) -> None:
    world.publish(1, {"assets/": b"", "assets/x": b"x", "saved_model.pb": b"1", "_SUCCESS": b""})
    world.serves(1)  # an empty object that stands for a folder is none
    world.publish(2, {"a": b"file", "a/b": b"x", "saved_model.pb": b"1", "_SUCCESS": b""})
    said(world.fault(2))
    assert world.served() == [1]


def free(world: World, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    usage = shutil.disk_usage(world.tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=size))


def test_the_disk_has_no_room(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.publish(1, whole())
    world.serves(1)
    size = len(DATA) + 5
    free(world, monkeypatch, size + size // 20)
    world.publish(2, whole())
    said(world.fault(2, "it needs"))
    assert world.served() == [1]
    free(world, monkeypatch, size + size // 10)
    world.serves(2)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a file system")
def test_the_disk_fills_up(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another program takes the room after the check."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("this machine does not let root mount a tmpfs")
    try:
        world.cache = disk / "cache"
        world.publish(1, whole())
        world.serves(1)
        free(world, monkeypatch, 1 << 40)
        world.publish(2, whole(data=DATA * 200))
        world.fault(2, "No space")
        said(world.fault(2))
        assert world.served() == [1]
        world.has("1")
        world.delete("m/2/saved_model.pb")
        world.publish(2, whole())
        world.serves(2)
    finally:
        world.end()
        subprocess.run(["umount", disk], check=True)


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_writes_that_fail(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", full)
    world.publish(1, whole())
    said(world.fault(1, "No space"))
    world.has()


def test_a_disk_that_is_too_full_for_the_state(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says so, however long it lasts. The pull is not held up: it may make the room."""
    world.publish(1, whole())
    world.serves(1)
    write = Path.write_text

    def fail(path: Path, *text: Any, **options: Any) -> int:
        if path.name.endswith("state.json"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, *text, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", fail)
        world.publish(2, whole())
        world.has("1", "2")

        def lines() -> list[Any]:
            return [record for record in caplog.records if "cannot be written" in record.message]

        world.polls()
        before = len(lines())
        world.polls()
        assert len(lines()) == before <= 2, "once for each step of the pull"
        assert lines()[0].exc_info is None
        said(lines()[0].message)
        assert world.served() == [1]
    world.serves(2)
    world.has("2")


def test_nothing_in_use_is_removed(world: World) -> None:
    world.publish(1, whole())
    world.serves(1)
    with world.server.busy("m"):
        world.publish(2, whole())
        world.serves(2)
        world.polls()
        assert world.folders() == ["1", "2"]
    world.has("2")


def test_a_version_that_vanishes_while_it_is_pulled(world: World, proxy: S3Proxy) -> None:
    world.publish(1, whole())
    world.serves(1)

    def vanish(request: S3Request) -> None:
        if request.method == "GET" and request.key == "m/2/data":
            world.delete("m/2/saved_model.pb")
            world.delete("m/2/data")

    proxy.fault = vanish
    world.publish(2, whole())
    world.fault(2, "cannot be pulled")
    world.has("1")
    assert world.served() == [1]


def test_an_object_that_is_replaced_while_it_is_pulled(world: World, proxy: S3Proxy) -> None:
    world.publish(1, whole())
    world.serves(1)

    def replace(request: S3Request) -> None:
        if request.method == "GET" and request.key == "m/2/saved_model.pb":
            proxy.fault = lambda _: None
            world.put("m/2/data", DATA[::-1])  # the data has arrived, the graph comes next

    proxy.fault = replace
    loaded = list[bytes]()
    world.server.loaders["m"].during = lambda: loaded.append(world.file(2, "data"))
    world.publish(2, whole())
    world.serves(2)
    assert loaded == [DATA[::-1]]


@pytest.mark.parametrize("fault", [(403, "ExpiredToken"), (404, "NoSuchKey"), (400, "BadRequest")])
def test_a_store_that_fails_in_a_pull(world: World, proxy: S3Proxy, fault: tuple[int, str]) -> None:
    world.publish(1, whole())
    world.serves(1)
    proxy.fault = lambda request: fault if request.method == "GET" and request.key == "m/2/data" else None
    world.publish(2, whole())
    text = world.fault(2, f"version 2: cannot be pulled: {world.url}/2/data: ")
    assert text.endswith("Retried at the next poll")
    assert world.served() == [1]
    world.has("1")
    proxy.fault = lambda _: None
    world.serves(2)


def test_a_store_that_stops_answering_in_a_pull(world: World, proxy: S3Proxy) -> None:
    """Requests and the stop of the server go on. A server that is killed leaves nothing that the next one takes for whole."""
    world.publish(1, whole())
    world.serves(1)
    asked, goes_on = threading.Event(), threading.Event()

    def hang(request: S3Request) -> None:
        if request.method == "GET" and request.key == "m/2/data":
            asked.set()
            goes_on.wait(60)

    proxy.fault = hang
    world.publish(2, whole())
    assert asked.wait(60)
    world.server.wait_for("m", {2: "START", 1: "AVAILABLE"})
    wait_for(lambda: world.statuses()[2]["status"]["error_code"] == "OK")
    killed = {path.name: path.is_dir() for path in world.cache.glob("m-*/.pulling-*")}
    assert list(killed.values()) == [True]
    copy = world.tmp_path / "as the killed server left it"
    shutil.copytree(world.cache, copy)
    proxy.fault = lambda _: (403, "AccessDenied")
    goes_on.set()
    world.cache = copy
    world.start()
    world.serves(1)
    world.has("1")


def test_a_damaged_copy_is_pulled_again_and_a_store_that_is_gone_takes_nothing_away(
    world: World, proxy: S3Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    world.publish(1, whole())
    world.serves(1)
    world.end()
    (copy,) = world.cache.glob("m-*/1-*/1")
    (copy / "saved_model.pb").unlink()
    before = len(proxy.requests)
    world.serves(1)
    assert world.file(1, "saved_model.pb") == b"graph"
    assert "version 1 in the cache is damaged" in caplog.text
    world.start()
    world.serves(1)
    gets = [one for one in proxy.requests[before:] if (one.method, one.key) == ("GET", "m/1/data")]
    assert len(gets) <= 2, "what is whole is not pulled again"
    proxy.fault = lambda _: (403, "AccessDenied")
    world.start()
    world.serves(1)


TABLE = "variables/variables.data-00000-of-00001"
RENAMED = "variables/variables.data-00000-of-00002"


def publish_export(world: World, version: int, token: int, table: str = TABLE) -> dict[str, bytes]:
    """Tokens of one parity have equal tables."""
    files = export_files(token, world.tmp_path / f"scratch-{token}", table)
    world.publish(version, files)
    return files


def pulled(proxy: S3Proxy, version: int) -> set[str]:
    start = f"m/{version}/"
    return {one.key.removeprefix(start) for one in proxy.requests if one.method == "GET" and one.key.startswith(start)}


def inode(world: World, version: int, table: str = TABLE) -> int:
    (path,) = world.cache.glob(f"m-*/{version}-*/{version}/{table}")
    return path.stat().st_ino


@pytest.mark.parametrize("table", [TABLE, RENAMED], ids=["same name", "as in an overlay"])
@pytest.mark.parametrize("restart", [False, True])
def test_a_table_that_the_cache_has_is_linked(world: World, proxy: S3Proxy, table: str, restart: bool) -> None:
    publish_export(world, 1, token=1)
    world.serves(1)
    before = inode(world, 1)
    if restart:
        world.start()
    files = publish_export(world, 2, token=3, table=table)
    world.serves(2)
    world.has("2")
    assert inode(world, 2, table) == before
    assert pulled(proxy, 2) - {""} == files.keys() - {table}
    assert {name: world.file(2, name) for name in files} == files
    files = publish_export(world, 3, token=5)
    world.serves(3)
    assert inode(world, 3) == before, "from a copy that has links itself"
    assert {name: world.file(3, name) for name in files} == files


def without_tags(url: UrlPath) -> dict[str, FileVersion]:
    return {key: FileVersion(one.size, "") for key, one in listing(url).items()}


def no_links(*_: Any) -> None:
    raise OSError(errno.EMLINK, os.strerror(errno.EMLINK))


@pytest.mark.parametrize("why", ["another etag", "a store without etags", "a disk without links", "a damaged copy"])
def test_a_table_that_is_downloaded(world: World, proxy: S3Proxy, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "a store without etags":
        monkeypatch.setattr("tpuembed_serving.models.stores.listing", without_tags)
    if why == "a disk without links":
        monkeypatch.setattr(os, "link", no_links)
    publish_export(world, 1, token=1)
    world.serves(1)
    if why == "a damaged copy":
        world.end()
        flip(world)
    files = publish_export(world, 2, token=2 if why == "another etag" else 3)
    world.serves(2)
    assert TABLE in pulled(proxy, 2)
    assert world.file(2, TABLE) == files[TABLE]


@pytest.mark.parametrize("objects", [None, b"", b"{]", b'{"a": [1]}'])
def test_a_list_of_objects_that_is_missing_or_damaged(world: World, proxy: S3Proxy, objects: bytes | None) -> None:
    publish_export(world, 1, token=1)
    world.serves(1)
    (path,) = world.cache.glob("m-*/1-*/objects.json")
    path.unlink() if objects is None else path.write_bytes(objects)
    publish_export(world, 2, token=3)
    world.serves(2)
    assert TABLE in pulled(proxy, 2)


def test_a_file_without_a_checksum_is_downloaded(world: World, proxy: S3Proxy) -> None:
    """A link would bring damage that nothing finds: into a model of others, and into files that may be replaced."""
    for version in (1, 2):
        world.publish(version, whole())
        world.serves(version)
    assert "data" in pulled(proxy, 2)
    scratch = world.tmp_path / "scratch"
    files = export_files(1, scratch) | {"assets.extra/requests": DATA, "assets/mine": DATA}
    manifest = Manifest.read(scratch)
    assert manifest is not None
    entries = {**manifest.files, "assets.extra/requests": FileEntry(size=len(DATA), crc32c=0)}
    dataclasses.replace(manifest, files=entries).write(scratch)
    files[str(MANIFEST_PATH)] = (scratch / MANIFEST_PATH).read_bytes()
    graph = files.pop("saved_model.pb")
    for version in (3, 4):
        world.publish(version, {**files, "saved_model.pb": graph})
        world.serves(version)
    linked = {TABLE, "assets/token", "variables/variables.index"}
    assert pulled(proxy, 4) - {""} == {*files, "saved_model.pb"} - linked


def flip(world: World) -> None:
    (path,) = world.cache.glob(f"m-*/1-*/1/{TABLE}")
    path.write_bytes(b"\1" + path.read_bytes()[1:])


def test_a_copy_that_is_damaged_while_it_is_served(
    world: World, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new version is refused, then downloaded without links."""
    monkeypatch.setattr("tpuembed_serving.models.stores._RETRY_SECONDS", 1.0)
    publish_export(world, 1, token=1)
    world.serves(1)
    flip(world)
    files = publish_export(world, 2, token=3)
    world.fault(2, f"{TABLE}, bytes [0, 800) of stack 's' have CRC32C")
    assert world.served() == [1]
    assert TABLE not in pulled(proxy, 2)
    world.serves(2)
    assert world.file(2, TABLE) == files[TABLE]


def test_room_is_needed_only_for_what_is_downloaded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    publish_export(world, 1, token=1)
    world.serves(1)
    files = export_files(3, world.tmp_path / "scratch")
    needed = int(sum(len(data) for name, data in files.items() if name != TABLE) * 1.1)
    free(world, monkeypatch, needed - 1)
    world.publish(2, files)
    world.fault(2, f"it needs {needed} bytes")
    free(world, monkeypatch, needed)
    world.serves(2)


def test_numbers_are_read_as_in_folders(world: World) -> None:
    for name in ("007", "8", "x9", "+10", "9" * 30):
        world.publish(name, whole())
    world.start(AllVersions())
    world.serves(10, 8, 7)


def test_an_older_version_serves_until_a_newer_one_is_complete(world: World) -> None:
    """After a restart with an empty cache, too."""
    world.publish(1, whole())
    world.publish(2, {"data": DATA})
    world.serves(1)
    said(world.fault(2))
    world.publish(2, whole())
    world.serves(2)


def test_two_servers_do_not_share_a_cache(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.publish(1, whole())
    world.serves(1)
    second = Folders(world.tmp_path / "other", monkeypatch, world.server.settings.models[:1], cache=world.cache)
    Served.__enter__(second)
    second.wait()
    assert isinstance(second.failure, ServingError)
    said(str(second.failure))


def test_other_files_in_the_cache_folder_stay(world: World) -> None:
    (world.cache / "mine" / "1-0123456789abcdef").mkdir(parents=True)
    world.publish(1, whole())
    world.serves(1)
    assert (world.cache / "mine" / "1-0123456789abcdef").is_dir()


def test_files_of_many_windows_arrive_byte_by_byte_as_they_are(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpuembed_serving.models.stores._WINDOW_BYTES", 1000)
    data = os.urandom(12_345)
    files = {"empty": b"", "one": data[:1000], "two": data[:2000], **whole(data=data)}
    world.publish(1, files)
    world.serves(1)
    assert {name: world.file(1, name) for name in files if name != "_SUCCESS"} == {
        name: one for name, one in files.items() if name != "_SUCCESS"
    }


def test_stop_ends_a_pull(world: World, proxy: S3Proxy) -> None:
    asked = threading.Event()

    def slow(request: S3Request) -> None:
        if request.method == "GET" and request.key == "m/1/data":
            asked.set()
            time.sleep(2)

    proxy.fault = slow
    world.start()
    world.publish(1, whole())
    assert asked.wait(60)
    world.end()
    assert world.folders() == []
