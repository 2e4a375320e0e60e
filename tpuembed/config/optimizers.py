"""Table optimizers as data: the rule and its hyper-parameters. `backends` has the rules themselves.

Names, defaults and slot names are those of `tf.tpu.experimental.embedding`. The formulas are those of TPUs, from
tensorflow/core/protobuf/tpu/optimization_parameters.proto.
"""

import dataclasses
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from tpuembed.config.checks import check_choice, check_number, from_mapping
from tpuembed.errors import ConfigError

__all__ = ["FTRL", "OPTIMIZERS", "SGD", "Adagrad", "AdagradMomentum", "Adam", "Optimizer", "optimizer_from"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The base of all specs. An update sums the gradients g of a row's duplicates, clips, decays, applies the rule,
    clips.

    Attributes:
        learning_rate: a number, a callable without arguments that is read at every update, or a Keras
            `LearningRateSchedule`, evaluated at the layer's own count of updates. It may be positional.
        use_gradient_accumulation: sum the gradients of duplicate ids before the rule is applied, once per row.
        clipvalue: bounds of each element of the summed gradient: c for (-c, c), or (min, max). None for no bound.
        weight_decay_factor: w -= weight_decay_factor * w, for rows that a step touched, before the rule.
        multiply_weight_decay_factor_by_learning_rate: decay by weight_decay_factor * learning_rate instead.
        clip_weight_min, clip_weight_max: bounds of the weights after the update. None for no bound.
        slot_variable_creation_fn: called with (table variable, slot names, slot initializers), returns {slot name: variable}.
    """

    kind: ClassVar[str]
    slots: ClassVar[tuple[str, ...]] = ()

    learning_rate: Any = dataclasses.field(default=0.001, kw_only=False)
    use_gradient_accumulation: bool = True
    clip_weight_min: float | None = None
    clip_weight_max: float | None = None
    weight_decay_factor: float | None = None
    multiply_weight_decay_factor_by_learning_rate: bool | None = None
    clipvalue: float | tuple[float | None, float | None] | None = None
    slot_variable_creation_fn: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        """Check every field, and convert integers and numpy numbers to float. A subclass adds its own checks."""
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _as_float(getattr(self, field.name)))
        if not callable(self.learning_rate):
            check_number(f"{self.kind}: learning_rate", self.learning_rate, 0.0)
        clip: Any = self.clipvalue  # as (min, max)
        if isinstance(clip, Sequence) and len(clip) == 2:
            clip = _as_float(clip[0]), _as_float(clip[1])
        elif clip is not None:
            check_number(f"{self.kind}: clipvalue", clip, 0.0, above=True)
            clip = -clip, clip
        object.__setattr__(self, "clipvalue", clip)
        _check_order(self.kind, "clipvalue", *(clip or (None, None)))
        _check_order(self.kind, "clip_weight", self.clip_weight_min, self.clip_weight_max)
        if self.weight_decay_factor is not None:
            check_number(f"{self.kind}: weight_decay_factor", self.weight_decay_factor, 0.0)
        elif self.multiply_weight_decay_factor_by_learning_rate:
            raise ConfigError(
                f"{self.kind}: multiply_weight_decay_factor_by_learning_rate needs a weight_decay_factor. Give one."
            )
        if self.clipvalue is not None and not self.use_gradient_accumulation:
            raise ConfigError(
                f"{self.kind}: clipvalue needs use_gradient_accumulation=True, as on the TPU. Leave one out."
            )

    def slot_initial_value(self, slot: str) -> float:
        """Return the initial value of every element of `slot`."""
        return getattr(self, "initial_accumulator_value", 0.0) if slot == "accumulators" else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return `{"kind": ..., hyper-parameter: value}` without defaults. Raises ConfigError for a field that is code."""
        for name in ("learning_rate", "slot_variable_creation_fn"):
            if callable(getattr(self, name)):
                raise ConfigError(
                    f"{self.kind}: a callable {name} cannot be saved in a config. "
                    "Rebuild the layer in code and restore its weights."
                )
        return self.static_dict()

    def static_dict(self) -> dict[str, Any]:
        """Return `to_dict` without the fields that are code. A checkpoint holds it as the optimizer that wrote it."""
        fields = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        kept = {name: value for name, (value, default) in fields.items() if name == "learning_rate" or value != default}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in kept.items()}
        return {"kind": self.kind, **{name: value for name, value in plain.items() if not callable(value)}}


def _as_float(value: Any) -> Any:
    """Return a number as a Python float. Other values, including bools, are returned unchanged."""
    return float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else value


def _check_order(kind: str, what: str, low: float | None, high: float | None) -> None:
    for bound in (low, high):
        if bound is not None:
            check_number(f"{kind}: {what}", bound)
    if low is not None and high is not None and low > high:
        raise ConfigError(f"{kind}: {what}: the lower bound {low!r} is above the upper one {high!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """Gradient descent: `w -= learning_rate * g`. No slots."""

    kind: ClassVar[str] = "sgd"

    learning_rate: Any = dataclasses.field(default=0.01, kw_only=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adagrad(Optimizer):
    """Adagrad without epsilon: `a += g^2; w -= learning_rate * g / sqrt(a)`. Slot: accumulators."""

    kind: ClassVar[str] = "adagrad"
    slots: ClassVar[tuple[str, ...]] = ("accumulators",)

    initial_accumulator_value: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("adagrad: initial_accumulator_value", self.initial_accumulator_value, 0.0, above=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdagradMomentum(Optimizer):
    """Adagrad with momentum. Slots: accumulators, momenta, both from 0.

    The rule::

        a = a + g^2 where beta2 is 1, else beta2 a + (1 - beta2) g^2;  s = g / (a + epsilon)^(1/exponent)
        m = momentum m + s;  w -= learning_rate * m, or learning_rate * (momentum m + s) with use_nesterov
    """

    kind: ClassVar[str] = "adagrad_momentum"
    slots: ClassVar[tuple[str, ...]] = ("accumulators", "momenta")

    momentum: float = 0.0
    use_nesterov: bool = False
    exponent: float = 2.0
    beta2: float = 1.0
    epsilon: float = 1e-10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("adagrad_momentum: momentum", self.momentum, 0.0, 1.0, below=True)
        check_number("adagrad_momentum: exponent", self.exponent, 0.0, above=True)
        check_number("adagrad_momentum: beta2", self.beta2, 0.0, 1.0)
        check_number("adagrad_momentum: epsilon", self.epsilon, 0.0, above=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """The TPU's lazy Adam: only looked-up rows move, and there is no bias correction. Slots: momenta, velocities.

    `lazy_adam=False` moves every row at every update. The rule, whose last quotient is m / (sqrt(v) + epsilon) where
    `sum_inside_sqrt` is False::

        m = beta_1 m + (1 - beta_1) g;  v = beta_2 v + (1 - beta_2) g^2;  w -= learning_rate * m / sqrt(v + epsilon^2)
    """

    kind: ClassVar[str] = "adam"
    slots: ClassVar[tuple[str, ...]] = ("momenta", "velocities")

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
    lazy_adam: bool = True
    sum_inside_sqrt: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("adam: beta_1", self.beta_1, 0.0, 1.0, below=True)
        check_number("adam: beta_2", self.beta_2, 0.0, 1.0, below=True)
        check_number("adam: epsilon", self.epsilon, 0.0, above=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FTRL(Optimizer):
    """Follow the regularized leader. Slots: accumulators, linears.

    With p(a) = a^(-learning_rate_power), a' = a + g^2 and d = p(a') - p(a)::

        l = l + g - d w / learning_rate;  w = (clamp(l, -l1, l1) - l) / ((p(a') + beta) / learning_rate + 2 l2)

    With `multiply_linear_by_learning_rate`, l holds learning_rate times as much::

        l = l + learning_rate g - d w;  w = (clamp(l, -lr l1, lr l1) - l) / (p(a') + 2 lr l2 + beta)

    Source besides the proto: McMahan et al., "Ad Click Prediction: a View from the Trenches", 2013, algorithm 1.
    """

    kind: ClassVar[str] = "ftrl"
    slots: ClassVar[tuple[str, ...]] = ("accumulators", "linears")

    learning_rate_power: float = -0.5
    l1_regularization_strength: float = 0.0
    l2_regularization_strength: float = 0.0
    beta: float = 0.0
    initial_accumulator_value: float = 0.1
    multiply_linear_by_learning_rate: bool = False
    allow_zero_accumulator: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("l1_regularization_strength", "l2_regularization_strength", "beta", "initial_accumulator_value"):
            check_number(f"ftrl: {field}", getattr(self, field), 0.0)
        check_number("ftrl: learning_rate_power", self.learning_rate_power, maximum=0.0)
        if self.initial_accumulator_value == 0.0 and not self.allow_zero_accumulator:
            raise ConfigError(
                "ftrl: initial_accumulator_value is 0. Give a positive one, or allow_zero_accumulator=True."
            )


OPTIMIZERS: Mapping[str, type[Optimizer]] = {cls.kind: cls for cls in (SGD, Adagrad, AdagradMomentum, Adam, FTRL)}


def optimizer_from(value: str | Mapping[str, Any] | Optimizer) -> Optimizer:
    """Return the spec for `value`: a spec, a string such as "adagrad", or the result of `Optimizer.to_dict`."""
    if isinstance(value, Optimizer):
        return value
    if isinstance(value, str):
        check_choice("optimizer", value.lower(), OPTIMIZERS)
        return OPTIMIZERS[value.lower()]()
    if not isinstance(value, Mapping):
        raise ConfigError(f"optimizer: expected a name, a mapping or a tpuembed optimizer, got {value!r}")
    check_choice("optimizer: kind", value.get("kind"), OPTIMIZERS)
    fields = {name: given for name, given in value.items() if name != "kind"}
    return from_mapping(OPTIMIZERS[value["kind"]], f"optimizer {value['kind']}", fields)
