"""Native lookups of an export beside torch's `embedding_bag` and FBGEMM's table batched embeddings, in the same tables.

    python -m benchmarks.lookups_torch PYTHON [--rounds N] [--threads N]

PYTHON is the interpreter of an environment of its own: pip install torch fbgemm-gpu-cpu numpy. The tables are those of
`benchmarks.lookups`: 26 of 100,000 x 64 float32, sums. Each contender is a process that takes one request at a time, in turn.
It has the ids in the form that it likes best, and times nothing but the call:
- `native`: one matrix of ids in, one matrix out;
- `embedding_bag`: a call for each feature, with ids [batch, hotness];
- `FBGEMM`: one call for all features, with indices and offsets: SplitTableBatchedEmbeddingBagsCodegen on the CPU.

Their numbers are compared first. Medians in microseconds, and ratios to `native`.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
FEATURES, DIM, SCALE = 26, 64, np.float32(0.05)
NAMES = [f"f{index:02}" for index in range(FEATURES)]
TOLERANCE = 1e-6
SHAPES = [(batch, hot) for batch in (1, 256, 4096) for hot in (1, 20)]
REQUESTS = {1: 64, 256: 16, 4096: 3}
"""Batch -> different requests."""
ROUNDS = {1: 200, 256: 60, 4096: 9}


def run(python: str, rounds: int = 1, threads: int = 1, rows: int = 100_000) -> dict[str, Any]:
    """Return microseconds by shape and contender, and the ratios."""
    with tempfile.TemporaryDirectory(prefix="tpuembed-bench-") as made:
        folder = Path(made)
        command = [sys.executable, "-m", "benchmarks.lookups_torch", "write", made, str(rows)]
        subprocess.run(command, check=True)
        contenders = {"native": sys.executable, "embedding_bag": python, "FBGEMM": python}
        found = {
            f"batch {batch}, hotness {hot}": _measure(contenders, folder, batch, hot, rounds, threads, rows)
            for batch, hot in SHAPES
        }
    return {"rounds": rounds, "threads": threads} | found


def _measure(
    contenders: dict[str, str], folder: Path, batch: int, hot: int, rounds: int, threads: int, rows: int
) -> dict[str, Any]:
    rng = np.random.default_rng(batch + hot)
    np.save(folder / "ids.npy", rng.integers(0, rows, (REQUESTS[batch], FEATURES, batch, hot)))
    processes = {
        name: subprocess.Popen(
            [python, __file__, "serve", name, str(folder), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                "PYTHONPATH": str(Path(__file__).parents[1]),
                "PATH": "/usr/bin:/bin",
                "OMP_NUM_THREADS": str(threads),
            },
        )
        for name, python in contenders.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in processes}
    try:
        for turn in range(rounds * ROUNDS[batch] + 1):
            for place, name in enumerate(rng.permutation(list(processes)).tolist()):
                taken = _ask(processes[name], f"{(turn + place) % REQUESTS[batch]}")
                if turn:  # the first round warms up
                    seconds[name].append(float(taken))
        values = {}
        for name, process in processes.items():
            _ask(process, "values 0")
            values[name] = np.load(folder / f"{name}.npy")
    finally:
        for process in processes.values():
            process.stdin.close()  # type: ignore[union-attr]
            process.wait(60)
    difference = max(float(np.abs(value - values["native"]).max()) for value in values.values())
    assert difference < TOLERANCE, difference
    taken = {name: round(statistics.median(each) * 1e6, 1) for name, each in seconds.items()}
    ratios = {f"{name} / native": round(taken[name] / taken["native"], 2) for name in taken if name != "native"}
    return {"difference": difference, "us": taken, **ratios}


def _ask(process: Any, line: str) -> str:
    process.stdin.write(line + "\n")
    process.stdin.flush()
    answer: str = process.stdout.readline()
    assert answer, f"{process.args[3]} ended"
    return answer


def write(folder: Path, rows: int) -> None:
    """Write the tables as `tables.npy`, and their export."""
    import tensorflow as tf

    from tpuembed import export_saved_model

    rng = np.random.default_rng(0)
    values = np.stack([rng.standard_normal((rows, DIM), np.float32) * SCALE for _ in NAMES])
    np.save(folder / "tables.npy", values)
    tables = {name: tf.Variable(value, name=name) for name, value in zip(NAMES, values, strict=True)}
    prefix = tf.train.Checkpoint(**tables).write(str(folder / "ckpt"))
    features = {name: {"table": name, "input": "ids", "combiner": "sum"} for name in NAMES}
    export_saved_model(prefix, folder / "model", serving_config={"features": features}, layout="mmap")


def serve(name: str, folder: Path, threads: int) -> None:
    """Answer each line of stdin, the number of a request, with the seconds that it took."""
    import time

    ids = np.load(folder / "ids.npy")
    make = {"native": _native, "embedding_bag": _embedding_bag, "FBGEMM": _fbgemm}[name]
    calls, values = make(folder, ids, threads)
    for line in sys.stdin:
        what, _, number = line.strip().rpartition(" ")
        started = time.perf_counter()
        found = calls[int(number)]()
        taken = time.perf_counter() - started
        if what:
            np.save(folder / f"{name}.npy", values(found))
        print(taken, flush=True)


def _native(folder: Path, ids: Array, threads: int) -> Any:
    from functools import partial

    from tpuembed.manifest import Manifest
    from tpuembed.native.lookup import NativeLookups

    version = folder / "model" / "1"
    manifest = Manifest.read(version)
    assert manifest is not None
    lookups = NativeLookups(manifest, version, threads=threads)
    rows = manifest.tables[0].rows
    for start in range(
        0, rows, 1000
    ):  # as the others, which copied their tables: every page is mapped before the first call
        lookups.packed(np.repeat(np.arange(start, min(start + 1000, rows))[:, None], FEATURES, 1))
    matrices = [np.ascontiguousarray(request.transpose(1, 0, 2)).reshape(request.shape[1], -1) for request in ids]
    return [partial(lookups.packed, matrix) for matrix in matrices], lambda found: found


def _embedding_bag(folder: Path, ids: Array, threads: int) -> Any:
    import torch

    torch.set_num_threads(threads)
    tables = [torch.from_numpy(table) for table in np.load(folder / "tables.npy")]
    requests = [[torch.from_numpy(np.ascontiguousarray(each)) for each in request] for request in ids]
    bag = torch.nn.functional.embedding_bag

    def call(request: Any) -> Any:
        with torch.inference_mode():
            return [bag(each, table, mode="sum") for each, table in zip(request, tables, strict=True)]

    return [lambda request=request: call(request) for request in requests], lambda found: torch.cat(found, 1).numpy()


def _fbgemm(folder: Path, ids: Array, threads: int) -> Any:
    import fbgemm_gpu  # noqa: F401 - registers the operations
    import torch
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    torch.set_num_threads(threads)
    tables = np.load(folder / "tables.npy")
    specs = [(tables.shape[1], DIM, EmbeddingLocation.HOST, ComputeDevice.CPU) for _ in NAMES]
    bags = SplitTableBatchedEmbeddingBagsCodegen(specs)
    for weights, table in zip(bags.split_embedding_weights(), tables, strict=True):
        weights.copy_(torch.from_numpy(table))
    requests = []
    for request in ids:
        offsets = torch.arange(0, request.size + 1, request.shape[2], dtype=torch.int64)
        requests.append((torch.from_numpy(request.reshape(-1)), offsets))

    def call(request: Any) -> Any:
        with torch.no_grad():
            return bags(*request)

    return [lambda request=request: call(request) for request in requests], lambda found: found.numpy()


def main() -> None:
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]), int(sys.argv[3]))
    elif sys.argv[1] == "serve":
        serve(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("python", help="the interpreter that has torch")
        parser.add_argument("--rounds", type=int, default=1)
        parser.add_argument("--threads", type=int, default=1)
        print(json.dumps(run(**vars(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
