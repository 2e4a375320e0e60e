"""The best 10 of many candidates: exports in TensorFlow and in our server, beside faiss, hnswlib and ScaNN.

    python -m benchmarks.retrieval [--rounds N] [--candidates N] [--scann-python PYTHON] [--folder DIR]

Candidates are synthetic: 3,000 clusters of very different sizes, and a spectrum that falls slowly, which is hard for an index. One
thread, processor time, contenders in turns in one process; ScaNN, which cannot be imported beside TensorFlow 2.21, in its own
(PYTHON of an environment with scann and numpy). An approximate index searches as little as finds what our index finds. A contender
that cannot be imported is named as missing. Loading is wall time, in fresh processes.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

DIM, K, QUERIES, BATCHES = 64, 10, 256, (1, 16)
MIN_RECALL = 0.9
Find = Callable[[Any], Any]


def run(
    rounds: int = 3, candidates: int = 1_000_000, scann_python: str | None = None, folder: str | None = None
) -> dict[str, Any]:
    """Measure all contenders."""
    with tempfile.TemporaryDirectory(prefix="tpuembed-bench-", dir=folder) as made:
        command = [sys.executable, "-m", "benchmarks.retrieval", "--measure", made]
        command += ["--rounds", str(rounds), "--candidates", str(candidates)]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        root = Path(__file__).parents[1]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=root, env=os.environ | threads)
        report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        loads = [[_load(made, kind) for kind in ("exact", "ivf")] for _ in range(rounds)]
        seconds = map(statistics.median, zip(*loads, strict=True))
        report["load s of our server, mapped"] = dict(
            zip(("exact", "ivf"), [round(each, 3) for each in seconds], strict=True)
        )
        if scann_python:
            command = [scann_python, __file__, "--scann", made, "--rounds", str(rounds)]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=os.environ | threads)
            report["contenders"] |= json.loads(done.stdout.splitlines()[-1])
        else:
            report["missing"]["scann"] = "no --scann-python was given"
    return report


def synthetic(count: int, seed: int = 0) -> tuple[Any, Any]:
    """Return candidates, float32 [count, DIM], and queries, float32 [QUERIES, DIM]."""
    random = np.random.default_rng(seed)
    clusters = 3000
    spectrum = np.arange(1, DIM + 1) ** -0.25
    centres = random.standard_normal((clusters, DIM)) * spectrum
    popular = 1 / np.arange(1, clusters + 1)
    popular /= popular.sum()

    def some(number: int) -> Any:
        chosen = random.choice(clusters, number, p=popular)
        return (centres[chosen] + 0.7 * random.standard_normal((number, DIM)) * spectrum).astype(np.float32)

    return some(count), some(QUERIES)


def _recall(found: Any, truth: Any) -> float:
    return float(np.mean([len(set(got) & set(want)) / K for got, want in zip(found, truth, strict=True)]))


def _least(settings: list[int], find: Callable[[int], Any], truth: Any, wanted: float) -> tuple[int, float]:
    """Return the least setting whose recall is `wanted`, or the largest, and its recall."""
    recall = 0.0
    for setting in settings:
        recall = _recall(find(setting), truth)
        if recall >= wanted:
            return setting, recall
    return settings[-1], recall


def _timed(contenders: dict[str, Find], rounds: int) -> dict[str, dict[str, float]]:
    """Return the processor time per query, in microseconds, by batch."""
    times: dict[tuple[str, int], list[float]] = {}
    for number in range(rounds + 1):
        for name, find in contenders.items():
            for batch in BATCHES:
                count = min(QUERIES, 16 * batch) if "exact" in name else QUERIES
                started = time.process_time()
                for start in range(0, count, batch):
                    find(slice(start, start + batch))
                if number:  # the first round warms up
                    taken = (time.process_time() - started) / count * 1e6
                    times.setdefault((name, batch), []).append(taken)
    found: dict[str, dict[str, float]] = {}
    for (name, batch), taken in times.items():
        found.setdefault(name, {})[f"us per query, batch {batch}"] = round(statistics.median(taken), 1)
    return found


def measure(folder: Path, rounds: int, candidates: int) -> dict[str, Any]:
    """In a process of its own."""
    import keras
    import tensorflow as tf

    from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_retrieval
    from tpuembed.manifest import Manifest
    from tpuembed_serving.tensorflow import session as runtime

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    vectors, queries = synthetic(candidates)
    np.savez(folder / "data.npz", vectors=vectors, queries=queries)

    def query() -> Any:
        ids = keras.Input((), dtype="int64", name="user")
        features = {"user": FeatureConfig(TableConfig(QUERIES, DIM, "users"))}
        return keras.Model({"user": ids}, TPUEmbedding(features, optimizer="sgd", name="users")({"user": ids})["user"])

    model = query()
    next(iter(model.layers[1].embedding_tables.values())).assign(queries)
    prefix = tf.train.Checkpoint(model=model).write(str(folder / "ckpt"))
    finds: dict[str, Find] = {}
    report: dict[str, Any] = {"rounds": rounds, "candidates": candidates, "width": DIM, "contenders": {}, "missing": {}}
    built = {}
    with contextlib.ExitStack() as stack:
        truth = None
        for kind in ("exact", "ivf"):
            started = time.process_time()
            users = {"user": np.arange(QUERIES)}
            options = {} if kind == "exact" else {"queries": users, "min_recall": MIN_RECALL}
            version = export_retrieval(
                prefix,
                folder / kind,
                query=query,
                candidates=vectors,
                k=K,
                index=kind,
                layout="mmap",
                workers=1,
                **options,
            ).path
            built[kind] = round(time.process_time() - started, 1)
            model = tf.saved_model.load(str(version))  # its signatures do not keep its variables
            finds[f"TensorFlow, {kind}"] = lambda users, model=model: model.signatures["serving_default"](
                user=tf.constant(users, tf.int64)
            )["ids"].numpy()
            server = stack.enter_context(
                contextlib.closing(runtime.load(version, options=runtime.RunOptions(lookups="native")))
            )
            signature = server.signatures["serving_default"]
            order = [info.alias for info in signature.outputs].index("ids")
            finds[f"our server, {kind}"] = lambda users, run=server.run, one=signature, order=order: run(one, [users])[
                order
            ]
        users = np.arange(QUERIES)
        truth = finds["our server, exact"](users)
        recall = {name: _recall(find(users), truth) for name, find in finds.items()}
        entry = Manifest.read(version).retrieval  # type: ignore[union-attr]
        assert entry is not None
        report |= {"partitions": entry.partitions, "nprobe": entry.nprobe, "export CPU s": built}
        wanted = recall["our server, ivf"]
        others: dict[str, Find] = {}
        settings: dict[str, int] = {}
        for name, make in (("faiss", _faiss), ("hnswlib", _hnswlib)):
            try:
                for one, find, recall_of, setting in make(vectors, queries, truth, wanted, entry.partitions):
                    others[one], recall[one] = find, recall_of
                    settings |= {one: setting} if setting else {}
            except ImportError as error:
                report["missing"][name] = str(error)
        mine = {name: (lambda some, find=find: find(users[some])) for name, find in finds.items()}
        theirs = {name: (lambda some, find=find: find(queries[some])) for name, find in others.items()}
        times = _timed({**mine, **theirs}, rounds)
    for name, taken in times.items():
        report["contenders"][name] = {"recall": round(recall[name], 4), **taken}
        if name in settings:
            report["contenders"][name]["setting"] = settings[name]
    (folder / "truth.json").write_text(json.dumps({"truth": truth.tolist(), "wanted": wanted}))
    return report


Made = Iterator[tuple[str, Find, float, int]]


def _faiss(vectors: Any, queries: Any, truth: Any, wanted: float, partitions: int) -> Made:
    import faiss

    faiss.omp_set_num_threads(1)
    flat = faiss.IndexFlatIP(DIM)
    flat.add(vectors)
    yield "faiss Flat, exact", lambda rows: flat.search(rows, K)[1], _recall(flat.search(queries, K)[1], truth), 0
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(DIM), DIM, partitions, faiss.METRIC_INNER_PRODUCT)
    index.cp.spherical = True
    index.train(vectors[:: max(1, len(vectors) // (128 * partitions))])
    index.add(vectors)

    def find(setting: int) -> Any:
        index.nprobe = setting
        return index.search(queries, K)[1]

    nprobe, recall = _least([*range(1, 64), *range(64, partitions + 1, 8)], find, truth, wanted)
    yield "faiss IVFFlat", lambda rows: index.search(rows, K)[1], recall, nprobe


def _hnswlib(vectors: Any, queries: Any, truth: Any, wanted: float, _: int) -> Made:
    import hnswlib

    index = hnswlib.Index("ip", DIM)
    index.init_index(len(vectors), M=16, ef_construction=200)
    index.set_num_threads(1)
    index.add_items(vectors)

    def find(setting: int) -> Any:
        index.set_ef(setting)
        return index.knn_query(queries, K)[0]

    ef, recall = _least([16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024], find, truth, wanted)
    yield "hnswlib, M 16", lambda rows: index.knn_query(rows, K)[0], recall, ef


def scann(folder: Path, rounds: int) -> dict[str, Any]:
    """In an environment that has ScaNN."""
    import scann as library

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    data, known = np.load(folder / "data.npz"), json.loads((folder / "truth.json").read_text())
    vectors, queries = data["vectors"], data["queries"]
    leaves = int(len(vectors) ** 0.5)
    made = library.scann_ops_pybind.builder(vectors, K, "dot_product").tree(leaves, 1, training_sample_size=250_000)
    index = made.score_ah(2, anisotropic_quantization_threshold=0.2).reorder(300).build()

    def find(setting: int) -> Any:
        return np.array([index.search(row, leaves_to_search=setting)[0] for row in queries])

    most = [4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, leaves]
    setting, recall = _least(most, find, known["truth"], known["wanted"])
    one = lambda some: [index.search(row, leaves_to_search=setting) for row in queries[some]]  # noqa: E731
    taken = _timed({"ScaNN, reorder 300": one}, rounds)["ScaNN, reorder 300"]
    return {"ScaNN, reorder 300": {"recall": round(recall, 4), **taken, "setting": setting}}


def _load(folder: str, kind: str) -> float:
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom tpuembed_serving.tensorflow import session\n"
        "started = time.monotonic()\nsession.load(Path(sys.argv[1]))\nprint(time.monotonic() - started, flush=True)\n"
        "import os\nos._exit(0)"
    )
    command = [sys.executable, "-c", code, str(Path(folder, kind, "1"))]
    return float(subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True).stdout)


def main() -> None:
    """Print the report as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--candidates", type=int, default=1_000_000)
    parser.add_argument("--scann-python", metavar="PYTHON")
    parser.add_argument("--folder", metavar="DIR")
    parser.add_argument("--measure", metavar="DIR", help=argparse.SUPPRESS)
    parser.add_argument("--scann", metavar="DIR", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(Path(given.measure), given.rounds, given.candidates)))
    elif given.scann:
        print(json.dumps(scann(Path(given.scann), given.rounds)))
    else:
        print(json.dumps(run(given.rounds, given.candidates, given.scann_python, given.folder), indent=1))


if __name__ == "__main__":
    main()
