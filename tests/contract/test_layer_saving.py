"""Checkpoints, `.keras` and weight files of the layer: what comes back, and that training goes on as if it had not stopped."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.goldens import FOLDER, read_golden
from tpuembed import Adagrad, Adam, FeatureConfig, TableConfig, TPUEmbedding
from tpuembed.compat import tfrs
from tpuembed.errors import TpuEmbedError

Array = np.ndarray[Any, Any]
E = tf.tpu.experimental.embedding

IDS = {"fav": np.array([1, 8, 1, 5]), "user": np.array([0, 4, 4, 2])}
LABELS = np.array([[1.0], [0.0], [1.0], [0.5]], np.float32)


def features(rows: int = 9) -> dict[str, FeatureConfig]:
    videos = TableConfig(rows, 4, "videos/v.1", combiner="sum", initializer="glorot_uniform")
    return {
        "fav": FeatureConfig(videos),
        "user": FeatureConfig(TableConfig(5, 2, "users", optimizer=Adagrad(0.5))),
    }


def model_of(optimizer: Any = None, config: Any = None) -> Any:
    """A new model. A schedule drives its rate, so that a restored count of steps shows."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.5)
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in IDS}
    layer = TPUEmbedding(config or features(), optimizer or Adam(schedule), name="embedding")
    rows = layer(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1, name="score")(keras.layers.Concatenate()(list(rows.values()))))
    model.compile("sgd", "mse")
    return model


def fit(model: Any, epochs: int) -> None:
    model.fit(IDS, LABELS, batch_size=2, epochs=epochs, shuffle=False, verbose=0)


def tables_of(model: Any) -> dict[str, Array]:
    layer = model.get_layer("embedding")
    return {config.name: variable.numpy() for config, variable in layer.embedding_tables.items()}


def assert_same_tables(found: Any, truth: Any) -> None:
    for name, rows in tables_of(truth).items():
        np.testing.assert_array_equal(tables_of(found)[name], rows, err_msg=name)


def by_checkpoint(model: Any, path: Path) -> Any:
    prefix = tf.train.Checkpoint(model=model).write(str(path / "ckpt"))
    new = model_of()
    tf.train.Checkpoint(model=new).read(prefix).assert_existing_objects_matched()
    return new


def by_weights(model: Any, path: Path) -> Any:
    model.save_weights(path / "m.weights.h5")
    new = model_of()
    new.load_weights(path / "m.weights.h5")
    return new


def by_restore_tables(model: Any, path: Path) -> Any:
    prefix = tf.train.Checkpoint(model=model).write(str(path / "ckpt"))
    new = model_of()
    new.get_layer("score").set_weights(model.get_layer("score").get_weights())
    new.get_layer("embedding").restore_tables(prefix)
    return new


WAYS: dict[str, Callable[[Any, Path], Any]] = {
    "tf.train.Checkpoint": by_checkpoint,
    "weights.h5": by_weights,
    "restore_tables": by_restore_tables,
}


@pytest.fixture(scope="module")
def trained() -> Any:
    model = model_of()
    fit(model, 3)
    return model


@pytest.mark.parametrize("way", WAYS)
def test_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path, way: str) -> None:
    """Slots, and the count of steps that the schedule is evaluated at, come back with the tables."""
    whole = model_of()
    fit(whole, 2)
    resumed = WAYS[way](whole, tmp_path)
    assert_same_tables(resumed, whole)
    for model in (whole, resumed):
        fit(model, 2)
    for name, rows in tables_of(whole).items():
        np.testing.assert_allclose(tables_of(resumed)[name], rows, rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_keras_file_has_the_whole_model(tmp_path: Path) -> None:
    model = model_of("adagrad")
    fit(model, 2)
    model.save(tmp_path / "m.keras")
    again = keras.models.load_model(tmp_path / "m.keras")
    assert_same_tables(again, model)
    np.testing.assert_array_equal(again.predict(IDS, verbose=0), model.predict(IDS, verbose=0))
    for one in (model, again):
        fit(one, 2)
    for name, rows in tables_of(model).items():
        np.testing.assert_allclose(tables_of(again)[name], rows, rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_checkpoint_that_is_restored_before_the_first_call(tmp_path: Path, trained: Any) -> None:
    prefix = tf.train.Checkpoint(layer=trained.get_layer("embedding")).write(str(tmp_path / "ckpt"))

    class Subclassed(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = TPUEmbedding(features(), "adam")

        def call(self, ids: Any) -> Any:
            return self.embedding(ids)["fav"]

    model = Subclassed()
    tf.train.Checkpoint(layer=model.embedding).read(prefix).assert_existing_objects_matched()
    np.testing.assert_array_equal(model(IDS), tables_of(trained)["videos/v.1"][IDS["fav"]])


def test_tensorflow_reads_the_tables_of_a_checkpoint(tmp_path: Path, trained: Any) -> None:
    prefix = tf.train.Checkpoint(model=trained).write(str(tmp_path / "ckpt"))
    reader = tf.train.load_checkpoint(prefix)
    shapes = reader.get_variable_to_shape_map()
    for name, rows in tables_of(trained).items():
        candidates = [key for key, shape in shapes.items() if shape == list(rows.shape)]
        assert any(np.array_equal(reader.get_tensor(key), rows) for key in candidates), name


def test_a_saved_model_of_a_trained_model_answers(tmp_path: Path, trained: Any) -> None:
    trained.export(tmp_path / "exported", verbose=False)
    loaded = tf.saved_model.load(str(tmp_path / "exported"))
    found = loaded.serve({name: tf.constant(ids) for name, ids in IDS.items()})
    np.testing.assert_allclose(found, trained.predict(IDS, verbose=0), atol=1e-6)


def test_a_config_survives_json() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 10, 0.9)
    ours_and_others = (Adam(epsilon=1e-3), keras.optimizers.Adagrad(0.125), E.FTRL(0.3, beta=0.5))
    for optimizer in ("sgd", *ours_and_others, keras.optimizers.SGD(schedule), None):
        config = {"nested": [features()["fav"]], "user": features()["user"]}
        layer = TPUEmbedding(config, optimizer, track_rows=optimizer is not None)
        again = TPUEmbedding.from_config(json.loads(json.dumps(layer.get_config())))
        assert again.get_config() == layer.get_config()
        shapes = {table.name: tuple(variable.shape) for table, variable in again.embedding_tables.items()}
        assert shapes == {"videos/v.1": (9, 4), "users": (5, 2)}


@pytest.mark.filterwarnings("ignore:Skipping nested container:UserWarning")  # Keras, when a load fails
@pytest.mark.parametrize(
    ("other", "word"),
    [(lambda: model_of("sgd"), "momenta"), (lambda: model_of(config=features(10)), r"\(9, 4\).*\(10, 4\)")],
    ids=["another optimizer", "another size"],
)
def test_weights_of_another_layer_are_refused(tmp_path: Path, trained: Any, other: Any, word: str) -> None:
    trained.save_weights(tmp_path / "m.weights.h5")
    with pytest.raises((TpuEmbedError, ValueError), match=word):
        other().load_weights(tmp_path / "m.weights.h5")


class Subclassed(keras.Model):
    def __init__(self, layer: str, table: str, optimizer: str) -> None:
        super().__init__()
        config = FeatureConfig(TableConfig(9, 4, table))
        if layer == "partial":
            self.rows: Any = tfrs.PartialTPUEmbedding({"ids": config}, optimizer, size_threshold=3, name="embedding")
        else:
            self.rows = TPUEmbedding({"ids": config}, optimizer, name="embedding")
        self.score = keras.layers.Dense(1)

    def call(self, ids: Any) -> Any:
        return self.score(self.rows({"ids": ids})["ids"])

    def get_config(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("layer", ["whole", "partial"])
@pytest.mark.parametrize("file", ["weights.h5", "keras"])
@pytest.mark.parametrize("other", [("users", "sgd"), ("people", "adam")])
def test_weights_of_another_layer_of_a_subclassed_model(
    tmp_path: Path, layer: str, file: str, other: tuple[str, str]
) -> None:
    """Keras looks for them at two places of the file."""
    models = [Subclassed(layer, *each) for each in (("users", "adam"), other, ("users", "adam"))]
    for model in models:
        model(IDS["user"])
    path = tmp_path / f"model.{file}"
    models[0].save_weights(path) if file == "weights.h5" else models[0].save(path)
    elsewhere = keras.Sequential([keras.Input(()), models[0]])  # its layers are at no place of the model's
    elsewhere.save_weights(tmp_path / "elsewhere.weights.h5")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"the file holds .*users.*The layer has"):
            models[1].load_weights(path)
        with pytest.raises(ValueError, match="the file has no tables at its place"):
            models[1].load_weights(tmp_path / "elsewhere.weights.h5")
    models[2].load_weights(path)
    np.testing.assert_array_equal(models[2](IDS["user"]), models[0](IDS["user"]))


@pytest.mark.filterwarnings("ignore:a TableConfig without a name")
def test_a_checkpoint_of_tensorflow_recommenders_restores_and_looks_up() -> None:
    """Its own layer wrote the checkpoint and the activations, with the weights of ids and without."""
    golden = read_golden("tfrs/adam_lookups")
    video = E.TableConfig(11, 4, name="video/table.v1", combiner="mean")
    user, unnamed = E.TableConfig(7, 3, name="user", combiner="sqrtn"), E.TableConfig(5, 2, combiner="sum")
    tables = {"fav": video, "friends": user, "tags": unnamed, "watched": video}
    layer = TPUEmbedding({name: E.FeatureConfig(table) for name, table in tables.items()}, E.Adam(0.1))
    tf.train.Checkpoint(layer=layer).read(str(golden.path)).assert_existing_objects_matched()
    folder = FOLDER / "tfrs" / "adam_lookups"
    lookups = json.loads((folder / "truth.json").read_text())["lookups"]
    ids = {name: tf.ragged.constant(one["ids"], tf.int32) for name, one in lookups.items()}
    weights = {
        name: None if one["weights"] is None else tf.ragged.constant(one["weights"], tf.float32)
        for name, one in lookups.items()
    }
    for given, truth in ((None, "activations"), (weights, "weighted_activations")):
        found = layer(ids, given)
        for name, one in lookups.items():
            np.testing.assert_allclose(found[name], np.load(folder / one[truth]), atol=1e-6, err_msg=name)
