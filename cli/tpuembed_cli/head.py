"""`tpuembed head`: rows of a table."""

import re
from typing import TYPE_CHECKING, Any

import click

from tpuembed_cli.command import Command
from tpuembed_cli.options import PATH, complete_tables
from tpuembed_cli.options import checkpoint_options as options
from tpuembed_cli.output import json_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tpuembed.checkpoint.tools import Rows

__all__ = ["RowRange", "head"]

_SHOWN = 8


class RowRange(click.ParamType[tuple[int, int]]):
    """Rows START:STOP."""

    name = "range"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """Return (first row, the row after the last)."""
        match = re.fullmatch(r"(\d{0,19}):(\d{1,19})", value, re.ASCII)
        if not match:
            self.fail(f"{value!r} is not a range of rows. Write START:STOP, such as 0:5.", param, ctx)
        return int(match[1] or 0), int(match[2])


@click.command(
    cls=Command,
    short_help="Print rows of a table.",
    examples=(
        "tpuembed head checkpoints/ckpt-1 users --rows 0:5",
        "tpuembed head models/rec users --json",
    ),
)
@click.argument("path", type=PATH)
@click.argument("table", shell_complete=complete_tables)
@click.option(
    "--rows", "row_range", type=RowRange(), metavar="START:STOP", help="Default: the first five existing rows."
)
@click.option("--slot", help="Rows of this optimizer slot, such as accumulators, instead.")
@options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, with every value of a row.")
def head(
    path: str,
    table: str,
    row_range: tuple[int, int] | None,
    slot: str | None,
    checkpoint_options: dict[str, Any],
    as_json: bool,
) -> None:
    """Print rows of TABLE in the checkpoint or the export at PATH, one per line. Long rows are cut after the first
    values.

    PATH of an export is a version or MODEL_DIR, whose highest version is read. Its int8 rows are decoded.
    """
    from tpuembed.checkpoint.tools import stream_rows

    start, stop = row_range or (None, None)
    pieces = stream_rows(path, table, start, stop, slot=slot, checkpoint_options=checkpoint_options)
    for text in _json_pieces(pieces) if as_json else map(_lines, pieces):
        click.echo(text, nl=False)


def _lines(rows: "Rows") -> str:
    return "".join(_line(number, row) for number, row in enumerate(rows.values, rows.start))


def _line(number: int, row: Any) -> str:
    more = f" ... ({len(row)} values)" if len(row) > _SHOWN else ""
    return f"{number}: {' '.join(str(value) for value in row[:_SHOWN])}{more}\n"


def _json_pieces(pieces: "Iterable[Rows]") -> "Iterator[str]":
    """Yield one JSON object in pieces. Numbers have the fewest digits that identify them in their dtype."""
    for number, rows in enumerate(pieces):
        about = {"table": rows.table, "slot": rows.slot, "start": rows.start, "dtype": str(rows.values.dtype)}
        values = json_text([[float(str(value)) for value in row] for row in rows.values])
        yield ", " if number else f'{json_text(about)[:-1]}, "values": ['
        yield values[1:-1]
    yield "]}\n"
