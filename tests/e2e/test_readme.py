"""What the README tells a new user to do works as it is written."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.messages import said
from tests.support.serving.process import run_command
from tests.support.serving.served import free_port

ROOT = Path(__file__).parents[2]
GUARD = 'if __name__ == "__main__":\n'
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _run(folder: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=280, env=os.environ | {"PATH": path}
    )


def _blocks(language: str) -> str:
    """Return the lines of the quickstart's blocks of `language`, in order."""
    (section,) = re.findall(r"\n## Quickstart\n(.*?)\n## ", README, re.DOTALL)
    return "".join(re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL))


def _numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.\d+", text)]


@pytest.mark.timeout(600)
def test_the_quickstart_pasted_into_a_shell_prints_what_the_readme_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    script = _blocks("bash").replace(" &\n", " --no-grpc --rest-port 8501 &\n").replace("8501", str(free_port()))
    done = _run(tmp_path, "bash", "-ec", script + "wait\n")
    assert done.returncode == 0, done.stderr
    shown, printed = (re.sub(r"\s", "", re.sub(r"\d+\.\d+", "N", text)) for text in (_blocks("text"), done.stdout))
    assert printed == shown
    assert _numbers(done.stdout) == pytest.approx(_numbers(_blocks("text")), abs=1e-3)
    first, *_, served = _numbers(done.stdout)
    assert served == pytest.approx(first, abs=1e-4), "the score that the model had in training"
    assert "WARNING:tensorflow" not in done.stderr

    monkeypatch.chdir(tmp_path)
    export = ("export", "quickstart/ckpt", "again", "--model")
    shutil.copy(ROOT / "examples" / "quickstart.py", tmp_path)
    again = run_command(*export, "quickstart:build")
    assert again.returncode == 0, again.stderr
    functions, _, script = (ROOT / "examples" / "quickstart.py").read_text().partition(GUARD)
    (tmp_path / "unguarded.py").write_text(functions + textwrap.dedent(script))
    said(run_command(*export, "unguarded:build").stderr)


def test_the_example_is_the_file_beside_it() -> None:
    code = _blocks("python")
    assert (ROOT / "examples" / "quickstart.py").read_text().endswith(code)
    assert len([line for line in code.splitlines() if line]) <= 22
