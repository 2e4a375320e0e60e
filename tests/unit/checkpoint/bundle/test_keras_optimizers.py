"""Which slots are listed of each of Keras 3's optimizers: those that TensorFlow's embedding optimizers have too, by their names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tpuembed.checkpoint import open_checkpoint
from tpuembed.errors import UnknownTableError

K = keras.optimizers
ADAM = {"momenta": "momentum", "velocities": "velocity"}
"""A slot's name -> what Keras calls the variable."""

EXACT: list[tuple[Any, Mapping[str, str]]] = [
    (lambda: K.SGD(0.1), {}),
    (lambda: K.SGD(0.1, momentum=0.9), {"momenta": "momentum"}),
    (lambda: K.Adagrad(0.1), {"accumulators": "accumulator"}),
    (lambda: K.Ftrl(0.1), {"accumulators": "accumulator", "linears": "linear"}),
    (lambda: K.Adam(0.1), ADAM),
    (lambda: K.AdamW(0.1), ADAM),
]
"""Optimizers of which every kind of file tells the slots."""
GRAPH_ONLY: list[tuple[Any, Mapping[str, str]]] = [
    (lambda: K.Adam(0.1, amsgrad=True), ADAM),
    (lambda: K.Adam(0.1, use_ema=True), ADAM),
    (lambda: K.Adam(0.1, gradient_accumulation_steps=2), ADAM),
    (lambda: K.LossScaleOptimizer(K.Adam(0.1)), ADAM),
]
"""Of which numbered arrays do not tell them, and objects do."""
OTHERS: list[tuple[Any, Mapping[str, str]]] = [
    (lambda: K.RMSprop(0.1), {}),
    (lambda: K.RMSprop(0.1, momentum=0.9), {}),
    (lambda: K.RMSprop(0.1, momentum=0.9, centered=True), {}),
    (lambda: K.Lion(0.1), {}),
    (lambda: K.Nadam(0.1), {}),
    (lambda: K.Adamax(0.1), {}),
    (lambda: K.Adadelta(0.1), {}),
    (lambda: K.Adafactor(0.1), {}),
    (lambda: K.Muon(0.1), {}),
]
"""Whose slots are other quantities, whatever they are called."""


class EmbedReduce(keras.layers.Layer):
    """Looks up in a table as keras-rs' own does."""

    def __init__(self) -> None:
        super().__init__(name="table")
        self.embeddings = self.add_weight(shape=(9, 4), name="embeddings")


@keras.saving.register_keras_serializable("tests")
class DistributedEmbedding(keras.layers.Layer):
    """Keeps a table where keras-rs' layer does."""

    def __init__(self) -> None:
        super().__init__(name="de")
        self._default_device_embedding_layers = {"table": EmbedReduce()}
        self.built = True

    def call(self, ids: Any) -> Any:
        return keras.ops.take(self._default_device_embedding_layers["table"].embeddings, ids, axis=0)


def trained(optimizer: Any, lookup: Any) -> Any:
    """A model that was compiled; every matrix of the optimizer's has other numbers."""
    ids = keras.Input((), dtype="int32")
    model = keras.Model(ids, keras.layers.Dense(1, name="head")(lookup(ids)))
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
    rng = np.random.default_rng(1)
    for variable in (*optimizer.variables, *getattr(optimizer, "inner_optimizer", optimizer).variables):
        if len(variable.shape) == 2:
            variable.assign(rng.normal(size=variable.shape))
    return model


def kept(optimizer: Any, slot: str) -> Any:
    """What the optimizer itself calls a slot of the table."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    [found] = [variable for variable in inner.variables if variable.path.endswith(f"_embeddings_{slot}")]
    return found.numpy()


def check(path: Any, table: str, optimizer: Any, slots: Mapping[str, str]) -> None:
    with open_checkpoint(path) as checkpoint:
        assert set(checkpoint.tables()[table].slots) == set(slots)
        for ours, theirs in slots.items():
            np.testing.assert_array_equal(checkpoint.read(table, slot=ours), kept(optimizer, theirs))
        for slot in {"accumulators", "linears", "momenta", "velocities"} - set(slots):
            with pytest.raises(UnknownTableError, match=f"has no slot '{slot}'"):
                checkpoint.read(table, slot=slot)


@pytest.mark.parametrize(("make", "slots"), [*EXACT, *GRAPH_ONLY, *OTHERS])
def test_slots_are_found_in_an_object_graph(make: Any, slots: Mapping[str, str], tmp_path: Path) -> None:
    model = trained(make(), keras.layers.Embedding(9, 4))
    prefix = tf.train.Checkpoint(model=model).write(str(tmp_path / "ckpt"))
    check(prefix, "model/_operations/1/_embeddings", model.optimizer, slots)
    with open_checkpoint(prefix) as checkpoint:
        assert set(checkpoint.tables()) == {"model/_operations/1/_embeddings", "model/_operations/2/_kernel"}


@pytest.mark.parametrize(("make", "slots"), [*EXACT, *((make, {}) for make, _ in (*GRAPH_ONLY, *OTHERS))])
@pytest.mark.sampled(6)
def test_slots_are_found_by_number(make: Any, slots: Mapping[str, str], tmp_path: Path) -> None:
    """A `.keras` file."""
    model = trained(make(), DistributedEmbedding())
    model.save(tmp_path / "model.keras")
    check(tmp_path / "model.keras", "table", model.optimizer, slots)
