"""Overlays in the long run: many deltas, a large table, kills at any moment, and all operations in random orders."""

import dataclasses
import functools
import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tensorflow as tf
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

from tests.support import capi
from tests.support.export.dying import die_at_change
from tests.support.export.fakes import random_table, write_checkpoint
from tests.support.export.overlays import ROWS_ALONE, Array, answers, assert_same, changed, every_row, grown, tables
from tests.support.serving.process import SCRIPT, Fork, ServerProcess
from tpuembed import (
    apply_package,
    compact_version,
    export_saved_model,
    list_versions,
    prune_versions,
    rollback_version,
)
from tpuembed.checkpoint.tools import diff_checkpoints, verify_files
from tpuembed.checkpoint.tools.exports import open_tables
from tpuembed.errors import ExportError
from tpuembed.manifest import Manifest
from tpuembed.saved_model import relocate_export

pytestmark = pytest.mark.usefixtures("exports_in_this_process")

LONG = [pytest.mark.nightly, pytest.mark.timeout(1800)]


# ---- many deltas


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("layout", "storage", "deltas"),
    [
        ("mmap", "float32", 3),
        *(
            pytest.param(layout, storage, 50, marks=LONG)
            for layout in ("mmap", "variables")
            for storage in ("float32", "int8")
        ),
    ],
)
def test_every_delta_answers_as_a_full_export(tmp_path: Path, layout: str, storage: str, deltas: int) -> None:
    """Of each delta, and of each compaction between. Rollbacks and prunes between change no later answer."""
    random, values, model_dir = np.random.default_rng(deltas), tables(), tmp_path / "m"
    options: dict[str, Any] = {"layout": layout, "storage": storage, "serving_config": ROWS_ALONE}
    write_checkpoint(tmp_path / "ckpt", values)
    export_saved_model(tmp_path / "ckpt", model_dir, **options)
    done = dict.fromkeys(("grown", "rolled back", "compacted", "pruned"), 0)
    for delta in range(1, deltas + 1):
        if random.random() < 0.2:
            values = grown(values, random)
            done["grown"] += 1
        values = changed(values, random, random.choice([0.001, 0.05, 0.3]))
        write_checkpoint(tmp_path / "ckpt", values)
        overlay = export_saved_model(tmp_path / "ckpt", model_dir, base="latest", max_overlay=9, **options)
        full = export_saved_model(tmp_path / "ckpt", tmp_path / "full", resume=False, **options)
        assert overlay.base is not None
        inputs = every_row(values)
        found = answers(overlay.path, inputs)
        assert_same(found, answers(full.path, inputs))
        assert_same(found, capi.predict(overlay.path, inputs))
        for name, rows in values.items():
            _check_rows(found[name], rows[inputs[name]], storage)
        shutil.rmtree(full.path)
        if random.random() < 0.2 or delta == 2:
            report = compact_version(model_dir)
            assert_same(found, answers(report.path, inputs))
            assert not verify_files(report.path).damaged
            done["compacted"] += 1
        if random.random() < 0.2:
            rollback_version(model_dir)
            done["rolled back"] += 1
        if random.random() < 0.3:
            prune_versions(model_dir, keep=2)
            done["pruned"] += 1
    assert deltas < 50 or min(done.values()) >= 3, done
    for info in list_versions(model_dir):
        assert not info.fault
        assert not verify_files(info.path).damaged


def _check_rows(found: Array, rows: Array, storage: str) -> None:
    """Compare answers with the rows; those of int8 within half a step of their row, of which there are 254."""
    if storage == "float32":
        np.testing.assert_array_equal(found, rows)
    else:
        step = (rows.max(1, keepdims=True) - rows.min(1, keepdims=True)) / 254
        assert (np.abs(found - rows) <= 0.5001 * step + 1e-6).all()


# ---- a large table


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("rows", "layout"),
    [(30_000, "mmap"), *(pytest.param(2_000_000, layout, marks=LONG) for layout in ("mmap", "variables"))],
)
def test_half_of_a_table_at_random(tmp_path: Path, rows: int, layout: str) -> None:
    """The base and overlays of 1% and 10%: in Python, in the C API, and from our server."""
    random, values = np.random.default_rng(rows), random_table(rows, 16)
    options: dict[str, Any] = {"layout": layout, "serving_config": {"features": {"t": {"table": "t", "input": "id"}}}}
    ids, changes = random.integers(0, rows, rows // 2), np.array([], np.int64)
    for version, share in enumerate((0.0, 0.01, 0.1), start=1):
        hits = random.choice(rows, int(rows * share), replace=False)
        values[hits], changes = random.standard_normal((len(hits), 16), np.float32), np.union1d(changes, hits)
        write_checkpoint(tmp_path / "ckpt", {"t": values})
        over: dict[str, Any] = {"base": "latest"} if share else {}
        report = export_saved_model(tmp_path / "ckpt", tmp_path / "m", **options, **over)
        full = export_saved_model(tmp_path / "ckpt", tmp_path / "full", resume=False, **options)
        assert (report.version, report.rows_changed or 0) == (version, len(changes))
        truth = {"t": values[ids]}
        for path in (report.path, full.path):
            assert_same(answers(path, {"t": ids}), truth)
            assert_same(capi.predict(path, {"t": ids}), truth)
        shutil.rmtree(full.path)
        with ServerProcess(tmp_path / "m", tmp_path / "log", "--grpc-port", "0") as server:
            server.wait_for(version)
            np.testing.assert_array_equal(np.concatenate(list(_asked(server, ids))), truth["t"])


def _asked(server: ServerProcess, ids: Array) -> Iterator[Array]:
    """Yield the rows of the ids in the answers of a server, over gRPC."""
    with grpc.insecure_channel(server.grpc_address, options=[("grpc.max_receive_message_length", -1)]) as channel:
        stub: Any = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        for start in range(0, len(ids), 10_000):
            request = predict_pb2.PredictRequest()
            request.model_spec.name = "m"
            request.inputs["t"].CopyFrom(tf.make_tensor_proto(ids[start : start + 10_000]))
            (output,) = stub.Predict(request, timeout=60).outputs.values()
            yield tf.make_ndarray(output)


# ---- kills


class Killed:
    """A MODEL_DIR with a base and an overlay, and a command that is killed again and again while it makes the next version."""

    def __init__(self, folder: Path, command: str, rows: int, layout: str) -> None:
        self.folder, self.model_dir = folder, folder / "m"
        self._options: dict[str, Any] = {
            "layout": layout,
            "serving_config": {"features": {name: {"table": name, "input": "id"} for name in "tu"}},
            "max_overlay": 0.5,
        }
        values = {"t": random_table(rows, 32), "u": random_table(rows // 10, 8, seed=1)}
        for number in (1, 2, 3):
            write_checkpoint(folder / f"ckpt-{number}", values)
            if number < 3:
                self.export(number, self.model_dir)
            values = changed(values, np.random.default_rng(number), 0.1)
        self.export(3, self.model_dir, delta_to=folder / "packages", version=3)
        (folder / "config.json").write_text(json.dumps(self._options["serving_config"]))
        export = ["export", f"{folder}/ckpt-3", f"{self.model_dir}", "--serving-config", f"{folder}/config.json"]
        self.arguments, self.equals = {
            "export": ([*export, "--base", "latest", "--layout", layout, "--max-overlay", "0.5"], 3),
            "apply": (["apply", f"{folder}/packages/3", f"{self.model_dir}"], 3),
            "apply --materialise": (["apply", f"{folder}/packages/3", f"{self.model_dir}", "--materialise"], 3),
            "compact": (["compact", f"{self.model_dir}", "2"], 2),
        }[command]

    def export(self, number: int, model_dir: Path, **options: Any) -> None:
        over = {"base": "latest"} if number > 1 else {"max_overlay": None}
        export_saved_model(self.folder / f"ckpt-{number}", model_dir, **{**self._options, **over, **options})

    def run(self, moment: int = 0, seconds: float | None = None, folder: Path | None = None) -> int:
        """Run the command, killed at its `moment`-th change of a folder or after some seconds; return its exit code."""
        (self.folder / "err").touch()
        before = functools.partial(die_at_change, str(folder or self.model_dir), moment) if moment else None
        process = Fork([str(SCRIPT), *self.arguments], self.folder / "err", before=before)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait(60)

    def check(self) -> set[int]:
        """Check that every version is whole and has its rows. Return the new ones."""
        infos = {info.version: info for info in list_versions(self.model_dir)}
        assert {1, 2} <= infos.keys() <= {1, 2, 3}
        for version, info in infos.items():
            assert not info.fault
            assert not verify_files(info.path).damaged
            rows = self.equals if version == 3 else version
            assert not diff_checkpoints(info.path, self.folder / f"ckpt-{rows}").differs
        return infos.keys() - {1, 2}

    def end(self) -> None:
        """Run the command to its end, and check that nothing is left of the runs before."""
        assert self.run() == 0, (self.folder / "err").read_text()
        assert self.check() == {3}
        assert sorted(path.name for path in self.model_dir.iterdir()) == ["1", "2", "3"]


COMMANDS = ["export", "apply", "apply --materialise", "compact"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("command", "layout", "step"),
    [
        *((command, "mmap", 60) for command in ("apply", "compact")),
        *(pytest.param(command, layout, 16, marks=LONG) for command in COMMANDS for layout in ("mmap", "variables")),
    ],
)
def test_killed_between_two_changes_of_the_folder(tmp_path: Path, command: str, layout: str, step: int) -> None:
    random, killed = np.random.default_rng(step), Killed(tmp_path, command, 1_000, layout)
    moment = moments = 0
    while killed.run(moment := moment + int(random.integers(1, step))) == -signal.SIGKILL:
        moments += 1
        for version in killed.check():  # killed after it was published
            shutil.rmtree(killed.model_dir / str(version))
    print(f"{command}, {layout}: killed at {moments} of {moment} moments")
    assert moments > 1
    assert killed.check() == {3}
    shutil.rmtree(killed.model_dir / "3")
    killed.end()


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_packages_that_were_killed_while_written(tmp_path: Path) -> None:
    """Each package that is there applies, and the next one removes what is left."""
    random, killed = np.random.default_rng(0), Killed(tmp_path, "export", 1_000, "mmap")
    packages = tmp_path / "packages"
    killed.arguments += ["--delta-to", str(packages)]
    moment = moments = 0
    while killed.run(moment := moment + int(random.integers(1, 12)), folder=packages) == -signal.SIGKILL:
        moments += 1
    assert moments > 1
    assert killed.check() == set()
    numbers = {path.name for path in packages.iterdir()}
    assert {"3", "4"} <= numbers
    assert numbers == set(map(str, range(3, 3 + len(numbers))))
    for number in sorted(numbers, key=int):
        applied = apply_package(packages / number, killed.model_dir)
        assert not diff_checkpoints(applied.path, tmp_path / "ckpt-3").differs


@pytest.mark.parametrize("command", [pytest.param(command, marks=LONG) for command in COMMANDS])
def test_killed_at_random_times(tmp_path: Path, command: str) -> None:
    random, killed = np.random.default_rng(0), Killed(tmp_path, command, 300_000, "mmap")
    started = time.monotonic()
    killed.end()
    taken = time.monotonic() - started
    kills = 0
    while kills < 15:
        shutil.rmtree(killed.model_dir / "3", ignore_errors=True)
        seconds = random.uniform(0, taken)
        if killed.run(seconds=seconds) == -signal.SIGKILL:
            kills += 1
        else:
            taken = seconds  # it takes no longer
        killed.check()
    print(f"{command}: {kills} kills within {taken:.1f} s")
    shutil.rmtree(killed.model_dir / "3", ignore_errors=True)
    killed.end()


# ---- all operations in random orders


@dataclasses.dataclass(frozen=True)
class Version:
    """What a version should be: which checkpoint's rows it has, and the number of its base, if it is an overlay."""

    rows: int
    base: int | None = None


class Model:
    """The versions that two MODEL_DIRs should have: of a trainer, and of a server that packages are applied to."""

    def __init__(self, folder: Path, random: np.random.Generator) -> None:
        self.folder, self.random = folder, random
        self.values, self.checkpoints, self.packages = {"t": random_table(150, 4)}, 0, 1
        self.layout = str(random.choice(["mmap", "variables"]))
        self.folders = {name: folder / name for name in ("trainer", "server")}
        self.versions: dict[str, dict[int, Version]] = {"trainer": {}, "server": {}}
        self.train()
        self.export_full()
        shutil.copytree(self.folders["trainer"], self.folders["server"])
        self.versions["server"] = dict(self.versions["trainer"])
        copy = self.folders["server"] / "1"
        manifest = Manifest.read(copy)
        assert manifest
        if self.layout == "mmap":
            relocate_export(copy, manifest, str(copy.parent))

    def train(self) -> None:
        """Write the next checkpoint."""
        if self.random.random() < 0.2:
            self.values = grown(self.values, self.random)
        self.values = changed(self.values, self.random, 0.05)
        self.checkpoints += 1
        write_checkpoint(self.folder / f"ckpt-{self.checkpoints}", self.values)

    def export_full(self) -> None:
        """Add a full version of the newest rows."""
        report = self._export(self.folders["trainer"])
        self._add("trainer", report.version, Version(self.checkpoints))

    def export_overlay(self) -> None:
        """Add an overlay of the newest version or of any."""
        base = self._base()
        self.train()
        report = self._export(self.folders["trainer"], base=base, max_overlay=5)
        assert report.base == self._full(base)
        self._add("trainer", report.version, Version(self.checkpoints, report.base))

    def package_and_apply(self) -> None:
        """Write a package, and apply it where its base is and its number is free."""
        base = self._base()
        self.train()
        packages = self.folder / "packages"
        report = self._export(self.folders["trainer"], base=base, max_overlay=5, delta_to=packages)
        assert report.version > max(self._full(base), self.packages)
        self.packages = report.version
        rows, has = self.versions["trainer"][self._full(base)].rows, self.versions["server"]
        bases = [number for number, version in sorted(has.items()) if version == Version(rows)]
        materialise = bool(self.random.random() < 0.3)
        if report.version in has or not bases:
            with pytest.raises(ExportError):
                apply_package(packages, self.folders["server"], materialise=materialise)
            return
        applied = apply_package(packages, self.folders["server"], materialise=materialise)
        assert applied.version == report.version
        assert applied.base == (self._full(base) if self._full(base) in bases else bases[0])
        self.versions["server"][applied.version] = Version(self.checkpoints, None if materialise else applied.base)

    def compact(self) -> None:
        """Add a full version of an overlay."""
        name = self._name()
        overlays = [number for number, version in self.versions[name].items() if version.base]
        if overlays:
            number = int(self.random.choice(overlays))
            report = compact_version(self.folders[name], number)
            self._add(name, report.version, Version(self.versions[name][number].rows))

    def prune(self) -> None:
        """Remove all but the newest, and those that they need."""
        name, keep = self._name(), int(self.random.integers(1, 4))
        versions = self.versions[name]
        kept = set(sorted(versions)[-keep:])
        kept |= {base for number in kept if (base := versions[number].base)}
        report = prune_versions(self.folders[name], keep=keep)
        assert set(report.removed) == versions.keys() - kept
        self.versions[name] = {number: versions[number] for number in kept}

    def rollback(self) -> None:
        """Add an older version again."""
        name = self._name()
        versions = self.versions[name]
        if len(versions) > 1:
            number = int(self.random.choice(sorted(versions)[:-1]))
            report = rollback_version(self.folders[name], number)
            self._add(name, report.version, versions[number])

    def check(self) -> None:
        """Compare both folders with what they should have."""
        for name, versions in self.versions.items():
            infos = list_versions(self.folders[name])
            assert {info.version for info in infos} == versions.keys()
            assert {path.name for path in self.folders[name].iterdir()} == set(map(str, versions))
            for info in infos:
                version = versions[info.version]
                assert (info.fault, info.bases) == ("", (version.base,) if version.base else ())
                assert not verify_files(info.path).damaged
                assert not diff_checkpoints(info.path, self.folder / f"ckpt-{version.rows}").differs

    def check_answers(self) -> None:
        """Look all rows of every version up."""
        for name, versions in self.versions.items():
            for number, version in versions.items():
                with open_tables(self.folder / f"ckpt-{version.rows}", {}) as checkpoint:
                    rows = checkpoint.read("t", 0, checkpoint.tables()["t"].rows)
                found = answers(self.folders[name] / str(number), {"t": np.arange(len(rows))})
                np.testing.assert_array_equal(found["t"], rows)

    def _export(self, model_dir: Path, **options: Any) -> Any:
        config = {"features": {"t": {"table": "t", "input": "id"}}}
        path = self.folder / f"ckpt-{self.checkpoints}"
        return export_saved_model(path, model_dir, serving_config=config, layout=self.layout, **options)

    def _base(self) -> Any:
        return "latest" if self.random.random() < 0.6 else int(self.random.choice(list(self.versions["trainer"])))

    def _full(self, base: Any) -> int:
        """Return the number of the full version that the option `base` means."""
        versions = self.versions["trainer"]
        number = max(versions) if base == "latest" else base
        return versions[number].base or number

    def _name(self) -> str:
        return str(self.random.choice(list(self.versions)))

    def _add(self, name: str, number: int, version: Version) -> None:
        assert number == max(self.versions[name], default=0) + 1
        self.versions[name][number] = version


OPERATIONS = {
    Model.export_full: 1,
    Model.export_overlay: 4,
    Model.package_and_apply: 5,
    Model.compact: 2,
    Model.prune: 2,
    Model.rollback: 2,
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("seed", "operations"), [(0, 12), *(pytest.param(seed, 40, marks=LONG) for seed in range(1, 11))]
)
def test_random_orders_of_all_operations(tmp_path: Path, seed: int, operations: int) -> None:
    random = np.random.default_rng(seed)
    model, done = Model(tmp_path, random), list[str]()
    weights = np.array(list(OPERATIONS.values())) / sum(OPERATIONS.values())
    for operation in random.choice(np.array(list(OPERATIONS)), operations, p=weights):
        done.append(operation.__name__)
        operation(model)
        model.check()
    print(model.layout, *done)
    model.check_answers()


def test_a_compaction_removes_what_one_of_another_version_left(tmp_path: Path) -> None:
    model = Model(tmp_path, np.random.default_rng(0))
    model.export_overlay()
    model.export_overlay()
    left = model.folders["trainer"] / ".staging-compact-2"
    (left / "tables").mkdir(parents=True)
    compact_version(model.folders["trainer"], 3)
    assert not left.exists()


@pytest.mark.nightly
def test_an_export_leaves_a_compaction_to_be_resumed(tmp_path: Path) -> None:
    model = Model(tmp_path, np.random.default_rng(0))
    model.export_overlay()
    left = model.folders["trainer"] / ".staging-compact-2" / "tables"
    left.mkdir(parents=True)
    (left / "stack_float32_4.data").write_bytes(b"x" * 1000)
    model.export_overlay()
    assert left.exists()
