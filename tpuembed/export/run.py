"""Run the steps of an export in order: plan, graph, stream, assemble.

The graph is saved before the first table byte is read, so that most errors occur early.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from tpuembed.checkpoint import Checkpoint
from tpuembed.errors import ConfigError, warn
from tpuembed.export.options import ExportOptions
from tpuembed.export.overlay.base import BaseVersion, difference, find_base
from tpuembed.export.overlay.changes import TooManyRowsError
from tpuembed.export.overlay.writer import OverlayWriter, save_full_graph
from tpuembed.export.plan.plan import ExportPlan
from tpuembed.export.plan.planner import plan_export
from tpuembed.export.plan.request import ExportRequest
from tpuembed.export.publish.assemble import assemble
from tpuembed.export.publish.folder import FolderWriter
from tpuembed.export.publish.layouts import check_layout
from tpuembed.export.publish.version_writer import VersionWriter, naming_model_dir
from tpuembed.export.report import ExportReport, SavedGraph, StreamReport
from tpuembed.export.retention.prune import prune_after
from tpuembed.export.storage.error import TableError
from tpuembed.export.stream.engines import Engine, check_engine, choose_engine, default_workers
from tpuembed.export.stream.execute import check_errors, stream_tables
from tpuembed.export.stream.shard import ShardResult, Source, check_unchanged, ignore, peak_rss_bytes
from tpuembed.files import FilePath, as_path
from tpuembed.manifest import HistoryEntry

__all__ = ["Progress", "check_target", "make_plan", "run_export", "source_of"]

Progress = Callable[[int, int], None]


def make_plan(checkpoint: Checkpoint, request: ExportRequest, options: ExportOptions) -> ExportPlan:
    """Return the plan of `request`."""
    check_layout(options.layout, options.serving_root)
    check_engine(options.engine)
    available = checkpoint.tables()
    return plan_export(
        [available[name] for name in request.tables],
        storage=options.storage,
        quantization=request.quantization,
        whole=request.whole_tables,
        alone=request.index_tables,
        layout=options.layout,
        max_memory_bytes=options.max_memory_bytes,
        workers=default_workers(options.engine) if options.workers is None else options.workers,
        may_use_fewer=options.workers is None,
        require_finite=options.require_finite,
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
        ConfigError: it is another kind of URL, or an option does not fit a store.
    """
    path = as_path(model_dir)
    if isinstance(path, Path):
        return FolderWriter(path, plan, options, source)
    if options.keep is not None:
        raise ConfigError(
            f"MODEL_DIR {path}: keep={options.keep} removes versions from a disk alone. Leave it out, and remove old "
            "versions of a store with its own tools."
        )
    if path.scheme != "s3":
        raise ConfigError(
            f"MODEL_DIR {path}: an export can be written only to a disk or to s3://. Export to a disk and copy "
            "the version, saved_model.pb last."
        )
    from tpuembed.export.publish.store.writer import StoreWriter

    return StoreWriter(path, plan, options, source)


def _histories(checkpoint: Checkpoint, plan: ExportPlan) -> dict[str, HistoryEntry]:
    stamps = checkpoint.stamps
    return {
        place.table: HistoryEntry(spans=stamps[place.table].history.spans, updates=stamps[place.table].history.updates)
        for stack in plan.stacks
        for place in stack.tables
        if place.table in stamps
    }


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

    def check_shard(result: ShardResult) -> None:  # so that a long export fails early
        task = plan.shards[result.index]
        max_abs = result.errors.get("max_abs", 0.0)
        check_errors({task.table: TableError(storage=task.storage, max_abs=max_abs)}, options.max_error)

    on_progress = on_progress or ignore
    facts = {"path": source.path, "format": checkpoint.format, "fingerprint": source.fingerprint}
    histories = _histories(checkpoint, plan)
    done = None
    if options.base is not None:
        done = _overlay(
            checkpoint, request, plan, model_dir, options, source, check_shard, facts, histories, on_progress
        )
    if done is None:
        writer = choose_writer(model_dir, plan, options, source)
        writer.check()
        engine = engine or choose_engine(options.engine, plan.workers)
        with writer, naming_model_dir(writer.model_dir), engine.starting(source, len(plan.shards)):
            _warn_of_unfinished(writer)
            graph = request.save_graph(plan, writer.path)  # while the workers start
            streamed = stream_tables(source, writer, engine, on_progress=on_progress, on_result=check_shard)
            check_errors(streamed.errors, options.max_error)
            check_unchanged(checkpoint, source)  # dense weights, and candidates, were read here
            done = _Done(assemble(writer, streamed, graph, facts, histories), streamed, graph)
    path, streamed, removed = done.path, done.streamed, tuple[int, ...]()
    version = int(path.name)
    if options.keep is not None:
        removed = prune_after(model_dir, keep=options.keep, version=version)
    return ExportReport(
        path=cast("Path", path),
        version=version,
        removed=removed,
        tables=tuple(place.table for stack in plan.stacks for place in stack.tables),
        dropped_features=request.dropped_features,
        vocabularies=done.graph.vocabularies,
        bytes_written=streamed.bytes_written,
        bytes_reused=streamed.bytes_reused,
        errors=streamed.errors,
        seconds=time.monotonic() - started,
        stream_seconds=streamed.seconds,
        peak_rss_bytes=peak_rss_bytes(),
        worker_peak_rss_bytes=streamed.worker_peak_rss_bytes,
        base=None if streamed.base is None else streamed.base.version,
        rows_changed=done.rows_changed,
        rows_compared=done.rows_compared,
        retrieval=done.graph.retrieval,
    )


@dataclasses.dataclass(frozen=True)
class _Done:
    """A published version."""

    path: FilePath
    streamed: StreamReport
    graph: SavedGraph
    rows_changed: int | None = None
    rows_compared: int | None = None


def _overlay(
    checkpoint: Checkpoint,
    request: ExportRequest,
    plan: ExportPlan,
    model_dir: str | FilePath,
    options: ExportOptions,
    source: Source,
    on_result: Callable[[ShardResult], None],
    facts: Mapping[str, str],
    histories: Mapping[str, HistoryEntry],
    on_progress: Progress,
) -> _Done | None:
    """Write an overlay of the base that `options` names. Returns None, after a warning, if a full version is needed.

    Raises:
        ConfigError: the base does not exist or cannot be used, or `model_dir` is in a store.
    """
    folder, base, reason = _find_base(plan, request, model_dir, options)
    if not reason:
        assert base is not None
        if base.manifest.layout != plan.layout:
            warn(
                f"base {base.number}: has layout {base.manifest.layout}, and the new version gets {plan.layout}. To keep the "
                f"base's, give layout={base.manifest.layout}."
            )
        writer = OverlayWriter(folder, plan, options, source, base)
        writer.check()
        with writer, naming_model_dir(folder):
            _warn_of_unfinished(writer)
            try:
                streamed, compared = writer.changes(
                    checkpoint, source, request.whole_tables, histories, on_result, on_progress
                )
            except TooManyRowsError:
                reason = writer.too_many()
            else:
                check_errors(streamed.errors, options.max_error)
                graph = request.save_graph(writer.plan, writer.path)
                save_full_graph(lambda folder: request.save_graph(plan, folder), writer.path)
                check_unchanged(checkpoint, source)
                path = assemble(writer, streamed, graph, facts, histories)
                rows = sum(stack.overlay_rows or 0 for stack in writer.plan.stacks)
                return _Done(path, streamed, graph, rows, compared)
    warn(f"base {options.base}: {reason}. Writing a full version.")
    return None


def check_target(
    model_dir: str | FilePath, plan: ExportPlan, request: ExportRequest, options: ExportOptions, source: Source
) -> ExportPlan:
    """Raise the errors of an export into `model_dir` that are known before it starts. Writes nothing.

    Returns:
        The plan, with the version that the export would be an overlay of.

    Raises:
        ConfigError: an option does not fit MODEL_DIR, or its base does not exist.
        ExportError: the version exists, or its tables have no room.
    """
    if options.base is not None:
        folder, base, reason = _find_base(plan, request, model_dir, options)
        if base is not None and not reason:
            OverlayWriter(folder, plan, options, source, base).check()
            return dataclasses.replace(plan, base=base.number)
    choose_writer(model_dir, plan, options, source).check()
    return plan


def _find_base(
    plan: ExportPlan, request: ExportRequest, model_dir: str | FilePath, options: ExportOptions
) -> tuple[Path, BaseVersion | None, str]:
    """Return MODEL_DIR, the base that `options` names, and why `plan` can be no overlay of it; empty if it can.

    Raises:
        ConfigError: `model_dir` is in a store, or its base is of another kind than `request`.
    """
    folder = as_path(model_dir)
    assert options.base is not None
    if not isinstance(folder, Path):
        raise ConfigError(
            f"MODEL_DIR {folder}: base={options.base} links files of a version, which a store cannot do. Export to a disk, "
            "or leave base out."
        )
    base = find_base(folder, options.base)
    if isinstance(base, str):
        return folder, None, base
    if base.manifest.retrieval is not None:
        raise ConfigError(
            f"base {options.base}: version {base.path} is a retrieval, which has no overlays. Leave base out for a full version."
        )
    if request.is_model == bool(base.manifest.features):
        mine, other = ("a whole model", "lookups only") if request.is_model else ("lookups only", "a whole model")
        raise ConfigError(
            f"base {options.base}: version {base.path} is {other}, and this export is {mine}, so clients would get another "
            f"signature. {'Leave `model` out' if request.is_model else 'Give `model`'}, or leave base out."
        )
    return folder, base, difference(plan, base)


def _warn_of_unfinished(writer: VersionWriter) -> None:
    for unfinished in writer.kept:
        warn(
            f"MODEL_DIR {writer.model_dir}: another unfinished export is in {unfinished}. Run that export again "
            "to resume it, or delete it. It is deleted automatically after 7 days.",
        )
