"""Checkpoints of tables whose rows have names, as a layer saves them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import tensorflow as tf

from tests.support.layer.restored import Tables, layer_for
from tpuembed import TPUEmbedding
from tpuembed.backends.tf_config import SavedNode
from tpuembed.vocabulary import Vocabulary, attribute_of

__all__ = ["named_layer", "write_named", "write_named_weights"]


class _Vocabularies(SavedNode):
    def __init__(self, contents: Mapping[str, bytes]) -> None:
        self._contents = contents

    def _serialize_to_tensors(self) -> dict[str, Any]:
        return {attribute_of(table): tf.constant(np.frombuffer(one, np.uint8)) for table, one in self._contents.items()}

    def _restore_from_tensors(self, restored: Mapping[str, Any]) -> Any:
        return tf.no_op()


def named_layer(tables: Tables, count: int = 7, **options: Any) -> TPUEmbedding:
    """A layer that holds these tables."""
    layer = layer_for(tables, **options)
    for name, state in layer.core.backend.states.items():
        for slot, variable in [(None, state.variable), *state.slots.items()]:
            variable.assign(tables[name][slot])
    layer._tpu_embedding.updates.assign(count)
    return layer


def write_named(path: Path, layer: TPUEmbedding, vocabularies: Mapping[str, Vocabulary | bytes], **beside: Any) -> str:
    """Write a checkpoint of `layer` with `vocabularies` by TensorFlow. `beside` are other objects in it."""
    contents = {table: one if isinstance(one, bytes) else one.to_bytes() for table, one in vocabularies.items()}
    held = tf.train.Checkpoint(_tpu_embedding=layer._tpu_embedding, _vocabularies=_Vocabularies(contents))
    if layer._row_stamps is not None:
        held._row_stamps = layer._row_stamps
    return str(tf.train.Checkpoint(layer=held, **beside).write(str(path)))


def write_named_weights(path: Path, layer: TPUEmbedding, vocabularies: Mapping[str, Vocabulary | bytes]) -> str:
    """Write the weights of a Keras model of `layer`, and `vocabularies` beside its tables, into `path`, a `.weights.h5` file."""
    import keras

    ids = {name: keras.Input((), dtype="int64", name=name) for name in layer.core.features}
    keras.Model(ids, layer(ids)).save_weights(path)
    with h5py.File(path, "r+") as file:
        found: list[str] = []
        file.visit(lambda name: found.append(name) if name.endswith("|config") else None)
        group = file[found[0].rpartition("/")[0]]
        for table, one in vocabularies.items():
            content = one if isinstance(one, bytes) else one.to_bytes()
            name = "|vocabulary|" + table.replace("/", "|")
            if name in group:
                del group[name]
            group[name] = np.frombuffer(content, np.uint8)
    return str(path)
