"""`open_checkpoint`: what it lists and reads, against the arrays of whoever wrote the checkpoint."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.contract_refusals import assert_each_is_refused
from tests.support.goldens import read_golden
from tpuembed import Adagrad, FeatureConfig, TableConfig, TableInfo, TPUEmbedding, open_checkpoint
from tpuembed.errors import (
    CheckpointCorruptError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    ConfigError,
    TpuEmbedError,
)

Array = np.ndarray[Any, Any]
E = tf.tpu.experimental.embedding

GOLDENS = [
    "tfrs/no_optimizer",
    "tfrs/keras_adagrad",
    "tfrs/string_adagrad",
    "tfrs/partial_model",
    "tensorflow/saved_model",
    "tensorflow/own_layer",
    "tpu/hosts_2_adagrad",
    "tpu/sparse_cores_2_adagrad_momentum",
    "tpu/partitioned_mod",
    "keras_rs/weights_h5",
    "keras_rs/keras_adam",
    "keras_rs/sharded",
    "orbax/keras_rs_adam",
    "orbax/tree_zarr3",
    "orbax/stacked_8",
]
"""A golden of each writer and format."""


def random(rows: int, dim: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, rows, dim]).normal(size=(rows, dim)).astype(np.float32)


def assert_holds(checkpoint: Any, tables: Mapping[str, Mapping[str | None, Array]]) -> None:
    """Compare the names, shapes, types and slots, and pieces of each array."""
    listed = checkpoint.tables()
    assert set(listed) == set(tables)
    for name, arrays in tables.items():
        info, (rows, dim) = listed[name], arrays[None].shape
        assert isinstance(info, TableInfo)
        assert (info.name, info.rows, info.dim, info.dtype) == (name, rows, dim, arrays[None].dtype)
        assert set(info.slots) == {slot for slot in arrays if slot is not None}
        for slot, values in arrays.items():
            np.testing.assert_array_equal(checkpoint.read(name, slot=slot), values, err_msg=f"{name}: {slot}")
            for start, stop in ((0, 1), (rows // 3, rows // 2 + 1), (rows - 1, rows), (rows, rows)):
                piece = checkpoint.read(name, start, stop, slot=slot)
                assert piece.dtype == values.dtype
                np.testing.assert_array_equal(piece, values[start:stop], err_msg=f"{name}: {slot}")


@pytest.mark.parametrize("name", GOLDENS)
def test_tables_and_slots_of_every_writer(name: str) -> None:
    golden = read_golden(name)
    with open_checkpoint(golden.path, **golden.options) as checkpoint:
        assert_holds(checkpoint, golden.tables)


def test_goldens_are_read_without_tensorflow() -> None:
    script = """
import json, sys
import tpuembed
for path, options in json.load(sys.stdin):
    with tpuembed.open_checkpoint(path, **options) as checkpoint:
        print(json.dumps({name: float(checkpoint.read(name).astype("float64").sum()) for name in checkpoint.tables()}))
assert not {"tensorflow", "keras"} & sys.modules.keys()
"""
    goldens = [read_golden(name) for name in GOLDENS]
    given = json.dumps([[str(golden.path), dict(golden.options)] for golden in goldens])
    done = subprocess.run([sys.executable, "-c", script], input=given, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for golden, line in zip(goldens, done.stdout.splitlines(), strict=True):
        sums = {table: arrays[None].astype(np.float64).sum() for table, arrays in golden.tables.items()}
        assert json.loads(line) == pytest.approx(sums, rel=1e-6, abs=1e-6)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A trained model with this layer, in the files of TensorFlow and Keras."""
    tables = {"a": TableConfig(90, 3, "video/table.v1"), "b": TableConfig(7, 2, "user", optimizer=Adagrad(0.1))}
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in tables}
    features = {name: FeatureConfig(table) for name, table in tables.items()}
    layer = TPUEmbedding(features, "adam", name="embedding")
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(list(layer(inputs).values()))))
    model.compile("sgd", "mse")
    model.fit({"a": np.arange(7), "b": np.arange(7)}, np.ones((7, 1)), verbose=0)
    folder = tmp_path_factory.mktemp("own")
    tf.train.Checkpoint(model=model).write(str(folder / "ckpt"))
    model.save(folder / "m.keras")
    model.save_weights(folder / "m.weights.h5")
    return layer, folder


@pytest.mark.parametrize("file", ["ckpt", "m.keras", "m.weights.h5"])
def test_files_of_this_layer(own: tuple[Any, Path], file: str) -> None:
    layer, folder = own
    with open_checkpoint(folder / file) as checkpoint:
        found = {name: set(info.slots) for name, info in checkpoint.tables().items()}
        assert found == {"video/table.v1": {"momenta", "velocities"}, "user": {"accumulators"}}
        for table, variable in layer.embedding_tables.items():
            np.testing.assert_array_equal(checkpoint.read(table.name), variable)
        assert (checkpoint.read("user", slot="accumulators") > 0.1).all()  # each row was trained once
        moved = (checkpoint.read("video/table.v1", slot="momenta") != 0).any(1)
        assert np.flatnonzero(moved).tolist() == list(range(7))


def test_plain_variables_are_listed_by_their_path(tmp_path: Path) -> None:
    """Matrices of floats alone. Vectors, integers and counters are no tables."""
    module = tf.Module()
    module.rows, module.bias = tf.Variable(random(5, 3)), tf.Variable([1.0, 2.0])
    module.nested = tf.Module()
    module.nested.half = tf.Variable(tf.cast(random(4, 2), tf.bfloat16))
    module.nested.ids = tf.Variable([[1, 2], [3, 4]])
    path = tf.train.Checkpoint(model=module, step=tf.Variable(7)).write(str(tmp_path / "ckpt"))
    with open_checkpoint(path) as checkpoint:
        half = module.nested.half.numpy()
        assert_holds(checkpoint, {"model/rows": {None: module.rows.numpy()}, "model/nested/half": {None: half}})


def test_tables_of_tensorflows_mid_level_class(tmp_path: Path) -> None:
    tables = {name: E.TableConfig(6, 4, name=name) for name in ("one", "two")}
    features = {name: E.FeatureConfig(table) for name, table in tables.items()}
    engine = E.TPUEmbeddingForServing(features, E.AdagradMomentum(0.1))
    engine.build()
    for number, variable in enumerate(engine.embedding_tables.values()):
        variable.assign(random(6, 4, number))
    path = tf.train.Checkpoint(engine=engine).write(str(tmp_path / "ckpt"))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.tables().keys() == tables.keys()
        for name, table in tables.items():
            assert set(checkpoint.tables()[name].slots) == {"accumulators", "momenta"}
            np.testing.assert_array_equal(checkpoint.read(name), engine.embedding_tables[table])
            np.testing.assert_array_equal(checkpoint.read(name, slot="momenta"), np.zeros((6, 4)))


def test_a_bundle_of_tensorflow_1_has_names_of_variables(tmp_path: Path) -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variables = {
            name: tf.compat.v1.get_variable(name, initializer=random(5, 2, n)) for n, name in enumerate(("emb/a", "b"))
        }
        session.run(tf.compat.v1.global_variables_initializer())
        path = tf.compat.v1.train.Saver().save(session, str(tmp_path / "model.ckpt"))
        truth: dict[str, Any] = {name: {None: session.run(variable)} for name, variable in variables.items()}
    with open_checkpoint(path) as checkpoint:
        assert_holds(checkpoint, truth)


def test_a_directory_stands_for_its_latest(tmp_path: Path) -> None:
    rows = tf.Variable(random(5, 3))
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(t=rows), str(tmp_path), max_to_keep=3)
    for number in range(3):
        rows.assign(random(5, 3, number))
        manager.save()
    places: list[tuple[str | Path, int]] = [
        *((tmp_path, 2), (tmp_path / "ckpt-1", 0), (f"{tmp_path}/ckpt-2", 1), (tmp_path / "ckpt-2.index", 1)),
    ]
    for path, number in places:
        with open_checkpoint(path) as checkpoint:
            np.testing.assert_array_equal(checkpoint.read("t"), random(5, 3, number), err_msg=str(path))


# ---- errors


def test_unknown_tables_and_bad_ranges_are_errors_of_python_too() -> None:
    with open_checkpoint(read_golden("tfrs/adam_lookups").path) as checkpoint:
        for table, slot, words in (
            ("users", None, "'users'; did you mean 'user'"),
            ("user", "accumulators", "'user'.*'accumulators'.*momenta, velocities"),
        ):
            with pytest.raises(KeyError, match=words) as missing:
                checkpoint.read(table, slot=slot)
            assert isinstance(missing.value, TpuEmbedError)
        for start, stop in ((-1, 2), (0, 8), (5, 4), (8, 8)):
            with pytest.raises(IndexError, match=rf"'user'.*\[{start}, {stop}\).* 7") as outside:
                checkpoint.read("user", start, stop)
            assert isinstance(outside.value, TpuEmbedError)


def test_no_table_is_an_error(tmp_path: Path) -> None:
    bundle = tf.train.Checkpoint(bias=tf.Variable([1.0]), ids=tf.Variable([[1]])).write(str(tmp_path / "ckpt"))
    model = keras.Sequential([keras.Input((2,)), keras.layers.Rescaling(2.0)])
    model.save(tmp_path / "m.keras")
    for path in (bundle, tmp_path / "m.keras"):
        with pytest.raises(CheckpointFormatError, match=r"no table|no embedding table"):
            open_checkpoint(path)


def test_paths_without_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("text")
    (tmp_path / "empty").mkdir()
    cases = [(lambda path=tmp_path / name: open_checkpoint(path), name) for name in ("none", "note.txt", "empty")]
    assert_each_is_refused(CheckpointNotFoundError, cases)
    assert_each_is_refused(FileNotFoundError, cases)
    assert_each_is_refused(ConfigError, [(lambda: open_checkpoint(3), "3")])  # type: ignore[arg-type]
    golden = read_golden("tfrs/adam_lookups").path
    assert_each_is_refused(ConfigError, [(lambda: open_checkpoint(golden, nonsense=1), "nonsense")])


def read_all(path: Path) -> None:
    with open_checkpoint(path) as checkpoint:
        for table in checkpoint.tables():
            checkpoint.read(table)


@pytest.mark.parametrize("name", ["tfrs/adam_lookups", "keras_rs/weights_h5", "orbax/tree_files"])
def test_a_file_that_is_cut_is_corrupt(tmp_path: Path, name: str) -> None:
    """Never rows of zeros: the largest file of the checkpoint has lost its second half."""
    golden = read_golden(name)
    shutil.copytree(golden.path.parent, tmp_path / "copy")
    path = tmp_path / "copy" / golden.path.name
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    files = [file for file in files if file.exists()] or list(path.parent.glob(path.name + ".data*"))
    largest = max(files, key=lambda file: file.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    with pytest.raises(CheckpointCorruptError):
        read_all(path)
