"""No tables at all: rows come from the exporter's stacked variables (see `tpuembed.runtime.table_scope`)."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from tpuembed.backends.feature_input import FeatureInput
from tpuembed.backends.stacked_table import StackLayout
from tpuembed.backends.table_state import TableState
from tpuembed.config import TableConfig
from tpuembed.manifest import LOOKUP_SCOPE
from tpuembed.runtime.table_scope import TableSource

__all__ = ["DeferredBackend"]

Tensor = Any


class DeferredBackend:
    """A layer that is being exported: it looks up, and is never trained."""

    def __init__(self, tables: Sequence[TableConfig], source: TableSource) -> None:
        """Tell `source` which tables the layer needs."""
        self.states: Mapping[str, TableState] = {}
        self._source = source
        for table in tables:
            source.register(table)

    def checkpoint_children(self) -> dict[str, Any]:
        """None."""
        return {}

    def layouts(self) -> dict[str, StackLayout]:
        """None."""
        return {}

    def writing(self) -> AbstractContextManager[None]:
        """Rows are written in place."""
        return nullcontext()

    def fetch(self) -> None:
        """Rows are read in place."""

    def weights(self) -> list[tuple[Any, bool]]:
        """None."""
        return []

    def lookup(self, features: Sequence[FeatureInput]) -> list[Tensor]:
        """Activations of `features`."""
        # Weights that nobody compares with the ids may be another row's.
        is_checked = all(each.weights is None or each.config.validate_weights_and_indices for each in features)
        with tf.name_scope(LOOKUP_SCOPE) if is_checked else nullcontext():
            flat = [feature.flatten() for feature in features]
            return self._source.lookup(flat, [feature.table for feature in features])

    def table(self, name: str) -> Any:
        """A whole table, as `embedding_tables` gives it."""
        return self._source.table(name)

    def begin(self, features: Sequence[FeatureInput], layer: Any) -> Any:
        """Never called: no table here has an optimizer to train it."""
        raise AssertionError((features, layer))
