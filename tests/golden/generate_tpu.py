"""Writes the checkpoints under tests/golden/tpu with TensorFlow's own classes; see README.md beside it for how to run it."""

import json
import os
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow as tf

from tests.support.checkpoint.tpu_checkpoints import (
    SLOTS,
    Values,
    host_embedding,
    random_values,
    sparse_core_embedding,
)

ROOT = Path(__file__).parent / "tpu"
SHAPES = {"a": (20, 6), "b": (67, 8), "lone": (3, 12), "video/e.1": (33, 5)}
"""On SparseCores all but "lone" share a stack."""


def save_golden(folder: Path, tables: dict[str, dict[str, Any]], checkpoint: str, **more: Any) -> None:
    """The truth as .npy files, and truth.json, which says what each is."""
    named: dict[str, Any] = {}
    for number, (name, roles) in enumerate(tables.items()):
        files = {role: f"table{number}{'' if role == 'parameters' else '-' + role}.npy" for role in roles}
        for role, rows in roles.items():
            np.save(folder / files[role], rows)
        named[name] = {"rows": files.pop("parameters"), "slots": files}
    truth = {"checkpoint": checkpoint, "tables": named, "tensorflow": tf.__version__, **more}
    (folder / "truth.json").write_text(json.dumps(truth, indent=1, sort_keys=True) + "\n")


def layer(name: str, embedding: Any, values: Values) -> None:
    folder = ROOT / name
    folder.mkdir(parents=True)
    tf.train.Checkpoint(model=tf.train.Checkpoint(emb=embedding)).write(str(folder / "ckpt"))
    save_golden(folder, values, "ckpt")


def sparse_cores(optimizer: str, devices: int) -> None:
    values = random_values(SHAPES, optimizer)
    layer(f"sparse_cores_{devices}_{optimizer}", sparse_core_embedding(values, optimizer, devices=devices), values)


def hosts(optimizer: str, count: int) -> None:
    values = random_values(SHAPES, optimizer)
    layer(f"hosts_{count}_{optimizer}", host_embedding(values, optimizer, count), values)


def partitioned(strategy: str) -> None:
    """The truth is what tf.nn.embedding_lookup finds."""
    folder = ROOT / f"partitioned_{strategy}"
    folder.mkdir(parents=True)
    random, found = np.random.default_rng(0), {}
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        for name, (rows, dim) in {"scope/emb": (23, 5), "other": (8, 3)}.items():
            initial = tf.constant(random.normal(size=(rows, dim)).astype(np.float32))
            partitioner = tf.compat.v1.fixed_size_partitioner(4)
            variable = tf.compat.v1.get_variable(name, initializer=initial, partitioner=partitioner)
            session.run(tf.compat.v1.global_variables_initializer())
            lookup = tf.compat.v1.nn.embedding_lookup(variable, np.arange(rows), partition_strategy=strategy)
            found[name] = {"parameters": session.run(lookup)}
        session.run(tf.compat.v1.global_variables_initializer())
        tf.compat.v1.train.Saver().save(session, str(folder / "model"), write_meta_graph=False, write_state=False)
    save_golden(folder, found, "model", options={"partition_strategy": strategy})


def main() -> None:
    assert set(SLOTS) == {"sgd", "adagrad", "adam", "ftrl", "adagrad_momentum"}
    for optimizer, devices in [("adagrad_momentum", 2), ("adam", 8), ("sgd", 1)]:
        sparse_cores(optimizer, devices)
    for optimizer, count in [("ftrl", 4), ("adagrad", 2)]:
        hosts(optimizer, count)
    for strategy in ("mod", "div"):
        partitioned(strategy)


if __name__ == "__main__":
    main()
