"""The export request of a live model: its own graph, in which every lookup reads the exporter's stacked tables."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tpuembed.config import QuantizationConfig
from tpuembed.errors import ConfigError
from tpuembed.export.graph.keras_model import wrap_model
from tpuembed.export.graph.saved_model import save_graph
from tpuembed.export.graph.signature import quantization_of
from tpuembed.export.graph.stacked_tables import StackedTables
from tpuembed.export.plan.plan import ExportPlan
from tpuembed.export.plan.request import ExportRequest, check_model_config, make_request
from tpuembed.export.report import SavedGraph
from tpuembed.layer import TPUEmbedding
from tpuembed.live.tables import LiveCheckpoint, embedding_layers
from tpuembed.runtime.table_scope import deferred_tables

__all__ = ["request_of"]


def request_of(
    checkpoint: LiveCheckpoint,
    model: Any,
    serving_config: Any,
    tables: Sequence[str] | None,
    features: Sequence[str] | None,
) -> ExportRequest:
    """Return the export request of a layer's lookups, or of a whole model.

    Raises:
        ConfigError, CheckpointMismatchError, UnknownTableError: the request is invalid. The message says why.
    """
    if isinstance(model, TPUEmbedding):
        return make_request(checkpoint, serving_config, None, tables, features)
    if tables is not None or features is not None:
        raise ConfigError(
            "export_saved_model: tables and features select from a layer. A model uses all of its tables. Pass its TPUEmbedding "
            "layer."
        )
    return _LiveModelRequest(checkpoint, model, serving_config)


class _LiveModelRequest:
    """The export request of a Keras model in memory."""

    is_model = True
    index_tables: Sequence[str] = ()
    dropped_features: tuple[str, ...] = ()

    def __init__(self, checkpoint: LiveCheckpoint, model: Any, serving_config: Any) -> None:
        self._model = wrap_model(model, "export_saved_model")
        self._layers = embedding_layers(self._model.model)
        tables = checkpoint.tables()
        self._sources = StackedTables(tables, checkpoint.vocabulary, with_rows=None)
        stated = check_model_config(self._model, checkpoint, serving_config)
        with self._redirected():
            if self._model.may_read_tables():
                self._model.trace()
        self.tables: Sequence[str] = list(self._sources.required)
        self.whole_tables: Sequence[str] = self._sources.read_whole
        self.quantization: Mapping[str, QuantizationConfig] = quantization_of(
            checkpoint.layer_config, self._sources.quantization, stated
        )

    def save_graph(self, plan: ExportPlan, folder: Path) -> SavedGraph:
        """Trace the model with its layers redirected, and save the current dense weights."""
        kept = [weight for layer in self._layers for weight in layer.weights]
        _check_names(self._model.model)
        with self._redirected():
            return save_graph(
                self._model,
                self._sources,
                plan.stacks,
                lambda: self._model.state(without=kept),
                folder,
                plan.layout,
                require_finite=plan.require_finite,
            )

    @contextlib.contextmanager
    def _redirected(self) -> Iterator[None]:
        with contextlib.ExitStack() as scopes:
            scopes.enter_context(deferred_tables(self._sources))
            for layer in self._layers:
                scopes.enter_context(layer.looking_up_in(self._sources))
            yield


def _check_names(model: Any) -> None:
    """Raise ConfigError if TensorFlow cannot save a weight by its name. Keras uses "_" names for classes that start with "_"."""
    for weight in model.weights:
        if weight.path.startswith("_"):
            raise ConfigError(
                f"export_saved_model: weight {weight.path!r}: TensorFlow cannot save a variable whose name begins with _. "
                "Give the model a name that begins with a letter."
            )
