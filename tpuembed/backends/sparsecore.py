"""TPU v5p and v6e: stacked tables, sharded over SparseCores, looked up and trained by them.

The hosts turn a batch's ids into the form that SparseCores take (CSR); the lookup keeps it for the update. All through
`tf.tpu.experimental.embedding.TPUEmbeddingV2`, whose stacks, padding and rotation `stacked_table` undoes where rows are
read or written.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from tpuembed.backends.accelerator import (
    StepGuard,
    bind_features,
    check_ids,
    check_tables,
    given_weights,
    saved_variables,
    zeros,
)
from tpuembed.backends.activation_shapes import activation_shapes, check_same_shapes, configured_shape
from tpuembed.backends.feature_input import FeatureInput
from tpuembed.backends.request import Request
from tpuembed.backends.stacked_table import StackedTable, StackLayout
from tpuembed.backends.table_state import TableState
from tpuembed.backends.tf_tpu import LAYOUTS, SparseCoreEngine, sparse_cores_per_chip, traced_outside_of_loops
from tpuembed.config import Optimizer
from tpuembed.errors import ConfigError, TrainingError

__all__ = ["SparseCoreBackend", "check_loop"]

Tensor = Any

_HARDWARE = "the TPU's SparseCores"
# What TensorFlow accepts and its SparseCore ops do not get.
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


class SparseCoreBackend:
    """Stacks of tables in SparseCore memory; a checkpoint holds them as they are, with their layouts."""

    def __init__(self, request: Request) -> None:
        """Allocate the tables.

        Raises:
            ConfigError: a table, feature or optimizer that SparseCores cannot honour.
        """
        check_tables(request.tables, _HARDWARE)
        features, specs = bind_features(request)
        _check_optimizers(specs)
        strategy = tf.distribute.get_strategy()
        cores = sparse_cores_per_chip(strategy)
        self._built_for = [_output_shape(path, config, request.batch_size, cores) for path, config in request.features]
        for theirs, shape, (_, config) in zip(features, self._built_for, request.features, strict=True):
            theirs.output_shape = tf.TensorShape(shape)
            theirs.out_of_vocabulary = config.out_of_vocabulary
        self.engine = SparseCoreEngine(features, request.pipelining, request.sparse_core_config)
        self.engine.limit_ids({table.name: _limits(table) for table in request.tables})
        self.states: Mapping[str, TableState] = {
            table.name: self._state(table, specs[table.name]) for table in request.tables
        }
        self._batch_size, self._pipelining = request.batch_size, request.pipelining
        self._guard = StepGuard([path for path, _ in request.features], _HARDWARE)

    def _state(self, table: Any, spec: Optimizer) -> TableState:
        layout = self.engine.layout(table.name)
        stacks = self.engine.tables[layout.stack]
        views = {name: StackedTable(layout, variable) for name, variable in stacks.items()}
        return TableState(table, spec, views.pop("parameters"), views)

    def checkpoint_children(self) -> dict[str, Any]:
        """The stacks by name, and the layouts of the tables in them."""
        return {LAYOUTS: self.engine.layouts_node, **saved_variables(self.engine.tables)}

    def layouts(self) -> dict[str, StackLayout]:
        """Where each table lies in its stack."""
        return {table: self.engine.layout(table) for table in self.states}

    def writing(self) -> AbstractContextManager[None]:
        """Rows are written in place."""
        return nullcontext()

    def fetch(self) -> None:
        """Rows are read in place."""

    def weights(self) -> list[tuple[Any, bool]]:
        """None that Keras could hold."""
        return []

    def lookup(self, features: Sequence[FeatureInput]) -> list[Tensor]:
        """Activations of `features`."""
        entered = self._guard.enter(features)
        return _Step(self.engine, features, self._shapes_only(features, entered)).lookup()

    def begin(self, features: Sequence[FeatureInput], layer: Any) -> "_Step":
        """A training step of `features`."""
        entered = self._guard.enter(features, layer)
        return _Step(self.engine, features, self._shapes_only(features, entered))

    def _shapes_only(self, features: Sequence[FeatureInput], entered: bool) -> list[Tensor] | None:
        """None in a step, once the shapes of its activations are known to be those that the layer was built for."""
        shapes = activation_shapes(features, self._batch_size)
        check_same_shapes(features, shapes, self._built_for)
        if entered and self._pipelining:
            check_loop()
        return None if entered else zeros(shapes, features)


class _Step:
    """One call of the layer: what the lookup leaves for the update, and zeros where Keras only asks for shapes."""

    def __init__(
        self, engine: SparseCoreEngine, features: Sequence[FeatureInput], shapes_only: list[Tensor] | None = None
    ) -> None:
        self._engine, self._features, self._shapes_only = engine, features, shapes_only
        self._preserved: Any = None

    def lookup(self) -> list[Tensor]:
        if self._shapes_only is not None:
            return self._shapes_only
        _check_kinds(self._features)
        ids = [feature.ids for feature in self._features]
        activations, self._preserved = self._engine(ids, given_weights(self._features))
        return list(activations)

    def apply(self, gradients: Sequence[Tensor]) -> list[Any]:
        self._engine.apply_gradients([tf.cast(gradient, tf.float32) for gradient in gradients], self._preserved)
        return []


def check_loop() -> None:
    """Refuse a pipelined step that is traced outside of a loop: TensorFlow overlaps the steps of a loop, and compiles no other.

    Raises:
        TrainingError: there is no loop around the body of `strategy.run`.
    """
    if traced_outside_of_loops():
        raise TrainingError(
            "TPUEmbedding: pipeline_execution_with_tensor_core=True needs a loop around strategy.run, whose steps overlap; write "
            "`for _ in tf.range(steps): strategy.run(...)` inside of the tf.function, with neither a condition (as fit has) "
            "nor another tf.function between, or build the layer without it"
        )


def _output_shape(path: str, config: Any, batch_size: int | None, cores: int) -> tuple[int, ...]:
    if config.max_sequence_length:
        raise ConfigError(
            f"feature {path!r}: max_sequence_length is not supported by {_HARDWARE}; pad the ids to a dense [batch, length] "
            "matrix and set output_shape=(batch, length), or set size_threshold so that its table is replicated"
        )
    shape = configured_shape(config, batch_size)
    if shape is None:
        raise ConfigError(
            f"feature {path!r}: {_HARDWARE} need the shape of its activations when the layer is built; give the FeatureConfig "
            "an output_shape (of one replica), or the layer a batch_size"
        )
    if math.prod(shape) % cores:
        raise ConfigError(
            f"feature {path!r}: {cores} SparseCores of a chip cannot share the {math.prod(shape)} samples of its activations "
            f"{shape}; make the batch of one replica a multiple of {cores}"
        )
    return shape


def _check_optimizers(specs: Mapping[str, Optimizer]) -> None:
    for table, spec in specs.items():
        for option, default in _IGNORED.items():
            value = getattr(spec, option, default)
            if value != default:
                raise ConfigError(
                    f"table {table!r}: {type(spec).__name__}({option}={value!r}) is not supported by {_HARDWARE}; leave it "
                    f"{default!r}, or set size_threshold so that the table is replicated"
                )


def _limits(table: Any) -> tuple[int | None, int | None]:
    return table.max_ids_per_partition, table.max_unique_ids_per_partition


def _check_kinds(features: Sequence[FeatureInput]) -> None:
    for feature in features:
        ids = feature.ids
        if isinstance(ids, tf.SparseTensor) and ids.shape.rank != 2:
            raise ConfigError(
                f"feature {feature.path!r}: sparse ids of rank {ids.shape.rank}; {_HARDWARE} take rank 2: reshape them to "
                "[examples, ids] in the input pipeline and set output_shape"
            )
        if isinstance(ids, tf.RaggedTensor) and (ids.shape.rank != 2 or ids.ragged_rank != 1):
            raise ConfigError(f"feature {feature.path!r}: ragged ids must have rank 2, got rank {ids.shape.rank}")
        check_ids(feature)
