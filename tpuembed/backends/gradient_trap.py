"""The gradient trap: a layer receives the gradients of its activations and applies its own optimizer to them.

The activations are made a function of one dummy weight. The dummy is trainable, so every optimizer computes its
gradient. That computation passes the activations' gradients to the layer, which updates its tables and returns zeros.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tpuembed.backends.tf_config import (
    custom_gradient,
    in_save_context,
    in_xla_context,
    is_op_determinism_enabled,
    local,
)
from tpuembed.backends.tpu.tf_tpu import differentiates_control_flow, tpu_call
from tpuembed.errors import TrainingError

__all__ = ["IN_BRANCH", "SAVED", "TakenGradients", "gradient_trap", "with_shapes"]

Tensor = Any

_TWICE = (
    "TPUEmbedding: a second gradient was taken through one call of the layer (a persistent tape?). It would update the tables "
    "twice. Compute all gradients in one tape.gradient(loss, [a, b]) call."
)
IN_BRANCH = (
    "TPUEmbedding: the layer is called inside tf.cond, tf.switch_case or a loop, and the gradient is taken outside it. TensorFlow "
    "cannot trace that. Take the gradient inside too, or call the layer before, with all ids, and choose activations."
)
SAVED = (
    "TPUEmbedding: a SavedModel cannot train its tables. It has neither their live learning rates nor their strategy. Build the "
    "layer, restore a checkpoint, and train that."
)
_SHAPE = (
    "TPUEmbedding: the gradient of feature {feature!r} has shape {given}, and its activations have shape {own}. Correct the custom "
    "gradient, or the py_function, between the layer and the loss."
)
_SHAPE_FOUND = (
    "TPUEmbedding: the gradient of a feature has a different shape than its activations. Correct the custom gradient, or the "
    "py_function, between the layer and the loss. The feature, the shape of its gradient, the shape of its activations:"
)
_REMEMBERED = 64
_STEP = 256
"""What RngReadAndSkip adds for a delta of 1."""


class TakenGradients:
    """The calls whose gradient was already taken, where call and gradient are traced apart and only the running step
    knows.

    Each such call draws a random number. Its gradient writes that number to the next place of a ring, and then reads the
    ring. It fails if the number is there twice. TensorFlow does not order two gradients of one graph that it inlines. In
    any order, the one that writes last finds both. A lock would do too, but two of them in one graph can wait for each
    other for ever: TensorFlow orders some of the ops that they hold, and not the locks.
    """

    def __init__(self) -> None:
        """Start with no numbers taken."""
        with tf.init_scope():
            self._ring = tf.Variable(tf.zeros([_REMEMBERED], tf.int64), trainable=False, name="gradients_taken")
            self._next = tf.Variable(tf.zeros([3], tf.int64), trainable=False, name="next_gradient")

    def draw(self) -> Tensor | None:
        """Return an int64 scalar that differs at every run of the graph. Returns None if call and gradient are traced together."""
        if tf.executing_eagerly() or in_xla_context() or tpu_call() is not None or is_op_determinism_enabled():
            return None
        return tf.raw_ops.RandomUniformInt(
            shape=tf.constant([], tf.int32), minval=tf.constant(1, tf.int64), maxval=tf.constant(tf.int64.max, tf.int64)
        )

    def take(self, number: Tensor) -> Any:
        """Return an op that fails if the gradient of the call with this `number` was taken before."""
        ring, place = local(self._ring), local(self._next)
        # The one op that reads and increments a variable at once on every device. Its state is a counter and a key.
        counted = tf.raw_ops.RngReadAndSkip(resource=place.handle, alg=tf.constant(1), delta=tf.constant(1, tf.uint64))
        written = tf.raw_ops.ResourceScatterNdUpdate(
            ref=ring.handle, indices=counted[:1, None] // _STEP % _REMEMBERED, updates=number[None], use_locking=True
        )
        with tf.control_dependencies([written]):
            found = tf.math.count_nonzero(tf.equal(ring.read_value(), number))
        return tf.debugging.Assert(tf.equal(found, 1), [_TWICE])


def gradient_trap(
    dummy: Tensor,
    features: Sequence[str],
    lookup: Callable[[], Sequence[Tensor]],
    apply_gradients: Callable[[Sequence[Tensor]], Sequence[Any]],
    taken: TakenGradients,
) -> Sequence[Tensor]:
    """Return `lookup()`. Taking a gradient through it runs `apply_gradients(gradients)` once.

    Args:
        dummy: the weight that the activations are made to depend on.
        features: the name of each activation, for messages.
        lookup: returns the activations.
        apply_gradients: takes one gradient per activation, of its shape. Returns the update ops.
        taken: the calls of the layer whose gradient was taken.

    Raises:
        TrainingError: on a second gradient through one call, which would apply the update twice. If only the running
            step knows, an InvalidArgumentError with the same text. Also on the gradient of a branch or loop that
            contains the call, and on a gradient with a different shape than its activation.
    """
    here, number = _graph(), taken.draw()
    activations: list[Tensor] = []
    graphs: list[Any] = []

    def backward(*gradients: Tensor) -> Tensor:
        # A traced call may be differentiated in several graphs. Each of them runs for its own call.
        graph = _graph()
        if in_save_context():  # saving traces the functions of the gradients too
            return _zeros_after([tf.debugging.Assert(tf.constant(False), [SAVED])], dummy)
        if graph is not None and differentiates_control_flow():
            raise TrainingError(IN_BRANCH)
        if any(graph is earlier for earlier in graphs):
            raise TrainingError(_TWICE)
        graphs.append(graph)
        checks = [] if number is None or graph is here else [taken.take(number)]
        with tf.control_dependencies([] if tf.executing_eagerly() else list(checks)):
            updates = apply_gradients(with_shapes(gradients, activations, features))
        if graph is None:
            return tf.zeros_like(dummy)
        zeros = _zeros_after([*checks, *updates], dummy)
        # XLA does not compile what Keras' optimizers do with sparse gradients.
        if tpu_call() is not None or in_xla_context():
            return zeros
        # Keras' optimizers add up the gradients of replicas. If all are dense, TensorFlow registers a gradient of that sum, which
        # keeps the graph and its variables until the process ends. See `custom_gradient`.
        return tf.IndexedSlices(zeros, tf.zeros([1], tf.int64), tf.ones([1], tf.int64))

    @custom_gradient
    def trap(_: Tensor) -> tuple[Sequence[Tensor], Callable[..., Tensor]]:
        activations.extend(lookup())
        return list(activations), backward

    return trap(dummy)


def with_shapes(gradients: Sequence[Tensor], activations: Sequence[Tensor], features: Sequence[str]) -> list[Tensor]:
    """Return `gradients` with the static shapes of `activations`, after a check of all sizes.

    TensorFlow does not know each gradient's shape while it traces a batch of unknown size: a concat of more than 16 tensors has
    gradients of unknown width, a py_function has gradients of unknown rank.
    """
    given = [tf.convert_to_tensor(gradient) for gradient in gradients]
    unknown: list[int] = []
    for index, (feature, gradient, activation) in enumerate(zip(features, given, activations, strict=True)):
        if not gradient.shape.is_compatible_with(activation.shape):
            raise TrainingError(_SHAPE.format(feature=feature, given=gradient.shape, own=activation.shape))
        if not gradient.shape.is_fully_defined() or not activation.shape.is_fully_defined():
            unknown.append(index)
    if in_xla_context():  # it drops assertions, does not compile an AddN of two shapes, and removes one of zeros
        for index in unknown:
            own = activations[index]
            given[index] = tf.add_n([tf.ensure_shape(given[index], own.shape), tf.zeros_like(own)])
        unknown = []
    checks = []
    if unknown:
        checks.append(_check_sizes(*([parts[index] for index in unknown] for parts in (given, activations, features))))
    with tf.control_dependencies(checks):
        shaped = [
            _known_shape(gradient, own) if index in unknown else tf.ensure_shape(gradient, own.shape)
            for index, (gradient, own) in enumerate(zip(given, activations, strict=True))
        ]
    if tf.executing_eagerly():
        return shaped
    with tf.control_dependencies([*checks, *shaped]):  # so that no table changes if one gradient is wrong
        return [tf.identity(gradient) for gradient in shaped]


def _known_shape(gradient: Tensor, activation: Tensor) -> Tensor:
    """Return `gradient`, whose sizes were checked, with the static shape of `activation`.

    The placeholder hides the sizes of `gradient` from Grappler. What follows looks as if they were equal to those of the
    activation, and Grappler would conclude that the check is always true.
    """
    hidden = tf.raw_ops.PlaceholderWithDefault(input=gradient, shape=tf.TensorShape(None))
    return tf.ensure_shape(hidden, activation.shape)


def _check_sizes(gradients: Sequence[Tensor], activations: Sequence[Tensor], features: Sequence[str]) -> Any:
    """Return one op for all features, because an op for each would take time in every step.

    It compares the rank and then the sizes. The sizes are cut to the rank of the activation.
    """
    ranks = [activation.shape.rank for activation in activations]
    given, own = (
        tf.concat([part for one, rank in zip(tensors, ranks, strict=True) for part in _sizes(one, rank)], 0)
        for tensors in (gradients, activations)
    )
    ends = list(itertools.accumulate(rank + 1 for rank in ranks))
    differs = tf.not_equal(given, own)
    feature = tf.searchsorted(ends, [tf.argmax(tf.cast(differs, tf.int32), output_type=tf.int32)], side="right")[0]
    place = slice(tf.gather(ends, feature) - tf.gather(ranks, feature), tf.gather(ends, feature))
    text = [_SHAPE_FOUND, tf.gather(list(features), feature), given[place], own[place]]
    return tf.debugging.Assert(tf.logical_not(tf.reduce_any(differs)), text, summarize=10)


def _sizes(tensor: Tensor, rank: int) -> list[Tensor]:
    """Return the rank [1] and `rank` sizes of `tensor`, int32, with zeros for those that it lacks."""
    if tensor.shape.rank == rank:
        return [[rank], tf.shape(tensor)]
    return [tf.rank(tensor)[None], tf.concat([tf.shape(tensor), [0] * rank], 0)[:rank]]


def _zeros_after(updates: Sequence[Any], dummy: Tensor) -> Tensor:
    """Return zeros that depend on `updates`. In a nested tf.function, TensorFlow prunes ops that no gradient depends
    on.

    The zeros are a placeholder, because Grappler folds a constant into the user's optimizer (Adam's, for one). A folded
    constant loses its dependencies, and with them the updates.
    """
    with tf.control_dependencies(list(updates)):
        return tf.raw_ops.PlaceholderWithDefault(input=tf.zeros_like(dummy), shape=dummy.shape)


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
