"""Whole-model exports with preprocessing layers, whose state is not only weights, and with inputs in any structure."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import capi
from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_saved_model
from tpuembed.errors import CheckpointMismatchError, ConfigError, ExportError, UnknownTableError

pytestmark = pytest.mark.usefixtures("exports_in_this_process")

IDS = np.array([3, 0, 9])
DENSE = np.random.default_rng(0).normal(50.0, 3.0, (3, 2)).astype(np.float32)


def _rows(ids: Any, name: str = "t") -> Any:
    return TPUEmbedding({"item": FeatureConfig(TableConfig(10, 4, name))}, optimizer="adam")({"item": ids})["item"]


def _checkpoint(model: Any, folder: Path) -> str:
    prefix: str = tf.train.Checkpoint(model=model).write(str(folder / "ckpt"))
    return prefix


def _normalized() -> Any:
    inputs = {"item": keras.Input((), dtype="int64", name="item"), "dense": keras.Input((2,), name="dense")}
    scaled = keras.layers.Normalization(name="scaled")(inputs["dense"])
    joined = keras.ops.concatenate([_rows(inputs["item"]), scaled], -1)
    return keras.Model(inputs, keras.layers.Dense(1, name="score")(joined))


def test_normalization_computes_with_the_statistics_of_the_checkpoint(tmp_path: Path) -> None:
    model = _normalized()
    model.get_layer("scaled").adapt(DENSE)
    inputs = {"item": IDS, "dense": DENSE}
    truth = model({name: tf.constant(value) for name, value in inputs.items()}).numpy()
    report = export_saved_model(_checkpoint(model, tmp_path), tmp_path / "m", model=_normalized)
    np.testing.assert_allclose(capi.predict(report.path, inputs)["score"], truth, atol=1e-6)


def _words(vocabulary: list[str] | None) -> Callable[[], Any]:
    def factory() -> Any:
        word = keras.Input((), dtype="string", name="word")
        ids = keras.layers.StringLookup(vocabulary=vocabulary, name="index")(word)
        return keras.Model(word, keras.layers.Dense(1, name="score")(_rows(ids)))

    return factory


def test_the_hash_table_of_a_string_lookup_is_exported(tmp_path: Path) -> None:
    factory = _words(["red", "green"])
    model = factory()
    words = tf.constant(["green", "blue", "red"])
    report = export_saved_model(_checkpoint(model, tmp_path), tmp_path / "m", model=factory)
    found = tf.saved_model.load(str(report.path)).signatures["serving_default"](word=words)["score"]
    np.testing.assert_allclose(found, model(words), atol=1e-6)


def test_a_string_lookup_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    prefix = _checkpoint(_words(["red", "green"])(), tmp_path)
    with refused(ConfigError):
        export_saved_model(prefix, tmp_path / "m", model=_words(None))
    assert not list(tmp_path.glob("m/*"))


def _sequential() -> Any:
    feature = FeatureConfig(TableConfig(10, 4, "t"))
    layers = [TPUEmbedding(feature, optimizer="sgd"), keras.layers.Dense(1, name="score")]
    return keras.Sequential([keras.Input((), dtype="int64", name="item"), *layers])


def test_a_sequential_model_is_exported(tmp_path: Path) -> None:
    model = _sequential()
    report = export_saved_model(_checkpoint(model, tmp_path), tmp_path / "m", model=_sequential)
    np.testing.assert_allclose(capi.predict(report.path, {"item": IDS})["score"], model(IDS), atol=1e-6)


def _nested() -> Any:
    inputs = {"user": {"item": keras.Input((), dtype="int64", name="item")}, "dense": keras.Input((2,), name="dense")}
    joined = keras.ops.concatenate([_rows(inputs["user"]["item"]), inputs["dense"]], -1)
    return keras.Model(inputs, {"out": {"score": keras.layers.Dense(1, name="last")(joined)}})


def test_nested_names_are_joined(tmp_path: Path) -> None:
    model = _nested()
    truth = model({"user": {"item": tf.constant(IDS)}, "dense": tf.constant(DENSE)})["out"]["score"]
    report = export_saved_model(_checkpoint(model, tmp_path), tmp_path / "m", model=_nested)
    found = capi.predict(report.path, {"user/item": IDS, "dense": DENSE})
    np.testing.assert_allclose(found["out/score"], truth, atol=1e-6)


def _unsavable() -> Any:
    factor = tf.Variable(3.0)
    item = keras.Input((), dtype="int64", name="item")
    return keras.Model(item, keras.layers.Lambda(lambda rows: rows * factor)(_rows(item)))


def test_what_tensorflow_cannot_save_is_one_line(tmp_path: Path) -> None:
    with refused(ExportError) as error:
        export_saved_model(_checkpoint(_unsavable(), tmp_path), tmp_path / "m", model=_unsavable)
    assert len(str(error.value).splitlines()) == 1
    assert not list(tmp_path.glob("m/*"))


def test_a_factory_that_exits_is_an_error(tmp_path: Path) -> None:
    def leaves() -> Any:
        raise SystemExit(0)

    with refused(ConfigError):
        export_saved_model(_checkpoint(_sequential(), tmp_path), tmp_path / "m", model=leaves)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"table": "u"}, UnknownTableError),
        ({"tables": {"t": {"dim": 5}}}, CheckpointMismatchError),
        ({"tables": {"t": {"combiner": "sum"}}}, ConfigError),
    ],
)
def test_the_tables_of_a_serving_config_are_held_against_a_model(
    config: dict[str, Any], error: type[Exception], tmp_path: Path
) -> None:
    features = {"item": {"table": config.get("table", "t"), "input": "id"}}
    serving_config = {"features": features, "tables": config.get("tables", {})}
    with refused(error):
        export_saved_model(
            _checkpoint(_sequential(), tmp_path), tmp_path / "m", model=_sequential, serving_config=serving_config
        )


def test_one_name_is_no_list_of_tables(tmp_path: Path) -> None:
    with refused(ConfigError):
        export_saved_model(_checkpoint(_sequential(), tmp_path), tmp_path / "m", tables="t")


def _odd_inputs(shape: tuple[int | None, ...]) -> Callable[[], Any]:
    def factory() -> Any:
        inputs = {
            "item": keras.Input((), dtype="int64", name="item"),
            "known": keras.Input((), dtype="bool", name="known"),
            "odd": keras.Input(shape, dtype="float64", name="odd"),
        }
        odd = keras.ops.sum(keras.ops.cast(inputs["odd"], "float32"), tuple(range(1, 1 + len(shape))))
        known = keras.ops.cast(inputs["known"], "float32")
        return keras.Model(inputs, keras.layers.Dense(1, name="score")(_rows(inputs["item"])) + (odd + known)[:, None])

    return factory


def test_bools_and_doubles_are_parsed_from_examples(tmp_path: Path) -> None:
    factory = _odd_inputs((2,))
    model = factory()
    report = export_saved_model(_checkpoint(model, tmp_path), tmp_path / "m", model=factory)
    feature = {
        "item": tf.train.Feature(int64_list=tf.train.Int64List(value=[3])),
        "known": tf.train.Feature(int64_list=tf.train.Int64List(value=[1])),
        "odd": tf.train.Feature(float_list=tf.train.FloatList(value=[0.5, 2.0])),
    }
    example = tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()
    (found,) = capi.predict(report.path, {"examples": [example]}, "serving_examples").values()
    inputs = {"item": tf.constant([3]), "known": tf.constant([True]), "odd": tf.constant([[0.5, 2.0]], tf.float64)}
    np.testing.assert_allclose(found, model(inputs), atol=1e-6)


def test_an_input_that_an_example_cannot_hold_leaves_that_signature_out(tmp_path: Path) -> None:
    factory = _odd_inputs((None, None))
    with pytest.warns(UserWarning, match="Leaving out the signature serving_examples: .* cannot hold the input 'odd'"):
        report = export_saved_model(_checkpoint(factory(), tmp_path), tmp_path / "m", model=factory)
    assert sorted(tf.saved_model.load(str(report.path)).signatures) == ["from_activations", "serving_default"]


@pytest.mark.filterwarnings("ignore:Skipping nested container:UserWarning")  # Keras finds no weights for the layer
def test_a_factory_may_load_a_keras_file(tmp_path: Path) -> None:
    model = _normalized()
    model.get_layer("scaled").adapt(DENSE)
    model.save(tmp_path / "model.keras")
    inputs = {"item": IDS, "dense": DENSE}
    truth = model({name: tf.constant(value) for name, value in inputs.items()}).numpy()
    prefix = _checkpoint(model, tmp_path)
    report = export_saved_model(prefix, tmp_path / "m", model=lambda: keras.models.load_model(tmp_path / "model.keras"))
    np.testing.assert_allclose(capi.predict(report.path, inputs)["score"], truth, atol=1e-6)
