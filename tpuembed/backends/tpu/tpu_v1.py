"""TPU v2 to v4: tables are sharded over the memories of the TPUs. Their embedding accelerator looks them up and trains
them.

The hosts enqueue the ids of a step. The replicated program receives the activations and sends their gradients back. The
accelerator applies the configured optimizer. All of it uses `tf.tpu.experimental.embedding.TPUEmbedding`.
"""

import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf

from tpuembed.backends.backend import Backend, TrainingStep
from tpuembed.backends.layer_call import LayerCall
from tpuembed.backends.layer_options import LayerOptions
from tpuembed.backends.table_state import TableState
from tpuembed.backends.tpu.accelerator import (
    HostStamps,
    ShapesOnly,
    StepGuard,
    bind_features,
    check_ids,
    check_tables,
    given_weights,
    saved_variables,
)
from tpuembed.backends.tpu.activation_shapes import Shape, activation_shapes, check_same_shapes
from tpuembed.backends.tpu.tf_tpu import HardwareEngine
from tpuembed.errors import ConfigError, TrainingError
from tpuembed.lookup import Ids

__all__ = ["AcceleratorTable", "TpuV1Backend"]

Tensor = Any

_HARDWARE = "the TPU's embedding accelerator"
_layers: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()


class AcceleratorTable:
    """A table, or a slot of one, in the accelerator's memory. It is read and written through the hosts' copy."""

    dtype = tf.float32

    def __init__(self, engine: HardwareEngine, variable: Any) -> None:
        """Wrap `variable`, the hosts' copy, with consecutive rows on each host."""
        self._engine, self._variable = engine, variable
        self.shape = variable.shape

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return float32 [rows, dim], fetched from the accelerator."""
        self._engine.fetch()
        return np.concatenate([shard.numpy() for shard in self._variable.variables])

    def read_rows(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Return rows [start, stop) of the hosts' copy. After a `fetch`, they equal the accelerator's rows."""
        parts = [shard[low:high].numpy() for shard, low, high in self._parts(start, stop)]
        return np.concatenate(parts) if parts else np.empty((0, self.shape[1]), np.float32)

    def assign(self, values: Any) -> None:
        """Write float32 [rows, dim] into the accelerator."""
        with self._engine.writing():
            self.assign_rows(0, np.asarray(values))

    def assign_rows(self, start: int, values: np.ndarray[Any, Any]) -> None:
        """Write the rows [start, start + len(values)) on the hosts. The engine's `writing` loads them into the accelerator."""
        done = 0
        for shard, low, high in self._parts(start, start + len(values)):
            shard[low:high].assign(values[done : done + high - low])
            done += high - low

    def _parts(self, start: int, stop: int) -> Iterator[tuple[Any, int, int]]:
        """Yield (a host's variable, its first row, its last row) for each host with some of the rows [start, stop), in order."""
        begin = 0
        for shard in self._variable.variables:
            end = begin + shard.shape[0]
            low, high = max(begin, start), min(end, stop)
            if low < high:
                yield shard, low - begin, high - begin
            begin = end


class TpuV1Backend(Backend):
    """Tables in the accelerator. A checkpoint holds them in row order, as slices of one tensor."""

    def __init__(self, layer_options: LayerOptions) -> None:
        """Allocate the tables on the hosts. The accelerator gets them when the shapes of the first batch are known.

        Raises:
            ConfigError: the accelerator does not support a table or an optimizer.
            TrainingError: another layer uses the accelerator.
        """
        strategy = tf.distribute.get_strategy()
        check_tables(layer_options.tables, _HARDWARE)
        _check_policies(layer_options)
        features, specs = bind_features(layer_options)
        self._stamps = HostStamps(layer_options, specs, _HARDWARE)
        _reserve(strategy, self)
        self.engine = HardwareEngine(features, layer_options.pipelining)
        self.states: Mapping[str, TableState] = {
            table.name: self._state(table, specs[table.name]) for table in layer_options.tables
        }
        self._batch_size = layer_options.batch_size
        self._first_shapes: list[Shape] = []
        self._guard = StepGuard([path for path, _ in layer_options.features], _HARDWARE)
        self._names = itertools.count(1)

    def _state(self, table: Any, spec: Any) -> TableState:
        views = {name: AcceleratorTable(self.engine, v) for name, v in self.engine.tables[table.name].items()}
        return TableState(table, spec, views.pop("parameters"), views, self._stamps.variables.get(table.name))

    def checkpoint_children(self) -> dict[str, Any]:
        """Return the hosts' variables by name, and TensorFlow's object, whose save callback fetches them from the accelerator."""
        return {"_engine": self.engine, **saved_variables(self.engine.tables)}

    def writing(self) -> AbstractContextManager[None]:
        """Return a context. Rows written inside it are in the accelerator when it ends."""
        return self.engine.writing()

    def fetch(self) -> None:
        """Fetch the tables from the accelerator to the hosts."""
        self.engine.fetch()

    def lookup(self, features: Sequence[Ids]) -> list[Tensor]:
        """Return the activations of `features`."""
        return self.begin(features, None).lookup()

    def begin(self, features: Sequence[Ids], call: LayerCall | None) -> TrainingStep:
        """Enqueue the ids of `features`, and return their training step.

        It always enqueues for training. A graph pass changes that to inference if no gradients are sent under the same
        name.
        """
        entered, shapes = self._guard.enter(features, call), activation_shapes(features, self._batch_size)
        if not entered:
            return ShapesOnly(shapes, features)
        _check_kinds(features)
        self._first_shapes = self._first_shapes or shapes
        check_same_shapes(features, shapes, self._first_shapes)
        self.engine.start(shapes)
        name = str(next(self._names))
        self.engine.enqueue([feature.ids for feature in features], given_weights(features), training=True, name=name)
        return _TpuV1Step(self.engine, name, features, self._stamps)


class _TpuV1Step:
    """One call of the layer. `name` connects its three parts: enqueue, dequeue, and the gradients."""

    def __init__(self, engine: HardwareEngine, name: str, features: Sequence[Ids], stamps: HostStamps) -> None:
        self._engine, self._name, self._features, self._stamps = engine, name, features, stamps

    def lookup(self) -> list[Tensor]:
        return list(self._engine.dequeue(name=self._name))

    def apply(self, gradients: Sequence[Tensor]) -> list[Any]:
        self._stamps.stamp(self._features)
        self._engine.apply_gradients([tf.cast(g, tf.float32) for g in gradients], name=self._name)
        return []


def _reserve(strategy: Any, backend: TpuV1Backend) -> None:
    if _layers.get(strategy.extended, lambda: None)() is not None:
        raise TrainingError(
            f"TPUEmbedding: another layer of this TPUStrategy already uses {_HARDWARE}, which holds the tables of one layer. Put "
            "all features into one layer, or pass embedding_feature=UNSUPPORTED to the other to replicate its tables."
        )
    _layers[strategy.extended] = weakref.ref(backend)


def _check_policies(layer_options: LayerOptions) -> None:
    for path, config in layer_options.features:
        if config.out_of_vocabulary != "error":
            raise ConfigError(
                f"feature {path!r}: out_of_vocabulary={config.out_of_vocabulary!r} is not supported by {_HARDWARE}. Map such ids "
                "in the input pipeline, or set size_threshold to replicate its table."
            )


def _check_kinds(features: Sequence[Ids]) -> None:
    """Raise ConfigError if some ids are sparse and others ragged. The accelerator takes dense ids with one of these kinds."""
    kinds = {feature.kind: feature.path for feature in features}
    if "sparse" in kinds and "ragged" in kinds:
        raise ConfigError(
            f"feature {kinds['sparse']!r} has sparse ids, and feature {kinds['ragged']!r} has ragged ids. "
            f"One call takes only one of these kinds on {_HARDWARE}. Convert one in the input pipeline."
        )
    for feature in features:
        check_ids(feature)
