"""The SparseCores' updates of the rows that a step touched, in float64. Written from the proto, independent of the
layer's rules.

Each rule takes the summed gradients, the learning rate, the rows of the table and of the slots, all [n, width], and the
attributes of the op (XlaSparseDenseMatmulGradWith<Rule>AndStaticBufferSize). It returns the new rows.

Source: tensorflow/core/protobuf/tpu/optimization_parameters.proto.
"""

from typing import Any

import numpy as np

__all__ = ["adagrad", "adagrad_momentum", "adam", "ftrl", "sgd"]

Array = np.ndarray[Any, Any]


def sgd(g: Array, rate: float, w: Array) -> tuple[Array, ...]:
    """Apply the rule of StochasticGradientDescentParameters."""
    return (w - rate * g,)


def adagrad(g: Array, rate: float, w: Array, accumulator: Array) -> tuple[Array, ...]:
    """Apply the rule of AdagradParameters."""
    total = accumulator + g**2
    return w - rate * g / np.sqrt(total), total


def adagrad_momentum(
    g: Array,
    rate: float,
    w: Array,
    accumulator: Array,
    momentum: Array,
    *,
    use_nesterov: bool,
    exponent: float,
    beta1: float,
    beta2: float,
    epsilon: float,
) -> tuple[Array, ...]:
    """Apply the rule of AdagradMomentumParameters. `beta1` is its momentum."""
    fresh = 1.0 if beta2 == 1.0 else 1.0 - beta2
    total = beta2 * accumulator + fresh * g**2
    scaled = g / (total + epsilon) ** (1.0 / exponent)
    speed = beta1 * momentum + scaled
    return w - rate * (beta1 * speed + scaled if use_nesterov else speed), total, speed


def adam(
    g: Array,
    rate: float,
    w: Array,
    momentum: Array,
    velocity: Array,
    *,
    use_sum_inside_sqrt: bool,
    beta1: float,
    beta2: float,
    epsilon: float,
) -> tuple[Array, ...]:
    """Apply the rule of AdamParameters, lazily. The learning rate already includes any bias correction."""
    first = beta1 * momentum + (1.0 - beta1) * g
    second = beta2 * velocity + (1.0 - beta2) * g**2
    root = np.sqrt(second + epsilon**2) if use_sum_inside_sqrt else np.sqrt(second) + epsilon
    return w - rate * first / root, first, second


def ftrl(
    g: Array,
    rate: float,
    w: Array,
    accumulator: Array,
    linear: Array,
    *,
    multiply_linear_by_learning_rate: bool,
    beta: float,
    learning_rate_power: float,
    l1_regularization_strength: float,
    l2_regularization_strength: float,
) -> tuple[Array, ...]:
    """Apply the rule of FtrlParameters. `multiply_linear_by_learning_rate` only scales the slot by the learning rate."""
    unit = rate if multiply_linear_by_learning_rate else 1.0
    total = accumulator + g**2
    before, after = accumulator**-learning_rate_power, total**-learning_rate_power
    slope = linear / unit + g - (after - before) / rate * w
    shrunk = np.sign(slope) * np.minimum(np.abs(slope), l1_regularization_strength)
    new = (shrunk - slope) / ((after + beta) / rate + 2.0 * l2_regularization_strength)
    return new, total, slope * unit
