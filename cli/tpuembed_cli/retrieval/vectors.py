"""`tpuembed vectors`: vectors with their ids, for other systems."""

from typing import Any

import click

from tpuembed_cli.command import Command
from tpuembed_cli.options import PATH, checkpoint_options, complete_tables
from tpuembed_cli.output import print_json

__all__ = ["vectors"]


@click.command(
    cls=Command,
    short_help="Write vectors and their ids for another system.",
    examples=(
        "tpuembed vectors models/top --out films.parquet",
        "tpuembed vectors checkpoints/ckpt-1 --table videos --out videos.npy",
    ),
)
@click.argument("path", type=PATH)
@click.option(
    "--out",
    type=PATH,
    required=True,
    metavar="FILE",
    help="NAME.npy, beside NAME.ids.npy or NAME.ids.txt. Or NAME.parquet, with the columns id and vector.",
)
@click.option(
    "--table",
    metavar="NAME",
    shell_complete=complete_tables,
    help="The table. Default: the candidates of a retrieval, or the only table.",
)
@checkpoint_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def vectors(path: str, as_json: bool, **options: Any) -> None:
    """Write the candidates of the retrieval at PATH, or the rows of a table of a checkpoint or an export, with their ids."""
    from tpuembed.retrieval.vectors import write_vectors

    report = write_vectors(path, **options)
    if as_json:
        print_json(report.to_dict())
        return
    ids = "" if report.ids_path == report.path else f", ids in {report.ids_path}"
    click.echo(f"{report.path}: {report.count:,} vectors of width {report.dim}, {report.ids} ids{ids}")
