"""Exports whose tables are mapped: every loader, other folders, several versions, and the memory."""

import gc
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

from tests.support import capi
from tests.support.export.fakes import random_table, write_checkpoint
from tests.support.messages import refused
from tpuembed import export_saved_model
from tpuembed.manifest import Manifest

pytestmark = pytest.mark.usefixtures("exports_in_this_process")

Array = npt.NDArray[Any]
SHAPES = {"a": (100, 4), "b": (50, 4), "c": (30, 8)}
IDS = np.array([[1, 2], [3, -1], [29, 7]])
CONFIG = {"features": {name: {"table": name, "combiner": "sum"} for name in SHAPES}}


@pytest.fixture(scope="module")
def tables() -> dict[str, Array]:
    return {name: random_table(*shape, seed=seed) for seed, (name, shape) in enumerate(SHAPES.items())}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tables: dict[str, Array]) -> Path:
    prefix = tmp_path_factory.mktemp("checkpoint") / "ckpt"
    write_checkpoint(prefix, tables)
    return prefix


def export(checkpoint: Path, model_dir: Path, **options: Any) -> Path:
    return export_saved_model(checkpoint, model_dir, serving_config=CONFIG, layout="mmap", workers=1, **options).path


@pytest.fixture(scope="module")
def exported(exports_in_this_process: None, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A version that no test changes."""
    return export(checkpoint, tmp_path_factory.mktemp("exported") / "m")


@pytest.fixture
def copied(exported: Path, tmp_path: Path) -> Path:
    """A copy for tests that change it. Our server maps its tables; other loaders map those of `exported`."""
    return Path(shutil.copytree(exported, tmp_path / "m" / exported.name))


def truth(table: Array) -> Array:
    rows = np.where(IDS[:, :, None] >= 0, table[IDS], 0.0)
    found: Array = rows.sum(1)
    return found


def check(answers: dict[str, Array], tables: dict[str, Array], error: float = 1e-6) -> None:
    assert set(answers) == set(tables)
    for name, table in tables.items():
        np.testing.assert_allclose(answers[name], truth(table), atol=error, err_msg=name)


def in_python(version: Path) -> Any:
    return tf.saved_model.load(str(version))


def ask_python(model: Any) -> dict[str, Array]:
    found = model.signatures["serving_default"](**dict.fromkeys(SHAPES, tf.constant(IDS)))
    return {name: value.numpy() for name, value in found.items()}


def ask_server(version: Path, **options: Any) -> dict[str, Array]:
    from tpuembed_serving.tensorflow import session as runtime

    servable = runtime.load(version, **options)
    try:
        signature = servable.signatures["serving_default"]
        values = servable.run(signature, [IDS] * len(signature.inputs))
        return {info.alias: value for info, value in zip(signature.outputs, values, strict=True)}
    finally:
        servable.close()


def mapped_files(folder: Path) -> set[str]:
    """Table files below `folder` that this process has mapped, for models that are no garbage."""
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if f"{folder}/variables/variables.data-" in line}


def test_nothing_is_loaded(exported: Path) -> None:
    """The bundle has the tables, for whoever reads it, and the graph restores none of them."""
    version = exported
    manifest = Manifest.read(version)
    assert manifest is not None
    assert manifest.layout == "mmap"
    bundle = tf.train.load_checkpoint(str(version / "variables" / "variables"))
    graph = tf.train.load_checkpoint(str(version / "variables" / "variables")).get_tensor(
        "_CHECKPOINTABLE_OBJECT_GRAPH"
    )
    for stack in manifest.stacks:
        np.testing.assert_array_equal(
            bundle.get_tensor(stack.key), np.fromfile(version / stack.file, np.float32).reshape(stack.rows, stack.dim)
        )
        assert stack.key.encode() not in graph
    model = in_python(version)
    assert {str(version / stack.file) for stack in manifest.stacks} == mapped_files(version)
    assert model.signatures["serving_default"].variables == ()


def test_a_model_that_is_gone_maps_nothing(exported: Path) -> None:
    model = in_python(exported)
    assert mapped_files(exported)
    del model
    assert not mapped_files(exported)


@pytest.mark.nightly
def test_the_server_maps_from_where_the_version_lies(
    checkpoint: Path, tables: dict[str, Array], tmp_path: Path
) -> None:
    """On a read-only file system too, and though the paths of the graph lead elsewhere, or to another version."""
    version = export(checkpoint, tmp_path / "m")
    moved = tmp_path / "elsewhere" / "9"
    shutil.copytree(version, moved)
    stale = {name: np.zeros_like(table) for name, table in tables.items()}
    write_checkpoint(tmp_path / "stale", stale)
    shutil.rmtree(version)
    export(tmp_path / "stale", tmp_path / "m")
    for path in (*moved.rglob("*"), moved):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = {path: path.read_bytes() for path in moved.rglob("*") if path.is_file()}
    check(ask_server(moved), tables)
    check(ask_python(in_python(moved)), stale)
    assert {path: path.read_bytes() for path in moved.rglob("*") if path.is_file()} == before
    for path in (*moved.rglob("*"), moved):
        path.chmod(0o755)


def spoil(version: Path, change: str) -> str:
    """Damage the last table file; its path in the version."""
    path = sorted(version.glob("variables/*.data-*"))[-1]
    if change == "missing":
        path.unlink()
    else:
        content = path.read_bytes()
        path.write_bytes(content[:-1] if change == "short" else content + b"\0")
    return path.relative_to(version).as_posix()


@pytest.mark.parametrize("change", ["missing", "short", "long"])
def test_damaged_files_are_refused_by_name(copied: Path, change: str) -> None:
    from tpuembed_serving.core.status import StatusError

    spoil(copied, change)
    with refused(StatusError):
        ask_server(copied)


def test_prewarming_finds_one_bit(copied: Path, tables: dict[str, Array]) -> None:
    from tpuembed_serving.core.status import Code, StatusError

    seen: list[int] = []
    check(ask_server(copied, prewarm=True, random_access=True, on_read=seen.append), tables)
    assert sum(seen) == sum(table.nbytes for table in tables.values())
    path = sorted(copied.glob("variables/*.data-*"))[-1]
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)
    with refused(StatusError) as caught:
        ask_server(copied, prewarm=True)
    assert caught.value.code is Code.DATA_LOSS


def test_a_graph_of_another_export_is_refused(checkpoint: Path, copied: Path, tmp_path: Path) -> None:
    from tpuembed_serving.core.status import Code, StatusError

    other = export(checkpoint, tmp_path / "n", tables=["c"])
    shutil.copy(other / "saved_model.pb", copied / "saved_model.pb")
    with refused(StatusError) as caught:
        ask_server(copied)
    assert caught.value.code is Code.DATA_LOSS


def inodes(version: Path) -> list[int]:
    """Of the table files."""
    manifest = Manifest.read(version)
    assert manifest is not None
    return [(version / stack.file).stat().st_ino for stack in manifest.stacks]


@pytest.mark.nightly
def test_a_damaged_version_is_not_shared(checkpoint: Path, tables: dict[str, Array], tmp_path: Path) -> None:
    first = export(checkpoint, tmp_path / "m")
    path = sorted(first.glob("variables/*.data-*"))[-1]
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)
    second = export(checkpoint, tmp_path / "m")
    assert not set(inodes(first)) & set(inodes(second))
    check(capi.predict(second, dict.fromkeys(SHAPES, IDS)), tables)


@pytest.mark.nightly
def test_other_tables_are_not_shared(checkpoint: Path, tables: dict[str, Array], tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "ckpt", tables)
    first = export(tmp_path / "ckpt", tmp_path / "m")
    changed = {name: table + 1 for name, table in tables.items()}
    write_checkpoint(tmp_path / "ckpt", changed)
    second = export(tmp_path / "ckpt", tmp_path / "m")
    assert not set(inodes(first)) & set(inodes(second))
    check(capi.predict(second, dict.fromkeys(SHAPES, IDS)), changed)
    assert not set(inodes(second)) & set(inodes(export(tmp_path / "ckpt", tmp_path / "m", storage="float16")))


MEASURE = """
import json, resource, sys
import numpy as np
from tpuembed_serving.tensorflow import session as runtime
peak = lambda: int(next(l for l in open("/proc/self/status") if l.startswith("RssAnon")).split()[1]) * 1024
runtime.load(__import__("pathlib").Path(sys.argv[2])).close()
before = peak()
servable = runtime.load(__import__("pathlib").Path(sys.argv[1]), random_access=True)
loaded = peak()
areas = open("/proc/self/smaps").read().split("VmFlags:")
flags = [after.split("\\n")[0].split() for area, after in zip(areas, areas[1:]) if "variables.data-" in area.splitlines()[1]]
[rows] = servable.run(servable.signatures["serving_default"], [np.arange(0, 1 << 20, 5)])
print(json.dumps({"loaded": loaded - before, "looked_up": peak() - before, "rows": rows.nbytes, "flags": flags}))
"""


@pytest.mark.nightly
def test_memory_does_not_hold_the_table(tmp_path: Path) -> None:
    """256 MiB are mapped in a few; a copy by constant folding, or by a read of the variable, would show."""
    config = {"features": {"x": {"table": "big", "input": "id"}}}
    versions = []
    for name, rows in (("big", 1 << 20), ("small", 1 << 4)):
        (tmp_path / name).mkdir()
        write_checkpoint(tmp_path / name / "ckpt", {"big": np.ones((rows, 64), np.float32)})
        done = export_saved_model(tmp_path / name / "ckpt", tmp_path / name / "m", serving_config=config, layout="mmap")
        versions.append(str(done.path))
    process = subprocess.run([sys.executable, "-c", MEASURE, *versions], capture_output=True, text=True, check=True)
    found = json.loads(process.stdout.splitlines()[-1])
    assert found["loaded"] < 16 << 20
    assert ["rr" in flags for flags in found["flags"]] == [True, True], "random_access is on both mappings"
    assert found["looked_up"] < found["rows"] * 2 + (48 << 20)
