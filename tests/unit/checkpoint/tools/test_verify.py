"""What is damaged is found; what is not, is not."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import tensorflow as tf

from tests.support.checkpoint.bundles import save, write
from tests.support.checkpoint.orbax_trees import Leaves, write_tree
from tests.support.goldens import read_golden
from tests.support.messages import refused
from tests.support.stores import GcsStub
from tpuembed.checkpoint.tools import find_export, verify_files
from tpuembed.errors import CheckpointCorruptError, CheckpointError
from tpuembed.export import export_saved_model
from tpuembed.files import open_bytes, remote
from tpuembed.formats.saved_model import relocate_export
from tpuembed.formats.tensor_bundle import (
    Entry,
    data_files,
    index_path,
    read_index,
    shard_path,
    write_index,
)


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """By TensorFlow: tables in row and column slices over several data files, strings, a scalar."""
    root = tf.train.Checkpoint(
        table=tf.Variable(tf.random.uniform((9, 40))),
        bfloat=tf.Variable(tf.ones((3, 2), tf.bfloat16)),
        step=tf.Variable(3),
        words=tf.Variable(["", "a", "b" * 300]),
    )
    policy = tf.train.experimental.MaxShardSizePolicy(max_shard_size=700)
    options = tf.train.CheckpointOptions(experimental_sharding_callback=policy)
    return Path(root.write(str(tmp_path / "ckpt"), options))


def flip(path: Path, position: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        [byte] = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))


def test_sound_files(prefix: Path) -> None:
    calls: list[tuple[int, int]] = []
    report = verify_files(prefix, on_progress=lambda done, total: calls.append((done, total)))
    assert not report.damaged
    assert not report.unchecked
    size = sum(path.stat().st_size for path in prefix.parent.glob("*.data-*"))
    assert report.bytes == size
    assert calls[-1] == (size, size)
    assert report.entries == len(tf.train.list_variables(str(prefix)))


def test_all_damage_is_listed(prefix: Path) -> None:
    """Also where the object graph is damaged, which leads to the tables."""
    with open(index_path(prefix), "rb"):
        entries = read_index(index_path(prefix)).entries
    parts = [(key, part) for key, entry in entries.items() for part in entry.parts() if part.size]
    for _, part in parts:
        flip(shard_path(prefix, part.shard, len(list(prefix.parent.glob("*.data-*")))), part.offset, 0)
    damaged = verify_files(prefix).damaged
    assert sorted(damage.name for damage in damaged) == sorted(key for key, _ in parts)
    assert all("\n" not in damage.reason for damage in damaged)


def test_an_index_that_is_damaged_itself(prefix: Path) -> None:
    flip(index_path(prefix), 30, 1)
    with pytest.raises(CheckpointCorruptError, match=r"ckpt\.index"):
        verify_files(prefix)


def test_a_data_file_that_is_cut_or_gone(prefix: Path) -> None:
    [path, *_] = sorted(prefix.parent.glob("*.data-*"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with refused(CheckpointCorruptError):
        verify_files(prefix)
    path.unlink()
    with refused(CheckpointCorruptError):
        verify_files(prefix)


def test_a_data_file_that_the_system_refuses(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other files are read all the same."""
    refused, *others = sorted(prefix.parent.glob("*.data-*"))

    def open_other(path: Path) -> Any:
        if path == refused:
            raise PermissionError(13, "Permission denied", str(path))
        return open_bytes(path)

    monkeypatch.setattr(data_files, "open_bytes", open_other)
    report = verify_files(prefix)
    assert report.damaged
    assert {(damage.file, damage.reason) for damage in report.damaged} == {
        (str(refused), f"data file {refused}: cannot be read: Permission denied. Check its permissions.")
    }
    flip(others[0], 0, 1)
    assert {damage.file for damage in verify_files(prefix).damaged} == {str(refused), str(others[0])}


def test_a_store_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(request: Any) -> bool:
        request.answer(403, b"<Error><Code>AccessDenied</Code></Error>")
        return True

    remote._store.cache_clear()
    with GcsStub() as stub:
        stub.fault = refuse
        for name, value in stub.environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(CheckpointError) as caught:
            verify_files("gs://bucket/models")
    remote._store.cache_clear()
    assert re.fullmatch(
        r"checkpoint gs://bucket/models: cannot be read: the store answers 403 \w+\. The credentials are wrong, or may not .*",
        str(caught.value),
    )


def test_a_folder_that_the_system_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refuse)
    assert find_export(tmp_path) is None
    with refused(CheckpointError):
        verify_files(tmp_path)


def test_variants_are_named(tmp_path: Path) -> None:
    write_index(index_path(tmp_path / "ckpt"), {"iterator": Entry(dtype="variant", shape=(), size=5, crc32c=7)}, 1)
    shard_path(tmp_path / "ckpt", 0, 1).write_bytes(b"12345")
    report = verify_files(tmp_path / "ckpt")
    assert (report.damaged, report.bytes) == ((), 0)
    assert report.unchecked == ("tensor 'iterator': has dtype variant, whose checksum is not supported",)


def exported(folder: Path, layout: str) -> Path:
    prefix = folder / "ckpt"
    write(prefix, {"users": np.ones((9, 4), np.float32), "videos": np.ones((5, 3), np.float32)})
    features = {"u": {"table": "users"}, "v": {"table": "videos"}}
    config = {"features": features}
    return export_saved_model(prefix, folder / "model", serving_config=config, workers=1, layout=layout).path


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export that tests copy: to trace its graphs takes two seconds."""
    return exported(tmp_path_factory.mktemp("sound"), "variables")


@pytest.fixture
def export(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "model" / sound.name))


@pytest.fixture(params=["variables", "mmap"])
def layout_export(sound: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    if request.param == "mmap":  # its graph has the path of its folder
        return exported(tmp_path, "mmap")
    return Path(shutil.copytree(sound, tmp_path / "model" / sound.name))


def damaged_files(export: Path) -> list[str]:
    return [damage.file.removeprefix(f"{export}/") for damage in verify_files(export).damaged]


def files_of(export: Path) -> list[str]:
    return sorted(path.relative_to(export).as_posix() for path in export.rglob("*") if path.is_file())


@pytest.mark.sampled(1)
def test_a_sound_export_has_no_damage(layout_export: Path) -> None:
    for path in (layout_export, layout_export.parent):
        report = verify_files(path)
        assert report.path == str(layout_export)
        assert report.damaged == ()
        assert report.unchecked == ("assets.extra/tpuembed.json: has no checksum itself",)
    done: list[tuple[int, int]] = []
    verify_files(layout_export, on_progress=lambda *counts: done.append(counts))
    assert done[-1][0] == done[-1][1] >= sum(path.stat().st_size for path in layout_export.rglob("*.data-*"))


@pytest.mark.sampled(1)
def test_one_bit_anywhere(layout_export: Path) -> None:
    """In any file but the manifest."""
    rng = np.random.default_rng(0)
    for name in files_of(layout_export):
        if name == "assets.extra/tpuembed.json":
            continue
        path = layout_export / name
        size = path.stat().st_size
        positions = range(size) if ".data-" in name and size < 100 else rng.integers(0, size, 30).tolist()
        for position in positions:
            flip(path, position, 5)
            assert damaged_files(layout_export) == [name], position
            flip(path, position, 5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("change", ["longer", "shorter", "missing"])
def test_files_of_another_size(layout_export: Path, change: str) -> None:
    for name in files_of(layout_export):
        path = layout_export / name
        whole = path.read_bytes()
        if name == "assets.extra/tpuembed.json":
            continue
        if change == "missing":
            path.unlink()
        else:
            path.write_bytes(whole + b"\0" if change == "longer" else whole[:-1])
        assert damaged_files(layout_export) == [name]
        path.write_bytes(whole)


@pytest.mark.sampled(1)
def test_all_that_is_wrong_is_named(layout_export: Path) -> None:
    data = sorted(layout_export.glob("variables/*.data-*"))
    for path in data:
        flip(path, 0, 0)
    (layout_export / "saved_model.pb").unlink()
    (layout_export / "variables" / "more").touch()
    (layout_export / "assets.extra" / "notes").touch()
    report = verify_files(layout_export)
    assert sorted(damage.file for damage in report.damaged) == sorted(
        [str(layout_export / "saved_model.pb"), str(layout_export / "variables" / "more"), *map(str, data)]
    )
    assert "assets.extra/notes: did not exist when the export was written" in report.unchecked


@pytest.mark.nightly
def test_a_relocated_export_is_whole(sound: Path, export: Path) -> None:
    path = export_saved_model(
        sound.parent.parent / "ckpt",
        export.parent,
        serving_config={"features": {"u": {"table": "users"}}},
        layout="mmap",
        serving_root="/srv/models",
    ).path
    before = (path / "saved_model.pb").read_bytes()
    assert b"/srv/models/2/variables/variables.data-00001-of-00002" in before
    found = find_export(path)
    assert found is not None
    relocate_export(path, found[1], "/another/place")
    assert (path / "saved_model.pb").read_bytes() != before
    report = verify_files(path)
    assert report.damaged == ()
    assert (
        "saved_model.pb: the folder that it maps tables from, '/another/place/2', has no checksum" in report.unchecked
    )


@pytest.mark.parametrize("layout_export", ["mmap"], indirect=True)
@pytest.mark.nightly
def test_one_bit_of_the_folder_that_tables_are_mapped_from(layout_export: Path) -> None:
    """`relocate` changes the folder, so the checksum of the graph does not hold it. All tables have the same one."""
    path = layout_export / "saved_model.pb"
    folder, graph = os.fsencode(layout_export), path.read_bytes()
    starts = [found.start() for found in re.finditer(re.escape(folder), graph)]
    assert len(starts) >= 2
    for start in starts:
        for position in range(start, start + len(folder)):
            flip(path, position, 0)
            assert damaged_files(layout_export) == ["saved_model.pb"], position
            flip(path, position, 0)


def rewrite_manifest(export: Path, **fields: Any) -> str:
    """Change the first stack's fields; its name."""
    path = export / "assets.extra" / "tpuembed.json"
    manifest = json.loads(path.read_text())
    manifest["stacks"][0] |= fields
    path.write_text(json.dumps(manifest))
    name: str = manifest["stacks"][0]["name"]
    return name


def test_a_manifest_that_disagrees(export: Path) -> None:
    name = rewrite_manifest(export, crc32c=5)
    [damage] = verify_files(export).damaged
    assert damage.name == name
    assert damage.reason.endswith("but the manifest has 0x00000005")


def test_an_index_that_disagrees(export: Path) -> None:
    """Each of them is whole, and they are of two exports."""
    found = find_export(export)
    assert found is not None
    stack = found[1].stacks[0]
    index = export / "variables" / "variables.index"
    bundle = read_index(index)
    entries = dict(bundle.entries)
    entries[stack.key] = dataclasses.replace(entries[stack.key], crc32c=5)
    write_index(index, entries, bundle.num_shards)
    path = export / "assets.extra" / "tpuembed.json"
    manifest = json.loads(path.read_text())
    manifest["files"]["variables/variables.index"] = {
        "size": index.stat().st_size, "crc32c": int(google_crc32c.value(index.read_bytes())),
    }  # fmt: skip
    path.write_text(json.dumps(manifest))
    [damage] = verify_files(export).damaged
    assert (damage.name, damage.file) == (stack.name, str(index))
    assert "with CRC32C 0x00000005, but the manifest has bytes [0, " in damage.reason


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"offset": 10**9}, "but the manifest has 1000000060"), ({"file": "nowhere"}, "is missing")],
)
def test_a_stack_that_lies_elsewhere(export: Path, fields: dict[str, Any], reason: str) -> None:
    """Its bytes are looked for where the manifest says."""
    name = rewrite_manifest(export, **fields)
    damages = [damage for damage in verify_files(export).damaged if damage.name == name]
    assert [reason in damage.reason for damage in damages] == [True]


@pytest.mark.parametrize(("name", "kind"), [("orbax/keras_rs_adam", "orbax"), ("keras_rs/weights_h5", "keras")])
def test_formats_without_checksums_say_so(name: str, kind: str) -> None:
    report = verify_files(read_golden(name).path)
    assert report.damaged == ()
    assert report.unchecked == (
        f"format {kind} has no checksums of rows: they were read, but damage to them is not noticed",
    )
    assert report.bytes > 0


@pytest.mark.parametrize(("lost", "name"), [("de_t_embeddings_velocity", "t/velocities"), ("embeddings", "t")])
def test_what_cannot_be_read_without_checksums(tmp_path: Path, lost: str, name: str) -> None:
    """The table and each slot of its own."""
    rows = np.arange(40, dtype=np.float32).reshape(10, 4) + 1
    slots: Leaves = {
        ("optimizer_variables", "adam", f"de_t_embeddings_{slot}"): rows for slot in ("momentum", "velocity")
    }
    path = write_tree(tmp_path / "tree", {("trainable_variables", "de", "t", "embeddings"): rows, **slots}, ocdbt=False)
    assert verify_files(path).damaged == ()
    [folder] = path.glob(f"*.{lost}")
    (folder / "0.0").write_bytes(b"no zstd")
    assert [damage.name for damage in verify_files(path).damaged] == [name]


@pytest.mark.parametrize(
    "values",
    [
        [b""],
        [b"abc"],
        [b"x" * 300, b"", b"y" * 20_000],
        [bytes([i]) for i in range(200)],
        [b"z" * 20_000_000, b"a" * 200],
    ],
    ids=len,
)
def test_strings_are_compared_with_what_tensorflow_says(tmp_path: Path, values: list[bytes]) -> None:
    prefix = tmp_path / "strings"
    save(prefix, {"s": tf.constant(values, tf.string)})
    assert verify_files(prefix).damaged == ()
    data = shard_path(prefix, 0, 1)
    for position in (0, data.stat().st_size // 2, data.stat().st_size - 1):  # lengths, checksums, and texts
        flip(data, position, 5)
        assert [damage.name for damage in verify_files(prefix).damaged] == ["s"]
        flip(data, position, 5)


@pytest.mark.nightly
def test_memory_does_not_grow_with_the_files(tmp_path: Path) -> None:
    """4 GiB of one table, and a string of 1 GiB: under 128 MB in a process of its own."""
    prefix = tmp_path / "big"
    with open(shard_path(prefix, 0, 1), "wb") as file:
        file.truncate(5 << 30)
    string = Entry(dtype="string", shape=(), offset=4 << 30, size=1 << 30, crc32c=1)
    table = Entry(dtype="float32", shape=(1 << 24, 64), size=4 << 30, crc32c=1)
    write_index(index_path(prefix), {"table": table, "string": string}, 1)
    script = """
import sys
from tpuembed.checkpoint.tools import verify_files
report = verify_files(sys.argv[1])
assert len(report.damaged) == 2
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM:")).split()[1])
"""
    done = subprocess.run([sys.executable, "-c", script, str(prefix)], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 128e6
    shutil.rmtree(tmp_path)
