"""Where tables live and who updates them: one backend per hardware path, chosen once."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import tensorflow as tf

from tpuembed.backends.deferred import DeferredBackend
from tpuembed.backends.feature_input import FeatureInput
from tpuembed.backends.gradient_trap import TakenGradients
from tpuembed.backends.host import HostBackend
from tpuembed.backends.mixed import MixedBackend
from tpuembed.backends.replicas import check_strategy
from tpuembed.backends.request import Request
from tpuembed.backends.sparsecore import SparseCoreBackend
from tpuembed.backends.stacked_table import StackLayout
from tpuembed.backends.table_state import TableState
from tpuembed.backends.tf_tpu import embedding_feature, is_tpu_strategy
from tpuembed.backends.tpu_v1 import TpuV1Backend
from tpuembed.backends.training import Step, train
from tpuembed.errors import ConfigError
from tpuembed.runtime.environment import check_environment
from tpuembed.runtime.table_scope import current_source

__all__ = ["Backend", "Request", "TakenGradients", "choose", "train"]


class Backend(Protocol):
    """What a hardware path does for the layer.

    Attributes:
        states: table name -> its variables; empty where the layer holds none.
    """

    states: Mapping[str, TableState]

    def checkpoint_children(self) -> dict[str, Any]:
        """What a checkpoint holds: name -> variable or node."""

    def layouts(self) -> dict[str, StackLayout]:
        """Table -> where it lies in a stack; tables without an entry are saved in row order."""

    def writing(self) -> AbstractContextManager[None]:
        """A context in which rows of the tables in `states` may be written."""

    def fetch(self) -> None:
        """Called before rows of the tables in `states` are read by `table_rows.read_rows`."""

    def weights(self) -> list[tuple[Any, bool]]:
        """The variables that are Keras weights of the layer, and whether the user's optimizer trains them."""

    def lookup(self, features: Sequence[FeatureInput]) -> list[Any]:
        """Activations of `features`."""

    def begin(self, features: Sequence[FeatureInput], layer: Any) -> Step:
        """A training step of `features`, all of whose tables have an optimizer; `train` runs it."""


_ACCELERATORS: Mapping[str, Callable[[Request], Backend]] = {"V1": TpuV1Backend, "V2": SparseCoreBackend}


def choose(request: Request) -> Backend:
    """The backend of the current `tf.distribute` strategy and scope: the only place that asks for the hardware.

    Raises:
        ConfigError: the strategy is not supported, the hardware that `embedding_feature` asks for is not there, or the
            installation cannot work.
    """
    check_environment()
    source = current_source()
    if source is not None:
        return DeferredBackend(request.tables, source)
    strategy = tf.distribute.get_strategy()
    check_strategy()
    accelerator = _ACCELERATORS.get(_hardware(strategy, request.embedding_feature))
    large = {table.name for table in request.tables if table.vocabulary_size > (request.size_threshold or 0)}
    if accelerator is not None and large:
        return _accelerated(accelerator, request, large)
    _warn_without_effect(request, strategy)
    return HostBackend(request)


def _hardware(strategy: Any, asked: Any) -> str:
    """V1 or V2; UNSUPPORTED where tables are replicated: on a TPU without an accelerator, and off the TPU."""
    found = embedding_feature(strategy) if is_tpu_strategy(strategy) else None
    name = getattr(asked, "name", asked)
    if name not in (None, "UNSUPPORTED", found):
        there = f"TPUs with embedding hardware {found}" if found else "no TPU"
        raise ConfigError(
            f"TPUEmbedding: embedding_feature={name} asks for TPU hardware, and there is {there} under "
            f"{type(strategy).__name__}; leave it None, or pass UNSUPPORTED to replicate the tables"
        )
    return str(name or found or "UNSUPPORTED")


def _accelerated(accelerator: Callable[[Request], Backend], request: Request, large: set[str]) -> Backend:
    small = {table.name for table in request.tables} - large
    return MixedBackend(request, small, accelerator) if small else accelerator(request)


def _warn_without_effect(request: Request, strategy: Any) -> None:
    given = {
        "pipeline_execution_with_tensor_core": request.pipelining,
        "batch_size": request.batch_size,
        "sparse_core_embedding_config": request.sparse_core_config,
    }
    for option in (option for option, value in given.items() if value):
        warnings.warn(
            f"TPUEmbedding: {option} has no effect under {type(strategy).__name__.lstrip('_')}: no embedding accelerator is used",
            stacklevel=5,
        )
