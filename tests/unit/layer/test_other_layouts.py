"""A checkpoint that SparseCores wrote, restored into a layer off the TPU by TensorFlow's own `tf.train.Checkpoint`.

Its tensors are permuted and padded, and may have the very names and shapes of the layer's tables.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.checkpoint.tpu_checkpoints import random_values, sparse_core_embedding
from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding
from tpuembed.errors import CheckpointMismatchError

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
    for table, state in model.layer._parts.backend.states.items():
        found = {"parameters": state.variable, **state.slots}
        assert found.keys() == values[table].keys()
        for role, variable in found.items():
            np.testing.assert_array_equal(variable.numpy(), values[table][role], err_msg=f"{table}/{role}")


def test_a_layer_of_other_tables_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, random_values(ALIGNED, "adagrad"), "adagrad", 1)
    model = Model({"lone": (120, 8)}, "adagrad")
    with refused(CheckpointMismatchError, match="Table 'lone'"):
        tf.train.Checkpoint(model=model).restore(path)


def test_a_checkpoint_in_row_order_is_restored_as_before(tmp_path: Path) -> None:
    first, second = Model(STACKED, "adam"), Model(STACKED, "adam")
    path = tf.train.Checkpoint(model=first).write(str(tmp_path / "ckpt"))
    tf.train.Checkpoint(model=second).read(path).assert_consumed()
    for table, state in first.layer._parts.backend.states.items():
        np.testing.assert_array_equal(second.layer._parts.backend.states[table].variable, state.variable)
