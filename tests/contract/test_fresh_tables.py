"""Fresh tables: a version that links its base's files and has the changed rows answers as a full one does."""

import subprocess
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.contract_command import json_of
from tests.support.contract_lookups import answers
from tpuembed import ExportCallback, FeatureConfig, TableConfig, TPUEmbedding, export_saved_model

Array = np.ndarray[Any, Any]
ROWS, DIM = 300, 4
IDS = {"item": {"table": "items", "input": "id"}}
LISTS = {"seen": {"table": "items", "combiner": "sum"}}


def linked_bytes(version: Path, base: Path) -> int:
    """Return the bytes of files of `version` that are files of `base` too."""
    inodes = {path.stat().st_ino for path in base.rglob("*") if path.is_file()}
    return sum(path.stat().st_size for path in version.rglob("*") if path.is_file() and path.stat().st_ino in inodes)


class Changed:
    """A table in two checkpoints, of which the second has three other rows, and a version of each in `model_dir`."""

    def __init__(self, folder: Path, features: dict[str, Any], **options: Any) -> None:
        self.folder, self.model_dir = folder, folder / "m"
        self.options = {"serving_config": {"features": features}, "workers": 1, **options}
        self.rows = np.random.default_rng(1).normal(size=(ROWS, DIM)).astype(np.float32)
        self.before = self.rows.copy()
        self.base = self.write(self.rows, self.model_dir)
        self.rows[[0, 7, 299]] += 1
        self.overlay = self.write(self.rows, self.model_dir, base="latest")

    def write(self, rows: Array, model_dir: Path, **options: Any) -> Any:
        prefix = tf.train.Checkpoint(items=tf.Variable(rows)).write(str(self.folder / "ckpt"))
        return export_saved_model(prefix, model_dir, **self.options, **options)


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Changed:
    return Changed(tmp_path_factory.mktemp("changed"), IDS)


@pytest.fixture
def model_dir(changed: Changed, tmp_path: Path) -> Path:
    """Return a copy of both versions, of which the second links files of the first."""
    command = ["cp", "-a", str(changed.model_dir), str(tmp_path / "m")]
    subprocess.run(command, check=True)
    return tmp_path / "m"


def assert_answers(version: Path, rows: Array) -> None:
    np.testing.assert_array_equal(answers(version, {"item": np.arange(ROWS)})["item"], rows)


def test_an_overlay_has_the_changed_rows_and_links_the_others(changed: Changed) -> None:
    report = changed.overlay
    assert (changed.base.base, changed.base.rows_changed) == (None, None)
    assert (report.version, report.base, report.rows_changed) == (2, 1, 3)
    assert linked_bytes(report.path, changed.base.path) >= ROWS * DIM * 4
    assert_answers(report.path, changed.rows)
    assert_answers(changed.base.path, changed.before)


def test_an_overlay_answers_as_a_full_version_does(tmp_path: Path) -> None:
    """Each list has a row and the one that is as far from the end."""
    changed = Changed(tmp_path, LISTS, layout="mmap", storage="int8")
    assert changed.overlay.base == 1
    full = changed.write(changed.rows, tmp_path / "full").path
    inputs = {"seen": np.stack([np.arange(ROWS), np.arange(ROWS)[::-1]], 1)}
    found, wanted = (answers(path, inputs)["seen"] for path in (changed.overlay.path, full))
    assert found.tobytes() == wanted.tobytes()
    assert np.abs(wanted - changed.rows - changed.rows[::-1]).max() < 0.1


def test_base_names_a_version_and_keep_keeps_it(changed: Changed, model_dir: Path) -> None:
    """The base of an overlay is the full version that it builds on, and `keep` counts without it."""
    rows = changed.rows.copy()
    rows[9] = 0
    report = changed.write(rows, model_dir, base=2, keep=1)
    assert (report.version, report.base, report.rows_changed, report.removed) == (3, 1, 4, (2,))
    assert sorted(path.name for path in model_dir.iterdir()) == ["1", "3"]
    assert_answers(report.path, rows)


def test_compact_makes_a_full_version(changed: Changed, model_dir: Path) -> None:
    report = json_of("compact", model_dir)
    assert (report["version"], report["path"]) == (3, str(model_dir / "3"))
    assert linked_bytes(model_dir / "2", model_dir / "1") >= ROWS * DIM * 4
    assert linked_bytes(model_dir / "3", model_dir / "1") == 0
    assert_answers(model_dir / "3", changed.rows)


def test_an_overlay_that_would_need_too_much_is_a_full_version(changed: Changed, model_dir: Path) -> None:
    rows = changed.rows.copy()
    rows[: ROWS // 2] += 1
    with pytest.warns(UserWarning, match="Writing a full version"):
        report = changed.write(rows, model_dir, base="latest")
    assert (report.base, report.rows_changed, report.bytes_written) == (None, None, ROWS * DIM * 4)
    assert_answers(report.path, rows)


# ---- tracked rows


def tracked() -> Any:
    item = keras.Input((), dtype="int64", name="item")
    config = FeatureConfig(TableConfig(ROWS, DIM, "items"))
    found = TPUEmbedding(config, optimizer="adagrad", track_rows=True, name="embedding")(item)
    model = keras.Model(item, {"score": keras.layers.Dense(1, name="score")(found)})
    model.compile(keras.optimizers.SGD(0.1), {"score": "mse"})
    return model


def fit(model: Any, ids: list[int], **options: Any) -> None:
    model.fit(np.array(ids), {"score": np.ones((len(ids), 1))}, batch_size=len(ids), verbose=0, **options)


def scores(model: Any) -> Array:
    found: Array = model(tf.range(ROWS, dtype=tf.int64))["score"].numpy()
    return found


def test_training_that_tracks_rows_is_exported_by_the_command(tmp_path: Path) -> None:
    """The rows that `fit` looked up are those that changed, and the dense weights are those of the new step."""
    keras.utils.set_random_seed(1)
    model = tracked()
    saver = tf.train.Checkpoint(model=model)
    options: list[Any] = ["--model", f"{__name__}:tracked", "--workers", "1"]
    for ids, base, changed in (([1, 2], None, None), ([3, 7, 299, 7], 1, 3)):
        fit(model, ids)
        prefix = saver.save(str(tmp_path / "ckpt"))
        more = [] if base is None else ["--base", "latest"]
        report = json_of("export", prefix, tmp_path / "m", *options, *more)
        assert (report["base"], report["rows_changed"]) == (base, changed)
        found = answers(Path(report["path"]), {"item": np.arange(ROWS)})["score"]
        np.testing.assert_allclose(found, scores(model), rtol=1e-5, atol=1e-6)


def test_a_callback_publishes_overlays_between_batches(tmp_path: Path) -> None:
    """0 seconds have passed after every batch."""
    model, seen = tracked(), list[Array]()
    callback = ExportCallback(tmp_path, every_seconds=0, base="latest")

    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(scores(model))

    goals, options = {"score": np.ones((4, 1))}, {"batch_size": 2, "shuffle": False, "verbose": 0}
    with pytest.warns(UserWarning, match="Writing a full version"):  # there is no base yet
        model.fit(np.arange(4), goals, callbacks=[callback, Note()], **options)
    reports = [(report.version, report.base, report.rows_changed) for report in callback.reports]
    assert reports == [(1, None, None), (2, 1, 2)]
    for report, wanted in zip(callback.reports, seen, strict=True):
        found = answers(report.path, {"item": np.arange(ROWS)})["score"]
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
