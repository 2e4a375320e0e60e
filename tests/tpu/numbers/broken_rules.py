"""Broken rules of the layer and of the simulator: each must differ from the lowered computation."""

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final
from unittest import mock

import tensorflow as tf

from tests.tpu.numbers import rules
from tests.tpu.numbers.hyper_parameters import RULES
from tests.tpu.numbers.variant import Variant
from tpuembed.backends import row_optimizers

__all__ = ["BROKEN", "HANDED_ON", "LAYERS", "OWN", "SIMULATORS"]

LAYERS: Final = "equals_the_layers_rule"
SIMULATORS: Final = "equals_the_simulators_rule"


def _shown(given: Any) -> str:
    return ", ".join(f"{name}={value}" for name, value in given.items())


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


OWN: Final = [
    Variant("bias_corrected", "the layer's Adam corrects the bias of its moments", LAYERS, "adam",
        _layers("adam", _corrected)),
    Variant("with_epsilon", "the layer's Adagrad adds an epsilon, as Keras' does", LAYERS, "adagrad",
        _layers("adagrad", _with_epsilon)),
    Variant("old_accumulator", "the layer's FTRL reads an accumulator a little too small", LAYERS, "ftrl_regularized",
        _layers("ftrl", _old_accumulator)),
    Variant("no_nesterov", "the layer's AdagradMomentum ignores use_nesterov", LAYERS, "momentum_nesterov",
        _layers("adagrad_momentum", _no_nesterov)),
    Variant("scaled", "the layer's SGD takes a ten thousandth too much", LAYERS, "sgd", _layers("sgd", _scaled)),
    Variant("beta_dropped", "the simulator's FTRL has no beta", SIMULATORS, "ftrl_multiplied",
        _simulators("FTRL", _beta_dropped)),
    Variant("betas_swapped", "the simulator's Adam exchanges its betas", SIMULATORS, "adam_inside",
        _simulators("Adam", _betas_swapped)),
]  # fmt: skip
"""A broken rule of ours, and for which hyper-parameters (`on`) it must be found."""
HANDED_ON: Final = [
    Variant(
        name,
        f"the layer hands {_shown(rule.instead)} to TensorFlow instead of what it was given",
        LAYERS,
        name,
        nullcontext,
    )
    for name, rule in RULES.items()
    if rule.instead
]
"""Broken where the step is traced (`lowering`): the rule that is lowered is another one than the layer was asked for."""
BROKEN: Final = [*OWN, *HANDED_ON]
"""All of them."""
