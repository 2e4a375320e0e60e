"""What REST says about models: their status, their signatures, and the version that a path chooses."""

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format  # type: ignore[import-untyped]
from tensorflow.core.protobuf import saved_model_pb2

from tests.support.contract_serve import Server, saved_models, shared_server

HALF = "half_plus_two"


@pytest.fixture(scope="module")
def models(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_models(pytestconfig, tmp_path_factory)


@pytest.fixture(scope="module")
def server(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Server:
    return shared_server(pytestconfig, tmp_path_factory)


def test_a_path_chooses_a_version(server: Server) -> None:
    """The model multiplies by its version."""
    choices = {"": 2, "/versions/1": 1, "/versions/2": 2, "/labels/stable": 1, "/labels/canary": 2}
    for choice, version in choices.items():
        reply = server.post(f"scale{choice}:predict", {"instances": [1.5]})
        assert (reply.status, reply.value) == (200, {"predictions": [1.5 * version]})
        assert reply.headers["x-model-version"] == str(version)


def test_status(server: Server) -> None:
    def listed(*versions: str) -> Any:
        good = {"state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
        return {"model_version_status": [{"version": version, **good} for version in versions]}

    assert server.get("/v1/models/scale").value == listed("2", "1")
    assert server.get("/v1/models/scale/versions/1").value == listed("1")
    assert server.get(f"/v1/models/{HALF}/versions/123").value == listed("123")


@pytest.mark.parametrize(("model", "version"), [("zoo", "3"), ("mapped", "1")])
def test_metadata_is_the_graphs(server: Server, models: Path, model: str, version: str) -> None:
    """Every signature of saved_model.pb, in protobuf's own JSON."""
    saved = saved_model_pb2.SavedModel.FromString((models / model / version / "saved_model.pb").read_bytes())
    wanted = json_format.MessageToDict(saved.meta_graphs[0], preserving_proto_field_name=True)["signature_def"]
    found = server.get(f"/v1/models/{model}/metadata").value
    assert found["model_spec"] == {"name": model, "signature_name": "", "version": str(int(version))}
    signatures = found["metadata"]["signature_def"]["signature_def"]
    assert sorted(signatures) == sorted(wanted)
    for name in wanted:
        for side in ("inputs", "outputs"):
            dtypes = {alias: info["dtype"] for alias, info in signatures[name][side].items()}
            assert dtypes == {
                alias: info.get("dtype", "DT_INVALID") for alias, info in wanted[name].get(side, {}).items()
            }
        assert signatures[name]["method_name"] == wanted[name].get("method_name", "")
    if model == "zoo":  # protobuf's JSON leaves out the names of dimensions, which are empty
        assert signatures["serving_default"]["inputs"]["ids"] == {
            "dtype": "DT_INT64",
            "tensor_shape": {"dim": [{"size": "-1", "name": ""}, {"size": "2", "name": ""}], "unknown_rank": False},
            "name": "serving_default_ids:0",
        }
