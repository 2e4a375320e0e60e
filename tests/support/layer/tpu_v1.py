"""The backend of TPU v2 to v4 on three hosts whose TPUs are stand-ins."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf
from tensorflow.python.tpu import tpu_embedding_v2

from tpuembed import FeatureConfig, TableConfig
from tpuembed.backends import LayerOptions
from tpuembed.backends.table_state import TablesNode
from tpuembed.backends.tpu import tpu_v1
from tpuembed.backends.tpu.tf_tpu import HardwareEngine
from tpuembed.backends.tpu.tpu_v1 import TpuV1Backend
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
        self._tpu_embedding = TablesNode(self.name, config, list(self.backend.states.values()), children, {}, updates)
        accelerator.load(self.backend.engine)


def train(accelerator: Accelerator) -> dict[tuple[str, str], Any]:
    """Other rows in the TPUs than on the hosts; the truth."""
    random = np.random.default_rng(3)
    for shards in accelerator.memory.values():
        for index, shard in enumerate(shards):
            shards[index] = random.normal(size=shard.shape).astype(np.float32)
    return {key: np.concatenate(shards) for key, shards in accelerator.memory.items()}
