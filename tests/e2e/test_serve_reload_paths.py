"""HandleReloadConfigRequest over gRPC: which folders a client may choose."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from tensorflow_serving.apis import model_management_pb2, model_service_pb2_grpc

from tests.support.messages import said
from tests.support.serving.doubles import wait_for
from tests.support.serving.models import save_scale
from tests.support.serving.process import ServerProcess

OK, DENIED = grpc.StatusCode.OK, grpc.StatusCode.PERMISSION_DENIED
LOGGED = 'logging_config { log_collector_config { type: "tfrecord" filename_prefix: "%s" } }'


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """models/rec and models/new, which a client may choose if it is rec's server; elsewhere/evil, which it may not."""
    folder = tmp_path_factory.mktemp("reload")
    save_scale(folder / "models" / "rec" / "1", 2.0)
    save_scale(folder / "models" / "new" / "1", 3.0)
    save_scale(folder / "elsewhere" / "evil" / "9", 9.0)
    return folder


@pytest.fixture(scope="module", params=[(), ("--workers", "2")])
def server(root: Path, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    with ServerProcess(root / "models" / "rec", root / "rec.log", "--grpc-port", "0", *request.param) as running:
        wait_for(lambda: running.request("GET", "/readyz")[0] == 200)
        yield running


def config(*models: tuple[str, Any], more: str = "") -> str:
    return "".join(
        f'config {{ name: "{name}" base_path: "{path}" model_platform: "tensorflow" {more} }}' for name, path in models
    )


def reload(server: ServerProcess, models: str) -> tuple[grpc.StatusCode, str]:
    from google.protobuf import text_format  # type: ignore[import-untyped]

    request = model_management_pb2.ReloadConfigRequest()
    text_format.Parse(f"model_config_list {{ {models} }}", request.config)
    with grpc.insecure_channel(server.grpc_address) as channel:
        call = model_service_pb2_grpc.ModelServiceStub(channel).HandleReloadConfigRequest
        try:
            call(request, timeout=120)
        except grpc.RpcError as error:
            return error.code(), error.details()
    return OK, ""


def predict(server: ServerProcess, model: str) -> Any:
    status, body = server.request("POST", f"/v1/models/{model}:predict", '{"instances": [1.0]}')
    return json.loads(body)["predictions"][0] if status == 200 else status


def statuses(server: ServerProcess, model: str) -> Sequence[dict[str, Any]]:
    status, body = server.request("GET", f"/v1/models/{model}")
    found: list[dict[str, Any]] = json.loads(body)["model_version_status"] if status == 200 else []
    return found


def test_a_link_that_leads_outside_later_is_not_followed(server: ServerProcess, root: Path) -> None:
    link = root / "models" / "swapped"
    link.unlink(missing_ok=True)
    link.symlink_to(root / "models" / "new")
    rec = ("rec", root / "models" / "rec")
    assert reload(server, config(rec, ("swapped", link))) == (OK, "")
    link.unlink()
    link.symlink_to(root / "elsewhere" / "evil")
    wait_for(lambda: len(statuses(server, "swapped")) == 2)
    newest, before = statuses(server, "swapped")
    assert (newest["version"], newest["state"], newest["status"]["error_code"]) == ("9", "END", "PERMISSION_DENIED")
    assert f"base_path {link} is outside the folders" in newest["status"]["error_message"]
    assert (before["version"], before["state"], predict(server, "swapped")) == ("1", "AVAILABLE", 3.0)
    assert reload(server, config(rec, ("swapped", link)))[0] is DENIED
    assert reload(server, config(rec)) == (OK, "")


def test_a_client_does_not_choose_where_requests_are_logged(server: ServerProcess, root: Path) -> None:
    rec = ("rec", root / "models" / "rec")
    code, text = reload(server, config(rec, more=LOGGED % (root / "elsewhere" / "log")))
    assert code is DENIED
    assert text.startswith(f"model rec: filename_prefix is {root}/elsewhere/log. A reload may only log to a prefix of")
    assert predict(server, "rec") == 2.0


def test_where_others_can_write_only_the_folders_of_the_start_are_allowed(root: Path) -> None:
    (root / "shared").mkdir()
    (root / "shared").chmod(0o1777)
    (root / "models" / "theirs").symlink_to(root / "shared" / "theirs")
    save_scale(root / "shared" / "own" / "1", 4.0)
    save_scale(root / "shared" / "theirs" / "1", 5.0)
    (root / "models.config").write_text(
        f"model_config_list {{ {config(('own', root / 'shared' / 'own'), more=LOGGED % (root / 'log'))} }}"
    )
    with ServerProcess(None, root / "own.log", "--config", str(root / "models.config"), "--grpc-port", "0") as server:
        wait_for(lambda: server.request("GET", "/readyz")[0] == 200)
        for refused in (
            config(("theirs", root / "shared" / "theirs")),
            config(("own", root / "shared" / "own"), more=LOGGED % (root / "elsewhere" / "log")),
        ):
            code, text = reload(server, refused)
            assert code is DENIED
            said(text)
        again = config(
            ("own", root / "shared" / "own"), ("twice", root / "shared" / "own"), more=LOGGED % (root / "log")
        )
        assert reload(server, again) == (OK, "")
        assert (predict(server, "own"), predict(server, "twice")) == (4.0, 4.0)
