"""The backends: one per hardware path. A backend owns the tables of a layer and updates them."""

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tpuembed.backends.backend import Backend
from tpuembed.backends.deferred import DeferredBackend
from tpuembed.backends.gradient_trap import TakenGradients
from tpuembed.backends.host import HostBackend
from tpuembed.backends.layer_call import LayerCall
from tpuembed.backends.layer_options import LayerOptions
from tpuembed.backends.mixed import MixedBackend
from tpuembed.backends.replicas import check_strategy
from tpuembed.backends.row_gradients import RowGradients
from tpuembed.backends.tpu.sparsecore import SparseCoreBackend
from tpuembed.backends.tpu.tf_tpu import embedding_feature, is_tpu_strategy
from tpuembed.backends.tpu.tpu_v1 import TpuV1Backend
from tpuembed.backends.training import train
from tpuembed.errors import ConfigError, warn
from tpuembed.runtime.table_scope import current_source
from tpuembed.runtime.tpu import check_environment

__all__ = ["Backend", "LayerCall", "LayerOptions", "RowGradients", "TakenGradients", "choose", "train"]


_ACCELERATORS: Mapping[str, Callable[[LayerOptions], Backend]] = {"V1": TpuV1Backend, "V2": SparseCoreBackend}


def choose(layer_options: LayerOptions) -> Backend:
    """Return the backend for the current `tf.distribute` strategy and scope. Only this function looks at the hardware.

    Raises:
        ConfigError: the strategy is not supported, the hardware that `embedding_feature` names is missing, or the
            installation cannot work.
    """
    check_environment()
    source = current_source()
    if source is not None:
        return DeferredBackend(layer_options.tables, source)
    strategy = tf.distribute.get_strategy()
    check_strategy()
    accelerator = _ACCELERATORS.get(_hardware(strategy, layer_options.embedding_feature))
    large = {
        table.name for table in layer_options.tables if table.vocabulary_size > (layer_options.size_threshold or 0)
    }
    if accelerator is not None and large:
        small = {table.name for table in layer_options.tables} - large
        return MixedBackend(layer_options, small, accelerator) if small else accelerator(layer_options)
    _warn_without_effect(layer_options, strategy)
    return HostBackend(layer_options)


def _hardware(strategy: Any, asked: Any) -> str:
    """Return "V1", "V2", or "UNSUPPORTED" if the tables are replicated (on a TPU without an accelerator, and without a TPU)."""
    if not is_tpu_strategy(strategy):  # as TensorFlow Recommenders, so that a program for TPUs runs on a CPU as it is
        return "UNSUPPORTED"
    found, name = embedding_feature(strategy), _name_of(asked)
    if name not in (None, "UNSUPPORTED", found):
        raise ConfigError(
            f"TPUEmbedding: embedding_feature={name} needs a TPU with that hardware. {type(strategy).__name__} has TPUs with "
            f"embedding hardware {found}. Leave it None, or pass UNSUPPORTED to replicate the tables."
        )
    return str(name or found)


def _name_of(asked: Any) -> Any:
    return getattr(asked, "name", asked)


def _warn_without_effect(layer_options: LayerOptions, strategy: Any) -> None:
    given = {
        "pipeline_execution_with_tensor_core": layer_options.pipelining,
        "batch_size": layer_options.batch_size,
        "sparse_core_embedding_config": layer_options.sparse_core_config,
        "embedding_feature": not is_tpu_strategy(strategy)
        and _name_of(layer_options.embedding_feature) in ("V1", "V2"),
    }
    for option in (option for option, value in given.items() if value):
        warn(
            f"TPUEmbedding: {option} has no effect under {type(strategy).__name__.lstrip('_')}: no embedding accelerator is used.",
        )
