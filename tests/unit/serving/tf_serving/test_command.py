"""What is printed to start TensorFlow Serving, read back by what reads such files."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from tests.support.goldens import read_golden
from tpuembed import export_saved_model
from tpuembed_cli.main import cli
from tpuembed_serving import ModelSettings, ServerSettings
from tpuembed_serving.models.config import parse_models
from tpuembed_serving.models.policies import AllVersions, LatestVersions, SpecificVersions
from tpuembed_serving.settings import LoadSettings
from tpuembed_serving.tf_serving.command import tf_serving_files

# Of tensorflow_serving/model_servers/main.cc.
FLAGS = {
    "port",
    "rest_api_port",
    "model_config_file",
    "rest_api_timeout_in_ms",
    "file_system_poll_wait_seconds",
    "max_num_load_retries",
    "load_retry_interval_micros",
    "enable_model_warmup",
    "allow_version_labels_for_unavailable_models",
    "enable_batching",
    "model_config_file_poll_wait_seconds",
    "enable_per_model_batching_parameters",
    "batching_parameters_file",
}


def parts(text: str) -> tuple[list[str], str, Any]:
    """The command's words, the config's text, the compose file."""
    match = re.fullmatch(
        r"(?:# Note: .*\n)*# The command.*\n(.*)\n# models.config:\n(.*)\n# compose.yaml.*?\n(.*)", text, re.DOTALL
    )
    assert match, text
    return shlex.split(match[1]), match[2], yaml.safe_load(match[3])


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["serve", *map(str, arguments), "--print-tf-serving"])


def test_every_setting_of_a_model_is_in_the_config_and_in_the_container(tmp_path: Path) -> None:
    models = tuple(
        ModelSettings(name=name, base_path=tmp_path / f"d {name}$", policy=policy, labels=labels)
        for name, policy, labels in (
            ("plain", LatestVersions(), {}),
            ('q"uo\\te', LatestVersions(3), {}),
            ("alle", AllVersions(), {"stable": 2, "canary": 3}),
            ("größe", SpecificVersions(frozenset({7, 42})), {}),
        )
    )
    for model in models:
        Path(model.base_path).mkdir()
    _, config, compose = parts(tf_serving_files(ServerSettings(models=models)))
    assert parse_models(config, "printed") == models
    (service,) = compose["services"].values()
    inside = parse_models(compose["configs"]["models"]["content"].replace("$$", "$"), "compose")
    mounts = {mount["target"]: mount["source"].replace("$$", "$") for mount in service["volumes"]}
    assert {str(one.base_path): str(here.base_path) for one, here in zip(inside, models, strict=True)} == mounts
    assert [(one.name, one.policy, one.labels) for one in inside] == [
        (one.name, one.policy, one.labels) for one in models
    ]


def test_the_flags_are_theirs_and_say_what_was_asked_for(tmp_path: Path) -> None:
    settings = ServerSettings.for_model_dir(
        tmp_path,
        rest_port=1234,
        grpc_port=4321,
        rest_timeout_ms=77,
        poll_seconds=3.0,
        load=LoadSettings(max_retries=2, retry_seconds=1.5),
    )
    command, _, compose = parts(tf_serving_files(settings))
    assert command[0] == "tensorflow_model_server"
    flags = dict(word.removeprefix("--").split("=", 1) for word in command[1:])
    assert set(flags) <= FLAGS
    wanted = {
        "port": "4321",
        "rest_api_port": "1234",
        "rest_api_timeout_in_ms": "77",
        "file_system_poll_wait_seconds": "3",
    }
    wanted |= {"max_num_load_retries": "2", "load_retry_interval_micros": "1500000"}
    assert wanted.items() <= flags.items()
    (service,) = compose["services"].values()
    assert set(command[4:]) <= set(service["command"])
    assert service["ports"] == ["127.0.0.1:1234:8501", "127.0.0.1:4321:8500"]


@pytest.mark.parametrize("layout", ["variables", "mmap"])
def test_an_export_that_maps_from_elsewhere_is_named_with_the_remedy(tmp_path: Path, layout: str) -> None:
    golden = read_golden("tpu/sparse_cores_1_sgd")
    features = {"x": {"table": min(golden.tables), "input": "id"}}
    model_dir = tmp_path / "m"
    export_saved_model(str(golden.path), model_dir, serving_config={"features": features}, layout=layout)
    printed = run(model_dir, "--name", "n", "--no-grpc").output
    notes = [line for line in printed.splitlines() if "relocate" in line]
    if layout == "variables":
        assert not notes
        return
    (note,) = notes
    assert note.endswith(f"in the container, run: tpuembed relocate {model_dir / '1'} /models/n")
    moved = CliRunner().invoke(cli, note.rpartition("tpuembed ")[2].split())
    assert moved.exit_code == 0, moved.output
    (note,) = [line for line in run(model_dir, "--name", "n", "--no-grpc").output.splitlines() if "relocate" in line]
    assert note.endswith(f"To serve it here, run: tpuembed relocate {model_dir / '1'} {model_dir}")


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path / "none")
    assert done.exit_code == 1
    assert "cannot be read" in str(done.exception) + done.output
