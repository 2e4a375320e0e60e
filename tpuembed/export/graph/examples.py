"""The second signature: takes serialized tf.train.Example protos and returns the first signature's tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

__all__ = ["parse_examples", "unparsable"]

Tensor = Any


def parse_examples(
    examples: Tensor,
    specs: Mapping[str, tf.TensorSpec],
    weighted: Sequence[str] = (),
    padding: Mapping[str, Any] | None = None,
) -> dict[str, Tensor]:
    """Parse `examples`, string [batch], into the tensors of `specs`.

    A spec of known inner shape takes exactly that many values. One of unknown width takes any number, and is padded to
    the widest of the batch with its value in `padding`, or -1 (integers), 0.0 or "". None of `specs` may be
    `unparsable`. An example fails if its `<name>_weights` has not as many values as its `weighted` name: padding with
    0.0 would hide the missing ones.
    """
    features = {name: _feature(spec) for name, spec in specs.items()}
    parsed = tf.io.parse_example(examples, features)
    checks = [_same_lengths(name, parsed[name], parsed[f"{name}_weights"]) for name in weighted]
    with tf.control_dependencies(checks):
        return {name: _dense(parsed[name], spec, (padding or {}).get(name)) for name, spec in specs.items()}


def unparsable(specs: Mapping[str, tf.TensorSpec]) -> str | None:
    """Return a description of the first input of `specs` that an Example cannot hold, or None."""
    for name, spec in specs.items():
        unknown = spec.shape.as_list()[1:].count(None) if spec.shape.rank else 2
        if _parsed_as(spec.dtype) is None or unknown > 1 or (unknown and spec.shape.rank > 2):
            return f"{name!r} ({spec.dtype.name} {spec.shape})"
    return None


def _same_lengths(name: str, ids: Any, weights: Any) -> Any:
    counts = [
        tf.math.unsorted_segment_sum(tf.ones_like(p.indices[:, 0]), p.indices[:, 0], p.dense_shape[0])
        for p in (ids, weights)
    ]
    message = f"An example must have as many values of {name}_weights as of {name}. Number of values of {name}:"
    return tf.raw_ops.Assert(
        condition=tf.reduce_all(counts[0] == counts[1]), data=[message, counts[0], "Number of weights:", counts[1]]
    )


def _parsed_as(dtype: tf.DType) -> Any:
    """Return the type of the list that holds `dtype` in an Example: int64, float32 or string."""
    if dtype.is_floating:
        return tf.float32
    if dtype.is_integer or dtype.is_bool:
        return tf.int64
    return tf.string if dtype == tf.string else None


def _feature(spec: tf.TensorSpec) -> Any:
    inner = spec.shape.as_list()[1:]
    dtype = _parsed_as(spec.dtype)
    return tf.io.VarLenFeature(dtype) if None in inner else tf.io.FixedLenFeature(inner, dtype)


def _dense(value: Tensor, spec: tf.TensorSpec, padding: Any) -> Tensor:
    if None in spec.shape.as_list()[1:]:  # read as a VarLenFeature
        default: Any = {tf.int64: -1, tf.float32: 0.0, tf.string: ""}[value.dtype]
        padding = float(padding) if value.dtype == tf.float32 and padding is not None else padding
        value = tf.sparse.to_dense(value, default if padding is None else padding)
    return tf.cast(value, spec.dtype) if value.dtype != spec.dtype else value
