"""The example of a model is a request that the model answers. TensorFlow says so: each is sent to the server's own route."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow_serving.apis import prediction_log_pb2

from tests.support.serving.asgi import running, send, wait_until_ready
from tpuembed_serving import ServerSettings, create_app
from tpuembed_serving.models.warmup import WARMUP_PATH

Spec = tf.TensorSpec


def save(folder: Path, function: Callable[..., Any], *specs: Any, name: str = "serving_default") -> Path:
    module = tf.Module()
    module.f = tf.function(function, input_signature=specs)
    tf.saved_model.save(module, str(folder / "m" / "1"), signatures={name: module.f})
    return folder / "m" / "1"


def example(version: Path) -> tuple[str | None, Any]:
    """The example, and the server's answer to it."""
    app = create_app(ServerSettings.for_model_dir(version.parent))
    with running(app):
        wait_until_ready(app)
        (body,) = app.worker_group.gather("examples")[0].values()
        if body is None:
            return None, None
        reply = send(app, "POST", "/v1/models/m:predict", body)
        assert reply.status == 200, reply.body
        return body, json.loads(reply.body)


def test_zeros_for_one_row_of_each_input(tmp_path: Path) -> None:
    version = save(
        tmp_path,
        lambda ids, dense, flag: {"y": tf.reduce_sum(tf.cast(ids, tf.float32), 1) + tf.reduce_sum(dense, 1), "z": flag},
        Spec([None, None], tf.int64, "ids"), Spec([None, 2], tf.float32, "dense"), Spec([None], tf.bool, "flag"),
    )  # fmt: skip
    body, answer = example(version)
    assert body == '{"instances": [{"dense": [0.0, 0.0], "flag": false, "ids": [0]}]}'
    assert answer == {"predictions": [{"y": 0.0, "z": False}]}


@pytest.mark.parametrize("kind", ["strings", "complex", "complex output", "large", "other signature"])
@pytest.mark.sampled(1)
def test_no_example_if_json_has_none(tmp_path: Path, kind: str) -> None:
    """Nor for strings: the graph may parse them."""
    functions: dict[str, Any] = {
        "strings": lambda x: {"y": tf.strings.length(x)},
        "complex": lambda x: {"y": tf.math.real(x)},
        "complex output": lambda x: {"y": tf.complex(x, x)},
        "large": lambda x: {"y": x},
        "other signature": lambda x: {"y": x},
    }
    specs = {
        "strings": Spec([None], tf.string),
        "complex": Spec([None], tf.complex64),
        "large": Spec([None, 224, 224], tf.float32),
    }
    name = "other" if kind == "other signature" else "serving_default"
    version = save(tmp_path, functions[kind], specs.get(kind, Spec([None], tf.float32)), name=name)
    assert example(version) == (None, None)


def record(version: Path, inputs: dict[str, Any], signature: str = "") -> None:
    log = prediction_log_pb2.PredictionLog()
    log.predict_log.request.model_spec.signature_name = signature
    for name, value in inputs.items():
        log.predict_log.request.inputs[name].CopyFrom(tf.make_tensor_proto(value))
    path = version / WARMUP_PATH
    path.parent.mkdir(exist_ok=True)
    with tf.io.TFRecordWriter(str(path)) as writer:
        writer.write(log.SerializeToString())


def test_the_first_row_of_the_first_recorded_request(tmp_path: Path) -> None:
    version = save(
        tmp_path,
        lambda ids, text: {"y": tf.reduce_sum(ids, 1) + tf.cast(tf.strings.length(text), tf.float32)},
        Spec([None, None], tf.float32, "ids"), Spec([None], tf.string, "text"), name="rank",
    )  # fmt: skip
    record(version, {"text": [b"ab\xff", b"c"], "ids": np.array([[0.1, 7], [1, 2]], np.float32)}, "rank")
    body, answer = example(version)
    assert body == '{"signature_name": "rank", "instances": [{"ids": [0.1, 7.0], "text": {"b64": "YWL/"}}]}'
    assert answer["predictions"] == [pytest.approx(10.1)]
