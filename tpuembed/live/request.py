"""The export request of a live model: its own graph, in which every lookup reads the exporter's stacked tables."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tpuembed.errors import ConfigError
from tpuembed.export.graph.keras_model import wrap_model
from tpuembed.export.graph.signature import quantization_of
from tpuembed.export.graph.stacked_tables import StackedTables
from tpuembed.export.plan.plan import ExportPlan
from tpuembed.export.report import SavedGraph
from tpuembed.export.request import ExportRequest, check_model_config, make_request, saving
from tpuembed.export.stream.engines import Engine
from tpuembed.export.stream.shard import Source
from tpuembed.layer import TPUEmbedding
from tpuembed.live.tables import LiveCheckpoint, embedding_layers
from tpuembed.runtime.table_scope import deferred_tables

__all__ = ["request_of"]


def request_of(
    checkpoint: LiveCheckpoint,
    source: Source,
    engine: Engine,
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
        request = make_request(checkpoint, source, serving_config, None, tables, features)
        return dataclasses.replace(request, engine=engine)
    if tables is not None or features is not None:
        raise ConfigError(
            "export_saved_model: tables and features select from a layer. A model uses all of its tables. Pass its TPUEmbedding "
            "layer."
        )
    wrapped = wrap_model(model, "export_saved_model")
    layers = embedding_layers(wrapped.model)
    stacked = StackedTables(checkpoint.tables(), checkpoint.vocabulary, with_rows=None)
    stated = check_model_config(wrapped, checkpoint, serving_config)
    with _redirected(layers, stacked):
        if wrapped.may_read_tables():
            wrapped.trace()

    def save_graph(plan: ExportPlan, folder: Path) -> SavedGraph:
        """Trace the model with its layers redirected, and save the current dense weights."""
        kept = [weight for layer in layers for weight in layer.weights]
        _check_names(wrapped.model)
        with _redirected(layers, stacked):
            return saving(wrapped, stacked, lambda: wrapped.state(without=kept))(plan, folder)

    return ExportRequest(
        checkpoint=checkpoint,
        source=source,
        tables=list(stacked.required),
        save_graph=save_graph,
        is_model=True,
        whole_tables=stacked.read_whole,
        quantization=quantization_of(checkpoint.layer_config, stacked.quantization, stated),
        engine=engine,
    )


@contextlib.contextmanager
def _redirected(layers: Sequence[TPUEmbedding], stacked: StackedTables) -> Iterator[None]:
    with contextlib.ExitStack() as scopes:
        scopes.enter_context(deferred_tables(stacked))
        for layer in layers:
            scopes.enter_context(layer.looking_up_in(stacked))
        yield


def _check_names(model: Any) -> None:
    """Raise ConfigError if TensorFlow cannot save a weight by its name. Keras uses "_" names for classes that start with "_"."""
    for weight in model.weights:
        if weight.path.startswith("_"):
            raise ConfigError(
                f"export_saved_model: weight {weight.path!r}: TensorFlow cannot save a variable whose name begins with _. "
                "Give the model a name that begins with a letter."
            )
