"""TLS, API keys and their admins, and pages of other sites."""

import functools
import http.client
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import trustme
from cryptography.hazmat.primitives import serialization as pem_of
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tensorflow_serving.apis import classification_pb2, get_model_status_pb2, model_management_pb2

from tests.support.contract_open_inference import message
from tests.support.contract_serve import eventually, outputs_of, predict_request, refusal
from tests.support.contract_strict import ADMIN, COLON, KEY, SPACED, StrictServer, strict_server
from tests.support.messages import said
from tests.support.serving.process import run_command

CODES = grpc.StatusCode
ROWS = {"signature_name": "double", "instances": [3.0]}
OPEN = ("/", "/readyz", "/ping", "/v2/health/live", "/v2/health/ready")
LOCKED = (
    "/v1/models/zoo", "/v1/models/zoo/metadata", "/v1/models/none", "/v2", "/v2/models/zoo", "/v2/models/zoo/ready",
    "/monitoring/prometheus/metrics", "/nowhere", "/readyz/", "//readyz",
)  # fmt: skip


@pytest.fixture(scope="module")
def server(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> StrictServer:
    return strict_server(pytestconfig, tmp_path_factory)


def double_request() -> Any:
    return predict_request("zoo", {"x": np.array([3.0])}, "double")


def code_of(call: Any, request: Any, key: str | None = None) -> Any:
    metadata = () if key is None else (("x-api-key", key),)
    try:
        call(request, timeout=60, metadata=metadata)
    except grpc.RpcError as error:
        return error.code()
    return CODES.OK


def test_tls_on_both_ports(server: StrictServer) -> None:
    """A client without TLS gets no answer."""
    assert server.model_url.startswith("https://")
    assert server.post("zoo:predict", ROWS, **{"X-API-Key": KEY}).value == {"predictions": [1.0]}
    plain = http.client.HTTPConnection(server.host, server.port, timeout=60)
    plain.request("GET", "/readyz")
    with pytest.raises((OSError, http.client.HTTPException)):
        plain.getresponse()
    plain.close()
    reply = server.prediction.Predict(double_request(), timeout=60, metadata=(("x-api-key", KEY),))
    assert outputs_of(reply)["y"].tolist() == [1.0]
    with grpc.insecure_channel(server.grpc_address) as channel:
        call = channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
        assert code_of(call, double_request().SerializeToString(), KEY) is CODES.UNAVAILABLE


def test_rest_needs_a_key(server: StrictServer) -> None:
    for headers in ({}, {"X-API-Key": KEY[:-1]}, {"X-API-Key": ""}, {"Authorization": f"Basic {KEY}"}):
        for reply in (
            *(server.get(path, **headers) for path in LOCKED),
            server.post("zoo:predict", ROWS, **headers),
            server.ask("POST", "/v2/models/zoo/infer", {}, headers),
            server.ask("POST", "/invocations", ROWS, headers),
        ):
            assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
            assert reply.error
            assert KEY[:-1] not in reply.body.decode()
    said(reply.error)
    for header in (
        {"X-API-Key": KEY.upper()},
        {"X-API-Key": "# keys of the test"},
        {"Authorization": KEY},
        {"API-Key": KEY},
    ):
        assert server.post("zoo:predict", ROWS, **header).status == 401, header
    for headers in (
        {"X-API-Key": KEY}, {"Authorization": f"Bearer {KEY}"}, {"X-API-Key": ADMIN}, {"authorization": f"bEARER  {SPACED} "},
        {"X-API-Key": "wrong", "Authorization": f"Bearer {KEY}"}, {"x-api-key": COLON},
    ):  # fmt: skip
        assert server.post("zoo:predict", ROWS, **headers).value == {"predictions": [1.0]}
    assert KEY not in server.log


def test_health_needs_no_key(server: StrictServer) -> None:
    for path in OPEN:
        assert server.get(path).status == 200, path
    reply = health_pb2_grpc.HealthStub(server.channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_grpc_needs_a_key(server: StrictServer) -> None:
    status = get_model_status_pb2.GetModelStatusRequest()
    status.model_spec.name = "zoo"
    for key in (None, KEY[:-1]):
        for call, request in (
            (server.prediction.Predict, double_request()),
            (server.prediction.Classify, classification_pb2.ClassificationRequest()),
            (server.models.GetModelStatus, status),
        ):
            assert code_of(call, request, key) is CODES.UNAUTHENTICATED
    assert code_of(server.models.GetModelStatus, status, KEY) is CODES.OK
    bearer = (("authorization", f"Bearer {KEY}"),)
    assert server.prediction.Predict(double_request(), timeout=60, metadata=bearer).outputs
    ready = message("ModelReadyRequest")(name="zoo")
    call = functools.partial(server.inference, "ModelReady")
    assert refusal(call, ready)[0] is CODES.UNAUTHENTICATED
    assert server.inference("ModelReady", ready, metadata=bearer).ready


def reload_request(folder: Path, *models: str) -> Any:
    request = model_management_pb2.ReloadConfigRequest()
    for name in models:
        request.config.model_config_list.config.add(
            name=name, base_path=str(folder / name), model_platform="tensorflow"
        )
    return request


def test_a_reload_needs_an_admins_key(server: StrictServer) -> None:
    call = server.models.HandleReloadConfigRequest
    both = reload_request(server.folder, "zoo", "scale")
    assert code_of(call, both) is CODES.UNAUTHENTICATED
    code, text = refusal(call, both, metadata=(("x-api-key", KEY),))
    assert code is CODES.PERMISSION_DENIED
    said(text)
    assert code_of(call, reload_request(Path("/"), "usr"), ADMIN) is CODES.PERMISSION_DENIED
    headers = {"X-API-Key": KEY}
    assert server.post("scale:predict", {"instances": [1.0]}, **headers).status == 404
    assert code_of(call, both, ADMIN) is CODES.OK
    assert server.post("scale:predict", {"instances": [1.0]}, **headers).value == {"predictions": [2.0]}
    assert code_of(call, reload_request(server.folder, "zoo"), ADMIN) is CODES.OK
    assert server.post("scale:predict", {"instances": [1.0]}, **headers).status == 404


def test_the_key_file_is_read_again(server: StrictServer) -> None:
    """A key that is removed opens nothing any more."""
    before, new = server.keys.read_text(), "the-key-of-tomorrow-0123456789"

    def status(key: str) -> int:
        return server.get("/v1/models/zoo", **{"X-API-Key": key}).status

    server.keys.write_text(before.replace(KEY, new), encoding="utf-8")
    eventually(lambda: status(new) == 200)
    assert status(KEY) == 401
    server.keys.write_text(before, encoding="utf-8")
    eventually(lambda: status(KEY) == 200)
    assert status(new) == 401


def test_pages_of_other_sites_may_ask(server: StrictServer) -> None:
    """With TensorFlow Serving's headers. The request before the request carries no key."""
    origin = {"Origin": "https://shop.example"}
    before = server.ask("OPTIONS", "/v1/models/zoo:predict", None, origin)
    answer = server.post("zoo:predict", ROWS, **{"X-API-Key": KEY}, **origin)
    assert (before.status, answer.status) == (200, 200)
    for reply in (before, answer):
        assert reply.headers["access-control-allow-origin"] == "*"
        assert reply.headers["access-control-allow-methods"] == "POST, GET"
        assert reply.headers["access-control-allow-headers"] == "Content-Type, Authorization, X-API-Key"


def test_files_that_protect_nothing_are_refused(server: StrictServer, tmp_path: Path) -> None:
    (tmp_path / "short").write_text("a short key\n")
    (tmp_path / "empty").write_text("# no key\n")
    (tmp_path / "words").write_text("two words in a single line\n")
    (tmp_path / "letters").write_text("schlüssel-0123456789\n", encoding="utf-8")
    # Which of the two lines counts would decide whether it is an admin's.
    (tmp_path / "twice").write_text(f"ops admin: {KEY}\nweb: {KEY}\n")
    pem, other = server.folder / "server.pem", trustme.CA().issue_cert("127.0.0.1")
    other.private_key_pem.write_to_path(tmp_path / "other.pem")
    key = pem_of.load_pem_private_key(other.private_key_pem.bytes(), None)
    password = pem_of.BestAvailableEncryption(b"secret")
    locked = key.private_bytes(pem_of.Encoding.PEM, pem_of.PrivateFormat.PKCS8, password)
    (tmp_path / "locked.pem").write_bytes(locked)
    refused: list[tuple[list[str | Path], int, str]] = [
        (["--tls-cert", pem], 2, "--tls-key"),
        (["--tls-client-ca", pem], 2, "--tls-c"),
        (["--tls-cert", tmp_path / "short", "--tls-key", pem], 1, "in PEM format"),
        (["--tls-cert", tmp_path / "none", "--tls-key", pem], 1, "No such file"),
        (["--tls-cert", pem, "--tls-key", tmp_path / "other.pem"], 1, "mismatch"),
        (["--tls-cert", pem, "--tls-key", tmp_path / "locked.pem"], 1, "the key has a password"),
        (["--tls-cert", pem, "--tls-key", pem, "--tls-client-ca", tmp_path / "short"], 1, "TLS client authorities"),
        (["--tls-cert", pem, "--tls-key", pem, "--tls-client-ca", tmp_path / "none"], 1, "No such file"),
    ]
    for name in ("short", "empty", "words", "letters", "twice", "none"):
        refused.append((["--api-key-file", tmp_path / name], 1, name))
    for options, code, word in refused:
        result = run_command("serve", tmp_path, "--rest-port", "0", "--no-grpc", *options)
        assert (result.returncode, word in result.stderr) == (code, True), (options, result.stderr)
        assert "a short key" not in result.stderr
        if "--api-key-file" in options:
            said(result.stderr)
        assert "Traceback" not in result.stderr
        assert len(result.stderr.splitlines()) <= 5
