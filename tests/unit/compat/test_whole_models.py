"""Models around layers that hold `TPUEmbedding` layers, exported whole from what Keras and TensorFlow save of them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_saved_model
from tpuembed.compat import keras_rs, tfrs

pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'warn' function is deprecated:DeprecationWarning"),
]  # TensorFlow's logging

ROWS = {"user": 30, "video": 70}
FILES = ("m.keras", "w.weights.h5", "w.weights.json", "ckpt")


def keras_rs_layer(name: str | None) -> Any:
    tables = {key: keras_rs.TableConfig(f"{key}s", rows, 4, optimizer="adagrad") for key, rows in ROWS.items()}
    features = {key: keras_rs.FeatureConfig(key, table, (None,), (None, 4)) for key, table in tables.items()}
    return keras_rs.DistributedEmbedding(features, name=name)


def partial_layer(name: str | None, threshold: int | None = 50) -> Any:
    features = {key: FeatureConfig(TableConfig(rows, 4, f"{key}s")) for key, rows in ROWS.items()}
    return tfrs.PartialTPUEmbedding(features, keras.optimizers.Adagrad(0.1), size_threshold=threshold, name=name)


MAKERS: dict[str, Callable[[str | None], Any]] = {
    "keras_rs": keras_rs_layer,
    "partial": partial_layer,
    "all large": lambda name: partial_layer(name, 0),
    "all small": lambda name: partial_layer(name, None),
}


def inputs() -> dict[str, Any]:
    return {name: keras.Input((), dtype="int64", name=name) for name in ROWS}


def tower(layer: Any, given: dict[str, Any], name: str | None) -> Any:
    rows = layer(given)
    hidden = keras.layers.Dense(4, activation="tanh")(keras.ops.concatenate([rows[key] for key in ROWS], 1))
    return keras.layers.Dense(2, name=name)(hidden)


def functional(layer: Any, name: str | None) -> Any:
    given = inputs()
    return keras.Model(given, tower(layer, given, name))


def nested(layer: Any, name: str | None) -> Any:
    """The layer is inside a model inside the model, beside a `TPUEmbedding` of its own table."""
    given = inputs()
    inner = keras.Model(given, tower(layer, given, None))
    outer = {**inputs(), "tag": keras.Input((), dtype="int64", name="tag")}
    tags = TPUEmbedding({"tag": FeatureConfig(TableConfig(9, 4, "tags"))}, optimizer="sgd")({"tag": outer["tag"]})
    both = keras.ops.concatenate([inner({key: outer[key] for key in ROWS}), tags["tag"]], 1)
    return keras.Model(outer, keras.layers.Dense(1, name=name)(both))


class Subclassed(keras.Model):
    """Has a weight of its own beside the layer, and a list of layers."""

    def __init__(self, layer: Any, name: str | None) -> None:
        super().__init__()
        self.lookup = layer
        self.scale = self.add_weight(shape=(4,), initializer="ones", name="scale")
        self.hidden = [keras.layers.Dense(4), keras.layers.Dense(2, name=name)]

    def call(self, ids: Any) -> Any:
        rows = self.lookup(ids)
        return self.hidden[1](self.hidden[0](rows["user"] * self.scale + rows["video"]))


def trained(model: Any) -> tuple[dict[str, Any], Any]:
    """Train a model; a batch of ids and what it predicts for them."""
    random = np.random.default_rng(3)
    rows = {**ROWS, **({"tag": 9} if getattr(model, "inputs", None) and len(model.inputs) == 3 else {})}
    ids = {name: random.integers(0, count, 64) for name, count in rows.items()}
    model.compile(keras.optimizers.Adam(0.1), "mse")
    model.fit(ids, random.normal(size=(64, 1)), epochs=2, batch_size=16, verbose=0)
    return ids, model.predict(ids, verbose=0)


def save(model: Any, folder: Path, file: str) -> Path:
    path = folder / file
    if file == "ckpt":
        tf.train.Checkpoint(model=model).write(str(path))
    elif file == "m.keras":
        model.save(path)
    elif file == "w.weights.json":
        model.save_weights(path, max_shard_size=1500 / 2**30)
    else:
        model.save_weights(path)
    return path


def exported(path: Path, folder: Path, build: Callable[[], Any], ids: dict[str, Any]) -> Any:
    keras.backend.clear_session()
    report = export_saved_model(path, folder, model=build, workers=1)
    served = tf.saved_model.load(str(report.path)).signatures["serving_default"]
    (found,) = served(**{name: tf.constant(values, tf.int64) for name, values in ids.items()}).values()
    return found


def compare(folder: Path, make: str, around: Any, is_named: bool, files: Sequence[str]) -> None:
    """Export a trained model from each of `files`, and compare what it answers."""
    layer, head = ("emb", "score") if is_named else (None, None)
    keras.backend.clear_session()
    model = around(MAKERS[make](layer), head)
    ids, truth = trained(model)
    for file in files:
        path = save(model, folder, file)
        found = exported(path, folder / f"of_{file}", lambda: around(MAKERS[make](layer), head), ids)
        np.testing.assert_allclose(found, truth, atol=1e-5, err_msg=file)


@pytest.mark.nightly
@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("around", [functional, nested])
@pytest.mark.parametrize("make", MAKERS)
def test_every_file_gives_the_trained_models_numbers(tmp_path: Path, make: str, around: Any, is_named: bool) -> None:
    compare(tmp_path, make, around, is_named, FILES)


@pytest.mark.nightly
@pytest.mark.parametrize(("make", "file"), [("keras_rs", "w.weights.h5"), ("partial", "w.weights.json")])
def test_a_model_with_a_weight_of_its_own_beside_the_layer(tmp_path: Path, make: str, file: str) -> None:
    keras.backend.clear_session()
    model = Subclassed(MAKERS[make](None), None)
    ids, truth = trained(model)
    specs = {name: tf.TensorSpec([None], tf.int64, name) for name in ROWS}
    path = save(model, tmp_path, file)
    found = exported(path, tmp_path / "out", lambda: (Subclassed(MAKERS[make](None), None), specs), ids)
    np.testing.assert_allclose(found, truth, atol=1e-5)
