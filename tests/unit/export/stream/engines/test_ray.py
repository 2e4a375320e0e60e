"""What is said of a cluster that cannot be used, by a stand-in for Ray: the real one takes twenty seconds to say it."""

import sys
import types
from typing import Any

import pytest

from tests.support.messages import refused
from tpuembed.errors import ExportError
from tpuembed.export.stream.engines import ray as engine


def test_the_address_of_a_cluster_that_cannot_be_used_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: Any) -> None:
        raise ConnectionError("Failed to connect to Ray cluster at 192.0.2.1:6379")

    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(is_initialized=lambda: False, init=init))
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with refused(ExportError) as caught, engine._connected():
        pass
    assert "192.0.2.1" not in str(caught.value)
