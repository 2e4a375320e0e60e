"""Where tables live and who updates them: one backend per hardware path, chosen once."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tpuembed.backends.deferred import DeferredBackend
from tpuembed.backends.feature_input import FeatureInput
from tpuembed.backends.host import HostBackend
from tpuembed.backends.table_state import TableState
from tpuembed.config import TableConfig
from tpuembed.environment import check_environment
from tpuembed.errors import ConfigError
from tpuembed.table_scope import current_source

__all__ = ["Backend", "choose"]


class Backend(Protocol):
    """What a hardware path does for the layer.

    Attributes:
        states: table name -> its variables; empty where the layer holds none.
    """

    states: Mapping[str, TableState]

    def lookup(self, features: Sequence[FeatureInput]) -> list[Any]:
        """Activations of `features`."""

    def train(self, features: Sequence[FeatureInput], dummy: Any, layer: Any) -> list[Any]:
        """The same, such that the gradient of `dummy` updates the tables."""


def choose(tables: Sequence[TableConfig], optimizer: Any, updates: Any, embedding_feature: Any) -> Backend:
    """The backend of the current `tf.distribute` strategy and scope: the only place that asks for the hardware.

    Raises:
        ConfigError: the hardware that `embedding_feature` or the strategy asks for is not there or not supported, or the
            installation cannot work.
    """
    check_environment()
    source = current_source()
    if source is not None:
        return DeferredBackend(tables, source)
    _check_embedding_feature(embedding_feature)
    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync > 1 and type(strategy) is not tf.distribute.MirroredStrategy:
        raise ConfigError(
            f"TPUEmbedding: {type(strategy).__name__} with {strategy.num_replicas_in_sync} replicas is not supported yet; "
            "build the layer under the default strategy or a MirroredStrategy"
        )
    if "TPU" in type(strategy).__name__:
        raise ConfigError("TPUEmbedding: TPUStrategy is not supported yet; build the layer under the default strategy")
    return HostBackend(tables, optimizer, updates)


def _check_embedding_feature(value: Any) -> None:
    """Off the TPU there is no accelerator to choose: None and UNSUPPORTED both mean the host."""
    name = getattr(value, "name", value)
    if name is not None and name != "UNSUPPORTED":
        raise ConfigError(
            f"TPUEmbedding: embedding_feature={name} asks for TPU hardware, and there is none under "
            f"{type(tf.distribute.get_strategy()).__name__}; leave it None, or build the layer under a TPUStrategy"
        )
