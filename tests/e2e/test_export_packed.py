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


def _outputs(packing: Packing, activations: Array) -> dict[str, Array]:
    assert packing.outputs is not None
    assert activations.shape[1] == packing.outputs[-1].stop
    return {found.name: activations[:, found.start : found.stop].reshape(-1, *found.shape) for found in packing.outputs}


def _truth(rows: Array, ids: Array, combiner: str) -> Array:
    """float64 sums over the ids of each example that are not -1."""
    total = np.where((ids >= 0)[..., None], rows.astype(np.float64)[ids], 0.0).sum(1)
    count = np.maximum((ids >= 0).sum(1, keepdims=True), 1)
    divided: Array = total / {"sum": 1, "mean": count, "sqrtn": np.sqrt(count)}[combiner]
    return divided


FEATURES: dict[str, Any] = {
    "list a": {"table": "a", "combiner": "sum"},
    "one b": {"table": "b", "input": "id"},
    "list b": {"table": "b", "combiner": "mean"},
    "one c": {"table": "c", "input": "id"},
    "one a": {"table": "a", "input": "id"},
    "history": {"table": "a", "max_sequence_length": 2},
    "again b": {"table": "b", "combiner": "mean"},
    "list c": {"table": "c", "combiner": "sqrtn"},
}
NAMES = {name: name.replace(" ", "/") for name in FEATURES}


@pytest.fixture(scope="module")
def every_kind(exports_in_this_process: None, checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of all FEATURES."""
    features = {NAMES[name]: spec for name, spec in FEATURES.items()}
    return _export(checkpoint, tmp_path_factory.mktemp("every_kind"), features)


@pytest.mark.nightly
@pytest.mark.parametrize("padding", ["full", "padded", "empty"])
def test_every_kind_of_feature_in_one_matrix(checkpoint: Any, every_kind: Path, padding: str) -> None:
    path, packing = every_kind, _packing(every_kind)
    assert [packed.columns for packed in packing.inputs] == [1, 1, 1, None, None, None, None, None]
    rng = np.random.default_rng(0)
    inputs = {}
    for name, spec in FEATURES.items():
        ids = rng.integers(0, SIZES[spec["table"]][0], 5 if "input" in spec else (5, 3))
        if "input" not in spec and padding != "full":
            ids[rng.random(ids.shape) < (0.5 if padding == "padded" else 2)] = -1
        inputs[NAMES[name]] = ids
    matrix = _pack(packing, inputs)
    found = _outputs(packing, capi.predict(path, {"ids": matrix}, "packed")["activations"])
    assert list(found) == [packed.name for packed in packing.inputs]
    for name, spec in FEATURES.items():
        rows, ids = checkpoint[1][spec["table"]], inputs[NAMES[name]]
        if "input" in spec:
            np.testing.assert_array_equal(found[NAMES[name]], rows[ids])
        elif "combiner" in spec:
            np.testing.assert_allclose(found[NAMES[name]], _truth(rows, ids, spec["combiner"]), atol=1e-6)
        else:
            np.testing.assert_array_equal(
                found[NAMES[name]], np.where(ids[:, :2, None] >= 0, rows[ids[:, :2]], np.float32(0))
            )
    loaded = tf.saved_model.load(str(path)).signatures["packed"](ids=tf.constant(matrix))
    np.testing.assert_array_equal(loaded["activations"], np.concatenate([v.reshape(5, -1) for v in found.values()], 1))


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


@pytest.mark.nightly
def test_a_width_that_the_lists_cannot_share_fails(checkpoint: Any, tmp_path: Path) -> None:
    path = _export(checkpoint, tmp_path, {"x": {"table": "a"}, "y": {"table": "b"}})
    signature = tf.saved_model.load(str(path)).signatures["packed"]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"[Rr]eshape"):
        signature(ids=np.zeros((4, 5), np.int64))
    assert signature(ids=np.zeros((0, 4), np.int64))["activations"].shape == (0, 8)
    np.testing.assert_array_equal(signature(ids=np.zeros((2, 0), np.int64))["activations"], np.zeros((2, 8)))


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


def test_a_model_takes_its_inputs_by_name(checkpoint: Any, tmp_path: Path) -> None:
    def model() -> Any:
        layer = TPUEmbedding({"x": FeatureConfig(TableConfig(*SIZES["a"], "a"))}, optimizer="sgd")
        inputs = {"x": keras.Input((), dtype="int64", name="x"), "price": keras.Input((3,), name="price")}
        return keras.Model(inputs, keras.ops.concatenate([layer({"x": inputs["x"]})["x"], inputs["price"]], -1))

    path = export_saved_model(checkpoint[0], tmp_path / "m", model=model).path
    assert _packing(path).left_out == "a model takes its inputs by name"


def _sums() -> Any:
    """Sums of a ragged input, and of a sparse one that the model itself turns around."""
    config = {name: FeatureConfig(TableConfig(*SIZES[name], name, combiner="sum")) for name in "ab"}
    layer = TPUEmbedding(config, optimizer="sgd")
    inputs = {"a": keras.Input((None,), dtype="int64", ragged=True, name="a"), "b": _sparse_input("b")}
    return keras.Model(inputs, layer({"a": inputs["a"], "b": _TurnedAround()(inputs["b"])}))


def _sparse_input(name: str) -> Any:
    return keras.Input((None,), dtype="int64", sparse=True, name=name)


class _TurnedAround(keras.layers.Layer):  # type: ignore[misc, unused-ignore]
    """The same sparse tensor, its last entry first."""

    def call(self, ids: Any) -> Any:
        return tf.SparseTensor(ids.indices[::-1], ids.values[::-1], ids.dense_shape)

    def compute_output_spec(self, ids: Any) -> Any:
        return keras.KerasTensor(ids.shape, "int64", sparse=True)


@pytest.mark.nightly
def test_lists_of_a_model_are_added_up_in_any_order(checkpoint: Any, tmp_path: Path) -> None:
    path = export_saved_model(checkpoint[0], tmp_path / "m", model=_sums).path
    signature = tf.saved_model.load(str(path)).signatures["serving_default"]
    ids = np.array([[3, -1, 4], [-1, -1, -1], [5, 6, 7], [-1, -1, -1]])
    found = signature(a=tf.constant(ids), b=tf.constant(ids))
    for name in "ab":
        np.testing.assert_allclose(found[name], _truth(checkpoint[1][name], ids, "sum"), atol=1e-6)
