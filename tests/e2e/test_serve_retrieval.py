"""A server answers retrievals, by the C library and by TensorFlow, as numpy does."""

from collections.abc import Iterator
from typing import Any

import grpc
import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

from tests.support.export.retrieval import user_tower
from tests.support.serving.process import ServerProcess
from tpuembed import export_retrieval
from tpuembed.native.lookup import available

pytestmark = pytest.mark.usefixtures("exports_in_this_process")

USERS, FILMS, DIM, K = 30, 700, 5, 6
RANDOM = np.random.default_rng(8)
FILM_VECTORS = RANDOM.standard_normal((FILMS, DIM)).astype(np.float32)
USER_VECTORS = RANDOM.standard_normal((USERS, DIM)).astype(np.float32)
TAGS = RANDOM.integers(0, 4, FILMS).astype(np.uint64) | np.uint64(1 << 63)
NAMES = [f"film é {number}" for number in range(FILMS)]
SCORES = USER_VECTORS @ FILM_VECTORS.T


def query() -> keras.Model:
    return user_tower(USERS, DIM)


@pytest.fixture(scope="module", params=["native", "tensorflow"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    if request.param == "native" and available():
        pytest.skip(f"the C library is not compiled: {available()}")
    folder, model = tmp_path_factory.mktemp("served"), query()
    next(iter(model.layers[1].embedding_tables.values())).assign(USER_VECTORS)
    prefix = tf.train.Checkpoint(model=model).write(str(folder / "ckpt"))
    export_retrieval(
        prefix, folder / "m", query=query, candidates=FILM_VECTORS, ids=NAMES, tags=TAGS, k=K, layout="mmap"
    )
    options = ("--lookups", request.param, "--grpc-port", "0")
    with ServerProcess(folder / "m", folder / "log", *options) as running:
        running.wait_for(1)
        yield running
    assert ("native lookups" in running.log) == (request.param == "native")
    assert "Traceback" not in running.log


def best(user: int, passes: Any = True) -> tuple[list[str], list[float]]:
    scores = np.where(passes, SCORES[user], -np.inf)
    order = [one for one in np.argsort(-scores, kind="stable")[:K] if scores[one] > -np.inf]
    return [NAMES[one] for one in order] + [""] * (K - len(order)), [float(scores[one]) for one in order]


def check(found: Any, names: list[str], scores: list[float]) -> None:
    assert list(found["ids"]) == names
    np.testing.assert_allclose(np.array(found["scores"][: len(scores)], float), scores, rtol=1e-5)
    assert all(float(one) == -np.inf for one in found["scores"][len(scores) :])


@pytest.mark.sampled(1)
def test_rest_has_the_best_candidates(server: ServerProcess) -> None:
    status, reply = server.predict({"instances": [{"user": user} for user in range(USERS)]})
    assert status == 200, reply
    for user, found in enumerate(reply["predictions"]):
        check(found, *best(user))


def test_rest_takes_exclusions_and_tags(server: ServerProcess) -> None:
    asked: list[dict[str, Any]] = []
    wanted = []
    for user in range(USERS):
        tags = int(RANDOM.choice([0, 1, 2, 3, 1 << 63, 4]))
        out = best(user)[0][: user % 4]
        exclude = [*out, "unknown", *[""] * (user % 3)] if user % 5 else out  # rows of different lengths
        asked.append({"user": user, "exclude": exclude, "require_tags": tags})
        passes = ((TAGS & np.uint64(tags)) == tags) & ~np.isin(NAMES, out)
        wanted.append(best(user, passes))
    status, reply = server.predict({"signature_name": "filtered", "instances": asked})
    assert status == 200, reply
    for found, each in zip(reply["predictions"], wanted, strict=True):
        check(found, *each)


def test_grpc_has_the_same(server: ServerProcess) -> None:
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "m"
    request.inputs["user"].CopyFrom(tf.make_tensor_proto([3, 29], tf.int64))
    with grpc.insecure_channel(server.grpc_address) as channel:
        reply = prediction_service_pb2_grpc.PredictionServiceStub(channel).Predict(request, timeout=60)
    ids, scores = (tf.make_ndarray(reply.outputs[name]) for name in ("ids", "scores"))
    for row, user in enumerate((3, 29)):
        check({"ids": [one.decode() for one in ids[row]], "scores": scores[row]}, *best(user))


def test_wrong_requests_fail_alone(server: ServerProcess) -> None:
    status, reply = server.predict({"instances": [{"user": USERS}]})
    assert status == 400
    assert f"{USERS}" in reply["error"]
    body = {"signature_name": "filtered", "inputs": {"user": [1, 2], "exclude": [[""]] * 3, "require_tags": [0] * 3}}
    status, reply = server.predict(body)
    assert status == 400, reply
    status, reply = server.predict({"instances": [{"user": 1}]})
    check(reply["predictions"][0], *best(1))
