"""One training step of any backend: the gradient trap around its activations, and the count of updates."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tpuembed.backends.feature_input import FeatureInput
from tpuembed.backends.gradient_trap import TakenGradients, gradient_trap
from tpuembed.backends.table_state import TableState
from tpuembed.backends.tf_config import entry_optimizer, local, unchecked_gathers
from tpuembed.backends.tf_tpu import tpu_call
from tpuembed.errors import TrainingError

__all__ = ["TrainingStep", "train", "wait_for_lookups"]

Tensor = Any


class TrainingStep(Protocol):
    """One call of the layer."""

    def lookup(self) -> list[Tensor]:
        """Return the activations, each [..., dim]."""

    def apply(self, gradients: Sequence[Tensor]) -> list[Any]:
        """Update the tables by the gradients of the activations, one for each. Returns the update ops."""


class _Backend(Protocol):
    states: Mapping[str, TableState]

    def lookup(self, features: Sequence[FeatureInput]) -> list[Tensor]: ...

    def begin(self, features: Sequence[FeatureInput], layer: Any) -> TrainingStep: ...


def train(
    backend: _Backend,
    features: Sequence[FeatureInput],
    dummy: Tensor,
    updates: Any,
    taken: TakenGradients,
    layer: Any,
) -> list[Tensor]:
    """Return the activations of `features`. The gradient of `dummy` updates the tables once and adds one to `updates`.

    A table without an optimizer is trained by the user's optimizer.

    Raises:
        TrainingError: tables cannot be trained in the loop that the call is part of.
    """
    free = [feature for feature in features if _is_user_trained(backend, feature)]
    trapped = [feature for feature in features if not _is_user_trained(backend, feature)]
    caught: Sequence[Tensor] = []
    if trapped:
        _check_accumulation(entry_optimizer(layer))
        step = backend.begin(trapped, layer)
        caught = gradient_trap(dummy, step.lookup, lambda gradients: _apply(step, gradients, updates), taken)
    answers = {True: iter(backend.lookup(free) if free else []), False: iter(caught)}
    activations = [next(answers[_is_user_trained(backend, feature)]) for feature in features]
    return wait_for_lookups(activations) if trapped else activations


def wait_for_lookups(activations: Sequence[Tensor]) -> list[Tensor]:
    """Return `activations`. Their gradients run only after all lookups, so a step whose ids fail updates no table.

    In a graph, one table could be updated while the lookup in another one fails. Eager lookups are finished before.
    XLA, TPUs and GPUs do not fail on ids.
    """
    unchecked = tpu_call() is not None or unchecked_gathers()
    if len(activations) < 2 or tf.executing_eagerly() or unchecked:
        return list(activations)

    @tf.custom_gradient
    def gate(*given: Tensor) -> tuple[list[Tensor], Any]:
        def backward(*gradients: Tensor) -> list[Tensor]:
            # Grappler keeps an assertion. It would remove a lookup that only a control edge depends on.
            found = tf.raw_ops.Assert(condition=tf.constant(True), data=given)
            with tf.control_dependencies([found]):
                return [tf.identity(gradient) for gradient in gradients]

        return [tf.identity(activation) for activation in given], backward

    gated: list[Tensor] = gate(*activations)
    return gated


def _check_accumulation(optimizer: Any) -> None:
    """Raise TrainingError if the model's `optimizer` accumulates the gradients of several batches. Each batch updates
    the tables."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)  # a LossScaleOptimizer has no such option itself
    if getattr(inner, "gradient_accumulation_steps", None):
        raise TrainingError(
            "TPUEmbedding: gradient_accumulation_steps is not supported. The tables would be updated at every micro-batch. "
            "Use a larger batch, or, without an accelerator, optimizer=None to let the model's optimizer train the tables."
        )


def _is_user_trained(backend: _Backend, feature: FeatureInput) -> bool:
    state = backend.states.get(feature.table)
    return state is not None and state.optimizer is None


def _apply(step: TrainingStep, gradients: Sequence[Tensor], updates: Any) -> list[Any]:
    """Apply the gradients, then add one to `updates`. Learning rates are read before the count changes."""
    ops = step.apply(gradients)
    with tf.control_dependencies([] if tf.executing_eagerly() else ops):
        return [*ops, local(updates).assign_add(1, read_value=False)]
