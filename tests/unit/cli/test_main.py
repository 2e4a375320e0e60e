"""`tpuembed export` on the command line: what it prints where, and what a serving_config may not say."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tests.support.contract_command import tpuembed
from tests.support.export.writers import stream_tables
from tests.support.serving.process import run_command
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding
from tpuembed.checkpoint import open_checkpoint
from tpuembed.export.plan.planner import plan_export
from tpuembed.export.run import source_of
from tpuembed.export.stream.engines import choose_engine
from tpuembed_cli.options import SIZE

COMMAND = [sys.executable, "-m", "tpuembed_cli.main"]


def _run_in_a_new_process(*arguments: Any) -> "subprocess.CompletedProcess[str]":
    """As a shell does: TensorFlow is not imported yet."""
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=120)


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


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("twice.yaml", "features:\n  x: {table: users}\n  x: {table: users}\n", "'x' is given twice"),
        ("twice.json", '{"features": {"x": {"table": "users"}, "x": {"table": "users"}}}', "'x' is given twice"),
        ("on.yaml", "features:\n  on: {table: users}\n", "True is not text. Put the name in quotes"),
        ("broken.yaml", "features: [\n", "cannot be parsed"),
    ],
)
def test_a_serving_config_that_means_something_else_is_one_line(
    checkpoint: Path, tmp_path: Path, file: str, text: str, message: str
) -> None:
    (tmp_path / file).write_text(text)
    assert message in tpuembed("export", checkpoint, tmp_path / "m", "--serving-config", tmp_path / file).refused()
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
