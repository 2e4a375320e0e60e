"""`tpuembed verify`: checks every checksum of a checkpoint or an export."""

from typing import TYPE_CHECKING, Any

import click

from tpuembed.errors import CheckpointCorruptError, printable
from tpuembed_cli.command import Command
from tpuembed_cli.options import PATH
from tpuembed_cli.options import checkpoint_options as options
from tpuembed_cli.output import byte_progress, print_json, with_unit

if TYPE_CHECKING:
    from tpuembed.checkpoint.tools import VerifyReport

__all__ = ["verify"]


@click.command(
    cls=Command,
    short_help="Compare a checkpoint or an export with its checksums.",
    examples=(
        "tpuembed verify checkpoints/ckpt-1",
        "tpuembed verify models/rec/1",
    ),
)
@click.argument("path", type=PATH)
@options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def verify(path: str, checkpoint_options: dict[str, Any], as_json: bool) -> None:
    """Read the checkpoint or export at PATH and compare it with its checksums.

    Prints a line for every damaged tensor, and exits with 1 if there is one. Also lists what has no checksum.
    """
    from tpuembed.checkpoint.tools import verify_files

    with byte_progress("verify") as on_progress:
        report = verify_files(path, checkpoint_options=checkpoint_options, on_progress=on_progress)
    if as_json:
        print_json(report.to_dict())
    else:
        _print(report)
    if report.damaged:
        raise CheckpointCorruptError(
            f"{report.path}: {len(report.damaged)} of {report.entries} entries are damaged. Restore it from "
            "another copy."
        )


def _print(report: "VerifyReport") -> None:
    for damage in report.damaged:
        click.echo(printable(f"{damage.file}: {damage.name}: {damage.reason}"))
    for note in report.unchecked:
        click.echo(printable(f"Not checked: {note}"), err=True)
    if not report.damaged:
        click.echo(f"{report.path}: {report.entries} entries read, {with_unit(report.bytes)}, no damage found")
