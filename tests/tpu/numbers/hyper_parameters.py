"""The optimizers whose lowered computations are run, as data that every environment can read: no imports but the library's."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["RULES", "SLOTS", "Rule", "arguments"]


@dataclasses.dataclass(frozen=True)
class Rule:
    """An optimizer with hyper-parameters.

    Attributes:
        optimizer: its class in `tpuembed.config`.
        given: hyper-parameters that are not the defaults.
    """

    optimizer: str
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_MOMENTUM = {"momentum": 0.9, "use_nesterov": True, "exponent": 3.0, "beta2": 0.75, "epsilon": 1e-3}
_ADAM = {"beta_1": 0.8, "beta_2": 0.75, "epsilon": 1e-2}
_FTRL = {
    "learning_rate_power": -0.4,
    "l1_regularization_strength": 0.3,
    "l2_regularization_strength": 0.2,
    "beta": 0.3,
}
RULES: Final[Mapping[str, Rule]] = {
    "sgd": Rule("SGD"),
    "adagrad": Rule("Adagrad"),
    "momentum": Rule("AdagradMomentum"),
    "momentum_nesterov": Rule("AdagradMomentum", _MOMENTUM),
    "momentum_plain": Rule("AdagradMomentum", {"momentum": 0.6, "exponent": 1.5}),
    "adam": Rule("Adam"),
    "adam_inside": Rule("Adam", _ADAM),
    "adam_outside": Rule("Adam", {**_ADAM, "sum_inside_sqrt": False}),
    "ftrl": Rule("FTRL"),
    "ftrl_regularized": Rule("FTRL", _FTRL),
    "ftrl_multiplied": Rule("FTRL", {**_FTRL, "multiply_linear_by_learning_rate": True}),
}

SLOTS: Final = {
    "SGD": (),
    "Adagrad": ("accumulators",),
    "AdagradMomentum": ("accumulators", "momenta"),
    "Adam": ("momenta", "velocities"),
    "FTRL": ("accumulators", "linears"),
}
"""Optimizer -> its slots, in the order of TensorFlow's ops."""


def arguments(optimizer: str) -> list[str]:
    """Of the computation that updates rows, in order."""
    return ["gradients", "rows", *SLOTS[optimizer], "rate"]
