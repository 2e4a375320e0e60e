"""What an operator reads: the start, each version, how to use the server, and nothing of TensorFlow's."""

import contextlib
import json
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving.doubles import wait_for
from tests.support.serving.models import save_scale
from tests.support.serving.process import SCRIPT, START_SECONDS, ServerProcess, messages
from tests.support.serving.served import free_port

Entries = Callable[[str], list[dict[str, Any]]]


@contextlib.contextmanager
def start(*options: str, log: Path) -> Iterator[Entries]:
    """A server whose log is JSON. Yields what waits for a message, and returns all entries until then."""

    def entries(message: str) -> list[dict[str, Any]]:
        deadline = time.monotonic() + START_SECONDS
        while True:
            text = log.read_text()
            found: list[dict[str, Any]] = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
            if any(message in entry["message"] for entry in found):
                return found
            assert time.monotonic() < deadline, text
            time.sleep(0.05)

    with log.open("wb") as stderr, subprocess.Popen([str(SCRIPT), *options], stderr=stderr) as process:
        try:
            yield entries
        finally:
            process.terminate()


def is_ready(port: int) -> bool:
    with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz"):
        return True
    return False


@pytest.mark.nightly
@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_start_of_a_server(workers: str, tmp_path: Path) -> None:
    save_scale(tmp_path / "scale" / "1", 3.0)
    with ServerProcess(tmp_path / "scale", tmp_path / "log", "--workers", workers, fresh=True) as server:
        server.announced("docs: ")
        assert server.request("GET", "/readyz")[0] == 200
        lines = messages(server.log)
        assert len(lines) == server.log.count("\n"), "every line has a time and a level"
        url = f"http://127.0.0.1:{server.port}"
        seconds = next(line.split()[-2] for line in lines if "available" in line)
        assert sorted(lines) == sorted(
            [
                f"serving scale at {url}/v1/models/scale",
                f"loading scale from {tmp_path}/scale/1",
                f"model scale version 1 is available after {seconds} s",
                f"ready: {url}/v1/models/scale",
                f"""try: curl -d '{{"instances": [{{"x": 0.0}}]}}' {url}/v1/models/scale:predict""",
                f"docs: {url}/docs",
            ]
        )
        assert lines[-3].startswith("ready: ")
        command = server.announced("try: ")
        done = subprocess.run(f"{command} --silent --fail", shell=True, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout) == {"predictions": [0.0]}
        status, page = server.request("GET", server.announced("docs: ").removeprefix(url))
        assert (status, b"swagger" in page) == (200, True)


@pytest.mark.nightly
def test_json_and_a_failing_model(tmp_path: Path) -> None:
    """Nothing says that the server is ready, and the failure is one line."""
    (tmp_path / "bad" / "1").mkdir(parents=True)
    (tmp_path / "bad" / "1" / "saved_model.pb").write_bytes(b"no graph")
    config = tmp_path / "models.config"
    save_scale(tmp_path / "scale" / "1", 3.0)
    models = "".join(
        f'config {{ name: "{name}" base_path: "{tmp_path}/{name}" model_platform: "tensorflow" }}'
        for name in ("bad", "scale")
    )
    config.write_text(f"model_config_list {{ {models} }}")
    options = (
        "serve",
        "--config",
        str(config),
        "--rest-port",
        "0",
        "--no-grpc",
        "--log-format",
        "json",
        "--workers",
        "2",
    )
    with start(*options, log=tmp_path / "log") as entries:
        found = entries("scale version 1 is available")
        (failure,) = [entry for entry in found if entry["level"] == "ERROR"]
        assert failure["message"].startswith("model bad version 1 cannot be loaded: ")
        assert (failure["model"], failure["version"]) == ("bad", 1)
        (loaded,) = [entry for entry in found if "seconds" in entry]
        assert (loaded["model"], loaded["version"], loaded["seconds"] > 0) == ("scale", 1, True)
        assert not [entry for entry in found if entry["message"].startswith(("ready", "try", "docs"))]
        assert all(re.fullmatch(r"[\d-]{10}T[\d:]{8}\.\d{3}Z", entry["time"]) for entry in found)


@pytest.mark.nightly
def test_quiet_and_verbose(tmp_path: Path) -> None:
    save_scale(tmp_path / "scale" / "1", 3.0)
    for flag, shown in (("--quiet", False), ("--verbose", True)):
        options = ("serve", str(tmp_path / "scale"), "--rest-port", str(port := free_port()), "--no-grpc", flag)
        with start(*options, log=tmp_path / "log"):
            wait_for(lambda port=port: is_ready(port))  # type: ignore[misc]
            text = (tmp_path / "log").read_text()
            assert ("is available" in text) is shown
            assert ("cpu_feature_guard" in text) is shown
            assert bool(text) is shown
