"""Warm-up records: read with TensorFlow Serving's own protos, and answered by the export that they lie in."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow_serving.apis import prediction_log_pb2

from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_saved_model
from tpuembed.manifest import Manifest

pytestmark = pytest.mark.usefixtures("exports_in_this_process")

WARMUP = "assets.extra/tf_serving_warmup_requests"
ROWS = 40


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    layer = TPUEmbedding({"t": FeatureConfig(TableConfig(ROWS, 4, "t"))}, optimizer="sgd")
    (table,) = layer.embedding_tables.values()
    table.assign(np.arange(1, ROWS + 1, dtype=np.float32)[:, None] * np.ones(4, np.float32))
    return str(tf.train.Checkpoint(layer=layer).write(str(tmp_path_factory.mktemp("ckpt") / "ckpt")))


def _requests(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """(signature, inputs) of every record."""
    logs = [prediction_log_pb2.PredictionLog.FromString(r.numpy()) for r in tf.data.TFRecordDataset(str(path / WARMUP))]
    requests = [log.predict_log.request for log in logs]
    return [(r.model_spec.signature_name, {k: tf.make_ndarray(v) for k, v in r.inputs.items()}) for r in requests]


FEATURES = {
    "one": {"table": "t", "input": "id"},
    "list": {"table": "t", "combiner": "sum"},
    "history": {"table": "t", "max_sequence_length": 3},
}


@pytest.mark.nightly
@pytest.mark.parametrize("rows", [None, {"t": (7, 20)}])
def test_lookups_are_warmed_up_with_rows_of_their_tables(checkpoint: str, tmp_path: Path, rows: Any) -> None:
    path = export_saved_model(checkpoint, tmp_path / "m", serving_config={"features": FEATURES}, rows=rows).path
    first = 1.0 if rows is None else 8.0
    requests = _requests(path)
    signatures = ("serving_default", "serving_examples", "packed")
    assert [name for name, _ in requests] == [*signatures, *signatures]
    loaded = tf.saved_model.load(str(path)).signatures
    for (name, inputs), batch in zip(requests, [1, 1, 1, 32, 32, 32], strict=True):
        found = loaded[name](**{key: tf.constant(value) for key, value in inputs.items()})
        if name == "packed":
            assert found["activations"].shape == (batch, 4 + 4 + 12)
            continue
        np.testing.assert_array_equal(found["one"], np.full((batch, 4), first))
        # Both paths of lists: the one that is full, and the one with padding.
        np.testing.assert_array_equal(found["list"], np.full((batch, 4), first * (2 if batch == 1 else 1)))
    manifest = Manifest.read(path)
    assert manifest is not None
    assert manifest.files[WARMUP].size == (path / WARMUP).stat().st_size < 20_000


def _inputs() -> dict[str, Any]:
    return {
        "ids": keras.Input((None,), dtype="int64", ragged=True, name="ids"),
        "price": keras.Input((2,), name="price"),
        "city": keras.Input((), dtype="string", name="city"),
    }


def _model(oov: int) -> Any:
    inputs = _inputs()
    layer = TPUEmbedding({"ids": FeatureConfig(TableConfig(ROWS, 4, "t"))}, optimizer="sgd")
    city = keras.layers.StringLookup(vocabulary=["a", "b"], num_oov_indices=oov)(inputs["city"])
    found = layer({"ids": inputs["ids"]})["ids"]
    parts = [found, inputs["price"], keras.ops.cast(keras.ops.expand_dims(city, -1), "float32")]
    return keras.Model(inputs, {"out": keras.layers.Concatenate()(parts)})


@pytest.mark.nightly
def test_models_are_warmed_up_with_zeros(checkpoint: str, tmp_path: Path) -> None:
    path = export_saved_model(checkpoint, tmp_path / "m", model=lambda: _model(1)).path
    requests = _requests(path)
    assert [name for name, _ in requests] == ["serving_default", "serving_examples", "from_activations"] * 2
    loaded = tf.saved_model.load(str(path)).signatures
    for (name, inputs), batch in zip(requests, [1, 1, 1, 32, 32, 32], strict=True):
        found = loaded[name](**{key: tf.constant(value) for key, value in inputs.items()})["out"]
        row = 0.0 if name == "from_activations" else 1.0  # an activation, or row 0
        np.testing.assert_array_equal(found, np.tile([row] * 4 + [0.0] * 3, (batch, 1)))


@pytest.mark.nightly
@pytest.mark.parametrize("form", ["sparse", "ragged"])
def test_lists_of_a_known_width_are_warmed_up_in_it(checkpoint: str, tmp_path: Path, form: str) -> None:
    def build() -> Any:
        ids = keras.Input((3,), dtype="int64", name="ids", **{form: True})
        table = TableConfig(ROWS, 4, "t", combiner="sum")
        return keras.Model({"ids": ids}, TPUEmbedding({"ids": FeatureConfig(table)}, optimizer="sgd")({"ids": ids}))

    path = export_saved_model(checkpoint, tmp_path / "m", model=build).path
    loaded = tf.saved_model.load(str(path)).signatures
    for (name, inputs), batch in zip(_requests(path), [1, 1, 1, 1, 32, 32, 32, 32], strict=True):
        (found,) = loaded[name](**{key: tf.constant(value) for key, value in inputs.items()}).values()
        expected = 0.0 if name == "from_activations" else 3.0 if batch == 1 else 2.0
        np.testing.assert_array_equal(found, np.full((batch, 4), expected))


def test_a_model_that_fails_for_zeros_has_no_records(checkpoint: str, tmp_path: Path) -> None:
    """One failing record would keep the whole version from being served."""
    with pytest.warns(UserWarning, match="no requests to warm up: the model fails for zeros"):
        path = export_saved_model(checkpoint, tmp_path / "m", model=lambda: _model(0)).path
    assert not (path / WARMUP).exists()
