"""`tpuembed export --shards`: the plan and the report of whole models and of tables whose rows are split."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import tensorflow as tf
from click.testing import CliRunner

from tests.support.export import whole_model
from tests.support.export.in_process import exports_in_this_process
from tests.support.messages import refused, said
from tpuembed import export_saved_model
from tpuembed.errors import ConfigError
from tpuembed_cli.main import cli

pytestmark = pytest.mark.nightly

FACTORY = "tests.unit.cli.test_shards:build"


@pytest.fixture(scope="module", autouse=True)
def exports_here() -> Iterator[None]:
    with exports_in_this_process():
        yield


def build() -> object:
    return whole_model.build(names=["one", "sparse"])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tf.train.Checkpoint(model=build()).write(str(tmp_path_factory.mktemp("trained") / "ckpt")))


def run(*arguments: str) -> str:
    done = CliRunner().invoke(cli, ["export", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_dry_run_of_a_model_shows_the_front_and_the_parts(checkpoint: str, tmp_path: Path) -> None:
    options = (checkpoint, str(tmp_path / "s"), "--model", FACTORY, "--shards", "3", "--split", "a_mean=2", "--dry-run")
    assert run(*options).splitlines() == [
        "3 shards",
        "  shard-0: 480 B, 1 lookups of an example, tables b_mean",
        "  shard-1: 320 B, 1 lookups of an example, tables a_mean rows 0 to 20",
        "  shard-2: 320 B, 1 lookups of an example, tables a_mean rows 20 to 40",
        "  front: 0 B, 2 activations",
    ]
    plan = json.loads(run(*options, "--json"))
    assert plan["front"] == {"name": "front", "features": ["one", "sparse"], "tables": [], "bytes": 0}
    assert [shard["rows"] for shard in plan["shards"]] == [{}, {"a_mean": [0, 20]}, {"a_mean": [20, 40]}]
    assert not (tmp_path / "s").exists()


def test_an_export_without_shards_into_a_folder_of_shards_is_refused(checkpoint: str, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    run(checkpoint, str(folder), "--model", FACTORY, "--shards", "1")
    names = sorted(path.name for path in folder.iterdir())
    for more in ((), ("--dry-run",)):
        done = CliRunner().invoke(cli, ["export", checkpoint, str(folder), "--model", FACTORY, *more])
        assert done.exit_code == 1, done.output
        said(done.stderr)
    with refused(ConfigError):
        export_saved_model(checkpoint, folder, model=FACTORY)
    for command in ("describe", "verify", "stats", "versions"):
        done = CliRunner().invoke(cli, [command, str(folder)])
        assert done.exit_code == 1, done.output
        said(done.stderr)
    assert sorted(path.name for path in folder.iterdir()) == names
    export_saved_model(checkpoint, folder / "shard-0", model=FACTORY)  # an ordinary folder


def test_the_report_of_a_model_has_the_front(checkpoint: str, tmp_path: Path) -> None:
    options = (checkpoint, str(tmp_path / "s"), "--model", FACTORY, "--shards", "1")
    report = json.loads(run(*options, "--json"))
    assert report["front"]["features"] == ["one", "sparse"]
    assert sorted(report["reports"]) == ["front", "shard-0"]
    lines = run(*options, "--keep", "1").splitlines()
    assert lines == [
        f"{tmp_path / 's'}: version 2 of 1 shards",
        "  shard-0: 2 tables, 1.1 kB",
        "  front: the model's other layers, 0 B of tables",
    ]
    versions = {
        path.name: [each.name for each in path.iterdir()] for path in (tmp_path / "s").iterdir() if path.is_dir()
    }
    assert versions == {"shard-0": ["2"], "front": ["2"]}
