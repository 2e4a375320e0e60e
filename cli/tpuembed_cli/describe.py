"""`tpuembed describe`: the content of a checkpoint or an export."""

from typing import TYPE_CHECKING, Any

import click

from tpuembed.errors import printable
from tpuembed_cli.command import Command
from tpuembed_cli.options import PATH
from tpuembed_cli.options import checkpoint_options as options
from tpuembed_cli.output import print_json, table_of, to_terminal, with_unit

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["describe"]


@click.command(
    cls=Command,
    short_help="Show what a checkpoint or an export contains.",
    examples=(
        "tpuembed describe checkpoints/ckpt-1",
        "tpuembed describe models/rec --json",
    ),
)
@click.argument("path", type=PATH)
@options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def describe(path: str, checkpoint_options: dict[str, Any], as_json: bool) -> None:
    """Show the tables of the checkpoint or the export at PATH, and the signatures of an export.

    PATH of an export is a version or MODEL_DIR, whose highest version is read.
    """
    from tpuembed.checkpoint.tools import describe_checkpoint, describe_export, find_export

    export = find_export(path)
    if export:
        found = describe_export(*export)
        tables = _export_tables(found)
    else:
        found = describe_checkpoint(path, checkpoint_options=checkpoint_options)
        tables = [_checkpoint_table(found)]
    if as_json:
        print_json(found)
    else:
        to_terminal(printable(f"{found['path']}: {found['format']}{_origin(found) if export else ''}"), *tables)


def _origin(found: dict[str, Any]) -> str:
    """Return the layout of an export, its base, the version of its writer, and its source."""
    source = found["source"]
    base = f", overlay of version {found['base']['version']}" if found["base"] else ""
    origin = f" from {source['path']} ({source['format']})" if {"path", "format"} <= source.keys() else ""
    stored = f", rows in Redis as model {found['row_store']['name']}" if found.get("row_store") else ""
    return f", layout {found['layout']}{base}{stored}, by tpuembed {found['tool_version']}{origin}"


def _checkpoint_table(found: dict[str, Any]) -> "Table":
    tracked = any("tracked_updates" in table for table in found["tables"])
    named = any("vocabulary" in table for table in found["tables"])
    rows = []
    for table in found["tables"]:
        row = {**table, "bytes": with_unit(table["bytes"])}
        updates, vocabulary = row.pop("tracked_updates", None), row.pop("vocabulary", None)
        said = "" if updates is None else f"rows tracked, {updates} updates"
        row |= {"tracking": said} if tracked else {}
        rows.append(row | ({"vocabulary": _vocabulary(vocabulary)} if named else {}))
    return table_of(f"tables ({with_unit(found['bytes'])})", rows)


def _vocabulary(header: dict[str, Any] | None) -> str:
    return "" if header is None else "{names} names, {dtype}, {oov_buckets} oov_buckets".format(**header)


def _export_tables(found: dict[str, Any]) -> list["Table"]:
    hidden = () if found["base"] else ("base_file", "overlay")
    rows = [
        {**table, "quantization": _levels(table["quantization"]), "bytes": with_unit(table["bytes"])}
        for table in found["tables"]
    ]
    stacks = [
        {
            **stack,
            "size": with_unit(stack["size"]),
            "crc32c": f"{stack['crc32c']:#010x}",
            "overlay": f"{stack['overlay']['rows']['rows']} rows" if stack["overlay"] else None,
        }
        for stack in found["stacks"]
    ]
    for row in (*rows, *stacks):
        for name in hidden:
            row.pop(name, None)
    size = "in Redis" if found.get("row_store") else with_unit(found["bytes"])
    tables = [table_of(f"tables ({size})", rows), table_of("stacks", stacks)]
    for name, signature in found["signatures"].items():
        rows = [
            {"": side[:-1], "name": key, **spec}
            for side in ("inputs", "outputs")
            for key, spec in signature[side].items()
        ]
        tables.append(table_of(f"signature {name}", rows))
    if found["retrieval"]:
        entry = {name: value for name, value in found["retrieval"].items() if name not in ("arrays", "recall")}
        tables.append(table_of("retrieval", [entry]))
        if recall := found["retrieval"]["recall"]:
            title = f"recall of {entry['k']}, measured on {entry['measured_on']}"
            rows = [{"partitions searched": nprobe, "recall": f"{share:.4f}"} for nprobe, share in recall]
            tables.append(table_of(title, rows))
    if found["vocabularies"]:
        tables.append(table_of("vocabularies", found["vocabularies"]))
    return tables


def _levels(quantization: dict[str, Any] | None) -> str | None:
    """Return the levels that a table's values were rounded to in training, as text."""
    return "{num_buckets} levels, {lower} to {upper}".format(**quantization) if quantization else None
