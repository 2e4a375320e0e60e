"""How a distributed dataset must be made for a layer on TPUs."""

from typing import Any

import tensorflow as tf

from tpuembed.backends.tf_tpu import is_tpu_strategy
from tpuembed.errors import ConfigError

__all__ = ["input_options"]


def input_options(strategy: Any = None) -> Any:
    """The `tf.distribute.InputOptions` to distribute a dataset with, so that a layer of `strategy` can look its ids up.

    On TPUs, whatever embedding hardware they have, ids stay on the hosts (`experimental_fetch_to_device=False`): that is
    where they are made ready for the accelerator, and where sparse and ragged tensors can be. Elsewhere TensorFlow's defaults.

        dataset = strategy.experimental_distribute_dataset(dataset, tpuembed.input_options(strategy))

    Args:
        strategy: a `tf.distribute.Strategy`; None for the one whose scope this is called in.

    Raises:
        ConfigError: `strategy` is none.

    Source: the docstring of `tf.tpu.experimental.embedding.TPUEmbedding.enqueue`.
    """
    strategy = tf.distribute.get_strategy() if strategy is None else strategy
    if not isinstance(strategy, tf.distribute.Strategy):
        raise ConfigError(f"input_options: strategy must be a tf.distribute.Strategy, got {strategy!r}")
    if is_tpu_strategy(strategy):
        return tf.distribute.InputOptions(experimental_fetch_to_device=False)
    return tf.distribute.InputOptions()
