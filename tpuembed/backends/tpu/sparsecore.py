"""TPU v5p and v6e: tables are stacked, sharded over SparseCores, and looked up and trained by them.

The hosts convert a batch's ids to CSR, the format of SparseCores. The lookup keeps the CSR for the update. All of it
uses `tf.tpu.experimental.embedding.TPUEmbeddingV2`. `stacked_table` undoes its stacking, padding and rotation when rows
are read or written.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

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
from tpuembed.backends.tpu.activation_shapes import activation_shapes, check_same_shapes, configured_shape
from tpuembed.backends.tpu.stacked_table import StackedTable, StackLayout
from tpuembed.backends.tpu.tf_tpu import LAYOUTS, SparseCoreEngine, sparse_cores_per_chip, traced_outside_of_loops
from tpuembed.config import Optimizer
from tpuembed.errors import ConfigError, TrainingError
from tpuembed.lookup import Ids

__all__ = ["SparseCoreBackend", "check_loop"]

Tensor = Any

_HARDWARE = "the TPU's SparseCores"
# Options that TensorFlow accepts and does not pass to its SparseCore ops.
_IGNORED: Mapping[str, Any] = {
    "clip_weight_min": None,
    "clip_weight_max": None,
    "clipvalue": None,
    "weight_decay_factor": None,
    "multiply_weight_decay_factor_by_learning_rate": None,
    "use_gradient_accumulation": True,
    "lazy_adam": True,
    "allow_zero_accumulator": False,
}


class SparseCoreBackend(Backend):
    """Stacks of tables in SparseCore memory. A checkpoint holds the stacks unchanged, with their layouts."""

    def __init__(self, layer_options: LayerOptions) -> None:
        """Allocate the tables.

        Raises:
            ConfigError: SparseCores do not support a table, a feature or an optimizer.
        """
        tables = layer_options.tables
        check_tables(tables, _HARDWARE)
        features, specs = bind_features(layer_options)
        _check_optimizers(specs)
        strategy = tf.distribute.get_strategy()
        cores = sparse_cores_per_chip(strategy)
        self._built_for = [
            _output_shape(path, config, layer_options.batch_size, cores) for path, config in layer_options.features
        ]
        for tf_feature, shape, (_, config) in zip(features, self._built_for, layer_options.features, strict=True):
            tf_feature.output_shape = tf.TensorShape(shape)
            tf_feature.out_of_vocabulary = config.out_of_vocabulary
        self.engine = SparseCoreEngine(features, layer_options.pipelining, layer_options.sparse_core_config)
        limits = {table.name: (table.max_ids_per_partition, table.max_unique_ids_per_partition) for table in tables}
        self.engine.limit_ids(limits)
        self._stamps = HostStamps(layer_options, specs, _HARDWARE)
        self.states: Mapping[str, TableState] = {table.name: self._state(table, specs[table.name]) for table in tables}
        self._batch_size, self._pipelining = layer_options.batch_size, layer_options.pipelining
        self._guard = StepGuard([path for path, _ in layer_options.features], _HARDWARE)

    def _state(self, table: Any, spec: Optimizer) -> TableState:
        layout = self.engine.layout(table.name)
        stacks = self.engine.tables[layout.stack]
        views = {name: StackedTable(layout, variable) for name, variable in stacks.items()}
        return TableState(table, spec, views.pop("parameters"), views, self._stamps.variables.get(table.name))

    def checkpoint_children(self) -> dict[str, Any]:
        """Return the stacks by name, and the layouts of the tables in them."""
        return {LAYOUTS: self.engine.layouts_node, **saved_variables(self.engine.tables)}

    def layouts(self) -> dict[str, StackLayout]:
        """Return the layout of each table in its stack."""
        return {table: self.engine.layout(table) for table in self.states}

    def lookup(self, features: Sequence[Ids]) -> list[Tensor]:
        """Return the activations of `features`."""
        return self.begin(features, None).lookup()

    def begin(self, features: Sequence[Ids], call: LayerCall | None) -> TrainingStep:
        """Return a training step of `features`, after checking that the activations have the built shapes."""
        entered, shapes = self._guard.enter(features, call), activation_shapes(features, self._batch_size)
        check_same_shapes(features, shapes, self._built_for)
        if not entered:
            return ShapesOnly(shapes, features)
        if self._pipelining:
            check_loop()
        return _SparseCoreStep(self.engine, features, self._stamps)


class _SparseCoreStep:
    """One call of the layer. The lookup keeps state for the update."""

    def __init__(self, engine: SparseCoreEngine, features: Sequence[Ids], stamps: HostStamps) -> None:
        self._engine, self._features, self._stamps = engine, features, stamps
        self._preserved: Any = None

    def lookup(self) -> list[Tensor]:
        _check_kinds(self._features)
        ids = [feature.ids for feature in self._features]
        activations, self._preserved = self._engine(ids, given_weights(self._features))
        return list(activations)

    def apply(self, gradients: Sequence[Tensor]) -> list[Any]:
        self._stamps.stamp(self._features)
        self._engine.apply_gradients([tf.cast(gradient, tf.float32) for gradient in gradients], self._preserved)
        return []


def check_loop() -> None:
    """Raise TrainingError if a pipelined step is traced outside a loop. TensorFlow overlaps the steps of a loop only."""
    if traced_outside_of_loops():
        raise TrainingError(
            "TPUEmbedding: pipeline_execution_with_tensor_core=True needs a loop around strategy.run, whose steps overlap. Write "
            "`for _ in tf.range(steps): strategy.run(...)` inside the tf.function, with no condition (as fit has) and no "
            "other tf.function between them, or build the layer without that option."
        )


def _output_shape(path: str, config: Any, batch_size: int | None, cores: int) -> tuple[int, ...]:
    if config.max_sequence_length:
        raise ConfigError(
            f"feature {path!r}: max_sequence_length is not supported by {_HARDWARE}. Pad the ids to a dense [batch, length] "
            "matrix and set output_shape=(batch, length), or set size_threshold to replicate its table."
        )
    shape = configured_shape(config, batch_size)
    if shape is None:
        raise ConfigError(
            f"feature {path!r}: {_HARDWARE} need the shape of its activations when the layer is built. Give the FeatureConfig "
            "an output_shape (of one replica), or the layer a batch_size."
        )
    if math.prod(shape) % cores:
        raise ConfigError(
            f"feature {path!r}: its activations {shape} have {math.prod(shape)} samples. The {cores} SparseCores of a chip cannot "
            f"share them evenly. Make the batch of one replica a multiple of {cores}."
        )
    return shape


def _check_optimizers(specs: Mapping[str, Optimizer]) -> None:
    for table, spec in specs.items():
        for option, default in _IGNORED.items():
            value = getattr(spec, option, default)
            if value != default:
                raise ConfigError(
                    f"table {table!r}: {type(spec).__name__}({option}={value!r}) is not supported by {_HARDWARE}. Leave it "
                    f"{default!r}, or set size_threshold to replicate the table."
                )


def _check_kinds(features: Sequence[Ids]) -> None:
    for feature in features:
        if feature.kind == "sparse" and feature.ids.shape.rank != 2:
            raise ConfigError(
                f"feature {feature.path!r}: sparse ids have rank {feature.ids.shape.rank}. {_HARDWARE} take rank 2. Reshape them "
                "to [examples, ids] in the input pipeline and set output_shape."
            )
        if feature.kind == "ragged":
            feature.check(0)
        check_ids(feature)
