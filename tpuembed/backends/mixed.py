"""A layer with small tables replicated and large ones in the accelerator."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from tpuembed.backends.backend import Backend
from tpuembed.backends.host import HostBackend
from tpuembed.backends.layer_call import LayerCall
from tpuembed.backends.layer_options import LayerOptions
from tpuembed.backends.table_state import TableState
from tpuembed.backends.tpu.stacked_table import StackLayout
from tpuembed.backends.training import interleave
from tpuembed.errors import ConfigError
from tpuembed.lookup import Ids

__all__ = ["MixedBackend"]

Tensor = Any


class MixedBackend(Backend):
    """Two backends, each with some of the tables. A checkpoint holds the tables of both."""

    def __init__(
        self, layer_options: LayerOptions, small: set[str], accelerator: Callable[[LayerOptions], Backend]
    ) -> None:
        """Replicate the tables named in `small`. `accelerator` makes the backend of the others."""
        self._small = small
        self._replicated = HostBackend(_part(layer_options, lambda table: table in small))
        self._accelerated = accelerator(_part(layer_options, lambda table: table not in small))
        self.states: Mapping[str, TableState] = {**self._replicated.states, **self._accelerated.states}

    def checkpoint_children(self) -> dict[str, Any]:
        """Return the children of both backends.

        Raises:
            ConfigError: two children have one name.
        """
        small, large = self._replicated.checkpoint_children(), self._accelerated.checkpoint_children()
        for name in sorted(small.keys() & large.keys()):
            raise ConfigError(
                f"table {name!r}: it is replicated, and a stack of tables in the accelerator is saved under the same name. "
                "Rename the table."
            )
        return {**small, **large}

    def layouts(self) -> dict[str, StackLayout]:
        """Return the accelerator's layouts."""
        return self._accelerated.layouts()

    def writing(self) -> AbstractContextManager[None]:
        """Return a context. Rows written inside it are in the accelerator when it ends."""
        return self._accelerated.writing()

    def fetch(self) -> None:
        """Fetch the accelerator's tables."""
        self._accelerated.fetch()

    def weights(self) -> list[tuple[Any, bool]]:
        """Return the variables of the replicated tables."""
        return self._replicated.weights()

    def lookup(self, features: Sequence[Ids]) -> list[Tensor]:
        """Return the activations of `features`, each looked up by its table's backend."""
        small, large = self._divide(features)
        is_small = [self._is_small(feature) for feature in features]
        # A step may also look up tables that the user trains. The accelerator would count that as a second call.
        return interleave(is_small, self._replicated.lookup(small), self._accelerated.lookup(large) if large else [])

    def begin(self, features: Sequence[Ids], call: LayerCall) -> "_MixedStep":
        """Return a step of both backends."""
        small, large = self._divide(features)
        steps = [backend.begin(part, call) for backend, part in ((self._replicated, small), (self._accelerated, large))]
        return _MixedStep([self._is_small(feature) for feature in features], *steps)

    def _divide(self, features: Sequence[Ids]) -> tuple[list[Ids], list[Ids]]:
        small = [feature for feature in features if self._is_small(feature)]
        return small, [feature for feature in features if not self._is_small(feature)]

    def _is_small(self, feature: Ids) -> bool:
        return feature.table in self._small


class _MixedStep:
    """A step of each backend. Their activations are returned in the order of the features."""

    def __init__(self, is_small: Sequence[bool], small: Any, large: Any) -> None:
        self._is_small, self._small, self._large = is_small, small, large

    def lookup(self) -> list[Tensor]:
        return interleave(self._is_small, self._small.lookup(), self._large.lookup())

    def apply(self, gradients: Sequence[Tensor]) -> list[Any]:
        small = [gradient for gradient, is_small in zip(gradients, self._is_small, strict=True) if is_small]
        large = [gradient for gradient, is_small in zip(gradients, self._is_small, strict=True) if not is_small]
        return [*self._small.apply(small), *self._large.apply(large)]


def _part(layer_options: LayerOptions, belongs: Callable[[str], bool]) -> LayerOptions:
    features = [(path, feature) for path, feature in layer_options.features if belongs(feature.table.name)]
    return dataclasses.replace(layer_options, features=features)
