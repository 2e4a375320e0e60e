"""Export = plan -> stream -> assemble: a CPU-servable SavedModel of a checkpoint's tables, of any size.

`run` is the order of the steps; this module is how they are asked for. Importing it imports no TensorFlow.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tpuembed.checkpoint import open_checkpoint
from tpuembed.export.options import ExportOptions
from tpuembed.export.plan import DEFAULT_MAX_MEMORY_BYTES, ExportPlan
from tpuembed.export.report import ExportReport
from tpuembed.export.request import make_request
from tpuembed.export.roots import naming_roots
from tpuembed.export.row_ranges import RowRanges
from tpuembed.export.run import Progress, check_place, make_plan, run_export
from tpuembed.export.storage_choice import Storage
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

    The tables are streamed from the checkpoint by processes that never import TensorFlow, in bounded memory; the version
    appears by one rename when every byte of it is on the disk. In a store, `saved_model.pb` is written last, if no other is there.

    Args:
        checkpoint: a prefix, a directory, or any file or folder that a reader recognises.
        model_dir: a folder, made where missing, or s3://BUCKET/KEY, whose bucket exists.
        serving_config: what to answer (see `tpuembed.ServingConfig`): YAML or JSON path, dict, or a nested structure of
            FeatureConfig. None: the features of the layer that wrote the checkpoint.
        model: for a whole model instead of lookups: a function that builds the Keras model (its `TPUEmbedding` layers then
            allocate no tables), or its name as "MODULE:FACTORY". Of a subclassed model it returns (model, its inputs' specs).
            Dense weights are restored from the checkpoint, by name.
        allow_unused_weights: for a model that is a part of the trained one: leave saved weights out that it has no place for.
        tables: export these only, with the features that look up in them.
        features: export these only, with the tables that they look up in. Not for a model, which needs its inputs.
        output_names: new names of a model's outputs by their old ones.
        rows: table -> (start, stop): of this table, only rows [start, stop), under their own ids; any other id is out of its
            vocabulary.
        storage: "float32", "bfloat16", "float16" or "int8" (codes with a scale and a centre per row), for all tables; or by
            table, as {"videos": "int8", "*": "bfloat16"}, where "*" is all others, float32 without it.
        max_error: refuse to publish where a value of a table would differ by more from what float32 gives; None for no bound.
        layout: "variables" is loaded, from wherever it lies; "mmap" is mapped from its files, whose paths its graph knows.
        serving_root: for "mmap": MODEL_DIR as the machine or container that serves it sees it; None for `model_dir` itself.
        max_memory_bytes: bound on the buffers of all workers together.
        workers: processes that stream; None for one per processor.
        engine: "local", processes of this machine; or "ray", a Ray cluster, all of whose nodes see `checkpoint` and
            `model_dir` under the same paths.
        ray_address: HOST:PORT, "ray://..." or "auto"; None for the cluster of RAY_ADDRESS, or else a new one on this machine.
        version: None for the next free integer.
        resume: go on with what the same export has finished in `model_dir` before it was killed or failed; False: remove it.
        on_progress: called with (bytes done, bytes in all).
        checkpoint_options: what `open_checkpoint` takes beside the path.

    Raises:
        TpuEmbedError: nothing was published; the message says what to change.
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
    """What `export_saved_model` would write: the dry run, which writes nothing. The arguments are the same.

    Without a `model_dir`, nobody looks whether the disk has room.
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
