"""Requests that share runs of TensorFlow get what TensorFlow answers to each alone; over HTTP, from many clients at once."""

import base64
import concurrent.futures
import contextlib
import http.client
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.serving.process import ServerProcess
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_saved_model

ROWS = {"users": 50, "items": 300}
DIM = 8
CLIENTS, REQUESTS = 16, 25
CONFIG = """
model_config_list {{
  config {{ name: "ids" base_path: "{root}/ids" model_platform: "tensorflow" }}
  config {{ name: "lists" base_path: "{root}/lists" model_platform: "tensorflow" }}
  config {{ name: "ranking" base_path: "{root}/ranking" model_platform: "tensorflow" }}
  config {{ name: "centred" base_path: "{root}/centred" model_platform: "tensorflow" }}
  config {{ name: "listwise" base_path: "{root}/listwise" model_platform: "tensorflow" }}
}}
"""


def ranking() -> Any:
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in ROWS}
    tables = {name: FeatureConfig(TableConfig(rows, DIM, name)) for name, rows in ROWS.items()}
    found = TPUEmbedding(tables, optimizer="sgd")(inputs)
    together = keras.ops.concatenate([found[name] for name in sorted(found)], -1)
    return keras.Model(inputs, {"score": keras.layers.Dense(1, activation="sigmoid")(together)})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lookups of ids and of lists, a whole model, and a model of which each row depends on all."""
    root = tmp_path_factory.mktemp("batching")
    keras.utils.set_random_seed(3)
    prefix = tf.train.Checkpoint(model=ranking()).write(str(root / "ckpt"))
    ids = {name: {"table": name, "input": "id"} for name in ROWS}
    lists = {"watched": {"table": "items", "combiner": "mean"}, "rated": {"table": "items", "weighted": True}}
    export_saved_model(prefix, root / "ids", serving_config={"features": ids})
    export_saved_model(prefix, root / "lists", serving_config={"features": {**lists, "who": {"table": "users"}}})
    export_saved_model(prefix, root / "ranking", model=ranking)
    centred = tf.function(lambda x: {"y": x - tf.reduce_mean(x)}).get_concrete_function(tf.TensorSpec([None], name="x"))
    tf.saved_model.save(tf.Module(), str(root / "centred" / "1"), signatures={"serving_default": centred})
    save_listwise(root / "listwise" / "1")
    (root / "models.config").write_text(CONFIG.format(root=root))
    return root


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[ServerProcess]:
    options = ("--config", str(models / "models.config"), "--run-threads", "1")
    with ServerProcess(None, models / "server.log", *options) as running:
        while running.request("GET", "/readyz")[0] != 200:
            time.sleep(0.05)
        yield running


def predict(connection: http.client.HTTPConnection, model: str, inputs: dict[str, Any]) -> tuple[int, Any]:
    columns = {name: np.asarray(values).tolist() for name, values in inputs.items()}
    body: dict[str, Any] = {"inputs": columns}
    if "examples" in inputs:
        encoded = [{"b64": base64.b64encode(one).decode()} for one in columns["examples"]]
        body = {"signature_name": "serving_examples", "inputs": encoded}
    connection.request("POST", f"/v1/models/{model}:predict", json.dumps(body))
    reply = connection.getresponse()
    return reply.status, json.loads(reply.read())


def ask_all(
    server: ServerProcess, model: str, requests: Sequence[Sequence[dict[str, Any]]]
) -> list[list[tuple[int, Any]]]:
    """What each client's requests are answered, all clients at once."""

    def ask(mine: Sequence[dict[str, Any]]) -> list[tuple[int, Any]]:
        with contextlib.closing(server.connect()) as connection:
            return [predict(connection, model, inputs) for inputs in mine]

    with concurrent.futures.ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(ask, requests))


def draw_ids(rng: np.random.Generator) -> dict[str, Any]:
    count = rng.integers(1, 5)
    return {name: rng.integers(0, rows, count) for name, rows in ROWS.items()}


def draw_lists(rng: np.random.Generator) -> dict[str, Any]:
    count, hot, other = rng.integers(1, 4, 3)
    lists = {
        "watched": rng.integers(0, ROWS["items"], (count, hot)),
        "rated": rng.integers(0, ROWS["items"], (count, other)),
    }
    lists["watched"][rng.random((count, hot)) < 0.3] = -1
    weights = {"rated_weights": rng.random((count, other)).astype(np.float32)}
    return {**lists, **weights, "who": rng.integers(0, ROWS["users"], (count, 1))}


def draw_examples(rng: np.random.Generator) -> dict[str, Any]:
    """Lists of different lengths, which a run pads to its longest one."""
    examples = []
    for _ in range(rng.integers(1, 4)):
        example, lengths = tf.train.Example(), rng.integers(0, 6, 2)
        features = example.features.feature
        features["watched"].int64_list.value.extend(rng.integers(0, ROWS["items"], lengths[0]).tolist())
        features["rated"].int64_list.value.extend(rng.integers(0, ROWS["items"], lengths[1]).tolist())
        features["rated_weights"].float_list.value.extend(rng.random(lengths[1]).tolist())
        features["who"].int64_list.value.append(int(rng.integers(0, ROWS["users"])))
        examples.append(example.SerializeToString())
    return {"examples": np.array(examples, object)}


def save_listwise(path: Path) -> None:
    """A model that compares the rows of a request with each other where a flag says so, which it seldom does."""

    def score(x: Any, together: Any) -> Any:
        return {"y": tf.cond(tf.reduce_any(together), lambda: tf.nn.softmax(x, axis=0), lambda: x)}

    specs = [tf.TensorSpec([None], name="x"), tf.TensorSpec([None], tf.bool, name="together")]
    signatures = {"serving_default": tf.function(score).get_concrete_function(*specs)}
    tf.saved_model.save(tf.Module(), str(path), signatures=signatures)


def draw_listwise(rng: np.random.Generator) -> dict[str, Any]:
    count = rng.integers(1, 4)
    return {"x": rng.random(count).astype(np.float32), "together": np.full(count, rng.random() < 0.1)}


def draw_numbers(rng: np.random.Generator) -> dict[str, Any]:
    return {"x": rng.integers(0, 100, rng.integers(1, 4)).astype(np.float32)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("model", "draw", "tolerance"),
    [
        ("ids", draw_ids, 0),
        ("lists", draw_lists, 1e-6),
        ("lists", draw_examples, 1e-6),
        ("ranking", draw_ids, 1e-6),
        ("centred", draw_numbers, 1e-4),
        ("listwise", draw_listwise, 1e-6),
    ],
)
def test_each_request_gets_what_tensorflow_answers_to_it(
    server: ServerProcess, models: Path, model: str, draw: Any, tolerance: float
) -> None:
    rng = np.random.default_rng(1)
    requests = [[draw(rng) for _ in range(REQUESTS)] for _ in range(CLIENTS)]
    signatures = tf.saved_model.load(str(models / model / "1")).signatures
    call = signatures["serving_examples" if draw is draw_examples else "serving_default"]
    for mine, answers in zip(requests, ask_all(server, model, requests), strict=True):
        for inputs, (status, answer) in zip(mine, answers, strict=True):
            assert status == 200, answer
            wanted = {name: value.numpy() for name, value in call(**to_tensors(call, inputs)).items()}
            found = answer["outputs"] if len(wanted) > 1 else {next(iter(wanted)): answer["outputs"]}
            for name, want in wanted.items():
                got = np.asarray(found[name], np.float32)
                if tolerance:
                    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)
                else:
                    np.testing.assert_array_equal(got, want)


def to_tensors(call: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    specs = call.structured_input_signature[1]
    return {name: tf.constant(values, specs[name].dtype) for name, values in inputs.items()}


def test_an_error_that_quotes_bytes_of_the_client_is_no_fault_of_the_server(server: ServerProcess) -> None:
    """Python cannot have TensorFlow's message: it is no UTF-8."""
    with contextlib.closing(server.connect()) as connection:
        status, answer = predict(connection, "lists", {"examples": np.array([b"\xff\xff"], object)})
    assert (status, "Could not parse example input, value: '\ufffd\ufffd'" in answer["error"]) == (400, True), answer


def test_rows_that_look_at_each_other_are_told_apart(server: ServerProcess) -> None:
    reason = "output 'y': Mean (Mean): it makes one of several rows"
    text = "centred/1: signature serving_default: requests are not batched"
    assert f"{text}: {reason}" in server.log
    for export in ("ids", "lists", "ranking"):
        assert f"{export}/1: signature" not in server.log, "each signature of an export is proven"


def test_the_operators_parameters(tmp_path: Path) -> None:
    (tmp_path / "batching.pbtxt").write_text("max_batch_size { value: 64 } allowed_batch_sizes: [8, 64]")
    means = tf.function(lambda x: {"y": tf.reduce_mean(x, 1), "n": tf.fill(tf.shape(x)[:1], tf.shape(x)[0])})
    concrete = means.get_concrete_function(tf.TensorSpec([None, None], name="x"))
    tf.saved_model.save(tf.Module(), str(tmp_path / "m" / "1"), signatures={"serving_default": concrete})
    options = ("--enable-batching", "--batching-parameters-file", str(tmp_path / "batching.pbtxt"))
    with ServerProcess(tmp_path / "m", tmp_path / "log", *options) as server:
        server.wait_for(1)
        status, answer = server.predict({"inputs": [[1.0, 3.0], [1.0, 1.0]]})
        assert (status, answer["outputs"]) == (200, {"y": [2.0, 1.0], "n": [8, 8]}), "the run is filled up to 8 rows"
        status, answer = server.predict({"inputs": [[1.0]] * 65})
        text = "Task size 65 is larger than maximum input batch size 64"
        assert (status, answer["error"]) == (400, text)
