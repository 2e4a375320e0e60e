"""Names of rows in a SavedModel: an export's index beside Keras' StringLookup and TensorFlow's StaticHashTable.

    python -m benchmarks.vocabularies [--rounds N] [--names N ...] [--folder DIR]

Each model returns the rows [n, 1] of 6,656 names. A fresh process loads each one, in turns, and looks up on one thread, as a server
does. Private memory is anonymous memory that the load and the lookups add. Mapped files are shared with other processes.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

CALL, CALLS = 6_656, 300
OURS, KERAS, STATIC = "export", "keras StringLookup", "StaticHashTable"


def run(rounds: int = 3, names: tuple[int, ...] = (200_000, 10_000_000), folder: str | None = None) -> dict[str, Any]:
    """Measure vocabularies of these sizes."""
    found: dict[str, Any] = {"rounds": rounds, "names per call": CALL}
    for count in names:
        with tempfile.TemporaryDirectory(prefix="tpuembed-bench-", dir=folder) as made:
            found[f"{count} names"] = _measured(Path(made), count, rounds)
    return found


def _measured(folder: Path, count: int, rounds: int) -> dict[str, Any]:
    (folder / "names.txt").write_bytes(_names(np.arange(count)).tobytes())
    built = {}
    for kind in (OURS, KERAS, STATIC):
        built[kind] = _child("build", kind, folder, count)["seconds"]
    figures: dict[str, list[dict[str, float]]] = {kind: [] for kind in built}
    for _ in range(rounds):
        for kind, each in figures.items():
            each.append(_child("serve", kind, folder, count))
    summary = {
        kind: {
            "built in s": round(built[kind], 1),
            **{key: round(statistics.median(one[key] for one in each), 4) for key in each[0]},
        }
        for kind, each in figures.items()
    }
    ratios = {}
    for kind in (KERAS, STATIC):
        for key in ("load CPU s", "load s", "ns per name"):
            pairs = zip(figures[kind], figures[OURS], strict=True)
            ratios[f"{key}: {kind} / export"] = round(statistics.median(one[key] / own[key] for one, own in pairs), 3)
    return {**summary, **ratios}


def _names(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return lines `item_<12 digits>`, uint8 [n, 18]."""
    lines = np.empty((len(numbers), 18), np.uint8)
    lines[:, :5], lines[:, 17] = np.frombuffer(b"item_", np.uint8), 10
    for place in range(12):
        lines[:, 16 - place] = 48 + numbers // 10**place % 10
    return lines


def _child(*arguments: object) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.vocabularies", "--child", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


# ---- in a process of its own


def _build(kind: str, folder: Path, count: int) -> dict[str, float]:
    import keras
    import tensorflow as tf

    from tpuembed import Vocabulary, export_saved_model
    from tpuembed.config import ServingConfig, ServingFeature

    file, started = folder / "names.txt", time.perf_counter()
    if kind == OURS:
        table = tf.Variable(np.arange(count + 1, dtype=np.float32)[:, None], name="table")
        tf.train.Checkpoint(table=table).write(str(folder / "ckpt"))
        vocabulary = Vocabulary.from_file(file, oov_buckets=1)
        feature = ServingFeature(table="table", input="id", vocabulary=vocabulary)
        export_saved_model(
            folder / "ckpt", folder / kind, serving_config=ServingConfig(features={"name": feature}), layout="mmap"
        )
        return {"seconds": time.perf_counter() - started}
    module = tf.Module()
    module.table = tf.Variable(np.arange(count + 1, dtype=np.float32)[:, None])
    if kind == KERAS:
        module.index = keras.layers.StringLookup(vocabulary=str(file))
    else:
        lines = tf.lookup.TextFileInitializer(
            str(file), tf.string, tf.lookup.TextFileIndex.WHOLE_LINE, tf.int64, tf.lookup.TextFileIndex.LINE_NUMBER
        )
        module.index = tf.lookup.StaticVocabularyTable(lines, 1)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="name")])
    def serve(name: Any) -> Any:
        rows = module.index(name) if kind == KERAS else module.index.lookup(name)
        return {"name": tf.gather(module.table, rows)}

    module.serve = serve
    tf.saved_model.save(module, str(folder / kind / "1"), signatures={"serving_default": serve})
    return {"seconds": time.perf_counter() - started}


def _serve(kind: str, folder: Path, count: int) -> dict[str, float]:
    import tensorflow as tf

    version = folder / kind / "1"
    graph, random = tf.Graph(), np.random.default_rng(0)
    calls = [
        _names(random.integers(0, count, CALL))[:, :17].copy().view("S17").ravel().astype(object) for _ in range(20)
    ]
    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
    before = _anonymous()
    started, cpu = time.perf_counter(), time.process_time()
    session = tf.compat.v1.Session(graph=graph, config=config)
    with graph.as_default():
        meta_graph = tf.compat.v1.saved_model.load(session, ["serve"], str(version))
    signature = meta_graph.signature_def["serving_default"]
    call = session.make_callable(
        signature.outputs["name"].name, feed_list=[graph.get_tensor_by_name(signature.inputs["name"].name)]
    )
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
    call(calls[0])
    taken = []
    for number in range(CALLS):
        begun = time.process_time()
        call(calls[number % len(calls)])
        taken.append(time.process_time() - begun)
    size = sum(path.stat().st_size for path in version.rglob("*") if path.is_file())
    return {
        "load s": seconds,
        "load CPU s": cpu_seconds,
        "private MiB": (_anonymous() - before) / 1024,
        "ns per name": 1e9 * statistics.median(taken) / CALL,
        "least ns per name": 1e9 * min(taken) / CALL,
        "MiB on disk": size / 2**20,
    }


def _anonymous() -> int:
    """Return the KiB of this process's anonymous memory."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Anonymous:")).split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--names", type=int, nargs="+", default=(200_000, 10_000_000))
    parser.add_argument("--folder", help="where to write the models")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        what, kind, folder, count = options.child
        print(json.dumps({"build": _build, "serve": _serve}[what](kind, Path(folder), int(count))))
    else:
        print(json.dumps(run(options.rounds, tuple(options.names), options.folder), indent=1))


if __name__ == "__main__":
    main()
