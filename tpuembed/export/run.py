"""Run the steps of an export in order: plan, graph, stream, assemble.

The graph is saved before the first table byte is read, so that most errors occur early.
"""

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

from tpuembed.checkpoint import Checkpoint
from tpuembed.errors import ConfigError, warn
from tpuembed.export.options import ExportOptions
from tpuembed.export.overlay.base import difference, find_base
from tpuembed.export.overlay.writer import OverlayWriter, save_full_graph
from tpuembed.export.plan.plan import ExportPlan
from tpuembed.export.plan.planner import plan_export
from tpuembed.export.publish.assemble import assemble
from tpuembed.export.publish.folder import FolderWriter
from tpuembed.export.publish.layouts import check_layout
from tpuembed.export.publish.version_writer import VersionWriter, naming_model_dir
from tpuembed.export.report import ExportReport, SavedGraph, StreamReport
from tpuembed.export.request import ExportRequest
from tpuembed.export.retention.prune import prune_after
from tpuembed.export.storage.error import TableError
from tpuembed.export.stream.engines import check_engine, choose_engine, default_workers
from tpuembed.export.stream.execute import check_errors, stream_tables
from tpuembed.export.stream.shard import ShardResult, Source, check_unchanged, ignore, peak_rss_bytes
from tpuembed.files import FilePath, as_path
from tpuembed.manifest import HistoryEntry

__all__ = ["Progress", "check_target", "make_plan", "run_export", "source_of"]

Progress = Callable[[int, int], None]


def run_export(
    request: ExportRequest, model_dir: str | FilePath, options: ExportOptions, on_progress: Progress | None = None
) -> ExportReport:
    """Export `request` into `model_dir`.

    Raises:
        TpuEmbedError: the export failed, and nothing was published.
    """
    started = time.monotonic()
    on_progress = on_progress or ignore
    plan = make_plan(request, options)
    report = None
    if options.base is not None:
        overlay, reason = _overlay_writer(request, plan, model_dir, options)
        if overlay is not None:
            report = _write_overlay(overlay, request, on_progress)
            reason = reason or overlay.too_many()
        if report is None:
            warn(f"base {options.base}: {reason}. Writing a full version.")
    if report is None:
        report = _write_full(choose_writer(model_dir, plan, options, request.source), request, on_progress)
    removed = () if options.keep is None else prune_after(model_dir, keep=options.keep, version=report.version)
    return dataclasses.replace(
        report, removed=removed, seconds=time.monotonic() - started, peak_rss_bytes=peak_rss_bytes()
    )


def check_target(
    request: ExportRequest, plan: ExportPlan, model_dir: str | FilePath, options: ExportOptions
) -> ExportPlan:
    """Raise the errors of an export into `model_dir` that are known before it starts. Writes nothing.

    Returns:
        The plan, with the version that the export would be an overlay of.

    Raises:
        ConfigError: an option does not fit MODEL_DIR, or its base does not exist.
        ExportError: the version exists, or its tables have no room.
    """
    if options.base is not None:
        overlay, _ = _overlay_writer(request, plan, model_dir, options)
        if overlay is not None:
            overlay.check()
            return dataclasses.replace(plan, base=overlay.base.number)
    choose_writer(model_dir, plan, options, request.source).check()
    return plan


def make_plan(request: ExportRequest, options: ExportOptions) -> ExportPlan:
    """Return the plan of `request`."""
    check_layout(options.layout, options.serving_root)
    check_engine(options.engine)
    available = request.checkpoint.tables()
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
        read_buffers=request.checkpoint.read_buffer_bytes,
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


def _write_full(writer: VersionWriter, request: ExportRequest, on_progress: Progress) -> ExportReport:
    """Write a version with all rows."""
    writer.check()
    plan, options, source = writer.plan, writer.options, request.source
    engine = request.engine or choose_engine(options.engine, plan.workers)
    with writer, naming_model_dir(writer.model_dir), engine.starting(source, len(plan.shards)):
        _warn_of_unfinished(writer)
        graph = request.save_graph(plan, writer.path)  # while the workers start
        checked = _checking(plan, options)
        streamed = stream_tables(source, writer, engine, on_progress=on_progress, on_result=checked)
        return _publish(writer, request, streamed, graph)


def _write_overlay(writer: OverlayWriter, request: ExportRequest, on_progress: Progress) -> ExportReport | None:
    """Write an overlay, if not too many rows have changed since its base."""
    plan, options, base = writer.plan, writer.options, writer.base
    if base.manifest.layout != plan.layout:
        warn(
            f"base {base.number}: has layout {base.manifest.layout}, and the new version gets {plan.layout}. To keep the "
            f"base's, give layout={base.manifest.layout}."
        )
    writer.check()
    with writer, naming_model_dir(writer.model_dir):
        _warn_of_unfinished(writer)
        histories = _histories(request, plan)
        streamed = writer.changes(request, histories, _checking(plan, options), on_progress)
        if streamed is None:
            return None
        graph = request.save_graph(writer.plan, writer.path)
        save_full_graph(lambda folder: request.save_graph(plan, folder), writer.path)
        return _publish(writer, request, streamed, graph)


def _publish(writer: VersionWriter, request: ExportRequest, streamed: StreamReport, graph: SavedGraph) -> ExportReport:
    check_errors(streamed.errors, writer.options.max_error)
    check_unchanged(request.checkpoint, request.source)  # dense weights, and candidates, were read here
    plan, layout, source = writer.plan, writer.layout, request.source
    facts = {"path": source.path, "format": request.checkpoint.format, "fingerprint": source.fingerprint}
    manifest = assemble(writer.path, plan, layout, streamed, graph, facts, _histories(request, plan))
    path = cast("Path", writer.publish(lambda name: layout.settle(writer.path, manifest, name)))
    return ExportReport(
        path=path,
        version=int(path.name),
        tables=tuple(place.table for stack in plan.stacks for place in stack.tables),
        dropped_features=request.dropped_features,
        vocabularies=graph.vocabularies,
        bytes_written=streamed.bytes_written,
        bytes_reused=streamed.bytes_reused,
        errors=streamed.errors,
        stream_seconds=streamed.seconds,
        worker_peak_rss_bytes=streamed.worker_peak_rss_bytes,
        base=None if streamed.base is None else streamed.base.version,
        rows_changed=streamed.rows_changed,
        rows_compared=streamed.rows_compared,
        retrieval=graph.retrieval,
    )


def _checking(plan: ExportPlan, options: ExportOptions) -> Callable[[ShardResult], None]:
    """Return a function that checks the errors of each shard, so that a long export fails early."""

    def check_shard(result: ShardResult) -> None:
        task = plan.shards[result.index]
        max_abs = result.errors.get("max_abs", 0.0)
        check_errors({task.table: TableError(storage=task.storage, max_abs=max_abs)}, options.max_error)

    return check_shard


def _histories(request: ExportRequest, plan: ExportPlan) -> dict[str, HistoryEntry]:
    stamps = request.checkpoint.stamps
    return {
        place.table: HistoryEntry(spans=stamps[place.table].history.spans, updates=stamps[place.table].history.updates)
        for stack in plan.stacks
        for place in stack.tables
        if place.table in stamps
    }


def _overlay_writer(
    request: ExportRequest, plan: ExportPlan, model_dir: str | FilePath, options: ExportOptions
) -> tuple[OverlayWriter | None, str]:
    """Return the writer of an overlay of the base that `options` names; or None, and why there can be no overlay.

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
        return None, base
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
    reason = difference(plan, base)
    return (None, reason) if reason else (OverlayWriter(folder, plan, options, request.source, base), "")


def _warn_of_unfinished(writer: VersionWriter) -> None:
    for unfinished in writer.kept:
        warn(
            f"MODEL_DIR {writer.model_dir}: another unfinished export is in {unfinished}. Run that export again "
            "to resume it, or delete it. It is deleted automatically after 7 days.",
        )
