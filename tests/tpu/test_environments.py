"""How the environments of the proof are made, kept and refused, without making one."""

import fcntl
import signal
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tpu import __main__ as command
from tests.tpu import environments
from tests.tpu.environments import (
    JAX,
    TENSORFLOW_TPU,
    DamagedEnvironmentError,
    Environment,
    EnvironmentUnavailableError,
    ensure,
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "ROOT", tmp_path)


def pip_that(monkeypatch: pytest.MonkeyPatch, returncode: int, stderr: str = "") -> list[list[str]]:
    commands: list[list[str]] = []

    def run(arguments: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(arguments)
        return subprocess.CompletedProcess(arguments, returncode, "", stderr)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(venv, "create", lambda folder, **_: Path(folder).mkdir(parents=True))
    return commands


def test_no_requirement_pulls_tensorflow() -> None:
    assert "tensorflow" not in TENSORFLOW_TPU.pins()
    assert (TENSORFLOW_TPU.pins()["tensorflow-tpu"], TENSORFLOW_TPU.pins()["libtpu"]) == ("2.19.1", "0.0.10")
    assert {"jax", "jaxlib", "libtpu"} <= JAX.pins().keys()


def test_an_environment_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = pip_that(monkeypatch, 0)
    monkeypatch.setattr(Environment, "problems", lambda _: [])
    assert ensure(JAX) is True
    assert ensure(JAX) is False
    [install] = commands
    assert install[-2:] == ["-r", str(JAX.requirements)]
    assert "--no-deps" in install


def test_an_interrupted_one_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    pip_that(monkeypatch, 1, "Collecting jax\nERROR: No matching distribution found for jax==0.10.2\n")
    with pytest.raises(
        EnvironmentUnavailableError, match=r"jax: ERROR: No matching distribution found for jax==0.10.2"
    ):
        ensure(JAX)
    assert not JAX.is_complete()
    left = JAX.folder / "half"
    left.touch()
    pip_that(monkeypatch, 0)
    monkeypatch.setattr(Environment, "problems", lambda _: [])
    assert ensure(JAX) is True
    assert not left.exists()


def test_one_of_other_requirements_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_that(monkeypatch, 0)
    monkeypatch.setattr(Environment, "problems", lambda _: [])
    pins = tmp_path / "jax.txt"
    pins.write_text("jax==0.10.2\n")
    monkeypatch.setattr(Environment, "requirements", pins)
    assert ensure(JAX) is True
    pins.write_text("jax==0.10.3\n")
    assert ensure(JAX) is True
    assert ensure(JAX) is False


def test_a_damaged_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pip_that(monkeypatch, 0)
    monkeypatch.setattr(Environment, "problems", lambda _: ["libtpu: libtpu.so is not the file of its RECORD"])
    with pytest.raises(DamagedEnvironmentError, match=r"(?s)jax is damaged, remove .*libtpu.so is not the file"):
        ensure(JAX)


@pytest.mark.parametrize(("ci", "code"), [("", 0), ("true", 1)])
def test_a_missing_wheel_is_a_skip_by_name_and_no_success_for_ci(
    ci: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unavailable(_: Environment) -> bool:
        raise EnvironmentUnavailableError("tensorflow-tpu: ERROR: No matching distribution found")

    monkeypatch.setattr(command, "ensure", unavailable)
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr("sys.argv", ["tpu-proof"])
    assert command.main() == code
    assert "SKIPPED: make tpu-proof: tensorflow-tpu: ERROR: No matching distribution" in capsys.readouterr().out


def test_a_damaged_environment_is_no_skip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def damaged(_: Environment) -> bool:
        raise DamagedEnvironmentError("jax is damaged")

    monkeypatch.setattr(command, "ensure", damaged)
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr("sys.argv", ["tpu-proof"])
    assert command.main() == 1
    assert "jax is damaged" in capsys.readouterr().out


def test_two_proofs_do_not_share_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["tpu-proof"])
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)  # which two of these would share
        assert command.main() == 1
    assert "another proof runs" in capsys.readouterr().out


def test_a_pip_that_does_not_end_is_an_environment_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(arguments: list[str], timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(arguments, timeout)

    pip_that(monkeypatch, 0)
    monkeypatch.setattr(subprocess, "run", endless)
    with pytest.raises(EnvironmentUnavailableError, match="jax: pip had not ended after 1800 seconds"):
        ensure(JAX)


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """`main` changes what Ctrl-C does to this process."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)
