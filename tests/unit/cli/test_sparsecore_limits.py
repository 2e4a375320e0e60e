"""`tpuembed sparsecore-limits` as a user sees it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CONFIG = """
features:
  user: {table: users}
  watched: {table: videos}
tables:
  users: {vocabulary_size: 1000, dim: 16, optimizer: adam}
  videos: {vocabulary_size: 500, dim: 16, optimizer: adam, max_ids_per_partition: 3}
"""


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "config.yaml").write_text(CONFIG)
    rows = [f"{n},{n} {n + 4} {n + 8}" for n in range(32)]
    (tmp_path / "sample.csv").write_text("\n".join(["user,watched", *rows]))
    return [str(tmp_path / "config.yaml"), str(tmp_path / "sample.csv")]


def run(*arguments: str) -> Any:
    command = [sys.executable, "-m", "tpuembed_cli.main", "sparsecore-limits", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


@pytest.mark.nightly
def test_as_json(files: list[str]) -> None:
    done = run(*files, "--chips", "1", "--batch-size", "16", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    # 16 examples on 4 SparseCores are 4 each. Of 4 consecutive users 1 goes to each, and 3 of 12 videos to each.
    (stack,) = found["stacks"]
    assert (stack["stack"], stack["tables"]) == ("users_videos", ["users", "videos"])
    assert (stack["seen_ids"], stack["needed_ids"], stack["limit_ids"]) == (4, 5, 256 + 3)
    assert [table["max_ids_per_partition"] for table in found["tables"]] == [2, 4]
    assert [(table["padded_rows"], table["padded_dim"]) for table in found["tables"]] == [(1024, 16), (512, 16)]
    assert found["bytes_per_chip"] == (1024 + 512) * 16 * 4 * 3
    assert (found["steps"], found["warnings"]) == (2, [])


@pytest.mark.nightly
def test_as_tables_and_warnings(files: list[str]) -> None:
    done = run(*files, "--chips", "1", "--batch-size", "16", "--no-stacking", "--margin", "0.5")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "1 chips of 4 SparseCores, batches of 16: 294.9 kB per chip; 2 steps counted, margin 0.5"
    assert [line.split("│")[1].strip() for line in lines if "users" in line] == ["users", "users"]
    assert [line for line in lines if line.startswith("warning")] == [
        "warning: stack videos: 3 ids with the margin are 5. The limit is 3. Set max_ids_per_partition of videos: 5."
    ]
