"""Requests with ids outside their tables: answered with the graph's own text, without a run, and without memory that stays."""

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

from tests.support.export import whole_model
from tests.support.memory import resident_bytes
from tests.support.serving.process import ServerProcess
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_saved_model
from tpuembed_serving.core.status import StatusError
from tpuembed_serving.tensorflow import session as runtime

pytestmark = [
    pytest.mark.usefixtures("exports_in_this_process"),
    pytest.mark.filterwarnings("ignore:no requests to warm up", "ignore:Leaving out the signature serving_examples"),
]

Array = npt.NDArray[Any]
FEATURES: dict[str, dict[str, Any]] = {
    "one": {"table": "users", "input": "id"},
    "other": {"table": "items", "input": "id", "out_of_vocabulary": "zeros"},
    "seen": {"table": "items", "combiner": "sum"},
    "rated": {"table": "items", "weighted": True},
    "history": {"table": "users", "max_sequence_length": 2},
}
ROWS = {"users": 30, "items": 50}
HELD_BYTES = 1000
"""The most that one of 3,000 requests may leave behind, because caches grow to their size at first, by 1 MB over gRPC. A run of
the graph of lookups left 2,200 bytes for each."""


def lookups_at(folder: Path, features: dict[str, Any]) -> Path:
    tables = {name: FeatureConfig(TableConfig(rows, 4, name)) for name, rows in ROWS.items()}
    layer = TPUEmbedding(tables, optimizer="sgd")
    return export_saved_model(layer, folder, serving_config={"features": features}, layout="mmap").path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bad")
    lookups_at(root / "lookups", FEATURES)
    lookups_at(root / "packed", {name: spec for name, spec in FEATURES.items() if "weighted" not in spec})
    export_saved_model(whole_model.build(names=["one", "triples", "ragged", "light"]), root / "whole", layout="mmap")
    return root


def drawn(random: np.random.Generator) -> dict[str, Array]:
    ids = {name: random.integers(-1, ROWS[spec["table"]], (3, 4)) for name, spec in FEATURES.items()}
    ids = {name: np.abs(one[:, 0]) if "input" in FEATURES[name] else one for name, one in ids.items()}
    return {**ids, "rated_weights": np.ones((3, 4), np.float32)}


def asked(random: np.random.Generator, model: str) -> dict[str, Array]:
    """Inputs of which at most one id is outside its table, for a feature whose policy is an error."""
    inputs = whole_model.draw(random, 3, 4) if model == "whole" else drawn(random)
    names = ["one", "triples", "ragged", "light"] if model == "whole" else ["one", "seen", "rated", "history"]
    name = random.choice([name for name in names if model != "packed" or name != "rated"])
    place = tuple(random.integers(0, size) for size in inputs[name].shape)
    inputs[name][place] = random.choice([29, 30, 40, 50, 2**40, -1, -2, -(2**63)])
    if name == "light":
        inputs["light_weights"][place] = 0.0 if inputs[name][place] == -1 else 1.0
    return inputs


@pytest.mark.parametrize("model", ["lookups", "packed", "whole"])
def test_what_is_answered_before_a_run_is_what_the_graph_answers(models: Path, model: str) -> None:
    random = np.random.default_rng(1)
    servable = runtime.load(models / model / "1", options=runtime.RunOptions(lookups="tensorflow"))
    names = ["serving_default", *(["packed"] if model == "packed" else [])]
    failed = 0
    with contextlib.closing(servable):
        for turn in range(200):
            signature = servable.signatures[names[turn % len(names)]]
            inputs = asked(random, model)
            if signature.name == "packed":
                inputs["ids"] = np.column_stack([inputs[one] for one in ("one", "other", "seen", "history")])
            arrays = [inputs[info.alias] for info in signature.inputs]
            assert signature.ids is not None
            known = signature.ids.error(arrays)
            answered = None
            try:
                servable.run(signature, arrays)
            except StatusError as error:
                answered = error.code, error.message
                failed += 1
            assert answered == (known and (known.code, known.message)), inputs
    assert 40 < failed < 200


@pytest.fixture(scope="module", params=["auto", "native", "tensorflow"])
def server(models: Path, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    configs = [
        f'config {{ name: "{name}" base_path: "{models / name}" model_platform: "tensorflow" }}'
        for name in ("packed", "whole")
    ]
    (models / "models.config").write_text(f"model_config_list {{ {' '.join(configs)} }}")
    options = ("--config", str(models / "models.config"), "--grpc-port", "0", "--lookups", request.param)
    with ServerProcess(None, models / f"{request.param}.log", *options) as running:
        while running.request("GET", "/readyz")[0] != 200:
            time.sleep(0.05)
        yield running


def bad_row(model: str) -> dict[str, Any]:
    if model == "packed":
        return {"one": 30, "other": 1, "seen": [1, 2], "history": [3]}
    light = {"light": [1], "light_weights": [1.0]}
    return {"one": 40, "triples": [[1, 2, 3]], "ragged": [1], **light, whole_model.DENSE: [0.5, 0.5]}


Send = Callable[[int], None]


@contextlib.contextmanager
def over_http(server: ServerProcess, path: str, body: Any) -> Iterator[Send]:
    """Yields what sends so many requests over one connection, 20 at a time, and reads their answers, which are 400."""
    text = json.dumps(body).encode()
    request = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(text), text)

    def send(count: int) -> None:
        for _ in range(count // 20):
            connection.sendall(request * 20)
            answered = b""
            while answered.count(b"of row 0 is not in table") < 20:
                answered += connection.recv(1 << 16)
            assert answered.count(b"HTTP/1.1 400") == 20

    with socket.create_connection((server.host, server.port)) as connection:
        yield send


def over_v1(server: ServerProcess, model: str) -> contextlib.AbstractContextManager[Send]:
    return over_http(server, f"/v1/models/{model}:predict", {"instances": [bad_row(model)]})


def over_v2(server: ServerProcess, model: str) -> contextlib.AbstractContextManager[Send]:
    tensors = []
    for name, value in bad_row(model).items():
        array = np.array([value])
        datatype = "FP32" if array.dtype.kind == "f" else "INT64"
        tensors.append({"name": name, "shape": array.shape, "datatype": datatype, "data": array.reshape(-1).tolist()})
    return over_http(server, f"/v2/models/{model}/infer", {"inputs": tensors})


@contextlib.contextmanager
def over_grpc(server: ServerProcess, model: str) -> Iterator[Send]:
    import grpc
    from tensorflow_serving.apis import predict_pb2

    request = predict_pb2.PredictRequest()
    request.model_spec.name = model
    for name, value in bad_row(model).items():
        dtype = np.float32 if isinstance(value, list) and isinstance(value[0], float) else np.int64
        request.inputs[name].CopyFrom(tf.make_tensor_proto(np.array([value], dtype)))
    body = request.SerializeToString()

    def send(count: int) -> None:
        for _ in range(count // 20):
            for answer in [call.future(body) for _ in range(20)]:
                assert answer.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert "of row 0 is not in table" in answer.details()

    with grpc.insecure_channel(server.grpc_address) as channel:
        call = channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
        yield send


def left_by(server: ServerProcess, send: Send, count: int) -> int:
    """Bytes of memory that so many requests leave, after others that fill what is cached."""
    send(1000)
    before = resident_bytes(server.process.pid, "RssAnon")
    send(count)
    return resident_bytes(server.process.pid, "RssAnon") - before


@pytest.mark.parametrize("model", ["packed", "whole"])
@pytest.mark.sampled(2)
def test_bad_ids_leave_no_memory_behind(server: ServerProcess, model: str) -> None:
    for way in (over_v1, over_v2, over_grpc):
        with way(server, model) as send:
            assert left_by(server, send, 3000) < 3000 * HELD_BYTES, way
