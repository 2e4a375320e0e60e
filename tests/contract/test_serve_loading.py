"""What a server answers while its models load, and when its ports open."""

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tensorflow_serving.apis import get_model_metadata_pb2, get_model_status_pb2

from tests.support.contract_open_inference import SERVICE, message
from tests.support.serving.doubles import DoublingServable, FakeLoader, wait_for
from tests.support.serving.served import BODY, Served
from tpuembed_serving.core.servable import Servable

LOADING = "the server is loading. It answers once the first load of each configured model has ended. Check /readyz"
SERVICES = ("tensorflow.serving.PredictionService", "PredictionService", "ModelService")
REQUESTS = [
    ("POST", "/v1/models/{}:predict", BODY),
    ("POST", "/v1/models/{}/versions/1:predict", BODY),
    ("POST", "/v1/models/{}/labels/stable:predict", BODY),
    ("POST", "/v1/models/{}:classify", b'{"examples": [{}]}'),
    ("POST", "/v1/models/{}:regress", b'{"examples": [{}]}'),
    ("GET", "/v1/models/{}", None),
    ("GET", "/v1/models/{}/versions/1", None),
    ("GET", "/v1/models/{}/metadata", None),
]


class Loads:
    """Loads model `quick` at once; `slow` and `broken` when they may, and `broken` fails."""

    def __init__(self) -> None:
        self.go_on = {"slow": threading.Event(), "broken": threading.Event()}
        self.loading: list[str] = []

    def __call__(self, path: Path) -> Servable:
        name = path.parent.name
        self.loading.append(name)
        if name in self.go_on:
            assert self.go_on[name].wait(20)
        if name == "broken":
            raise OSError("no such disk")
        return DoublingServable()


def test_until_each_first_load_has_ended_every_model_is_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = Loads()
    models = ("quick", "slow", "broken")
    with Served(tmp_path, monkeypatch, loads, models=models) as served:
        for step, last in enumerate(("slow", "broken")):
            wait_for(lambda last=last: last in loads.loading)  # type: ignore[misc]
            wait_for(lambda: served.listens)
            assert served.ask("GET", "/healthz") == (200, {"status": "ok"})
            assert served.ask("GET", "/readyz") == (503, {"status": "not ready"})
            for name in (*models, "unknown"):
                for method, path, body in REQUESTS:
                    assert served.ask(method, path.format(name), body) == (503, {"error": LOADING}), path
                assert served.call(name) == ("UNAVAILABLE", LOADING)
            for service in ("", *SERVICES, "slow"):
                assert served.health(service) == "NOT_SERVING"
            states = {
                model["name"]: model["model_version_status"] for model in served.ask("GET", "/models")[1]["models"]
            }
            assert states["quick"][0]["state"] == "AVAILABLE"
            assert [one["state"] for one in states["slow"]] == [["LOADING"], ["AVAILABLE"]][step]
            loads.go_on[last].set()
        wait_for(lambda: served.ask("GET", "/v1/models/unknown")[0] == 404)
        for name in ("quick", "slow"):
            assert served.ask("POST", f"/v1/models/{name}:predict", BODY) == (200, {"predictions": [2, 4]})
            assert served.call(name)[0] == "OK"
        for name in ("broken", "unknown"):
            text = f"Servable not found for request: Latest({name})"
            assert served.ask("POST", f"/v1/models/{name}:predict", BODY) == (404, {"error": text})
            assert served.call(name) == ("NOT_FOUND", text)
        state = served.ask("GET", "/v1/models/broken")[1]["model_version_status"][0]
        assert (state["state"], state["status"]["error_code"]) == ("END", "UNKNOWN")
        assert served.ask("GET", "/readyz")[0] == 503, "a configured model has no version"
        assert [served.health(service) for service in SERVICES] == ["SERVING"] * 3
        assert [served.health(service) for service in ("", "broken", "quick")] == [
            "NOT_SERVING",
            "NOT_SERVING",
            "SERVING",
        ]


def test_retry_after_comes_with_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = Loads()
    with Served(tmp_path, monkeypatch, loads, models=("slow",)) as served:
        wait_for(lambda: served.listens)
        with contextlib.closing(served.connect()) as connection:
            connection.request("POST", "/v1/models/slow:predict", BODY)
            reply = connection.getresponse()
            assert (reply.status, reply.getheader("retry-after")) == (503, "1")
            reply.read()
            loads.go_on["slow"].set()
            wait_for(lambda: served.ask("GET", "/readyz")[0] == 200)
            connection.request("POST", "/v1/models/slow:predict", BODY)  # over the same connection
            assert connection.getresponse().status == 200


def test_other_methods_and_the_open_inference_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that loads is live, and not ready."""
    loads = Loads()
    status = get_model_status_pb2.GetModelStatusRequest()
    status.model_spec.name = "slow"
    metadata = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
    metadata.model_spec.name = "slow"
    x = {"name": "x", "shape": [1], "datatype": "INT64"}
    infer = message("ModelInferRequest")(model_name="slow", inputs=[{**x, "contents": {"int64_contents": [1]}}])
    with Served(tmp_path, monkeypatch, loads, models=("slow",)) as served, served.channel() as channel:

        def ready(name: str, request: Any) -> bool:
            call = channel.unary_unary(f"/{SERVICE}/{name}")
            return bool(any(call(request.SerializeToString(), timeout=30, wait_for_ready=True)))

        wait_for(lambda: served.listens)
        for method, request in (
            ("tensorflow.serving.ModelService/GetModelStatus", status),
            ("tensorflow.serving.PredictionService/GetModelMetadata", metadata),
            (f"{SERVICE}/ModelMetadata", message("ModelMetadataRequest")(name="slow")),
            (f"{SERVICE}/ModelInfer", infer),
        ):
            assert served.call(method=f"/{method}", data=request.SerializeToString()) == ("UNAVAILABLE", LOADING)
        model = message("ModelReadyRequest")(name="slow", version="1")
        assert served.send("POST", "/v2/models/slow/infer", {"inputs": [{**x, "data": [1]}]}).status == 503
        for is_loaded in (False, True):
            if is_loaded:
                loads.go_on["slow"].set()
                wait_for(lambda: served.is_ready)
            for target in ("/v2/health/ready", "/v2/models/slow/ready"):
                reply = served.send("GET", target)
                assert (reply.status, reply.value["ready"]) == (200 if is_loaded else 503, is_loaded)
            assert served.send("GET", "/v2/health/live").status == 200
            assert ready("ServerLive", message("ServerLiveRequest")())
            assert ready("ServerReady", message("ServerReadyRequest")()) is is_loaded
            assert ready("ModelReady", model) is is_loaded


def test_who_watches_grpc_health_hears_when_the_models_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = Loads()
    with Served(tmp_path, monkeypatch, loads, models=("slow",)) as served, served.channel() as channel:
        watches = [
            health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(service=service), timeout=60, wait_for_ready=True
            )
            for service in ("", *SERVICES)
        ]
        response = health_pb2.HealthCheckResponse
        assert [next(watch).status for watch in watches] == [response.NOT_SERVING] * 4
        loads.go_on["slow"].set()
        assert [next(watch).status for watch in watches] == [response.SERVING] * 4


def test_a_stop_while_models_load_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to finish, and no client to send elsewhere."""
    loads = Loads()
    with Served(tmp_path, monkeypatch, loads, models=("slow",), lame_duck_seconds=50.0) as served:
        wait_for(lambda: loads.loading == ["slow"])
        wait_for(lambda: served.listens)
        served.terminate()
        wait_for(lambda: not served.listens)
        loads.go_on["slow"].set()  # a load in progress is waited for
        served.wait(20)


def test_a_reload_leaves_what_is_loaded_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that comes later is loading in its own status alone."""
    loader = FakeLoader()
    entered, go_on = threading.Event(), threading.Event()
    with Served(tmp_path, monkeypatch, loader) as served:
        wait_for(lambda: served.listens)
        wait_for(lambda: served.ask("GET", "/readyz")[0] == 200)

        def during() -> None:
            entered.set()
            assert go_on.wait(60)

        loader.during = during
        (tmp_path / "m" / "2").mkdir()
        (tmp_path / "m" / "2" / "saved_model.pb").write_bytes(b"graph")
        assert entered.wait(60)
        assert served.ask("POST", "/v1/models/m:predict", BODY)[0] == 200
        statuses = served.ask("GET", "/v1/models/m")[1]["model_version_status"]
        assert {one["version"]: one["state"] for one in statuses} == {"1": "AVAILABLE", "2": "LOADING"}
        assert served.ask("GET", "/v1/models/unknown")[0] == 404
        assert served.ask("GET", "/readyz")[0] == 200
        go_on.set()
