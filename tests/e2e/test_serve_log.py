"""What an operator reads at the start of a server, and nothing of TensorFlow's."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.serving.models import save_scale
from tests.support.serving.process import ServerProcess, messages


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
