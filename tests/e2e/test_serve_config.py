"""A server of several models: policies, labels, a config that changes, and a reload over gRPC."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tensorflow_serving.apis import model_management_pb2, model_service_pb2_grpc

from tests.support.serving.doubles import wait_for
from tests.support.serving.models import save_scale
from tests.support.serving.process import ServerProcess


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Versions 1 to 3 of `rec`, 7 of `other`, 8 of `broken`."""
    folder = tmp_path_factory.mktemp("models")
    for version in (1, 2, 3):
        save_scale(folder / "rec" / str(version), float(version))
    save_scale(folder / "other" / "7", 7.0)
    (folder / "broken" / "8").mkdir(parents=True)
    (folder / "broken" / "8" / "saved_model.pb").write_bytes(b"no graph")
    return folder


def config(folder: Path, *models: str) -> str:
    texts = []
    for model in models:
        name, _, more = model.partition(" ")
        texts.append(f'config {{ name: "{name}" base_path: "{folder / name}" model_platform: "tensorflow" {more} }}')
    return "model_config_list { " + "\n".join(texts) + " }"


TWO = 'rec model_version_policy { latest { num_versions: 2 } } version_labels { key: "stable" value: 2 }'
ALL = "rec model_version_policy { all {} }"


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[ServerProcess]:
    path = models / "models.config"
    path.write_text(config(models, TWO, "other"), encoding="utf-8")
    options = ("--config", str(path), "--config-poll-seconds", "0.05", "--grpc-port", "0")
    with ServerProcess(None, models / "server.log", *options) as running:
        wait_for(lambda: running.request("GET", "/readyz")[0] == 200)
        running.wait_for(2)
        yield running


def ask(server: ServerProcess, target: str) -> Any:
    status, body = server.request("POST", f"/v1/models/{target}:predict", '{"instances": [1.0]}')
    answer = json.loads(body)
    return answer["predictions"][0] if status == 200 else (status, answer["error"])


def states(server: ServerProcess, name: str) -> dict[str, str]:
    status, body = server.request("GET", f"/v1/models/{name}")
    versions = json.loads(body)["model_version_status"] if status == 200 else []
    return {version["version"]: version["state"] for version in versions}


def reload(server: ServerProcess, text: str) -> tuple[grpc.StatusCode, str]:
    """The code and the text of HandleReloadConfigRequest."""
    from google.protobuf import text_format  # type: ignore[import-untyped]

    request = model_management_pb2.ReloadConfigRequest()
    text_format.Parse(text, request.config)
    with grpc.insecure_channel(server.grpc_address) as channel:
        try:
            response = model_service_pb2_grpc.ModelServiceStub(channel).HandleReloadConfigRequest(request, timeout=120)
        except grpc.RpcError as error:
            return error.code(), error.details()
    assert response.status.error_code == 0
    return grpc.StatusCode.OK, ""


def test_models_policies_and_labels(server: ServerProcess) -> None:
    assert states(server, "rec") == {"3": "AVAILABLE", "2": "AVAILABLE"}
    assert [ask(server, target) for target in ("rec", "rec/versions/2", "rec/labels/stable")] == [3.0, 2.0, 2.0]
    assert ask(server, "rec/versions/1") == (404, "Servable not found for request: Specific(rec, 1)")
    assert ask(server, "rec/labels/canary") == (400, "Unrecognized servable version label: canary")
    assert ask(server, "other") == 7.0
    assert ask(server, "third") == (404, "Servable not found for request: Latest(third)")


def test_a_reload_is_a_full_replacement(server: ServerProcess, models: Path) -> None:
    assert reload(server, config(models, ALL)) == (grpc.StatusCode.OK, "")
    assert states(server, "rec") == dict.fromkeys(("3", "2", "1"), "AVAILABLE")
    assert states(server, "other") == {"7": "END"}
    assert ask(server, "rec/labels/stable") == (400, "Unrecognized servable version label: stable")
    labels = " ".join(f'version_labels {{ key: "{label}" value: {n} }}' for label, n in (("stable", 1), ("canary", 3)))
    assert reload(server, config(models, f"{ALL} {labels}", "other")) == (grpc.StatusCode.OK, "")
    assert [ask(server, f"rec/labels/{label}") for label in ("stable", "canary")] == [1.0, 3.0]
    assert ask(server, "other") == 7.0


def test_a_reload_that_is_refused_changes_nothing(server: ServerProcess, models: Path) -> None:
    before = states(server, "rec")
    code, text = reload(server, config(models, f'{ALL} version_labels {{ key: "stable" value: 9 }}'))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert text == ("Request to assign label to version 9 of model rec, which is not currently available for inference")
    code, text = reload(server, config(models, "rec").replace(f"{models}/", ""))
    assert (code, text) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "Expected model rec to have an absolute path or URI; got base_path()=rec",
    )
    code, text = reload(server, config(models, "rec", "rec"))
    assert (code, text) == (
        grpc.StatusCode.INVALID_ARGUMENT, "Illegal to list model rec multiple times in config list"
    )  # fmt: skip
    assert states(server, "rec") == before
    assert ask(server, "rec/labels/stable") == 1.0


def test_a_reload_names_what_does_not_load(server: ServerProcess, models: Path) -> None:
    code, text = reload(server, config(models, ALL, "other", "broken"))
    assert code is grpc.StatusCode.UNKNOWN
    assert text.startswith("1 model(s) did not become available: {{{name: broken version: 8} due to error: ")
    assert states(server, "broken") == {"8": "END"}
    assert server.request("GET", "/readyz")[0] == 503
    assert ask(server, "other") == 7.0


def test_the_file_is_followed_and_a_broken_one_is_not(server: ServerProcess, models: Path) -> None:
    path = models / "models.config"
    path.write_text("model_config_list { config { nam", encoding="utf-8")
    wait_for(lambda: "not applied. The previous config stays in use" in server.log)
    assert ask(server, "other") == 7.0
    path.write_text(config(models, "rec model_version_policy { specific { versions: 1 } }"), encoding="utf-8")
    wait_for(lambda: states(server, "rec") == {"3": "END", "2": "END", "1": "AVAILABLE"})
    assert ask(server, "rec") == 1.0
    wait_for(lambda: states(server, "broken") == {"8": "END"} and server.request("GET", "/readyz")[0] == 200)


def test_no_model_at_all_and_then_one(server: ServerProcess, models: Path) -> None:
    assert reload(server, "model_config_list {}") == (grpc.StatusCode.OK, "")
    assert ask(server, "rec") == (404, "Servable not found for request: Latest(rec)")
    assert reload(server, config(models, "other")) == (grpc.StatusCode.OK, "")
    assert ask(server, "other") == 7.0


def test_a_stop_ends_with_0_and_no_traceback(server: ServerProcess) -> None:
    assert server.stop() == 0
    assert "Traceback" not in server.log
