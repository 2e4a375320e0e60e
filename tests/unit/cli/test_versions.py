"""`tpuembed versions`, `prune`, `rollback`: what they print, and what they refuse."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.support.messages import said
from tests.support.serving.answering import answering
from tpuembed_cli.main import cli


@pytest.fixture
def model_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for number in (1, 2, 3, 4):
        (tmp_path / "rec" / str(number)).mkdir(parents=True)
        (tmp_path / "rec" / str(number) / "saved_model.pb").write_bytes(bytes(1000))
    (tmp_path / "models.config").write_text(
        f'model_config_list {{ config {{ name: "rec" base_path: "{tmp_path}/rec" model_platform: "tensorflow"'
        ' version_labels { key: "stable" value: 2 } } }'
    )
    return Path("rec")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def test_versions_lists_sizes_labels_and_uses(model_dir: Path) -> None:
    (model_dir / "4" / "saved_model.pb").unlink()
    (model_dir / "2" / "saved_model.pb").unlink()
    (model_dir / "2" / "saved_model.pb").hardlink_to(model_dir / "1" / "saved_model.pb")
    shown = run("versions", "rec", "--config", "models.config")
    assert shown.exit_code == 0
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.stdout.splitlines() if "│" in line]
    assert [[*row[:1], *row[2:]] for row in cells] == [
        ["1", "0 B", "1.0 kB", "-", "-", "-", "-"],
        ["2", "0 B", "1.0 kB", "-", "-", "stable", "label stable of rec in models.config"],
        ["3", "1.0 kB", "0 B", "-", "-", "-", "-"],
        ["4", "0 B", "0 B", "incomplete", "-", "-", "policy of rec in models.config"],
    ]
    assert shown.stderr == "Version 4 is incomplete: saved_model.pb is missing\n"
    listed = json.loads(run("versions", "rec", "--config", "models.config", "--json").stdout)
    assert [one["version"] for one in listed["versions"]] == [1, 2, 3, 4]
    assert listed["versions"][1]["labels"] == ["stable"]
    assert listed["versions"][1]["bytes_shared"] == 1000
    assert 0 <= listed["versions"][0]["age_seconds"] < 3600


def test_a_server_gets_the_first_key_of_the_file(model_dir: Path) -> None:
    status = '{"model_version_status": [{"version": "1", "state": "AVAILABLE"}]}'
    Path("keys").write_text("# of the team\nops: 0123456789abcdef\nfedcba9876543210\n")
    asked: list[tuple[str, str | None]] = []
    with answering(200, status, asked) as url:
        shown = run("prune", "rec", "--keep", "1", "--server", url, "--api-key-file", "keys").stdout
    assert shown.splitlines()[:2] == [f"keep 1: AVAILABLE at {url}", "keep 4: newest"]
    assert asked == [("/v1/models/rec", "Bearer 0123456789abcdef")]


def test_a_server_that_asks_for_a_key_is_told_from_others(model_dir: Path) -> None:
    with answering(401, "{}") as url:
        done = run("prune", "rec", "--server", url)
    assert done.exit_code == 1
    said(done.stderr)
    assert len(list(model_dir.iterdir())) == 4


@pytest.mark.parametrize(
    "arguments",
    [
        ("versions", "nowhere"),
        ("prune", "s3://bucket/rec"),
        ("prune", "rec", "--config", "nowhere"),
        ("prune", "rec", "--config", "models.config", "--model", "other"),
        ("prune", "rec", "--server", "127.0.0.1:8501"),
        ("prune", "rec", "--server", "http://127.0.0.1:1", "--api-key-file", "nowhere"),
        ("prune", "rec", "--server", "http://127.0.0.1:1", "--api-key-file", "empty"),
        ("rollback", "rec", "9"),
    ],
)
def test_refusals_change_nothing(model_dir: Path, arguments: tuple[str, ...]) -> None:
    Path("empty").write_text("# no key\n")
    done = run(*arguments)
    assert done.exit_code == 1
    said(done.stderr)
    assert len(list(model_dir.iterdir())) == 4
