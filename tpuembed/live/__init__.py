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

__all__ = ["export_saved_model"]


@functools.wraps(export.export_saved_model)
def export_saved_model(checkpoint: Any, model_dir: str | FilePath, **options: Any) -> ExportReport:
    """See `tpuembed.export.export_saved_model`, which this extends by models in memory."""
    if isinstance(checkpoint, str | os.PathLike | FilePath):
        return export.export_saved_model(checkpoint, model_dir, **options)  # type: ignore[arg-type]
    return _export_live(checkpoint, model_dir, **options)


def _export_live(
    model: Any,
    model_dir: str | FilePath,
    *,
    serving_config: Any = None,
    tables: Sequence[str] | None = None,
    features: Sequence[str] | None = None,
    on_progress: Progress | None = None,
    **options: Any,
) -> ExportReport:
    """Copy the tables of `model` into the export's files by row ranges. Beside the tables, memory holds one chunk per worker."""
    # here, because an export of a checkpoint imports no Keras
    from tpuembed.live.engine import ThreadEngine
    from tpuembed.live.request import request_of
    from tpuembed.live.tables import live_checkpoint, registered

    chosen = ExportOptions.of("export_saved_model", options, without=("engine",))
    with live_checkpoint(model) as checkpoint, registered(checkpoint) as source:
        engine = ThreadEngine(checkpoint, chosen.workers)
        request = request_of(checkpoint, source, engine, model, serving_config, tables, features)
        return run_export(request, model_dir, chosen, on_progress)
