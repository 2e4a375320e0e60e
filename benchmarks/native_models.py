"""Lookups by the C library beside TensorFlow's, in a server: of an export of lookups, and of a whole model.

    python -m benchmarks.native_models [--rounds N] [--seconds N] [--rows N] [--folder DIR]

26 features, each a list of 20 ids in a table of its own, [rows, 64] of float32. The whole model is a DLRM: 13 numbers, products
of all pairs of vectors, and dense layers of 256, 64 and 1. Both exports are mapped.

- "requests per second": two processes of `tpuembed serve` for each export, one with `--lookups native` and one with
  `--lookups tensorflow`, take turns. They answer gRPC requests of 64 rows, from two connections. The client takes a processor.
- "CPU ms of a call": the same without a server, on one thread of one process and in turns, for several sizes. Two more models show
  where TensorFlow is faster: 5 of the 26 features are lists, or none, and the others have one id for each row. The exports "of
  names" take strings in the place of ids, one vocabulary for all tables.

Ratios are medians of the rounds' own.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from benchmarks.grpc_load import METHOD
from benchmarks.serve import free_port

FEATURES, HOT, DIM, NUMBERS, BATCH = 26, 20, 64, 13, 64
NAMES = [f"f{number:02}" for number in range(FEATURES)]
WAYS = ("native", "tensorflow")
LISTS = {"model": FEATURES, "model with 5 lists": 5, "model without lists": 0}
NAMED = {"model of names": FEATURES, "model of names with 5 lists": 5, "model of names without lists": 0}
LOOKUPS = ("lookups", "lookups of names", "lookups of names, one per row")
SIZES = [(1, 1), (1, 20), (4, 20), (16, 1), (16, 20), (64, 1), (64, 20), (256, 20)]
_CODES = {"int64": 9, "float32": 1}
_REQUESTS = 16

Array = np.ndarray[Any, Any]


def run(rounds: int = 7, seconds: int = 3, rows: int = 100_000, folder: str | None = None) -> dict[str, Any]:
    """Measure both exports, `rounds` times."""
    with tempfile.TemporaryDirectory(prefix="tpuembed-bench-", dir=folder) as made:
        code = f"from benchmarks.native_models import export; export({made!r}, {rows})"
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        found: dict[str, Any] = {"rounds": rounds}
        for name in ("lookups", "model"):
            found[name] = {"requests per second": _of_servers(Path(made) / name, rounds, seconds, rows)}
        for name in (*LOOKUPS, *LISTS, *NAMED):
            found.setdefault(name, {})["CPU ms of a call"] = _of_calls(Path(made) / name / "1", rounds, rows)
        return found


async def ask(port: int, given: Sequence[bytes], calls: int, seconds: float) -> dict[str, float]:
    """Send these requests over gRPC in turns, `calls` at a time, each client on a channel of its own."""
    taken: list[float] = []
    end = time.perf_counter() + seconds

    async def client(turn: int) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) as channel:
            predict = channel.unary_unary(METHOD)  # bytes in, bytes out
            while (started := time.perf_counter()) < end:
                turn += 1
                await predict(given[turn % len(given)])
                taken.append(time.perf_counter() - started)

    await asyncio.gather(*(client(turn) for turn in range(calls)))
    ordered = statistics.quantiles(taken, n=100)
    return {
        "requests_per_second": len(taken) / seconds,
        "p50_ms": 1e3 * ordered[49],
        "p99_ms": 1e3 * ordered[98],
        "errors": 0,
    }


def dlrm(rows: int, lists: int = FEATURES, vocabulary: Any = None) -> Any:
    """Return the whole model. Its first features are so many lists. With a vocabulary they take names."""
    import keras

    from tpuembed import FeatureConfig, TableConfig, TPUEmbedding

    dtype = "int64" if vocabulary is None else "string"
    inputs = {name: keras.Input((None,), dtype=dtype, ragged=True, name=name) for name in NAMES[:lists]}
    inputs |= {name: keras.Input((), dtype=dtype, name=name) for name in NAMES[lists:]}
    numbers = keras.Input((NUMBERS,), dtype="float32", name="numbers")
    tables = {
        name: FeatureConfig(TableConfig(rows, DIM, name, combiner="sum"), vocabulary=vocabulary) for name in NAMES
    }
    found = TPUEmbedding(tables, optimizer="sgd", name="embedding")(inputs)
    bottom = keras.layers.Dense(DIM, activation="relu")(keras.layers.Dense(256, activation="relu")(numbers))
    vectors = keras.ops.stack([bottom, *(found[name] for name in NAMES)], 1)
    products = keras.layers.Dot((2, 2))([vectors, vectors])
    hidden = keras.ops.concatenate([bottom, keras.layers.Flatten()(products)], -1)
    for width in (256, 64):
        hidden = keras.layers.Dense(width, activation="relu")(hidden)
    return keras.Model({**inputs, "numbers": numbers}, {"score": keras.layers.Dense(1)(hidden)})


def export(folder: str, rows: int) -> None:
    """Export the model, and lookups of its tables."""
    from tpuembed import Vocabulary, export_saved_model
    from tpuembed.config import ServingConfig, ServingFeature

    vocabulary = Vocabulary(list(map(_text, range(rows))))
    for named, models in ((None, LISTS), (vocabulary, NAMED)):
        for name, lists in models.items():
            model = dlrm(rows, lists, named)
            export_saved_model(model, f"{folder}/{name}", layout="mmap")
    for name, given in zip(LOOKUPS, ({}, {"vocabulary": vocabulary}, {"vocabulary": vocabulary}), strict=True):
        form = {"input": "id"} if "one" in name else {"combiner": "sum"}
        features = {feature: ServingFeature(table=feature, **form, **given) for feature in NAMES}
        served = ServingConfig(features=features)
        export_saved_model(model.get_layer("embedding"), f"{folder}/{name}", serving_config=served, layout="mmap")


def _text(number: int) -> bytes:
    return b"item_%012d" % number


def inputs_of(name: str, batch: int, hot: int, rows: int, seed: int) -> dict[str, Array]:
    """Return random inputs of an export."""
    rng = np.random.default_rng(seed)
    lists = (LISTS | NAMED).get(name, 0 if "one" in name else FEATURES)
    inputs: dict[str, Array] = {
        feature: rng.integers(0, rows, (batch, hot) if index < lists else batch) for index, feature in enumerate(NAMES)
    }
    if "names" in name:
        inputs = {feature: np.vectorize(_text, otypes=[object])(value) for feature, value in inputs.items()}
    if name in LISTS or name in NAMED:
        inputs["numbers"] = rng.normal(size=(batch, NUMBERS)).astype(np.float32)
    return inputs


# ---- servers


def _of_servers(model_dir: Path, rounds: int, seconds: int, rows: int) -> dict[str, Any]:
    given = [_request(model_dir.name, inputs_of(model_dir.name, BATCH, HOT, rows, seed)) for seed in range(_REQUESTS)]
    with contextlib.ExitStack() as stack:
        ports = {way: stack.enter_context(_serving(model_dir, way)) for way in WAYS}
        rates: dict[str, list[float]] = {way: [] for way in WAYS}
        for port in ports.values():
            _warm_up(port, given)
        for _ in range(rounds):
            for way, port in ports.items():
                rates[way].append(asyncio.run(ask(port, given, 2, seconds))["requests_per_second"])
    return {**{way: round(statistics.median(found), 1) for way, found in rates.items()}, **_ratio(rates)}


@contextlib.contextmanager
def _serving(model_dir: Path, way: str) -> Iterator[int]:
    """Serve `model_dir`. Yields the port of gRPC."""
    rest, own = free_port(), free_port()
    code = "from tpuembed_cli.main import main; main()"
    options = ["--rest-port", str(rest), "--grpc-port", str(own), "--lookups", way, "--workers", "1"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, "serve", str(model_dir), *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""},
    )
    try:
        _wait(rest)
        yield own
    finally:
        process.terminate()
        process.wait()


def _warm_up(port: int, given: Sequence[bytes]) -> None:
    """Ask until a request is answered, which waits for the proofs of all signatures, and then for two seconds more."""
    for _ in range(10):
        with contextlib.suppress(grpc.RpcError):
            asyncio.run(ask(port, given, 2, 0.1))
            break
    asyncio.run(ask(port, given, 2, 2))


def _wait(port: int) -> None:
    import urllib.request

    for _ in range(600):
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
            return
        time.sleep(0.2)
    raise RuntimeError("the server is not ready")


def _request(model: str, inputs: Mapping[str, Array]) -> bytes:
    from tensorflow_serving.apis import predict_pb2

    message = predict_pb2.PredictRequest()
    message.model_spec.name = model
    for name, value in inputs.items():
        tensor = message.inputs[name]
        tensor.dtype = _CODES[value.dtype.name]
        for size in value.shape:
            tensor.tensor_shape.dim.add().size = size
        tensor.tensor_content = value.tobytes()
    return bytes(message.SerializeToString())


# ---- calls


def _of_calls(version: Path, rounds: int, rows: int) -> dict[str, Any]:
    code = f"from benchmarks.native_models import calls; calls({str(version)!r}, {rounds}, {rows})"
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def calls(version: str, rounds: int, rows: int) -> None:
    """Print the milliseconds that calls of several sizes take of a processor."""
    from tpuembed_serving.tensorflow import session as runtime

    name = Path(version).parent.name
    options = {way: runtime.RunOptions(lookups=way, lookup_threads=1) for way in WAYS}  # type: ignore[arg-type]
    loaded = {way: runtime.load(Path(version), options=options[way]) for way in WAYS}
    found = {}
    for batch, hot in SIZES:
        given = [inputs_of(name, batch, hot, rows, seed) for seed in range(_REQUESTS)]
        taken: dict[str, list[float]] = {way: [] for way in WAYS}
        for turn in range(rounds + 1):
            for way, servable in loaded.items():
                seconds = _call(servable, given)
                taken[way] += [1000 * seconds] if turn else []
        found[f"{batch} x {hot}"] = {way: round(statistics.median(ms), 3) for way, ms in taken.items()} | _ratio(
            {way: [1 / ms for ms in each] for way, each in taken.items()}
        )
    for servable in loaded.values():
        servable.close()
    print(json.dumps(found))


def _call(servable: Any, given: Sequence[Mapping[str, Array]]) -> float:
    """Return the seconds that a call takes of the processor, the median of all inputs."""
    signature, taken = servable.signatures["serving_default"], []
    for inputs in given:
        arrays = [inputs[info.alias] for info in signature.inputs]
        started = time.thread_time()
        servable.run(signature, arrays)
        taken.append(time.thread_time() - started)
    return statistics.median(taken)


def _ratio(rates: Mapping[str, Sequence[float]]) -> dict[str, float]:
    pairs = zip(rates["native"], rates["tensorflow"], strict=True)
    return {"native / tensorflow": round(statistics.median(ours / theirs for ours, theirs in pairs), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=int, default=3, help="of each measurement of a server")
    parser.add_argument("--rows", type=int, default=100_000, help="of each table")
    parser.add_argument("--folder", help="where the exports are written; the default is the system's temporary folder")
    print(json.dumps(run(**vars(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
