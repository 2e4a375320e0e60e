"""Export = plan -> stream -> assemble: a CPU-servable SavedModel of a checkpoint's tables, of any size.

This module is the order of the steps; each step is a module. The graph is saved before the first table byte is read: what
can fail soon fails soon. Importing this module imports no TensorFlow.
"""

import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tpuembed.checkpoint import Checkpoint, open_checkpoint
from tpuembed.checkpoint.types import PieceAdvice
from tpuembed.export.assemble import assemble
from tpuembed.export.engines import choose_engine, default_workers
from tpuembed.export.execute import stream_tables
from tpuembed.export.plan import DEFAULT_MAX_MEMORY_BYTES, ExportPlan, plan_export
from tpuembed.export.report import ExportReport
from tpuembed.export.request import Request, make_request
from tpuembed.export.staging import Staging, ensure_space
from tpuembed.export.stream import Source, ignore, peak_rss_bytes

__all__ = ["ExportPlan", "ExportReport", "export_saved_model", "plan_saved_model"]

Progress = Callable[[int, int], None]


def export_saved_model(
    checkpoint: str | Path,
    model_dir: str | Path,
    *,
    serving_config: Any = None,
    model: Any = None,
    tables: Sequence[str] | None = None,
    storage: str = "float32",
    layout: str = "variables",
    max_memory_bytes: int = DEFAULT_MAX_MEMORY_BYTES,
    workers: int | None = None,
    engine: str = "local",
    version: int | None = None,
    on_progress: Progress | None = None,
    checkpoint_options: Mapping[str, Any] | None = None,
) -> ExportReport:
    """Write `model_dir`/<version>/, a SavedModel that TensorFlow Serving, Python and the C API load.

    The tables are streamed from the checkpoint by processes that never import TensorFlow, in bounded memory; the version
    appears by one rename when every byte of it is on the disk.

    Args:
        checkpoint: a prefix, a directory, or any file or folder that a reader recognises.
        model_dir: made where missing.
        serving_config: what to answer (see `tpuembed.ServingConfig`): YAML or JSON path, dict, or a nested structure of
            FeatureConfig. None: the features of the layer that wrote the checkpoint.
        model: for a whole model instead of lookups: a function that builds the Keras model (its `TPUEmbedding` layers then
            allocate no tables), or its name as "MODULE:FACTORY". Dense weights are restored from the checkpoint.
        tables: export these only, with the features that look up in them.
        storage: "float32".
        layout: "variables".
        max_memory_bytes: bound on the buffers of all workers together.
        workers: processes that stream; None for one per processor.
        engine: "local".
        version: None for the next free integer.
        on_progress: called with (bytes done, bytes in all).
        checkpoint_options: what `open_checkpoint` takes beside the path.

    Raises:
        TpuEmbedError: nothing was published; the message says what to change.
    """
    started = time.monotonic()
    model_dir = Path(model_dir)
    with open_checkpoint(checkpoint, **(checkpoint_options or {})) as opened:
        request = make_request(opened, serving_config, model, tables)
        plan = _plan(opened, request, storage, layout, max_memory_bytes, workers)
        ensure_space(model_dir, plan.table_bytes)
        options = json.dumps(dict(opened.options))
        source = Source(path=opened.path, fingerprint=opened.fingerprint(), options=options)
        _pass_advice_on(opened, plan)
        with Staging(model_dir, version) as staging:
            graph = request.save_graph(plan, staging.path)
            running = choose_engine(engine, plan.workers)
            streamed = stream_tables(plan, source, staging.path / "tables", running, on_progress=on_progress or ignore)
            path = assemble(
                staging,
                plan,
                streamed,
                stack_keys=graph.stack_keys,
                signatures=graph.signatures,
                source={"path": source.path, "format": opened.format, "fingerprint": source.fingerprint},
            )
    return ExportReport(
        path=path,
        version=int(path.name),
        tables=tuple(place.table for stack in plan.stacks for place in stack.tables),
        dropped_features=request.dropped_features,
        bytes_written=streamed.bytes_written,
        seconds=time.monotonic() - started,
        stream_seconds=streamed.seconds,
        peak_rss_bytes=peak_rss_bytes(),
        worker_peak_rss_bytes=streamed.worker_peak_rss_bytes,
    )


def plan_saved_model(
    checkpoint: str | Path,
    *,
    serving_config: Any = None,
    model: Any = None,
    tables: Sequence[str] | None = None,
    storage: str = "float32",
    layout: str = "variables",
    max_memory_bytes: int = DEFAULT_MAX_MEMORY_BYTES,
    workers: int | None = None,
    checkpoint_options: Mapping[str, Any] | None = None,
) -> ExportPlan:
    """What `export_saved_model` would write: the dry run, which writes nothing. The arguments are the same."""
    with open_checkpoint(checkpoint, **(checkpoint_options or {})) as opened:
        request = make_request(opened, serving_config, model, tables)
        return _plan(opened, request, storage, layout, max_memory_bytes, workers)


def _pass_advice_on(checkpoint: Checkpoint, plan: ExportPlan) -> None:
    """Workers, which would notice that reading is slow, print nothing."""
    if isinstance(checkpoint, PieceAdvice):
        rows = {task.table: task.chunk_rows for task in plan.shards}
        for advice in dict.fromkeys(checkpoint.advise(table, count) for table, count in rows.items()):
            if advice is not None:
                warnings.warn(advice, stacklevel=3)


def _plan(
    checkpoint: Checkpoint, request: Request, storage: str, layout: str, max_memory_bytes: int, workers: int | None
) -> ExportPlan:
    available = checkpoint.tables()
    return plan_export(
        [available[name] for name in request.tables],
        storage=storage,
        layout=layout,
        max_memory_bytes=max_memory_bytes,
        workers=default_workers() if workers is None else workers,
    )
