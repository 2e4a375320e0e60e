"""Versions are pulled whole or not at all, from moto's S3, which misbehaves."""

import contextlib
import dataclasses
import errno
import logging
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

from tests.support.messages import refused, said
from tests.support.serving.doubles import FakeLoader, export_files
from tests.support.stores import S3, S3Proxy, S3Request, moto_server
from tpuembed.errors import ServingError
from tpuembed.files import FileVersion, UrlPath, as_path, listing, remote
from tpuembed.manifest import MANIFEST_PATH, FileEntry, Manifest
from tpuembed_serving.core.servable import State
from tpuembed_serving.models import stores
from tpuembed_serving.models.model import ServedModel
from tpuembed_serving.models.policies import AllVersions, LatestVersions, VersionPolicy
from tpuembed_serving.models.stores import Puller
from tpuembed_serving.settings import ModelSettings

DATA = bytes(range(256)) * 40


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with moto_server() as server:
        yield server


class World:
    """A store, a cache, and a model that is served from it. `poll` is one round of both."""

    puller: Puller
    model: ServedModel

    def __init__(self, tmp_path: Path, url: str, put: Any, delete: Any) -> None:
        self.tmp_path, self.url, self.put, self.delete = tmp_path, url, put, delete
        self.cache = tmp_path / "cache"
        self.loader = FakeLoader()
        self.policy: VersionPolicy = LatestVersions()
        self.start()

    def start(self) -> None:
        """Start a server, after a kill if one runs."""
        settings = ModelSettings(name="m", base_path=as_path(self.url), policy=self.policy)
        if hasattr(self, "puller"):
            self.end()
        self.reserved = contextlib.ExitStack()
        self.puller = Puller(self.cache, 0.01)
        self.reserved.enter_context(self.puller.reserved())
        self.puller.configure([settings])
        self.model = ServedModel(settings, self.loader, lambda: None, cache=self.cache)

    def end(self) -> None:
        self.reserved.close()
        self.model.retire()
        self.model.unload()

    def publish(self, version: int | str, files: dict[str, bytes]) -> None:
        for name, data in files.items():
            self.put(f"m/{version}/{name}", data)

    def poll(self, times: int = 1) -> None:
        for _ in range(times):
            self.puller.poll()
            self.model.poll()
        self.puller.poll()

    def served(self) -> list[int]:
        return [status.version for status in self.model.statuses() if status.state is State.AVAILABLE]

    def fault(self, version: int) -> str:
        (status,) = (status for status in self.model.statuses() if status.version == version)
        assert status.error is not None, status
        assert status.state in (State.START, State.END)
        return status.error.message

    def folders(self) -> list[str]:
        return sorted(path.name.partition("-")[0] for path in self.cache.glob("m-*/*") if path.is_dir())

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
def world(s3: S3, proxy: S3Proxy, request: pytest.FixtureRequest, tmp_path: Path) -> World:
    bucket = f"bucket-{zlib.crc32(request.node.name.encode())}"
    s3.make_bucket(bucket)
    return World(
        tmp_path,
        f"s3://{bucket}/m",
        lambda key, data: s3.put(bucket, key, data),
        lambda key: s3.delete(bucket, key),
    )


def test_a_model_of_others_is_pulled_when_it_rests(world: World) -> None:
    files = {"variables/variables.data-00000-of-00001": DATA, "saved_model.pb": b"graph"}
    world.publish(1, files)
    world.puller.poll()
    world.model.poll()
    assert not world.model.settled, "the first load has not ended: the version may come at the next poll"
    said(world.fault(1))
    world.poll(2)
    assert world.served() == [1]
    assert {name: world.file(1, name) for name in files} == files


def test_a_success_object_says_that_a_version_is_complete(world: World) -> None:
    world.publish(1, {"saved_model.pb": b"no variables", "_SUCCESS": b""})
    world.poll()
    assert world.served() == [1]


@pytest.mark.parametrize(
    "name",
    [
        "../../x",
        "variables/../../../x",
        "/abs",
        "a//b",
        "./x",
        "nul\0x",
        "line\nend",
        "x" * 300,
        "/".join(["x" * 90] * 25),
    ],
)
def test_names_that_would_leave_the_cache(world: World, name: str) -> None:
    world.publish(1, {"saved_model.pb": b"1", "_SUCCESS": b""})
    world.poll()
    before = sorted(world.tmp_path.rglob("*"))
    try:
        world.publish(2, {"saved_model.pb": b"2", name: b"evil", "_SUCCESS": b""})
    except Exception:
        pytest.skip("the emulator refuses the name itself")
    world.poll(2)
    assert world.served() == [1]
    assert world.fault(2)
    assert sorted(world.tmp_path.rglob("*")) == before
    for key in (f"m/2/{name}", "m/2/saved_model.pb", "m/2/_SUCCESS"):
        world.delete(key)
    world.poll()
    assert world.served() == [1]


def test_a_file_that_is_a_folder_too(world: World) -> None:
    world.publish(1, {"saved_model.pb": b"1", "assets/": b"", "assets/x": b"x", "_SUCCESS": b""})
    world.publish(2, {"saved_model.pb": b"1", "a": b"file", "a/b": b"x", "_SUCCESS": b""})
    world.poll(2)
    assert world.served() == [1], "an empty object that stands for a folder is none"
    said(world.fault(2))


def whole(graph: bytes = b"graph", data: bytes = DATA) -> dict[str, bytes]:
    return {"data": data, "saved_model.pb": graph, "_SUCCESS": b""}


def test_the_disk_has_no_room(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.publish(1, whole())
    world.poll()
    size = len(DATA) + 5
    usage = shutil.disk_usage(world.cache)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=size + size // 20))
    world.publish(2, whole())
    world.poll()
    said(world.fault(2))
    assert world.served() == [1]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=size + size // 10))
    world.poll()
    assert world.served() == [2]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a file system")
def test_the_disk_fills_up(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another program takes the room after the check."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("this machine does not let root mount a tmpfs")
    try:
        world.cache = disk / "cache"
        world.start()
        world.publish(1, whole())
        world.poll()
        usage = shutil.disk_usage(disk)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 40))
        world.publish(2, whole(data=DATA * 200))
        world.poll()
        said(world.fault(2))
        assert world.served() == [1]
        assert world.folders() == ["1"]
        world.delete("m/2/saved_model.pb")
        world.publish(2, whole())
        world.poll()
        assert world.served() == [2]
    finally:
        world.end()
        subprocess.run(["umount", disk], check=True)


def test_writes_that_fail(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.publish(1, whole())

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    world.poll()
    said(world.fault(1))
    assert world.folders() == []
    monkeypatch.undo()


def test_a_disk_that_is_too_full_for_the_state(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says so, however long it lasts. The pull is not held up: it may make the room."""
    world.publish(1, whole())
    world.poll()
    world.publish(2, whole())

    def full(_: Any, path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(stores._State, "write", full)
        world.poll(5)
    (line,) = (record for record in caplog.records if record.name == stores.__name__)
    assert line.exc_info is None
    said(line.getMessage())
    assert (world.served(), world.folders()) == ([1], ["1", "2"])
    world.poll()
    assert (world.served(), world.folders()) == ([2], ["2"])


def test_nothing_in_use_is_removed(world: World) -> None:
    world.publish(1, whole())
    world.poll()
    with world.model.lease(None):
        world.publish(2, whole())
        world.poll(3)
        assert world.folders() == ["1", "2"]
    world.poll(2)
    assert world.folders() == ["2"]


def test_a_version_that_vanishes_while_it_is_pulled(world: World, proxy: S3Proxy) -> None:
    world.publish(1, whole())
    world.poll()
    world.publish(2, whole())

    def vanish(request: S3Request) -> None:
        if request.method == "GET" and request.key == "m/2/data":
            world.delete("m/2/saved_model.pb")
            world.delete("m/2/data")

    proxy.fault = vanish
    world.poll()
    assert world.fault(2)
    assert (world.served(), world.folders()) == ([1], ["1"])


def test_an_object_that_is_replaced_while_it_is_pulled(world: World, proxy: S3Proxy) -> None:
    world.publish(1, whole())
    world.poll()
    world.publish(2, whole())

    def replace(request: S3Request) -> None:
        if request.method == "GET" and request.key == "m/2/saved_model.pb":
            world.put("m/2/data", DATA[::-1])  # the data has arrived, the graph comes next
            proxy.fault = lambda _: None

    proxy.fault = replace
    world.puller.poll()
    world.model.poll()
    said(world.fault(2))
    assert (world.served(), world.folders()) == ([1], ["1"])
    world.poll()
    assert (world.served(), world.file(2, "data")) == ([2], DATA[::-1])


@pytest.mark.parametrize("fault", [(403, "ExpiredToken"), (404, "NoSuchKey"), (400, "drop")])
def test_a_store_that_fails_in_a_pull(world: World, proxy: S3Proxy, fault: tuple[int, str]) -> None:
    world.publish(1, whole())
    world.poll()
    world.publish(2, whole())
    if fault[1] == "drop":  # the client's own retries would take a minute
        fault = (400, "BadRequest")
    proxy.fault = lambda request: fault if request.key == "m/2/data" else None
    world.poll()
    assert world.fault(2).startswith(f"version 2: cannot be pulled: {world.url}/2/data: ")
    assert world.fault(2).endswith("Retried at the next poll")
    assert (world.served(), world.folders()) == ([1], ["1"])
    proxy.fault = lambda _: None
    world.poll()
    assert world.served() == [2]


def test_a_store_that_stops_answering_in_a_pull(world: World, proxy: S3Proxy) -> None:
    """Requests and the stop of the server go on. A server that is killed leaves nothing that the next one takes for whole."""
    world.publish(1, whole())
    world.poll()
    world.publish(2, whole())
    asked, goes_on = threading.Event(), threading.Event()

    def hang(request: S3Request) -> None:
        if request.key == "m/2/data":
            asked.set()
            goes_on.wait(60)

    proxy.fault = hang
    pulling = threading.Thread(target=world.puller.poll)
    pulling.start()
    assert asked.wait(60)
    world.model.poll()
    assert world.served() == [1]
    (status, _) = world.model.statuses()
    assert (status.version, status.state, status.error) == (2, State.START, None)
    killed = {path.name: path.is_dir() for path in world.cache.glob("m-*/.pulling-*")}
    assert list(killed.values()) == [True]
    copy = world.tmp_path / "as the killed server left it"
    shutil.copytree(world.cache, copy)
    goes_on.set()
    pulling.join()
    proxy.fault = lambda _: (403, "AccessDenied")
    world.cache = copy
    world.start()
    world.poll()
    assert (world.served(), world.folders()) == ([1], ["1"])


def test_a_damaged_copy_is_pulled_again_and_a_store_that_is_gone_takes_nothing_away(
    world: World, proxy: S3Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    world.publish(1, whole())
    world.poll()
    (copy,) = world.cache.glob("m-*/1-*/1")
    (copy / "saved_model.pb").unlink()
    before = len(proxy.requests)
    world.start()
    world.poll()
    assert (world.served(), world.file(1, "saved_model.pb")) == ([1], b"graph")
    assert "version 1 in the cache is damaged" in caplog.text
    world.start()
    world.poll()
    assert sum(one.key == "m/1/data" for one in proxy.requests[before:]) <= 2, "what is whole is not pulled again"
    proxy.fault = lambda _: (403, "AccessDenied")
    world.start()
    world.poll()
    assert world.served() == [1]


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
    world.poll()
    before = inode(world, 1)
    if restart:
        world.start()
    files = publish_export(world, 2, token=3, table=table)
    world.poll()
    assert (world.served(), world.folders(), inode(world, 2, table)) == ([2], ["2"], before)
    assert pulled(proxy, 2) - {""} == files.keys() - {table}
    assert {name: world.file(2, name) for name in files} == files
    files = publish_export(world, 3, token=5)
    world.poll()
    assert (world.served(), inode(world, 3)) == ([3], before), "from a copy that has links itself"
    assert {name: world.file(3, name) for name in files} == files


def test_a_table_of_the_same_size_with_another_etag_is_downloaded(world: World, proxy: S3Proxy) -> None:
    publish_export(world, 1, token=1)
    world.poll()
    files = publish_export(world, 2, token=2)
    world.poll()
    assert world.served() == [2]
    assert TABLE in pulled(proxy, 2)
    assert world.file(2, TABLE) == files[TABLE]


def test_a_store_without_etags_links_nothing(world: World, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_tags(url: UrlPath) -> dict[str, FileVersion]:
        return {key: FileVersion(one.size, "") for key, one in listing(url).items()}

    monkeypatch.setattr(f"{stores.__name__}.listing", without_tags)
    publish_export(world, 1, token=1)
    world.poll()
    publish_export(world, 2, token=3)
    world.poll()
    assert world.served() == [2]
    assert TABLE in pulled(proxy, 2)


def test_a_file_without_a_checksum_is_downloaded(world: World, proxy: S3Proxy) -> None:
    """A link would bring damage that nothing finds: into a model of others, and into files that may be replaced."""
    world.publish(1, whole())
    world.poll()
    world.publish(2, whole())
    world.poll()
    assert "data" in pulled(proxy, 2)
    scratch = world.tmp_path / "scratch"
    files = export_files(1, scratch) | {"assets.extra/requests": DATA, "assets/mine": DATA}
    manifest = Manifest.read(scratch)
    assert manifest is not None
    entries = {**manifest.files, "assets.extra/requests": FileEntry(size=len(DATA), crc32c=0)}
    dataclasses.replace(manifest, files=entries).write(scratch)
    files[str(MANIFEST_PATH)] = (scratch / MANIFEST_PATH).read_bytes()
    for version in (3, 4):
        world.publish(version, files)
        world.poll()
    assert world.served() == [4]
    linked = {TABLE, "assets/token", "variables/variables.index"}
    assert pulled(proxy, 4) - {""} == files.keys() - linked


def flip(world: World) -> None:
    (path,) = world.cache.glob(f"m-*/1-*/1/{TABLE}")
    path.write_bytes(b"\1" + path.read_bytes()[1:])


def test_a_damaged_copy_is_not_linked(world: World, proxy: S3Proxy) -> None:
    publish_export(world, 1, token=1)
    world.poll()
    flip(world)
    world.start()
    files = publish_export(world, 2, token=3)
    world.poll()
    assert world.served() == [2]
    assert TABLE in pulled(proxy, 2)
    assert world.file(2, TABLE) == files[TABLE]


def test_a_copy_that_is_damaged_while_it_is_served(
    world: World, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new version is refused, then downloaded without links."""
    publish_export(world, 1, token=1)
    world.poll()
    flip(world)
    files = publish_export(world, 2, token=3)
    world.poll()
    assert world.served() == [1]
    assert TABLE not in pulled(proxy, 2)
    assert f"{TABLE}, bytes [0, 800) of stack 's' have CRC32C" in world.fault(2)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    world.poll()
    assert (world.served(), world.file(2, TABLE)) == ([2], files[TABLE])


@pytest.mark.parametrize("objects", [None, b"", b"{]", b'{"a": [1]}'])
def test_a_list_of_objects_that_is_missing_or_damaged(world: World, proxy: S3Proxy, objects: bytes | None) -> None:
    publish_export(world, 1, token=1)
    world.poll()
    (path,) = world.cache.glob("m-*/1-*/objects.json")
    path.unlink() if objects is None else path.write_bytes(objects)
    publish_export(world, 2, token=3)
    world.poll()
    assert world.served() == [2]
    assert TABLE in pulled(proxy, 2)


def test_a_disk_without_links(world: World, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EMLINK, os.strerror(errno.EMLINK))

    monkeypatch.setattr(os, "link", refuse)
    publish_export(world, 1, token=1)
    world.poll()
    publish_export(world, 2, token=3)
    world.poll()
    assert world.served() == [2]
    assert TABLE in pulled(proxy, 2)


def test_room_is_needed_only_for_what_is_downloaded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    publish_export(world, 1, token=1)
    world.poll()
    files = publish_export(world, 2, token=3)
    needed = int(sum(len(data) for name, data in files.items() if name != TABLE) * 1.1)
    usage = shutil.disk_usage(world.cache)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    world.poll()
    assert f"it needs {needed} bytes" in world.fault(2)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed))
    world.poll()
    assert world.served() == [2]


def test_a_url_of_one_version(world: World) -> None:
    world.put("m/saved_model.pb", b"graph")
    world.poll()
    said(world.model.listing_error)


def test_numbers_are_read_as_in_folders(world: World) -> None:
    world.policy = AllVersions()
    world.start()
    for name in ("007", "8", "x9", "+10", "9" * 30):
        world.publish(name, whole())
    world.poll()
    assert world.served() == [10, 8, 7]


def test_an_older_version_serves_until_a_newer_one_is_complete(world: World) -> None:
    """After a restart with an empty cache, too."""
    world.publish(1, whole())
    world.publish(2, {"data": DATA})
    world.poll()
    assert world.served() == [1]
    said(world.fault(2))
    world.publish(2, whole())
    world.poll()
    assert world.served() == [2]


def test_two_servers_do_not_share_a_cache(world: World) -> None:
    other = Puller(world.cache, 1.0)
    with refused(ServingError), other.running([]):
        pass


def test_other_files_in_the_cache_folder_stay(world: World) -> None:
    (world.cache / "mine" / "1-0123456789abcdef").mkdir(parents=True)
    world.publish(1, whole())
    world.poll()
    assert (world.cache / "mine" / "1-0123456789abcdef").is_dir()


def test_memory_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of many windows arrive byte by byte as they are."""
    monkeypatch.setattr(stores, "_WINDOW_BYTES", 1000)
    data = os.urandom(12_345)
    world.publish(1, whole(data=data) | {"empty": b"", "one": data[:1000], "two": data[:2000]})
    world.poll()
    assert (world.file(1, "data"), world.file(1, "one"), world.file(1, "two")) == (data, data[:1000], data[:2000])
    assert world.file(1, "empty") == b""


def test_stop_ends_a_pull(world: World, proxy: S3Proxy) -> None:
    world.publish(1, whole())
    world.end()
    other = Puller(world.cache, 0.01)
    asked = threading.Event()

    def slow(request: S3Request) -> None:
        if request.key == "m/1/data":
            asked.set()
            time.sleep(0.5)

    proxy.fault = slow
    with other.running([ModelSettings(name="m", base_path=as_path(world.url))]):
        assert asked.wait(60)
    assert world.folders() == []
