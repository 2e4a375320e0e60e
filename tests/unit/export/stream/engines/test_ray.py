"""What is said of a cluster that cannot be used, by a stand-in for Ray: the real one takes twenty seconds to say it."""

import os
import socket
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.support.export.fakes import random_table, write_checkpoint
from tests.support.export.writers import TablesWriter
from tpuembed.errors import ExportError
from tpuembed.export.plan.planner import plan_export
from tpuembed.export.stream.engines import ray as engine
from tpuembed.export.stream.shard import Source

NOTICE = b"[2026-01-01 00:00:00,000 W 1 1] gcs_client.cc:210: Failed to get cluster ID: InvalidAuthToken: missing or incorrect\n"


def connect(monkeypatch: pytest.MonkeyPatch, notice: bytes) -> str:
    """The error of a cluster about which Ray's own code writes `notice`, twice."""

    def init(**_: Any) -> None:
        for _number in range(2):
            os.write(2, notice)
        raise ConnectionError("Failed to connect to Ray cluster at 192.0.2.1:6379")

    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(is_initialized=lambda: False, init=init))
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(ExportError) as caught, engine._connected():
        pass
    return str(caught.value)


def test_a_wrong_token_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    message = connect(monkeypatch, NOTICE)
    assert message.startswith("ray: the cluster at 'auto' refuses the token, or no token is set. Set RAY_AUTH_TOKEN")
    assert capfd.readouterr().err == ""


def test_other_notices_are_shown_and_the_address_is_the_users(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    message = connect(monkeypatch, b"disk full\n")
    assert message.startswith("ray: no cluster at 'auto' can be used: ConnectionError: failed to connect. Start one, ")
    assert "192.0.2.1" not in message
    assert capfd.readouterr().err == "disk full\n" * 2


def test_a_cluster_that_dies_is_told_before_ray_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is under way is cancelled."""
    monkeypatch.setattr(engine, "_SILENT_SECONDS", 0.0)
    infos = write_checkpoint(tmp_path / "ckpt", {"t": random_table(10, 4)})
    plan = plan_export(list(infos.values()))
    source = Source(path="ckpt", fingerprint="f")
    writer = TablesWriter(tmp_path / "m" / ".staging" / "tables", plan, source)
    listening, cancelled = socket.create_server(("127.0.0.1", 0)), list[str]()
    address = f"127.0.0.1:{listening.getsockname()[1]}"
    waits = 0

    def wait(references: list[str], **_: Any) -> tuple[list[str], list[str]]:
        nonlocal waits
        waits += 1
        assert waits < 4, "nobody notices"
        if waits == 2:
            listening.close()
        return [], references

    fake = types.SimpleNamespace(
        get_runtime_context=lambda: types.SimpleNamespace(gcs_address=address),
        wait=wait,
        cancel=lambda reference, **_: cancelled.append(reference),
    )
    task = types.SimpleNamespace(remote=lambda *_: "task")
    with pytest.raises(ExportError, match=f"head at {address} has not answered .*. Restart the cluster, and run"):
        list(engine._results(fake, task, plan.shards, source, writer, 2))
    assert (waits, cancelled) == (2, ["task"])
