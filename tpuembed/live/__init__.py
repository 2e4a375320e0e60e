"""Exports a model from training: reads the tables of a live model, on any backend, without a checkpoint in between.

The tables look like a checkpoint to the exporter, and threads of this process write the shards.
"""

import functools
import os
from collections.abc import Sequence
from typing import Any

from tpuembed import export
from tpuembed.export.options import ExportOptions
from tpuembed.export.report import ExportReport
from tpuembed.export.run import Progress, run_export
from tpuembed.files import FilePath

__all__ = ["export_model", "export_saved_model"]


@functools.wraps(export.export_saved_model)
def export_saved_model(checkpoint: Any, model_dir: str | FilePath, **options: Any) -> ExportReport:
    """See `tpuembed.export.export_saved_model`. A model in the place of the checkpoint is exported as by `export_model`."""
    if isinstance(checkpoint, str | os.PathLike | FilePath):
        return export.export_saved_model(checkpoint, model_dir, **options)  # type: ignore[arg-type]
    return export_model(checkpoint, model_dir, **options)


def export_model(
    model: Any,
    model_dir: str | FilePath,
    *,
    serving_config: Any = None,
    tables: Sequence[str] | None = None,
    features: Sequence[str] | None = None,
    on_progress: Progress | None = None,
    **options: Any,
) -> ExportReport:
    """Write `model_dir`/<version>/, a SavedModel of a model in memory, on any backend.

    Tables are copied into the export's files by row ranges. Beside the tables, memory holds one chunk per worker. The
    model is not changed, and training can continue afterwards. If another thread trains during the export, the export
    fails.

    Args:
        model: a Keras model with `TPUEmbedding` layers. Its inputs and outputs become the signature's. Pass a
            subclassed model as (model, its inputs' specs), see `export_saved_model`. Pass a `TPUEmbedding` layer to
            export lookups only.
        model_dir: a folder, created if missing, or s3://BUCKET/KEY.
        serving_config: for a layer: the features of the signature, as `export_saved_model` takes them. None takes the
            layer's own. For a model, it must agree with the signature.
        tables, features: for a layer: export only these tables and features, with the features of these tables and the
            tables of these features.
        on_progress: called with (bytes done, bytes in all).
        options: storage, layout, max_memory_bytes, workers, version and others, as `export_saved_model` takes them.
            There is no `engine` option, because the tables are in this process.

    Raises:
        TpuEmbedError: nothing was published. The message says what to change.
    """
    # here, because an export of a checkpoint imports no Keras
    from tpuembed.live.engine import ThreadEngine
    from tpuembed.live.request import request_of
    from tpuembed.live.tables import live_checkpoint, registered

    chosen = ExportOptions.of("export_model", options, without=("engine",))
    with live_checkpoint(model) as checkpoint, registered(checkpoint) as source:
        request = request_of(checkpoint, model, serving_config, tables, features)
        engine = ThreadEngine(checkpoint, chosen.workers)
        return run_export(checkpoint, request, model_dir, chosen, source=source, engine=engine, on_progress=on_progress)
