"""`tpuembed export` killed at its commit: nothing is published, no process is left, and the same command resumes it."""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.contract_command import json_of
from tests.support.contract_lookups import Lookups, answers
from tests.support.serving.process import SCRIPT, Fork


def _die_at_the_commit() -> None:
    """Kill this process in the moment in which it renames something to a version. Python announces each rename."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename" and Path(os.fsdecode(arguments[1])).name.isdigit():
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def start(lookups: Lookups, folder: Path, before: Callable[[], None] | None = None) -> Fork:
    """Start an export of one table to `folder`/m."""
    (folder / "serving.json").write_text(json.dumps({"features": {"user": {"table": "users", "input": "id"}}}))
    for name in ("out", "err"):
        (folder / name).touch()
    command = [str(SCRIPT), "export", str(lookups.prefix), str(folder / "m")]
    return Fork([*command, "--serving-config", str(folder / "serving.json")], folder / "err", folder / "out", before)


def children(pid: int) -> list[str]:
    """Return the processes that a process has started, with theirs."""
    found = [pid for file in Path(f"/proc/{pid}/task").glob("*/children") for pid in file.read_text().split()]
    return found + [pid for child in found for pid in children(int(child))]


def wait_for(condition: Callable[[], Any]) -> Any:
    """Return the first value that is true."""
    deadline = time.monotonic() + 60
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return value


@pytest.fixture(scope="module")
def killed(lookups: Lookups, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an export that was killed. `m` in it was to be its MODEL_DIR."""
    folder = tmp_path_factory.mktemp("killed")
    process = start(lookups, folder, _die_at_the_commit)
    assert process.wait(120) == -signal.SIGKILL, (folder / "err").read_text()
    return folder


def assert_no_version(model_dir: Path) -> None:
    assert all(path.name.startswith(".") for path in model_dir.glob("*"))


def test_no_version_is_left_and_what_is_left_starts_with_a_dot(killed: Path) -> None:
    assert_no_version(killed / "m")
    assert list((killed / "m").iterdir())


def test_its_processes_end_with_it(lookups: Lookups, tmp_path: Path) -> None:
    process = start(lookups, tmp_path)
    pids = wait_for(lambda: children(process.pid))
    process.kill()
    process.wait(60)
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert_no_version(tmp_path / "m")


@pytest.mark.parametrize(("option", "reused"), [(None, 800), ("--restart", 0)])
def test_the_same_command_resumes_it(
    killed: Path, lookups: Lookups, tmp_path: Path, option: str | None, reused: int
) -> None:
    shutil.copytree(killed / "m", tmp_path / "m")
    options = ["--serving-config", str(killed / "serving.json"), "--workers", "1", *([option] if option else [])]
    report = json_of("export", lookups.prefix, tmp_path / "m", *options)
    assert (report["version"], report["bytes_written"], report["bytes_reused"]) == (1, 50 * 4 * 4, reused)
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["1"]
    found = answers(tmp_path / "m" / "1", {"user": [0, 49]})["user"]
    np.testing.assert_array_equal(found, lookups.rows["users"][[0, 49]])
