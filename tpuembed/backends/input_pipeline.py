"""Input options of a distributed dataset for a layer on TPUs."""

from typing import Any

import tensorflow as tf

from tpuembed.backends.tpu.tf_tpu import is_tpu_strategy
from tpuembed.errors import ConfigError

__all__ = ["input_options"]


def input_options(strategy: Any = None) -> Any:
    """Return the `tf.distribute.InputOptions` for a dataset whose ids a layer of `strategy` looks up.

    On TPUs, ids stay on the hosts (`experimental_fetch_to_device=False`). The hosts prepare them for the accelerator,
    and only hosts hold sparse and ragged tensors. Elsewhere, the options are TensorFlow's defaults::

        dataset = strategy.experimental_distribute_dataset(dataset, tpuembed.input_options(strategy))

    Args:
        strategy: a `tf.distribute.Strategy`. None takes the current strategy.

    Raises:
        ConfigError: `strategy` is not a strategy.

    Source: the docstring of `tf.tpu.experimental.embedding.TPUEmbedding.enqueue`.
    """
    strategy = tf.distribute.get_strategy() if strategy is None else strategy
    if not isinstance(strategy, tf.distribute.Strategy):
        raise ConfigError(f"input_options: strategy must be a tf.distribute.Strategy, got {strategy!r}.")
    if is_tpu_strategy(strategy):
        return tf.distribute.InputOptions(experimental_fetch_to_device=False)
    return tf.distribute.InputOptions()
