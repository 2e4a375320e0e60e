"""How fresh answers are: from the end of a training step to the first answer with its rows, through ExportCallback.

    python -m benchmarks.fresh [--gb 10] [--rows 1000000] [--steps 3]

A model with one table of width 64 (SGD, rows tracked) trains, and publishes after every step. `tpuembed serve` looks for
versions every 0.2 s. The peer is the full export of the same table, which is the first one.
"""

import argparse
import http.client
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

DIM = 64
POLL_SECONDS = 0.2
WAIT_SECONDS = 300.0


def run(gb: float = 10, rows: int = 1_000_000, steps: int = 3) -> dict[str, Any]:
    """Train in this process, and serve in another."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import keras
    import numpy as np

    from tpuembed import SGD, ExportCallback, FeatureConfig, TableConfig, TPUEmbedding
    from tpuembed.export.stream.shard import peak_rss_bytes

    folder = Path(tempfile.mkdtemp(prefix="fresh"))
    table = TableConfig(int(gb * 1e9) // (4 * DIM), DIM, "t")
    ids = keras.Input((), dtype="int64", name="id")
    found = TPUEmbedding(FeatureConfig(table), SGD(0.1), track_rows=True)(ids)
    model = keras.Model(ids, {"row": keras.layers.Identity(name="row")(found), "score": keras.layers.Dense(1)(found)})
    model.compile("sgd", {"score": "mse"})
    random = np.random.default_rng(0)
    batches = [random.choice(table.vocabulary_size, rows, replace=False) for _ in range(steps + 1)]
    publish = ExportCallback(folder, every_seconds=0, base="latest", layout="mmap", require_finite=False)
    server: Server | None = None
    taken: list[dict[str, float]] = []

    def last_row() -> tuple[int, Any]:
        row = int(batches[len(taken)][-1])
        return row, model.layers[1](np.array([row])).numpy()[0]

    class Clock(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - as Keras calls it
            _, self.before = last_row()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - as Keras calls it
            self.ended = time.perf_counter()

    class Wait(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - as Keras calls it
            nonlocal server
            published = time.perf_counter()
            server = server or Server(folder)
            row, wanted = last_row()
            assert not np.array_equal(clock.before, wanted), "the step did not change the row"
            while not np.array_equal(server.row(row), wanted):
                assert time.perf_counter() - published < WAIT_SECONDS, "the server has no answer with the new row"
                time.sleep(0.005)
            taken.append({"export": published - clock.ended, "load": time.perf_counter() - published})

    clock = Clock()
    try:
        for batch in batches:
            values = {"score": np.ones((rows, 1), np.float32)}
            model.fit(batch, values, batch_size=rows, verbose=0, callbacks=[clock, publish, Wait()])
    finally:
        if server is not None:
            server.process.terminate()
            server.process.wait()
        shutil.rmtree(folder)
    full, *overlays = publish.reports
    seconds = [each["export"] + each["load"] for each in taken[1:]]
    return {
        "table GB": gb,
        "rows changed a step": rows,
        "rows in the overlay": [report.rows_changed for report in overlays],
        "seconds": [round(each, 2) for each in seconds],
        "seconds median": round(statistics.median(seconds), 2),
        "of it export": round(statistics.median(each["export"] for each in taken[1:]), 2),
        "of it load and poll": round(statistics.median(each["load"] for each in taken[1:]), 2),
        "full export": round(taken[0]["export"], 2),
        "bytes written / full": [
            round((report.bytes_written - report.bytes_reused) / full.bytes_written, 3) for report in overlays
        ],
        "seconds / full export": round(statistics.median(seconds) / taken[0]["export"], 3),
        "trainer peak RSS GB": round(peak_rss_bytes() / 1e9, 2),
    }


class Server:
    """`tpuembed serve`, and one connection to it."""

    def __init__(self, model_dir: Path) -> None:
        command = ["serve", str(model_dir), "--rest-port", "0", "--no-grpc", "--poll-seconds", str(POLL_SECONDS)]
        self.process = subprocess.Popen(
            [Path(sys.executable).parent / "tpuembed", *command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr
        line = next(line for line in self.process.stderr if "ready: " in line)
        url = line.split("ready: ")[1].split()[0].rstrip(",")
        self._host, self._path = url.removeprefix("http://").split("/", 1)

    def row(self, number: int) -> Any:
        """Return the answer for one id, float32 [dim]."""
        import numpy as np

        connection = http.client.HTTPConnection(self._host, timeout=30)
        connection.request("POST", f"/{self._path}:predict", json.dumps({"inputs": {"id": [number]}}))
        answer = json.loads(connection.getresponse().read())
        connection.close()
        return np.array(answer["outputs"]["row"][0], np.float32)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=10)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    print(json.dumps(run(options.gb, options.rows, options.steps), indent=1))
