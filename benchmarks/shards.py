"""What a request costs that several servers answer: processor time of the server in front and of the shards, and the latency.

    python -m benchmarks.shards [--rounds N] [--seconds N] [--folder DIR]

64 tables with one feature each are exported as 1, 4, 16 and 64 shards. A request of one example looks up one row in each table,
over gRPC. All shards of an export are models of one server process, because this machine could not run a process for each. So the
latency is not that of real shards: the shards, the front and the client share 2 cores. The peer is one server with all tables,
without a front.

The scatter is also measured alone, in a process that has nothing else to do, beside calls of grpc.aio with the same bytes: that is
what a client in Python cannot go below. It is measured a third time with calls that return the shards' answers at once, without
gRPC: that is the scatter's own part.

Many requests at once share runs of a model, and a shard behind a front that shares its cores gets few. So one shard is also loaded
alone, with its part of the request. The client is `h2load` (the Debian package nghttp2-client).
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks import grpc_load
from benchmarks.serve import free_port

TABLES, ROWS, DIM = 64, 10_000, 64
SHARDS = (1, 4, 16, 64)
LISTS, LIST_SHARDS = 26, (1, 4)
LIST_REQUESTS = ((1, 1), (1, 20), (256, 1), (256, 20))
"""Rows and ids in a list, of requests of LISTS features."""
SCATTERS, AT_ONCE = 2000, (1, 16)
"""Requests of one measurement of the scatter, and how many are in progress."""
DIRECT = "one server"
_INT64 = 9
_TICKS = os.sysconf("SC_CLK_TCK")
_COMMAND = (sys.executable, "-c", "from tpuembed_cli.main import main; main()", "serve")


def run(rounds: int = 5, seconds: int = 4, folder: str | None = None) -> dict[str, Any]:
    """Measure every number of shards, and one server, `rounds` times in turns: at 16 connections, then at one.

    The exports are made in `folder`, and stay there for the next run. Without it they are removed.
    """
    contenders: list[Contender] = []
    with tempfile.TemporaryDirectory(prefix="tpuembed-bench-") as made:
        place = Path(folder or made)
        if not (place / "lists" / str(LIST_SHARDS[-1]) / "shards.yaml").exists():
            code = f"from benchmarks.shards import write; write({str(place)!r})"
            subprocess.run([sys.executable, "-c", code], check=True)
        lists = _lists(place / "lists", rounds, seconds)
        try:
            contenders.append(Contender(DIRECT, place, 1, in_front=False))
            contenders += [Contender(f"{count} shard{'s' * (count > 1)}", place, count) for count in SHARDS]
            for contender in contenders:
                contender.wait()
                contender.warm()
            for connections in (16, 1):
                for _ in range(rounds):
                    for contender in contenders:
                        contender.measure(connections, seconds)
        finally:
            for contender in contenders:
                contender.stop()
    return {
        "tables": TABLES,
        "rows": ROWS,
        "dim": DIM,
        "rounds": rounds,
        **{contender.name: contender.summary() for contender in contenders},
        "scatter": lists.pop("scatter"),
        "lists": lists,
    }


def _lists(place: Path, rounds: int, seconds: int) -> dict[str, Any]:
    """Measure requests of lists at one connection, on one server, and on shards with a front."""
    contenders: list[Contender] = []
    found: dict[str, Any] = {"features": LISTS}
    try:
        contenders.append(Contender(DIRECT, place, 1, in_front=False))
        contenders += [Contender(f"{count} shard{'s' * (count > 1)}", place, count) for count in LIST_SHARDS]
        for contender in contenders:
            contender.wait()
        for rows, ids in LIST_REQUESTS:
            for contender in contenders:
                contender.ask_for(LISTS, rows, ids)
            for _ in range(rounds):
                for contender in contenders:
                    contender.measure(1, seconds, alone=False)
            found[f"{rows} x {ids}"] = {contender.name: contender.latencies() for contender in contenders}
        command = [sys.executable, "-m", "benchmarks.shards", "--scatter", str(place / f"{contenders[-1].name}.yaml")]
        done = subprocess.run([*command, "--rounds", str(rounds)], stdout=subprocess.PIPE, check=True)
        found["scatter"] = json.loads(done.stdout)
    finally:
        for contender in contenders:
            contender.stop()
    return found


def scatter(file: Path, rounds: int) -> dict[str, Any]:
    """Return the processor time of requests of one row in each of the LISTS tables, in this process: medians of turns."""
    import grpc
    import uvloop

    from tpuembed_serving.core.service import DEFAULT_SIGNATURE
    from tpuembed_serving.core.shards_file import ShardsFile
    from tpuembed_serving.tf_serving.shards import Shards

    content = ShardsFile.read(file)
    bodies = [_request(shard["name"], shard["features"], 1, 1) for shard in yaml.safe_load(file.read_text())["shards"]]
    shards = Shards(content)
    states = shards.states()
    version = states.versions(content.model)[0].version
    signature = states.definitions(content.model, version)[1][0][DEFAULT_SIGNATURE]
    ids = list(np.random.default_rng(1).integers(0, ROWS, (LISTS, 1, 1)))

    async def measure() -> dict[str, Any]:
        predictions = shards.predictions()
        channels = [grpc.aio.insecure_channel(shard.address) for shard in content.shards]
        calls = [channel.unary_unary(grpc_load.METHOD) for channel in channels]

        async def ours() -> None:
            await predictions.run(content.model, version, signature, ids, 10.0)

        async def bare() -> None:
            await asyncio.gather(*[call(body, timeout=10.0) for call, body in zip(calls, bodies, strict=True)])

        async def own() -> None:
            await without_grpc.run(content.model, version, signature, ids, 10.0)

        without_grpc = shards.predictions()
        for each, call, body in zip(without_grpc._predictions, calls, bodies, strict=True):
            each._predict = _returning(await call(body, timeout=10.0))

        async def cost(request: Any, at_once: int) -> float:
            async def repeat() -> None:
                for _ in range(SCATTERS // at_once):
                    await request()

            start = time.process_time()
            await asyncio.gather(*[repeat() for _ in range(at_once)])
            return 1000 * (time.process_time() - start) / SCATTERS

        found: dict[str, Any] = {}
        for at_once in AT_ONCE:
            turns = [[await cost(request, at_once) for request in (ours, bare, own)] for _ in range(rounds + 1)][1:]
            medians = [statistics.median(column) for column in zip(*turns, strict=True)]
            ratio = statistics.median(turn[0] / turn[1] for turn in turns)
            found[f"{at_once} at once"] = {
                "CPU ms of a scatter": round(medians[0], 3),
                "CPU ms of bare calls": round(medians[1], 3),
                "CPU ms without gRPC": round(medians[2], 3),
                "ratio": round(ratio, 2),
            }
        predictions.close()
        without_grpc.close()
        for channel in channels:
            await channel.close()
        return found

    try:
        return uvloop.run(measure())
    finally:
        states.close()


def _returning(answer: bytes) -> Any:
    async def call(_: bytes, **options: Any) -> bytes:  # noqa: ARG001
        return answer

    return call


def write(folder: str) -> None:
    """Export the tables as each number of shards."""
    import tensorflow as tf

    from tpuembed import export_shards

    random = np.random.default_rng(0)
    tables = {f"t{number}": random.random((ROWS, DIM), np.float32) for number in range(TABLES)}
    prefix = tf.train.Checkpoint(**{name: tf.Variable(rows) for name, rows in tables.items()}).write(f"{folder}/ckpt")
    features = {f"f{number}": {"table": f"t{number}", "input": "id"} for number in range(TABLES)}
    for count in SHARDS:
        config = {"features": features}
        export_shards(prefix, f"{folder}/{count}", serving_config=config, shards=count, layout="mmap", workers=2)
    lists = {f"f{number}": {"table": f"t{number}", "combiner": "sum"} for number in range(LISTS)}
    for count in LIST_SHARDS:
        config = {"features": lists}
        export_shards(prefix, f"{folder}/lists/{count}", serving_config=config, shards=count, layout="mmap", workers=2)


class Contender:
    """The server of all shards of an export, and the front."""

    def __init__(self, name: str, folder: Path, count: int, *, in_front: bool = True) -> None:
        self.name, self._calls = name, count
        config = folder / f"{name}.config"
        lists = [(folder / str(count) / f"shard-{number}.config").read_text() for number in range(count)]
        config.write_text(
            "model_config_list {\n" + "".join(text.split("\n", 1)[1].rsplit("}", 1)[0] for text in lists) + "}\n"
        )
        self._shards = Process(folder, "--config", str(config))
        self._front: Process | None = None
        if in_front:
            content = yaml.safe_load((folder / str(count) / "shards.yaml").read_text())
            for shard in content["shards"]:
                shard["address"] = f"127.0.0.1:{self._shards.grpc_port}"
            file = folder / f"{name}.yaml"
            file.write_text(yaml.safe_dump(content | {"model": "m"}))
            self._front = Process(folder, "--shards", str(file))
        self._asked = self._front or self._shards
        self._model = "m" if in_front else "shard-0"
        self._body = _request(self._model, [f"f{number}" for number in range(TABLES)])
        self._answer_bytes = 0
        self._found: dict[int, list[dict[str, float]]] = {1: [], 16: []}
        self._part = _request("shard-0", _features(folder / str(count)))
        self._part_bytes = 0
        self._parts: dict[int, list[dict[str, float]]] = {1: [], 16: []}

    def wait(self) -> None:
        """Wait until both are ready."""
        for process in (self._shards, self._front):
            if process is not None:
                process.wait()

    def ask_for(self, features: int, rows: int = 1, ids: int = 0) -> None:
        """Take requests of so many features. `ids` is the length of lists; 0 is one row of the table."""
        self._body = _request(self._model, [f"f{number}" for number in range(features)], rows, ids)
        self._found[1].clear()
        self._warm()

    def warm(self) -> None:
        """Answer for a while before the first measurement."""
        self._warm()
        self._part_bytes = len(grpc_load.ask(self._shards.grpc_port, self._part))

    def _warm(self) -> None:
        self._answer_bytes = len(grpc_load.ask(self._asked.grpc_port, self._body))
        grpc_load.load(self._asked.grpc_port, self._body, self._answer_bytes, 16, 2)

    def measure(self, connections: int, seconds: int, *, alone: bool = True) -> None:
        """Load it, and note the processor time of both for a request."""
        processes = [process for process in (self._shards, self._front) if process is not None]
        before = [process.seconds() for process in processes]
        found = grpc_load.load(self._asked.grpc_port, self._body, self._answer_bytes, connections, seconds)
        assert found["errors"] <= connections, found  # h2load stops in the middle of a call
        requests = found["requests_per_second"] * seconds
        used = [1000 * (process.seconds() - start) / requests for process, start in zip(processes, before, strict=True)]
        self._found[connections].append({**found, "shards": used[0], "front": used[1] if len(used) > 1 else 0.0})
        if not alone:
            return
        start = self._shards.seconds()
        found = grpc_load.load(self._shards.grpc_port, self._part, self._part_bytes, connections, seconds)
        used = [1000 * (self._shards.seconds() - start) / (found["requests_per_second"] * seconds)]
        self._parts[connections].append({**found, "CPU": used[0]})

    def latencies(self) -> dict[str, float]:
        """Return the medians at one connection."""
        return {
            key: round(statistics.median(one[key] for one in self._found[1]), 3)
            for key in ("p50_ms", "p99_ms", "front", "shards")
        }

    def summary(self) -> dict[str, Any]:
        """Return the medians."""

        def median(connections: int, key: str, *, part: bool = False) -> float:
            rounds = (self._parts if part else self._found)[connections]
            return round(statistics.median(one[key] for one in rounds), 3)

        return {
            "calls of a request": self._calls,
            "CPU ms of a request": {key: median(16, key) for key in ("front", "shards")},
            "CPU ms of a request, one connection": {key: median(1, key) for key in ("front", "shards")},
            "requests_per_second": median(16, "requests_per_second"),
            "p50_ms, one connection": median(1, "p50_ms"),
            "p99_ms, one connection": median(1, "p99_ms"),
            "a shard alone": {
                "CPU ms of a call": median(16, "CPU", part=True),
                "CPU ms of a call, one connection": median(1, "CPU", part=True),
                "calls_per_second": median(16, "requests_per_second", part=True),
                "p50_ms, one connection": median(1, "p50_ms", part=True),
                "p99_ms, one connection": median(1, "p99_ms", part=True),
            },
        }

    def stop(self) -> None:
        """End both."""
        for process in (self._front, self._shards):
            if process is not None:
                process.stop()


class Process:
    """`tpuembed serve`."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.grpc_port, self._rest_port = free_port(), free_port()
        ports: Sequence[str] = ("--grpc-port", str(self.grpc_port), "--rest-port", str(self._rest_port))
        self._log = open(folder / f"{self.grpc_port}.log", "wb")  # noqa: SIM115 - closed by stop
        self._process = subprocess.Popen(
            [*_COMMAND, *options, *ports, "--poll-seconds", "10"], stdout=self._log, stderr=self._log
        )

    def wait(self) -> None:
        """Wait until it is ready."""
        for _ in range(3000):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self._rest_port}/readyz", timeout=10).close()
                return
            except OSError:
                assert self._process.poll() is None, Path(self._log.name).read_text()
                time.sleep(0.2)
        raise TimeoutError(Path(self._log.name).read_text())

    def seconds(self) -> float:
        """Return the processor time that it has used."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        self._log.close()


def _features(folder: Path) -> list[str]:
    """Return those of the first shard."""
    found: list[str] = yaml.safe_load((folder / "shards.yaml").read_text())["shards"][0]["features"]
    return found


def _request(model: str, features: Sequence[str], rows: int = 1, ids: int = 0) -> bytes:
    from tensorflow_serving.apis import predict_pb2

    message = predict_pb2.PredictRequest()
    message.model_spec.name = model
    shape = (rows, ids) if ids else (rows,)
    for name, found in zip(features, np.random.default_rng(1).integers(0, ROWS, (len(features), *shape)), strict=True):
        tensor = message.inputs[name]
        tensor.dtype = _INT64
        for size in shape:
            tensor.tensor_shape.dim.add().size = size
        tensor.tensor_content = found.astype("<i8").tobytes()
    return bytes(message.SerializeToString())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=4, help="of each measurement")
    parser.add_argument("--folder", help="of the exports, which stay there")
    parser.add_argument("--scatter", type=Path, metavar="SHARDS_YAML", help=argparse.SUPPRESS)
    options = vars(parser.parse_args())
    file = options.pop("scatter")
    print(json.dumps(run(**options) if file is None else scatter(file, options["rounds"]), indent=1))


if __name__ == "__main__":
    main()
