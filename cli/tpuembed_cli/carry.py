"""`tpuembed carry`: a checkpoint whose rows are at the numbers of another vocabulary."""

from typing import TYPE_CHECKING, Any

import click

from tpuembed.errors import printable
from tpuembed_cli.command import Command
from tpuembed_cli.options import PATH
from tpuembed_cli.options import checkpoint_options as options
from tpuembed_cli.output import byte_progress, json_name, print_json, quoted_name

if TYPE_CHECKING:
    from tpuembed.checkpoint.tools import CarryReport

__all__ = ["carry"]


@click.command(
    cls=Command,
    short_help="Write a checkpoint anew for another vocabulary.",
    examples=(
        "tpuembed carry monday/ckpt-9 tuesday/films.txt tuesday/ckpt-0",
        "tpuembed carry monday/ckpt-9 films.vocabulary out/ckpt --table films --initializer zeros",
    ),
)
@click.argument("checkpoint", type=PATH)
@click.argument("vocabulary", type=PATH, metavar="NEW_VOCABULARY")
@click.argument("out", type=PATH)
@click.option("--table", help="The table. Default: the one that has a vocabulary.")
@click.option(
    "--initializer",
    type=click.Choice(["default", "zeros", "ones"]),
    default="default",
    show_default=True,
    help="Values of the rows of new names. Checkpoints do not have the layer's initializer.",
)
@options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def carry(
    checkpoint: str,
    vocabulary: str,
    out: str,
    table: str | None,
    initializer: str,
    checkpoint_options: dict[str, Any],
    as_json: bool,
) -> None:
    """Write CHECKPOINT, a TensorFlow checkpoint, to OUT, with the rows and slots of a table at the numbers that NEW_VOCABULARY
    gives their names.

    NEW_VOCABULARY is a text file with one name a line, or a file of a saved Vocabulary. OUT is a prefix, such as out/ckpt-1.
    A table with too few rows grows. Everything else in the checkpoint stays as it is.
    """
    from tpuembed.checkpoint.tools import carry_checkpoint

    with byte_progress("carry") as on_progress:
        report = carry_checkpoint(
            checkpoint,
            vocabulary,
            out,
            table=table,
            initializer=initializer,
            checkpoint_options=checkpoint_options,
            on_progress=on_progress,
        )
    if as_json:
        print_json(_to_dict(report))
    else:
        _print(report)


def _to_dict(report: "CarryReport") -> dict[str, Any]:
    names = report.names
    return {
        "path": report.path,
        "table": report.table,
        "rows": report.rows,
        "kept": names.kept,
        "new": names.new,
        "dropped": names.dropped,
        "new_names": [json_name(name) for name in names.new_names],
        "dropped_names": [json_name(name) for name in names.dropped_names],
        "buckets": names.buckets,
    }


def _print(report: "CarryReport") -> None:
    names = report.names
    rows = f"{report.rows[1]} rows" if report.rows[0] == report.rows[1] else "{} rows, now {}".format(*report.rows)
    counts = f"{names.kept} names kept, {names.new} new, {names.dropped} dropped"
    click.echo(printable(f"{report.path}: table {report.table}: {counts}; {rows}"))
    for what, count, examples in (("new", names.new, names.new_names), ("dropped", names.dropped, names.dropped_names)):
        more = f" and {count - len(examples)} more" if count > len(examples) else ""
        if examples:
            click.echo(f"{what}: {', '.join(map(quoted_name, examples))}{more}")
    if names.buckets[0] != names.buckets[1]:
        click.echo(
            "rows of unknown names: initial values, because the vocabularies have {} and {}".format(*names.buckets)
        )
