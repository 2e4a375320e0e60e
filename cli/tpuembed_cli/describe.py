"""`tpuembed describe`: what a checkpoint or an export holds."""

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from tpuembed.errors import printable
from tpuembed_cli.options import checkpoint_options as options
from tpuembed_cli.output import print_json, table_of, to_terminal, with_unit

if TYPE_CHECKING:
    from rich.table import Table

    from tpuembed.checkpoint.tools import CheckpointDescription

__all__ = ["describe"]


@click.command()
@click.argument("path")
@options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def describe(path: str, checkpoint_options: dict[str, Any], as_json: bool) -> None:
    """Tables of the checkpoint at PATH, or tables and signatures of the export at PATH (a version, or a MODEL_DIR)."""
    from tpuembed.checkpoint.tools import describe_checkpoint, find_export

    export = find_export(path)
    if export:
        version, manifest = export
        found = {"path": str(version), "format": "export", **dataclasses.asdict(manifest)}
        tables = _export_tables(found)
    else:
        description = describe_checkpoint(path, checkpoint_options=checkpoint_options)
        found = description.to_dict()
        tables = [_checkpoint_table(description)]
    if as_json:
        print_json(found)
    else:
        to_terminal(printable(f"{found['path']}: {found['format']}"), *tables)


def _checkpoint_table(description: "CheckpointDescription") -> "Table":
    rows = [{**dataclasses.asdict(table), "bytes": with_unit(table.bytes)} for table in description.tables]
    return table_of(f"tables ({with_unit(description.bytes)})", rows)


def _export_tables(found: dict[str, Any]) -> list["Table"]:
    tables = [table_of("tables", list(found["tables"]))]
    for name, signature in found["signatures"].items():
        rows = [
            {"": side[:-1], "name": key, **spec}
            for side in ("inputs", "outputs")
            for key, spec in signature[side].items()
        ]
        tables.append(table_of(f"signature {name}", rows))
    return tables
