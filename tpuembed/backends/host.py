"""Tables in host or GPU memory: looked up and updated row by row, where the rest of the model runs."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import tensorflow as tf

from tpuembed.backends.backend import Backend
from tpuembed.backends.layer_call import LayerCall
from tpuembed.backends.layer_options import LayerOptions
from tpuembed.backends.replicas import check_same_strategy, check_strategy, gather_replicas
from tpuembed.backends.row_gradients import RowGradients
from tpuembed.backends.row_optimizers import dedupe, is_additive, learning_rate, update_every_row, update_rows
from tpuembed.backends.table_state import TableState, create_table
from tpuembed.backends.tf_config import local, unchecked_gathers
from tpuembed.backends.tpu.tf_tpu import densify_on_host, tpu_call
from tpuembed.errors import ConfigError
from tpuembed.errors.ids import Span
from tpuembed.lookup import FlatIds, Ids, check_range, gather_grouped
from tpuembed.lookup.ranges import is_inside
from tpuembed.manifest.row_history import UNKNOWN

__all__ = ["NO_STAMP", "HostBackend"]

Tensor = Any
TableRows = tuple[Tensor, Tensor, bool]
"""Ids [n], their row gradients [n, dim], and whether ids may be outside the table."""
NO_STAMP: Final = (
    f"TPUEmbedding: track_rows numbers updates as int32, up to {UNKNOWN - 1}. The layer has made as many. Build it with "
    "track_rows=False, and restore a checkpoint."
)
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.\\/>-]")  # the characters that operation names cannot have


class HostBackend(Backend):
    """Tables as plain variables, one copy per replica. The cost of a step grows with the rows touched, not with the table."""

    def __init__(self, layer_options: LayerOptions) -> None:
        """Allocate the tables of `layer_options`.

        Raises:
            ConfigError: an option needs the embedding accelerator.
        """
        self.states: Mapping[str, TableState] = {
            table.name: create_table(table, layer_options.optimizer, layer_options.track_rows)
            for table in layer_options.tables
        }
        self._tracked = layer_options.track_rows
        for state in self.states.values():
            _check_supported(state)
        self._updates = layer_options.updates
        self._strategy = tf.distribute.get_strategy()

    def checkpoint_children(self) -> dict[str, Any]:
        """Return tables and slots by name."""
        return {name: variable for state in self.states.values() for name, variable in state.named_variables().items()}

    def weights(self) -> list[tuple[Any, bool]]:
        """Return every variable, and True if the user's optimizer trains it."""
        return [
            (v, state.optimizer is None) for state in self.states.values() for v in state.named_variables().values()
        ]

    def lookup(self, features: Sequence[Ids]) -> list[Tensor]:
        """Return the activations of `features`, without a gradient trap."""
        self.check_called_where_created()
        return self.gather_rows(self.flat_ids(features), [feature.table for feature in features])

    def begin(self, features: Sequence[Ids], call: LayerCall) -> "_HostStep":  # noqa: ARG002 - any call's step is the same
        """Return a training step of `features`, all of whose tables have an optimizer."""
        self.check_called_where_created()
        return _HostStep(self, features)

    def check_symbolic_call(self) -> None:
        """Raise TrainingError in the scope of another strategy than that of the tables."""
        if tf.distribute.has_strategy():
            check_same_strategy(self._strategy)

    def row_gradients(self) -> RowGradients:
        """Return the weights whose gradients move the tables in the trainer's optimizer step."""
        return RowGradients(self.states, self.apply_rows, self._updates)

    def flat_ids(self, features: Sequence[Ids]) -> list[FlatIds]:
        """Return the ids of `features`. Ids out of vocabulary are treated by their feature's policy.

        All ids are checked before the first one is looked up or trained. On hardware whose gather does not fail,
        "error" gives NaN.
        """
        spans = [Span(feature.table, feature.config.table.vocabulary_size) for feature in features]
        densify = None if tpu_call() is None else densify_on_host
        flat = [feature.flatten(densify).within(span) for feature, span in zip(features, spans, strict=True)]
        if unchecked_gathers():
            return flat
        check = check_range([one.ranged(span) for one, span in zip(flat, spans, strict=True)])
        if not tf.is_tensor(check):
            return flat
        with tf.control_dependencies([check]):
            return [dataclasses.replace(one, ids=tf.identity(one.ids)) for one in flat]

    def check_called_where_created(self) -> None:
        """Raise TrainingError in a TPU program without the tables, ConfigError under an unsupported strategy."""
        check_strategy()
        if tpu_call() is not None:
            check_same_strategy(self._strategy)

    def gather_rows(self, ids: Sequence[FlatIds], tables: Sequence[str]) -> list[Tensor]:
        """Return the activations of flat `ids`, each looked up in its table."""
        return gather_grouped(ids, tables, self._gather)

    def _gather(self, table: str, ids: Tensor) -> Tensor:
        state = self.states[table]
        variable = state.variable if state.optimizer is None else local(state.variable)
        name = "lookup_" + _NOT_IN_NAMES.sub("_", local(variable).name.split(":")[0])
        if tf.executing_eagerly() and state.optimizer is not None:  # `tf.gather` drops the name here
            rows = tf.raw_ops.ResourceGather(resource=variable.handle, indices=ids, dtype=tf.float32, name=name)
        else:  # `tf.gather` records which variable it reads. An export of the graph needs that
            rows = tf.gather(variable, ids, name=name)
        if not unchecked_gathers():
            return rows
        # Without NaN, the lookup of an id outside would return another row silently.
        return tf.where(is_inside(ids, state.config.vocabulary_size)[:, None], rows, float("nan"))

    def next_stamp(self) -> Tensor | None:
        """Return the number of the running update, int32 []. Returns None if rows are not tracked.

        An update whose number is no stamp fails. XLA and TPUs do not fail, and stamp UNKNOWN.
        """
        if not self._tracked:
            return None
        stamp = local(self._updates).read_value() + 1
        if tpu_call() is not None or unchecked_gathers():
            return tf.cast(tf.minimum(stamp, UNKNOWN), tf.int32)
        with tf.control_dependencies([tf.debugging.Assert(stamp < UNKNOWN, [NO_STAMP])]):
            return tf.cast(stamp, tf.int32)

    def update(self, table: str, ids: Tensor, gradients: Tensor, droppable: bool, stamp: Tensor | None) -> list[Any]:
        """Apply the table's optimizer to ids [n] and their gradients [n, dim]. Duplicate ids are allowed, those
        outside the table are dropped. Rows that are updated get `stamp`, unless it is None.

        `droppable` is False if every id is in the table, because the lookup would have failed.
        """
        state = self.states[table]
        assert state.optimizer is not None, "a table without an optimizer is never trapped"
        check_same_strategy(self._strategy)
        ids, gradients, droppable = gather_replicas(ids, gradients, droppable or unchecked_gathers())
        if gradients.shape[-1] is None:  # MirroredStrategy's sums of replicas
            gradients = tf.ensure_shape(gradients, [None, state.config.dim])
        unique, summed = dedupe(ids, gradients, state.config.vocabulary_size, droppable)
        rate = learning_rate(state.optimizer, local(self._updates).read_value())
        update = update_every_row if not getattr(state.optimizer, "lazy_adam", True) else update_rows
        slots = [local(slot) for slot in state.slots.values()]
        ops = update(state.optimizer, rate, local(state.variable), slots, unique, summed)
        if stamp is None:
            return ops
        stamps = tf.fill(tf.shape(unique), stamp)
        op = tf.raw_ops.ResourceScatterUpdate(resource=local(state.stamps).handle, indices=unique, updates=stamps)
        return ops if op is None else [*ops, op]

    def apply_rows(self, tables: Mapping[str, TableRows]) -> list[Any]:
        """Apply the row gradients of `tables`. No row changes if its update has no number."""
        updates: list[Any] = []
        stamp = self.next_stamp()
        for table, (ids, rows, droppable) in tables.items():
            with tf.control_dependencies([] if stamp is None else [stamp]):
                updates += self.update(table, ids, rows, droppable, stamp)
        return updates


class _HostStep:
    """One call of the layer: the ids it looked up, and the row gradients from those of its activations."""

    def __init__(self, backend: HostBackend, features: Sequence[Ids]) -> None:
        self._backend, self.tables = backend, [feature.table for feature in features]
        self._features = backend.flat_ids(features)

    def lookup(self) -> list[Tensor]:
        return self._backend.gather_rows(self._features, self.tables)

    def row_gradients(self, gradients: Sequence[Tensor]) -> dict[str, TableRows]:
        """Return {table: (ids, row gradients, whether ids may be outside)} of the activations' gradients."""
        rows = [
            feature.spread(tf.cast(gradient, tf.float32))
            for feature, gradient in zip(self._features, gradients, strict=True)
        ]
        found = {}
        for table in dict.fromkeys(self.tables):
            members = [index for index, name in enumerate(self.tables) if name == table]
            droppable = any(self._features[index].droppable for index in members)
            ids = tf.concat([self._features[index].ids for index in members], 0)
            of_rows = tf.concat([rows[index] for index in members], 0)
            if droppable:  # a norm over them counts zeros for what is dropped
                inside = is_inside(ids, self._backend.states[table].config.vocabulary_size)
                of_rows = tf.where(inside[:, None], of_rows, 0.0)
            found[table] = ids, of_rows, droppable
        return found

    def apply(self, gradients: Sequence[Tensor]) -> list[Any]:
        return self._backend.apply_rows(self.row_gradients(gradients))


def _check_supported(state: TableState) -> None:
    if state.config.quantization_config is not None:
        raise ConfigError(
            f"table {state.config.name!r}: quantization_config is applied on an embedding accelerator only. Drop it."
        )
    spec = state.optimizer
    if spec is not None and not spec.use_gradient_accumulation and not is_additive(spec):
        raise ConfigError(
            f"table {state.config.name!r}: use_gradient_accumulation=False is supported on an embedding accelerator only, or "
            "for sgd without weight decay and weight bounds, whose numbers it does not change. Elsewhere the gradients of "
            "duplicate ids are always summed. Leave it True."
        )
