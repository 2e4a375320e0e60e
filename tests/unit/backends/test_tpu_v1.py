"""What the V1 accelerator's backend keeps on the hosts: checkpoints written and read, rows written. The TPUs are stand-ins."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.tpu import tpu_embedding_v2

from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, open_checkpoint
from tpuembed.backends import LayerOptions, tpu_v1
from tpuembed.backends.table_state import TablesNode
from tpuembed.backends.tf_tpu import HardwareEngine
from tpuembed.backends.tpu_v1 import TpuV1Backend
from tpuembed.config import Adam

HOSTS = ["/job:localhost/replica:0/task:0/device:CPU:0"] * 3
FEATURES = [
    ("seen", FeatureConfig(TableConfig(11, 4, "videos"))),
    ("user", FeatureConfig(TableConfig(2, 8, "users"))),  # fewer rows than hosts
]


class Accelerator:
    """Rows in the TPUs' memory, as the load and retrieve ops would put and get them."""

    def __init__(self) -> None:
        self.memory: dict[tuple[str, str], list[Any]] = {}
        self.loads = 0

    def load(self, engine: Any) -> None:
        self.loads += 1
        for table, variables in engine.tables.items():
            for role, variable in variables.items():
                self.memory[table, role] = [shard.numpy() for shard in variable.variables]

    def retrieve(self, engine: Any) -> None:
        for (table, role), shards in self.memory.items():
            for shard, rows in zip(engine.tables[table][role].variables, shards, strict=True):
                shard.assign(rows)


@contextlib.contextmanager
def stand_ins() -> Iterator[Accelerator]:
    """Three hosts whose TPUs are an `Accelerator`."""
    made = Accelerator()
    create = tpu_embedding_v2.TPUEmbedding._create_variables_and_slots

    def on_hosts(engine: Any) -> Any:
        engine._using_tpu, engine._hosts = True, HOSTS
        return create(engine)

    with (
        mock.patch.object(tpu_embedding_v2.TPUEmbedding, "_create_variables_and_slots", on_hosts),
        mock.patch.object(HardwareEngine, "_load_variables", lambda engine: made.load(engine)),
        mock.patch.object(HardwareEngine, "_retrieve_variables", lambda engine: made.retrieve(engine)),
        mock.patch.object(tpu_v1, "_reserve"),  # several layers, one after another
    ):
        yield made


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    with stand_ins() as made:
        yield made


class Layer(tf.Module):
    """The layer's checkpoint node over the backend, without Keras."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__()
        updates = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.backend = TpuV1Backend(LayerOptions(FEATURES, Adam(learning_rate=0.1), updates))
        tables = {feature.table.name: feature.table for _, feature in FEATURES}
        config = {
            "tables": {name: {**table.to_dict(), "optimizer": {"kind": "adam"}} for name, table in tables.items()},
            "features": {path: feature.to_dict() for path, feature in FEATURES},
        }
        children = self.backend.checkpoint_children()
        self._tpu_embedding = TablesNode(config, list(self.backend.states.values()), children, {}, updates)
        accelerator.load(self.backend.engine)


def train(accelerator: Accelerator) -> dict[tuple[str, str], Any]:
    """Other rows in the TPUs than on the hosts; the truth."""
    random = np.random.default_rng(3)
    for shards in accelerator.memory.values():
        for index, shard in enumerate(shards):
            shards[index] = random.normal(size=shard.shape).astype(np.float32)
    return {key: np.concatenate(shards) for key, shards in accelerator.memory.items()}


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
    for table, state in host.layer._parts.backend.states.items():
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
