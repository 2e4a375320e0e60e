"""A server in front of another one that runs the models: every answer is the other one's, whoever is asked."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tensorflow_serving.apis import get_model_status_pb2, predict_pb2

from tests.support.messages import said
from tests.support.serving.process import run_command
from tests.support.serving.vector_server import VectorServer, ask, read_vectors

VECTORS = [vector for vector in read_vectors("rest_*.yaml") if not vector.get("ragged")]
"""Lists of different lengths are for models whose manifest is here."""


@pytest.fixture(scope="module")
def behind(vector_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[VectorServer]:
    with VectorServer(vector_models, tmp_path_factory.mktemp("behind") / "log") as running:
        yield running


@pytest.fixture(scope="module")
def front(
    vector_models: dict[str, Path], behind: VectorServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VectorServer]:
    nowhere = dict.fromkeys(vector_models, Path("/nowhere"))
    with VectorServer(nowhere, tmp_path_factory.mktemp("front") / "log", behind.grpc_address) as running:
        yield running


def unlike(direct: httpx.Response, forwarded: httpx.Response) -> bool:
    """But for where in a graph a type was wrong: gRPC refuses it before."""
    texts = [re.sub(r"\\n\\t \[\[.*?\]\]", "", reply.text) for reply in (direct, forwarded)]
    return direct.status_code != forwarded.status_code or texts[0] != texts[1]


@pytest.mark.nightly
def test_every_rest_request_has_the_same_answer(behind: VectorServer, front: VectorServer) -> None:
    with httpx.Client(base_url=behind.url, timeout=60) as one, httpx.Client(base_url=front.url, timeout=60) as other:
        replies = {vector["name"]: (ask(one, vector), ask(other, vector)) for vector in VECTORS}
        ready = other.get("/readyz")
    differing = {name: [reply.text for reply in pair] for name, pair in replies.items() if unlike(*pair)}
    assert differing == {}
    assert len(replies) >= 250
    assert ready.status_code == 200


def test_grpc_calls_are_forwarded(front: VectorServer) -> None:
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "half"
    request.inputs["x"].CopyFrom(_floats([1.0, 2.0]))
    status = get_model_status_pb2.GetModelStatusRequest()
    status.model_spec.name = "half"
    with grpc.insecure_channel(front.grpc_address) as channel:
        call = channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
        answer = predict_pb2.PredictResponse.FromString(call(request.SerializeToString(), timeout=60))
        ask_status = channel.unary_unary("/tensorflow.serving.ModelService/GetModelStatus")
        states = get_model_status_pb2.GetModelStatusResponse.FromString(
            ask_status(status.SerializeToString(), timeout=60)
        )
        reload = channel.unary_unary("/tensorflow.serving.ModelService/HandleReloadConfigRequest")
        with pytest.raises(grpc.RpcError) as refused:
            reload(b"\n\x02\n\x00", timeout=60)
    assert list(answer.outputs["y"].float_val) == [2.5, 3.0]
    assert [(one.version, one.state) for one in states.model_version_status] == [(123, 30)]
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    said(refused.value.details() or "")


def _floats(values: list[float]) -> Any:
    import tensorflow as tf

    return tf.make_tensor_proto(values, tf.float32)


@pytest.mark.nightly
def test_a_server_that_goes_away_is_503_until_it_is_back(vector_models: dict[str, Path], tmp_path: Path) -> None:
    half = {"half": vector_models["half"]}
    with VectorServer(half, tmp_path / "behind") as behind:
        front = VectorServer(half, tmp_path / "front", behind.grpc_address)
    with front, httpx.Client(base_url=front.url, timeout=60) as client:
        deadline = time.monotonic() + 60
        while client.get("/readyz").status_code == 200:
            assert time.monotonic() < deadline
        for reply in (
            client.post("/v1/models/half:predict", content=b'{"instances": [1.0]}'),
            client.get("/v1/models/half"),
            client.get("/v1/models/half/metadata"),
        ):
            assert reply.status_code == 503, reply.text
            assert behind.grpc_address in reply.json()["error"]
        assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    "options",
    [
        ["--backend", "tf-serving"],
        ["--backend", "tf-serving", "--target", "localhost:1"],
        ["--backend", "tf-serving", "--target", "localhost", "--name", "m"],
        ["/tmp", "--target", "localhost:1"],
        ["/tmp", "--backend", "tf-serving", "--target", "localhost:1", "--name", "m"],
        ["--backend", "tf-serving", "--target", "localhost:1", "--name", "m", "--prewarm"],
    ],
)
def test_options_that_do_not_go_together_are_refused(options: list[str]) -> None:
    done = run_command("serve", *options)
    assert done.returncode == 2
    said(done.stderr)
