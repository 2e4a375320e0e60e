"""One training step of any backend: the trap around its activations, and the count of updates."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tpuembed.backends.feature_input import FeatureInput
from tpuembed.backends.gradient_trap import TakenGradients, gradient_trap
from tpuembed.backends.table_state import TableState
from tpuembed.backends.tf_config import entry_optimizer, local, unchecked_gathers
from tpuembed.backends.tf_tpu import tpu_call
from tpuembed.errors import TrainingError

__all__ = ["Step", "found_together", "train"]

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


def train(
    backend: _Backend,
    features: Sequence[FeatureInput],
    dummy: Tensor,
    updates: Any,
    taken: TakenGradients,
    layer: Any,
) -> list[Tensor]:
    """Activations of `features`, such that the gradient of `dummy` updates the tables once and adds one to `updates`.

    A table without an optimizer stays the user's to train.

    Raises:
        TrainingError: the loop that the call is part of cannot train tables.
    """
    free = [feature for feature in features if _is_free(backend, feature)]
    trapped = [feature for feature in features if not _is_free(backend, feature)]
    caught: Sequence[Tensor] = []
    if trapped:
        _check_accumulation(entry_optimizer(layer))
        step = backend.begin(trapped, layer)
        caught = gradient_trap(dummy, step.lookup, lambda gradients: _apply(step, gradients, updates), taken)
    answers = {True: iter(backend.lookup(free) if free else []), False: iter(caught)}
    activations = [next(answers[_is_free(backend, feature)]) for feature in features]
    return found_together(activations) if trapped else activations


def found_together(activations: Sequence[Tensor]) -> list[Tensor]:
    """`activations`, whose gradients wait until all of them are looked up: a step that fails on one's ids updates no table.

    A graph would otherwise update one table while the lookup in another one fails. Eagerly the lookups are over before; XLA,
    TPUs and GPUs do not fail on ids.
    """
    unchecked = tpu_call() is not None or unchecked_gathers()
    if len(activations) < 2 or tf.executing_eagerly() or unchecked:
        return list(activations)

    @tf.custom_gradient
    def gate(*given: Tensor) -> tuple[list[Tensor], Any]:
        def backward(*gradients: Tensor) -> list[Tensor]:
            # An op that no optimizer of graphs drops: they turn a lookup that only a control edge needs into nothing.
            found = tf.raw_ops.Assert(condition=tf.constant(True), data=given)
            with tf.control_dependencies([found]):
                return [tf.identity(gradient) for gradient in gradients]

        return [tf.identity(activation) for activation in given], backward

    gated: list[Tensor] = gate(*activations)
    return gated


def _check_accumulation(optimizer: Any) -> None:
    """Raise TrainingError where the model's `optimizer` adds up the gradients of several batches, which are steps here."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer, which has none of its own
    if getattr(inner, "gradient_accumulation_steps", None):
        raise TrainingError(
            "TPUEmbedding: gradient_accumulation_steps is not supported: the tables would be updated at every micro-batch; "
            "use a larger batch, or, where no accelerator has the tables, optimizer=None to let the model's optimizer train them"
        )


def _is_free(backend: _Backend, feature: FeatureInput) -> bool:
    state = backend.states.get(feature.table)
    return state is not None and state.optimizer is None


def _apply(step: Step, gradients: Sequence[Tensor], updates: Any) -> list[Any]:
    """Learning rates are read before the count moves on."""
    ops = step.apply(gradients)
    with tf.control_dependencies([] if tf.executing_eagerly() else ops):
        return [*ops, local(updates).assign_add(1, read_value=False)]
