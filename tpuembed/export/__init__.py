"""Export a checkpoint's tables, of any size, as a SavedModel for CPU servers: plan, stream, assemble.

This module holds the entry points; `run` holds the order of the steps. Importing it imports no TensorFlow.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tpuembed.checkpoint import open_checkpoint
from tpuembed.export.options import ExportOptions
from tpuembed.export.overlay.compact import CompactReport, compact_version
from tpuembed.export.plan.plan import ExportPlan
from tpuembed.export.report import ExportReport
from tpuembed.export.request import make_request
from tpuembed.export.retention.listing import VersionInfo, list_versions
from tpuembed.export.retention.prune import InUse, PruneReport, prune_versions
from tpuembed.export.retention.rollback import RollbackReport, rollback_version
from tpuembed.export.run import Progress, check_target, make_plan, run_export, source_of
from tpuembed.files import FilePath

__all__ = [
    "CompactReport",
    "ExportOptions",
    "ExportPlan",
    "ExportReport",
    "InUse",
    "PruneReport",
    "RollbackReport",
    "VersionInfo",
    "compact_version",
    "export_saved_model",
    "list_versions",
    "plan_saved_model",
    "prune_versions",
    "rollback_version",
]

_ASKED = ("serving_config", "model", "tables", "features", "allow_unused_weights")


def export_saved_model(
    checkpoint: str | Path,
    model_dir: str | FilePath,
    *,
    serving_config: Any = None,
    model: Any = None,
    allow_unused_weights: bool = False,
    tables: Sequence[str] | None = None,
    features: Sequence[str] | None = None,
    on_progress: Progress | None = None,
    checkpoint_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> ExportReport:
    """Write `model_dir`/<version>/, a SavedModel that TensorFlow Serving, Python and the C API load.

    Worker processes that never import TensorFlow stream the tables from the checkpoint in bounded memory. On a disk,
    the version appears by one rename after every byte is flushed. In a store, `saved_model.pb` is written last, and
    only if the object does not exist yet.

    Args:
        checkpoint: a prefix, a directory, or any file or folder that a reader recognises. Or a model in memory, on any
            backend: a Keras model with `TPUEmbedding` layers, (a subclassed model, specs of its inputs), or a `TPUEmbedding` for
            lookups alone. It does not change. If another thread trains it meanwhile, the export fails. It takes no `engine`,
            `model`, `allow_unused_weights` or `checkpoint_options`, and `tables` and `features` only for a layer.
        model_dir: a folder, created if it is missing, or s3://BUCKET/KEY, whose bucket exists.
        serving_config: the features to serve (see `tpuembed.config.ServingConfig`): YAML or JSON path, dict, or a nested
            structure of FeatureConfig. None: the features of the layer that wrote the checkpoint.
        model: exports a whole model instead of lookups. A function that builds the Keras model, or its name as
            "MODULE:FACTORY". Its `TPUEmbedding` layers allocate no tables. For a subclassed model, the function returns
            (model, specs of its inputs). Dense weights are restored from the checkpoint, by name.
        allow_unused_weights: for a model that is a part of the trained one: ignore saved weights that it does not have.
        tables: export only these tables, with the features that look up in them.
        features: export only these features, with the tables that they look up in. Not for a model, which needs its
            inputs.
        on_progress: called with (bytes done, bytes in total).
        checkpoint_options: further arguments of `open_checkpoint`.
        options: how to write: storage, max_error, layout, serving_root, max_memory_bytes, workers, engine,
            require_finite, version, base, keep and resume. See `tpuembed.export.ExportOptions`.

    Raises:
        TpuEmbedError: the export failed, and nothing was published.
    """
    chosen = ExportOptions.of("export_saved_model", options, others=_ASKED)
    with open_checkpoint(checkpoint, **(checkpoint_options or {})) as opened:
        source = source_of(opened)  # before anything is read
        request = make_request(
            opened, source, serving_config, model, tables, features, allow_unused_weights=allow_unused_weights
        )
        return run_export(request, model_dir, chosen, on_progress)


def plan_saved_model(
    checkpoint: str | Path,
    model_dir: str | FilePath | None = None,
    *,
    checkpoint_options: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> ExportPlan:
    """Return the plan of `export_saved_model` with the same arguments but `on_progress`, and write nothing.

    Free disk space is checked only if `model_dir` is given.
    """
    asked = {name: arguments.pop(name) for name in _ASKED if name in arguments}
    chosen = ExportOptions.of("plan_saved_model", arguments, others=_ASKED)
    with open_checkpoint(checkpoint, **(checkpoint_options or {})) as opened:
        request = make_request(opened, source_of(opened), **asked)
        plan = make_plan(request, chosen)
        return plan if model_dir is None else check_target(request, plan, model_dir, chosen)
