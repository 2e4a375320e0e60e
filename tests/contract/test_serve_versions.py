"""Versions that appear, fail, disappear and come back; policies, labels, and configs that change, as in TensorFlow Serving."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import keras
import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import text_format  # type: ignore[import-untyped]
from tensorflow_serving.apis import model_management_pb2

from tests.support.contract_load import Clients
from tests.support.contract_serve import Server, config_of, eventually
from tests.support.messages import said
from tests.support.serving.models import save_scale
from tests.support.serving.process import run_command
from tpuembed import export_saved_model

CODES = grpc.StatusCode
ALL = "model_version_policy { all {} }"
GOOD = {"error_code": "OK", "error_message": ""}


def labelled(**labels: int) -> str:
    return " ".join(f'version_labels {{ key: "{label}" value: {version} }}' for label, version in labels.items())


START: Mapping[str, str] = {
    "rec": "model_version_policy { latest { num_versions: 2 } }" + labelled(stable=2),
    "old": "model_version_policy { specific { versions: 1 } }",
    "every": ALL,
    "swaps": "",
    "table": "",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models that multiply by their version, and an export of a table of version numbers."""
    folder = tmp_path_factory.mktemp("versions")
    for model, versions in {"rec": (1, 2, 3), "old": (1, 2), "every": (4, 7), "swaps": (1,), "beside": (5,)}.items():
        for version in versions:
            save_scale(folder / model / str(version), float(version))
    save_scale(folder.with_name("elsewhere") / "evil" / "1", 9.0)
    for version in (1, 2):
        rows = tf.Variable(np.full((5, 2), version, np.float32), name="items")
        path = tf.train.Checkpoint(items=rows).write(str(folder / f"checkpoint{version}"))
        features = {"features": {"item": {"table": "items", "input": "id"}}}
        export_saved_model(path, folder / "table", serving_config=features, workers=1)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    config = folder / "models.config"
    config.write_text(config_of(folder, START), encoding="utf-8")
    with Server(None, folder / "log", "--config", str(config), "--config-poll-seconds", "0.05") as running:
        eventually(running.is_ready)
        yield running
        assert running.stop() == 0
    assert "Traceback" not in running.log


def states(server: Server, model: str) -> dict[str, str]:
    reply = server.get(f"/v1/models/{model}")
    found = reply.value["model_version_status"] if reply.status == 200 else []
    return {one["version"]: one["state"] for one in found}


def wait_for_states(server: Server, model: str, wanted: Mapping[int, str]) -> None:
    eventually(
        lambda: {str(version): state for version, state in wanted.items()}.items() <= states(server, model).items()
    )


def factor(server: Server, target: str) -> Any:
    """What the model multiplies by, or the status and text of an error."""
    reply = server.post(f"{target}:predict", {"instances": [1.0]})
    return reply.value["predictions"][0] if reply.status == 200 else (reply.status, reply.error)


def publish(folder: Path, model: str, version: int) -> None:
    """By one rename."""
    save_scale(folder / model / f".staging-{version}", float(version))
    (folder / model / f".staging-{version}").rename(folder / model / str(version))


def reload(server: Server, text: str) -> tuple[Any, str]:
    """The code and the text of HandleReloadConfigRequest."""
    request = model_management_pb2.ReloadConfigRequest()
    text_format.Parse(text, request.config)
    try:
        response = server.models.HandleReloadConfigRequest(request, timeout=120)
    except grpc.RpcError as error:
        return error.code(), error.details()
    assert (response.status.error_code, response.status.error_message) == (0, "")
    return CODES.OK, ""


def test_policies_and_labels(server: Server) -> None:
    assert states(server, "rec") == {"3": "AVAILABLE", "2": "AVAILABLE"}
    assert states(server, "old") == {"1": "AVAILABLE"}
    assert states(server, "every") == {"7": "AVAILABLE", "4": "AVAILABLE"}
    targets = {"rec": 3, "rec/versions/2": 2, "rec/labels/stable": 2, "old": 1, "every/versions/4": 4, "every": 7}
    assert {target: factor(server, target) for target in targets} == targets
    assert factor(server, "rec/versions/1") == (404, "Servable not found for request: Specific(rec, 1)")


def test_swaps_lose_no_request_and_never_go_back(server: Server, folder: Path) -> None:
    """Of three versions that appear one after the other, over REST and gRPC."""
    with Clients(server, "swaps", rest=4, grpc=2) as clients:
        eventually(lambda: clients.have_all(1))
        for version in (2, 3):
            publish(folder, "swaps", version)
            wait_for_states(server, "swaps", {version: "AVAILABLE", version - 1: "END"})
        done = clients.answered
        eventually(lambda: clients.answered > done + 50)
    assert clients.lost == {}
    for factors in clients.factors:
        assert factors == sorted(factors)
        assert set(factors) <= {1.0, 2.0, 3.0}
        assert factors[0] == 1.0
    assert {factors[-1] for factors in clients.factors} == {3.0}


@pytest.mark.parametrize("damage", ["no graph", "a graph that is none", "half of the variables", "no index"])
def test_a_broken_version_is_named_and_the_old_one_serves(server: Server, folder: Path, damage: str) -> None:
    number = {"no graph": 50, "a graph that is none": 51, "half of the variables": 52, "no index": 53}[damage]
    staging = folder / "swaps" / f".staging-{number}"
    save_scale(staging, float(number))
    if damage == "no graph":
        (staging / "saved_model.pb").unlink()
    elif damage == "a graph that is none":
        (staging / "saved_model.pb").write_bytes(b"no graph")
    elif damage == "no index":
        (staging / "variables" / "variables.index").unlink()
    else:
        (data,) = (staging / "variables").glob("variables.data-*")
        data.write_bytes(data.read_bytes()[:2])
    staging.rename(folder / "swaps" / str(number))
    eventually(lambda: states(server, "swaps").get(str(number)) == "END")
    (status,) = server.get(f"/v1/models/swaps/versions/{number}").value["model_version_status"]
    assert status["status"]["error_code"] != "OK"
    word = {"no graph": "saved_model.pb is missing", "no index": "variables.index is missing"}.get(damage, "")
    assert status["status"]["error_message"]
    assert word in status["status"]["error_message"]
    assert str(folder) not in status["status"]["error_message"]
    assert factor(server, "swaps") == 3.0
    assert server.is_ready()
    shutil.rmtree(folder / "swaps" / str(number))


def test_a_version_that_a_session_cannot_run_is_never_ready(server: Server, folder: Path) -> None:
    """It was, and each request failed. TensorFlow's own save of a Keras 3 model is such a version; `Model.export` is not."""
    inputs = keras.Input((2,), name="x")
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dense(3)(inputs)))
    tf.saved_model.save(model, str(folder / "beside-90"))
    (folder / "beside-90").rename(folder / "swaps" / "90")
    eventually(lambda: states(server, "swaps").get("90") == "END")
    (failed,) = [one for one in server.get("/v1/models/swaps").value["model_version_status"] if one["version"] == "90"]
    assert failed["status"]["error_code"] == "FAILED_PRECONDITION"
    said(failed["status"]["error_message"])
    assert factor(server, "swaps") in {1.0, 3.0}
    model.export(folder / "beside-91", verbose=False)
    (folder / "beside-91").rename(folder / "swaps" / "91")
    eventually(lambda: states(server, "swaps").get("91") == "AVAILABLE")
    ((found,),) = server.post("swaps:predict", {"instances": [[1.0, 2.0]]}).value["predictions"]
    np.testing.assert_allclose(found, model(np.array([[1.0, 2.0]]))[0, 0], rtol=1e-5)
    for version in ("90", "91"):
        shutil.rmtree(folder / "swaps" / version)


def test_a_version_that_disappears_is_unloaded(server: Server, folder: Path) -> None:
    """Of two that are served, the newer one."""
    shutil.rmtree(folder / "every" / "7")
    eventually(lambda: states(server, "every") == {"7": "END", "4": "AVAILABLE"})
    assert factor(server, "every") == 4.0
    assert factor(server, "every/versions/7") == (404, "Servable not found for request: Specific(every, 7)")


def test_a_rollback_is_served(server: Server, folder: Path) -> None:
    """It publishes version 1 again, as version 3."""
    assert server.post("table:predict", {"instances": [0]}).value == {"predictions": [[2.0, 2.0]]}
    result = run_command("rollback", folder / "table")
    assert result.returncode == 0, result.stderr
    eventually(lambda: states(server, "table").get("3") == "AVAILABLE")
    reply = server.post("table:predict", {"instances": [0]})
    assert (reply.value, reply.headers["x-model-version"]) == ({"predictions": [[1.0, 1.0]]}, "3")


def test_a_config_file_is_followed(server: Server, folder: Path) -> None:
    """A broken one changes nothing."""
    config = folder / "models.config"
    config.write_text("model_config_list { config { nam", encoding="utf-8")
    eventually(lambda: "models.config" in server.log)
    assert factor(server, "old") == 1.0
    config.write_text(config_of(folder, {"rec": ALL, "beside": ""}), encoding="utf-8")
    eventually(
        lambda: states(server, "rec").get("1") == "AVAILABLE" and states(server, "beside").get("5") == "AVAILABLE"
    )
    eventually(lambda: states(server, "old") == {"1": "END"})
    assert factor(server, "old")[0] == 404
    assert (factor(server, "rec"), factor(server, "rec/versions/1"), factor(server, "beside")) == (3.0, 1.0, 5.0)


def test_a_reload_over_grpc_is_a_full_replacement(server: Server, folder: Path) -> None:
    """And moves labels to versions that are loaded."""
    both = {"rec": f"{ALL} {labelled(stable=1, canary=3)}", "old": ""}
    assert reload(server, config_of(folder, both)) == (CODES.OK, "")
    assert [factor(server, f"rec/labels/{label}") for label in ("stable", "canary")] == [1.0, 3.0]
    assert factor(server, "old") == 2.0
    assert factor(server, "beside") == (404, "Servable not found for request: Latest(beside)")
    assert reload(server, config_of(folder, {"rec": f"{ALL} {labelled(stable=3)}"})) == (CODES.OK, "")
    assert factor(server, "rec/labels/stable") == 3.0
    assert factor(server, "rec/labels/canary") == (400, "Unrecognized servable version label: canary")
    assert states(server, "old")["2"] == "END"


def test_a_reload_that_is_refused_changes_nothing(server: Server, folder: Path) -> None:
    before = states(server, "rec")
    text = "Request to assign label to version 9 of model rec, which is not currently available for inference"
    assert reload(server, config_of(folder, {"rec": ALL + labelled(stable=9)})) == (CODES.FAILED_PRECONDITION, text)
    code, text = reload(server, config_of(folder, {"rec": ALL}).replace(f"{folder}/", ""))
    assert (code, text) == (
        CODES.INVALID_ARGUMENT,
        "Expected model rec to have an absolute path or URI; got base_path()=rec",
    )
    twice = config_of(folder, {"rec": ALL}).removesuffix("}")
    twice += config_of(folder, {"rec": ALL}).removeprefix("model_config_list {")
    text = "Illegal to list model rec multiple times in config list"
    assert reload(server, twice) == (CODES.INVALID_ARGUMENT, text)
    assert states(server, "rec") == before
    assert factor(server, "rec/labels/stable") == 3.0


def test_a_reload_names_folders_beside_the_models_only(server: Server, folder: Path) -> None:
    """Below the parent of the base paths of --config. Links are followed."""
    elsewhere = folder.with_name("elsewhere")
    (folder / "link").symlink_to(elsewhere / "evil")
    models = config_of(folder, {"rec": ALL + labelled(stable=3), "evil": ""})
    for path in (elsewhere / "evil", f"{folder}/../elsewhere/evil", folder, "/", folder / "link"):
        code, text = reload(server, models.replace(f'"{folder}/evil"', f'"{path}"'))
        assert code is CODES.PERMISSION_DENIED, path
        assert "evil" in text
        assert factor(server, "evil") == (404, "Servable not found for request: Latest(evil)")
        assert factor(server, "rec/labels/stable") == 3.0


def test_a_reload_names_what_does_not_load(server: Server, folder: Path) -> None:
    """The other models are served, but the server is not ready until the config has no such model."""
    (folder / "broken" / "8").mkdir(parents=True)
    (folder / "broken" / "8" / "saved_model.pb").write_bytes(b"no graph")
    code, text = reload(server, config_of(folder, {"beside": "", "broken": ""}))
    assert code is CODES.UNKNOWN
    assert text.startswith("1 model(s) did not become available: {{{name: broken version: 8} due to error: ")
    assert states(server, "broken") == {"8": "END"}
    assert server.get("/readyz").status == 503
    assert factor(server, "beside") == 5.0
    assert reload(server, config_of(folder, {"beside": ""})) == (CODES.OK, "")
    assert server.get("/readyz").status == 200


def test_no_model_at_all(server: Server, folder: Path) -> None:
    assert reload(server, "model_config_list {}") == (CODES.OK, "")
    assert factor(server, "rec") == (404, "Servable not found for request: Latest(rec)")
    assert reload(server, config_of(folder, {"beside": ""})) == (CODES.OK, "")
    assert factor(server, "beside") == 5.0
