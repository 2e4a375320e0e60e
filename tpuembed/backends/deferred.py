"""The backend of a layer that is being exported. Rows come from the exporter's stacked variables (see
`tpuembed.runtime.table_scope`)."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import tensorflow as tf

from tpuembed.backends.backend import Backend, TrainingStep
from tpuembed.backends.layer_call import LayerCall
from tpuembed.config import TableConfig
from tpuembed.lookup import Ids
from tpuembed.lookup.names import as_names, find_names, row_numbers
from tpuembed.manifest import LOOKUP_SCOPE
from tpuembed.runtime.table_scope import TableSource
from tpuembed.vocabulary import Vocabulary

__all__ = ["DeferredBackend"]

Tensor = Any


class DeferredBackend(Backend):
    """A layer that is being exported: it looks up and is never trained."""

    is_export = True

    def __init__(self, tables: Sequence[TableConfig], source: TableSource) -> None:
        """Register the layer's tables with `source`."""
        self._source = source
        for table in tables:
            source.register(table)

    def lookup(self, features: Sequence[Ids]) -> list[Tensor]:
        """Return the activations of `features`."""
        return self._source.answer(features, partial(self._look_up, features))

    def _look_up(self, features: Sequence[Ids]) -> list[Tensor]:
        # Weights that are not compared with the ids may belong to another row.
        is_checked = all(each.weights is None or each.config.validate_weights_and_indices for each in features)
        with tf.name_scope(LOOKUP_SCOPE) if is_checked else nullcontext():
            flat = [feature.flatten() for feature in features]
            return self._source.lookup(flat, [feature.table for feature in features])

    def begin(self, features: Sequence[Ids], call: LayerCall) -> TrainingStep:  # noqa: ARG002
        """Raise AssertionError: an export trains nothing."""
        raise AssertionError("an export trains nothing")

    def note_names(self, vocabulary: Vocabulary, table: str) -> None:
        """See Backend.note_names."""
        self._source.name_arrays(table, vocabulary)

    def note_numbers(self, table: str, feature: str | None = None) -> None:
        """See Backend.note_numbers."""
        self._source.note_numbers(table, feature)

    def rows_of(self, vocabulary: Vocabulary, table: str, names: Tensor, padded: bool) -> Tensor:
        """See Backend.rows_of: in the exported vocabulary."""
        names = as_names(f"table {table!r}", names, vocabulary.dtype)
        numbers = find_names(names, self._source.name_arrays(table, vocabulary))
        return row_numbers(names, numbers, vocabulary, padded)

    def table(self, name: str) -> Any:
        """See Backend.table."""
        return self._source.table(name)
