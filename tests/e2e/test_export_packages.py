"""Delta packages: what a machine with the base makes of one is what the exporter would have written there."""

import errno
import hashlib
import hmac
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.export.fakes import random_table, write_checkpoint
from tests.support.messages import refused, said
from tests.support.serving.process import SCRIPT, Fork, ServerProcess, run_command
from tests.support.stores import moto_server
from tpuembed import apply_package, compact_version, export_saved_model, list_versions, prune_versions, rollback_version
from tpuembed.checkpoint.tools import diff_checkpoints, verify_files
from tpuembed.checkpoint.tools.exports import open_tables
from tpuembed.errors import ConfigError, ExportError
from tpuembed.export import plan_saved_model
from tpuembed.files import open_bytes, remote
from tpuembed.manifest import Manifest

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("exports_in_this_process")]

CONFIG = {"features": {"user": {"table": "users", "input": "id"}, "seen": {"table": "videos", "input": "id"}}}
POOLED = {"features": {"user": {"table": "users", "input": "id"}, "seen": {"table": "videos", "combiner": "sum"}}}
KEY = b"0123456789abcdef0123456789abcdef"


class Road:
    """A trainer's MODEL_DIR, a server's with a copy of its base, and the packages between them."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder, self.options = folder, {"serving_config": CONFIG, **options}
        self.trainer, self.server, self.packages = folder / "trainer", folder / "server", folder / "packages"
        self.values = {"users": random_table(300, 8), "videos": random_table(200, 4, seed=1)}
        self.export(self.trainer)
        shutil.copytree(self.trainer, self.server)

    def export(self, model_dir: Path, **options: Any) -> Any:
        write_checkpoint(self.folder / "ckpt", self.values)
        return export_saved_model(self.folder / "ckpt", model_dir, **self.options, **options)

    def change(self) -> None:
        self.values["users"][[0, 64, 299]] += 1
        self.values["users"] = np.concatenate([self.values["users"], random_table(9, 8, seed=3)])

    def package(self, **options: Any) -> Path:
        self.change()
        report = self.export(self.trainer, base="latest", delta_to=self.packages, **options)
        path: Path = report.path
        return path

    def reindex(self, package: Path, key: bytes | None = None) -> None:
        """Write the index of a package anew, as somebody who may write there would."""
        index = json.loads((package / "package.json").read_text())
        index["files"] = {
            path.relative_to(package).as_posix(): {
                "size": path.stat().st_size,
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            }
            for path in package.rglob("*")
            if path.is_file() and path.name not in ("package.json", "package.sig")
        }
        content = json.dumps(index).encode()
        (package / "package.json").write_bytes(content)
        if key is not None:
            (package / "package.sig").write_text(hmac.new(key, content, hashlib.sha256).hexdigest())


@pytest.mark.parametrize(("layout", "storage"), [("mmap", "float32"), ("variables", "int8")])
@pytest.mark.parametrize("materialise", [False, True])
def test_a_version_of_a_package_has_the_exported_rows(
    tmp_path: Path, layout: str, storage: str, materialise: bool
) -> None:
    road = Road(tmp_path, layout=layout, storage=storage)
    for number in (2, 3):
        package = road.package(max_overlay=1)
        assert package.name == str(number)
        assert not any((package / stack.file).exists() for stack in _manifest(package).stacks)
        applied = apply_package(road.packages, road.server, materialise=materialise)
        assert (applied.version, applied.base, applied.materialised) == (number, 1, materialise)
        truth = road.export(tmp_path / "truth").path
        assert not diff_checkpoints(applied.path, truth).differs
        assert not verify_files(applied.path).damaged
        assert (_manifest(applied.path).base is None) == materialise
        assert not list(road.server.glob(".staging*"))
    assert [info.version for info in list_versions(road.trainer)] == [1]


def test_the_served_numbers_are_those_of_the_package(tmp_path: Path) -> None:
    tf = pytest.importorskip("tensorflow")
    road = Road(tmp_path, layout="mmap", serving_config=POOLED)
    road.package()
    for materialise in (False, True):
        target = tmp_path / f"to-{materialise}"
        shutil.copytree(road.server, target)
        path = apply_package(road.packages, target, materialise=materialise).path
        loaded = tf.saved_model.load(str(path))
        users = np.arange(309)
        found = loaded.signatures["serving_default"](user=tf.constant(users), seen=tf.constant(users[:, None] % 200))
        np.testing.assert_array_equal(found["user"], road.values["users"])
        np.testing.assert_array_equal(found["seen"], road.values["videos"][users % 200])


def _manifest(version: Path) -> Manifest:
    manifest = Manifest.read(version)
    assert manifest
    return manifest


def test_packages_of_other_bases_are_refused(tmp_path: Path) -> None:
    road = Road(tmp_path)
    package = road.package()
    shutil.rmtree(road.server)
    write_checkpoint(tmp_path / "other", {"users": random_table(300, 8, seed=9), "videos": random_table(200, 4)})
    export_saved_model(tmp_path / "other", road.server, serving_config=CONFIG)
    with refused(ExportError):
        apply_package(package, road.server)
    shutil.copytree(road.trainer / "1", road.server / "7")
    with refused(ExportError):
        apply_package(package, road.server, trusted_key=_key(tmp_path))
    with pytest.warns(UserWarning, match="has version 7, which"):
        assert apply_package(package, road.server).base == 7
    again = apply_package(package, road.server)
    assert (again.path, again.base, again.is_new, again.bytes_pulled) == (road.server / "2", 7, False, 0)
    shutil.rmtree(road.server / "2")
    shutil.copytree(road.trainer / "1", road.server / "2")
    with refused(ExportError):
        apply_package(package, road.server)


def _key(folder: Path, key: bytes = KEY) -> Path:
    path = folder / "key"
    path.write_bytes(key + b"\n")
    return path


def test_signatures(tmp_path: Path) -> None:
    road = Road(tmp_path)
    package = road.package(sign_key=_key(tmp_path))
    other = tmp_path / "other"
    other.write_text("another key of enough bytes")
    with refused(ExportError):
        apply_package(package, road.server, trusted_key=other)
    graph = next((package / "overlay").iterdir())
    kept = graph.read_bytes()
    graph.write_bytes(kept + b"\0")
    with refused(ExportError):
        apply_package(package, road.server, trusted_key=_key(tmp_path))
    road.reindex(package)
    with refused(ExportError):
        apply_package(package, road.server, trusted_key=_key(tmp_path))
    graph.write_bytes(kept)
    road.reindex(package, KEY)
    assert apply_package(package, road.server, trusted_key=_key(tmp_path)).version == 2


def _link(package: Path) -> None:
    (package / "saved_model.pb").unlink()
    (package / "saved_model.pb").symlink_to("/etc/passwd")


def _named(name: str) -> Callable[[Path], None]:
    def change(package: Path) -> None:
        index = json.loads((package / "package.json").read_text())
        index["files"][name] = {"size": 1, "sha256": "0"}
        (package / "package.json").write_text(json.dumps(index))

    return change


def _extra(package: Path) -> None:
    (package / "more.so").write_bytes(b"x")
    Road.reindex(None, package)  # type: ignore[arg-type]


def _ids(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def damage(package: Path) -> None:
        path = next((package / "overlay").iterdir())
        path.write_bytes(np.asarray(change(np.fromfile(path, np.int64)), np.int64).tobytes())
        Road.reindex(None, package)  # type: ignore[arg-type]

    return damage


def _flip(name: str) -> Callable[[Path], None]:
    def damage(package: Path) -> None:
        path = package / name
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    return damage


def _no_json(package: Path) -> None:
    (package / "package.json").write_text("{")


def _renamed(package: Path) -> None:
    package.rename(package.with_name("5"))


def _pipe(name: str) -> Callable[[Path], None]:
    def damage(package: Path) -> None:
        (package / name).unlink(missing_ok=True)
        os.mkfifo(package / name)

    return damage


def _manifest_with(change: Callable[[Any], None]) -> Callable[[Path], None]:
    def damage(package: Path) -> None:
        path = package / "assets.extra" / "tpuembed.json"
        manifest = json.loads(path.read_text())
        change(manifest)
        path.write_text(json.dumps(manifest))
        Road.reindex(None, package)  # type: ignore[arg-type]

    return damage


def _named_stack(name: str) -> Callable[[Path], None]:
    def change(manifest: Any) -> None:
        old = manifest["stacks"][0]["name"]
        manifest["stacks"][0]["name"] = name
        for table in manifest["tables"]:
            table["stack"] = name if table["stack"] == old else table["stack"]

    return _manifest_with(change)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "a link": _link,
    "a path above": _named("../../x"),
    "an absolute path": _named("/etc/x"),
    "a missing file": _named("more"),
    "an unknown file": _extra,
    "another byte": _flip("overlay/stack_float32_8.ids"),
    "no JSON": _no_json,
    "another number": _renamed,
    "a pipe for the index": _pipe("package.json"),
    "a pipe for a file": _pipe("saved_model.pb"),
    "a stack that is a path": _named_stack("../../victim"),
    "a stack at the root": _named_stack("/srv/victim"),
    "a stack that the base lacks": _named_stack("stack_float32_5"),
    "errors that are none": _manifest_with(lambda manifest: manifest.update(errors=None)),
    "a row twice": _ids(lambda ids: [*ids[:-1], ids[-2]]),
    "a row outside": _ids(lambda ids: [*ids[:-1], 10**6]),
    "a negative row": _ids(lambda ids: [-1, *ids[1:]]),
    "another row": _ids(lambda ids: [*ids[:1], ids[1] + 1, *ids[2:]]),
    "a row less": _ids(lambda ids: ids[:-1]),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_and_hostile_packages(road: Road, tmp_path: Path, what: str) -> None:
    packages, server = tmp_path / "packages", tmp_path / "server"
    shutil.copytree(road.packages, packages)
    shutil.copytree(road.server, server)
    DAMAGE[what](packages / "2")
    with refused((ExportError, ConfigError)):
        apply_package(packages, server, materialise=True)
    assert [path.name for path in server.iterdir()] == ["1"]


@pytest.fixture(scope="module")
def road(tmp_path_factory: pytest.TempPathFactory) -> Road:
    road = Road(tmp_path_factory.mktemp("road"))
    road.package()
    return road


def test_a_signature_that_is_no_file(tmp_path: Path) -> None:
    """Whoever can write packages, and has no key, stops no follower."""
    road = Road(tmp_path)
    package = road.package(sign_key=_key(tmp_path))
    _pipe("package.sig")(package)
    with refused(ExportError):
        apply_package(package, road.server, trusted_key=_key(tmp_path))
    (package / "package.sig").unlink()
    (package / "package.sig").symlink_to("/dev/zero")
    with refused(ExportError):
        apply_package(package, road.server, trusted_key=_key(tmp_path))


def test_unknown_fields_of_errors_are_left_out(tmp_path: Path) -> None:
    """They are of a newer version."""
    road = Road(tmp_path, storage="int8")
    package = road.package(max_overlay=1)
    _manifest_with(lambda manifest: manifest["errors"]["users"].update(new=1))(package)
    applied = apply_package(package, road.server, materialise=True)
    assert _manifest(applied.path).errors["users"]["storage"] == "int8"


def test_refusals(tmp_path: Path, road: Road) -> None:
    with refused(ConfigError):
        apply_package(tmp_path, road.server)
    with refused(ConfigError):
        apply_package(road.packages, tmp_path / "missing")
    (tmp_path / "short").write_text("short")
    with refused(ConfigError):
        apply_package(road.packages, road.server, trusted_key=tmp_path / "short")
    for options in (
        {"delta_to": tmp_path},
        {"base": 1, "sign_key": tmp_path},
        {"base": 1, "delta_to": tmp_path, "keep": 1},
        {"base": 1, "delta_to": tmp_path, "serving_root": "/models/m", "layout": "mmap"},
        {"base": 1, "delta_to": road.trainer / ".." / road.trainer.name},
    ):
        with refused(ConfigError):
            road.export(road.trainer, **options)
    with refused(ExportError):
        road.export(road.trainer, base=1, delta_to=tmp_path / "short")
    with refused(ConfigError):
        apply_package(road.packages, road.server, keep=0)
    assert [path.name for path in road.server.iterdir()] == ["1"]
    with refused(ExportError):
        road.export(road.trainer, base=1, delta_to=tmp_path / "p", max_overlay=0)
    assert [path.name for path in road.trainer.iterdir()] == ["1"]
    assert not (tmp_path / "p").exists()


def test_keep_leaves_the_base_of_the_next_package(tmp_path: Path) -> None:
    """A full version reads no base, but the next package does."""
    road = Road(tmp_path)
    for number in (2, 3, 4):
        road.package(max_overlay=1)
        applied = apply_package(road.packages, road.server, materialise=True, keep=1)
        assert [info.version for info in list_versions(road.server)] == [1, number]
        assert not diff_checkpoints(applied.path, road.export(tmp_path / "truth").path).differs


def _table_file(version: Path) -> Path:
    return version / _manifest(version).stacks[0].file


def _flip_a_row(version: Path) -> None:
    _flip(_manifest(version).stacks[0].file)(version)


DAMAGED_BASES: dict[str, Callable[[Path], Any]] = {
    "a short table": lambda base: os.truncate(_table_file(base), 10),
    "no table": lambda base: _table_file(base).unlink(),
    "no graph": lambda base: (base / "saved_model.pb").unlink(),
    "no JSON": lambda base: (base / "assets.extra" / "tpuembed.json").write_text("{"),
    "another row, which materialise reads": _flip_a_row,
}


@pytest.mark.parametrize("what", DAMAGED_BASES)
def test_a_damaged_base_is_named(road: Road, tmp_path: Path, what: str) -> None:
    server = tmp_path / "server"
    shutil.copytree(road.server, server)
    DAMAGED_BASES[what](server / "1")
    with refused(ExportError) as error:
        apply_package(road.packages, server, materialise=True)
    assert "staging" not in str(error.value)
    assert [path.name for path in server.iterdir()] == ["1"]


def test_numbers_that_no_server_would_serve(tmp_path: Path) -> None:
    road = Road(tmp_path)
    shutil.copytree(road.trainer / "1", road.trainer / "7")
    to: dict[str, Any] = {"delta_to": road.packages}
    for options in (to | {"version": 7}, to | {"version": 6}, {"version": 6}):
        with refused(ConfigError):
            road.export(road.trainer, base=7, **options)
    road.package(version=8)
    shutil.copytree(road.server / "1", road.server / "9")
    with pytest.warns(UserWarning, match="has version 9, which") as warnings:
        assert apply_package(road.packages, road.server).version == 8
    said(str(warnings[0].message))


def test_a_dry_run_refuses_what_the_export_would(tmp_path: Path, road: Road) -> None:
    checkpoint, empty = road.folder / "ckpt", tmp_path / "empty"
    calls: tuple[Callable[..., Any], ...] = (plan_saved_model, export_saved_model)
    for call in calls:
        with refused(ExportError):
            call(checkpoint, empty, serving_config=CONFIG, base="latest", delta_to=tmp_path / "p")
        with refused(ConfigError):
            call(checkpoint, road.trainer, serving_config=CONFIG, base=1, delta_to="gs://bucket/p")


def test_a_package_that_cannot_be_read_is_named(tmp_path: Path, road: Road, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("tpuembed.export.overlay.package.open_bytes", fail)
    with refused(ExportError):
        apply_package(road.packages, road.server)


def test_a_package_that_gets_shorter_is_named(tmp_path: Path, road: Road, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another program replaced it between its size and its bytes."""
    package = tmp_path / "packages" / "2"
    shutil.copytree(road.packages / "2", package)

    def shorten(path: Path) -> Any:
        if path.suffix == ".ids":  # of other files TensorFlow decides the size
            os.truncate(path, 9)
        return open_bytes(path)

    monkeypatch.setattr("tpuembed.export.overlay.package.open_bytes", shorten)
    with refused(ExportError):
        apply_package(package, road.server)


def _no_links(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


@pytest.mark.parametrize("layout", ["mmap", "variables"])
def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """Packages are written there, and applied with `materialise`."""
    road = Road(tmp_path, layout=layout)
    monkeypatch.setattr("os.link", _no_links)
    monkeypatch.setattr("tpuembed.files.links.clone", lambda *_: False)
    monkeypatch.setattr("tpuembed.export.overlay.compact.clone", lambda *_: False)
    road.package(max_overlay=1)
    with refused(ExportError):
        apply_package(road.packages, road.server)
    applied = apply_package(road.packages, road.server, materialise=True)
    assert not [path for path in applied.path.rglob("*") if path.is_symlink()]
    assert not diff_checkpoints(applied.path, road.export(tmp_path / "truth").path).differs
    assert not verify_files(applied.path).damaged


def test_prune_removes_what_a_killed_apply_left(tmp_path: Path) -> None:
    road = Road(tmp_path)
    for name in (".staging-apply-2-0a1b2c3d", ".staging-compact-7", ".staging-compact-1"):
        (road.server / name / "version").mkdir(parents=True)
    prune_versions(road.server)
    assert sorted(path.name for path in road.server.iterdir()) == [".staging-compact-1", "1"]


def test_a_newest_version_that_cannot_be_read_is_no_base(tmp_path: Path) -> None:
    road = Road(tmp_path)
    road.change()
    assert road.export(road.trainer, base="latest", max_overlay=1).base == 1
    (road.trainer / "2" / "assets.extra" / "tpuembed.json").write_text("{")
    assert road.export(road.trainer, base="latest", max_overlay=1).base == 1
    (road.trainer / "1" / "assets.extra" / "tpuembed.json").write_text("{")
    with pytest.warns(UserWarning, match="Writing a full version"):
        assert road.export(road.trainer, base="latest").base is None


def test_packages_are_named_as_such(road: Road) -> None:
    """By commands that take versions."""
    for call in (open_tables_of, compact_version, rollback_version):
        with refused((ConfigError, ExportError)):
            call(road.packages)


def open_tables_of(folder: Path) -> None:
    with open_tables(folder, {}):
        raise AssertionError


def test_a_version_stays_applied_if_old_ones_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    road = Road(tmp_path)
    road.package()
    shutil.copytree(road.server / "1", road.server / "0")
    monkeypatch.setattr("tpuembed.export.retention.prune.shutil.rmtree", lambda *_, **__: None)
    with pytest.warns(UserWarning, match="version 2 is published"):
        assert apply_package(road.packages, road.server, keep=1).path.is_dir()


def test_packages_in_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with moto_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        server.make_bucket("packages")
        remote._store.cache_clear()
        road = Road(tmp_path)
        road.change()
        url = "s3://packages/deltas"
        assert str(road.export(road.trainer, base=1, delta_to=url).path) == f"{url}/2"
        road.change()
        road.export(road.trainer, base=1, delta_to=url, sign_key=_key(tmp_path))
        applied = apply_package(url, road.server, trusted_key=_key(tmp_path))
        assert applied.version == 3
        assert not diff_checkpoints(applied.path, road.export(tmp_path / "truth").path).differs
    remote._store.cache_clear()


def test_follow_beside_a_server(tmp_path: Path) -> None:
    """Each package that appears becomes a version that the server answers with. SIGTERM ends it, and nothing is left."""
    road, out = Road(tmp_path, layout="mmap"), tmp_path / "out"
    for name in ("out", "err"):
        (tmp_path / name).touch()
    command = [str(SCRIPT), "apply", str(road.packages), str(road.server), "--follow", "--poll-seconds", "0.1"]
    follower = Fork([*command, "--keep", "2", "--trusted-key", str(_key(tmp_path))], tmp_path / "err", out)
    try:
        _wait_for_words("packages: there is none. Waiting for one.", tmp_path / "err")
        with ServerProcess(road.server, tmp_path / "log", "--poll-seconds", "0.1") as server:
            server.wait_for(1)
            for number in (2, 3, 4):
                road.package(sign_key=tmp_path / "key", max_overlay=1)
                server.wait_for(number)
                status, body = server.predict({"inputs": {"user": [0, 64, 7], "seen": [1, 2, 199]}})
                assert status == 200
                np.testing.assert_array_equal(np.float32(body["outputs"]["user"]), road.values["users"][[0, 64, 7]])
            assert run_command("rollback", road.server).returncode == 0  # takes number 5
            road.package(sign_key=tmp_path / "key", max_overlay=1)
            _wait_for_words("5 is another version of that number", tmp_path / "err")
            road.package()  # not signed
            _wait_for_words("is not signed", tmp_path / "err")
    finally:
        follower.terminate()
        assert follower.wait(30) == 0
    assert sorted(path.name for path in road.server.iterdir()) == ["1", "3", "4", "5"]
    said((tmp_path / "err").read_text())
    assert (tmp_path / "err").read_text().count("is not signed") == 1
    assert "removed versions 2" in out.read_text()


def test_follow_says_that_another_version_has_the_number(tmp_path: Path) -> None:
    """A compaction beside the follower took it. A package that the follower's last run has applied is no error."""
    road = Road(tmp_path)
    road.package(max_overlay=1)
    assert apply_package(road.packages, road.server).version == 2
    (tmp_path / "err").touch()
    follow = [str(SCRIPT), "apply", str(road.packages), str(road.server), "--follow", "--poll-seconds", "0.1"]
    follower = Fork(follow, tmp_path / "err")
    try:
        assert compact_version(road.server).version == 3
        assert road.package(max_overlay=1).name == "3"
        deadline = time.monotonic() + 60
        while "Trying again." not in (text := (tmp_path / "err").read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        said(text)
        assert road.package(max_overlay=1).name == "4"
        while not (road.server / "4").is_dir():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        follower.terminate()
        follower.wait(30)


def _wait_for_words(words: str, log: Path) -> None:
    deadline = time.monotonic() + 60
    while words not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def test_the_commands(tmp_path: Path) -> None:
    road = Road(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    export = ("export", tmp_path / "ckpt", road.trainer, "--serving-config", tmp_path / "config.json")
    road.change()
    write_checkpoint(tmp_path / "ckpt", road.values)
    done = run_command(*export, "--base", "latest", "--delta-to", road.packages)
    assert re.search(
        r"overlay of version 1: 12 rows changed, \d+ B of rows written beside 12\.8 kB linked", done.stdout
    )
    done = run_command("apply", road.packages, road.server, "--json")
    assert json.loads(done.stdout)["version"] == 2
    said(run_command("verify", road.packages / "2").stderr)
    assert "overlay of version 1" in run_command("describe", road.server).stdout
    assert run_command("diff", road.server / "2", tmp_path / "ckpt").returncode == 0
    done = run_command("compact", road.server, "--json")
    assert json.loads(done.stdout)["source"] == 2
    done = run_command(*export, "--base", "1")
    assert done.stdout.startswith(f"{road.trainer}/2: overlay of version 1: 12 rows changed")
    for arguments in (
        ("apply", road.packages, road.server, "--poll-seconds", "3"),
        ("apply", road.packages, road.server, "--follow", "--poll-seconds", "nan"),
        ("apply", road.packages, road.server, "--follow", "--trusted-key", tmp_path / "missing"),
        ("apply", tmp_path, road.server),
        (*export, "--base", "0"),
        (*export, "--base", "newest"),
        (*export, "--delta-to", road.packages),
        (*export, "--base", "1", "--engine", "ray"),
    ):
        done = run_command(*arguments)
        assert done.returncode in (1, 2)
        said(done.stderr)
