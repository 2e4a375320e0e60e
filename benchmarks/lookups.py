"""Lookups of an export beside TensorFlow's own of the same tables: 26 tables of 100,000 x 64, through the C API.

    python -m benchmarks.lookups [--rounds N] [--threads N] [--cpu] [--rows N] [--folder DIR]

Contenders, all in one process and in turn, so that a slow moment of the machine meets them all:
- `native`, which is `tpuembed.native.lookup` in the same tables, and `C bound`, a loop in C that adds rows of float32 without any
  check (benchmarks/pooled_rows.c);
- an export's `packed` (one matrix in, one out) and `serving_default` (26 inputs, 26 outputs), of features that take one id and
  of features that take lists;
- `tf.nn.embedding_lookup_sparse` and `tf.tpu.experimental.embedding.serving_embedding_lookup` of 26 variables, in two forms:
  "at its best", the features sharing one tensor of indices and all outputs in one; and "by name", three tensors for each
  feature's SparseTensor and an output for each.
Their numbers are compared first. The combiner is sum; "padded" lists have 1 to `hot` ids, and -1 after them, which TensorFlow's
lookups do not get to see. Medians; the ratios say how many times faster the export is. Everything it makes is deleted.

A session has threads of its own, to which every call is handed over; that takes as long as a small lookup, whoever's it is. So
small batches are measured on the caller's thread as well (inter_op_parallelism_threads = -1), as `tpuembed serve` runs them.
"""

import argparse
import dataclasses
import json
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.c_api import Contender, Shape

FEATURES, DIM = 26, 64
NAMES = [f"f{index:02}" for index in range(FEATURES)]
SHAPES = [(batch, hot, False) for batch in (1, 256, 4096) for hot in (1, 20)] + [(1, 20, True), (4096, 20, True)]
ROUNDS = {1: 20, 256: 10, 4096: 1}
"""Batch -> how many times as many rounds as asked for."""
REQUESTS = {1: 16, 256: 16, 4096: 3}
"""Batch -> different requests, so that the rows of one are seldom in the cache of the processor."""
TOLERANCE = 1e-6
SCALE = np.float32(0.05)

Array = np.ndarray[Any, Any]
Feed = Mapping[str, Array]


def run(
    rounds: int = 9, threads: int = 1, cpu: bool = False, rows: int = 100_000, folder: str | None = None
) -> dict[str, Any]:
    """Microseconds by shape and contender, and how many times faster the export is than TensorFlow's lookups."""
    with tempfile.TemporaryDirectory(prefix="tpuembed-bench-", dir=folder) as made:
        # A process of its own makes the models: what TensorFlow takes there is given back before anything is timed.
        command = [sys.executable, "-c", f"from benchmarks.lookups import write_models; write_models({made!r}, {rows})"]
        package = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1]
        contenders = [Contender(**fields) for fields in json.loads(Path(made, "contenders.json").read_text())]
        shapes = [_shape(rounds, rows, *shape) for shape in SHAPES]
        found = microseconds(package, threads, cpu, contenders, shapes)
        small = [
            dataclasses.replace(shape, name=f"{shape.name}, caller's thread") for shape in shapes if shape.batch == 1
        ]
        found |= microseconds(package, 0, cpu, contenders, small)
    return {"rounds": rounds, "threads": threads, "cpu": int(cpu)} | {
        name: _summary(each) for name, each in found.items()
    }


def microseconds(
    package: str, threads: int, cpu: bool, contenders: Sequence[Contender], shapes: Sequence[Shape]
) -> dict[str, Any]:
    """Measure in a process without Python's TensorFlow, which is installed at `package`. See `benchmarks.c_api`."""
    request = pickle.dumps((package, threads, cpu, contenders, shapes))
    done = subprocess.run([sys.executable, "-m", "benchmarks.c_api"], input=request, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _summary(found: dict[str, Any]) -> dict[str, Any]:
    assert found["difference"] < TOLERANCE, found
    taken = found["microseconds"]
    ratios = {
        f"{function}, {form} / {ours}": round(taken[f"{function}, {form}"] / taken[ours], 2)
        for ours, form in _PAIRS
        if ours in taken and f"serving_embedding_lookup, {form}" in taken
        for function in ("embedding_lookup_sparse", "serving_embedding_lookup")
    }
    native = taken["native"]
    ratios["packed lists / native"] = round(taken["packed lists"] / native, 2)
    if "C bound" in taken:
        ratios["native / C bound"] = round(native / taken["C bound"], 2)
    return {"difference": found["difference"], "us": {name: round(value, 1) for name, value in taken.items()}, **ratios}


_PAIRS = [
    ("packed", "at its best"),
    ("packed lists", "at its best"),
    ("packed lists", "by name"),
    ("serving_default", "by name"),
    ("serving_default, lists", "by name"),
]


def _shape(rounds: int, rows: int, batch: int, hot: int, padded: bool) -> Shape:
    rng = np.random.default_rng(batch + hot)
    requests = [_feeds(rng, rows, batch, hot, padded) for _ in range(REQUESTS[batch])]
    name = f"batch {batch}, hotness {hot}{', padded' if padded else ''}"
    feeds = {contender: [request[contender] for request in requests] for contender in requests[0]}
    return Shape(name=name, batch=batch, rounds=rounds * ROUNDS[batch], feeds=feeds)


def _feeds(rng: np.random.Generator, rows: int, batch: int, hot: int, padded: bool) -> dict[str, Feed]:
    """The inputs of every contender, all of the same ids."""
    ids = rng.integers(0, rows, (FEATURES, batch, hot))
    if padded:
        ids[np.arange(hot) >= rng.integers(1, hot + 1, (FEATURES, batch, 1))] = -1
    matrix = np.ascontiguousarray(ids.transpose(1, 0, 2)).reshape(batch, -1)
    named = dict(zip(NAMES, ids, strict=True))
    parts = {f"{name}/indices": np.argwhere(value >= 0) for name, value in named.items()}
    parts |= {f"{name}/values": value[value >= 0] for name, value in named.items()}
    parts |= {f"{name}/shape": np.array([batch, hot]) for name in NAMES}
    feeds: dict[str, Feed] = {"packed lists": {"ids": matrix}, "serving_default, lists": named}
    feeds["native"] = {"ids": matrix}
    if not padded:
        feeds["C bound"] = {"ids": matrix}
    for function in ("embedding_lookup_sparse", "serving_embedding_lookup"):
        feeds[f"{function}, by name"] = parts
        if not padded:  # lists of one length have the same indices
            feeds[f"{function}, at its best"] = parts | {"indices": parts["f00/indices"], "shape": parts["f00/shape"]}
    if hot == 1:
        feeds["packed"] = {"ids": matrix}
        feeds["serving_default"] = {name: value[:, 0] for name, value in named.items()}
    return feeds


# ---- the models


def write_models(made: str, rows: int) -> None:
    """Write all models and `contenders.json` into the folder `made`, and print where TensorFlow is installed."""
    import tensorflow as tf

    from tpuembed import export_saved_model

    place = Path(made)
    rng = np.random.default_rng(0)
    tables = {name: tf.Variable(rng.standard_normal((rows, DIM), np.float32) * SCALE, name=name) for name in NAMES}
    prefix = tf.train.Checkpoint(**tables).write(str(place / "ckpt"))
    contenders = []
    for form, packed, named in (("id", "packed", "serving_default"), ("ids", "packed lists", "serving_default, lists")):
        features = {name: {"table": name, "input": form, "combiner": "sum"} for name in NAMES}
        report = export_saved_model(prefix, place / "model", serving_config={"features": features}, layout="mmap")
        contenders += contenders_of(report.path, {"packed": packed, "serving_default": named})
        if form == "ids":
            one = {"version": str(report.path), "inputs": {}, "outputs": {}}
            contenders += [{**one, "name": "native", "how": "native"}, {**one, "name": "C bound", "how": "bound"}]
    contenders += contenders_of(_write_lookups(place / "tensorflow", tables), None)
    (place / "contenders.json").write_text(json.dumps(contenders))
    print(Path(tf.__file__).parent)


def contenders_of(version: Path, names: Mapping[str, str] | None) -> list[dict[str, Any]]:
    """Of the signatures called so in a SavedModel; of all where no names are given."""
    from tensorflow.core.protobuf import saved_model_pb2

    saved = saved_model_pb2.SavedModel.FromString((version / "saved_model.pb").read_bytes())
    signatures = {key: value for key, value in saved.meta_graphs[0].signature_def.items() if not key.startswith("__")}
    return [
        {
            "name": _BASELINES[key] if names is None else names[key],
            "version": str(version),
            "inputs": {name: info.name for name, info in signature.inputs.items()},
            "outputs": {name: info.name for name, info in signature.outputs.items()},
        }
        for key, signature in signatures.items()
        if names is None or key in names
    ]


_BASELINES = {
    "sparse_named": "embedding_lookup_sparse, by name",
    "sparse_best": "embedding_lookup_sparse, at its best",
    "serving_named": "serving_embedding_lookup, by name",
    "serving_best": "serving_embedding_lookup, at its best",
}


def _write_lookups(path: Path, tables: Mapping[str, Any]) -> Path:
    """A SavedModel of TensorFlow's lookups in `tables`."""
    import tensorflow as tf

    embedding = tf.tpu.experimental.embedding
    configs = {
        name: embedding.FeatureConfig(
            embedding.TableConfig(table.shape[0], table.shape[1], combiner="sum", name=name), name=name
        )
        for name, table in tables.items()
    }

    def sparse(ids: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: tf.nn.embedding_lookup_sparse(table, ids[name], None, combiner="sum")
            for name, table in tables.items()
        }

    def serving(ids: Mapping[str, Any]) -> dict[str, Any]:
        by_config = {config.table: tables[name] for name, config in configs.items()}
        return dict(embedding.serving_embedding_lookup(dict(ids), None, by_config, configs))

    root = tf.Module()
    root.tables = list(tables.values())
    signatures = {}
    for name, lookup in (("sparse", sparse), ("serving", serving)):
        signatures[f"{name}_named"] = _signature(lookup, shared=False)
        signatures[f"{name}_best"] = _signature(lookup, shared=True)
    tf.saved_model.save(root, str(path), signatures=signatures)
    return path


def _signature(lookup: Callable[[Mapping[str, Any]], dict[str, Any]], shared: bool) -> Any:
    """`lookup` of SparseTensors in parts; `shared`: of the same indices and shape, and to one matrix."""
    import tensorflow as tf

    kinds = {"indices": [None, 2], "values": [None], "shape": [2]}
    own = ("values",) if shared else tuple(kinds)
    names = {f"{name}/{kind}": kinds[kind] for name in NAMES for kind in own}
    names |= {kind: kinds[kind] for kind in kinds if kind not in own}
    specs = {name: tf.TensorSpec(shape, tf.int64, name=name) for name, shape in names.items()}

    @tf.function(input_signature=[specs], autograph=False)
    def answer(parts: Mapping[str, Any]) -> dict[str, Any]:
        ids = {
            name: tf.SparseTensor(*(parts[kind if kind not in own else f"{name}/{kind}"] for kind in kinds))
            for name in NAMES
        }
        found = lookup(ids)
        return {"activations": tf.concat([found[name] for name in NAMES], 1)} if shared else found

    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1, help="of TensorFlow, for a model")
    parser.add_argument(
        "--cpu", action="store_true", help="processor time instead of wall time, where others use the machine"
    )
    parser.add_argument("--rows", type=int, default=100_000, help="of each table")
    parser.add_argument("--folder", help="where to write the models")
    print(json.dumps(run(**vars(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
