"""Run the steps of an export in order: plan, graph, stream, assemble.

The graph is saved before the first table byte is read, so that most errors occur early.
"""

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

from tpuembed.checkpoint import Checkpoint
from tpuembed.errors import ConfigError, warn
from tpuembed.export.options import ExportOptions
from tpuembed.export.plan.plan import ExportPlan
from tpuembed.export.plan.planner import plan_export
from tpuembed.export.plan.request import ExportRequest
from tpuembed.export.publish.assemble import assemble
from tpuembed.export.publish.folder import FolderWriter
from tpuembed.export.publish.layouts import check_layout
from tpuembed.export.publish.version_writer import VersionWriter, naming_model_dir
from tpuembed.export.report import ExportReport
from tpuembed.export.stream.engines import Engine, check_engine, choose_engine, default_workers
from tpuembed.export.stream.execute import ErrorBound, stream_tables
from tpuembed.export.stream.shard import Source, ignore, peak_rss_bytes
from tpuembed.files import FilePath, as_path

__all__ = ["Progress", "choose_writer", "make_plan", "run_export", "source_of"]

Progress = Callable[[int, int], None]


def make_plan(checkpoint: Checkpoint, request: ExportRequest, options: ExportOptions) -> ExportPlan:
    """Return the plan of `request`."""
    check_layout(options.layout, options.serving_root)
    check_engine(options.engine, options.ray_address)
    available = checkpoint.tables()
    return plan_export(
        [available[name] for name in request.tables],
        storage=options.storage,
        quantization=request.quantization,
        row_ranges=options.rows,
        whole=request.whole_tables,
        layout=options.layout,
        max_memory_bytes=options.max_memory_bytes,
        workers=default_workers(options.engine) if options.workers is None else options.workers,
        may_use_fewer=options.workers is None,
        read_buffers=checkpoint.read_buffer_bytes,
    )


def source_of(checkpoint: Checkpoint) -> Source:
    """Return the source that a worker opens to read `checkpoint`."""
    return Source(
        path=checkpoint.path, fingerprint=checkpoint.fingerprint(), options=json.dumps(dict(checkpoint.options))
    )


def choose_writer(model_dir: str | FilePath, plan: ExportPlan, options: ExportOptions, source: Source) -> VersionWriter:
    """Return the writer for `model_dir`, a path or s3://BUCKET/KEY. Nothing is written yet.

    Raises:
        ConfigError: it is another kind of URL.
    """
    path = as_path(model_dir)
    if isinstance(path, Path):
        return FolderWriter(path, plan, options, source)
    if path.scheme != "s3":
        raise ConfigError(
            f"MODEL_DIR {path}: an export can be written only to a disk or to s3://. Export to a disk and copy "
            "the version, saved_model.pb last."
        )
    from tpuembed.export.publish.store.writer import StoreWriter

    return StoreWriter(path, plan, options, source)


def run_export(
    checkpoint: Checkpoint,
    request: ExportRequest,
    model_dir: str | FilePath,
    options: ExportOptions,
    *,
    source: Source | None = None,
    engine: Engine | None = None,
    on_progress: Progress | None = None,
) -> ExportReport:
    """Export `request` of `checkpoint` into `model_dir`.

    Args:
        source: the source that the engine's tasks open; None for the checkpoint's own path.
        engine: None for the one that `options` names.

    Raises:
        TpuEmbedError: the export failed, and nothing was published.
    """
    started = time.monotonic()
    plan = make_plan(checkpoint, request, options)
    source = source or source_of(checkpoint)
    writer = choose_writer(model_dir, plan, options, source)
    writer.check()
    _warn_of_slow_reads(checkpoint, plan)
    engine = engine or choose_engine(options.engine, plan.workers, options.ray_address)
    with (
        writer,
        naming_model_dir(writer.model_dir),
        contextlib.nullcontext() if writer.is_shared else engine.starting(source, len(plan.shards)),
    ):
        for unfinished in writer.kept:
            warn(
                f"MODEL_DIR {writer.model_dir}: another unfinished export is in {unfinished}. Run that export again "
                "to resume it, or delete it. It is deleted automatically after 7 days.",
            )
        graph = request.save_graph(plan, writer.path)  # while the workers start
        bound = ErrorBound(plan.shards, options.max_error)
        on_progress = on_progress or ignore
        streamed = writer.share(on_progress)
        if streamed is None:
            streamed = stream_tables(source, writer, engine, on_progress=on_progress, on_result=bound.check_shard)
        bound.check(streamed.errors)
        facts = {"path": source.path, "format": checkpoint.format, "fingerprint": source.fingerprint}
        path = assemble(writer, streamed, graph, facts)
    return ExportReport(
        path=cast("Path", path),
        version=int(path.name),
        tables=tuple(place.table for stack in plan.stacks for place in stack.tables),
        dropped_features=request.dropped_features,
        vocabularies=graph.vocabularies,
        bytes_written=streamed.bytes_written,
        bytes_reused=streamed.bytes_reused,
        errors=streamed.errors,
        seconds=time.monotonic() - started,
        stream_seconds=streamed.seconds,
        peak_rss_bytes=peak_rss_bytes(),
        worker_peak_rss_bytes=streamed.worker_peak_rss_bytes,
    )


def _warn_of_slow_reads(checkpoint: Checkpoint, plan: ExportPlan) -> None:
    """Print the reader's advice on slow reads here, because workers print nothing."""
    rows = {task.table: task.chunk_rows for task in plan.shards}
    for advice in dict.fromkeys(checkpoint.advise(table, count) for table, count in rows.items()):
        if advice is not None:
            warn(advice)
