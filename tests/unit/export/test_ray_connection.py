"""What is said of a cluster that cannot be used, by a stand-in for Ray: the real one takes twenty seconds to say it."""

import os
import sys
import types
from typing import Any

import pytest

from tpuembed.errors import ExportError
from tpuembed.export.engines import ray as engine

NOTICE = b"[2026-01-01 00:00:00,000 W 1 1] gcs_client.cc:210: Failed to get cluster ID: InvalidAuthToken: missing or incorrect\n"


def connect(monkeypatch: pytest.MonkeyPatch, notice: bytes) -> str:
    """The error of a cluster about which Ray's own code writes `notice`, twice."""

    def init(**_: Any) -> None:
        for _number in range(2):
            os.write(2, notice)
        raise ConnectionError("Failed to connect to Ray cluster at 192.0.2.1:6379")

    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(is_initialized=lambda: False, init=init))
    with pytest.raises(ExportError) as caught, engine._connected("auto"):
        pass
    return str(caught.value)


def test_a_wrong_token_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    message = connect(monkeypatch, NOTICE)
    assert message.startswith("ray: the cluster at 'auto' refuses the token, or there is none: set RAY_AUTH_TOKEN")
    assert capfd.readouterr().err == ""


def test_other_notices_are_shown_and_the_address_is_the_users(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    message = connect(monkeypatch, b"disk full\n")
    assert message.startswith("ray: no cluster at 'auto' can be used: ConnectionError: failed to connect; start one, ")
    assert "192.0.2.1" not in message
    assert capfd.readouterr().err == "disk full\n" * 2
