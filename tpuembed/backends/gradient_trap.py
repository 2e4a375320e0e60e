"""The gradient trap: how a layer learns the gradients of its activations and applies its own optimizer to them.

The activations are made a function of one dummy weight. Whoever asks for the dummy's gradient (every optimizer does: it is
trainable) hands the activations' gradients to the layer, which updates its tables and answers zero.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tpuembed.errors import TrainingError

__all__ = ["gradient_trap"]

Tensor = Any


def gradient_trap(
    dummy: Tensor,
    lookup: Callable[[], Sequence[Tensor]],
    apply_gradients: Callable[[Sequence[Tensor]], Sequence[Any]],
) -> Sequence[Tensor]:
    """`lookup()`, such that taking a gradient through it runs `apply_gradients(gradients)` once.

    Args:
        dummy: the weight that the activations are made to depend on.
        lookup: gives the activations.
        apply_gradients: gets one gradient per activation, of its shape; gives the update ops.

    Raises:
        TrainingError: on a second gradient through one call, which would apply the update twice.
    """
    taken: list[Any] = []

    def backward(*gradients: Tensor) -> Tensor:
        # A traced call may be differentiated in several graphs, each of which runs for a call of its own.
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        if any(graph is earlier for earlier in taken):
            raise TrainingError(
                "TPUEmbedding: a second gradient was taken through one call of the layer (a persistent tape?), which would "
                "update the tables twice; ask for all gradients in one tape.gradient(loss, [a, b]) call"
            )
        taken.append(graph)
        updates = apply_gradients([tf.convert_to_tensor(gradient) for gradient in gradients])
        return tf.zeros_like(dummy) if graph is None else _zeros_after(updates, dummy)

    @tf.custom_gradient
    def trap(_: Tensor) -> tuple[Sequence[Tensor], Callable[..., Tensor]]:
        return lookup(), backward

    return trap(dummy)


def _zeros_after(updates: Sequence[Any], dummy: Tensor) -> Tensor:
    """Zeros that depend on `updates`: in a nested tf.function an op that no gradient depends on is pruned.

    A placeholder, which no optimizer of graphs replaces by the constant that it is: folded into the user's optimizer, as
    Adam's, a constant zero loses its dependencies, and with them the updates.
    """
    with tf.control_dependencies(list(updates)):
        return tf.raw_ops.PlaceholderWithDefault(input=tf.zeros_like(dummy), shape=dummy.shape)
