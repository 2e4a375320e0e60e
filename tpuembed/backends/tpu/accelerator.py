"""Code that both embedding accelerators share: configs as TensorFlow objects, and the checks of a call."""

import dataclasses
import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tpuembed.backends.layer_call import LayerCall
from tpuembed.backends.layer_options import LayerOptions
from tpuembed.backends.row_optimizers import learning_rate
from tpuembed.backends.table_state import (
    CheckedSlots,
    check_saved_names,
    check_tracked,
    filled,
    safe_name,
    table_initializer,
)
from tpuembed.backends.tf_config import features_to_tf, local, loss_scale, resolve_optimizer
from tpuembed.backends.tpu.activation_shapes import Shape
from tpuembed.backends.tpu.stack_ids import updated_rows
from tpuembed.backends.tpu.tf_tpu import host_names, host_variable, run_on_host, tpu_call
from tpuembed.config import Optimizer, TableConfig
from tpuembed.errors import ConfigError, TrainingError
from tpuembed.lookup import Ids
from tpuembed.manifest.row_history import UNKNOWN
from tpuembed.runtime.keras_saving import in_symbolic_scope

__all__ = [
    "MAX_VOCABULARY_SIZE",
    "HostStamps",
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
_OWN_HOST = "/job:localhost/replica:0/task:0"


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

    def enter(self, features: Sequence[Ids], given: LayerCall | None) -> bool:
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
        if given is not None and (given.compute_dtype == "float16" or loss_scale(given.optimizer) is not None):
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


class HostStamps:
    """The stamps of the rows in an accelerator, in the memory of its host, through which the ids pass.

    Attributes:
        variables: table -> int32 [rows]. Empty if rows are not tracked.
    """

    def __init__(self, layer_options: LayerOptions, specs: Mapping[str, Optimizer], hardware: str) -> None:
        """Allocate the stamps if `layer_options` ask for them.

        Raises:
            ConfigError: the accelerator's rows cannot be tracked.
        """
        self.variables: dict[str, Any] = {}
        self._updates = layer_options.updates
        if layer_options.track_rows:
            _check_trackable(layer_options, hardware)
            for table in layer_options.tables:
                check_tracked(table, specs[table.name])
                self.variables[table.name] = host_variable(table.vocabulary_size, safe_name(f"{table.name}/stamps"))

    def stamp(self, features: Sequence[Ids]) -> None:
        """Give the rows of `features` the number of the running update, on the host.

        A row is stamped even if its update is dropped, as by allow_id_dropping.
        """
        if not self.variables:
            return
        number = tf.cast(tf.minimum(local(self._updates).read_value() + 1, UNKNOWN), tf.int32)
        run_on_host(self._write, features, number)

    def _write(self, features: Sequence[Ids], number: Tensor) -> None:
        """Write `number`, int32 [], for the rows of `features`.

        Python writes it. TensorFlow would make the scatter of a variable a part of the TPU's program, and move all stamps
        to the TPU and back. Source: DecomposeResourceOpsInClusterPass.
        """
        rows: dict[str, list[Tensor]] = {}
        for feature in features:
            ids, policy = (
                feature.ids if feature.kind == "dense" else feature.ids.values,
                feature.config.out_of_vocabulary,
            )
            assert policy is not None, "a FeatureConfig takes its table's"
            found = updated_rows(ids, feature.config.table.vocabulary_size, policy)
            rows.setdefault(feature.table, []).append(found)

        def write(number: Tensor, *rows_of_tables: Tensor) -> None:
            for table, of_table in zip(rows, rows_of_tables, strict=True):
                tf.raw_ops.ResourceScatterUpdate(
                    resource=self.variables[table].handle, indices=of_table, updates=tf.fill(tf.shape(of_table), number)
                )

        tf.py_function(write, [number, *(tf.concat(parts, 0) for parts in rows.values())], [])


def _check_trackable(layer_options: LayerOptions, hardware: str) -> None:
    table, hosts = layer_options.tables[0].name, host_names(tf.distribute.get_strategy())
    if layer_options.pipelining:
        raise ConfigError(
            f"table {table!r}: track_rows=True is not supported for tables in {hardware} with "
            "pipeline_execution_with_tensor_core=True, where steps overlap. Set one of them to False."
        )
    if hosts != [_OWN_HOST]:
        raise ConfigError(
            f"table {table!r}: track_rows=True is supported for tables in {hardware} if this process runs on its only host. The "
            f"hosts are {', '.join(hosts)}. Set track_rows=False."
        )


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
