"""Decodes stored rows to float32 in a graph: the inverse of `storage`, for the rows that were gathered."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import tensorflow as tf

from tpuembed.saved_model.stored_rows import PARAMETER_BYTES

__all__ = ["decode_rows"]

Tensor = Any


def decode_rows(stored: Tensor, storage: str, dim: int) -> Tensor:
    """Return rows [n, columns] of a stack of that storage type as float32 [n, dim]."""
    return _DECODERS[storage](stored, dim)


def _cast(stored: Tensor, _: int) -> Tensor:
    return tf.cast(stored, tf.float32)


def _int8(stored: Tensor, dim: int) -> Tensor:
    """Decode int8 rows; see `tpuembed.export.storage.int8`."""
    codes, parameters = tf.split(stored, [dim, PARAMETER_BYTES], axis=1)
    scale, centre = tf.split(tf.bitcast(tf.reshape(parameters, [-1, 2, 4]), tf.float32), 2, axis=1)
    return tf.cast(codes, tf.float32) * scale + centre


_DECODERS: Final[Mapping[str, Callable[[Tensor, int], Tensor]]] = {
    **dict.fromkeys(("float32", "bfloat16", "float16"), _cast),
    "int8": _int8,
}
