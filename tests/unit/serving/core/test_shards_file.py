"""What a shards.yaml may say."""

from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml
from click.testing import CliRunner

from tests.support.messages import refused
from tpuembed.errors import ConfigError
from tpuembed_cli.main import cli
from tpuembed_serving import ServerSettings
from tpuembed_serving.core.shards_file import Shard, ShardsFile, ShardsTls
from tpuembed_serving.models.policies import LatestVersions

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


def test_a_file_says_how_shards_are_called_and_what_fails(tmp_path: Path) -> None:
    path, key = tmp_path / "shards.yaml", "the-key-of-this-test"
    more = {
        "on_failure": {"watched": "zeros", "user": "error"},
        "tls": {"ca": "ca.pem", "certificate": str(tmp_path / "own.pem"), "key": "own.key", "server_name": "rec"},
        "api_key_file": "key.txt",
    }
    path.write_text(yaml.safe_dump({**GOOD, **more}))
    (tmp_path / "key.txt").write_text(f"# of all shards\n{key}\n")
    authority = trustme.CA()
    own, other = authority.issue_cert("front.example"), authority.issue_cert("other.example")
    written = {"ca.pem": authority.cert_pem, "own.pem": own.cert_chain_pems[0], "own.key": own.private_key_pem}
    for name, blob in written.items():
        with refused(ConfigError):
            ShardsFile.read(path)
        (tmp_path / name).write_text("nothing in PEM format")
        with refused(ConfigError):
            ShardsFile.read(path)
        blob.write_to_path(tmp_path / name)
    found = ShardsFile.read(path)
    ca, certificate, own_key = (tmp_path / name for name in written)
    tls = ShardsTls(ca=ca, certificate=certificate, key=own_key, server_name="rec")
    assert (set(found.zeros), found.tls) == ({"watched"}, tls)
    assert found.secret_files == (*tls.files, tmp_path / "key.txt")
    secrets = found.secrets()
    assert (secrets.ca, secrets.certificate, secrets.key) == tuple(blob.bytes() for blob in written.values())
    assert secrets.api_key == key
    for shown in (repr(found), repr(secrets)):
        assert key not in shown
        assert "PRIVATE" not in shown
    other.private_key_pem.write_to_path(tmp_path / "own.key")
    with refused(ConfigError):  # that of another certificate
        found.secrets()


def test_a_front_loads_its_model_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, found = tmp_path / "shards.yaml", list[ServerSettings]()
    path.write_text(yaml.safe_dump({**GOOD, "format": 2, "front": "front"}))
    monkeypatch.setattr("tpuembed_serving.serve", found.append, raising=False)
    done = CliRunner().invoke(cli, ["serve", "--shards", str(path), "--prewarm", "--run-threads", "3", "--no-grpc"])
    assert done.exit_code == 0, done.output
    (settings,) = found
    assert (settings.prewarm, settings.run_threads) == (True, 3)
    assert [(one.name, one.base_path, one.policy) for one in settings.models] == [
        ("rec", tmp_path / "front", LatestVersions(2))
    ]
    path.write_text(yaml.safe_dump({**GOOD, "format": 2, "front": "s3://bucket/front"}))
    done = CliRunner().invoke(cli, ["serve", "--shards", str(path), "--no-grpc", "--cache-dir", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert str(found[1].models[0].base_path) == "s3://bucket/front"
    assert found[1].cache is not None


def test_a_shard_may_be_in_redis(tmp_path: Path) -> None:
    path = tmp_path / "shards.yaml"
    path.write_text(yaml.safe_dump({**GOOD, "shards": [REDIS, GOOD["shards"][0]]}))
    assert ShardsFile.read(path).shards == (Shard(name="r", url="redis://host:1"), Shard(name="a", address="host:1"))


def test_a_part_of_a_table_may_be_in_redis(tmp_path: Path) -> None:
    path = tmp_path / "shards.yaml"
    content = divided([0, 10], [10, 30])
    redis = {
        **REDIS,
        "rows": {"videos": [10, 30]},
        "tables": ["videos"],
        "features": ["watched"],
        "bytes": 1,
        "lookups": 2,
    }
    path.write_text(yaml.safe_dump({**content, "shards": [content["shards"][0], redis]}))
    assert ShardsFile.read(path).shards[1] == Shard(name="r", url="redis://host:1", features=("watched",))


WITH_FEATURES = {
    **GOOD,
    "shards": [
        {"name": "a", "address": "host:1", "features": ["user", "age"]},
        {"name": "b", "address": "host:2", "features": ["watched"]},
    ],
}
REDIS = {"kind": "redis", "name": "r", "url": "redis://host:1"}
VIDEOS = {"table": "videos", "rows": 30, "out_of_vocabulary": "error", "input": "ids"}


def divided(*parts: Any) -> dict[str, Any]:
    """A file whose shards have these rows of one table."""
    shards = [{"name": f"s{n}", "address": f"h:{n + 1}", "rows": {"videos": part}} for n, part in enumerate(parts)]
    return {**GOOD, "format": 2, "shards": shards, "split": {"watched": VIDEOS}}


SPLITS: list[tuple[str, Any]] = [
    ("table", ["videos"]),
    ("rows", True),
    ("out_of_vocabulary", 3.7),
    ("out_of_vocabulary", True),
    ("out_of_vocabulary", "3"),
    ("out_of_vocabulary", 30),
    ("max_sequence_length", "3"),
    ("max_sequence_length", -1),
    ("drops_negative", "false"),
    ("weighted", "no"),
]
WRONG: dict[str, Any] = {
    "a part that no shard has": divided([10, 20], [20, 30]),
    "a part in the middle that no shard has": divided([20, 30], [0, 10]),
    "a part at the end that no shard has": divided([0, 10]),
    "a part that two shards have": divided([0, 20], [10, 30]),
    "no rows of a split table": divided(None, None),
    "rows that are a number": {**divided(), "shards": [{**GOOD["shards"][0], "rows": {"videos": 30}}]},
    "rows that are a list": {**divided(), "shards": [{**GOOD["shards"][0], "rows": [0, 30]}]},
    **{
        f"a split of {key} {value!r}": {**divided([0, 30]), "split": {"watched": {**VIDEOS, key: value}}}
        for key, value in SPLITS
    },
    "redis without a scheme": {**GOOD, "shards": [{**REDIS, "url": "host:1"}]},
    "redis of another scheme": {**GOOD, "shards": [{**REDIS, "url": "http://host:1"}]},
    "redis with a password": {**GOOD, "shards": [{**REDIS, "url": "redis://:secret@host:1"}]},
    "redis with an address": {**GOOD, "shards": [{**REDIS, "address": "host:1"}]},
    "redis without a URL": {**GOOD, "shards": [{**REDIS, "url": ""}]},
    "another kind": {**GOOD, "shards": [{**REDIS, "kind": "memcached"}]},
    "no YAML": "{",
    "no mapping": "[1]",
    "format": {**GOOD, "format": 3},
    "unknown key": {**GOOD, "shard": []},
    "a key far from any": {**GOOD, "zzz": []},
    "a misspelled key of a shard": {**GOOD, "shards": [{"name": "a", "adress": "host:1"}]},
    "a misspelled key of redis": {**GOOD, "shards": [{"kind": "redis", "name": "a", "ur": "redis://host:1"}]},
    "YAML of line 3": "format: 1\nmodel: rec\nshards: [{name: a, address: host:1\nfront: front\n",
    "features": {**GOOD, "shards": [{"name": "a", "address": "host:1", "features": "user"}]},
    "on_failure of an unknown feature": {**WITH_FEATURES, "on_failure": {"usr": "zeros"}},
    "on_failure of some features of a shard": {**WITH_FEATURES, "on_failure": {"user": "zeros", "age": "error"}},
    "model": {**GOOD, "model": 7},
    "no shards": {**GOOD, "shards": []},
    "shard": {**GOOD, "shards": ["host:1"]},
    "unknown key of a shard": {**GOOD, "shards": [{"name": "a", "address": "host:1", "port": 2}]},
    "no address": {**GOOD, "shards": [{"name": "a"}]},
    "a name twice": {**GOOD, "shards": [GOOD["shards"][0], GOOD["shards"][0]]},
    "padding": {**GOOD, "padding": {"ids": None}},
    "on_failure": {**GOOD, "on_failure": {"user": "nothing"}},
    "tls without ca": {**GOOD, "tls": {"server_name": "rec"}},
    "tls with half a pair": {**GOOD, "tls": {"ca": "a", "key": "b"}},
    "unknown key of tls": {**GOOD, "tls": {"ca": "a", "cert": "b"}},
    "tls": {**GOOD, "tls": "ca.pem"},
    "api_key_file": {**GOOD, "api_key_file": 7},
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_named(tmp_path: Path, what: str) -> None:
    path = tmp_path / "shards.yaml"
    path.write_text(WRONG[what] if isinstance(WRONG[what], str) else yaml.safe_dump(WRONG[what]))
    with refused(ConfigError):
        ShardsFile.read(path)


def test_the_parts_of_a_table_are_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "shards.yaml"
    path.write_text(yaml.safe_dump(divided([20, 30], [0, 10], [10, 20])))
    assert ShardsFile.read(path).split["watched"].rows == 30


def test_zeros_of_all_features_of_a_shard(tmp_path: Path) -> None:
    path = tmp_path / "shards.yaml"
    path.write_text(yaml.safe_dump({**WITH_FEATURES, "on_failure": {"user": "zeros", "age": "zeros"}}))
    assert ShardsFile.read(path).zeros == {"user", "age"}
    some = {**WITH_FEATURES, "shards": [WITH_FEATURES["shards"][0], REDIS], "on_failure": {"other": "zeros"}}
    path.write_text(yaml.safe_dump(some))
    assert ShardsFile.read(path).zeros == {"other"}, "the shard in Redis may have it"


@pytest.mark.parametrize(
    "address",
    [
        "host:8500",
        "shard_0.example:1",
        "10.0.0.1:8500",
        "[::1]:8500",
        "host:https",
        "dns:///host:8500",
        "dns:host:8500",
        "dns://10.0.0.53:53/host:8500",
        "dns:///[::1]:8500",
        "ipv4:10.0.0.1:8500",
        "ipv4:10.0.0.1:8500,10.0.0.2:8500",
        "ipv6:[::1]:8500",
        "ipv6:[::1]:8500,[fe80::1%25eth0]:8500",
        "unix:relative.sock",
        "unix:///run/shard.sock",
        "unix-abstract:shard",
        "vsock:2:8500",
        "xds:///shard-0",
        "google-c2p:///shard-0",
    ],
)
def test_targets_of_grpc_are_addresses(address: str, tmp_path: Path) -> None:
    path = tmp_path / "shards.yaml"
    path.write_text(yaml.safe_dump({**GOOD, "shards": [{"name": "a", "address": address}]}))
    assert ShardsFile.read(path).shards == (Shard(name="a", address=address),)


@pytest.mark.parametrize(
    "address",
    [
        "host",
        "10.0.0.1",
        "host:",
        "host:70000",
        "host:0",
        "::1:8500",
        "http://host:8500",
        "grpc://host:8500",
        "host:8500/path",
        "host:8500,host:8501",
        "10.0.0.1:8500, 10.0.0.2:8500",
        "dns:///host",
        "dns:///host:8500,other:8500",
        "ipv4:host:8500",
        "ipv4:10.0.0.1",
        "ipv4:10.0.0.1:8500,10.0.0.2",
        "ipv4:",
        "ipv6:10.0.0.1:8500",
        "ipv6:[::1]",
        "unix:",
    ],
)
def test_addresses_that_no_server_has_are_refused(address: str, tmp_path: Path) -> None:
    path = tmp_path / "shards.yaml"
    path.write_text(yaml.safe_dump({**GOOD, "shards": [{"name": "a", "address": address}]}))
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
        ["serve", "--shards", "f", "--keep-versions", "2"],
        ["serve", "--shards", "g", "--keep-versions", "2"],
        ["serve", "--shards", "g", "models"],
        ["export", "c", "m", "--shards", "2", "--shard-bytes", "1GB"],
        ["export", "c", "m", "--shards", "2", "--feature", "f"],
        ["export", "c", "m", "--shards", "2", "--table", "t"],
        ["export", "c", "m", "--shard-bytes", "1GB", "--base", "latest"],
        ["export", "c", "m", "--ids-per-list", "a=2"],
        ["export", "c", "m", "--shards", "2", "--ids-per-list", "a=0"],
        ["export", "c", "m", "--split", "a=2"],
        ["export", "c", "m", "--shards", "2", "--split", "a"],
    ],
)
def test_options_that_contradict_are_named(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("f").write_text(yaml.safe_dump(GOOD))
    Path("g").write_text(yaml.safe_dump({**GOOD, "format": 2, "front": "front"}))
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 2
    assert "Error:" in done.output
    assert any(flag in done.output for flag in ("--shards", "--ids-per-list", "--split"))
