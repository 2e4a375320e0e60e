"""Tables of hosts move in the trainer's own optimizer step.

Each table has a weight of its own, a row of zeros. The gradient of that weight *is* the gradient of the table's rows, as
`tf.IndexedSlices`: it goes wherever the trainer carries gradients, through clipping, scaling, sums, conditions and functions.
When the trainer's optimizer applies it, and only then, Keras hands it to the weight (`overwrite_with_gradient`), and the weight
hands it to the table's own optimizer.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import keras
import numpy as np
import tensorflow as tf

from tpuembed.backends.gradient_trap import IN_BRANCH, SAVED, with_shapes
from tpuembed.backends.keras_steps import asking_optimizer, fit_callbacks, handover
from tpuembed.backends.row_optimizers import ignores_zeros
from tpuembed.backends.table_state import TableState, safe_name
from tpuembed.backends.tf_config import LiveRate, custom_gradient, in_save_context, in_xla_context, local
from tpuembed.backends.tpu.tf_tpu import differentiates_control_flow, tpu_call
from tpuembed.errors import TrainingError, TrainingWarning, first_few, warn

__all__ = ["RowGradients", "TableGradient"]

Tensor = Any

_MOST_DENSE: Final = 2**24
"""The most numbers of a table whose gradient may be dense: a copy of the table."""
_REFUSED: Final = {
    "gradient_accumulation_steps": "Sum the losses of several batches in one tape, or use a larger batch",
    "use_ema": "A file would hold tables that are not averaged. Average them after training, or leave the option out",
}
_INSTEAD: Final = {
    "clipnorm": "Clip in a loop of your own (tf.clip_by_norm), or give the table's optimizer a clipvalue.",
    "global_clipnorm": "Clip in a loop of your own (tf.clip_by_global_norm), or give the table's optimizer a clipvalue.",
    "clipvalue": "Give the table's optimizer a clipvalue too.",
    "weight_decay": "Give the table's optimizer a weight_decay_factor too.",
}
"""Option of the trainer's optimizer -> what to do for the tables."""
_RATE_CALLBACKS: Final = (keras.callbacks.LearningRateScheduler, keras.callbacks.ReduceLROnPlateau)
_KEEP_SLICES: Final = (
    "Keep the tf.IndexedSlices: scale them with tf.math.scalar_mul, and sum losses, not gradients, of several batches."
)


class TableGradient(keras.Variable):
    """The weight whose gradient is that of a table's rows. Its own value stays zero."""

    table: "_TableRows"

    @property
    def overwrite_with_gradient(self) -> bool:
        """Return True: Keras' optimizers hand the gradient to `assign`.

        Raises:
            TrainingError: the optimizer that asks has an option that tables cannot follow.
        """
        optimizer = asking_optimizer()
        if self.table.is_sparse and getattr(optimizer, "loss_scale_factor", None):
            raise TrainingError(
                f"TPUEmbedding: {type(optimizer).__name__}(loss_scale_factor={optimizer.loss_scale_factor}) cannot divide the "
                "layer's gradients, which are tf.IndexedSlices (nor those of keras.layers.Embedding). Compile the model with it, "
                "or use keras.optimizers.LossScaleOptimizer."
            )
        for option, remedy in _REFUSED.items():
            if getattr(optimizer, option, None):
                raise TrainingError(
                    f"TPUEmbedding: {type(optimizer).__name__}({option}={getattr(optimizer, option)}) does not reach the tables, "
                    f"which have optimizers of their own. {remedy}. Or give the layer optimizer=None, off TPUs: your optimizer "
                    "trains the tables then, densely and slowly."
                )
        return True

    @overwrite_with_gradient.setter
    def overwrite_with_gradient(self, value: bool) -> None:
        """Ignore what Keras sets."""

    def assign(self, value: Any) -> Any:
        """Update the table's rows if an optimizer hands over their gradient. Values, as of `set_weights`, change nothing."""
        step = handover()
        if step is None:
            return value if np.shape(value) == tuple(self.shape) else super().assign(value)  # which fails
        self.table.take(value, step.variables, step.scales, step.optimizer)
        return value

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> Tensor:
        """Return zeros that are no function of the weight, so that a penalty over all weights adds no dense gradient."""
        return tf.zeros(self.shape, dtype or tf.float32, name)


class _TableRows:
    """A table as its weight sees it."""

    def __init__(self, name: str, state: TableState, owner: "RowGradients") -> None:
        self.name, self.owner = name, owner
        self._spec, self._shape = state.optimizer, (state.config.vocabulary_size, state.config.dim)

    @property
    def learning_rate(self) -> Any:
        """The rate of the table's optimizer: a number, or what gives it."""
        return None if self._spec is None else self._spec.learning_rate

    @property
    def is_sparse(self) -> bool:
        """Return True if the gradient of the step's weight was sparse in a call of the layer."""
        return self.owner.is_sparse

    def take(self, value: Any, variables: Sequence[Any], scales: Sequence[Tensor], optimizer: Any) -> None:
        """Update the rows by `value`, which an optimizer's step hands over."""
        self.owner.check_step(variables)
        self.owner.warn_unseen(optimizer)
        self.apply(value, scales)

    def apply(self, value: Any, scales: Sequence[Tensor] = (), *, checked: bool = True) -> None:
        """Update the rows by their gradient. `checked` is False if ids of it may be outside the table."""
        slices = self._slices(value)
        rows = tf.cast(slices.values, tf.float32)
        for scale in scales:
            rows /= scale
        self.owner.update(self.name, tf.cast(slices.indices, tf.int64), rows, checked)

    def slices(self, ids: Tensor, rows: Tensor) -> tf.IndexedSlices:
        """Return the gradient of the weight: `rows`, float32 [n, dim], of ids [n]."""
        return tf.IndexedSlices(rows, ids, tf.constant(self._shape, tf.int64))

    def _slices(self, value: Any) -> tf.IndexedSlices:
        if isinstance(value, tf.IndexedSlices):
            return value
        given = tuple(value.shape)
        about = f"TPUEmbedding: the gradient of table {self.name!r} is dense, {value.dtype.name} {list(given)}"
        if given != self._shape:
            raise TrainingError(
                f"{about}, and the table is {list(self._shape)}. Pass on the tf.IndexedSlices that the tape gave."
            )
        if math.prod(self._shape) > _MOST_DENSE:
            raise TrainingError(f"{about}: a copy of the table. {_KEEP_SLICES}")
        assert self._spec is not None, "a table without an optimizer has no such weight"
        if not ignores_zeros(self._spec):
            raise TrainingError(
                f"{about}, so nobody knows which rows were looked up, and {self._spec.kind} changes those also by a gradient of 0. "
                f"{_KEEP_SLICES}"
            )
        ids = tf.where(tf.reduce_any(tf.not_equal(value, 0.0), 1))[:, 0]
        return tf.IndexedSlices(tf.gather(value, ids), ids)


class RowGradients:
    """The weights of a layer's tables, and what becomes of their gradients.

    Attributes:
        weights: table -> its weight.
    """

    def __init__(self, states: Mapping[str, TableState], apply_rows: Callable[..., list[Any]], updates: Any) -> None:
        """Make a weight for each of `states` that has an optimizer.

        Args:
            states: the tables.
            apply_rows: takes {table: (ids, row gradients, whether ids may be outside)}, and updates the tables.
            updates: the layer's count of updates.
        """
        self._apply_rows, self._updates = apply_rows, updates
        self._droppable: set[str] = set()
        self._warned: set[str] = set()
        self._taken = self._applied = self.is_sparse = False
        self._tables = {
            name: _TableRows(name, state, self) for name, state in states.items() if state.optimizer is not None
        }
        self.weights: dict[str, TableGradient] = {}
        with tf.init_scope():
            for name, table in self._tables.items():
                weight = TableGradient(
                    initializer="zeros",
                    # No row has this length, so an optimizer that applies the gradient to the weight itself fails on any device:
                    # in a graph at once, otherwise at the latest in the next call.
                    shape=(1, states[name].config.dim + 1),
                    dtype="float32",
                    autocast=False,
                    name=f"{safe_name(name)}_rows",
                )
                weight.table = table
                self.weights[name] = weight

    def lookup(self, step: Any, dummy: Tensor, features: Sequence[str], optimizer: Any) -> list[Tensor]:
        """Return the activations of `step`. The gradients of the weights through them are those of the tables' rows.

        Args:
            step: a call of the layer.
            dummy: the weight of the whole step. Its gradient is zero.
            features: the path of each activation, for messages.
            optimizer: that of the compiled model whose call reached the layer, or None.
        """
        names = list(dict.fromkeys(step.tables))
        activations: list[Tensor] = []
        if tf.executing_eagerly():
            self._check_zero()

        def backward(*gradients: Tensor) -> list[Any]:
            if in_save_context():  # saving traces the functions of the gradients too
                with tf.control_dependencies([tf.debugging.Assert(tf.constant(False), [SAVED])]):
                    return [tf.zeros_like(dummy), *(tf.zeros_like(self.weights[name].value) for name in names)]
            if not tf.executing_eagerly() and differentiates_control_flow():
                raise TrainingError(IN_BRANCH)
            self._note_taken()
            found = step.row_gradients(with_shapes(gradients, activations, features))
            self._droppable.update(name for name in names if found[name][2])
            return [self._zeros(dummy, optimizer), *(self._tables[name].slices(*found[name][:2]) for name in names)]

        @custom_gradient
        def trap(*_: Tensor) -> tuple[list[Tensor], Callable[..., list[Any]]]:
            activations.extend(step.lookup())
            return list(activations), backward

        caught: list[Tensor] = trap(dummy, *(tf.convert_to_tensor(self.weights[name].value) for name in names))
        return caught

    def _check_zero(self) -> None:
        """Raise TrainingError if an optimizer changed the weights, and so no table."""
        changed = [name for name, weight in self.weights.items() if np.any(local(weight.value).numpy())]
        if changed:
            raise TrainingError(
                f"TPUEmbedding: an optimizer applied the gradient of table {changed[0]!r} to the layer's weight, which holds no "
                "rows, so the table did not move. Give layer.trainable_variables themselves (not their values) to a Keras "
                "optimizer's apply_gradients, or the gradients to layer.apply_gradients. Then make the layer anew."
            )

    def _note_taken(self) -> None:
        self._taken = True
        if self._applied or "fit" in self._warned or (callbacks := fit_callbacks()) is None:
            return
        self._warned.add("fit")
        callbacks.callbacks.append(
            keras.callbacks.LambdaCallback(on_train_end=lambda _: self.warn_unapplied("fit has ended"))
        )

    def _zeros(self, dummy: Tensor, optimizer: Any) -> Any:
        """Return the gradient of `dummy`: zeros.

        Keras' optimizers add up the gradients of replicas. If all are dense, TensorFlow registers a gradient of that sum, which
        keeps the graph and its variables until the process ends. See `custom_gradient`. XLA does not compile what they do with
        sparse ones, and they do not divide them by a loss_scale_factor.
        """
        zeros = tf.zeros_like(dummy)
        divided = getattr(optimizer, "loss_scale_factor", None)
        if tf.executing_eagerly() or tpu_call() is not None or in_xla_context() or divided:
            return zeros
        self.is_sparse = True
        return tf.IndexedSlices(zeros, tf.zeros([1], tf.int64), tf.ones([1], tf.int64))

    def check_step(self, variables: Sequence[Any]) -> None:
        """Raise TrainingError unless all weights are among the `variables` of a step, in their order.

        The one that is handed last counts the update, and Keras hands from right to left.
        """
        places = {id(variable): place for place, variable in enumerate(variables)}
        mine = [places.get(id(weight), -1) for weight in self.weights.values()]
        if min(mine) < 0 or mine != sorted(mine):
            raise TrainingError(
                "TPUEmbedding: an optimizer's step has only some of the layer's weights, or has them in another order. Its tables "
                "move together, in one update. Give all of layer.trainable_variables, as they are, to one optimizer."
            )

    def warn_unseen(self, optimizer: Any) -> None:
        """Warn, once for each, of what the trainer's `optimizer` does and the tables do not follow."""
        for option, instead in _INSTEAD.items():
            value = getattr(optimizer, option, None)
            if value is not None:
                self._warn(option, f"{type(optimizer).__name__}({option}={value})", self._tables, instead)

    def warn_of_rate(self, optimizer: Any, callback: Any) -> None:
        """Warn, once for each kind, of a `callback` that sets the rate of the trainer's `optimizer`, and not the tables'."""
        rates = {name: table.learning_rate for name, table in self._tables.items()}
        behind = [
            name for name, rate in rates.items() if not (isinstance(rate, LiveRate) and rate.optimizer is optimizer)
        ]
        if behind:
            instead = (
                "To follow it, give compile's optimizer object to the layer too: TPUEmbedding(features, optimizer)."
            )
            self._warn(type(callback).__name__, f"the callback {type(callback).__name__}", behind, instead)

    def _warn(self, key: str, what: str, tables: Iterable[str], instead: str) -> None:
        if key in self._warned:
            return
        self._warned.add(key)
        names = first_few(map(repr, tables))
        warn(
            f"TPUEmbedding: {what} does not reach the tables {names}, which have optimizers of their own. {instead}",
            TrainingWarning,
        )

    def apply(self, gradients: Sequence[Any]) -> None:
        """Update the tables by `gradients`, one for each weight, in their order."""
        for table, gradient in reversed(list(zip(self._tables.values(), gradients, strict=True))):
            table.apply(gradient, checked=False)

    def update(self, table: str, ids: Tensor, rows: Tensor, checked: bool) -> None:
        """Update one table. The first one comes last, and counts the update."""
        self._applied = True
        ops = self._apply_rows({table: (ids, rows, not checked or table in self._droppable)})
        if table == next(iter(self._tables)):
            with tf.control_dependencies([] if tf.executing_eagerly() else ops):
                local(self._updates).assign_add(1, read_value=False)

    def warn_unapplied(self, doing: str) -> None:
        """Warn if gradients of the tables were taken in this process, and never applied."""
        if self._taken and not self._applied and "unapplied" not in self._warned:
            self._warned.add("unapplied")
            warn(
                f"TPUEmbedding: {doing}, and no gradient of its tables was applied in this process, although some were taken. The "
                "tables did not move. Give all of layer.trainable_variables and their gradients to a Keras optimizer's "
                "apply_gradients, or to layer.apply_gradients.",
                TrainingWarning,
            )


def _watch_rates(kind: Any) -> None:
    """Let callbacks of type `kind` warn of tables that they do not reach. Each `fit` gives its model to its callbacks."""
    set_model = kind.set_model

    @functools.wraps(set_model)
    def watched(self: Any, model: Any) -> None:
        set_model(self, model)
        optimizer = getattr(model, "optimizer", None)
        weights = [one for one in getattr(model, "trainable_variables", ()) if isinstance(one, TableGradient)]
        for owner in {weight.table.owner for weight in weights}:
            owner.warn_of_rate(getattr(optimizer, "inner_optimizer", optimizer), self)

    kind.set_model = watched


for _kind in _RATE_CALLBACKS:
    _watch_rates(_kind)
