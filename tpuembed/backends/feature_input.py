"""One feature of one call, as the caller gave it, and its ids made ready for a lookup off the accelerator."""

import dataclasses
from typing import Any

import tensorflow as tf

from tpuembed.config import FeatureConfig
from tpuembed.errors import ConfigError
from tpuembed.lookup import LookupIds, flatten_ids

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
    """

    path: str
    config: FeatureConfig
    ids: Any
    weights: Any

    @property
    def table(self) -> str:
        """The name of its table."""
        return self.config.table.name

    def flatten(self) -> LookupIds:
        """The ids as the CPU lookup takes them.

        Raises:
            ConfigError: ids or weights that cannot be looked up, by the feature's name.
        """
        return flatten_ids(
            _integer_ids(self.path, self.config, self.ids),
            self.weights,
            path=self.path,
            combiner=self.config.table.combiner,
            max_sequence_length=self.config.max_sequence_length,
            output_shape=self.config.output_shape,
            validate=self.config.validate_weights_and_indices,
        )


def _integer_ids(path: str, config: FeatureConfig, ids: Any) -> Any:
    """`ids` as int64 of their own kind; a float type that cannot hold every id of the table is refused."""
    if ids is None:
        raise ConfigError(f"feature {path!r}: no ids were given; pass a tensor for every feature")
    if not isinstance(ids, tf.SparseTensor | tf.RaggedTensor):
        ids = tf.convert_to_tensor(ids)
    if ids.shape.rank is None:
        raise ConfigError(f"feature {path!r}: the rank of its ids is unknown; set their shape (tf.ensure_shape)")
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
    return tf.cast(ids, tf.int64)


def _map_values(function: Any, ids: Any) -> Any:
    if isinstance(ids, tf.SparseTensor):
        return tf.SparseTensor(ids.indices, function(ids.values), ids.dense_shape)
    return tf.ragged.map_flat_values(function, ids)
