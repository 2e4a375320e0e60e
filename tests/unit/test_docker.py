"""The images are not built by tests; what can be checked without an engine is."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from tpuembed_cli.main import cli
from tpuembed_serving import ServerSettings

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
BIN = Path(sys.executable).parent


@pytest.mark.parametrize("name", ["server.Dockerfile", "tf-serving.Dockerfile"])
def test_dockerfiles_pass_hadolint(name: str) -> None:
    done = subprocess.run([BIN / "hadolint", DOCKER / name], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", [DOCKER / "smoke.sh", ROOT / ".ci" / "run"])
def test_scripts_pass_shellcheck(script: Path) -> None:
    done = subprocess.run([BIN / "shellcheck", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_everything_that_is_copied_exists() -> None:
    for line in (DOCKER / "server.Dockerfile").read_text().splitlines():
        if line.startswith("COPY"):
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), source


def instructions(name: str) -> dict[str, list[str]]:
    """What the instructions of the server's Dockerfile say, each in one line."""
    found: dict[str, list[str]] = {}
    for line in (DOCKER / name).read_text().replace("\\\n", " ").splitlines():
        keyword, _, rest = line.partition(" ")
        if keyword.isupper():
            found.setdefault(keyword, []).append(rest.strip())
    return found


def test_the_image_is_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a container of SageMaker runs: the entry point with `serve`. And without arguments, as Vertex AI does."""
    found = instructions("server.Dockerfile")
    ((entry,), default) = (json.loads(found[keyword][0]) for keyword in ("ENTRYPOINT", "CMD"))
    served: list[ServerSettings] = []
    monkeypatch.setattr("tpuembed_serving.serve", served.append, raising=False)
    (tmp_path / "model").mkdir()
    variables = dict(text.split("=") for text in found["ENV"])
    for arguments in (["serve"], default):
        assert [entry, *arguments] == ["tpuembed", "serve"]
        done = CliRunner().invoke(cli, arguments, env={**variables, "SAGEMAKER_BASE_DIR": str(tmp_path)})
        assert done.exception is None, done.output
    assert {(one.host, one.rest_port) for one in served} == {("0.0.0.0", 8080)}
    plain = CliRunner().invoke(cli, ["serve", str(tmp_path)], env=variables)
    assert plain.exception is None
    assert (served[-1].host, served[-1].rest_port, served[-1].grpc_port) == ("0.0.0.0", 8501, 8500)
    assert set(found["EXPOSE"][0].split()) == {"8080", "8500", "8501"}


def test_the_health_check_of_the_image_runs() -> None:
    words = json.loads(instructions("server.Dockerfile")["HEALTHCHECK"][0].partition("CMD ")[2])
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = str(unused.getsockname()[1])
    environment = {"PATH": str(BIN), "TPUEMBED_SERVE_REST_PORT": port}
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert (done.returncode, "Connection refused" in done.stderr) == (1, True)


def test_compose_builds_both_over_one_folder() -> None:
    services: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    assert set(services) == {"tpuembed", "tf-serving"}
    for service in services.values():
        folder = (DOCKER / service["build"]["context"]).resolve()
        assert (folder / service["build"]["dockerfile"]).is_file()
    assert services["tpuembed"]["volumes"] == services["tf-serving"]["volumes"]
    assert services["tpuembed"]["command"] == ["serve", "/models/${MODEL_NAME:-model}"]
