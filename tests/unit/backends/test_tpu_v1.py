"""What the V1 accelerator's backend keeps on the hosts: checkpoints written and read, rows written. The TPUs are stand-ins."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.support.layer.tpu_v1 import FEATURES, Accelerator, Layer, stand_ins, train
from tpuembed import TPUEmbedding, open_checkpoint


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    with stand_ins() as made:
        yield made


def test_a_checkpoint_holds_what_the_accelerator_trained(tmp_path: Path, accelerator: Accelerator) -> None:
    layer = Layer(accelerator)
    truth = train(accelerator)
    path = tf.train.Checkpoint(layer=layer).save(str(tmp_path / "ckpt"))
    with open_checkpoint(path) as checkpoint:
        assert {(name, info.rows, info.dim) for name, info in checkpoint.tables().items()} == {
            ("videos", 11, 4),
            ("users", 2, 8),
        }
        for (table, role), rows in truth.items():
            slot = None if role == "parameters" else role
            np.testing.assert_array_equal(checkpoint.read(table, 0, len(rows), slot), rows)


def test_a_restored_checkpoint_is_loaded_into_the_accelerator(tmp_path: Path, accelerator: Accelerator) -> None:
    layer = Layer(accelerator)
    truth = train(accelerator)
    path = tf.train.Checkpoint(layer=layer).save(str(tmp_path / "ckpt"))
    train(accelerator)
    other = Layer(accelerator)
    tf.train.Checkpoint(layer=other).restore(path)
    for key, rows in truth.items():
        np.testing.assert_array_equal(np.concatenate(accelerator.memory[key]), rows)


def test_a_host_layers_checkpoint_is_loaded_too(tmp_path: Path, accelerator: Accelerator) -> None:
    class Host(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = TPUEmbedding(dict(FEATURES), "adam")

    host = Host()
    path = tf.train.Checkpoint(root=host).write(str(tmp_path / "ckpt"))

    class Tpu(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer(accelerator)

    tpu = Tpu()
    train(accelerator)
    tf.train.Checkpoint(root=tpu).restore(path)
    for table, state in host.layer.core.backend.states.items():
        np.testing.assert_array_equal(np.concatenate(accelerator.memory[table, "parameters"]), state.variable.numpy())
        for slot, variable in state.slots.items():
            np.testing.assert_array_equal(np.concatenate(accelerator.memory[table, slot]), variable.numpy())


def test_tables_are_read_from_and_written_to_the_accelerator(accelerator: Accelerator) -> None:
    layer = Layer(accelerator)
    truth = train(accelerator)["videos", "velocities"]
    table = layer.backend.states["videos"].slots["velocities"]
    np.testing.assert_array_equal(table.numpy(), truth)
    loads = accelerator.loads
    with layer.backend.writing():
        table.assign_rows(3, np.full((5, 4), 7.0, np.float32))
    assert accelerator.loads == loads + 1
    truth[3:8] = 7.0
    np.testing.assert_array_equal(np.concatenate(accelerator.memory["videos", "velocities"]), truth)
    table.assign(truth + 1)
    np.testing.assert_array_equal(np.concatenate(accelerator.memory["videos", "velocities"]), truth + 1)
    np.testing.assert_array_equal(table.numpy(), truth + 1)


def test_shards_begin_with_different_rows(accelerator: Accelerator) -> None:
    """Keras' initializers give the same numbers whenever they are called."""
    shards = [shard.numpy() for shard in Layer(accelerator).backend.engine.tables["videos"]["parameters"].variables]
    assert [shard.shape for shard in shards] == [(4, 4), (4, 4), (3, 4)]
    rows = np.concatenate(shards)
    assert len(np.unique(rows)) == rows.size
    assert np.abs(rows).max() <= 2 / np.sqrt(4), "cut at two standard deviations of 1/sqrt(dim)"
