"""The signature `packed`: all inputs in one int64 matrix, because each input of a request costs as much as a small
lookup.

The first columns are inputs with a fixed number of columns. Then come lists of `hot` columns each, padded with -1; they
share the remaining width equally. `tpuembed.manifest.Packing` records the columns.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import tensorflow as tf

from tpuembed.manifest import PackedInput, Packing

__all__ = ["checked_cast", "matrix_spec", "pack_inputs", "split_matrix", "unpack"]

Tensor = Any


def pack_inputs(specs: Mapping[str, tf.TensorSpec], padded: Collection[str]) -> Packing:
    """Return how the inputs of a model are packed. `padded` names the lists, which are padded with -1."""
    inputs = []
    for name, spec in specs.items():
        if name not in padded and not (spec.dtype.is_integer and spec.shape.rank in (1, 2) and _columns(spec)):
            return Packing(
                left_out=f"input {name!r}, {spec.dtype.name} {spec.shape}, is not a fixed number of integers"
            )
        inputs.append(PackedInput(name=name, columns=None if name in padded else _columns(spec)))
    return Packing(inputs=tuple(sorted(inputs, key=lambda packed: packed.columns is None)))


def _columns(spec: tf.TensorSpec) -> int | None:
    return 1 if spec.shape.rank == 1 else spec.shape[1]


def matrix_spec(packing: Packing) -> tf.TensorSpec:
    """Return the spec int64 [batch, columns]. The width is known if there are no lists."""
    widths = [packed.columns for packed in packing.inputs]
    width = None if None in widths else sum(width or 0 for width in widths)
    return tf.TensorSpec([None, width], tf.int64, name="ids")


def split_matrix(ids: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    """Split a matrix [batch, S + P * hot] into its fixed columns, int64 [batch, S], and P lists, [batch, P, hot]."""
    fixed = sum(packed.columns or 0 for packed in packing.inputs)
    lists = sum(packed.columns is None for packed in packing.inputs)
    if not lists:
        return ids, None
    first, rest = (ids[:, :fixed], ids[:, fixed:]) if fixed else (ids[:, :0], ids)
    batch, width = tf.unstack(tf.shape(rest))
    # The batch size is given, so that a width that the lists cannot share equally fails.
    return first, tf.reshape(rest, tf.stack([batch, lists, width // lists]))


def unpack(ids: Tensor, packing: Packing, specs: Mapping[str, tf.TensorSpec]) -> dict[str, Tensor]:
    """Return the inputs by name, as `specs` have them."""
    return {name: _as_spec(value, specs[name]) for name, value in _parts(ids, packing)}


def _parts(ids: Tensor, packing: Packing) -> Iterator[tuple[str, Tensor]]:
    fixed, lists = split_matrix(ids, packing)
    start = number = 0
    for packed in packing.inputs:
        if packed.columns is None:
            yield packed.name, lists[:, number]
            number += 1
        else:
            yield packed.name, fixed[:, start : start + packed.columns]
            start += packed.columns


def _as_spec(columns: Tensor, spec: tf.TensorSpec) -> Tensor:
    value = columns[:, 0] if spec.shape.rank == 1 else columns
    if spec.dtype == tf.int64:
        return value
    return checked_cast(value, spec.dtype, spec.name)


def checked_cast(value: Tensor, dtype: tf.DType, name: str) -> Tensor:
    """Cast int64 values of the input `name` to `dtype`. A value that does not fit fails the request."""
    cast = tf.cast(value, dtype)
    message = f"Input {name} must be {dtype.name}, got values from"
    fits = tf.reduce_all(tf.cast(cast, tf.int64) == value)
    check = tf.raw_ops.Assert(condition=fits, data=[message, tf.reduce_min(value), "to", tf.reduce_max(value)])
    with tf.control_dependencies([check]):
        return tf.identity(cast)
