"""How the environments of the proof are made, kept and refused, without making one."""

import fcntl
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tpu import __main__ as command
from tests.tpu import environments
from tests.tpu.environments import (
    DamagedEnvironmentError,
    Environment,
    EnvironmentUnavailableError,
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "ROOT", tmp_path)


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


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """`main` changes what Ctrl-C does to this process."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)
