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
