"""The layer's and the simulator's rules for the rows that the lowered computations update."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import tensorflow as tf

import tpuembed.config
from tests.tpu.numbers.hyper_parameters import SLOTS, Rule, arguments
from tpuembed.backends import row_optimizers
from tpuembed.config import Optimizer
from tpuembed.testing import optimizer_rules

__all__ = ["TOLERANCE", "assert_same", "inputs", "layers", "simulators"]

Array = np.ndarray[Any, Any]

TOLERANCE: Final = 1e-6
"""Of numbers up to 1, and in proportion of larger ones."""
_CASES = 64


def inputs() -> dict[str, Array]:
    """ "<optimizer>/<argument>" -> float32 [cases, 8]: gradients of many sizes and some zeros, two rates, slots as they may be."""
    random, shape = np.random.default_rng(9), (_CASES, 8)
    found = {}
    for optimizer in SLOTS:
        values = {name: random.normal(size=shape) for name in arguments(optimizer)}
        values["gradients"] *= 10.0 ** random.uniform(-3, 0.5, shape)
        values["gradients"][::7] = 0.0
        values["rate"] = np.broadcast_to(np.where(np.arange(_CASES) % 2, 0.5, 0.0625)[:, None], shape)
        for squares in {"accumulators", "velocities"} & set(values):
            values[squares] = values[squares] ** 2 + 0.01
        found.update({f"{optimizer}/{name}": value.astype(np.float32) for name, value in values.items()})
    return found


def spec_of(rule: Rule) -> Optimizer:
    """The layer's."""
    spec: Optimizer = getattr(tpuembed.config, rule.optimizer)(**rule.given)
    return spec


def layers(rule: Rule, given: Mapping[str, Array]) -> list[Array]:
    """New rows and slots by the rule that the layer applies off the TPU."""
    spec = spec_of(rule)
    gradients, rows, *slots, rate = (
        tf.constant(given[f"{rule.optimizer}/{name}"]) for name in arguments(rule.optimizer)
    )
    return [np.asarray(new) for new in row_optimizers.RULES[spec.kind](spec, rate, gradients, rows, *slots)]


# Attributes of the update ops by the layer's fields.
_ATTRIBUTES: Final[Mapping[str, Mapping[str, str]]] = {
    "SGD": {},
    "Adagrad": {},
    "AdagradMomentum": {
        "use_nesterov": "use_nesterov",
        "exponent": "exponent",
        "beta1": "momentum",
        "beta2": "beta2",
        "epsilon": "epsilon",
    },
    "Adam": {"use_sum_inside_sqrt": "sum_inside_sqrt", "beta1": "beta_1", "beta2": "beta_2", "epsilon": "epsilon"},
    "FTRL": {
        name: name
        for name in (
            "learning_rate_power",
            "l1_regularization_strength",
            "l2_regularization_strength",
            "beta",
        )
    }
    | {"multiply_linear_by_learning_rate": "multiply_linear_by_learning_rate"},
}
_RULES: Final[Mapping[str, Callable[..., tuple[Array, ...]]]] = {
    "SGD": optimizer_rules.sgd,
    "Adagrad": optimizer_rules.adagrad,
    "AdagradMomentum": optimizer_rules.adagrad_momentum,
    "Adam": optimizer_rules.adam,
    "FTRL": optimizer_rules.ftrl,
}


def simulators(rule: Rule, given: Mapping[str, Array]) -> list[Array]:
    """New rows and slots by the simulator's rule, in float64."""
    fields = dataclasses.asdict(spec_of(rule))
    attributes = {name: _float32(fields[field]) for name, field in _ATTRIBUTES[rule.optimizer].items()}
    gradients, rows, *slots, rate = (
        given[f"{rule.optimizer}/{name}"].astype(np.float64) for name in arguments(rule.optimizer)
    )
    return list(_RULES[rule.optimizer](gradients, rate, rows, *slots, **attributes))


def _float32(value: Any) -> Any:
    """As an op holds it."""
    return float(np.float32(value)) if isinstance(value, float) else value


def assert_same(found: Sequence[Array], truth: Sequence[Array], what: str) -> None:
    """Raise AssertionError where the table or a slot differs by more than TOLERANCE."""
    assert len(found) == len(truth), what
    for number, (mine, other) in enumerate(zip(found, truth, strict=True)):
        error = np.abs(mine - other) / np.maximum(1.0, np.abs(other).max())
        assert error.max() <= TOLERANCE, f"{what}, output {number}: differs by {error.max():.1e}"
