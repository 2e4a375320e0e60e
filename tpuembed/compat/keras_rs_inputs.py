"""Conversion of ids and weights from keras-rs' form to that of `TPUEmbedding`.

keras-rs combines dense ids [batch, ids]. `TPUEmbedding` combines only sparse and ragged ids.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tpuembed.backends.tf_tpu import tpu_call
from tpuembed.compat.keras_rs_config import FeatureConfig
from tpuembed.errors import ConfigError
from tpuembed.lookup.ids import Ids, RaggedIds, SparseIds, kind_of

__all__ = ["prepare"]

Tensor = Any


def prepare(config: FeatureConfig, ids: Tensor, weights: Tensor, unchanged: bool = False) -> tuple[Tensor, Tensor]:
    """Return (ids, weights) of one feature for `TPUEmbedding`. Weights may be None.

    Args:
        config: the feature's config.
        ids, weights: the feature's arguments of `call`.
        unchanged: True if the hardware takes only the unchanged arguments of a step.

    Raises:
        ConfigError: the shape of ids or weights differs from the config's, or they would have to be changed. The
            message names the feature.
    """
    kind = kind_of(ids)
    ids = ids if kind.is_combined else tf.convert_to_tensor(ids)
    _check_shape(config, kind, ids)
    convert = _conversion(config, kind, ids, weights)
    if convert is None:
        return ids, weights
    if unchanged:
        raise ConfigError(
            f"feature {config.name!r}: TPUs v2 to v4 take ids as they come from the input pipeline. In the pipeline, convert dense "
            "[batch, ids] to a tf.RaggedTensor and cut longer examples. Then set input_shape (batch, None)."
        )
    if tpu_call() is None:
        return convert(config, ids, weights)
    return tf.compat.v1.tpu.outside_compilation(convert, config, ids, weights)  # embedding ids stay on the host


def _conversion(
    config: FeatureConfig, kind: type[Ids], ids: Tensor, weights: Tensor
) -> Callable[[FeatureConfig, Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """Return the function that converts ids and weights of a kind. Returns None if they stay as they are."""
    if kind is RaggedIds:
        return None if _limit(config) is None else _cut
    is_ready = kind is SparseIds or not (_lacks_an_axis(config, ids) or config.combined or weights is not None)
    return None if is_ready else _from_dense


def _cut(config: FeatureConfig, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    limit = _limit(config)
    return ids[:, :limit], None if weights is None else weights[:, :limit]


def _from_dense(config: FeatureConfig, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    if _lacks_an_axis(config, ids):
        weights = None if weights is None else _like(config, ids, weights)[:, None]
        ids = ids[:, None]
    if config.combined:
        return _as_ragged(ids), None if weights is None else _as_ragged(_like(config, ids, weights))
    if ids.shape.rank == 1 and config.table.combiner == "sum":  # other combiners return the row itself for any weight
        return _as_ragged(ids[:, None]), _as_ragged(_like(config, ids, weights)[:, None])
    return ids, None if ids.shape.rank == 1 else weights


def _as_ragged(values: Tensor) -> Tensor:
    """Return [batch, n] as ragged rows of n each. Known sizes stay known, because a TPU program needs them."""
    rows, length = (
        known if known is not None else tf.shape(values, tf.int64)[axis] for axis, known in enumerate(values.shape)
    )
    return tf.RaggedTensor.from_uniform_row_length(tf.reshape(values, [-1]), length, nrows=rows)


def _limit(config: FeatureConfig) -> int | None:
    return config.input_shape[1] if len(config.input_shape) == 2 else None


def _lacks_an_axis(config: FeatureConfig, ids: Tensor) -> bool:
    """Return True if dense ids [batch] are given for an input_shape (batch, 1)."""
    return ids.shape.rank == 1 and len(config.input_shape) == 2 and config.input_shape[1] == 1


def _check_shape(config: FeatureConfig, kind: type[Ids], ids: Tensor) -> None:
    """Raise ConfigError if `ids` do not match input_shape. The batch may differ, ids [batch] count as [batch, 1],
    sparse ids may be narrower."""
    shape, wanted = tuple(ids.shape), config.input_shape
    if _lacks_an_axis(config, ids):
        return
    sizes = () if kind is RaggedIds else tuple(zip(shape[1:], wanted[1:], strict=False))
    is_sparse = kind is SparseIds
    wrong = [pair for pair in sizes if None not in pair and (pair[0] > pair[1] if is_sparse else pair[0] != pair[1])]
    if len(shape) != len(wanted) or wrong:
        raise ConfigError(
            f"feature {config.name!r}: its ids have shape {shape}. Its input_shape is {wanted}. Make all sizes but the batch equal."
        )


def _like(config: FeatureConfig, ids: Tensor, weights: Tensor) -> Tensor:
    weights = tf.convert_to_tensor(weights)
    if not weights.shape.is_compatible_with(ids.shape):
        raise ConfigError(
            f"feature {config.name!r}: weights have shape {tuple(weights.shape)}, ids {tuple(ids.shape)}. Make them equal."
        )
    return weights
