"""What every command has: examples, help that is whole, hints, and for `serve` a variable for each option."""

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import trustme
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from tpuembed_cli import serve as serving
from tpuembed_cli.command import Command
from tpuembed_cli.export import export
from tpuembed_cli.main import cli
from tpuembed_cli.serve import serve
from tpuembed_serving import ServerSettings

NAMES = cli.list_commands(click.Context(cli))
COMMANDS = {
    name: command for name in NAMES if isinstance(command := cli.get_command(click.Context(cli), name), Command)
}


def test_every_command_is_of_the_class() -> None:
    assert sorted(COMMANDS) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_examples_are_in_the_help_and_parse(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = COMMANDS[name]
    assert command.examples
    shown = CliRunner().invoke(cli, [name, "--help"]).output
    for line in command.examples:
        assert f"  {line}\n" in shown.partition("\nExamples:\n")[2]
        program, own_name, *arguments = shlex.split(line)
        assert (program, own_name) == ("tpuembed", name)
        command.make_context(name, arguments)


def test_no_summary_is_cut_off() -> None:
    shown = CliRunner().invoke(cli, ["--help"], terminal_width=80).output
    lines = shown.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in lines] == sorted(NAMES)
    assert all(line.endswith(".") and not line.endswith("...") for line in lines)


@pytest.mark.parametrize("command", [serve, export])
def test_each_option_is_in_one_section(command: Command) -> None:
    listed = [flag for flags in command.sections.values() for flag in flags]
    flags = {parameter.opts[0] for parameter in command.params if isinstance(parameter, click.Option)}
    assert len(listed) == len(set(listed))
    assert flags - set(listed) <= {"--dry-run", "--verbose", "--quiet", "--json"}
    assert set(listed) <= flags


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["srve"], "No such command 'srve'. Did you mean 'serve'?"),
        (["zzz"], "No such command 'zzz'."),
        (["serve", "m", "--worker", "2"], "--workers"),
    ],
)
def test_an_unknown_name_gets_a_hint(arguments: list[str], hint: str) -> None:
    done = CliRunner().invoke(cli, arguments)
    assert (done.exit_code, hint in done.stderr) == (2, True)


def test_errors_name_flags() -> None:
    assert serve.with_flags("max_body_bytes and max_connections: /max_connections/max_connections.txt") == (
        "--max-body-bytes and --max-connections: /max_connections/max_connections.txt"
    )
    assert export.with_flags("max_memory_bytes is 8. Export 31 in the serving_config") == (
        "--max-memory is 8. Export 31 in the serving_config"
    )
    assert export.with_flags("Give a serving_config or a model. Leave base out, or give serving_root") == (
        "Give --serving-config FILE or --model MODULE:FACTORY. Leave --base out, or give --serving-root"
    )
    assert export.with_flags("pass allow_unused_weights=True. Not allow_unused_weights=Truely") == (
        "pass --allow-unused-weights. Not --allow-unused-weights=Truely"
    )


@pytest.mark.parametrize("command", [["export", "c", "o"], ["demo"]])
@pytest.mark.parametrize("flags", [["-v", "-q"], ["-q", "-v"]])
def test_verbose_and_quiet_contradict_each_other(command: list[str], flags: list[str]) -> None:
    done = CliRunner().invoke(cli, [*command, *flags])
    assert (done.exit_code, "--verbose and --quiet contradict each other" in done.stderr) == (2, True)


# ---- variables of `serve`

OPTIONS = [parameter.opts[0] for parameter in serve.params if isinstance(parameter, click.Option)]
CHOSEN = {
    "--name": "n", "--host": "::1", "--rest-port": "1", "--grpc-port": "2", "--workers": "3",
    "--access-log": "-", "--log-format": "json",
    "--max-request-memory": "2MiB", "--target": "host:1", "--default-model": "m",
    "--lookups": "tensorflow", "--row-store": "redis://host:1",
}  # fmt: skip
FILES = {
    "--config": 'model_config_list { config { name: "m" base_path: "/m" model_platform: "tensorflow" } }',
    "--batching-parameters-file": "max_batch_size { value: 8 }",
    "--api-key-file": "k" * 20,
}
BESIDE = {
    "--config-poll-seconds": ["--config", "{config}"],
    "--batching-parameters-file": ["--enable-batching"],
    "--tls-cert": ["--tls-key", "{pem}"],
    "--tls-key": ["--tls-cert", "{pem}"],
    "--tls-client-ca": ["--tls-key", "{pem}", "--tls-cert", "{pem}"],
    "--default-model": ["--name", "m"],
    "--target": ["--name", "n"],
}
WITHOUT_MODEL_DIR = {"--config", "--config-poll-seconds", "--target"}


@pytest.fixture
def parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """What `serve` makes of arguments and variables: the settings, or what it prints."""
    found: list[Any] = []
    monkeypatch.setattr("tpuembed_serving.serve", found.append, raising=False)

    def run(arguments: list[str], **variables: str) -> Any:
        done = CliRunner().invoke(serve, arguments, env=variables)
        assert done.exception is None, (done.output, done.exception)
        return found.pop() if found else done.stdout

    return run


def seen(settings: Any) -> Any:
    """What can be compared."""
    if not isinstance(settings, ServerSettings):
        return settings
    keys = settings.security.api_keys
    return repr(settings).replace(repr(keys), str(vars(keys) if keys else None))


@pytest.mark.parametrize("option", OPTIONS)
def test_a_variable_is_the_same_as_its_flag(option: str, parse: Callable[..., Any], tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name.strip("-")).write_text(text)
    trustme.CA().issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(tmp_path / "pem")
    (parameter,) = [one for one in serve.params if one.opts[0] == option]
    assert isinstance(parameter, click.Option)
    places = {"config": tmp_path / "config", "pem": tmp_path / "pem"}
    beside = [word.format(**places) for word in BESIDE.get(option, [])]
    beside += [] if option in WITHOUT_MODEL_DIR else [str(tmp_path)]
    value = CHOSEN.get(option, "7")
    if option in FILES:
        value = str(tmp_path / option.strip("-"))
    elif option.startswith("--tls"):
        value = str(tmp_path / "pem")
    variable = "TPUEMBED_SERVE_" + option.strip("-").replace("-", "_").upper()
    by_flag = parse([option, *([] if parameter.is_flag else [value]), *beside])
    by_variable = parse(beside, **{variable: "1" if parameter.is_flag else value})
    assert seen(by_variable) == seen(by_flag)
    if option not in (
        "--target",
        "--tls-cert",
        "--tls-key",
        "--config",
    ):  # which are never alone
        assert seen(by_flag) != seen(parse(beside))


def test_unknown_variables_warn_once(
    parse: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes sets variables of this form for a service called tpuembed-serve."""
    warned: list[str] = []
    monkeypatch.setattr(serving, "_warn", lambda _, text: warned.append(text))
    parse([str(tmp_path)], TPUEMBED_SERVE_SERVICE_HOST="10.0.0.1", TPUEMBED_SERVE_WORKER="2", TPUEMBED_SERVE_HOST="::1")
    assert warned == [
        "no option of tpuembed serve has these environment variables: TPUEMBED_SERVE_SERVICE_HOST, "
        "TPUEMBED_SERVE_WORKER (did you mean TPUEMBED_SERVE_WORKERS?)"
    ]


# ---- completion


def complete(*words: str) -> list[tuple[str, str]]:
    completion = ShellComplete(cli, {}, "tpuembed", "_TPUEMBED_COMPLETE")
    *arguments, incomplete = words
    return [(item.type, item.value) for item in completion.get_completions(arguments, incomplete)]


def test_completion(tmp_path: Path) -> None:
    import tensorflow as tf

    tables = {name: tf.Variable(tf.zeros([3, 2])) for name in ("users", "uploads", "videos")}
    prefix = tf.train.Checkpoint(**tables).write(str(tmp_path / "ckpt"))
    assert ("plain", "serve") in complete("s")
    assert complete("describe", "x") == [("file", "x")]
    assert complete("export", "x") == [("file", "x")]
    assert complete("head", prefix, "u") == [("plain", "uploads"), ("plain", "users")]
    assert complete("head", str(tmp_path / "nothing"), "u") == []
    assert ("plain", "--log-format") in complete("serve", "--log")
    assert os.environ.get("_TPUEMBED_COMPLETE") is None
