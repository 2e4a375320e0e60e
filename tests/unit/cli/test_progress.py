"""Lines of progress where there is no terminal."""

import time

import pytest

from tpuembed_cli.output import byte_progress


def test_the_rate_is_that_of_what_was_seen_to_be_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not of the seconds before the first bytes, nor of bytes that an earlier run had done."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with byte_progress("export") as update:
        now = 130.0
        update(400_000_000, 1_000_000_000)
        assert capsys.readouterr().err == ""
        now = 135.0
        update(500_000_000, 1_000_000_000)
        assert capsys.readouterr().err == "export: 500 of 1000 MB, 20 MB/s, 25 s left\n"
        now = 139.0
        update(600_000_000, 1_000_000_000)
        assert capsys.readouterr().err == "", "one line in five seconds"


def test_the_next_of_several_exports_begins_anew(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with byte_progress("export") as update:
        update(0, 900_000_000)
        now = 104.0
        update(900_000_000, 900_000_000)
        now = 120.0
        update(0, 300_000_000)
        now = 126.0
        update(60_000_000, 300_000_000)
        assert capsys.readouterr().err == "export: 60 of 300 MB, 10 MB/s, 24 s left\n"
        now = 140.0
        update(0, 0)
        now = 150.0
        update(0, 0)
        assert capsys.readouterr().err == "", "there is nothing to write"
