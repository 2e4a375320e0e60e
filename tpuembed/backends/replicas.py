"""Several replicas of one model, each with its copy of every table (`tf.distribute.MirroredStrategy`).

Every replica gathers the ids and gradients of all replicas and makes the same update on its own copy. So the copies
stay equal bit by bit, and each row is updated once.
"""

from typing import Any

import tensorflow as tf

from tpuembed.backends.tpu.tf_tpu import is_tpu_strategy
from tpuembed.errors import ConfigError, TrainingError
from tpuembed.lookup.ranges import DROPPED

__all__ = ["check_same_strategy", "check_strategy", "gather_replicas"]

Tensor = Any

_SUPPORTED = (tf.distribute.OneDeviceStrategy, tf.distribute.MirroredStrategy)


def check_strategy() -> None:
    """Raise ConfigError unless the current strategy is one of the tested ones, which train tables correctly.

    A subclass counts as another strategy. Under a ParameterServerStrategy, several workers would overwrite each other's
    rows.
    """
    strategy = tf.distribute.get_strategy()
    if not tf.distribute.has_strategy() or type(strategy) in _SUPPORTED or is_tpu_strategy(strategy):
        return
    raise ConfigError(
        f"TPUEmbedding: {type(strategy).__module__}.{type(strategy).__name__} is not supported. Use no strategy, a "
        "tf.distribute.OneDeviceStrategy, a tf.distribute.MirroredStrategy or a tf.distribute.TPUStrategy."
    )


def gather_replicas(ids: Tensor, gradients: Tensor, droppable: bool) -> tuple[Tensor, Tensor, bool]:
    """Return the ids [n] and gradients [n, dim] of all replicas, concatenated, and True if ids may be `DROPPED`.

    n may differ between replicas. `droppable` is True if the given ids may be `DROPPED`.
    """
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return ids, gradients, droppable
    if not ids.shape[0]:  # unknown, or 0: TensorFlow 2.21 crashes (SIGSEGV) if it gathers nothing from all replicas
        ids, gradients = tf.pad(ids, [[0, 1]], constant_values=DROPPED), tf.pad(gradients, [[0, 1], [0, 0]])
    return context.all_gather(ids, 0), context.all_gather(gradients, 0), True  # another replica may have added one


def check_same_strategy(created: tf.distribute.Strategy) -> None:
    """Raise TrainingError (a RuntimeError) unless the running step belongs to the strategy the tables were `created` under."""
    current = tf.distribute.get_strategy()
    if current is not created:
        raise TrainingError(
            f"TPUEmbedding: the layer was created under {_describe(created)} and is trained under {_describe(current)}. "
            "Create it inside the scope of the strategy that trains it."
        )


def _describe(strategy: tf.distribute.Strategy) -> str:
    name = type(strategy).__name__.lstrip("_")
    return f"{name} with {strategy.num_replicas_in_sync} replica{'s' if strategy.num_replicas_in_sync > 1 else ''}"
