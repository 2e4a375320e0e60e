"""`tpuembed export`: options, one library call, its report."""

import contextlib
import json
from typing import Any

import click

from tpuembed.errors import UnknownObjectError
from tpuembed_cli.command import Command
from tpuembed_cli.options import (
    PATH,
    SIZE,
    checkpoint_options,
    output_names_option,
    rows_option,
    storage_option,
    verbosity_options,
)
from tpuembed_cli.progress import byte_progress
from tpuembed_cli.quiet import import_tensorflow, stdout_on_stderr

__all__ = ["export"]

_SECTIONS = {
    "What to export": [
        "--serving-config",
        "--model",
        "--allow-unused-weights",
        "--table",
        "--feature",
        "--output-name",
        "--rows",
        "--checkpoint-option",
    ],
    "How it is stored": ["--storage", "--max-error", "--layout", "--serving-root", "--version"],
    "How it runs": ["--max-memory", "--workers", "--engine", "--ray-address", "--resume"],
}


@click.command(
    cls=Command,
    short_help="Write a SavedModel of the tables of a checkpoint.",
    sections=_SECTIONS,
    api_names={"max_memory_bytes": "--max-memory", "serving_config": "serving_config"},
    examples=(
        "tpuembed export checkpoints/ckpt-1 models/rec",
        "tpuembed export checkpoints models/rec --model train:build",
        "tpuembed export ckpt-1 models/rec --table users --storage int8 --dry-run",
        "tpuembed export ckpt-1 s3://bucket/rec --layout mmap --serving-root /models/rec",
    ),
)
@click.argument("checkpoint", type=PATH)
@click.argument("model_dir", type=PATH)
@click.option(
    "--serving-config",
    type=PATH,
    metavar="FILE",
    help="Features to serve, as YAML or JSON. Default: the checkpoint's own.",
)
@click.option("--model", metavar="MODULE:FACTORY", help="Export the whole Keras model that FACTORY() builds.")
@click.option(
    "--allow-unused-weights",
    is_flag=True,
    help="With --model: ignore saved weights that the model does not have, as for fewer heads or one tower.",
)
@click.option(
    "--table",
    "tables",
    metavar="NAME",
    multiple=True,
    help="Export only this table and its features. Repeatable.",
)
@click.option(
    "--feature", "features", metavar="NAME", multiple=True, help="Export only this feature and its table. Repeatable."
)
@output_names_option
@rows_option
@storage_option
@click.option(
    "--max-error",
    type=click.FloatRange(min=0),
    metavar="X",
    help="Fail if a stored value would differ by more from its float32 value. Default: no bound.",
)
@click.option(
    "--layout",
    type=click.Choice(["variables", "mmap"]),
    default="variables",
    show_default=True,
    help="Load the tables, from any location; or map their files.",
)
@click.option(
    "--serving-root",
    metavar="ROOT",
    help="For mmap: MODEL_DIR as the server sees it. Default: its path on this machine; required for a store.",
)
@click.option(
    "--max-memory", type=SIZE, default="512MiB", show_default=True, help="Bound on all workers' buffers together."
)
@click.option("--workers", type=click.IntRange(min=1), help="Processes that stream. Default: one per processor.")
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="Processes of this machine, or a Ray cluster whose nodes all see CHECKPOINT and MODEL_DIR, or reach the store.",
)
@click.option(
    "--ray-address", metavar="ADDRESS", help="The cluster. Default: that of RAY_ADDRESS, or a new one on this machine."
)
@click.option("--version", type=click.IntRange(1, 2**63 - 1), help="Version to write. Default: the next free one.")
@click.option(
    "--resume/--restart",
    default=True,
    show_default=True,
    help="Resume an interrupted run of the same export, or remove what it finished.",
)
@checkpoint_options
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
@verbosity_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def export(
    checkpoint: str,
    model_dir: str,
    tables: tuple[str, ...],
    features: tuple[str, ...],
    max_memory: int,
    resume: bool,
    version: int | None,
    dry_run: bool,
    verbose: bool,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Write MODEL_DIR/<version>/, a SavedModel of CHECKPOINT's tables. MODEL_DIR is a folder, or s3://BUCKET/KEY.

    CHECKPOINT is a prefix such as ckpt-1, a directory (its latest), or any file of a checkpoint. The version appears by
    one rename when it is complete; in a store, saved_model.pb is written last.
    """
    request = {**options, "tables": tables or None, "features": features or None, "max_memory_bytes": max_memory}
    request |= {"model_dir": model_dir, "version": version, "resume": resume}
    with stdout_on_stderr():  # a model's code may print, and that must not mix with the report
        _check_without_tensorflow(checkpoint, request)
        import_tensorflow(verbose=verbose)
        text = _plan(checkpoint, request, as_json) if dry_run else _run(checkpoint, request, as_json, quiet)
    if as_json or dry_run or not quiet:
        click.echo(text)


def _check_without_tensorflow(checkpoint: str, request: dict[str, Any]) -> None:
    """Check everything that can be checked before TensorFlow's import takes seconds."""
    from tpuembed.checkpoint import open_checkpoint
    from tpuembed.export import plan_saved_model

    if request["model"] is None:
        plan_saved_model(checkpoint, **request)
    else:
        with contextlib.suppress(
            UnknownObjectError
        ):  # which the export raises too, with the objects that fit the model
            open_checkpoint(checkpoint, **request["checkpoint_options"]).close()


def _plan(checkpoint: str, request: dict[str, Any], as_json: bool) -> str:
    from tpuembed.export import plan_saved_model

    plan = plan_saved_model(checkpoint, **request)
    return json.dumps(plan.to_dict()) if as_json else plan.describe()


def _run(checkpoint: str, request: dict[str, Any], as_json: bool, quiet: bool) -> str:
    from tpuembed.export import export_saved_model

    with byte_progress("export", quiet=quiet) as on_progress:
        report = export_saved_model(checkpoint, on_progress=on_progress, **request)
    if report.dropped_features and not quiet:
        click.echo(f"Left out with their tables: {', '.join(report.dropped_features)}", err=True)
    if as_json:
        return json.dumps(report.to_dict())
    rate = (report.bytes_written - report.bytes_reused) / max(report.stream_seconds, 1e-9) / 1e6
    reused = f", {report.bytes_reused / 1e6:.1f} MB of it reused" if report.bytes_reused else ""
    return (
        f"{report.path}: {len(report.tables)} tables, {report.bytes_written / 1e6:.1f} MB in {report.seconds:.1f} s{reused} "
        f"(streamed in {report.stream_seconds:.2f} s, {rate:.0f} MB/s); peak memory {report.peak_rss_bytes / 1e6:.0f} MB, "
        f"workers {report.worker_peak_rss_bytes / 1e6:.0f} MB"
    ) + "".join(f"\n  {table}: {error}" for table, error in report.errors.items() if error.storage != "float32")
