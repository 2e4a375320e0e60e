"""One training step of any backend: the gradient trap around its activations, and the count of updates."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tpuembed.backends.backend import Backend, TrainingStep
from tpuembed.backends.gradient_trap import TakenGradients, gradient_trap
from tpuembed.backends.layer_call import LayerCall
from tpuembed.backends.row_gradients import RowGradients
from tpuembed.backends.tf_config import custom_gradient, local, unchecked_gathers
from tpuembed.backends.tpu.tf_tpu import tpu_call
from tpuembed.errors import TrainingError
from tpuembed.lookup import Ids

__all__ = ["interleave", "train", "wait_for_lookups"]

Tensor = Any


def train(
    backend: Backend,
    features: Sequence[Ids],
    call: LayerCall,
    rule: RowGradients | TakenGradients | None,
    updates: Any,
) -> list[Tensor]:
    """Return the activations of `features` in a `call` that trains.

    With RowGradients, the tables move in the trainer's optimizer step. With TakenGradients, the gradient of the call's dummy
    updates them once and adds one to `updates`. A table without an optimizer is trained by the user's optimizer.

    Raises:
        TrainingError: tables cannot be trained in the loop that the call is part of.
    """
    is_free = [backend.states[feature.table].optimizer is None for feature in features]
    free = [feature for feature, by_user in zip(features, is_free, strict=True) if by_user]
    trapped = [feature for feature, by_user in zip(features, is_free, strict=True) if not by_user]
    caught: Sequence[Tensor] = []
    if trapped:
        assert rule is not None, "a layer that trains a table has a rule"
        step = backend.begin(trapped, call)
        paths, dummy = [feature.path for feature in trapped], tf.convert_to_tensor(call.dummy.value)
        if isinstance(rule, RowGradients):
            caught = rule.lookup(step, dummy, paths, call.optimizer)
        else:
            _check_accumulation(call.optimizer)
            caught = gradient_trap(dummy, paths, step.lookup, lambda given: _apply(step, given, updates), rule)
    activations = interleave(is_free, backend.lookup(free) if free else [], caught)
    return wait_for_lookups(activations) if trapped else activations


def interleave(which: Sequence[bool], first: Sequence[Tensor], second: Sequence[Tensor]) -> list[Tensor]:
    """Return the next element of `first` for each True, and of `second` for each False."""
    parts = {True: iter(first), False: iter(second)}
    return [next(parts[is_first]) for is_first in which]


def wait_for_lookups(activations: Sequence[Tensor]) -> list[Tensor]:
    """Return `activations`. Their gradients run only after all lookups, so a step whose ids fail updates no table.

    In a graph, one table could be updated while the lookup in another one fails. Eager lookups are finished before.
    XLA, TPUs and GPUs do not fail on ids.
    """
    unchecked = tpu_call() is not None or unchecked_gathers()
    if len(activations) < 2 or tf.executing_eagerly() or unchecked:
        return list(activations)

    @custom_gradient
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


def _apply(step: TrainingStep, gradients: Sequence[Tensor], updates: Any) -> list[Any]:
    """Apply the gradients, then add one to `updates`. Learning rates are read before the count changes."""
    ops = step.apply(gradients)
    with tf.control_dependencies([] if tf.executing_eagerly() else ops):
        return [*ops, local(updates).assign_add(1, read_value=False)]
