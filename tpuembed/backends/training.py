"""One training step of any backend: the trap around its activations, and the count of updates."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tpuembed.backends.feature_input import FeatureInput
from tpuembed.backends.gradient_trap import gradient_trap
from tpuembed.backends.table_state import TableState
from tpuembed.backends.tf_config import local

__all__ = ["Step", "train"]

Tensor = Any


class Step(Protocol):
    """One call of the layer."""

    def lookup(self) -> list[Tensor]:
        """The activations, each [..., dim]."""

    def apply(self, gradients: Sequence[Tensor]) -> list[Any]:
        """Update the tables by the activations' gradients, one for each; the ops that do."""


class _Backend(Protocol):
    states: Mapping[str, TableState]

    def lookup(self, features: Sequence[FeatureInput]) -> list[Tensor]: ...

    def begin(self, features: Sequence[FeatureInput], layer: Any) -> Step: ...


def train(backend: _Backend, features: Sequence[FeatureInput], dummy: Tensor, updates: Any, layer: Any) -> list[Tensor]:
    """Activations of `features`, such that the gradient of `dummy` updates the tables once and adds one to `updates`.

    A table without an optimizer stays the user's to train.
    """
    free = [feature for feature in features if _is_free(backend, feature)]
    trapped = [feature for feature in features if not _is_free(backend, feature)]
    caught: Sequence[Tensor] = []
    if trapped:
        step = backend.begin(trapped, layer)
        caught = gradient_trap(dummy, step.lookup, lambda gradients: _apply(step, gradients, updates))
    answers = {True: iter(backend.lookup(free) if free else []), False: iter(caught)}
    return [next(answers[_is_free(backend, feature)]) for feature in features]


def _is_free(backend: _Backend, feature: FeatureInput) -> bool:
    state = backend.states.get(feature.table)
    return state is not None and state.optimizer is None


def _apply(step: Step, gradients: Sequence[Tensor], updates: Any) -> list[Any]:
    """Learning rates are read before the count moves on."""
    ops = step.apply(gradients)
    with tf.control_dependencies([] if tf.executing_eagerly() else ops):
        return [*ops, local(updates).assign_add(1, read_value=False)]
