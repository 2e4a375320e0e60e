"""Each line of the server's log has a time and a level, in both formats."""

import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TextIO

import pytest

from tests.support.messages import refused
from tpuembed.errors import ConfigError
from tpuembed_serving.core.log_once import ONCE
from tpuembed_serving.settings import LogSettings
from tpuembed_serving.telemetry.server_log import log_to_stderr
from tpuembed_serving.tensorflow.import_lock import IMPORTING_TENSORFLOW

LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) (DEBUG|INFO|WARNING|ERROR) +(.*)")
DEFAULT = LogSettings()
own = logging.getLogger("tpuembed_serving.some.module")


Start = Callable[..., None]


@pytest.fixture
def start() -> Iterator[Start]:
    """`log_to_stderr` in a program that has not configured logging."""
    root, package, framework = (logging.getLogger(name) for name in ("", "tpuembed_serving", "tensorflow"))
    handlers, levels = root.handlers[:], (package.level, framework.level)

    def log(settings: LogSettings = DEFAULT, worker: int | None = None) -> None:
        root.handlers[:] = []
        log_to_stderr(settings, worker)
        streams.extend(handler.stream for handler in root.handlers if isinstance(handler, logging.StreamHandler))

    streams: list[TextIO] = []
    yield log
    for stream in streams:
        stream.close()
    root.handlers[:] = handlers
    package.setLevel(levels[0])
    framework.setLevel(levels[1])
    logging.captureWarnings(False)


def fail() -> None:
    try:
        raise ValueError("why")
    except ValueError:
        own.exception("it failed")


def test_every_line_of_text_has_a_time_and_a_level(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    start()
    own.debug("hidden")
    own.info("a model %s", "m")
    own.warning("two\nlines\x1b[31m")
    fail()
    logging.getLogger("uvicorn.error").warning("of the HTTP server")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("of Python", UserWarning, stacklevel=1)
    found = [LINE.fullmatch(line) for line in capfd.readouterr().err.splitlines()]
    assert all(found)
    lines = [(match[2], match[3]) for match in found if match]
    assert lines[:4] == [
        ("INFO", "a model m"),
        ("WARNING", "two"),
        ("WARNING", "lines\\x1b[31m"),
        ("ERROR", "it failed"),
    ]
    assert ("ERROR", "ValueError: why") in lines
    assert ("WARNING", "uvicorn.error: of the HTTP server") in lines
    assert any(text.startswith("py.warnings: ") and "UserWarning: of Python" in text for _, text in lines)
    times = [datetime.fromisoformat(match[1]) for match in found if match]
    assert all(abs((datetime.now(UTC) - time).total_seconds()) < 60 for time in times)


def test_a_line_of_json_is_an_object(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    start(LogSettings(format="json"), worker=1)
    own.info("caf\xe9\u2028 %d", 3, extra={"fields": {"model": "m", "version": 3}})
    fail()
    text = capfd.readouterr().err
    assert text.isascii()
    first, second = (json.loads(line) for line in text.splitlines())
    assert LINE.fullmatch(f"{first.pop('time')} INFO x")
    assert first == {
        "level": "INFO", "logger": "tpuembed_serving.some.module", "worker": 1, "model": "m", "version": 3,
        "message": "caf\xe9\u2028 3",
    }  # fmt: skip
    assert second["message"].startswith("it failed\nTraceback")


@pytest.mark.parametrize("worker", [0, 1])
def test_what_all_workers_say_is_written_by_the_first(
    worker: int, start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    start(worker=worker)
    own.warning("of the model", extra=ONCE)
    own.warning("of this process")
    lines = [line.split(maxsplit=2)[2] for line in capfd.readouterr().err.splitlines()]
    assert lines == [*([] if worker else ["of the model"]), f"worker {worker}: of this process"]


def test_a_program_that_has_configured_logging_keeps_its_handlers(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    log_to_stderr(LogSettings())
    own.info("mine")
    assert capfd.readouterr().err == ""
    assert [record.getMessage() for record in caplog.records] == ["mine"]
    logging.captureWarnings(False)


def test_an_unknown_format_is_refused() -> None:
    with refused(ConfigError):
        LogSettings(format="xml")


@pytest.mark.parametrize(("level", "shown"), [("3", False), ("0", True)])
def test_the_import_of_tensorflow_is_silent_and_the_log_is_not(
    level: str,
    shown: bool,
    start: Start,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", level)
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    start()
    with IMPORTING_TENSORFLOW:
        os.write(2, b"a note of TensorFlow's\n")
        own.info("meanwhile")
    os.write(2, b"later\n")
    text = capfd.readouterr().err
    assert ("a note" in text) is shown
    assert "meanwhile" in text
    assert "later" in text
