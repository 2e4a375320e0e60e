"""The options of `tpuembed export` for several servers, and what it does then."""

import json
from collections.abc import Mapping
from typing import Any, Final

import click

from tpuembed_cli.options import SIZE, option_group
from tpuembed_cli.output import byte_progress, with_unit

__all__ = ["SECTION", "run_shards", "shards_options", "shards_request"]


def _counts(_: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    found: dict[str, int] = {}
    for value in values:
        name, equals, count = value.rpartition("=")
        if not equals or not name or not count.isdecimal() or not int(count) or name in found:
            what, number = str(option.metavar).split("=")
            raise click.BadParameter(f"{value!r}: write {what}={number}, each {what.lower()} once, {number} at least 1")
        found[name] = int(count)
    return found


_OPTIONS: Final = (
    click.option(
        "--shards",
        type=click.IntRange(min=1),
        metavar="N",
        help="Write N folders below MODEL_DIR, each with some of the tables, and shards.yaml for `tpuembed serve --shards`. With "
        "--model also a folder with the rest of the model.",
    ),
    click.option(
        "--shard-bytes",
        type=SIZE,
        metavar="SIZE",
        help="As --shards, with as few folders as keep the tables of each within SIZE. Rows of a larger table are split.",
    ),
    click.option(
        "--split",
        metavar="TABLE=PARTS",
        multiple=True,
        callback=_counts,
        help="With --shards or --shard-bytes: split the rows of this table among PARTS folders. Repeatable.",
    ),
    click.option(
        "--ids-per-list",
        metavar="FEATURE=N",
        multiple=True,
        callback=_counts,
        help="With --shards or --shard-bytes: how many ids a list has on average, to balance lookups. Default: 1. Repeatable.",
    ),
)
SECTION: Final = ("--shards", "--shard-bytes", "--split", "--ids-per-list")
"""The flags of the options."""
_OTHERS: Final = {
    "tables": "--table",
    "features": "--feature",
    "rows": "--rows",
    "base": "--base",
}
"""Options of an export that one of shards does not take."""

shards_options = option_group(_OPTIONS)
"""Adds the options to a command."""


def shards_request(request: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the request without the options of shards, and these options; None if it is no export of shards.

    Raises:
        click.UsageError: an option is given that the kind of export does not have.
    """
    rest, own = dict(request), {}
    for name in ("shards", "shard_bytes", "split", "ids_per_list"):
        own[name] = rest.pop(name)
    if request["shards"] is None and request["shard_bytes"] is None:
        for name, flag in (("split", "--split"), ("ids_per_list", "--ids-per-list")):
            if request[name]:
                raise click.UsageError(f"{flag} needs --shards or --shard-bytes. Give one, or leave it out.")
        return rest, None
    if request["shards"] is not None and request["shard_bytes"] is not None:
        raise click.UsageError("--shards and --shard-bytes: give one of them.")
    given = [flag for name, flag in _OTHERS.items() if rest.get(name)]
    if rest.get("retrieve_from") is not None:
        given.append("--retrieve-from")
    if given:
        raise click.UsageError(
            f"{', '.join(given)}: not supported with --shards, which exports all tables and features."
        )
    return rest, own


def run_shards(
    checkpoint: str,
    request: Mapping[str, Any],
    shards: Mapping[str, Any],
    *,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
) -> str:
    """Export shards, or plan them, and return the report. `request` and `shards` are those of `shards_request`."""
    from tpuembed.export.sharding.export import export_shards, plan_shards

    taken = {name: value for name, value in request.items() if name not in {*_OTHERS, "model_dir"}}
    arguments: dict[str, Any] = {"folder": request["model_dir"], **taken, **shards}
    if dry_run:
        plan = plan_shards(checkpoint, **arguments)
        return json.dumps(plan.to_dict()) if as_json else plan.describe()
    with byte_progress("export", quiet=quiet) as on_progress:
        report = export_shards(checkpoint, on_progress=on_progress, **arguments)
    if as_json:
        return json.dumps(report.to_dict())
    lines = [f"{report.path}: version {report.version} of {len(report.shards)} shards"]
    for shard in report.shards:
        there = "" if shard.name in report.reports else ", there already"
        lines.append(f"  {shard.name}: {len(shard.tables)} tables, {with_unit(shard.bytes)}{there}")
    if report.front is not None:
        lines.append(f"  {report.front.name}: the model's other layers, {with_unit(report.front.bytes)} of tables")
    return "\n".join(lines)
