"""Two worker processes that follow a config file: they share the pages of mapped tables, and speak for the one that is behind."""

import contextlib
import http.client
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.export.fakes import write_checkpoint
from tests.support.memory import mapped_bytes, resident_bytes
from tests.support.serving.doubles import wait_for
from tests.support.serving.process import ServerProcess, workers
from tpuembed import export_saved_model

pytestmark = pytest.mark.nightly

ROWS, DIM = 250_000, 64
TABLE_BYTES = ROWS * DIM * 4
ROWS_OF_A_PAGE = 4096 // (DIM * 4)
EVERY_PAGE = json.dumps({"inputs": {"t": np.arange(0, ROWS, ROWS_OF_A_PAGE).reshape(-1, 125).tolist()}})
ONE_ROW = '{"instances": [[7]]}'


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Version n of a table, 64 MB each, holds n everywhere."""
    folder = tmp_path_factory.mktemp("exported")
    config = {"features": {"t": {"table": "t", "combiner": "sum"}}}
    for version in (1, 2, 3):
        write_checkpoint(folder / "ckpt", {"t": np.full((ROWS, DIM), version, np.float32)})
        options: dict[str, Any] = {"serving_config": config, "layout": "mmap", "workers": 1}
        export_saved_model(folder / "ckpt", folder, version=version, **options)
        shutil.rmtree(folder / "ckpt", ignore_errors=True)
    return folder


def config(base: Path, *more: str, name: str = "mapped") -> str:
    return f'config {{ name: "{name}" base_path: "{base}" model_platform: "tensorflow" {" ".join(more)} }}'


def write_config(path: Path, *models: str) -> None:
    """At once, as a reader that comes in between would see half of it."""
    path.with_suffix(".new").write_text(f"model_config_list {{ {' '.join(models)} }}")
    path.with_suffix(".new").rename(path)


@pytest.fixture(scope="module")
def server(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("mapped")
    (root / "mapped").mkdir()
    (exported / "1").rename(root / "mapped" / "1")
    write_config(root / "models.config", config(root / "mapped"))
    options = ("--config", str(root / "models.config"), "--config-poll-seconds", "0.05", "--workers", "2")
    with ServerProcess(None, root / "server.log", *options, "--drain-seconds", "5") as running:
        running.wait_for(1)
        yield running
        for worker in workers(running):
            os.kill(worker, signal.SIGKILL)


def base_path(server: ServerProcess) -> Path:
    return server.log_path.with_name("mapped")


def ask(server: ServerProcess, body: str, target: str = "mapped") -> Any:
    status, answer = server.request("POST", f"/v1/models/{target}:predict", body)
    found = json.loads(answer)
    return found.get("outputs") or found.get("predictions") if status == 200 else (status, found["error"])


def touch_every_page(server: ServerProcess, version: int) -> None:
    """In both workers; the kernel says which of them a connection goes to."""
    folder = base_path(server) / str(version)

    def touched() -> bool:
        answer = ask(server, EVERY_PAGE)
        assert {value for row in answer for value in row} == {125.0 * version}
        return all(mapped_bytes(pid, folder)[0] > 0.98 * TABLE_BYTES for pid in workers(server))

    wait_for(touched)


def test_each_worker_has_half_of_the_pages_that_both_use(server: ServerProcess) -> None:
    touch_every_page(server, 1)
    found = {pid: mapped_bytes(pid, base_path(server)) for pid in workers(server)}
    assert len(found) == 2
    print({pid: [round(size / TABLE_BYTES, 2) for size in sizes] for pid, sizes in found.items()}, "of the table")
    for _, share in found.values():
        assert 0.45 * TABLE_BYTES < share < 0.55 * TABLE_BYTES


def test_versions_swap_and_leave_nothing(server: ServerProcess, exported: Path) -> None:
    """The old version's pages are the page cache's alone again, and no process holds a table of its own."""
    before = {pid: resident_bytes(pid, "RssAnon") for pid in workers(server)}
    for version in (2, 3):
        (exported / str(version)).rename(base_path(server) / str(version))
        server.wait_for(version)
        server.wait_for(version - 1, "END")
        touch_every_page(server, version)
        for pid, own in before.items():
            assert mapped_bytes(pid, base_path(server) / str(version - 1)) == (0, 0)
            assert resident_bytes(pid, "RssAnon") < own + 3 * TABLE_BYTES // 4
    after = {pid: resident_bytes(pid, "RssAnon") for pid in before}
    print({pid: (before[pid] >> 20, after[pid] >> 20) for pid in before}, "MiB of their own, before and after")
    assert set(workers(server)) == set(before)


def everywhere(server: ServerProcess, target: str, times: int = 40) -> set[str]:
    """What is answered over so many new connections."""
    return {str(ask(server, ONE_ROW, target)) for _ in range(times)}


def get(server: ServerProcess, target: str, seconds: float) -> tuple[int, bytes] | None:
    """None where nothing is answered so long."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=seconds)
    with contextlib.closing(connection), contextlib.suppress(TimeoutError):
        connection.request("GET", target)
        reply = connection.getresponse()
        return reply.status, reply.read()
    return None


def states(server: ServerProcess) -> dict[str, str]:
    """As whichever worker that answers says."""
    while (found := get(server, "/v1/models/mapped", 0.5)) is None:
        pass
    return {one["version"]: one["state"] for one in json.loads(found[1])["model_version_status"]}


def test_a_version_is_as_far_as_the_worker_that_is_behind(server: ServerProcess) -> None:
    """One worker is stopped while the other loads a version."""
    base = base_path(server)
    shutil.copytree(base / "3", base / ".4", copy_function=os.link)
    stopped, other = workers(server)
    os.kill(stopped, signal.SIGSTOP)
    try:
        (base / ".4").rename(base / "4")
        wait_for(lambda: f"{base / '4'}/" in Path(f"/proc/{other}/maps").read_text())
        until = time.monotonic() + 1
        while time.monotonic() < until:
            assert states(server)["4"] != "AVAILABLE"
    finally:
        os.kill(stopped, signal.SIGCONT)
    server.wait_for(4)
    assert everywhere(server, "mapped/versions/4") == {str([[3.0] * DIM])}


def test_a_stop_ends_with_0_and_no_traceback(server: ServerProcess) -> None:
    assert server.stop() == 0
    assert "Traceback" not in server.log
