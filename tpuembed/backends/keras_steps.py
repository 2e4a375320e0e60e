"""What the layer reads of a running Keras optimizer, through names that Keras does not document.

Keras hands the gradient of a variable whose `overwrite_with_gradient` is True to `variable.assign`, in the steps that it applies.
It does not say which optimizer it is, nor by what the loss was multiplied. The frames above `assign` do.
tests/contract/test_optimizer_step.py fails with a Keras that has other names. It runs with the oldest and with the newest one.
"""

import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tpuembed.errors import TrainingError
from tpuembed.runtime.keras_saving import frames

__all__ = ["Handover", "asking_optimizer", "fit_callbacks", "handover"]

Tensor = Any

_HANDS_OVER = "_overwrite_variables_directly_with_gradients"
_UNSCALES = frozenset({"_stateful_handle_finite_grads", "_stateless_handle_finite_grads"})
_MOST_FRAMES = 200
_UNKNOWN_SCALE = (
    "TPUEmbedding: a LossScaleOptimizer hands over gradients of the tables in a way that this version does not know, so their "
    "scale is unknown. Use a Keras that tpuembed supports (pip install 'tpuembed[tf]')."
)


class Handover(NamedTuple):
    """A step of an optimizer that hands gradients to variables.

    Attributes:
        optimizer: the Keras optimizer.
        variables: all variables of the step that have gradients, in the order that the user gave them.
        scales: what the gradients were multiplied with, float32 [] each.
    """

    optimizer: Any
    variables: Sequence[Any]
    scales: Sequence[Tensor]


def handover() -> Handover | None:
    """Return the step that hands a gradient to the `assign` that calls this function, or None if something else assigns.

    Raises:
        TrainingError: the loss is scaled, and by how much cannot be found.
    """
    around = _frames()
    next(around)  # `assign`
    step = next(around, None)
    if step is None or step.f_code.co_name != _HANDS_OVER:
        return None
    optimizer, variables = step.f_locals["self"], list(step.f_locals["vars"])
    scales = [] if optimizer.loss_scale_factor is None else [optimizer.loss_scale_factor]
    wrappers = [
        frame for frame in around if isinstance(frame.f_locals.get("self"), keras.optimizers.LossScaleOptimizer)
    ]
    if wrappers:
        unscaling = [frame for frame in wrappers if frame.f_code.co_name in _UNSCALES]
        if not unscaling:
            raise TrainingError(_UNKNOWN_SCALE)
        scales.append(unscaling[0].f_locals["self"].dynamic_scale)
    return Handover(optimizer, variables, [tf.cast(tf.convert_to_tensor(scale), tf.float32) for scale in scales])


def asking_optimizer() -> Any:
    """Return the optimizer that asks for `overwrite_with_gradient`, or None if something else does."""
    for _, frame in zip(range(4), _frames(), strict=False):
        owner = frame.f_locals.get("self")
        if isinstance(owner, keras.optimizers.Optimizer):
            return owner
    return None


def fit_callbacks() -> Any:
    """Return the `CallbackList` of the `fit` that runs this step, or None."""
    if (found := _callbacks_in(_frames())) is not None:
        return found
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return None
    threads = list(
        sys._current_frames().values()
    )  # a replica's step runs in a thread of its own, for which `fit` waits
    return next((found for frame in threads if (found := _callbacks_in(_frames(frame))) is not None), None)


def _callbacks_in(around: Iterator[Any]) -> Any:
    for frame in around:
        callbacks = frame.f_locals.get("callbacks") if frame.f_code.co_name == "fit" else None
        if isinstance(callbacks, keras.callbacks.CallbackList):
            return callbacks
    return None


def _frames(frame: Any = None) -> Iterator[Any]:
    """Yield the innermost of `frames`."""
    return itertools.islice(frames(frame), _MOST_FRAMES)
