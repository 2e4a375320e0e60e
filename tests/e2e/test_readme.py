"""What the README tells a new user to do works as it is written."""

import json
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.serving.process import ServerProcess

ROOT = Path(__file__).parents[2]
CLI = (sys.executable, "-m", "tpuembed_cli.main")
GUARD = 'if __name__ == "__main__":\n'
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _run(folder: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)


def test_the_example_trains_exports_and_serves(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "quickstart.py").write_text(code)
    done = _run(tmp_path, sys.executable, "quickstart.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "quickstart/recommender/1"

    (serve,) = re.findall(r"^    (tpuembed serve .*) &$", README, re.MULTILINE)
    (curl,) = re.findall(r"^    (curl .*)$", README, re.MULTILINE)
    _, _, model_dir, *_ = shlex.split(serve)
    _, _, body, url = shlex.split(curl)
    with ServerProcess(tmp_path / model_dir, tmp_path / "log") as server:
        server.wait_for(1)
        status, answer = server.request("POST", "/" + url.split("/", 3)[3], body)
    assert status == 200, answer
    assert len(json.loads(answer)["predictions"]) == 1

    export = (*CLI, "export", "quickstart/ckpt", "again", "--model")
    assert _run(tmp_path, *export, "quickstart:build").returncode == 0
    functions, _, script = code.partition(GUARD)
    (tmp_path / "unguarded.py").write_text(functions + textwrap.dedent(script))
    refused = _run(tmp_path, *export, "unguarded:build")
    assert "'unguarded' trains or runs a model while it is imported" in refused.stderr
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == ["1"]


def test_the_example_is_the_file_beside_it() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert (ROOT / "examples" / "quickstart.py").read_text().endswith(code)
    assert len([line for line in code.splitlines() if line]) <= 20


@pytest.mark.parametrize(
    "document",
    sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").rglob("*.md")),
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8")):
        assert (document.parent / target).exists(), target


def test_every_option_is_in_the_documents() -> None:
    from tpuembed_cli.main import cli

    texts = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("export", "serve")}
    for name, text in texts.items():
        command = cli.commands.get(name) or cli.get_command(None, name)  # type: ignore[arg-type]
        assert command is not None
        for parameter in command.params:
            for option in parameter.opts:
                other = f"--{option.removeprefix('--').replace('_', '-')}"  # TensorFlow Serving's spelling of a documented option
                if option.startswith("--"):
                    assert option in text or other in parameter.opts, f"docs/{name}.md lacks {option}"
