"""Twenty deltas a minute into a server under load: what fails, what is answered, its memory, and latency beside swaps.

    python -m benchmarks.overlay_soak [--minutes N] [--rows N]

Packages are written before. One is moved into a folder every three seconds, where `tpuembed apply --follow` finds it and makes a
version of it beside `tpuembed serve`. `wrk` asks the server in windows of one second, one after another. A window has a swap if it
overlaps the time from a package's arrival to the end of the version before. Ten times a second a client of its own compares an
answer with the rows of the version that it comes from.
"""

import argparse
import dataclasses
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serve import Server, figures, wrk, wrk_script

DIM, IDS, BODIES, CONNECTIONS = 32, 26, 64, 32
SECONDS_BETWEEN = 3.0
SHARE_CHANGED = 0.0005
"""Of the rows, in each delta. Two hundred of them stay below `max_overlay`."""
_COMMAND = (sys.executable, "-c", "from tpuembed_cli.main import main; main()")

Array = np.ndarray[Any, Any]


def run(minutes: float = 10, rows: int = 200_000) -> dict[str, Any]:
    """Apply a delta every three seconds to a server under load.

    Returns:
        Failed requests, wrong answers, MB of anonymous memory after the tenth swap and at the end, and the p99 of windows.
    """
    deltas = max(20, int(minutes * 60 / SECONDS_BETWEEN))
    with tempfile.TemporaryDirectory(prefix="tpuembed-bench-") as made:
        place = Path(made)
        # A process of its own writes them: what TensorFlow takes there is given back.
        code = f"from benchmarks.overlay_soak import write_packages; write_packages({made!r}, {rows}, {deltas})"
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, env=_quiet())
        shutil.copytree(place / "trainer", place / "model" / "rec")
        (place / "packages").mkdir()
        follower = subprocess.Popen(
            [*_COMMAND, "apply", str(place / "packages"), str(place / "model" / "rec"), "--follow", "--keep", "2",
             "--poll-seconds", "0.2", "--quiet"]
        )  # fmt: skip
        server = _serve(place / "model" / "rec")
        try:
            soak = Soak(server, place, np.load(place / "stamps.npy"))
            soak.run(deltas)
        finally:
            server.stop()
            follower.terminate()
            follower.wait()
    return {"minutes": minutes, "rows": rows, "connections": CONNECTIONS, "deltas": deltas, **soak.summary()}


def write_packages(made: str, rows: int, deltas: int) -> None:
    """Write a base, a package for each delta, and `stamps.npy`: by version, the version that last changed each row."""
    import warnings

    import tensorflow as tf

    from tpuembed import export_saved_model

    warnings.simplefilter("error")
    place, random = Path(made), np.random.default_rng(0)
    stamps = np.ones((deltas + 2, rows), np.int16)
    table = tf.Variable(rows_of(np.arange(rows), stamps[1]))
    checkpoint = tf.train.Checkpoint(table=table)
    options: dict[str, Any] = {
        "serving_config": {"features": {"x": {"table": "table", "input": "id"}}},
        "layout": "mmap",
        "serving_root": str(place / "model" / "rec"),
    }
    export_saved_model(checkpoint.write(str(place / "ckpt")), place / "trainer", **options)
    for version in range(2, deltas + 2):
        stamps[version] = stamps[version - 1]
        stamps[version][random.integers(0, rows, int(rows * SHARE_CHANGED))] = version
        stamps[version][0] = version
        table.assign(rows_of(np.arange(rows), stamps[version]))
        prefix = checkpoint.write(str(place / "ckpt"))
        export_saved_model(prefix, place / "trainer", base=1, delta_to=place / "written", **options)
    np.save(place / "stamps.npy", stamps)


def rows_of(ids: Array, stamps: Array) -> Array:
    """Return the rows [n, DIM] of `ids` that were last changed by these versions. Row 0 is the number of the version."""
    values = stamps + (ids % 1024) / 1024
    return (values[:, None] + np.arange(DIM) * 256).astype(np.float32)


def _serve(model_dir: Path) -> Server:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    ports = ["--rest-port", str(port), "--no-grpc", "--poll-seconds", "0.2"]
    command = [*_COMMAND, "serve", str(model_dir), *ports]
    return Server(command, port, "/v1/models/rec:predict", "rows", {})


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer to the client that compares rows; `version` is None where they are those of no version."""

    sent: float
    received: float
    version: int | None


@dataclasses.dataclass(frozen=True)
class Window:
    """What `wrk` measured in a second."""

    start: float
    end: float
    figures: dict[str, float]


class Soak:
    """A server, the deltas that it gets, and what its clients see."""

    def __init__(self, server: Server, place: Path, stamps: Array) -> None:
        self._server, self._place, self._stamps = server, place, stamps
        self._over = threading.Event()
        self.answers: list[Answer] = []
        self.windows: list[Window] = []
        self.memory: list[float] = []
        self.arrived: dict[int, float] = {}
        self.gone: dict[int, float] = {}

    def run(self, deltas: int) -> None:
        """Move a package every three seconds, and wait for its version."""
        self._wait(1)
        self.arrived[1] = time.monotonic()
        with ThreadPoolExecutor(2) as threads:
            clients = [threads.submit(self._load), threads.submit(self._compare)]
            try:
                started = time.monotonic()
                for version in range(2, deltas + 2):
                    time.sleep(max(0.0, started + (version - 2) * SECONDS_BETWEEN - time.monotonic()))
                    self.arrived[version] = time.monotonic()
                    (self._place / "written" / str(version)).rename(self._place / "packages" / str(version))
                    self._wait(version)
                    self.gone[version - 1] = time.monotonic()
                    self.memory.append(self._anonymous_mb())
            finally:
                self._over.set()
        for client in clients:
            client.result()  # raises what ended it
        time.sleep(5)
        self.memory.append(self._anonymous_mb())

    def _wait(self, version: int) -> None:
        """Until `version` is the only one that the server has."""
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(self._server.url.removesuffix(":predict"), timeout=10) as reply:
                    states = {int(one["version"]): one["state"] for one in json.load(reply)["model_version_status"]}
            except OSError:
                states = {}
            if [number for number, state in states.items() if state != "END"] == [version] and (
                states[version] == "AVAILABLE"
            ):
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"version {version} is not served: {states}")
            time.sleep(0.05)

    def _load(self) -> None:
        random = np.random.default_rng(1)
        ids = random.integers(0, self._stamps.shape[1], (BODIES, IDS)).tolist()
        script = wrk_script(self._place / "soak.lua", [json.dumps({"inputs": one}) for one in ids])
        while not self._over.is_set():
            start = time.monotonic()
            found = figures(wrk(self._server, script, CONNECTIONS, 1))
            self.windows.append(Window(start, time.monotonic(), found))

    def _compare(self) -> None:
        random = np.random.default_rng(2)
        while not self._over.wait(0.1):
            ids = np.concatenate([[0], random.integers(0, self._stamps.shape[1], 200)])
            sent = time.monotonic()
            try:
                found = np.float32(json.loads(self._server.ask(json.dumps({"inputs": ids.tolist()})))["outputs"])
            except OSError:  # the status of an error too
                self.answers.append(Answer(sent, time.monotonic(), None))
                continue
            received, version = time.monotonic(), int(found[0, 0])
            known = 0 < version < len(self._stamps)
            is_right = known and np.array_equal(found, rows_of(ids, self._stamps[version][ids]))
            self.answers.append(Answer(sent, received, version if is_right else None))

    def _anonymous_mb(self) -> float:
        status = Path(f"/proc/{self._server.pid}/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) * 1024 / 1e6

    def _is_live(self, answer: Answer) -> bool:
        """Returns True if the answer's version had arrived, and had not ended before the request."""
        version = answer.version
        if version is None:
            return False
        return self.arrived[version] <= answer.received and answer.sent <= self.gone.get(version, float("inf"))

    def summary(self) -> dict[str, Any]:
        """Return what `run` says."""
        swaps = [(self.arrived[version + 1], end) for version, end in self.gone.items()]
        windows: dict[str, list[dict[str, float]]] = {"with a swap": [], "without": []}
        for window in self.windows[1:]:  # the first one warms up
            has_swap = any(start < window.end and window.start < end for start, end in swaps)
            windows["with a swap" if has_swap else "without"].append(window.figures)
        p99 = {name: statistics.median(one["p99_ms"] for one in found) for name, found in windows.items()}
        return {
            "requests": round(sum(one.figures["requests_per_second"] for one in self.windows)),
            "requests failed": int(sum(one.figures["errors"] for one in self.windows)),
            "answers compared": len(self.answers),
            "answers of no live version": sum(not self._is_live(answer) for answer in self.answers),
            "versions seen": len({answer.version for answer in self.answers}),
            "memory MB, after swap 10": round(self.memory[9], 1),
            "memory MB, most": round(max(self.memory), 1),
            "memory MB, at the end": round(self.memory[-1], 1),
            "seconds of a swap": round(statistics.median(end - start for start, end in swaps), 2),
            "windows": {
                name: {
                    "count": len(found),
                    "requests_per_second": round(statistics.median(one["requests_per_second"] for one in found)),
                    "p50_ms": round(statistics.median(one["p50_ms"] for one in found), 2),
                    "p99_ms": round(p99[name], 2),
                }
                for name, found in windows.items()
            },
            "p99 with a swap / without": round(p99["with a swap"] / p99["without"], 2),
        }


def _quiet() -> dict[str, str]:
    return {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--rows", type=int, default=200_000)
    print(json.dumps(run(**vars(parser.parse_args())), indent=1))
