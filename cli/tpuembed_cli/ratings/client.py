"""The demo's server process and its HTTP client."""

import contextlib
import json
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from tpuembed.errors import ServingError

__all__ = ["Client", "serving"]

_READY_SECONDS = 180.0


@contextlib.contextmanager
def serving(model_dir: Path) -> Iterator["Client"]:
    """Run a server of `model_dir` on a free port of this machine. SIGINT ends it.

    Raises:
        ServingError: it did not become ready; the message has its last lines.
    """
    command = [sys.executable, "-m", "tpuembed_cli.main", "serve", str(model_dir)]
    command += ["--name", "demo", "--rest-port", "0"]
    log = model_dir.parent / "serve.log"
    with open(log, "w") as stderr, subprocess.Popen(command, stdout=stderr, stderr=stderr) as process:
        try:
            yield _ready_client(process, log)
        finally:
            process.send_signal(signal.SIGINT)  # no other client uses it: no lame duck period
            process.wait(30)


def _ready_client(process: "subprocess.Popen[bytes]", log: Path) -> "Client":
    deadline = time.monotonic() + _READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text())
        if found:
            client = Client(int(found[1]))
            if client.status("/readyz") == 200:
                return client
        time.sleep(0.1)
    last = " | ".join(log.read_text().splitlines()[-3:])
    raise ServingError(f"demo: the server was not ready within {_READY_SECONDS:.0f} s: {last}")


class Client:
    """One connection to the served model."""

    def __init__(self, port: int) -> None:
        self._connection = HTTPConnection("127.0.0.1", port, timeout=30)

    def status(self, path: str) -> int:
        """Return the status code of GET `path`; 0 if the server does not answer."""
        try:
            self._connection.request("GET", path)
            response = self._connection.getresponse()
            response.read()
        except OSError:
            self._connection.close()
            return 0
        return response.status

    def answer(self, body: Any) -> list[Any]:
        """Return the predictions for the body of a predict request."""
        self._connection.request("POST", "/v1/models/demo:predict", json.dumps(body))
        response = self._connection.getresponse()
        found: Any = json.loads(response.read())
        if response.status != 200:
            raise ServingError(f"demo: predict answered {response.status}: {found.get('error')}")
        predictions: list[Any] = found["predictions"]
        return predictions

    def p50_ms(self, bodies: Sequence[Any]) -> float:
        """Return the median time of a request, in milliseconds, of those with these bodies."""
        times = []
        for body in bodies:
            started = time.perf_counter()
            self.answer(body)
            times.append(time.perf_counter() - started)
        return statistics.median(times) * 1e3
