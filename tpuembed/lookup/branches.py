"""Branches of a graph that cost nothing in a request that does not take them.

TensorFlow lowers `tf.cond` to operations that are scheduled, dead, with every request. A call of a function that is not
inlined (`not_inlined`) is one such operation. The operation `If` runs a function as its own small graph, which is
cheaper than a call if it is taken.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import tensorflow as tf

__all__ = ["choose", "not_inlined"]

Tensor = Any


def not_inlined(function: Callable[..., Any], *specs: tf.TensorSpec) -> Any:
    """Return `function` as one node of the graphs that call it, for a branch that no request is expected to take."""
    return tf.function(
        function, input_signature=specs, autograph=False, experimental_attributes={"_noinline": True}
    ).get_concrete_function()


def choose(
    condition: Tensor, then: Callable[..., Any], otherwise: Callable[..., Any], *arguments: Tensor, shared: bool = False
) -> list[Tensor]:
    """Return the outputs of `then` or `otherwise` for `arguments`. Both must refer to the same variables.

    Args:
        condition: scalar bool.
        then, otherwise: each returns a tensor, or a list of as many tensors of the same dtypes.
        shared: True if the branches use their arguments alone. They are then traced once in a process, for arguments with any
            first dimension, because tracing takes a good part of an export's time.
    """
    shapes = [argument.shape for argument in arguments]
    if shared:
        shapes = [[None, *shape[1:]][: shape.rank] for shape in shapes]
    specs = [tf.TensorSpec(shape, argument.dtype) for shape, argument in zip(shapes, arguments, strict=True)]
    trace = _traced_once if shared else _traced
    branches = [trace(branch, *specs) for branch in (then, otherwise)]
    captured = [branch.captured_inputs for branch in branches]
    if [id(tensor) for tensor in captured[0]] != [id(tensor) for tensor in captured[1]]:
        raise ValueError("the branches refer to different variables")
    outputs = [tf.nest.flatten(branch.structured_outputs) for branch in branches]
    found = tf.raw_ops.If(
        cond=condition,
        input=[*arguments, *captured[0]],
        Tout=[output.dtype for output in outputs[0]],
        then_branch=branches[0],
        else_branch=branches[1],
    )
    for tensor, one, other in zip(found, *outputs, strict=True):
        if one.shape.rank is not None and one.shape.rank == other.shape.rank:
            pairs = zip(one.shape, other.shape, strict=True)
            tensor.set_shape([size if size == second else None for size, second in pairs])
    return list(found)


@lru_cache(maxsize=256)
def _traced_once(branch: Callable[..., Any], *specs: tf.TensorSpec) -> Any:
    with tf.init_scope():  # it outlives the graph that its first caller traces
        return _traced(branch, *specs)


def _traced(branch: Callable[..., Any], *specs: tf.TensorSpec) -> Any:
    return tf.function(branch, input_signature=specs, autograph=False).get_concrete_function()
