"""Export a checkpoint's tables, of any size, as a SavedModel for CPU servers: plan, stream, assemble.

This module holds the entry points; `run` holds the order of the steps. Importing it imports no TensorFlow.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tpuembed.checkpoint import open_checkpoint
from tpuembed.export.graph.roots import naming_roots
from tpuembed.export.options import ExportOptions
from tpuembed.export.plan.plan import DEFAULT_MAX_MEMORY_BYTES, ExportPlan
from tpuembed.export.plan.request import make_request
from tpuembed.export.plan.row_ranges import RowRanges
from tpuembed.export.report import ExportReport
from tpuembed.export.run import Progress, check_place, make_plan, run_export
from tpuembed.export.storage.choice import Storage
from tpuembed.files import FilePath

__all__ = ["ExportPlan", "ExportReport", "export_saved_model", "plan_saved_model"]


def export_saved_model(
    checkpoint: str | Path,
    model_dir: str | FilePath,
    *,
    serving_config: Any = None,
    model: Any = None,
    allow_unused_weights: bool = False,
    tables: Sequence[str] | None = None,
    features: Sequence[str] | None = None,
    output_names: Mapping[str, str] | None = None,
    rows: RowRanges | None = None,
    storage: Storage = "float32",
    max_error: float | None = None,
    layout: str = "variables",
    serving_root: str | None = None,
    max_memory_bytes: int = DEFAULT_MAX_MEMORY_BYTES,
    workers: int | None = None,
    engine: str = "local",
    ray_address: str | None = None,
    version: int | None = None,
    resume: bool = True,
    on_progress: Progress | None = None,
    checkpoint_options: Mapping[str, Any] | None = None,
) -> ExportReport:
    """Write `model_dir`/<version>/, a SavedModel that TensorFlow Serving, Python and the C API load.

    Worker processes that never import TensorFlow stream the tables from the checkpoint in bounded memory. On a disk,
    the version appears by one rename after every byte is flushed. In a store, `saved_model.pb` is written last, and
    only if the object does not exist yet.

    Args:
        checkpoint: a prefix, a directory, or any file or folder that a reader recognises.
        model_dir: a folder, created if it is missing, or s3://BUCKET/KEY, whose bucket exists.
        serving_config: the features to serve (see `tpuembed.ServingConfig`): YAML or JSON path, dict, or a nested
            structure of FeatureConfig. None: the features of the layer that wrote the checkpoint.
        model: exports a whole model instead of lookups. A function that builds the Keras model, or its name as
            "MODULE:FACTORY". Its `TPUEmbedding` layers allocate no tables. For a subclassed model, the function returns
            (model, specs of its inputs). Dense weights are restored from the checkpoint, by name.
        allow_unused_weights: for a model that is a part of the trained one: ignore saved weights that it does not have.
        tables: export only these tables, with the features that look up in them.
        features: export only these features, with the tables that they look up in. Not for a model, which needs its
            inputs.
        output_names: new names of a model's outputs, by their old names.
        rows: table -> (start, stop): export only rows [start, stop) of this table, under their own ids. Any other id is
            out of its vocabulary.
        storage: "float32", "bfloat16", "float16" or "int8" (codes with a scale and a centre per row), for all tables.
            Or by table, such as {"videos": "int8", "*": "bfloat16"}. "*" stands for all other tables, which are float32
            without it.
        max_error: fail if a stored value of a table differs by more than this from its float32 value; None for no
            bound.
        layout: "variables" loads the tables from any location. "mmap" maps them from files whose paths are in the
            graph.
        serving_root: for "mmap": the path of MODEL_DIR on the machine or in the container that serves it; None for
            `model_dir`.
        max_memory_bytes: bound on the buffers of all workers together.
        workers: processes that stream; None for one per processor.
        engine: "local", processes of this machine; or "ray", a Ray cluster whose nodes all see `checkpoint` and
            `model_dir` under the same paths.
        ray_address: HOST:PORT, "ray://..." or "auto". None for the cluster of RAY_ADDRESS, or a new one on this
            machine.
        version: None for the next free integer.
        resume: reuse the shards that an interrupted run of the same export finished in `model_dir`; False removes them.
        on_progress: called with (bytes done, bytes in total).
        checkpoint_options: further arguments of `open_checkpoint`.

    Raises:
        TpuEmbedError: the export failed, and nothing was published.
    """
    options = ExportOptions(
        rows=rows or {},
        storage=storage,
        max_error=max_error,
        layout=layout,
        serving_root=serving_root,
        max_memory_bytes=max_memory_bytes,
        workers=workers,
        engine=engine,
        ray_address=ray_address,
        version=version,
        resume=resume,
    )
    with (
        naming_roots(checkpoint, checkpoint_options, model),
        open_checkpoint(checkpoint, **(checkpoint_options or {})) as opened,
    ):
        request = make_request(
            opened, serving_config, model, tables, features, output_names, allow_unused_weights=allow_unused_weights
        )
        return run_export(opened, request, model_dir, options, on_progress=on_progress)


def plan_saved_model(
    checkpoint: str | Path,
    model_dir: str | FilePath | None = None,
    *,
    serving_config: Any = None,
    model: Any = None,
    allow_unused_weights: bool = False,
    tables: Sequence[str] | None = None,
    features: Sequence[str] | None = None,
    output_names: Mapping[str, str] | None = None,
    rows: RowRanges | None = None,
    storage: Storage = "float32",
    layout: str = "variables",
    serving_root: str | None = None,
    max_memory_bytes: int = DEFAULT_MAX_MEMORY_BYTES,
    workers: int | None = None,
    engine: str = "local",
    ray_address: str | None = None,
    version: int | None = None,
    resume: bool = True,
    checkpoint_options: Mapping[str, Any] | None = None,
) -> ExportPlan:
    """Return the plan of `export_saved_model` with the same arguments, and write nothing.

    Free disk space is checked only if `model_dir` is given.
    """
    options = ExportOptions(
        rows=rows or {},
        storage=storage,
        layout=layout,
        serving_root=serving_root,
        max_memory_bytes=max_memory_bytes,
        workers=workers,
        engine=engine,
        ray_address=ray_address,
        version=version,
        resume=resume,
    )
    with (
        naming_roots(checkpoint, checkpoint_options, model),
        open_checkpoint(checkpoint, **(checkpoint_options or {})) as opened,
    ):
        request = make_request(
            opened, serving_config, model, tables, features, output_names, allow_unused_weights=allow_unused_weights
        )
        plan = make_plan(opened, request, options)
        if model_dir is not None:
            check_place(opened, plan, model_dir, options)
    return plan
