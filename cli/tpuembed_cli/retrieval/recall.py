"""`tpuembed recall`: what a search of some partitions finds."""

from typing import Any

import click

from tpuembed_cli.command import Command
from tpuembed_cli.options import PATH, verbosity_options
from tpuembed_cli.output import print_json, to_terminal
from tpuembed_cli.quiet import import_tensorflow, stdout_on_stderr
from tpuembed_cli.retrieval.options import recall_table, report_line

__all__ = ["recall"]


@click.command(
    cls=Command,
    short_help="Measure what the search of a retrieval finds.",
    examples=(
        "tpuembed recall models/top",
        "tpuembed recall models/top --queries users.npy --min-recall 0.98",
    ),
)
@click.argument("export", type=PATH)
@click.option(
    "--queries",
    type=PATH,
    metavar="FILE",
    help="Inputs of the model: .npy, or .npz for several inputs. Default: 1,000 of the candidates.",
)
@click.option(
    "--min-recall",
    type=click.FloatRange(min=0, min_open=True, max=1),
    metavar="X",
    help="Write into EXPORT the least number of partitions that finds X of the best candidates.",
)
@verbosity_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def recall(export: str, queries: str | None, verbose: bool, quiet: bool, as_json: bool, **options: Any) -> None:
    """Measure the recall of EXPORT, a version or a MODEL_DIR: the share of the best candidates that a search finds, by the number
    of partitions that it reads.

    A server that has the version loaded reads as many as before until it loads it again.
    """
    from tpuembed.retrieval.recall import measure_recall

    if queries is not None:
        import_tensorflow(verbose=verbose)
    with stdout_on_stderr():
        report = measure_recall(export, queries=queries, **options)
    if as_json:
        print_json(report.to_dict())
        return
    if quiet:
        return
    entry = report.retrieval
    now = ", and reads them from now on" if report.changed else ""
    to_terminal(f"{report.path}: {report_line(entry)}{now}", recall_table(entry.recall, f"recall of {entry.k}"))
