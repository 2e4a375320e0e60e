"""Export straight from training: the tables of a live model, on any backend, without a checkpoint in between.

tables    the tables in memory as a checkpoint, read by row ranges
engine    shards written by threads of this process, which has the rows
request   the model's own graph, whose lookups go to the exported tables
callback  an export every so many epochs of `fit`
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tpuembed.export.options import ExportOptions
from tpuembed.export.report import ExportReport
from tpuembed.export.run import Progress, run_export
from tpuembed.files import FilePath
from tpuembed.live.engine import ThreadEngine
from tpuembed.live.request import request_of
from tpuembed.live.tables import lent, live_checkpoint

__all__ = ["export_model"]


def export_model(
    model: Any,
    model_dir: str | FilePath,
    *,
    serving_config: Any = None,
    tables: Sequence[str] | None = None,
    features: Sequence[str] | None = None,
    output_names: Mapping[str, str] | None = None,
    on_progress: Progress | None = None,
    **options: Any,
) -> ExportReport:
    """Write `model_dir`/<version>/, a SavedModel of a model that is in memory, on whatever backend it is trained.

    Tables are copied row range by row range into the export's files: beside them, memory holds one chunk per worker. The
    model is not changed, and training may go on afterwards. What is trained meanwhile, by another thread, is noticed and
    refused.

    Args:
        model: a Keras model with `TPUEmbedding` layers, whose inputs and outputs become the signature's; a subclassed one
            as (model, its inputs' specs), see `export_saved_model`. Or a `TPUEmbedding` layer, for lookups.
        model_dir: a folder, made where missing, or s3://BUCKET/KEY.
        serving_config: for a layer: the features to answer, as `export_saved_model` takes them; None for the layer's own.
            A model's signature must agree with it.
        tables, features: for a layer: export these only, with the features that look up in them and the tables that they
            look up in.
        output_names: for a model: new names of its outputs by their old ones.
        on_progress: called with (bytes done, bytes in all).
        options: storage, layout, max_memory_bytes, workers, version and the like, as `export_saved_model` takes them.
            The tables are in this process, so there is no `engine` to choose.

    Raises:
        TpuEmbedError: nothing was published; the message says what to change.
    """
    chosen = ExportOptions.of("export_model", options, without=("engine", "ray_address"))
    with live_checkpoint(model) as checkpoint, lent(checkpoint) as source:
        request = request_of(checkpoint, model, serving_config, tables, features, output_names)
        engine = ThreadEngine(checkpoint, chosen.workers)
        return run_export(checkpoint, request, model_dir, chosen, source=source, engine=engine, on_progress=on_progress)
