"""The backend of a layer that is being exported. Rows come from the exporter's stacked variables (see
`tpuembed.runtime.table_scope`)."""

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
    """A layer that is being exported: it looks up and is never trained."""

    def __init__(self, tables: Sequence[TableConfig], source: TableSource) -> None:
        """Register the layer's tables with `source`."""
        self.states: Mapping[str, TableState] = {}
        self._source = source
        for table in tables:
            source.register(table)

    def checkpoint_children(self) -> dict[str, Any]:
        """Return {}: the layer holds no variables."""
        return {}

    def layouts(self) -> dict[str, StackLayout]:
        """Return {}: the layer holds no tables."""
        return {}

    def writing(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: rows are written in place."""
        return nullcontext()

    def fetch(self) -> None:
        """Do nothing: rows are read in place."""

    def weights(self) -> list[tuple[Any, bool]]:
        """Return []: the layer holds no variables."""
        return []

    def lookup(self, features: Sequence[FeatureInput]) -> list[Tensor]:
        """Return the activations of `features`."""
        # Weights that are not compared with the ids may belong to another row.
        is_checked = all(each.weights is None or each.config.validate_weights_and_indices for each in features)
        with tf.name_scope(LOOKUP_SCOPE) if is_checked else nullcontext():
            flat = [feature.flatten() for feature in features]
            return self._source.lookup(flat, [feature.table for feature in features])

    def table(self, name: str) -> Any:
        """Return a whole table, as `embedding_tables` gives it."""
        return self._source.table(name)

    def begin(self, features: Sequence[FeatureInput], layer: Any) -> Any:
        """Raise AssertionError: the tables of this backend have no optimizer, so it is never called."""
        raise AssertionError((features, layer))
