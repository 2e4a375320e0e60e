"""The signature `packed`: one matrix of ids, against the rows themselves, through the C API and Python."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

from tests.support import capi
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_saved_model
from tpuembed.manifest import Manifest, Packing

pytestmark = pytest.mark.usefixtures("exports_in_this_process")

Array = npt.NDArray[Any]
SIZES = {"a": (40, 4), "b": (30, 4), "c": (500, 16)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Array]]:
    """A checkpoint of two tables of one width, which share a stack, and one of another; and the tables' rows."""
    tables = [TableConfig(*size, name) for name, size in SIZES.items()]
    layer = TPUEmbedding({table.name: FeatureConfig(table) for table in tables}, optimizer="sgd")
    rows = {table.name: variable.numpy() for table, variable in layer.embedding_tables.items()}
    return tf.train.Checkpoint(layer=layer).write(str(tmp_path_factory.mktemp("ckpt") / "ckpt")), rows


def _export(checkpoint: tuple[str, Any], folder: Path, features: Mapping[str, Any], **options: Any) -> Path:
    return export_saved_model(checkpoint[0], folder / "m", serving_config={"features": features}, **options).path


def _packing(path: Path) -> Packing:
    manifest = Manifest.read(path)
    assert manifest is not None
    return manifest.packing


def _pack(packing: Packing, inputs: Mapping[str, Array]) -> Array:
    """The matrix, by what the manifest says alone."""
    return np.concatenate([inputs[packed.name].reshape(len(inputs[packed.name]), -1) for packed in packing.inputs], 1)


def _truth(rows: Array, ids: Array, combiner: str) -> Array:
    """float64 sums over the ids of each example that are not -1."""
    total = np.where((ids >= 0)[..., None], rows.astype(np.float64)[ids], 0.0).sum(1)
    count = np.maximum((ids >= 0).sum(1, keepdims=True), 1)
    divided: Array = total / {"sum": 1, "mean": count, "sqrtn": np.sqrt(count)}[combiner]
    return divided


@pytest.mark.parametrize("form", ["id", "ids"])
@pytest.mark.sampled(1)
def test_an_id_outside_its_table_fails_by_the_tables_name(checkpoint: Any, tmp_path: Path, form: str) -> None:
    path = _export(checkpoint, tmp_path, {"x": {"table": "a", "input": form}, "y": {"table": "b", "input": form}})
    signatures = tf.saved_model.load(str(path)).signatures
    for bad in (30, -2, 2**40, -(2**63), 2**63 - 1, *([-1] if form == "id" else [])):
        inputs = {"x": np.array([1, 2]), "y": np.array([3, bad])}
        if form == "ids":
            inputs = {name: ids[:, None] for name, ids in inputs.items()}
        message = (
            f"feature y: id {bad} of row 1 is not in table b, which has 30 rows; correct the id or set out_of_vocab"
        )
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            signatures["packed"](ids=tf.constant(_pack(_packing(path), inputs)))
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            signatures["serving_default"](**{name: tf.constant(ids) for name, ids in inputs.items()})


def test_padding_takes_nothing_from_a_row_of_nan(tmp_path: Path) -> None:
    table = tf.Variable([[np.nan, np.inf], [1.0, 2.0]], name="t")
    prefix = tf.train.Checkpoint(t=table).write(str(tmp_path / "ckpt"))
    features = {name: {"table": "t", "combiner": "mean"} for name in "xy"}
    path = _export((prefix, None), tmp_path, features)
    signatures = tf.saved_model.load(str(path)).signatures
    ids = np.array([[1, -1], [-1, -1], [1, 1]])
    truth = np.array([[1.0, 2.0], [0.0, 0.0], [1.0, 2.0]])
    named = signatures["serving_default"](x=tf.constant(ids), y=tf.constant(ids))
    np.testing.assert_array_equal(named["x"], truth)
    packed = signatures["packed"](ids=tf.constant(np.concatenate([ids, ids], 1)))
    np.testing.assert_array_equal(packed["activations"], np.concatenate([truth, truth], 1))


def test_weights_are_no_integers(checkpoint: Any, tmp_path: Path) -> None:
    path = _export(checkpoint, tmp_path, {"x": {"table": "a", "weighted": True}})
    assert _packing(path).left_out == "feature 'x' has weights, which are not integers"
    assert "packed" not in tf.saved_model.load(str(path)).signatures


def test_the_manifest_names_the_features(checkpoint: Any, tmp_path: Path) -> None:
    path = _export(
        checkpoint, tmp_path, {"x": {"table": "a", "input": "id", "out_of_vocabulary": 3}, "y": {"table": "c"}}
    )
    manifest = Manifest.read(path)
    assert manifest is not None
    assert [(entry.name, entry.table, entry.input, entry.out_of_vocabulary) for entry in manifest.features] == [
        ("x", "a", "id", 3),
        ("y", "c", "ids", "error"),
    ]
    assert manifest.signatures["packed"]["inputs"]["ids"].shape == (None, None)
    assert manifest.signatures["packed"]["outputs"]["activations"].shape == (None, 20)


def _model() -> Any:
    """Looks up a dense, a two-column, a ragged and a sparse input."""
    inputs = {
        "ragged": keras.Input((None,), dtype="int64", ragged=True, name="ragged"),
        "one": keras.Input((), dtype="int32", name="one"),
        "two": keras.Input((2,), dtype="int64", name="two"),
        "sparse": keras.Input((None,), dtype="int64", sparse=True, name="sparse"),
    }
    a, b = TableConfig(*SIZES["a"], "a"), TableConfig(*SIZES["b"], "b")
    config = {"ragged": a, "one": b, "two": b, "sparse": a}
    layer = TPUEmbedding({name: FeatureConfig(table) for name, table in config.items()}, optimizer="sgd")
    found = layer(inputs)
    outputs = {name: keras.layers.Identity(name=f"{name}_out")(value) for name, value in found.items()}
    return keras.Model(inputs, outputs)


@pytest.mark.nightly
def test_a_models_integer_inputs_are_packed(checkpoint: Any, tmp_path: Path) -> None:
    path = export_saved_model(checkpoint[0], tmp_path / "m", model=_model).path
    packing = _packing(path)
    assert {packed.name: packed.columns for packed in packing.inputs} == {
        "one": 1,
        "two": 2,
        "ragged": None,
        "sparse": None,
    }
    inputs = {
        "one": np.array([4, 29], np.int32),
        "two": np.array([[1, 2], [3, 4]]),
        "ragged": np.array([[5, 6, -1], [-1, -1, -1]]),
        "sparse": np.array([[39, -1, -1], [0, 1, 2]]),
    }
    matrix = _pack(packing, {name: ids.astype(np.int64) for name, ids in inputs.items()})
    found = capi.predict(path, {"ids": matrix}, "packed")
    rows = checkpoint[1]
    np.testing.assert_array_equal(found["one"], rows["b"][inputs["one"]])
    np.testing.assert_array_equal(found["two"], rows["b"][inputs["two"]])
    np.testing.assert_allclose(found["ragged"], _truth(rows["a"], inputs["ragged"], "mean"), atol=1e-6)
    np.testing.assert_allclose(found["sparse"], _truth(rows["a"], inputs["sparse"], "mean"), atol=1e-6)
    matrix[0, [packed.name for packed in packing.inputs].index("one")] += 2**32
    with pytest.raises(capi.TensorFlowError, match="Input one must be int32, got values from"):
        capi.predict(path, {"ids": matrix}, "packed")


def test_floats_of_a_model_are_no_integers(checkpoint: Any, tmp_path: Path) -> None:
    def model() -> Any:
        layer = TPUEmbedding({"x": FeatureConfig(TableConfig(*SIZES["a"], "a"))}, optimizer="sgd")
        inputs = {"x": keras.Input((), dtype="int64", name="x"), "price": keras.Input((3,), name="price")}
        return keras.Model(inputs, keras.ops.concatenate([layer({"x": inputs["x"]})["x"], inputs["price"]], -1))

    path = export_saved_model(checkpoint[0], tmp_path / "m", model=model).path
    assert _packing(path).left_out == "input 'price', float32 (None, 3), is not a fixed number of integers"
