"""`tpuembed versions`, `prune`, `compact` and `rollback`: what is in MODEL_DIR, what may go, and the way back."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import click

from tpuembed.errors import printable
from tpuembed_cli.command import Command
from tpuembed_cli.options import PATH, option_group
from tpuembed_cli.output import byte_progress, print_json, table_of, to_terminal, with_unit

__all__ = ["compact", "prune", "rollback", "versions"]

_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))

_uses = option_group(
    (
        click.option(
            "--config",
            "configs",
            type=click.Path(path_type=Path),
            metavar="FILE",
            multiple=True,
            help="A models.config: the versions that it selects or labels are in use. Repeatable.",
        ),
        click.option(
            "--server",
            "servers",
            metavar="URL",
            multiple=True,
            help="http://HOST:PORT of a running server: the versions that it has loaded are in use. Repeatable.",
        ),
        click.option(
            "--model",
            metavar="NAME",
            help="The model's name. Default: in a config, all models of MODEL_DIR; at a server, the name of that folder.",
        ),
        click.option(
            "--api-key-file",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Send the first key of this file to the servers.",
        ),
    )
)


@click.command(
    cls=Command,
    api_names={"api_key=": "--api-key-file", "api_key": "--api-key-file", "model=": "--model"},
    short_help="List the versions of a MODEL_DIR.",
    examples=(
        "tpuembed versions models/rec",
        "tpuembed versions models/rec --config models.config --json",
    ),
)
@click.argument("model_dir", type=PATH)
@_uses
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def versions(model_dir: str, as_json: bool, **uses: Any) -> None:
    """List the versions in MODEL_DIR, the oldest first, with their age and what they take on the disk.

    "own" are bytes that removing this version alone gives back; "shared" are hard links of other versions' files.
    """
    from tpuembed.export import list_versions
    from tpuembed_serving.models.in_use import find_uses

    found = list_versions(model_dir)
    used = find_uses(Path(model_dir), {info.version for info in found}, **_arguments(uses))
    rows = [
        {
            **info.to_dict(),
            "labels": [use.label for use in used if use.version == info.version and use.label],
            "used_by": [use.reason for use in used if use.version == info.version],
        }
        for info in found
    ]
    if as_json:
        print_json({"model_dir": model_dir, "versions": rows})
        return
    shown = [
        {
            "version": row["version"],
            "age": _age(row["age_seconds"]),
            "own": with_unit(row["bytes_own"]),
            "shared": with_unit(row["bytes_shared"]),
            "layout": "incomplete" if row["fault"] else row["layout"],
            "base": row["bases"],
            "labels": row["labels"],
            "used by": row["used_by"],
        }
        for row in rows
    ]
    to_terminal(printable(model_dir), table_of("versions", shown))
    for row in rows:
        if row["fault"]:
            click.echo(printable(f"Version {row['version']} is incomplete: {row['fault']}"), err=True)


@click.command(
    cls=Command,
    api_names={"api_key=": "--api-key-file", "api_key": "--api-key-file", "model=": "--model"},
    short_help="Remove old versions of a MODEL_DIR.",
    examples=(
        "tpuembed prune models/rec --dry-run",
        "tpuembed prune models/rec --keep 3 --config models.config",
        "tpuembed prune models/rec --server http://127.0.0.1:8501",
    ),
)
@click.argument("model_dir", type=PATH)
@click.option(
    "--keep", type=click.IntRange(min=1), default=2, show_default=True, help="How many of the newest to keep."
)
@_uses
@click.option("--dry-run", is_flag=True, help="Print what would be removed, and remove nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def prune(model_dir: str, keep: int, dry_run: bool, as_json: bool, **uses: Any) -> None:
    """Remove all versions in MODEL_DIR but the newest, those in use, and those whose files a kept version reads.

    A server that has already loaded a removed version can still serve it, but cannot load it again.
    """
    from tpuembed.export import prune_versions
    from tpuembed_serving import versions_in_use

    arguments = _arguments(uses)

    def in_use(found: Collection[int]) -> Mapping[int, str]:
        return versions_in_use(Path(model_dir), found, **arguments)

    report = prune_versions(model_dir, keep=keep, in_use=in_use, dry_run=dry_run)
    if as_json:
        print_json(report.to_dict())
        return
    for version, why in report.kept.items():
        click.echo(printable(f"keep {version}: {why}"))
    for version in report.removed:
        click.echo(f"{'would remove' if dry_run else 'removed'} {version}")
    count = "1 version" if len(report.removed) == 1 else f"{len(report.removed)} versions"
    click.echo(f"{count}, {with_unit(report.bytes_freed)} {'would be freed' if dry_run else 'freed'}")


@click.command(
    cls=Command,
    short_help="Publish an older version of a MODEL_DIR again.",
    examples=(
        "tpuembed rollback models/rec",
        "tpuembed rollback models/rec 7",
    ),
)
@click.argument("model_dir", type=PATH)
@click.argument("version", type=click.IntRange(min=1), required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def rollback(model_dir: str, version: int | None, as_json: bool) -> None:
    """Publish VERSION again as the next number, by hard links. Default: the version before the newest.

    Every server that follows the newest version then loads it. No version is removed, so the next rollback goes back to the version
    that was the newest.
    """
    from tpuembed.export import rollback_version

    report = rollback_version(model_dir, version)
    if as_json:
        print_json(report.to_dict())
        return
    click.echo(f"{report.path}: equals version {report.source}, and replaces version {report.newest}")


@click.command(
    cls=Command,
    short_help="Make a full version of an overlay.",
    examples=(
        "tpuembed compact models/rec",
        "tpuembed compact models/rec 7",
    ),
)
@click.argument("model_dir", type=PATH)
@click.argument("version", type=click.IntRange(min=1), required=False)
@click.option("--quiet", "-q", is_flag=True, help="Show warnings and errors only; --json still prints.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def compact(model_dir: str, version: int | None, quiet: bool, as_json: bool) -> None:
    """Publish the overlay VERSION again as a full version, under the next number. Default: the newest version.

    Its rows are streamed, and compared with the checksums of the export. Later exports with --base latest build on the
    new version.
    """
    from tpuembed.export import compact_version

    with byte_progress("compact", quiet=quiet) as on_progress:
        report = compact_version(model_dir, version, on_progress=on_progress)
    if as_json:
        print_json(report.to_dict())
    elif not quiet:
        reused = f", {with_unit(report.bytes_reused)} of it reused" if report.bytes_reused else ""
        click.echo(f"{report.path}: equals version {report.source}, {with_unit(report.bytes_written)}{reused}")


def _arguments(uses: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `versions_in_use`."""
    from tpuembed_serving.core.api_keys import read_keys

    path = uses["api_key_file"]
    named = {name: value for name, value in uses.items() if name != "api_key_file"}
    return {**named, "api_key": None if path is None else read_keys(path)[0].key}


def _age(seconds: float) -> str:
    """Return an age in its largest unit, such as "3 h"."""
    unit, size = next(((unit, size) for unit, size in _UNITS if seconds >= size), _UNITS[-1])
    return f"{int(seconds / size)} {unit}"
