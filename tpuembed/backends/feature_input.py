"""One feature of one call, and its ids prepared for a lookup outside the accelerator."""

import dataclasses
import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tpuembed.backends.tf_tpu import densify_on_host, tpu_call
from tpuembed.config import FeatureConfig
from tpuembed.config.structure import flatten_up_to, pack_like
from tpuembed.errors import ConfigError
from tpuembed.lookup import LookupIds, flatten_ids, merged_shape

__all__ = ["FeatureInput", "as_tensors"]

_EXACT_INTEGERS = {tf.float16: 2**11, tf.bfloat16: 2**8, tf.float32: 2**24, tf.float64: 2**53}


def as_tensors(structure: Any, features: Any, what: str) -> Any:
    """Return `features` with Python numbers, and lists of them, converted to tensors. Keras layers do not take them as
    they are.

    Raises:
        ConfigError: `features` has another structure than `structure`, or lists differ in length. The message calls
            them `what`.
    """
    leaves = [(path, leaf) for path, _, leaf in flatten_up_to(structure, features, what)]
    if not any(_is_python(leaf) for _, leaf in leaves):
        return features
    return pack_like(structure, [_as_tensor(path, leaf) if _is_python(leaf) else leaf for path, leaf in leaves])


def _is_python(leaf: Any) -> bool:
    """Return True if `leaf` is a Python number, or lists of numbers."""
    if isinstance(leaf, list | tuple):
        return all(_is_python(item) or isinstance(item, np.number) for item in leaf)
    return isinstance(leaf, int | float) and not isinstance(leaf, bool)


def _as_tensor(path: str, leaf: Any) -> Any:
    try:
        values = np.asarray(leaf)
    except ValueError:
        raise ConfigError(
            f"feature {path!r}: lists of different lengths. Pass tf.ragged.constant(ids, dtype=tf.int64)."
        ) from None
    return tf.constant(values.astype(np.int64) if values.dtype.kind == "i" or not values.size else values)


@dataclasses.dataclass(frozen=True)
class FeatureInput:
    """A leaf of the layer's call.

    Attributes:
        path: the path of the feature in the structure, for messages.
        config: its FeatureConfig.
        ids: a Tensor, SparseTensor or RaggedTensor.
        weights: of the same kind, or None.
        input_shape: the ids' shape that `build` was given, or None.
    """

    path: str
    config: FeatureConfig
    ids: Any
    weights: Any = None
    input_shape: tuple[int | None, ...] | None = None

    @property
    def table(self) -> str:
        """Return the name of its table."""
        return self.config.table.name

    def flatten(self) -> LookupIds:
        """Return the ids as the CPU lookup takes them.

        Raises:
            ConfigError: the ids or weights cannot be looked up. The message names the feature.
        """
        policy = self.config.out_of_vocabulary
        assert policy is not None, "a FeatureConfig takes its table's"
        return flatten_ids(
            _integer_ids(self.path, self.config, self.ids),
            self.weights,
            path=self.path,
            label=self.path or self.config.name or self.table,
            combiner=self.config.table.combiner,
            max_sequence_length=self.config.max_sequence_length,
            output_shape=self.config.output_shape,
            input_shape=self.input_shape,
            validate=self.config.validate_weights_and_indices,
            policy=policy,
            densify=None if tpu_call() is None else densify_on_host,
        )

    def output_shape(self) -> tuple[int | None, ...]:
        """Return the known part of the activations' shape before a lookup: output_shape's, then build()'s, then the
        ids'.

        Raises:
            ConfigError: they contradict each other.
        """
        shape, config = tuple(_tensor_ids(self.path, self.ids).shape), self.config
        if self.input_shape is not None:
            what = f"feature {self.path!r}: build()'s input_shape {self.input_shape}"
            shape = merged_shape(shape, self.input_shape, what)
        ragged = isinstance(self.ids, tf.RaggedTensor) or getattr(self.ids, "ragged", False)
        if ragged or isinstance(self.ids, tf.SparseTensor) or getattr(self.ids, "sparse", False):
            shape = (shape[0], config.max_sequence_length) if config.max_sequence_length else shape[:-1]
        if config.output_shape is None:
            return (*shape, config.table.dim)
        if ragged and _may_be_laid_out(shape, config.output_shape):
            return (*config.output_shape, config.table.dim)
        what = f"feature {self.path!r}: output_shape {config.output_shape}"
        return (*merged_shape(shape, config.output_shape, what), config.table.dim)


def _may_be_laid_out(shape: tuple[int | None, ...], output_shape: tuple[int | None, ...]) -> bool:
    """Return True if ragged activations of `shape` may fill `output_shape`, as combined rows or as sequences. The
    lookup decides."""
    if None in shape or None in output_shape:
        return len(output_shape) > len(shape)
    rows, room = (math.prod(size for size in sizes if size is not None) for sizes in (shape, output_shape))
    return room == rows or (len(shape) == 1 and rows > 0 and room % rows == 0)


def _tensor_ids(path: str, ids: Any) -> Any:
    """Return `ids` as a tensor of known rank. Composite and symbolic tensors are returned as they are."""
    if ids is None:
        raise ConfigError(f"feature {path!r}: no ids were given. Pass a tensor for every feature.")
    if not isinstance(ids, tf.SparseTensor | tf.RaggedTensor | keras.KerasTensor):
        ids = tf.convert_to_tensor(ids)
    if not isinstance(ids, keras.KerasTensor) and ids.shape.rank is None:
        raise ConfigError(f"feature {path!r}: the rank of its ids is unknown. Set their shape (tf.ensure_shape).")
    return ids


def _integer_ids(path: str, config: FeatureConfig, ids: Any) -> Any:
    """Return `ids` as int64, of the same kind of tensor.

    Keras traces some models with float inputs. So a float type is accepted if it can hold every id of the table. Float
    ids that are not row numbers fail when they are looked up.
    """
    ids = _tensor_ids(path, ids)
    dtype, shape = ids.dtype, ids.shape
    if not (dtype.is_integer or dtype.is_floating):
        raise ConfigError(f"feature {path!r}: ids must be integers, got {dtype.name}.")
    if dtype.is_floating and config.table.vocabulary_size > _EXACT_INTEGERS.get(dtype, 0):
        raise ConfigError(
            f"feature {path!r}: {dtype.name} cannot hold every id of table {config.table.name!r} "
            f"({config.table.vocabulary_size} rows). Pass integer ids."
        )
    if dtype == tf.uint64:
        ids = _map_values(lambda values: tf.minimum(values, tf.int64.max), ids)  # otherwise the highest become negative
    if dtype.is_floating:
        ids = _map_values(lambda values: _whole(path, values), ids)
    cast = tf.cast(ids, tf.int64)
    if isinstance(ids, tf.SparseTensor):
        cast.set_shape(shape)  # a cast drops it
    return cast


def _whole(path: str, values: Any) -> Any:
    """Return float `values` as int64. The step fails if one is NaN, infinite, negative or fractional.

    XLA drops the check. There, such an id counts as outside the table.
    """
    wide = tf.cast(values, tf.float64)
    whole = (wide >= 0) & (wide < 2.0**63) & tf.equal(wide, tf.floor(wide))
    message = (
        f"feature {path}: float ids must be whole numbers from 0; got one that is negative, fractional or not finite"
    )
    check = tf.debugging.Assert(tf.reduce_all(whole), [message])
    with tf.control_dependencies([] if check is None else [check]):
        return tf.where(whole, tf.cast(values, tf.int64), tf.int64.max)


def _map_values(function: Any, ids: Any) -> Any:
    if isinstance(ids, tf.SparseTensor):
        return tf.SparseTensor(ids.indices, function(ids.values), ids.dense_shape)
    return tf.ragged.map_flat_values(function, ids)
