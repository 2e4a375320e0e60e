"""The command line: what is cheap stays cheap, and what is wrong is one line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tests.support.export.writers import stream_tables
from tests.support.serving.process import run_command
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding
from tpuembed.checkpoint import open_checkpoint
from tpuembed.export.plan.planner import plan_export
from tpuembed.export.run import source_of
from tpuembed.export.stream.engines import choose_engine
from tpuembed_cli.main import cli
from tpuembed_cli.options import SIZE

COMMAND = [sys.executable, "-m", "tpuembed_cli.main"]
_COMMANDS = ("demo", "describe", "diff", "export", "head", "relocate", "serve", "sparsecore-limits", "verify")


def _run_in_a_new_process(*arguments: Any) -> "subprocess.CompletedProcess[str]":
    """As a shell does: TensorFlow is not imported yet."""
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=120)


_HELP = "from tpuembed_cli.main import cli\ncli(['--help'], standalone_mode=False)"
_CHEAP = (
    "import tpuembed",
    _HELP,
    *(_HELP.replace("'--help'", f"'{command}', '--help'") for command in _COMMANDS),
    "from tpuembed import open_checkpoint, export_saved_model, TableConfig, ServingConfig",
)
_IMPORTED = """
import json, os, sys
found = {}
for code in json.loads(sys.argv[1]):
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        exec(code, {})
        os.write(write, json.dumps(sorted(sys.modules)).encode())
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        found[code] = json.load(pipe)
    assert os.waitpid(child, 0)[1] == 0, code
print(json.dumps(found))
"""
"""Runs each text in a child of an interpreter that has imported nothing else. Prints the modules that are there after it."""


@pytest.fixture(scope="module")
def imported() -> dict[str, list[str]]:
    command = [sys.executable, "-c", _IMPORTED, json.dumps(_CHEAP)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def test_every_command_has_help() -> None:
    for name, command in cli.commands.items() or []:
        assert command.help, name
    listed = run_command("--help").stdout
    for name in _COMMANDS:
        assert name in listed
        assert "Usage:" in run_command(name, "--help").stdout


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ckpt")
    layer = TPUEmbedding({"x": FeatureConfig(TableConfig(30, 4, "users"))}, optimizer="adam")
    return Path(tf.train.Checkpoint(layer=layer).write(str(folder / "ckpt-1")))


@pytest.mark.nightly
def test_a_quiet_export_prints_what_is_asked_for(checkpoint: Path, tmp_path: Path) -> None:
    done = _run_in_a_new_process("export", checkpoint, tmp_path / "m", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert json.loads(run_command("export", checkpoint, tmp_path / "m", "-q", "--json").stdout)["version"] == 2
    assert "users: 30 rows" in run_command("export", checkpoint, tmp_path / "m", "-q", "--dry-run").stdout


@pytest.mark.nightly
def test_a_verbose_export_shows_messages_of_tensorflow(checkpoint: Path, tmp_path: Path) -> None:
    done = _run_in_a_new_process("export", checkpoint, tmp_path / "m", "--verbose")
    assert (done.returncode, "absl::InitializeLog" in done.stderr) == (0, True)


@pytest.mark.nightly
def test_a_warning_is_one_line(checkpoint: Path, tmp_path: Path) -> None:
    """Here of what a killed export of something else has left."""
    left = tmp_path / "m" / ".staging-1-left"
    left.mkdir(parents=True)
    with open_checkpoint(str(checkpoint)) as opened:
        plan = plan_export(list(opened.tables().values()), storage={"*": "int8"})
        stream_tables(plan, source_of(opened), left / "tables", choose_engine("local", 1))
    done = run_command("export", checkpoint, tmp_path / "m")
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"Warning: MODEL_DIR {tmp_path / 'm'}: another unfinished export is in ")


def _truncated(checkpoint: Path, folder: Path) -> Path:
    for file in checkpoint.parent.glob("ckpt-1.*"):
        (folder / file.name).write_bytes(file.read_bytes())
    data = folder / "ckpt-1.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:100])
    return folder / "ckpt-1"


_SERVING = {
    "typo.yaml": "features:\n  x: {tabel: users}\n",
    "table.yaml": "features:\n  x: {table: user}\n",
    "rows.yaml": "features:\n  x: {table: users}\ntables:\n  users: {vocabulary_size: 31}\n",
    "dim.yaml": "features:\n  x: {table: users}\ntables:\n  users: {dim: 5}\n",
    "twice.yaml": "features:\n  x: {table: users}\n  x: {table: users}\n",
    "twice.json": '{"features": {"x": {"table": "users"}, "x": {"table": "users"}}}',
    "on.yaml": "features:\n  on: {table: users}\n",
    "empty.yaml": "features: {}\n",
    "broken.yaml": "features: [\n",
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{tmp}", "{tmp}/m"], "checkpoint"),
        (["{truncated}", "{tmp}/m"], "data-00000-of-00001"),
        (["{ckpt}", "{tmp}/m", "--serving-config", "{tmp}/typo.yaml"], "unknown key 'tabel'; did you mean 'table'"),
        (["{ckpt}", "{tmp}/m", "--serving-config", "{tmp}/table.yaml"], "did you mean 'users'"),
        (
            ["{ckpt}", "{tmp}/m", "--serving-config", "{tmp}/rows.yaml"],
            "31 in the serving_config, but 30 in the checkpoint",
        ),
        (
            ["{ckpt}", "{tmp}/m", "--serving-config", "{tmp}/dim.yaml"],
            "5 in the serving_config, but 4 in the checkpoint",
        ),
        (["{ckpt}", "{tmp}/m", "--serving-config", "{tmp}/twice.yaml"], "'x' is given twice"),
        (["{ckpt}", "{tmp}/m", "--serving-config", "{tmp}/twice.json"], "'x' is given twice"),
        (["{ckpt}", "{tmp}/m", "--serving-config", "{tmp}/on.yaml"], "True is not text. Put the name in quotes"),
        (["{ckpt}", "{tmp}/m", "--serving-config", "{tmp}/empty.yaml"], "features is empty"),
        (["{ckpt}", "{tmp}/m", "--serving-config", "{tmp}/broken.yaml"], "cannot be parsed"),
        (["{ckpt}", "{tmp}/m", "--max-memory", "8"], "--max-memory is 8"),
    ],
)
@pytest.mark.sampled(4)
def test_bad_input_is_one_line_and_exit_code_1(
    checkpoint: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    for name, text in _SERVING.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "cut").mkdir()
    places = {"tmp": tmp_path, "ckpt": checkpoint, "truncated": _truncated(checkpoint, tmp_path / "cut")}
    done = run_command("export", *(argument.format(**places) for argument in arguments))
    assert done.returncode == 1, done.stderr
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stdout == ""
    assert not list((tmp_path / "m").glob("[0-9]*"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--max-memory", "lots"],
        ["--version", str(2**63)],
        ["--max-memory", "9" * 400 + ".5GB"],
    ],
)
@pytest.mark.sampled(3)
def test_bad_usage_and_what_is_not_built_exit_with_2(checkpoint: Path, tmp_path: Path, arguments: list[str]) -> None:
    done = run_command("export", checkpoint, tmp_path / "m", *arguments)
    assert done.returncode == 2, done.stderr
    assert "Error:" in done.stderr
    assert not (tmp_path / "m").exists()


@pytest.mark.nightly
def test_what_a_factory_prints_stays_off_stdout(checkpoint: Path, tmp_path: Path) -> None:
    lines = ["import os", "print('python')", "os.write(1, b'descriptor')", "os.system('echo child')", "build = None"]
    (tmp_path / "noisy.py").write_text("\n".join(lines))
    code = f"import os, sys; os.chdir({str(tmp_path)!r}); from tpuembed_cli.main import main; main()"
    command = [sys.executable, "-c", code, "export", str(checkpoint), "m", "--model", "noisy:build", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert all(word in done.stderr for word in ("python", "descriptor", "child", "no callable 'build'"))


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("512MiB", 512 << 20), ("2GB", 2 * 10**9), ("1.5 KiB", 1536), ("3g", 3 << 30)]
)
def test_sizes(text: str, size: int) -> None:
    assert SIZE.convert(text, None, None) == size
