"""Writes the checkpoints under tests/golden/tensorflow, none of them by a TPU; see README.md beside it for how to run it."""

import os
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf

import tpuembed
from tests.golden.generate_tpu import SHAPES, save_golden
from tests.support.checkpoint.tpu_checkpoints import random_values, serving_embedding

ROOT = Path(__file__).parent / "tensorflow"
OWN = {"a": "adam", "b": "ftrl", "lone": "sgd", "video/e.1": "adagrad_momentum"}
"""Every rule that has slots, and one that has none."""


def new_folder(name: str) -> Path:
    folder = ROOT / name
    folder.mkdir(parents=True)
    return folder


def saved_model() -> None:
    folder, values = new_folder("saved_model"), random_values(SHAPES, "adagrad_momentum")
    module = tf.Module()
    module.emb, module.kernel = serving_embedding(values, "adagrad_momentum"), tf.Variable(tf.ones((3, 3)))
    tf.saved_model.save(module, str(folder / "model"))
    save_golden(folder, values, "model")


def own_layer() -> None:
    folder = new_folder("own_layer")
    tables = {name: tpuembed.TableConfig(*SHAPES[name], name, optimizer=rule) for name, rule in OWN.items()}
    layer = tpuembed.TPUEmbedding({name: tpuembed.FeatureConfig(table) for name, table in tables.items()})
    layer({name: tf.constant([0]) for name in tables})
    held: dict[str, dict[str, Any]] = {}
    for name, rule in OWN.items():
        values = random_values(SHAPES, rule)[name]
        for role, rows in values.items():
            child = name if role == "parameters" else f"{name}/{role}"
            layer._tpu_embedding._lookup_dependency(child).assign(rows)
        held[name] = values
    tf.train.Checkpoint(model=tf.train.Checkpoint(layer=layer)).write(str(folder / "ckpt"))
    save_golden(folder, held, "ckpt")


def main() -> None:
    saved_model()
    own_layer()


if __name__ == "__main__":
    main()
