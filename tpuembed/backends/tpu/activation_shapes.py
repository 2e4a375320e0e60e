"""The shapes of activations on an accelerator. Its program is compiled for one batch, so each shape must be known while
tracing.

The shape comes from a feature's output_shape, else from the layer's batch_size, `build` and the ids. It is the shape of
one replica's activations, without their last dimension.
"""

from collections.abc import Sequence

from tpuembed.config import FeatureConfig
from tpuembed.errors import ConfigError
from tpuembed.lookup import Ids
from tpuembed.lookup.ids import merged_shape

__all__ = ["Shape", "activation_shapes", "check_same_shapes", "configured_shape"]

Shape = tuple[int, ...]


def configured_shape(config: FeatureConfig, batch_size: int | None) -> Shape | None:
    """Return the shape that the layer's arguments give, or None if a size is unknown.

    Without an output_shape, ids count as sparse, ragged or of rank 1.
    """
    length = (config.max_sequence_length,) if config.max_sequence_length else ()
    shape = (None, *length) if config.output_shape is None else config.output_shape
    return _whole(_with_batch(shape, config, batch_size))


def activation_shapes(features: Sequence[Ids], batch_size: int | None) -> list[Shape]:
    """Return the leading shape of every activation.

    Raises:
        ConfigError: a shape is unknown, or arguments and ids contradict each other.
    """
    shapes = []
    for feature in features:
        known = feature.known_shape()
        with_batch = _with_batch(known, feature.config, batch_size)
        merged = merged_shape(known, with_batch, f"feature {feature.path!r}: batch_size={batch_size} (of one replica)")
        whole = _whole(merged)
        if whole is None:
            raise ConfigError(
                f"feature {feature.path!r}: the shape {merged} of its activations is not known while tracing. An accelerator needs "
                "it. Give the FeatureConfig an output_shape (of one replica) or the layer a batch_size, or batch with "
                "drop_remainder=True."
            )
        shapes.append(whole)
    return shapes


def _with_batch(shape: tuple[int | None, ...], config: FeatureConfig, batch_size: int | None) -> tuple[int | None, ...]:
    """Return `shape` with `batch_size` examples, unless the feature's output_shape gives their number."""
    says = config.output_shape is not None and config.output_shape[:1] != (None,)
    return shape if says or batch_size is None else (batch_size, *shape[1:])


def _whole(shape: tuple[int | None, ...]) -> Shape | None:
    known = tuple(int(size) for size in shape if size is not None)
    return known if len(known) == len(shape) else None


def check_same_shapes(features: Sequence[Ids], shapes: Sequence[Shape], first: Sequence[Shape]) -> None:
    """Raise ConfigError if `shapes` differ from the `first` ones, for which the accelerator was set up."""
    for feature, shape, known in zip(features, shapes, first, strict=True):
        if shape != known:
            raise ConfigError(
                f"feature {feature.path!r}: its activations have shape {shape}. The accelerator was set up for {known}. "
                "Give the FeatureConfig an output_shape (of one replica), and every batch as many examples."
            )
