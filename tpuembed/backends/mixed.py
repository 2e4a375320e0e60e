"""Small tables replicated, large ones in the accelerator, behind one layer."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from tpuembed.backends.feature_input import FeatureInput
from tpuembed.backends.host import HostBackend
from tpuembed.backends.request import Request
from tpuembed.backends.stacked_table import StackLayout
from tpuembed.backends.table_state import TableState
from tpuembed.errors import ConfigError

__all__ = ["MixedBackend"]

Tensor = Any


class MixedBackend:
    """Two backends, each with some of the tables; checkpoints hold their tables side by side."""

    def __init__(self, request: Request, small: set[str], accelerator: Callable[[Request], Any]) -> None:
        """Replicate the tables named in `small`; `accelerator` makes the backend of the others."""
        self._small = small
        self._replicated = HostBackend(_part(request, lambda table: table in small))
        self._accelerated = accelerator(_part(request, lambda table: table not in small))
        self.states: Mapping[str, TableState] = {**self._replicated.states, **self._accelerated.states}

    def checkpoint_children(self) -> dict[str, Any]:
        """Those of both.

        Raises:
            ConfigError: two would be saved under one name.
        """
        small, large = self._replicated.checkpoint_children(), self._accelerated.checkpoint_children()
        for name in small.keys() & large.keys():
            raise ConfigError(
                f"table {name!r}: it is replicated, and tables in the accelerator are stacked and saved under that name too; "
                "rename it"
            )
        return {**small, **large}

    def layouts(self) -> dict[str, StackLayout]:
        """The accelerator's."""
        layouts: dict[str, StackLayout] = self._accelerated.layouts()
        return layouts

    def writing(self) -> AbstractContextManager[None]:
        """Rows written inside are in the accelerator afterwards."""
        writing: AbstractContextManager[None] = self._accelerated.writing()
        return writing

    def fetch(self) -> None:
        """Fetch the accelerator's tables."""
        self._accelerated.fetch()

    def weights(self) -> list[tuple[Any, bool]]:
        """The replicated tables."""
        return self._replicated.weights()

    def lookup(self, features: Sequence[FeatureInput]) -> list[Tensor]:
        """Activations of `features`, each where its table lives."""
        small, large = self._divide(features)
        is_small = [self._is_small(feature) for feature in features]
        # A step may look up free tables beside the others; the accelerator would take that for a second call.
        return _merge(is_small, self._replicated.lookup(small), self._accelerated.lookup(large) if large else [])

    def begin(self, features: Sequence[FeatureInput], layer: Any) -> "_Step":
        """A step of both."""
        small, large = self._divide(features)
        steps = [
            backend.begin(part, layer) for backend, part in ((self._replicated, small), (self._accelerated, large))
        ]
        return _Step([self._is_small(feature) for feature in features], *steps)

    def _divide(self, features: Sequence[FeatureInput]) -> tuple[list[FeatureInput], list[FeatureInput]]:
        small = [feature for feature in features if self._is_small(feature)]
        return small, [feature for feature in features if not self._is_small(feature)]

    def _is_small(self, feature: FeatureInput) -> bool:
        return feature.table in self._small


class _Step:
    """A step of each backend, whose answers are put in the features' order."""

    def __init__(self, is_small: Sequence[bool], small: Any, large: Any) -> None:
        self._is_small, self._small, self._large = is_small, small, large

    def lookup(self) -> list[Tensor]:
        return _merge(self._is_small, self._small.lookup(), self._large.lookup())

    def apply(self, gradients: Sequence[Tensor]) -> list[Any]:
        small = [gradient for gradient, is_small in zip(gradients, self._is_small, strict=True) if is_small]
        large = [gradient for gradient, is_small in zip(gradients, self._is_small, strict=True) if not is_small]
        return [*self._small.apply(small), *self._large.apply(large)]


def _merge(is_small: Sequence[bool], small: Sequence[Tensor], large: Sequence[Tensor]) -> list[Tensor]:
    answers = {True: iter(small), False: iter(large)}
    return [next(answers[which]) for which in is_small]


def _part(request: Request, belongs: Callable[[str], bool]) -> Request:
    features = [(path, feature) for path, feature in request.features if belongs(feature.table.name)]
    return dataclasses.replace(request, features=features)
