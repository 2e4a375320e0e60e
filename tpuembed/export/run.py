"""Run the steps of an export in order: plan, graph, stream, assemble.

The graph is saved before the first table byte is read, so that most errors occur early.
"""

import contextlib
import json
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

from tpuembed.checkpoint import Checkpoint
from tpuembed.checkpoint.types import PieceAdvice, ReadBuffers
from tpuembed.errors import ExportError, TpuEmbedError
from tpuembed.export.options import ExportOptions
from tpuembed.export.plan.plan import ExportPlan, plan_export
from tpuembed.export.plan.request import ExportRequest
from tpuembed.export.publish.assemble import assemble
from tpuembed.export.publish.destinations import StagedVersion, choose_destination
from tpuembed.export.publish.layouts import check_layout
from tpuembed.export.publish.reuse import tables_key
from tpuembed.export.report import ExportReport
from tpuembed.export.storage.error_bound import ErrorBound
from tpuembed.export.stream.engines import Engine, check_engine, choose_engine, default_workers
from tpuembed.export.stream.engines.protocol import StartsEarly
from tpuembed.export.stream.execute import StreamReport, stream_into
from tpuembed.export.stream.resume_log import Header
from tpuembed.export.stream.shard import Source, ignore, peak_rss_bytes
from tpuembed.files import FilePath

if TYPE_CHECKING:
    from tpuembed.export.graph.saved_model import SavedGraph

__all__ = ["Progress", "check_place", "make_plan", "resumable", "run_export", "source_of"]

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
        read_buffers=checkpoint.read_buffer_bytes if isinstance(checkpoint, ReadBuffers) else _no_buffers,
    )


def _no_buffers(table: str, rows: int) -> int:  # noqa: ARG001 - as ReadBuffers
    return 0


def source_of(checkpoint: Checkpoint) -> Source:
    """Return the source that a worker opens to read `checkpoint`."""
    return Source(
        path=checkpoint.path, fingerprint=checkpoint.fingerprint(), options=json.dumps(dict(checkpoint.options))
    )


def check_place(checkpoint: Checkpoint, plan: ExportPlan, model_dir: str | FilePath, options: ExportOptions) -> None:
    """Raise ExportError if `model_dir` has no room for the export of `plan`, or already has its version."""
    destination, source = choose_destination(model_dir), source_of(checkpoint)
    destination.check(plan, options)
    is_shared = options.resume and destination.same_tables(tables_key(plan, source)) is not None
    destination.check_room(plan, Header.of(plan, source), options, is_shared=is_shared)


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
    header = Header.of(plan, source) if source.lasts else None
    key = tables_key(plan, source) if source.lasts else ""
    destination = choose_destination(model_dir)
    destination.check(plan, options)
    same = destination.same_tables(key) if options.resume and key else None
    destination.check_room(plan, header, options, is_shared=same is not None)
    _warn_of_slow_reads(checkpoint, plan)
    engine = engine or choose_engine(options.engine, plan.workers, options.ray_address)
    with (
        destination.stage(options, header) as staging,
        resumable(staging),
        _naming_the_place(staging),
        _starting(engine, source, plan) if same is None else contextlib.nullcontext(),
    ):
        _warn_of_kept(staging)
        graph = request.save_graph(plan, staging.path)
        bound = ErrorBound(plan.shards, options.max_error)
        on_progress = on_progress or ignore
        streamed = destination.share(same, plan, staging, on_progress) if same else None
        if streamed is None:
            tables = staging.open_tables(plan)
            streamed = stream_into(plan, source, tables, engine, on_progress=on_progress, on_result=bound.check_shard)
        bound.check(streamed.errors)
        path = assemble(
            staging,
            plan,
            streamed,
            layout=destination.layout(options),
            stack_keys=graph.stack_keys,
            signatures=graph.signatures,
            features=graph.features,
            vocabularies=graph.vocabularies,
            padding=graph.padding,
            packing=graph.packing,
            source={"path": source.path, "format": checkpoint.format, "fingerprint": source.fingerprint},
            tables_key=key,
        )
    return _report(path, plan, request, graph, streamed, time.monotonic() - started)


def _starting(engine: Engine, source: Source, plan: ExportPlan) -> contextlib.AbstractContextManager[None]:
    """Return a context that starts the engine's workers while the graph is being saved, if the engine can."""
    return engine.starting(source, len(plan.shards)) if isinstance(engine, StartsEarly) else contextlib.nullcontext()


@contextlib.contextmanager
def resumable(staging: StagedVersion) -> Iterator[None]:
    """Add the number of shards that the next run can reuse to the message of an error."""
    try:
        yield
    except TpuEmbedError as error:
        if staging.is_kept_after(error):
            count = staging.finished
            kept = "1 finished shard was kept" if count == 1 else f"{count} finished shards were kept"
            error.args = (f"{str(error).removesuffix('.')}. {kept}. Run the same export again to resume.",)
        raise


@contextlib.contextmanager
def _naming_the_place(staging: StagedVersion) -> Iterator[None]:
    """Turn an OSError, such as that of a full disk, into an ExportError that names MODEL_DIR."""
    try:
        yield
    except TpuEmbedError:  # some are OSErrors too, such as CheckpointNotFoundError
        raise
    except OSError as error:
        raise ExportError(
            f"MODEL_DIR {staging.model_dir}: cannot be written: {error.strerror or error}. Free space or repair the disk."
        ) from error


def _warn_of_kept(staging: StagedVersion) -> None:
    for unfinished in staging.kept:
        warnings.warn(
            f"MODEL_DIR {staging.model_dir}: another unfinished export is in {unfinished}. Run that export again "
            "to resume it, or delete it. It is deleted automatically after 7 days.",
            stacklevel=4,
        )


def _report(
    path: FilePath,
    plan: ExportPlan,
    request: ExportRequest,
    graph: "SavedGraph",
    streamed: StreamReport,
    seconds: float,
) -> ExportReport:
    return ExportReport(
        path=cast("Path", path),
        version=int(path.name),
        tables=tuple(place.table for stack in plan.stacks for place in stack.tables),
        dropped_features=request.dropped_features,
        vocabularies=graph.vocabularies,
        bytes_written=streamed.bytes_written,
        bytes_reused=streamed.bytes_reused,
        errors=streamed.errors,
        seconds=seconds,
        stream_seconds=streamed.seconds,
        peak_rss_bytes=peak_rss_bytes(),
        worker_peak_rss_bytes=streamed.worker_peak_rss_bytes,
    )


def _warn_of_slow_reads(checkpoint: Checkpoint, plan: ExportPlan) -> None:
    """Print the reader's advice on slow reads here, because workers print nothing."""
    if isinstance(checkpoint, PieceAdvice):
        rows = {task.table: task.chunk_rows for task in plan.shards}
        for advice in dict.fromkeys(checkpoint.advise(table, count) for table, count in rows.items()):
            if advice is not None:
                warnings.warn(advice, stacklevel=4)
