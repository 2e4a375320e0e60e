"""`tpuembed head`: rows of a table."""

import os
import re
from typing import TYPE_CHECKING, Any

import click

from tpuembed_cli.command import Command
from tpuembed_cli.options import PATH, complete_tables
from tpuembed_cli.options import checkpoint_options as options
from tpuembed_cli.output import json_name, json_text, quoted_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tpuembed.checkpoint.tools import Rows

__all__ = ["head"]

_SHOWN = 8


class _RowRange(click.ParamType[tuple[int, int]]):
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
        "tpuembed head checkpoints/ckpt-1 films --names",
        "tpuembed head checkpoints/ckpt-1 films --name Alien --name Aliens",
    ),
)
@click.argument("path", type=PATH)
@click.argument("table", shell_complete=complete_tables)
@click.option(
    "--rows", "row_range", type=_RowRange(), metavar="START:STOP", help="Default: the first five existing rows."
)
@click.option("--slot", help="Rows of this optimizer slot, such as accumulators, instead.")
@click.option("--names", is_flag=True, help="Print the names of the rows too, of a table with a vocabulary.")
@click.option("--name", "chosen", multiple=True, metavar="NAME", help="The row of this name. May be repeated.")
@options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, with every value of a row.")
def head(
    path: str,
    table: str,
    row_range: tuple[int, int] | None,
    slot: str | None,
    names: bool,
    chosen: tuple[str, ...],
    checkpoint_options: dict[str, Any],
    as_json: bool,
) -> None:
    """Print rows of TABLE in the checkpoint or the export at PATH, one per line. Long rows are cut after the first
    values.

    PATH of an export is a version or MODEL_DIR, whose highest version is read. Its int8 rows are decoded. Names are quoted
    as in Python.
    """
    from tpuembed.checkpoint.tools import stream_named_rows, stream_rows

    if chosen and row_range:
        raise click.UsageError("--name and --rows choose different rows. Give one of them.")
    start, stop = row_range or (None, None)
    if chosen:
        wanted = [os.fsencode(name) for name in chosen]
        pieces = stream_named_rows(path, table, wanted, slot=slot, checkpoint_options=checkpoint_options)
    else:
        pieces = stream_rows(path, table, start, stop, slot=slot, names=names, checkpoint_options=checkpoint_options)
    for text in _json_pieces(pieces) if as_json else map(_lines, pieces):
        click.echo(text, nl=False)


def _lines(rows: "Rows") -> str:
    numbers = rows.numbers or range(rows.start, rows.start + len(rows.values))
    names = [""] * len(rows.values) if rows.names is None else [f" {quoted_name(name)}" for name in rows.names]
    return "".join(map(_line, numbers, names, rows.values))


def _line(number: int, name: str, row: Any) -> str:
    more = f" ... ({len(row)} values)" if len(row) > _SHOWN else ""
    return f"{number}{name}: {' '.join(str(value) for value in row[:_SHOWN])}{more}\n"


def _json_pieces(pieces: "Iterable[Rows]") -> "Iterator[str]":
    """Yield one JSON object in pieces. Numbers have the fewest digits that identify them in their dtype."""
    names: list[Any] = []
    numbers: list[int] = []
    asked: dict[str, Any] = {}
    for number, rows in enumerate(pieces):
        about = {"table": rows.table, "slot": rows.slot, "start": rows.start, "dtype": str(rows.values.dtype)}
        if rows.names is not None:
            asked["names"] = names
            names += map(json_name, rows.names)
        if rows.numbers is not None:
            asked["rows"] = numbers
            numbers += rows.numbers
            del about["start"]
        values = json_text([[float(str(value)) for value in row] for row in rows.values])
        yield ", " if number else f'{json_text(about)[:-1]}, "values": ['
        yield values[1:-1]
    yield "]" + "".join(f', "{key}": {json_text(value)}' for key, value in asked.items()) + "}\n"
