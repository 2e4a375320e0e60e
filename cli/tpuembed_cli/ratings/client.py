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
    command += ["--name", "ratings", "--rest-port", "0"]
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
    """One connection to the model `ratings`."""

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

    def predict(self, users: Sequence[int], items: Sequence[int]) -> list[float]:
        """Return a rating for each pair."""
        rows = [{"user_id": int(user), "movie_id": int(item)} for user, item in zip(users, items, strict=True)]
        self._connection.request("POST", "/v1/models/ratings:predict", json.dumps({"instances": rows}))
        response = self._connection.getresponse()
        body: Any = json.loads(response.read())
        if response.status != 200:
            raise ServingError(f"demo: predict answered {response.status}: {body.get('error')}")
        return [row[0] for row in body["predictions"]]

    def p50_ms(self, users: Sequence[int], items: Sequence[int]) -> float:
        """Return the median time of one request per pair, in milliseconds."""
        times = []
        for user, item in zip(users, items, strict=True):
            started = time.perf_counter()
            self.predict([user], [item])
            times.append(time.perf_counter() - started)
        return statistics.median(times) * 1e3
