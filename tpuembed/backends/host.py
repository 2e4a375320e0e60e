"""Tables in host or GPU memory: gathered from, and updated row by row, where the rest of the model runs."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from tpuembed.backends.feature_input import FeatureInput
from tpuembed.backends.replicas import check_same_strategy, check_strategy, gather_replicas
from tpuembed.backends.request import Request
from tpuembed.backends.row_optimizers import dedupe, learning_rate, update_every_row, update_rows
from tpuembed.backends.stacked_table import StackLayout
from tpuembed.backends.table_state import TableState, create_table
from tpuembed.backends.tf_config import entry_optimizer, local, loss_scale, unchecked_gathers
from tpuembed.backends.tf_tpu import tpu_call
from tpuembed.errors import ConfigError, TrainingError
from tpuembed.lookup import LookupIds, Span, gather_grouped, outside_shift

__all__ = ["HostBackend"]

Tensor = Any
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.\\/>-]")  # of operations; a table may be called anything


class HostBackend:
    """Tables as plain variables, a copy in each replica. A step's cost grows with the rows touched, not with the table."""

    def __init__(self, request: Request) -> None:
        """Allocate the tables of `request`.

        Raises:
            ConfigError: an optimizer asks for what only the embedding accelerator does.
        """
        self.states: Mapping[str, TableState] = {
            table.name: create_table(table, request.optimizer) for table in request.tables
        }
        for state in self.states.values():
            _check_supported(state)
        self._updates = request.updates
        self._strategy = tf.distribute.get_strategy()

    def checkpoint_children(self) -> dict[str, Any]:
        """Tables and slots by name."""
        return {name: variable for state in self.states.values() for name, variable in state.named_variables().items()}

    def layouts(self) -> dict[str, StackLayout]:
        """None: rows lie in order."""
        return {}

    def writing(self) -> AbstractContextManager[None]:
        """Rows are written in place."""
        return nullcontext()

    def fetch(self) -> None:
        """Rows are read in place."""

    def weights(self) -> list[tuple[Any, bool]]:
        """Every variable, and whether the user's optimizer trains it."""
        return [
            (v, state.optimizer is None) for state in self.states.values() for v in state.named_variables().values()
        ]

    def lookup(self, features: Sequence[FeatureInput]) -> list[Tensor]:
        """Activations of `features`, untouched by any gradient trap."""
        self.check_called_where_created()
        return self.gather_rows(self.flat_ids(features), [feature.table for feature in features])

    def begin(self, features: Sequence[FeatureInput], layer: Any) -> "_Step":
        """A training step of `features`, all of whose tables have an optimizer."""
        self.check_called_where_created()
        return _Step(self, features, layer)

    def flat_ids(self, features: Sequence[FeatureInput]) -> list[LookupIds]:
        """The ids of `features`, those outside of their tables as their policies say.

        All are known to be rows before one of them is looked up or trained. Where a gather does not fail, "error" gives NaN.
        """
        spans = [Span(feature.table, 0, feature.config.table.vocabulary_size) for feature in features]
        flat = [feature.flatten().within(0, span.stop) for feature, span in zip(features, spans, strict=True)]
        if unchecked_gathers() or all(one.policy != "error" for one in flat):
            return flat
        with tf.control_dependencies([outside_shift(flat, spans)]):
            return [dataclasses.replace(one, ids=tf.identity(one.ids)) for one in flat]

    def check_called_where_created(self) -> None:
        """Raise TrainingError in a TPU's program without the tables, ConfigError under an unsupported strategy."""
        check_strategy()
        if tpu_call() is not None:
            check_same_strategy(self._strategy)

    def gather_rows(self, ids: Sequence[LookupIds], tables: Sequence[str]) -> list[Tensor]:
        """Activations of flat `ids`, each in its table."""
        return gather_grouped(ids, tables, self._gather)

    def _gather(self, table: str, ids: Tensor) -> Tensor:
        state = self.states[table]
        variable = state.variable if state.optimizer is None else local(state.variable)
        name = "lookup_" + _NOT_IN_NAMES.sub("_", local(variable).name.split(":")[0])
        if tf.executing_eagerly() and state.optimizer is not None:  # `tf.gather` drops the name here
            rows = tf.raw_ops.ResourceGather(resource=variable.handle, indices=ids, dtype=tf.float32, name=name)
        else:  # and tells the graph which variable it reads, which an export of the graph needs to know
            rows = tf.gather(variable, ids, name=name)
        return _nan_outside(rows, ids, state.config.vocabulary_size) if unchecked_gathers() else rows

    def update(self, table: str, ids: Tensor, gradients: Tensor, droppable: bool) -> list[Any]:
        """Apply the table's optimizer to ids [n] (duplicates allowed, negative ones dropped) and gradients [n, dim].

        `droppable` is False where no id is negative: those whose lookup would have failed.
        """
        state = self.states[table]
        assert state.optimizer is not None, "a table without an optimizer is never trapped"
        check_same_strategy(self._strategy)
        droppable = droppable or unchecked_gathers()
        unique, summed = dedupe(*gather_replicas(ids, gradients), state.config.vocabulary_size, droppable)
        rate = learning_rate(state.optimizer, local(self._updates).read_value())
        update = update_every_row if not getattr(state.optimizer, "lazy_adam", True) else update_rows
        slots = [local(slot) for slot in state.slots.values()]
        return update(state.optimizer, rate, local(state.variable), slots, unique, summed)


class _Step:
    """One call of the layer: what it looked up, and how the gradients that come back are applied."""

    def __init__(self, backend: HostBackend, features: Sequence[FeatureInput], layer: Any) -> None:
        self._backend, self._tables = backend, [feature.table for feature in features]
        self._features = backend.flat_ids(features)
        self._optimizer, self._compute_dtype = entry_optimizer(layer), layer.compute_dtype

    def lookup(self) -> list[Tensor]:
        return self._backend.gather_rows(self._features, self._tables)

    def apply(self, gradients: Sequence[Tensor]) -> list[Any]:
        rows = [feature.spread(tf.cast(g, tf.float32)) for feature, g in zip(self._features, gradients, strict=True)]
        scale = self._loss_scale()
        finite = None if scale is None else tf.reduce_all([tf.reduce_all(tf.math.is_finite(row)) for row in rows])
        updates: list[Any] = []
        for table in dict.fromkeys(self._tables):
            members = [index for index, name in enumerate(self._tables) if name == table]
            ids = tf.concat([self._features[index].ids for index in members], 0)
            of_rows = tf.concat([rows[index] for index in members], 0)
            if scale is not None:  # a step that overflowed touches no row, as the dense optimizer then skips it too
                ids, of_rows = tf.where(finite, ids, -1), tf.where(finite, of_rows / scale, 0.0)
            droppable = scale is not None or any(self._features[index].droppable for index in members)
            updates += self._backend.update(table, ids, of_rows, droppable)
        return updates

    def _loss_scale(self) -> Tensor | None:
        """What the optimizer multiplied the loss with."""
        if self._compute_dtype == "float16" and self._optimizer is None:
            raise TrainingError(
                "TPUEmbedding: under mixed_float16 a loop of your own may scale the loss, which the layer cannot see; compile "
                "the model with its LossScaleOptimizer, or use mixed_bfloat16"
            )
        return loss_scale(self._optimizer)


def _check_supported(state: TableState) -> None:
    if state.config.quantization_config is not None:
        raise ConfigError(
            f"table {state.config.name!r}: quantization_config is not applied off the embedding accelerator yet; drop it"
        )
    if state.optimizer is not None and not state.optimizer.use_gradient_accumulation:
        raise ConfigError(
            f"table {state.config.name!r}: use_gradient_accumulation=False is a shortcut of the embedding accelerator; here "
            "duplicates are always summed; leave it True"
        )


def _nan_outside(rows: Tensor, ids: Tensor, vocabulary_size: int) -> Tensor:
    """`rows` with NaN for ids outside the table: loud, where another row would be silently wrong."""
    inside = (ids >= 0) & (ids < vocabulary_size)
    return tf.where(inside[:, None], rows, float("nan"))
