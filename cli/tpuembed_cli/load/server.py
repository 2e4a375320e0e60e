"""A server of the bench's own: `tpuembed serve` on this machine, as a process."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tpuembed.errors import ServingError
from tpuembed_cli.load.running import LoadTarget

__all__ = ["served"]

_START_SECONDS: Final = 600
_STOP_SECONDS: Final = 30


@contextlib.contextmanager
def served(model_dir: Path, model: str, workers: int, max_batch_rows: int, *, grpc: bool) -> Iterator[LoadTarget]:
    """Serve a folder with these options on free ports of the loopback interface, and stop the server at the end.

    Raises:
        ServingError: the server does not become ready.
    """
    rest, second = _free_port(), _free_port()
    command = [
        sys.executable,
        "-m",
        "tpuembed_cli.main",
        "serve",
        str(model_dir),
        "--name",
        model,
        "--host",
        "127.0.0.1",
    ]
    command += ["--rest-port", str(rest), *(("--grpc-port", str(second)) if grpc else ("--no-grpc",))]
    command += ["--workers", str(workers), "--max-batch-rows", str(max_batch_rows), "--lame-duck-seconds", "0"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TPUEMBED_SERVE_")}
    with tempfile.TemporaryFile() as log:
        # A session of its own: Ctrl-C reaches the bench alone, which then stops the server.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        try:
            if not _becomes_ready(process, rest):
                log.seek(0)
                lines = log.read().decode(errors="replace").strip().splitlines()
                raise ServingError(
                    f"tpuembed serve {model_dir}: did not become ready: {lines[-1] if lines else 'no output'}"
                )
            yield LoadTarget(host="127.0.0.1", port=second if grpc else rest, model=model, grpc=grpc, pid=process.pid)
        finally:
            _stop(process)


def _becomes_ready(process: "subprocess.Popen[bytes]", port: int) -> bool:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
            return True
        if _has_failed(port):
            return False
        time.sleep(0.1)
    return False


def _has_failed(port: int) -> bool:
    """Returns True if the load of a version has failed."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/models", timeout=5) as reply:
            versions = [version for model in json.load(reply)["models"] for version in model["model_version_status"]]
    except (OSError, ValueError, KeyError):
        return False
    return any(version["status"]["error_code"] != "OK" for version in versions)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """End the server and its workers."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
            return


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
