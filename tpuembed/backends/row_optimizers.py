"""The update rules of the table optimizers. They apply to the rows that a step touched, each once, with duplicates
summed.

Every backend outside the accelerator applies them. The accelerator applies the same rules. Source:
tensorflow/core/protobuf/tpu/optimization_parameters.proto.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tpuembed.backends.tf_config import in_xla_context, unchecked_gathers
from tpuembed.config import FTRL, SGD, Adagrad, AdagradMomentum, Adam, Optimizer
from tpuembed.errors import TrainingError
from tpuembed.lookup.ranges import NOT_FOR_XLA, is_inside

__all__ = ["RULES", "dedupe", "ignores_zeros", "is_additive", "learning_rate", "update_every_row", "update_rows"]

Tensor = Any
_MOST_COLUMNS, _LEAST_COLUMNS = 31, 8  # with fewer columns a piece than the least, the loop is no faster
Rule = Callable[..., tuple[Tensor, ...]]


def _sgd(_: SGD, rate: Tensor, gradients: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    return (rows - rate * gradients,)


def _adagrad(_: Adagrad, rate: Tensor, gradients: Tensor, rows: Tensor, accumulators: Tensor) -> tuple[Tensor, ...]:
    accumulators += tf.square(gradients)
    return rows - rate * gradients * tf.math.rsqrt(accumulators), accumulators


def _adagrad_momentum(
    spec: AdagradMomentum, rate: Tensor, gradients: Tensor, rows: Tensor, accumulators: Tensor, momenta: Tensor
) -> tuple[Tensor, ...]:
    squares = tf.square(gradients)
    accumulators = (
        accumulators + squares if spec.beta2 == 1.0 else spec.beta2 * accumulators + _rest(spec.beta2) * squares
    )
    scaled = gradients * tf.pow(accumulators + spec.epsilon, -1.0 / spec.exponent)
    momenta = spec.momentum * momenta + scaled
    step = spec.momentum * momenta + scaled if spec.use_nesterov else momenta
    return rows - rate * step, accumulators, momenta


def _adam(
    spec: Adam, rate: Tensor, gradients: Tensor, rows: Tensor, momenta: Tensor, velocities: Tensor
) -> tuple[Tensor, ...]:
    momenta = spec.beta_1 * momenta + _rest(spec.beta_1) * gradients
    velocities = spec.beta_2 * velocities + _rest(spec.beta_2) * tf.square(gradients)
    if spec.sum_inside_sqrt:
        return rows - rate * momenta * tf.math.rsqrt(velocities + spec.epsilon**2), momenta, velocities
    return rows - rate * momenta / (tf.sqrt(velocities) + spec.epsilon), momenta, velocities


def _rest(beta: float) -> float:
    """Return 1 - beta as a TPU computes it, in float32. Near 1, this differs from the rounded 1 - beta."""
    return float(np.float32(1.0) - np.float32(beta))


def _ftrl(
    spec: FTRL, rate: Tensor, gradients: Tensor, rows: Tensor, accumulators: Tensor, linears: Tensor
) -> tuple[Tensor, ...]:
    updated = accumulators + tf.square(gradients)
    power = tf.pow(updated, -spec.learning_rate_power)
    change = (power - tf.pow(accumulators, -spec.learning_rate_power)) * rows
    if spec.multiply_linear_by_learning_rate:
        linears, bound = linears + rate * gradients - change, rate * spec.l1_regularization_strength
        denominator = power + 2.0 * rate * spec.l2_regularization_strength + spec.beta
    else:
        linears, bound = linears + gradients - change / rate, tf.constant(spec.l1_regularization_strength)
        denominator = (power + spec.beta) / rate + 2.0 * spec.l2_regularization_strength
    numerator = tf.clip_by_value(linears, -bound, bound) - linears
    divide = tf.math.divide_no_nan if spec.allow_zero_accumulator else tf.divide
    return divide(numerator, denominator), updated, linears


RULES: Mapping[str, Rule] = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "adagrad_momentum": _adagrad_momentum,
    "adam": _adam,
    "ftrl": _ftrl,
}
"""kind -> rule(spec, learning rate, gradients [n, dim], rows [n, dim], *slot rows [n, dim]) -> (new rows, *new slot rows)."""


def learning_rate(spec: Optimizer, step: Tensor) -> Tensor:
    """Return a float32 scalar: the constant, the schedule at `step` updates, or the callable's current value.

    Raises:
        TrainingError: the callable returned a Python or numpy number while a function is traced. Tracing would freeze
            it.
    """
    rate = spec.learning_rate
    if not callable(rate):
        return tf.constant(rate, tf.float32)
    import keras

    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        return tf.cast(rate(step), tf.float32)
    value = rate()
    if not (tf.is_tensor(value) or tf.executing_eagerly()):
        kind = "numpy" if isinstance(value, np.generic | np.ndarray) else "Python"
        raise TrainingError(
            f"{spec.kind}: the learning_rate callable returned the {kind} number {value!r}. Tracing would freeze it. "
            "Return a tensor, or keep the rate in a tf.Variable."
        )
    return tf.cast(tf.convert_to_tensor(value), tf.float32)


def is_additive(spec: Optimizer) -> bool:
    """Return True if an update by a sum of gradients equals updates by each of them."""
    bounds = spec.clip_weight_min, spec.clip_weight_max
    return spec.kind == "sgd" and not spec.weight_decay_factor and spec.clipvalue is None and bounds == (None, None)


def ignores_zeros(spec: Optimizer) -> bool:
    """Return True if an update by a gradient of 0 leaves a row and its slots as they are."""
    low, high = spec.clipvalue or (None, None)  # type: ignore[misc]
    return (
        spec.kind in ("sgd", "adagrad")
        and not spec.weight_decay_factor
        and spec.clip_weight_min is None
        and spec.clip_weight_max is None
        and (low is None or low <= 0)
        and (high is None or high >= 0)
    )


def dedupe(ids: Tensor, gradients: Tensor, rows: int, droppable: bool = True) -> tuple[Tensor, Tensor]:
    """Return (unique ids [u], their summed gradients [u, dim]) of ids [n] and gradients [n, dim].

    Ids outside [0, rows) are dropped: a scatter on a GPU casts ids to int32, and would write another row. If there can be
    none (`droppable` is False), nothing is copied to drop them.

    Under XLA the shapes stay static, and an unused place carries the id `rows`, which XLA's scatter drops. `tf.unique`
    with a dynamic shape is silently wrong under XLA. A function that was traced before is not traced again when XLA
    compiles its caller. An op without an XLA kernel makes that an error.
    """
    if in_xla_context():
        return _dedupe_static(ids, gradients, rows)
    if droppable:
        keep = tf.where(is_inside(ids, rows))[:, 0]
        ids, gradients = tf.gather(ids, keep), tf.gather(gradients, keep)
        unique, index, _ = tf.unique_with_counts(ids, name=NOT_FOR_XLA)
    else:
        unique, index = tf.unique(ids)
    return unique, _segment_sum(gradients, index, unique)


def _segment_sum(gradients: Tensor, index: Tensor, unique: Tensor) -> Tensor:
    """Return the sums [u, dim] of gradients [n, dim]. `index` [n] is the place of each in `unique` [u].

    On CPUs it is the product with a sparse matrix of ones, because TensorFlow has a plain loop for less than 32 columns.
    2,048 rows of 16 take 32 us on one core, and 77 us in `unsorted_segment_sum`. Rows of 64, in four pieces: 160 us, and 230 us.
    """
    dim = gradients.shape[-1]
    width = max(size for size in range(1, _MOST_COLUMNS + 1) if dim % size == 0)
    if unchecked_gathers() or width < min(dim, _LEAST_COLUMNS):
        return tf.math.unsorted_segment_sum(gradients, index, tf.size(unique))
    pieces, places = dim // width, tf.cast(index, tf.int64)
    if pieces > 1:
        places = tf.reshape(places[:, None] * pieces + tf.range(pieces, dtype=tf.int64), [-1])
    count = tf.size(places, tf.int64)
    sums = tf.raw_ops.SparseTensorDenseMatMul(
        a_indices=tf.stack([places, tf.range(count)], 1),
        a_values=tf.ones_like(places, tf.float32),
        a_shape=tf.stack([tf.size(unique, tf.int64) * pieces, count]),
        b=tf.reshape(gradients, [-1, width]),
    )
    return tf.reshape(sums, [-1, dim])


def _dedupe_static(ids: Tensor, gradients: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    order = tf.argsort(ids, stable=True)
    ids, gradients = tf.gather(ids, order), tf.gather(gradients, order)
    starts = tf.concat(
        [tf.ones_like(ids[:1], tf.bool), tf.not_equal(ids[1:], ids[:-1])], 0
    )  # of size 0 if there are no ids
    segments = tf.cumsum(tf.cast(starts, tf.int32)) - 1
    unique = tf.math.unsorted_segment_max(ids, segments, tf.size(ids))
    # A segment without ids has the lowest integer, so it counts as dropped too.
    return tf.where(is_inside(unique, rows), unique, rows), tf.math.unsorted_segment_sum(
        gradients, segments, tf.size(ids)
    )


def update_rows(
    spec: Optimizer, rate: Tensor, table: Any, slots: Sequence[Any], ids: Tensor, gradients: Tensor
) -> list[Any]:
    """Apply the rule to the rows `ids` [u] (unique) of the variable `table` and its `slots`. Returns the update ops.

    It only gathers and scatters: a dense read of a variable that was gathered from copies the whole table.
    """
    variables = [table, *slots]
    current = [tf.raw_ops.ResourceGather(resource=v.handle, indices=ids, dtype=tf.float32) for v in variables]
    updated = _updated(spec, rate, gradients, current)
    ops = [
        tf.raw_ops.ResourceScatterUpdate(resource=variable.handle, indices=ids, updates=value)
        for variable, value in zip(variables, updated, strict=True)
    ]
    return [op for op in ops if op is not None]


def update_every_row(
    spec: Optimizer, rate: Tensor, table: Any, slots: Sequence[Any], ids: Tensor, gradients: Tensor
) -> list[Any]:
    """Apply the rule to the whole table, with a zero gradient for rows that are not in `ids` (non-lazy Adam). Returns
    the update ops.

    This needs several times the table's size, in time and in memory.
    """
    variables = [table, *slots]
    dense = tf.scatter_nd(ids[:, None], gradients, tf.constant(table.shape.as_list(), tf.int64))
    updated = _updated(spec, rate, dense, [variable.read_value() for variable in variables])
    ops = [variable.assign(value, read_value=False) for variable, value in zip(variables, updated, strict=True)]
    return [op for op in ops if op is not None]


def _updated(spec: Optimizer, rate: Tensor, gradients: Tensor, current: Sequence[Tensor]) -> list[Tensor]:
    """Return the new rows of the table and of its slots."""
    rows, *slots = current
    new_rows, *new_slots = RULES[spec.kind](spec, rate, _clipped(spec, gradients), _decayed(spec, rate, rows), *slots)
    return [_bounded(new_rows, spec.clip_weight_min, spec.clip_weight_max), *new_slots]


def _clipped(spec: Optimizer, gradients: Tensor) -> Tensor:
    return gradients if spec.clipvalue is None else _bounded(gradients, *spec.clipvalue)  # type: ignore[misc]


def _decayed(spec: Optimizer, rate: Tensor, rows: Tensor) -> Tensor:
    if spec.weight_decay_factor is None:
        return rows
    factor = rate if spec.multiply_weight_decay_factor_by_learning_rate else 1.0
    return rows - spec.weight_decay_factor * factor * rows


def _bounded(values: Tensor, low: float | None, high: float | None) -> Tensor:
    values = values if low is None else tf.maximum(values, low)
    return values if high is None else tf.minimum(values, high)
