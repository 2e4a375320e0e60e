"""Broken rules of the layer and of the simulator: each must differ from the lowered computation."""

import dataclasses
from collections.abc import Callable
from typing import Any, Final
from unittest import mock

import tensorflow as tf

from tests.tpu.numbers import rules
from tests.tpu.numbers.variant import Variant
from tpuembed.backends import row_optimizers

__all__ = ["BROKEN"]


def _layers(kind: str, broken: Callable[..., Any]) -> Callable[[], Any]:
    """The layer's rule, called through broken(right rule, spec, rate, gradients, rows, *slots)."""
    right = row_optimizers.RULES[kind]

    def instead(*arguments: Any) -> Any:
        return broken(right, *arguments)

    return lambda: mock.patch.dict(row_optimizers.RULES, {kind: instead})


def _simulators(optimizer: str, broken: Callable[..., Any]) -> Callable[[], Any]:
    right = rules._RULES[optimizer]

    def instead(*arguments: Any, **attributes: Any) -> Any:
        return broken(right, *arguments, **attributes)

    return lambda: mock.patch.dict(rules._RULES, {optimizer: instead})


def _corrected(right: Any, spec: Any, rate: Any, *others: Any) -> Any:
    return right(spec, rate * (1.0 - spec.beta_2) ** 0.5 / (1.0 - spec.beta_1), *others)


def _with_epsilon(_: Any, __: Any, rate: Any, gradients: Any, rows: Any, accumulators: Any) -> Any:
    accumulators += tf.square(gradients)
    return rows - rate * gradients / (tf.sqrt(accumulators) + 1e-3), accumulators


def _old_accumulator(
    right: Any, spec: Any, rate: Any, gradients: Any, rows: Any, accumulators: Any, linears: Any
) -> Any:
    _, updated, _ = right(spec, rate, gradients, rows, accumulators, linears)
    new, _, linears = right(spec, rate, gradients, rows, accumulators - tf.square(gradients) * 0.01, linears)
    return new, updated, linears


def _no_nesterov(right: Any, spec: Any, *others: Any) -> Any:
    return right(dataclasses.replace(spec, use_nesterov=False), *others)


def _scaled(right: Any, spec: Any, rate: Any, gradients: Any, *others: Any) -> Any:
    return right(spec, rate, gradients * 1.0001, *others)


def _beta_dropped(right: Any, *arguments: Any, **attributes: Any) -> Any:
    return right(*arguments, **{**attributes, "beta": 0.0})


def _betas_swapped(right: Any, *arguments: Any, **attributes: Any) -> Any:
    return right(*arguments, **{**attributes, "beta1": attributes["beta2"], "beta2": attributes["beta1"]})


BROKEN: Final = [
    Variant("bias_corrected", "the layer's Adam corrects the bias of its moments", "layers", "adam",
        _layers("adam", _corrected)),
    Variant("with_epsilon", "the layer's Adagrad adds an epsilon, as Keras' does", "layers", "adagrad",
        _layers("adagrad", _with_epsilon)),
    Variant("old_accumulator", "the layer's FTRL reads an accumulator a little too small", "layers", "ftrl_regularized",
        _layers("ftrl", _old_accumulator)),
    Variant("no_nesterov", "the layer's AdagradMomentum ignores use_nesterov", "layers", "momentum_nesterov",
        _layers("adagrad_momentum", _no_nesterov)),
    Variant("scaled", "the layer's SGD takes a ten thousandth too much", "layers", "sgd", _layers("sgd", _scaled)),
    Variant("beta_dropped", "the simulator's FTRL has no beta", "simulators", "ftrl_multiplied",
        _simulators("FTRL", _beta_dropped)),
    Variant("betas_swapped", "the simulator's Adam exchanges its betas", "simulators", "adam_inside",
        _simulators("Adam", _betas_swapped)),
]  # fmt: skip
"""Whose rule is broken (`check`), and for which hyper-parameters (`on`) it must be found."""
