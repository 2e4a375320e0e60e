"""`tpuembed export`: options, one library call, its report."""

import contextlib
import json
from typing import Any

import click

from tpuembed.errors import UnknownObjectError
from tpuembed_cli.command import Command
from tpuembed_cli.options import (
    BASE,
    PATH,
    SIZE,
    checkpoint_options,
    storage_option,
    verbosity_options,
)
from tpuembed_cli.output import byte_progress, with_unit
from tpuembed_cli.quiet import import_tensorflow, stdout_on_stderr
from tpuembed_cli.retrieval import SECTION, report_line, retrieval_options, retrieval_request

__all__ = ["export"]

_SECTIONS = {
    "What to export": [
        "--serving-config",
        "--model",
        "--allow-unused-weights",
        "--table",
        "--feature",
        "--require-finite",
        "--checkpoint-option",
    ],
    "How it is stored": [
        "--storage",
        "--max-error",
        "--layout",
        "--serving-root",
        "--version",
        "--base",
        "--keep",
    ],
    "Retrieval": SECTION,
    "How it runs": ["--max-memory", "--workers", "--engine", "--resume"],
}


@click.command(
    cls=Command,
    short_help="Write a SavedModel of the tables of a checkpoint.",
    sections=_SECTIONS,
    api_names={
        "max_memory_bytes": "--max-memory",
        "serving_config": "serving_config",
        "a serving_config or a model": "--serving-config FILE or --model MODULE:FACTORY",
        "Give base too": "Give --base too",
        "Leave base out": "Leave --base out",
        "leave base out": "leave --base out",
        "Leave engine out": "Leave --engine out",
    },
    examples=(
        "tpuembed export checkpoints/ckpt-1 models/rec",
        "tpuembed export checkpoints models/rec --model train:build",
        "tpuembed export ckpt-1 models/rec --table users --storage int8 --dry-run",
        "tpuembed export checkpoints models/rec --require-finite --keep 3",
        "tpuembed export checkpoints models/rec --base latest",
        "tpuembed export ckpt-1 s3://bucket/rec --layout mmap --serving-root /models/rec",
        "tpuembed export ckpt-1 models/top --model train:query --retrieve-from train:candidates --k 50",
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
    help="With --model: ignore saved weights that the model does not have, such as those of another tower.",
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
@click.option("--require-finite", is_flag=True, help="Fail at a NaN or an infinity in a table or a dense weight.")
@storage_option
@click.option(
    "--max-error",
    type=click.FloatRange(min=0),
    metavar="X",
    help="Fail if a stored value would differ from its float32 value by more than X. Default: no bound.",
)
@click.option(
    "--layout",
    type=click.Choice(["variables", "mmap"]),
    default="variables",
    show_default=True,
    help="variables: the server loads the tables into memory. mmap: it maps their files.",
)
@click.option(
    "--serving-root",
    metavar="ROOT",
    help="For mmap: MODEL_DIR as the server sees it. Default: its path on this machine; required for a store.",
)
@click.option(
    "--max-memory",
    type=SIZE,
    default="512MiB",
    show_default=True,
    help="The most memory of all workers' buffers together.",
)
@click.option("--workers", type=click.IntRange(min=1), help="Processes that write tables. Default: one per processor.")
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="local: processes of this machine. ray: the Ray cluster of RAY_ADDRESS. Its nodes must all reach both paths.",
)
@click.option("--version", type=click.IntRange(1, 2**63 - 1), help="Version to write. Default: the next free one.")
@click.option(
    "--base",
    type=BASE,
    metavar="latest|N",
    help="Write an overlay of this version: link its files, and write only the rows that changed, if they are at most 15%.",
)
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    metavar="N",
    help="Afterwards remove all versions but the newest N. To keep those that servers use, see tpuembed prune.",
)
@click.option(
    "--resume/--restart",
    default=True,
    show_default=True,
    help="Resume an interrupted run of the same export, or remove what it finished.",
)
@retrieval_options
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
    request, retrieval = retrieval_request(request)
    if retrieval is not None and dry_run:
        raise click.UsageError(
            "--dry-run: an export with --retrieve-from has no plan before it has read the candidates."
        )
    with stdout_on_stderr():  # a model's code may print, and that must not mix with the report
        _check_without_tensorflow(checkpoint, request)
        import_tensorflow(verbose=verbose)
        text = _plan(checkpoint, request, as_json) if dry_run else _run(checkpoint, request, retrieval, as_json, quiet)
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


def _run(checkpoint: str, request: dict[str, Any], retrieval: dict[str, Any] | None, as_json: bool, quiet: bool) -> str:
    from tpuembed.export import export_saved_model
    from tpuembed.retrieval.export import export_retrieval

    export = export_saved_model if retrieval is None else export_retrieval
    with byte_progress("export", quiet=quiet) as on_progress:
        report = export(checkpoint, on_progress=on_progress, **(request if retrieval is None else retrieval))
    if report.dropped_features and not quiet:
        click.echo(f"Left out with their tables: {', '.join(report.dropped_features)}", err=True)
    if as_json:
        return json.dumps(report.to_dict())
    removed = f"\n  removed versions {', '.join(map(str, report.removed))}" if report.removed else ""
    if report.base is not None:
        return (
            f"{report.path}: overlay of version {report.base}: {report.rows_changed:,} rows changed, "
            f"{with_unit(report.bytes_written - report.bytes_reused)} of rows written beside "
            f"{with_unit(report.bytes_reused)} linked, in {report.seconds:.1f} s{removed}"
        )
    rate = (report.bytes_written - report.bytes_reused) / max(report.stream_seconds, 1e-9) / 1e6
    reused = f", {with_unit(report.bytes_reused)} of it reused" if report.bytes_reused else ""
    return (
        (
            f"{report.path}: {len(report.tables)} tables, {with_unit(report.bytes_written)} in {report.seconds:.1f} s{reused} "
            f"(streamed in {report.stream_seconds:.2f} s, {rate:.0f} MB/s); peak memory {report.peak_rss_bytes / 1e6:.0f} MB, "
            f"workers {report.worker_peak_rss_bytes / 1e6:.0f} MB"
        )
        + (f"\n  {report_line(report.retrieval)}" if report.retrieval else "")
        + "".join(f"\n  {table}: {error}" for table, error in report.errors.items() if error.storage != "float32")
        + removed
    )
