"""A checkpoint that SparseCores wrote, restored into a layer off the TPU by TensorFlow's own `tf.train.Checkpoint`.

Its tensors are permuted and padded, and may have the very names and shapes of the layer's tables.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.checkpoint.tpu_checkpoints import random_values, sparse_core_embedding
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding

ALIGNED = {"lone": (128, 8)}
"""Eight SparseCores need no padding here: the stack has the table's name and shape."""
STACKED = {"a": (100, 16), "b": (37, 12), "d": (1000, 16)}


def save(folder: Path, values: Any, optimizer: str, devices: int) -> str:
    embedding = sparse_core_embedding(values, optimizer, devices=devices)
    root, layer = tf.Module(), tf.Module()
    layer._tpu_embedding = embedding
    root.layer = layer
    return str(tf.train.Checkpoint(model=root).write(str(folder / "ckpt")))


class Model(tf.Module):
    """What the checkpoint was written of, with our layer in the other one's place."""

    def __init__(self, shapes: dict[str, tuple[int, int]], optimizer: str) -> None:
        super().__init__()
        features = {name: FeatureConfig(TableConfig(rows, dim, name)) for name, (rows, dim) in shapes.items()}
        self.layer = TPUEmbedding(features, optimizer)


@pytest.mark.parametrize(("shapes", "optimizer"), [(ALIGNED, "adagrad"), (STACKED, "adam"), (STACKED, "sgd")])
@pytest.mark.parametrize("devices", [1, 2])
def test_rows_come_back_by_their_numbers(tmp_path: Path, shapes: Any, optimizer: str, devices: int) -> None:
    values = random_values(shapes, optimizer)
    path = save(tmp_path, values, optimizer, devices)
    model = Model(shapes, optimizer)
    tf.train.Checkpoint(model=model).restore(path)
    truth = {
        table if role == "parameters" else f"{table}/{role}": rows
        for table, roles in values.items()
        for role, rows in roles.items()
    }
    found = model.layer.named_variables()
    assert found.keys() == truth.keys()
    for name, rows in truth.items():
        np.testing.assert_array_equal(found[name].numpy(), rows, err_msg=name)
