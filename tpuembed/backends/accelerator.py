"""Code that both embedding accelerators share: configs as TensorFlow objects, and the checks of a call."""

import dataclasses
import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tpuembed.backends.activation_shapes import Shape
from tpuembed.backends.layer_options import LayerOptions
from tpuembed.backends.row_optimizers import learning_rate
from tpuembed.backends.table_state import CheckedSlots, check_saved_names, filled, table_initializer
from tpuembed.backends.tf_config import entry_optimizer, features_to_tf, loss_scale, resolve_optimizer
from tpuembed.backends.tf_tpu import in_symbolic_scope, tpu_call
from tpuembed.config import Optimizer, TableConfig
from tpuembed.errors import ConfigError, TrainingError
from tpuembed.lookup import Ids

__all__ = [
    "MAX_VOCABULARY_SIZE",
    "ShapesOnly",
    "StepGuard",
    "bind_features",
    "check_ids",
    "check_tables",
    "given_weights",
    "saved_variables",
]

Tensor = Any

MAX_VOCABULARY_SIZE = 2**31 - 1
"""Accelerators take ids as int32."""


# ---- configs


def bind_features(layer_options: LayerOptions) -> tuple[list[Any], dict[str, Optimizer]]:
    """Return (TensorFlow's FeatureConfig of every feature, without output_shape; table name -> the spec that trains
    it).

    A live learning rate becomes a callable that reads the layer's count of updates. There is one callable per
    optimizer, because TensorFlow stacks only tables with equal optimizers.
    """
    bound: dict[int, Optimizer] = {}
    specs: dict[str, Optimizer] = {}
    tables: dict[str, TableConfig] = {}
    for table in layer_options.tables:
        chosen = table.optimizer if table.optimizer is not None else layer_options.optimizer
        if chosen is None:
            raise ConfigError(
                f"table {table.name!r}: it has no optimizer. An embedding accelerator trains its tables itself. "
                "Give the table or the layer an optimizer."
            )
        specs[table.name] = resolve_optimizer(chosen)
        if id(chosen) not in bound:
            bound[id(chosen)] = _bound(specs[table.name], layer_options.updates)
        initializer = ShardInitializer(table_initializer(table))
        tables[table.name] = dataclasses.replace(table, optimizer=bound[id(chosen)], initializer=initializer)
    # TensorFlow's own error does not name the table.
    check_saved_names({name: spec.slots for name, spec in specs.items()})
    features = [
        dataclasses.replace(
            config, table=tables[config.table.name], name=config.name or path or "feature", output_shape=None
        )
        for path, config in layer_options.features
    ]
    return list(features_to_tf(features)), specs


def _bound(spec: Optimizer, updates: Any) -> Optimizer:
    changes: dict[str, Any] = {}
    if callable(spec.learning_rate):
        changes["learning_rate"] = lambda: learning_rate(spec, updates.read_value())
    if spec.slot_variable_creation_fn is not None:
        changes["slot_variable_creation_fn"] = CheckedSlots(spec.slot_variable_creation_fn)
    return dataclasses.replace(spec, **changes) if changes else spec


class ShardInitializer:
    """An initializer that is called once per shard and gives each shard other random rows.

    Keras initializers return the same numbers at every call, so every shard would start as a copy of the first one.
    """

    def __init__(self, initializer: Any) -> None:
        """Wrap `initializer(shape, dtype=...)`. A Keras initializer gets another seed at every call."""
        self._initializer, self._calls = initializer, itertools.count()

    def __call__(self, shape: Any, dtype: Any = None) -> Tensor:
        """Return the rows [*shape] of the next shard."""
        rows: Tensor = filled(self._seeded(next(self._calls)), shape, dtype)
        return rows

    def _seeded(self, call: int) -> Any:
        if not isinstance(self._initializer, keras.initializers.Initializer):
            return self._initializer
        config = self._initializer.get_config()
        seed = getattr(self._initializer, "seed", None)
        if "seed" not in config or not isinstance(seed, int):
            return self._initializer
        return type(self._initializer).from_config({**config, "seed": (seed + 1_000_003 * call) % 2**31})


def check_tables(tables: Sequence[TableConfig], hardware: str) -> None:
    """Raise ConfigError if a table has more rows than an accelerator can hold."""
    for table in tables:
        if table.vocabulary_size > MAX_VOCABULARY_SIZE:
            raise ConfigError(
                f"table {table.name!r}: it has {table.vocabulary_size} rows. {hardware} takes ids as int32, so a table has at most "
                f"{MAX_VOCABULARY_SIZE} rows. Split the table."
            )


# ---- calls


class StepGuard:
    """Checks where a layer on an accelerator is called: once per step, inside `strategy.run`."""

    def __init__(self, paths: Sequence[str], hardware: str) -> None:
        """Guard a layer on `hardware`, created under the current strategy, with the features at `paths`."""
        self._strategy, self._paths, self._hardware = tf.distribute.get_strategy(), list(paths), hardware
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def enter(self, features: Sequence[Ids], layer: Any = None) -> bool:
        """Return True while a step is traced, False while Keras computes shapes only.

        Raises:
            TrainingError: the call is outside a step of the layer's strategy, is the second one of the step, has other
                features than the layer, or its loss may be scaled.
        """
        if [feature.path for feature in features] != self._paths:
            raise TrainingError(
                f"TPUEmbedding: a serving_config needs tables on the host. This layer's tables are in {self._hardware}. "
                "Build the layer without a TPUStrategy, restore a checkpoint, and call it there."
            )
        if in_symbolic_scope():
            return False  # true also while Keras builds a model at its first call, inside the step
        call = tpu_call()
        if call is None:
            raise TrainingError(
                f"TPUEmbedding: called outside strategy.run, under {type(tf.distribute.get_strategy()).__name__}. The layer was "
                f"created under {type(self._strategy).__name__}, and its tables are in {self._hardware}. Call it inside "
                "strategy.run. To look up on the host, build the layer without a TPUStrategy and restore a checkpoint."
            )
        if call in self._seen:
            raise TrainingError(
                f"TPUEmbedding: called twice in one step. A step is one batch on {self._hardware}. Call the layer once "
                "with all features, or set size_threshold to replicate small tables."
            )
        self._seen.add(call)
        scaled = layer is not None and (
            layer.compute_dtype == "float16" or loss_scale(entry_optimizer(layer)) is not None
        )
        if scaled:
            raise TrainingError(
                "TPUEmbedding: the loss is scaled (mixed_float16, a LossScaleOptimizer or loss_scale_factor). The accelerator's "
                "optimizer cannot undo the scale. Use mixed_bfloat16 and an optimizer without loss_scale_factor."
            )
        return True


@dataclasses.dataclass(frozen=True)
class ShapesOnly:
    """A call in which Keras computes shapes only. The activations are zeros."""

    shapes: Sequence[Shape]
    features: Sequence[Ids]

    def lookup(self) -> list[Tensor]:
        """Return zeros of the activations' shapes."""
        pairs = zip(self.shapes, self.features, strict=True)
        return [tf.zeros((*shape, feature.config.table.dim)) for shape, feature in pairs]

    def apply(self, gradients: Sequence[Tensor]) -> list[Any]:  # noqa: ARG002 - there are no tables
        """Update nothing."""
        return []


def given_weights(features: Sequence[Ids]) -> list[Any] | None:
    """Return the weights as TensorFlow's classes take them: None if no feature has weights."""
    weights = [feature.weights for feature in features]
    return None if all(weight is None for weight in weights) else weights


def check_ids(feature: Ids) -> None:
    """Raise ConfigError for inputs that no accelerator takes: dense ids with weights or as sequences, and ids that are
    not integers."""
    if not feature.is_combined:
        feature.check(feature.config.max_sequence_length)
    if not feature.ids.dtype.is_integer:
        raise ConfigError(f"feature {feature.path!r}: ids must be integers, got {feature.ids.dtype.name}.")


# ---- checkpoints


def saved_variables(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return {`<name>` or `<name>/<slot>`: variable}, the names in a checkpoint.

    Args:
        tables: table or stack -> {"parameters" and slot names: variable}.
    """
    return {
        name if role == "parameters" else f"{name}/{role}": variable
        for name, variables in tables.items()
        for role, variable in variables.items()
    }
