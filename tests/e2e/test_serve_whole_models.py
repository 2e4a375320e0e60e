"""A whole model in the server's runtime: without TensorFlow's optimizer, with the numbers of its layers."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_saved_model
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.tensorflow import session as runtime

pytestmark = pytest.mark.usefixtures("exports_in_this_process")

NAMES = ("a", "b", "c")
ROWS = {"a": 10, "b": 20, "c": 30}
IDS = {"a": np.array([0, 9, 3]), "b": np.array([19, 0, 7]), "c": np.array([29, 29, 0])}


def build() -> Any:
    """Three tables of one stack, a layer with and one without a Relu."""
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in NAMES}
    tables = {name: FeatureConfig(TableConfig(ROWS[name], 4, f"table_{name}")) for name in NAMES}
    found = TPUEmbedding(tables, optimizer="sgd")(inputs)
    hidden = keras.layers.Dense(8, activation="relu", name="hidden")(keras.ops.concatenate([*found.values()], -1))
    return keras.Model(inputs, {"score": keras.layers.Dense(2, activation="sigmoid", name="score")(hidden)})


def expected(model: Any) -> Any:
    """float64, from the weights alone."""
    values = {weight.path: weight.numpy().astype(np.float64) for weight in model.weights if weight.dtype == "float32"}
    layer = next(layer for layer in model.layers if isinstance(layer, TPUEmbedding))
    tables = {config.name: table.numpy().astype(np.float64) for config, table in layer.embedding_tables.items()}
    rows = np.concatenate([tables[f"table_{name}"][IDS[name]] for name in NAMES], -1)
    hidden = np.maximum(rows @ values["hidden/kernel"] + values["hidden/bias"], 0)
    return 1 / (1 + np.exp(-(hidden @ values["score/kernel"] + values["score/bias"])))


@pytest.fixture(scope="module", params=[pytest.param("variables", marks=pytest.mark.nightly), "mmap"])
def loaded(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A loaded export, what it shall answer, and where it lies."""
    folder = tmp_path_factory.mktemp("whole")
    model = build()
    for weight in model.weights:
        if weight.dtype == "float32":
            weight.assign(np.random.default_rng(len(weight.path)).uniform(-1, 1, weight.shape))
    checkpoint = tf.train.Checkpoint(model=model).write(str(folder / "ckpt"))
    export_saved_model(checkpoint, folder / "m", model=build, layout=request.param)
    servable = runtime.load(folder / "m" / "1")
    yield servable, expected(model), folder / "m" / "1"
    servable.close()


def call(servable: Any, name: str, inputs: dict[str, Any]) -> Any:
    signature = servable.signatures[name]
    (score,) = servable.run(signature, [inputs[info.alias] for info in signature.inputs])
    return score


def test_numbers_of_every_signature(loaded: Any) -> None:
    servable, truth, _ = loaded
    examples = [
        tf.train.Example(
            features=tf.train.Features(
                feature={
                    name: tf.train.Feature(int64_list=tf.train.Int64List(value=[IDS[name][row]])) for name in NAMES
                }
            )
        ).SerializeToString()
        for row in range(3)
    ]
    np.testing.assert_allclose(call(servable, "serving_default", IDS), truth, rtol=1e-5)
    np.testing.assert_allclose(
        call(servable, "serving_examples", {"examples": np.array(examples, object)}), truth, rtol=1e-5
    )


@pytest.mark.parametrize("bad", [-1, -7, 20, 1 << 62])
def test_an_id_outside_of_its_table_is_named(loaded: Any, bad: int) -> None:
    servable, *_ = loaded
    for ids in ([bad, 3, 4], [3, 4, bad]):
        with pytest.raises(StatusError) as caught:
            call(servable, "serving_default", IDS | {"b": np.array(ids)})
        assert caught.value.message == (
            f"feature b: id {bad} of row {ids.index(bad)} is not in table table_b, which has 20 rows; correct the id or set "
            "out_of_vocabulary"
        )


def test_an_error_that_quotes_bytes_of_the_client_is_no_fault_of_the_server(loaded: Any) -> None:
    """Python cannot have TensorFlow's message: it is no UTF-8."""
    with pytest.raises(StatusError, match="Could not parse example input, value: '\ufffd\ufffd'") as caught:
        call(loaded[0], "serving_examples", {"examples": np.array([b"\xff\xff"], object)})
    assert caught.value.code is Code.INVALID_ARGUMENT


def test_features_of_different_lengths(loaded: Any) -> None:
    """Each is looked up by itself; that they do not fit together is for the model to say, and ids out of range come first."""
    servable, *_ = loaded
    with pytest.raises(StatusError, match=r"^feature c: id 30 of row 0 is not in table table_c, which has 30 rows;"):
        call(servable, "serving_default", IDS | {"b": np.array([1]), "c": np.array([30, 2])})
    with pytest.raises(StatusError, match="ConcatOp"):
        call(servable, "serving_default", IDS | {"b": np.array([1])})


def test_no_rows(loaded: Any) -> None:
    servable, *_ = loaded
    assert call(servable, "serving_default", dict.fromkeys(NAMES, np.empty(0, np.int64))).shape == (0, 2)
