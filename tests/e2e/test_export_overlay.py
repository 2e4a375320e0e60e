"""Overlay versions: for every id they answer as a full export of the same rows, bit for bit, whoever loads them."""

import errno
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import capi
from tests.support.export.fakes import write_checkpoint
from tests.support.export.overlays import (
    CONFIG,
    ROWS_ALONE,
    Array,
    all_ids,
    answers,
    assert_same,
    changed,
    every_row,
    overlays_of_any_size,
    tables,
)
from tests.support.messages import refused
from tpuembed import (
    FeatureConfig,
    TableConfig,
    TPUEmbedding,
    compact_version,
    export_saved_model,
    list_versions,
    prune_versions,
)
from tpuembed.checkpoint.tools import diff_checkpoints, verify_files
from tpuembed.errors import ConfigError, ExportError
from tpuembed.manifest import Manifest

pytestmark = pytest.mark.usefixtures("exports_in_this_process")

COMBINATIONS = [("mmap", "float32"), ("variables", "int8")]
OTHERS = [("mmap", "bfloat16"), ("variables", "float16")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("layout", "storage", "deltas"),
    [
        *((*one, 1) for one in COMBINATIONS),
        *(pytest.param(*one, 3, marks=pytest.mark.nightly) for one in (*COMBINATIONS, *OTHERS)),
    ],
)
@overlays_of_any_size()
def test_overlays_answer_as_full_exports(tmp_path: Path, layout: str, storage: str, deltas: int) -> None:
    random = np.random.default_rng(len(layout) * len(storage))
    values = tables()
    options: dict[str, Any] = {"layout": layout, "storage": storage, "serving_config": CONFIG}
    write_checkpoint(tmp_path / "ckpt", values)
    assert export_saved_model(tmp_path / "ckpt", tmp_path / "m", **options).base is None
    for delta in range(deltas):
        values = changed(values, random, 0.3 * (delta + 1))
        write_checkpoint(tmp_path / "ckpt", values)
        overlay = export_saved_model(tmp_path / "ckpt", tmp_path / "m", base="latest", **options)
        full = export_saved_model(tmp_path / "ckpt", tmp_path / "full", resume=False, **options)
        assert overlay.base == 1
        inputs = all_ids(values, random)
        found = answers(overlay.path, inputs)
        assert_same(found, answers(full.path, inputs))
        assert_same(capi.predict(overlay.path, inputs), capi.predict(full.path, inputs))
        if storage == "float32":
            np.testing.assert_array_equal(found["user"], values["users"][inputs["user"]])
        compared = diff_checkpoints(overlay.path, full.path)
        assert (compared.differs, len(compared.tables)) == (False, 3)
        assert not verify_files(overlay.path).damaged


def write(tmp_path: Path, values: Mapping[str, Array], config: Any = ROWS_ALONE, to: str = "m", **options: Any) -> Any:
    write_checkpoint(tmp_path / "ckpt", values)
    return export_saved_model(tmp_path / "ckpt", tmp_path / to, serving_config=config, **options)


@pytest.mark.nightly
def test_what_needs_a_full_version_gets_one(tmp_path: Path) -> None:
    values = tables()

    def written(fault: str, values: Mapping[str, Array], **options: Any) -> None:
        with pytest.warns(UserWarning, match=f"{fault}.*Writing a full version"):
            report = write(tmp_path, values, **options)
        assert (report.base, report.rows_changed) == (None, None)
        assert not list((tmp_path / "m").glob(".staging*"))

    written("no complete version yet", values, base="latest")
    more = changed(values, np.random.default_rng(0), 0.5)
    written("more than 15%", more, base="latest")
    written("has the stacks", more, base="latest", storage="int8")
    written("'tags' has 70 rows", {**more, "tags": more["tags"][:50]}, base=1)
    written("other tables: videos", more, base=1, features=["users", "tags"])
    shutil.rmtree(tmp_path / "m" / "5" / "assets.extra")
    written("not exported by tpuembed", more, base="latest")


@pytest.mark.nightly
def test_refusals(tmp_path: Path) -> None:
    values = tables()
    write(tmp_path, values)
    with refused(ConfigError):
        write(tmp_path, values, base=7)
    with refused(ConfigError):
        write(tmp_path, values, base="newest")
    with refused(ConfigError):
        write(tmp_path, values, base=0)
    with refused(ConfigError):
        write(tmp_path, values, base=1, engine="ray")
    with refused(ConfigError):
        export_saved_model(tmp_path / "ckpt", "s3://bucket/m", serving_config=CONFIG, base="latest")
    values["users"][7] += 1
    write(tmp_path, values, base=1)
    (tmp_path / "m" / "1").rename(tmp_path / "gone")
    with refused(ConfigError):
        write(tmp_path, values, base=2)
    write(tmp_path, values, version=1)
    with refused(ConfigError):
        write(tmp_path, values, base=2)
    (tmp_path / "m" / "1" / "saved_model.pb").unlink()
    with refused(ConfigError):
        write(tmp_path, values, base=1)


@pytest.mark.parametrize("part", ["rows", "words", "base"])
@pytest.mark.sampled(1)
def test_verify_finds_a_flipped_bit_in_every_array(tmp_path: Path, part: str) -> None:
    values = tables()
    write(tmp_path, values)
    values["users"][7] += 1
    path = write(tmp_path, values, base=1).path
    manifest = Manifest.read(path)
    assert manifest
    stack = next(stack for stack in manifest.stacks if stack.overlay)
    file = path / (stack.file if part == "base" else getattr(stack.overlay, part).file)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    assert [damage.name for damage in verify_files(path).damaged] == [
        stack.name if part == "base" else f"{stack.name}_{part}"
    ]


@pytest.mark.nightly
def test_a_newest_version_that_cannot_be_read_is_no_base(tmp_path: Path) -> None:
    values = tables()
    write(tmp_path, values)
    values["users"][7] += 1
    assert write(tmp_path, values, base="latest").base == 1
    (tmp_path / "m" / "2" / "assets.extra" / "tpuembed.json").write_text("{")
    assert write(tmp_path, values, base="latest").base == 1
    for version in ("1", "3"):
        (tmp_path / "m" / version / "assets.extra" / "tpuembed.json").write_text("{")
    with pytest.warns(UserWarning, match="Writing a full version"):
        assert write(tmp_path, values, base="latest").base is None


def test_a_version_has_to_be_above_its_base(tmp_path: Path) -> None:
    """Servers would go on with the base."""
    values = tables()
    write(tmp_path, values, version=7)
    with refused(ConfigError):
        write(tmp_path, values, base=7, version=6)


def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    values = tables()
    write(tmp_path, values)
    monkeypatch.setattr("os.link", no_links)
    values["users"][7] += 1
    with refused(ExportError):
        write(tmp_path, values, base=1)
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["1"]


def test_versions_are_moved_by_tools_that_keep_hard_links(tmp_path: Path) -> None:
    """As `rsync -aH` does: the copy of an overlay takes no more space, and answers as the overlay."""
    values = tables()
    write(tmp_path, values)
    values["users"][7] += 1
    overlay = write(tmp_path, values, base=1).path
    subprocess.run(["cp", "-a", tmp_path / "m", tmp_path / "copy"], check=True)
    base, moved = tmp_path / "copy" / "1", tmp_path / "copy" / "2"
    manifest = Manifest.read(moved)
    assert manifest
    assert all((moved / stack.file).samefile(base / stack.base_file) for stack in manifest.stacks if stack.base_file)
    assert not verify_files(moved).damaged
    inputs = every_row(values)
    assert_same(answers(moved, inputs), answers(overlay, inputs))


@pytest.mark.nightly
def test_prune_removes_what_killed_compactions_left(tmp_path: Path) -> None:
    write(tmp_path, tables())
    for name in (".staging-compact-7", ".staging-compact-1"):
        (tmp_path / "m" / name / "version").mkdir(parents=True)
    prune_versions(tmp_path / "m")
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == ["1"]


def test_a_base_that_is_cut_short_is_named(tmp_path: Path) -> None:
    values = tables()
    base = write(tmp_path, values).path
    values["users"][7] += 1
    manifest = Manifest.read(base)
    assert manifest
    file = base / manifest.stacks[0].file
    kept = file.read_bytes()
    file.write_bytes(kept[:-5])
    with refused(ConfigError):
        write(tmp_path, values, base=1)
    with pytest.warns(UserWarning, match="no complete version"):
        assert write(tmp_path, values, base="latest").base is None


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["mmap", "variables"])
@overlays_of_any_size()
def test_a_whole_model_in_training(tmp_path: Path, layout: str) -> None:
    """Its dense weights are those of the same step. The table that it reads whole is written whole."""
    users, tags = TableConfig(200, 8, "users"), TableConfig(20, 8, "tags")
    inputs = {"user": keras.Input((), dtype="int64", name="user"), "tag": keras.Input((), dtype="int64", name="tag")}
    layer = TPUEmbedding({"user": FeatureConfig(users), "tag": FeatureConfig(tags)}, optimizer="adam")
    found = layer(inputs)
    scores = Scores(layer, tags)(found["user"])
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()([scores, found["tag"]])))
    model.compile("sgd", "mse")
    random = np.random.default_rng(0)
    for step in range(2):
        fed = {"user": random.integers(0, 200, 6), "tag": random.integers(0, 20, 6)}
        model.fit(fed, random.normal(size=6).astype(np.float32), verbose=0)
        over: dict[str, Any] = {"base": 1} if step else {}
        report = export_saved_model(model, tmp_path / "m", layout=layout, **over)
        full = export_saved_model(model, tmp_path / "full", layout=layout)
        asked = {"user": np.arange(200), "tag": np.arange(200) % 20}
        answer = answers(report.path, asked)
        assert_same(answer, answers(full.path, asked))
        np.testing.assert_allclose(next(iter(answer.values())), model.predict(asked, verbose=0), rtol=1e-5, atol=1e-6)
    assert (report.base, 0 < (report.rows_changed or 0) <= 12) == (1, True)


class Scores(keras.layers.Layer):
    """The product with every row of a table."""

    def __init__(self, layer: TPUEmbedding, table: TableConfig) -> None:
        super().__init__()
        self._layer, self._table = layer, table

    def call(self, users: Any) -> Any:
        return tf.matmul(users, self._layer.embedding_tables[self._table], transpose_b=True)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("layout", "storage", "config"),
    [
        pytest.param("mmap", "int8", CONFIG, id="mmap-int8-all kinds"),
        pytest.param("variables", "float32", ROWS_ALONE, id="variables-float32-rows alone"),
    ],
)
@overlays_of_any_size()
def test_compact_makes_the_full_version(tmp_path: Path, layout: str, storage: str, config: Any) -> None:
    """Its data files are those of a full export, byte for byte, and the next overlays build on it."""
    random, values = np.random.default_rng(5), tables()
    options: dict[str, Any] = {"layout": layout, "storage": storage, "config": config}
    write(tmp_path, values, **options)
    values = changed(values, random, 0.1)
    overlay = write(tmp_path, values, base=1, **options)
    full = write(tmp_path, values, to="full", **options)
    report = compact_version(tmp_path / "m")
    assert (report.version, report.source) == (3, 2)
    made, truth = Manifest.read(report.path), Manifest.read(full.path)
    assert made
    assert truth
    assert (made.base, made.stacks, made.tables) == (None, truth.stacks, truth.tables)
    for stack in made.stacks:
        assert (report.path / stack.file).read_bytes() == (full.path / stack.file).read_bytes()
    assert not verify_files(report.path).damaged
    inputs = all_ids(values, random) if config is CONFIG else every_row(values)
    found = answers(report.path, inputs)
    assert_same(found, answers(overlay.path, inputs))
    assert_same(capi.predict(report.path, inputs), found)
    assert not list((tmp_path / "m").glob(".staging*"))
    values = changed(values, random, 0.05)
    assert write(tmp_path, values, base="latest", **options).base == 3
    shutil.rmtree(tmp_path / "m" / "1")
    shutil.rmtree(tmp_path / "m" / "2")
    assert_same(answers(report.path, inputs), found)


def test_compact_refuses_damage_and_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    values = tables()
    write(tmp_path, values)
    with refused(ConfigError):
        compact_version(tmp_path / "m")
    values["users"][7] += 1
    overlay = write(tmp_path, values, base=1).path
    with refused(ConfigError):
        compact_version(tmp_path / "m", 5)
    manifest = Manifest.read(overlay)
    assert manifest
    (tmp_path / "m" / ".staging-compact-2-0123abcd" / "tables").mkdir(parents=True)
    report = compact_version(tmp_path / "m", 2)
    assert report.bytes_reused == sum(stack.size for stack in manifest.stacks if stack.overlay is None)
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == ["1", "2", "3"]
    stack = next(stack for stack in manifest.stacks if stack.overlay)
    assert stack.overlay
    _flip(overlay / stack.overlay.rows.file)
    with refused(ExportError):
        compact_version(tmp_path / "m", 2)
    assert [info.version for info in list_versions(tmp_path / "m")] == [1, 2, 3]


@pytest.mark.nightly
def test_verify_of_an_overlay(tmp_path: Path) -> None:
    """Damage is found in the base's file and in the overlay's own files."""
    values = tables()
    write(tmp_path, values)
    values["users"][7] += 1
    overlay = write(tmp_path, values, base=1).path
    manifest = Manifest.read(overlay)
    assert manifest
    stack = next(stack for stack in manifest.stacks if stack.overlay)
    assert not verify_files(overlay).damaged
    assert stack.overlay
    for name, file in ((stack.name, stack.file), (stack.overlay.words.name, stack.overlay.words.file)):
        _flip(overlay / file)
        assert name in [damage.name for damage in verify_files(overlay).damaged]


def _flip(path: Path) -> None:
    """Change a bit."""
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
