"""Directories that hold checkpoints of two formats: which is meant must be said, and is never guessed."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.support.messages import refused
from tpuembed.checkpoint import find_format, open_checkpoint
from tpuembed.checkpoint.orbax import OrbaxCheckpoint
from tpuembed.checkpoint.tools import verify_files
from tpuembed.errors import CheckpointFormatError
from tpuembed.export import export_saved_model

GOLDEN = Path(__file__).parents[2] / "golden"
WEIGHTS = GOLDEN / "keras_rs" / "weights_h5" / "model.weights.h5"
ORBAX = GOLDEN / "orbax" / "tree" / "ckpt"
TENSORFLOW, KERAS, JAX = "a TensorFlow checkpoint", "Keras weights", "an Orbax checkpoint"
ROWS = np.arange(6, dtype=np.float32).reshape(3, 2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A CheckpointManager's, with its `checkpoint` file and ckpt-1; further down what others leave there."""
    saved = tf.train.Checkpoint(table=tf.Variable(ROWS))
    tf.train.CheckpointManager(saved, str(tmp_path / "run"), max_to_keep=2).save()
    return tmp_path / "run"


def formats(path: Path) -> str:
    with open_checkpoint(path) as checkpoint:
        return checkpoint.format


def check_refused(folder: Path, **held: Path) -> None:
    """By every way in, with both named; each of them, given itself, is read, by the workers of an export too."""
    names = {"tensorflow": TENSORFLOW, "keras": KERAS, "orbax": JAX}
    expected = {"tensorflow": "dense", "keras": "keras", "orbax": "orbax"}
    for opener in (open_checkpoint, verify_files):
        with refused(CheckpointFormatError) as it:
            opener(folder)
        for kind in held:
            assert names[kind] in str(it.value)
    for kind, place in held.items():
        assert formats(place) == expected[kind]
        with open_checkpoint(place) as checkpoint, open_checkpoint(checkpoint.path, **checkpoint.options) as again:
            assert (again.format, again.fingerprint()) == (expected[kind], checkpoint.fingerprint())


def test_keras_weights_beside_a_checkpoint(folder: Path) -> None:
    shutil.copy(WEIGHTS, folder)
    check_refused(folder, tensorflow=folder / "ckpt-1.index", keras=folder / WEIGHTS.name)


def test_several_keras_weights_beside_a_checkpoint_without_its_file(folder: Path) -> None:
    (folder / "checkpoint").unlink()
    for name in ("b.weights.h5", "a.weights.h5"):
        shutil.copy(WEIGHTS, folder / name)
    check_refused(folder, tensorflow=folder / "ckpt-1.index", keras=folder / "a.weights.h5")


def test_steps_of_orbax_below_a_checkpoint(folder: Path) -> None:
    for step in ("8", "10"):
        shutil.copytree(ORBAX, folder / step / "default")
    check_refused(folder, tensorflow=folder / "ckpt-1.index", orbax=folder / "10")


def test_a_checkpoint_inside_an_item_of_orbax(folder: Path) -> None:
    shutil.copytree(ORBAX, folder, dirs_exist_ok=True)
    check_refused(folder, tensorflow=folder / "ckpt-1.index", orbax=folder / "_METADATA")


def test_keras_weights_beside_steps_of_orbax(tmp_path: Path) -> None:
    shutil.copytree(ORBAX, tmp_path / "12" / "default")
    shutil.copy(WEIGHTS, tmp_path)
    check_refused(tmp_path, orbax=tmp_path / "12", keras=tmp_path / WEIGHTS.name)


def test_a_prefix_that_is_a_folder_of_orbax_too(folder: Path) -> None:
    shutil.copytree(ORBAX, folder / "ckpt-1")
    check_refused(folder / "ckpt-1", tensorflow=folder / "ckpt-1.index", orbax=folder / "ckpt-1" / "_METADATA")


def test_an_export_of_what_was_named(folder: Path) -> None:
    """Its workers open it by themselves."""
    shutil.copytree(ORBAX, folder / "ckpt-1")
    config = {"features": {"x": {"table": "table", "input": "id"}}}
    report = export_saved_model(folder / "ckpt-1.index", folder / "model", serving_config=config, workers=1)
    served = tf.saved_model.load(str(report.path)).signatures["serving_default"](x=tf.range(3, dtype=tf.int64))["x"]
    np.testing.assert_array_equal(served, ROWS)


def saved_model(path: Path) -> Path:
    module = tf.Module()
    module.table = tf.Variable(ROWS)
    tf.saved_model.save(module, str(path))
    return path


def test_a_saved_model_among_checkpoints(folder: Path) -> None:
    saved_model(folder)
    with refused(CheckpointFormatError):
        open_checkpoint(folder)
    for place in (folder / "variables" / "variables.index", folder / "ckpt-1"):
        assert formats(place) == "dense"


def test_keras_weights_in_a_saved_model(tmp_path: Path) -> None:
    shutil.copy(WEIGHTS, saved_model(tmp_path / "model"))
    place = tmp_path / "model"
    check_refused(place, tensorflow=place / "variables" / "variables.index", keras=place / WEIGHTS.name)


def test_one_format_beside_what_is_none(folder: Path) -> None:
    for name in ("model.h5", "notes.txt", "events.out.tfevents.1", "config.json", "metadata.json"):
        (folder / name).write_text("x")
    for name in ("train", "8", "export.index", "old.keras", "x.weights.h5", "saved"):
        (folder / name).mkdir()
    saved_model(folder / "saved" / "1")
    assert formats(folder) == "dense"
    assert formats(folder / "ckpt-1") == "dense"


@pytest.mark.parametrize("name", ["keras_rs_adam", "tree", "tree_files", "tree_zarr3_files", "tree_v1", "stacked_8"])
def test_every_folder_that_orbax_writes(name: str) -> None:
    places = [path.parent for path in (GOLDEN / "orbax" / name).rglob("_METADATA")]
    assert places
    for place in places:
        assert [find_format(folder) for folder in (place, place.parent)] == [OrbaxCheckpoint] * 2


def test_a_saved_model_alone(tmp_path: Path) -> None:
    (saved_model(tmp_path / "model") / "checkpoint").mkdir()
    assert formats(tmp_path / "model") == "dense"


def test_an_unzipped_keras_file() -> None:
    assert formats(GOLDEN / "keras_rs" / "keras_folder" / "model") == "keras"
