"""A process that ends, or hangs, costs its cell and no other."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tpu import stages
from tests.tpu.cells import COVERING
from tests.tpu.environments import Environment

WORKER = '''
import os, time
from tests.tpu.jobs import serve

def fragile(cell, folder):
    """Of a library that may abort."""
    if cell.optimizer == "Adagrad":
        os.write(2, b"F0000 a check failed")
        os.abort()
    if cell.optimizer == "Adam":
        raise ValueError("refused")
    if cell.optimizer == "FTRL":
        time.sleep(600)
    return {"said": cell.name}

serve(fragile)
'''


class Here(Environment):
    """This interpreter."""

    @property
    def python(self) -> Path:
        return Path(sys.executable)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> stages.Stage:
    (tmp_path / "fragile_worker.py").write_text(WORKER)
    monkeypatch.setattr(stages, "_START_SECONDS", 60)
    path = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).resolve().parents[2]}"}
    return stages.Stage("fragile", Here("here"), "fragile_worker", 0, path)


def cells(*optimizers: str) -> list[Any]:
    return [cell for cell in COVERING[:5] if cell.optimizer in optimizers]


def test_a_cell_that_ends_its_process(stage: stages.Stage, tmp_path: Path) -> None:
    chosen = cells("SGD", "Adagrad", "AdagradMomentum", "Adam")
    results = stages.run(stage, chosen, tmp_path, processes=1)
    assert [results[cell.name]["ok"] for cell in chosen] == [True, False, True, False]
    assert "fragile_worker ended with -6: F0000 a check failed" in results[chosen[1].name]["error"]
    assert results[chosen[3].name]["error"] == "ValueError: refused"
    assert stages.surviving(results, chosen) == [chosen[0], chosen[2]]


def test_a_cell_that_does_not_end(stage: stages.Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "_START_SECONDS", 3)
    [cell] = cells("FTRL")
    results = stages.run(stage, [cell], tmp_path)
    assert results[cell.name]["error"] == "fragile_worker: no end after 3 seconds"


STARTER = """
import subprocess, sys
from tests.tpu import child
subprocess.Popen(child.command(sys.executable, "endless"), env=child.variables())
sys.stdin.read()
"""


def test_a_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    """Killed outright, so that it can tell nobody."""
    started, ended = tmp_path / "started", tmp_path / "ended"
    os.mkfifo(started)
    os.mkfifo(ended)
    (tmp_path / "endless.py").write_text(
        f"import time\nended = open({str(ended)!r}, 'w')\nopen({str(started)!r}, 'w').close()\ntime.sleep(600)\n"
    )
    path = f"{tmp_path}:{Path(__file__).resolve().parents[2]}"
    command = [sys.executable, "-c", STARTER]
    silent = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
    starter = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, **silent)  # type: ignore[call-overload]
    with starter, ended.open() as reader, started.open():
        starter.kill()
        assert reader.read() == "", "no writer is left, so that reading ends"
