"""What a shards.yaml may say."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from tests.support.messages import refused
from tpuembed.errors import ConfigError
from tpuembed_cli.main import cli
from tpuembed_serving import ServerSettings
from tpuembed_serving.core.shards_file import Shard, ShardsFile

GOOD: dict[str, Any] = {
    "format": 1,
    "model": "rec",
    "shards": [{"name": "a", "address": "host:1", "tables": ["t"]}, {"name": "b", "address": "dns:///b:2"}],
    "padding": {"ids": -1, "names": "", "weights": 0},
}


def test_a_file_names_servers(tmp_path: Path) -> None:
    path = tmp_path / "shards.yaml"
    path.write_text(yaml.safe_dump(GOOD))
    found = ShardsFile.read(path)
    assert found.shards == (Shard(name="a", address="host:1"), Shard(name="b", address="dns:///b:2"))
    assert (found.model, dict(found.padding)) == ("rec", GOOD["padding"])
    settings = ServerSettings.for_shards(path)
    assert ([model.name for model in settings.models], settings.shards) == (["rec"], found)


def test_a_shard_may_be_in_redis(tmp_path: Path) -> None:
    path = tmp_path / "shards.yaml"
    path.write_text(yaml.safe_dump({**GOOD, "shards": [REDIS, GOOD["shards"][0]]}))
    assert ShardsFile.read(path).shards == (Shard(name="r", url="redis://host:1"), Shard(name="a", address="host:1"))


REDIS = {"kind": "redis", "name": "r", "url": "redis://host:1"}
WRONG: dict[str, Any] = {
    "redis with an address": {**GOOD, "shards": [{**REDIS, "address": "host:1"}]},
    "redis without a URL": {**GOOD, "shards": [{**REDIS, "url": ""}]},
    "another kind": {**GOOD, "shards": [{**REDIS, "kind": "memcached"}]},
    "no YAML": "{",
    "no mapping": "[1]",
    "format": {**GOOD, "format": 2},
    "unknown key": {**GOOD, "shard": []},
    "model": {**GOOD, "model": 7},
    "no shards": {**GOOD, "shards": []},
    "shard": {**GOOD, "shards": ["host:1"]},
    "unknown key of a shard": {**GOOD, "shards": [{"name": "a", "address": "host:1", "port": 2}]},
    "no address": {**GOOD, "shards": [{"name": "a"}]},
    "a name twice": {**GOOD, "shards": [GOOD["shards"][0], GOOD["shards"][0]]},
    "padding": {**GOOD, "padding": {"ids": None}},
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_named(tmp_path: Path, what: str) -> None:
    path = tmp_path / "shards.yaml"
    path.write_text(WRONG[what] if isinstance(WRONG[what], str) else yaml.safe_dump(WRONG[what]))
    with refused(ConfigError):
        ShardsFile.read(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with refused(ConfigError):
        ShardsFile.read(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--shards", "f", "--name", "x"],
        ["serve", "--shards", "f", "--target", "h:1"],
        ["serve", "--shards", "f", "models"],
        ["serve", "--shards", "f", "--prewarm"],
        ["export", "c", "m", "--shards", "2", "--shard-bytes", "1GB"],
        ["export", "c", "m", "--shards", "2", "--model", "a:b"],
        ["export", "c", "m", "--shards", "2", "--table", "t"],
        ["export", "c", "m", "--shard-bytes", "1GB", "--base", "latest"],
        ["export", "c", "m", "--ids-per-list", "a=2"],
        ["export", "c", "m", "--shards", "2", "--ids-per-list", "a=0"],
    ],
)
def test_options_that_contradict_are_named(arguments: list[str]) -> None:
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 2
    assert "Error:" in done.output
    assert any(flag in done.output for flag in ("--shards", "--ids-per-list"))
