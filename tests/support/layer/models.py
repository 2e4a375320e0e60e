"""Small configs and a float64 reference of the row optimizers for the layer's tests."""

from typing import Any

import numpy as np
import numpy.typing as npt

from tpuembed import FTRL, SGD, Adagrad, AdagradMomentum, Adam, FeatureConfig, TableConfig

Array = npt.NDArray[np.float64]

OPTIMIZERS = {
    "sgd, defaults": SGD(),
    "adagrad, defaults": Adagrad(),
    "momentum, defaults": AdagradMomentum(),
    "adam, defaults": Adam(),
    "ftrl, defaults": FTRL(),
    "sgd": SGD(learning_rate=0.3),
    "adagrad": Adagrad(learning_rate=0.2, initial_accumulator_value=0.4),
    "adam": Adam(learning_rate=0.05, beta_1=0.8, beta_2=0.9, epsilon=1e-3),
    "adam, epsilon outside": Adam(learning_rate=0.05, epsilon=1e-1, sum_inside_sqrt=False),
    "adam, epsilon inside": Adam(learning_rate=0.05, epsilon=1e-1),
    "momentum": AdagradMomentum(learning_rate=0.1, momentum=0.7),
    "momentum, nesterov": AdagradMomentum(
        learning_rate=0.1, momentum=0.7, use_nesterov=True, exponent=3.0, beta2=0.6, epsilon=1e-2
    ),
    "ftrl": FTRL(learning_rate=0.3),
    "ftrl, regularized": FTRL(
        learning_rate=0.3,
        learning_rate_power=-0.7,
        l1_regularization_strength=0.2,
        l2_regularization_strength=0.1,
        beta=0.4,
        initial_accumulator_value=0.5,
    ),
    "ftrl, linear times rate": FTRL(
        learning_rate=0.3,
        l1_regularization_strength=0.2,
        l2_regularization_strength=0.1,
        beta=0.4,
        multiply_linear_by_learning_rate=True,
    ),
    "ftrl from zero": FTRL(learning_rate=0.3, initial_accumulator_value=0.0, allow_zero_accumulator=True),
    "sgd, clipped and decayed": SGD(
        learning_rate=0.3, clipvalue=0.5, weight_decay_factor=0.1, clip_weight_min=-0.4, clip_weight_max=0.3
    ),
    "adagrad, clipped and decayed": Adagrad(
        learning_rate=0.2,
        clipvalue=(-0.3, None),
        weight_decay_factor=0.5,
        multiply_weight_decay_factor_by_learning_rate=True,
        clip_weight_max=0.2,
    ),
    "adam, every row": Adam(learning_rate=0.05, beta_1=0.8, beta_2=0.9, epsilon=1e-2, lazy_adam=False),
}


class Reference:
    """One table in float64. Formulas written from optimization_parameters.proto, row by row."""

    def __init__(self, rows: npt.NDArray[Any], optimizer: Any) -> None:
        self.table = rows.astype(np.float64)
        self.optimizer = optimizer
        self.slots = {name: np.full(rows.shape, float(optimizer.slot_initial_value(name))) for name in optimizer.slots}

    def step(self, ids: npt.NDArray[np.int64], gradients: Array, rate: float | None = None) -> None:
        """One update: duplicates of `ids` summed first."""
        rate = self.optimizer.learning_rate if rate is None else rate
        touched = range(len(self.table)) if not getattr(self.optimizer, "lazy_adam", True) else np.unique(ids)
        for row in touched:
            self._row(row, gradients[ids == row].sum(0), rate)

    def _row(self, row: int, g: Array, rate: float) -> None:
        o = self.optimizer
        if o.clipvalue is not None:
            g = np.clip(g, *o.clipvalue)
        if o.weight_decay_factor is not None:
            by_rate = o.multiply_weight_decay_factor_by_learning_rate
            self.table[row] *= 1 - o.weight_decay_factor * (rate if by_rate else 1.0)
        self._rule(row, g, rate)
        self.table[row] = np.clip(self.table[row], o.clip_weight_min, o.clip_weight_max)

    def _rule(self, row: int, g: Array, rate: float) -> None:
        o, w = self.optimizer, self.table[row]
        slots = {name: values[row] for name, values in self.slots.items()}
        if isinstance(o, SGD):
            w -= rate * g
        elif isinstance(o, Adagrad):
            slots["accumulators"] += g * g
            w -= rate * g / np.sqrt(slots["accumulators"])
        elif isinstance(o, AdagradMomentum):
            a, m, beta2 = slots["accumulators"], slots["momenta"], as_float32(o.beta2)
            a[:] = a + g * g if beta2 == 1 else beta2 * a + (1 - beta2) * g * g
            scaled = g / (a + o.epsilon) ** (1 / o.exponent)
            m[:] = o.momentum * m + scaled
            w -= rate * (o.momentum * m + scaled if o.use_nesterov else m)
        elif isinstance(o, Adam):
            m, v = slots["momenta"], slots["velocities"]
            beta_1, beta_2 = as_float32(o.beta_1), as_float32(o.beta_2)
            m[:] = beta_1 * m + (1 - beta_1) * g
            v[:] = beta_2 * v + (1 - beta_2) * g * g
            w -= rate * m / (np.sqrt(v + o.epsilon**2) if o.sum_inside_sqrt else np.sqrt(v) + o.epsilon)
        else:
            self._ftrl(w, g, rate, slots["accumulators"], slots["linears"])

    def _ftrl(self, w: Array, g: Array, rate: float, a: Array, linear: Array) -> None:
        """`linear` is kept as the plain form has it; with multiply_linear_by_learning_rate it is that times the rate."""
        o = self.optimizer
        factor = rate if o.multiply_linear_by_learning_rate else 1.0
        plain = linear / factor
        old = a**-o.learning_rate_power
        a += g * g
        new = a**-o.learning_rate_power
        plain = plain + g - (new - old) / rate * w
        l1 = np.where(
            np.abs(plain) > o.l1_regularization_strength, np.sign(plain) * o.l1_regularization_strength, plain
        )
        denominator = (new + o.beta) / rate + 2 * o.l2_regularization_strength
        w[:] = np.divide(l1 - plain, denominator, out=np.zeros_like(w), where=denominator != 0)
        linear[:] = plain * factor


def as_float32(value: float) -> float:
    """As a TPU and TensorFlow's kernels hold it: 1 - 0.999 is 1e-5 of itself off there."""
    return float(np.float32(value))


def one_table(optimizer: Any = None, rows: int = 12, dim: int = 3, name: str = "items") -> dict[str, FeatureConfig]:
    """Two features of one table."""
    table = TableConfig(rows, dim, name, combiner="sum", optimizer=optimizer)
    return {"first": FeatureConfig(table), "second": FeatureConfig(table)}


def assert_same_numbers(found: Any, truth: Array, name: str = "") -> None:
    """To 1e-6 of the largest number in the array: where float32 sums cancel, a small one has the large ones' rounding."""
    largest = max(1.0, float(np.abs(truth).max(initial=0.0)))
    np.testing.assert_allclose(found, truth, rtol=1e-6, atol=1e-6 * largest, err_msg=name)
