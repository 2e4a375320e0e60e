"""One feature of one call, as the caller gave it, and its ids made ready for a lookup off the accelerator."""

import dataclasses
import math
from typing import Any

import keras
import tensorflow as tf

from tpuembed.backends.tf_tpu import densify_on_host, tpu_call
from tpuembed.config import FeatureConfig
from tpuembed.errors import ConfigError
from tpuembed.lookup import LookupIds, flatten_ids, merged_shape

__all__ = ["FeatureInput"]

_EXACT_INTEGERS = {tf.float16: 2**11, tf.bfloat16: 2**8, tf.float32: 2**24, tf.float64: 2**53}


@dataclasses.dataclass(frozen=True)
class FeatureInput:
    """A leaf of the layer's call.

    Attributes:
        path: where the feature stands in the structure, for messages.
        config: its FeatureConfig.
        ids: a Tensor, SparseTensor or RaggedTensor.
        weights: of the same kind, or None.
        input_shape: what `build` was told of the ids' shape, or None.
    """

    path: str
    config: FeatureConfig
    ids: Any
    weights: Any = None
    input_shape: tuple[int | None, ...] | None = None

    @property
    def table(self) -> str:
        """The name of its table."""
        return self.config.table.name

    def flatten(self) -> LookupIds:
        """The ids as the CPU lookup takes them.

        Raises:
            ConfigError: ids or weights that cannot be looked up, by the feature's name.
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
        """What is known of the activations' shape before a lookup: output_shape's, then build()'s, then the ids'.

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
    """Whether ragged activations of `shape` may fill `output_shape`, as combined rows or as sequences; the lookup decides."""
    if None in shape or None in output_shape:
        return len(output_shape) > len(shape)
    rows, room = (math.prod(size for size in sizes if size is not None) for sizes in (shape, output_shape))
    return room == rows or (len(shape) == 1 and rows > 0 and room % rows == 0)


def _tensor_ids(path: str, ids: Any) -> Any:
    """`ids` as a tensor of known rank, or as they are where they are one of any kind, or symbolic."""
    if ids is None:
        raise ConfigError(f"feature {path!r}: no ids were given; pass a tensor for every feature")
    if not isinstance(ids, tf.SparseTensor | tf.RaggedTensor | keras.KerasTensor):
        ids = tf.convert_to_tensor(ids)
    if not isinstance(ids, keras.KerasTensor) and ids.shape.rank is None:
        raise ConfigError(f"feature {path!r}: the rank of its ids is unknown; set their shape (tf.ensure_shape)")
    return ids


def _integer_ids(path: str, config: FeatureConfig, ids: Any) -> Any:
    """`ids` as int64 of their own kind; a float type that cannot hold every id of the table is refused."""
    ids = _tensor_ids(path, ids)
    dtype = ids.dtype
    if not (dtype.is_integer or dtype.is_floating):
        raise ConfigError(f"feature {path!r}: ids must be integers, got {dtype.name}")
    if dtype.is_floating and config.table.vocabulary_size > _EXACT_INTEGERS.get(dtype, 0):
        raise ConfigError(
            f"feature {path!r}: {dtype.name} cannot hold every id of table {config.table.name!r} "
            f"({config.table.vocabulary_size} rows); pass integer ids"
        )
    if dtype == tf.uint64:
        ids = _map_values(lambda values: tf.minimum(values, tf.int64.max), ids)  # else the highest turn negative
    cast = tf.cast(ids, tf.int64)
    if isinstance(ids, tf.SparseTensor):
        cast.set_shape(ids.shape)  # which a cast forgets
    return cast


def _map_values(function: Any, ids: Any) -> Any:
    if isinstance(ids, tf.SparseTensor):
        return tf.SparseTensor(ids.indices, function(ids.values), ids.dense_shape)
    return tf.ragged.map_flat_values(function, ids)
