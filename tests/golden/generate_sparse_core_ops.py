"""Writes tests/golden/sparse_core_ops with TensorFlow's own kernels; see README.md beside it for how to run it."""

import json
import os
from pathlib import Path
from typing import Any

os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", TPU_LIBRARY_PATH="/nonexistent.so")

import numpy as np
import tensorflow as tf
from tensorflow.python.tpu.ops import gen_xla_ops

ROOT = Path(__file__).parent / "sparse_core_ops"
Array = np.ndarray[Any, Any]


def feature(kind: str, combiner: str, rows: int, offset: int, shift: int, samples: int, **more: Any) -> dict[str, Any]:
    """One feature of a stack: its table has `rows` and begins at column `offset`, rotated by `shift`."""
    return {
        "kind": kind,
        "combiner": combiner,
        "rows": rows,
        "offset": offset,
        "shift": shift,
        "samples": samples,
        **more,
    }


CASES: dict[str, dict[str, Any]] = {
    "one_tpu": {
        "replicas": 1,
        "cores": 4,
        "features": [
            feature("ragged", "mean", 37, 0, 0, 16, weighted=True),
            feature("sparse", "sum", 90, 64, 1, 8, weighted=False),
            feature("dense", "sum", 90, 64, 1, 32, weighted=False),
        ],
    },
    "four_tpus_of_two_cores": {
        "replicas": 4,
        "cores": 2,
        "features": [
            feature("sparse", "sqrtn", 60, 128, 4, 8, weighted=True),
            feature("ragged", "sqrtn", 50, 0, 2, 4, weighted=True),
            feature("ragged", "mean", 50, 0, 2, 4, weighted=False),
        ],
    },
    "negative_weights": {
        "replicas": 2,
        "cores": 4,
        "features": [feature("ragged", "mean", 37, 0, 5, 8, weighted=True, negative=True)],
    },
    "empty": {"replicas": 1, "cores": 2, "features": [feature("sparse", "mean", 37, 0, 1, 8, weighted=True, hot=0)]},
    "dropped": {
        "replicas": 1,
        "cores": 4,
        "per_sample": 2,
        "dropping": True,
        "features": [feature("ragged", "sum", 37, 0, 0, 16, weighted=False, hot=7)],
    },
    "no_room": {
        "replicas": 1,
        "cores": 4,
        "per_sample": 2,
        "features": [feature("ragged", "sum", 37, 0, 0, 16, weighted=False, hot=7)],
    },
    "too_many": {
        "replicas": 1,
        "cores": 4,
        "max_ids": 4,
        "dropping": True,
        "features": [feature("ragged", "sum", 37, 0, 0, 16, weighted=False, hot=7)],
    },
    "too_many_unique": {
        "replicas": 1,
        "cores": 4,
        "max_unique": 2,
        "features": [feature("ragged", "sum", 37, 0, 0, 16, weighted=False, hot=7)],
    },
}


def batch(random: np.random.Generator, of: dict[str, Any]) -> dict[str, Array]:
    """Ids in the form that TensorFlow's class gives them to the op, and weights."""
    counts = random.integers(0, of.get("hot", 4) + 1, of["samples"])
    counts = np.ones_like(counts) if of["kind"] == "dense" else counts
    ids = random.integers(0, min(of["rows"], 12), counts.sum())  # few, so that some are twice in one sample
    weights = random.normal(size=len(ids)) if of.get("negative") else random.random(len(ids))
    where = {
        "ragged": np.concatenate([[0], np.cumsum(counts)]),
        "sparse": np.stack([np.repeat(np.arange(len(counts)), counts), np.zeros(len(ids))], 1),
        "dense": np.zeros(0),
    }[of["kind"]]
    return {
        "indices_or_row_splits": where.astype(np.int32),
        "values": ids.astype(np.int32),
        "weights": (weights if of["weighted"] else np.ones(len(ids))).astype(np.float32),
    }


class Recorder:
    """Calls ops, and keeps what went in and came out: arrays in one file, the rest in truth.json."""

    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}
        self.calls: list[dict[str, Any]] = []

    def __call__(self, case: str, op: str, **arguments: Any) -> Any:
        number = len(self.calls)
        call: dict[str, Any] = {"case": case, "op": op, "inputs": {}, "attributes": {}}
        self.calls.append(call)
        for name, value in arguments.items():
            if self._is_array(value):
                call["inputs"][name] = self._keep(f"{number}/{name}", value)
            else:
                call["attributes"][name] = value
        try:
            results = getattr(gen_xla_ops, op)(**arguments)
        except tf.errors.InvalidArgumentError as error:
            call["error"] = error.message.split("} ")[-1]
            raise
        call["outputs"] = [self._keep(f"{number}/out{index}", value) for index, value in enumerate(results)]
        return results

    def _is_array(self, value: Any) -> bool:
        return hasattr(value, "shape") or (isinstance(value, list) and hasattr(value[0], "shape"))

    def _keep(self, key: str, value: Any) -> str | list[str]:
        if isinstance(value, list):
            return [str(self._keep(f"{key}/{index}", item)) for index, item in enumerate(value)]
        self.arrays[key] = np.asarray(value)
        return key


def run(record: Recorder, name: str, case: dict[str, Any]) -> None:
    """As TPUEmbeddingV2 calls them: feature by feature, SparseCore by SparseCore, then all together."""
    random, cores, replicas = np.random.default_rng(0), case["cores"], case["replicas"]
    stacked = sum(of["samples"] for of in case["features"])
    sizes = {"num_sc_per_chip": cores, "table_name": f"stack of {name}"}
    coos, row_offset = [], 0
    for of in case["features"]:
        coos.append(
            record(
                name,
                "convert_to_list_of_sparse_core_coo_tensors",
                **batch(random, of),
                sample_count=of["samples"],
                num_sc_per_chip=cores,
                row_offset=row_offset,
                col_offset=of["offset"],
                col_shift=of["shift"],
                num_sc_shards=cores * replicas,
                stacked_table_sample_count=stacked,
                combiner=of["combiner"],
            )
        )
        row_offset += of["samples"]
    of_table = {"num_replica": replicas, "table_vocab_size": 256, "feature_width": 8}
    ordered = [
        record(
            name,
            "sort_list_of_sparse_core_coo_tensors",
            row_ids_list=[coo[0][core] for coo in coos],
            col_ids_list=[coo[1][core] for coo in coos],
            gains_list=[coo[2][core] for coo in coos],
            sample_count_list=[of["samples"] // cores for of in case["features"]],
            col_offset_list=[of["offset"] for of in case["features"]],
            max_ids_per_sparse_core=case.get("max_ids", 64),
            max_unique_ids_per_sparse_core=case.get("max_unique", 64),
            **sizes,
            **of_table,
        )
        for core in range(cores)
    ]
    record(
        name,
        "convert_to_sparse_core_csr_wrapped_coo_tensor",
        sorted_row_ids_list=[item[0] for item in ordered],
        sorted_col_ids_list=[item[1] for item in ordered],
        sorted_gains_list=[item[2] for item in ordered],
        id_counts_list=[item[3] for item in ordered],
        splits=np.int64(0),
        sample_count_per_sc=stacked // cores,
        max_minibatches_per_sc=4,
        max_ids_per_chip_per_sample=case.get("per_sample", 16),
        table_name=sizes["table_name"],
        allow_id_dropping=case.get("dropping", False),
        **of_table,
    )


def main() -> None:
    record, failed = Recorder(), []
    for name, case in CASES.items():
        try:
            run(record, name, case)
        except tf.errors.InvalidArgumentError:
            failed.append(name)
    assert failed == ["no_room", "too_many", "too_many_unique"], failed
    ROOT.mkdir()
    arrays: dict[str, Any] = record.arrays
    np.savez_compressed(ROOT / "arrays.npz", **arrays)
    (ROOT / "truth.json").write_text(
        json.dumps({"tensorflow": tf.__version__, "calls": record.calls}, indent=1, sort_keys=True) + "\n"
    )


if __name__ == "__main__":
    main()
