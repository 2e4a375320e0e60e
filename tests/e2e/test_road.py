"""The whole road: what the trained model computes is what an export computes, however it is loaded."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

from tests.support import capi
from tests.support.serving.process import ServerProcess
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_saved_model

ROWS = 1000


def _model() -> Any:
    """Three tables of two widths, one of them shared; dense, multi-hot and float inputs; BatchNormalization."""
    users = TableConfig(50, 8, "users/all")
    items = TableConfig(70, 8, "items", combiner="sqrtn")
    tags = TableConfig(30, 4, "tags", combiner="mean")
    inputs = {
        "user": keras.Input((), dtype="int64", name="user"),
        "watched": keras.Input((None,), dtype="int64", ragged=True, name="watched"),
        "item": keras.Input((), dtype="int32", name="item"),
        "tags": keras.Input((None,), dtype="int64", sparse=True, name="tags"),
        "age": keras.Input((2,), dtype="float32", name="age"),
    }
    features = {
        "user": FeatureConfig(users),
        "watched": FeatureConfig(items, validate_weights_and_indices=False),  # padding must not reach the layer
        "item": FeatureConfig(items),
        "tags": FeatureConfig(tags),
    }
    rows = TPUEmbedding(features, optimizer="adagrad", name="embedding")({key: inputs[key] for key in features})
    joined = keras.ops.concatenate([*(rows[key] for key in features), inputs["age"]], -1)
    hidden = keras.layers.BatchNormalization()(keras.layers.Dense(16, activation="relu")(joined))
    return keras.Model(
        inputs,
        {"score": keras.layers.Dense(1, name="score")(hidden), "user_vector": rows["user"]},
    )


def _padded(random: np.random.Generator, rows: int, high: int) -> npt.NDArray[np.int64]:
    """[rows, 4] ids with -1 after the first 0 to 4."""
    ids = random.integers(0, high, (rows, 4))
    return np.where(np.arange(4) < random.integers(0, 5, rows)[:, None], ids, -1)


@pytest.fixture(scope="module")
def examples() -> dict[str, Any]:
    random = np.random.default_rng(5)
    return {
        "user": random.integers(0, 50, ROWS),
        "watched": _padded(random, ROWS, 70),
        "item": random.integers(0, 70, ROWS).astype(np.int32),
        "tags": _padded(random, ROWS, 30),
        "age": random.normal(size=(ROWS, 2)).astype(np.float32),
    }


def _for_model(examples: dict[str, Any]) -> dict[str, Any]:
    ragged = {name: tf.ragged.boolean_mask(examples[name], examples[name] >= 0) for name in ("watched", "tags")}
    sparse = ragged["tags"].to_sparse()
    dense = {name: tf.constant(value) for name, value in examples.items()}
    return {**dense, "watched": ragged["watched"], "tags": tf.SparseTensor(sparse.indices, sparse.values, [ROWS, 4])}


@pytest.fixture(scope="module")
def trained(examples: dict[str, Any]) -> Any:
    keras.utils.set_random_seed(1)
    model = _model()
    model.compile("adam", {"score": "mse"})
    inputs = _for_model(examples)
    data = tf.data.Dataset.from_tensors((inputs, {"score": np.ones((ROWS, 1))})).repeat(5)
    model.fit(data, verbose=0, shuffle=False)
    return model


@pytest.fixture(scope="module")
def truth(trained: Any, examples: dict[str, Any]) -> dict[str, npt.NDArray[np.float32]]:
    return {name: value.numpy() for name, value in trained(_for_model(examples), training=False).items()}


@pytest.fixture(scope="module")
def exported(trained: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("road")
    prefix = tf.train.Checkpoint(model=trained).write(str(folder / "ckpt"))
    return export_saved_model(prefix, folder / "rec", model=_model, workers=2).path


def _assert_close(found: dict[str, Any], truth: dict[str, Any]) -> None:
    assert set(found) == set(truth)
    for name, values in truth.items():
        np.testing.assert_allclose(found[name], values, atol=1e-6, err_msg=name)


def test_the_c_api_alone_computes_the_models_numbers(
    exported: Path, examples: dict[str, Any], truth: dict[str, Any]
) -> None:
    _assert_close(capi.predict(exported, examples), truth)


def _example(examples: dict[str, Any], row: int) -> bytes:
    def ints(values: Any) -> tf.train.Feature:
        return tf.train.Feature(int64_list=tf.train.Int64List(value=[int(v) for v in np.atleast_1d(values) if v >= 0]))

    feature = {name: ints(examples[name][row]) for name in ("user", "watched", "item", "tags")}
    feature["age"] = tf.train.Feature(float_list=tf.train.FloatList(value=examples["age"][row]))
    return bytes(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())


def test_serialized_examples_compute_the_models_numbers(
    exported: Path, examples: dict[str, Any], truth: dict[str, Any]
) -> None:
    serialized = [_example(examples, row) for row in range(ROWS)]
    _assert_close(capi.predict(exported, {"examples": serialized}, "serving_examples"), truth)


@pytest.mark.parametrize("form", ["row", "columnar"])
def test_the_server_answers_the_models_numbers(
    exported: Path, examples: dict[str, Any], truth: dict[str, Any], form: str, tmp_path: Path
) -> None:
    columns = {name: value.tolist() for name, value in examples.items()}
    with ServerProcess(exported.parent, tmp_path / "log") as server:
        server.wait_for(1)
        if form == "row":
            instances = [{name: values[row] for name, values in columns.items()} for row in range(ROWS)]
            status, answer = server.predict({"instances": instances})
            found = {name: [row[name] for row in answer["predictions"]] for name in truth}
        else:
            status, answer = server.predict({"inputs": columns}, "/versions/1")
            found = answer["outputs"]
    assert status == 200
    _assert_close(found, truth)


def test_an_id_outside_its_table_fails_and_names_the_table(exported: Path, examples: dict[str, Any]) -> None:
    """Its neighbour in the stack has rows there: they must not be read."""
    bad = {name: value[:2].copy() for name, value in examples.items()}
    bad["item"][1] = 70
    with pytest.raises(capi.TensorFlowError, match=r"id 70 of row \d+ is not in table items, which has 70 rows"):
        capi.predict(exported, bad)
