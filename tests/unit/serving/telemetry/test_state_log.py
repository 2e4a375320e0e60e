"""What becomes of versions is logged once for each change, and readiness once."""

import logging
from pathlib import Path

import pytest

from tpuembed_serving.core.memory import MemoryLimit, memory_limit
from tpuembed_serving.core.servable import State, VersionProgress
from tpuembed_serving.telemetry.state_log import StateLog

PATH = Path("/models/m/1")


class Log:
    """A log, and what it has written."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.announced = 0
        self.log = StateLog(self._announce)
        self._caplog = caplog
        caplog.set_level(logging.DEBUG)

    def _announce(self) -> None:
        self.announced += 1

    def note(self, *progress: VersionProgress, ready: bool = False) -> list[str]:
        """What one report makes it write."""
        self._caplog.clear()
        self.log.note(progress, ready)
        return [f"{record.levelname} {record.getMessage()}" for record in self._caplog.records]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Log:
    return Log(caplog)


def one(state: State, fault: str = "", tries: int = 0, path: Path = PATH) -> VersionProgress:
    return VersionProgress("m", int(path.name), path, state, fault, tries)


def test_the_life_of_a_version(log: Log) -> None:
    assert log.note(one(State.START)) == ["INFO loading m from /models/m/1"]
    assert log.note(one(State.LOADING)) == []
    (line,) = log.note(one(State.AVAILABLE))
    assert line.startswith("INFO model m version 1 is available after 0.")
    assert log.note(one(State.AVAILABLE)) == []
    assert log.note(one(State.UNLOADING)) == []
    assert log.note(one(State.END)) == ["INFO model m version 1 unloaded"]
    assert log.note(one(State.END)) == []


def test_each_failure_is_logged_once(log: Log) -> None:
    log.note(one(State.LOADING))
    fault = "version 1: no disk. Next retry in 60 s"
    assert log.note(one(State.END, fault, 1)) == [f"ERROR model m version 1 cannot be loaded: {fault}"]
    assert log.note(one(State.END, fault, 1)) == []
    assert log.note(one(State.LOADING, "", 1)) == ["INFO loading m from /models/m/1"]
    assert len(log.note(one(State.END, fault, 2))) == 1
    assert log.note(one(State.END, fault, 2)) == []
    assert len(log.note(one(State.END, fault, 3))) == 1, "of several workers, one has failed all the time"


def test_a_load_that_a_stop_ends_is_no_error(log: Log) -> None:
    log.note(one(State.LOADING))
    assert log.note(one(State.END)) == ["INFO model m version 1: its load is given up: the server is stopping"]


def test_a_worker_that_is_behind_says_nothing_again(log: Log) -> None:
    log.note(one(State.LOADING))
    log.note(one(State.AVAILABLE))
    assert log.note(one(State.LOADING)) == []
    assert log.note(one(State.AVAILABLE)) == []


def test_a_worker_that_does_not_know_of_a_load_yet_changes_nothing(log: Log) -> None:
    log.note(one(State.LOADING))
    assert log.note() == []
    assert log.note(one(State.LOADING)) == []
    assert len(log.note(one(State.AVAILABLE))) == 1


def test_another_folder_of_the_same_model_is_another_version(log: Log) -> None:
    log.note(one(State.LOADING))
    log.note(one(State.AVAILABLE))
    other = Path("/elsewhere/m/1")
    assert log.note(one(State.AVAILABLE), one(State.LOADING, path=other)) == ["INFO loading m from /elsewhere/m/1"]


def test_it_is_ready_once_it_listens_and_every_model_has_a_version(log: Log) -> None:
    log.note(one(State.AVAILABLE), ready=True)
    assert log.announced == 0
    log.log.listening()
    assert log.announced == 1
    log.note(one(State.LOADING), ready=False)
    log.note(one(State.AVAILABLE), ready=True)
    log.log.listening()
    assert log.announced == 1


def test_the_least_limit_of_a_group_and_those_around_it(tmp_path: Path) -> None:
    group = tmp_path / "own"
    group.write_text("0::/pod/container\n")
    root = tmp_path / "fs"
    (root / "pod" / "container").mkdir(parents=True)
    (root / "pod" / "container" / "memory.max").write_text("max\n")
    (root / "pod" / "memory.max").write_text("4096\n")
    assert memory_limit(group, root) == MemoryLimit(4096, "the control group (container)")
    (root / "pod" / "container" / "memory.max").write_text("1024\n")
    assert memory_limit(group, root) == MemoryLimit(1024, "the control group (container)")


def test_the_limit_of_a_group_of_the_first_version(tmp_path: Path) -> None:
    group = tmp_path / "own"
    group.write_text("5:cpu:/c\n4:memory:/c\n")
    (tmp_path / "memory" / "c").mkdir(parents=True)
    (tmp_path / "memory" / "c" / "memory.limit_in_bytes").write_text("2048\n")
    assert memory_limit(group, tmp_path) == MemoryLimit(2048, "the control group (container)")


def test_without_a_group_it_is_the_machine(tmp_path: Path) -> None:
    found = memory_limit(tmp_path / "missing", tmp_path)
    assert found is not None
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:"))
    assert (found.size, found.source) == (int(total.split()[1]) << 10, "the machine")
