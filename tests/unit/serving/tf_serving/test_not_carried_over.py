"""Every option of `tpuembed serve` is in what `--print-tf-serving` prints, or a line on stderr names it."""

import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import trustme
import yaml
from click.testing import CliRunner, Result

from tests.support.serving.models import save_scale
from tpuembed_cli.main import cli
from tpuembed_cli.serve import serve
from tpuembed_serving.tf_serving.command import _CARRIED, _WHY

REFUSED_BESIDE_IT = {"--shards", "--target"}
"""Needs another backend, which the command refuses together with --print-tf-serving."""
KEY = "k" * 32


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "rec"
    save_scale(folder / "1", 1.0)
    return folder


def run(model_dir: Path | None, *arguments: str | Path) -> Result:
    what = [] if model_dir is None else [str(model_dir)]
    done = CliRunner().invoke(cli, ["serve", *what, *map(str, arguments), "--print-tf-serving"])
    assert done.exit_code == 0, done.stderr
    return done


def words(done: Result) -> list[str]:
    """The command's words."""
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("tensorflow_model_server")]
    return shlex.split(line)


def service(done: Result) -> Any:
    (one,) = yaml.safe_load(done.stdout.partition("# compose.yaml")[2].partition("\n")[2])["services"].values()
    return one


def options() -> list[str]:
    return [parameter.opts[0] for parameter in serve.params if isinstance(parameter, click.Option)]


def test_every_option_is_carried_over_or_has_a_reason_of_its_own() -> None:
    assert set(options()) - REFUSED_BESIDE_IT - _CARRIED - set(_WHY) == set()
    assert set(_WHY) & _CARRIED == set()
    assert {*_WHY, *_CARRIED} <= set(options())


@pytest.mark.parametrize("option", sorted(_WHY))
def test_an_option_without_a_flag_is_named_on_stderr(option: str, model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{KEY}\n")
    values: dict[str, tuple[str | Path, ...]] = {
        "--api-key-file": (tmp_path / "keys",), "--access-log": ("-",), "--host": ("127.0.0.1",),
        "--workers": ("2",), "--max-json-depth": ("2000",), "--log-format": ("json",),
        "--lookups": ("tensorflow",),
        **dict.fromkeys(("--quiet", "--verbose", "--no-console"), ()),
        **dict.fromkeys(("--metrics", "--otel", "--no-grpc", "--prewarm", "--random-access", "--verify-on-load"), ()),
    }  # fmt: skip
    values["--default-model"] = (model_dir.name,)
    given: tuple[str | Path, ...] = (option, *values.get(option, ("3",)))
    if option == "--cache-bytes":
        given = ("--cache-dir", tmp_path / "cache", *given)
    if option.startswith("--tls"):
        authority = trustme.CA()
        issued = authority.issue_cert("localhost")
        issued.private_key_and_cert_chain_pem.write_to_path(tmp_path / "c")
        authority.cert_pem.write_to_path(tmp_path / "a")
        given = ("--tls-cert", tmp_path / "c", "--tls-key", tmp_path / "c", "--tls-client-ca", tmp_path / "a")
    done = run(model_dir, *given)
    lines = done.stderr.splitlines()
    assert f"not carried over: {option} ({_WHY[option]})" in lines
    assert len(lines) == sum(str(word).startswith("--") for word in given)
    assert option not in done.stdout


def test_routes_of_vertex_ai_are_named(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIP_HEALTH_ROUTE", "/health")
    monkeypatch.setenv("AIP_PREDICT_ROUTE", "/predict")
    assert run(model_dir).stderr.splitlines() == [
        "not carried over: AIP_HEALTH_ROUTE (TensorFlow Serving has no route /health)",
        "not carried over: AIP_PREDICT_ROUTE (TensorFlow Serving has no route /predict)",
    ]


def test_without_such_options_stderr_is_empty(model_dir: Path) -> None:
    assert run(model_dir).stderr == ""
    carried = "--name n --rest-port 1 --grpc-port 2 --poll-seconds 3 --rest-timeout-ms 4 --max-load-retries 5"
    carried += " --load-retry-seconds 6 --listen-when-loaded --enable-batching --enable-per-model-batching-parameters"
    carried += (
        " --enable-cors --host 0.0.0.0 --workers 1 --allow-version-labels-for-unavailable-models --keep-versions 2"
    )
    done = run(model_dir, *carried.split())
    assert done.stderr == ""
    flags = dict(word.removeprefix("--").split("=", 1) for word in words(done)[1:])
    assert flags["rest_api_enable_cors_support"] == "true"
    assert flags["enable_per_model_batching_parameters"] == "true"
    assert "Note" not in done.stdout


def test_request_logging_is_named_on_stderr(model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "models.config"
    logging = (
        'logging_config { log_collector_config { filename_prefix: "/logs/m" } sampling_config { sampling_rate: 1 } }'
    )
    path.write_text(
        f'model_config_list {{ config {{ name: "m" base_path: "{model_dir}" model_platform: "tensorflow" {logging} }} }}'
    )
    done = run(None, "--config", path)
    assert done.stderr == (
        "not carried over: logging_config of model m (TensorFlow Serving's binary has no log collector)\n"
    )
    assert "logging_config" not in done.stdout


def test_values_that_are_not_the_same_there(model_dir: Path, tmp_path: Path) -> None:
    done = run(model_dir, "--rest-port", "0", "--grpc-port", "0", "--poll-seconds", "0.5")
    assert done.stderr.splitlines() == [
        "not carried over: --grpc-port 0 (port 0 of TensorFlow Serving is off. The command has port 8500)",
        "not carried over: --poll-seconds 0.5 (TensorFlow Serving takes whole seconds. The output has 1)",
        "not carried over: --rest-port 0 (port 0 of TensorFlow Serving is off. The command has port 8501)",
    ]
    assert words(done)[1:3] == ["--port=8500", "--rest_api_port=8501"]
    assert "--port=8500" in words(run(model_dir, "--no-grpc")), "it does not start without a port"


def test_files_sockets_and_arguments_are_flags_and_mounts(model_dir: Path, tmp_path: Path) -> None:
    batching, monitoring = tmp_path / "a" / "c.txt", tmp_path / "b" / "c.txt"
    for path, text in ((batching, "max_batch_size { value: 8 }"), (monitoring, "prometheus_config { enable: true }")):
        path.parent.mkdir()
        path.write_text(text)
    socket, arguments = tmp_path / "s.sock", "grpc.max_connection_age_ms=2000,grpc.lb_policy_name=grpclb"
    done = run(
        *(model_dir, "--enable-batching", "--batching_parameters_file", batching),
        *("--monitoring_config_file", monitoring, "--grpc_socket_path", socket, "--grpc_channel_arguments", arguments),
    )
    assert done.stderr == ""
    wanted = {
        f"--batching_parameters_file={batching}", f"--monitoring_config_file={monitoring}",
        f"--grpc_socket_path={socket}", f"--grpc_channel_arguments={arguments}",
    }  # fmt: skip
    assert wanted <= set(words(done))
    one = service(done)
    mounts = {mount["target"]: (mount["source"], mount["read_only"]) for mount in one["volumes"]}
    flags = dict(word.removeprefix("--").split("=", 1) for word in one["command"])
    assert mounts[flags["batching_parameters_file"]] == (str(batching), True)
    assert mounts[flags["monitoring_config_file"]] == (str(monitoring), True)
    folder, _, name = flags["grpc_socket_path"].rpartition("/")
    assert (mounts[folder], name) == ((str(tmp_path), False), "s.sock")
    assert flags["grpc_channel_arguments"] == arguments


def test_the_documents_list_is_this_one() -> None:
    text = (Path(__file__).parents[4] / "docs" / "serve-reference.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"`--print-tf-serving` prints the command.*?\n### ", text, re.DOTALL)
    for option in _WHY:
        assert f"`{option}`" in section, option
