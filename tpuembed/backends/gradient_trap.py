"""The gradient trap: how a layer learns the gradients of its activations and applies its own optimizer to them.

The activations are made a function of one dummy weight. Whoever asks for the dummy's gradient (every optimizer does: it is
trainable) hands the activations' gradients to the layer, which updates its tables and answers zero.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tpuembed.backends.tf_config import in_save_context, in_xla_context, is_op_determinism_enabled, local
from tpuembed.backends.tf_tpu import differentiates_control_flow, tpu_call
from tpuembed.errors import TrainingError

__all__ = ["TakenGradients", "gradient_trap"]

Tensor = Any

_TWICE = (
    "TPUEmbedding: a second gradient was taken through one call of the layer (a persistent tape?), which would update the tables "
    "twice; ask for all gradients in one tape.gradient(loss, [a, b]) call"
)
_IN_BRANCH = (
    "TPUEmbedding: the layer is called inside of tf.cond, tf.switch_case or a loop, and the gradient is taken outside of it, which "
    "TensorFlow cannot trace; take the gradient inside too, or call the layer before, with all ids, and choose activations"
)
_SAVED = (
    "TPUEmbedding: a SavedModel does not train its tables: it has neither their live learning rates nor their strategy; build the "
    "layer, restore a checkpoint, and train that"
)
_REMEMBERED = 64


class TakenGradients:
    """Which calls gave a gradient, where only the running step knows: call and gradient were traced apart, each once.

    Each such call draws a number, which its gradient finds among the last ones that gradients were taken of, or puts there.
    """

    def __init__(self) -> None:
        """Nothing was taken."""
        with tf.init_scope():
            self._numbers = tf.Variable(tf.zeros([_REMEMBERED], tf.int64), trainable=False, name="gradients_taken")
            self._section = tf.CriticalSection(name="gradients_taken")

    def draw(self) -> Tensor | None:
        """int64 scalar, another one whenever the graph runs; None in loops where call and gradient are traced together."""
        if tf.executing_eagerly() or in_xla_context() or tpu_call() is not None or is_op_determinism_enabled():
            return None
        return tf.raw_ops.RandomUniformInt(
            shape=tf.constant([], tf.int32), minval=tf.constant(1, tf.int64), maxval=tf.constant(tf.int64.max, tf.int64)
        )

    def take(self, number: Tensor) -> Sequence[Any]:
        """Ops that fail where the call of that `number` gave a gradient before.

        In a critical section, because two gradients that a graph has of functions are not in an order there.
        """
        return [self._section.execute(lambda: self._take(number), exclusive_resource_access=False)]

    def _take(self, number: Tensor) -> Tensor:
        numbers = local(self._numbers)
        before = numbers.read_value()
        check = tf.debugging.Assert(tf.reduce_all(tf.not_equal(before, number)), [_TWICE])
        with tf.control_dependencies([check] if check is not None else []):
            assigned = numbers.assign(tf.concat([number[None], before[:-1]], 0), read_value=False)
        with tf.control_dependencies([assigned]):
            return tf.identity(number)


def gradient_trap(
    dummy: Tensor,
    lookup: Callable[[], Sequence[Tensor]],
    apply_gradients: Callable[[Sequence[Tensor]], Sequence[Any]],
    taken: TakenGradients,
) -> Sequence[Tensor]:
    """`lookup()`, such that taking a gradient through it runs `apply_gradients(gradients)` once.

    Args:
        dummy: the weight that the activations are made to depend on.
        lookup: gives the activations.
        apply_gradients: gets one gradient per activation, of its shape; gives the update ops.
        taken: the layer's calls that gave a gradient.

    Raises:
        TrainingError: on a second gradient through one call, which would apply the update twice. (Where only the running step
            knows, an InvalidArgumentError of the same words.) On the gradient of a branch or loop that has the call.
    """
    here, number = _graph(), taken.draw()
    graphs: list[Any] = []

    def backward(*gradients: Tensor) -> Tensor:
        # A traced call may be differentiated in several graphs, each of which runs for a call of its own.
        graph = _graph()
        if in_save_context():  # which traces the gradients' functions too
            return _zeros_after([tf.debugging.Assert(tf.constant(False), [_SAVED])], dummy)
        if graph is not None and differentiates_control_flow():
            raise TrainingError(_IN_BRANCH)
        if any(graph is earlier for earlier in graphs):
            raise TrainingError(_TWICE)
        graphs.append(graph)
        checks = [] if number is None or graph is here else taken.take(number)
        with tf.control_dependencies([] if tf.executing_eagerly() else list(checks)):
            updates = apply_gradients([tf.convert_to_tensor(gradient) for gradient in gradients])
        return tf.zeros_like(dummy) if graph is None else _zeros_after([*checks, *updates], dummy)

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


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
