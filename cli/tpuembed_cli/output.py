"""Prints the results of commands: one JSON object, or lines and tables for people."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from tpuembed.errors import printable

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

__all__ = ["json_text", "print_json", "table_of", "to_terminal", "with_unit"]

_WIDE = 1000
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def print_json(value: Any) -> None:
    """Print one object in one line."""
    click.echo(json_text(value))


def json_text(value: Any) -> str:
    """Return JSON in one line. NaN and infinities become strings, because JSON has no numbers for them."""
    return json.dumps(_as_json(value), allow_nan=False)


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def to_terminal(line: str, *tables: "Table") -> None:
    """Print a line of text, and tables under it."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDE)  # do not fold lines in a file or a pipe
    console.print(line, markup=False, highlight=False, soft_wrap=True)
    for table in tables:
        fits = console.measure(table, options=console.options.update(width=_WIDE)).minimum <= console.width
        console.print(table if fits else _as_lines(table), soft_wrap=not fits)


def _as_lines(table: "Table") -> "Text":
    """Return the table as a line for every cell, for terminals that are too narrow for its columns."""
    from rich.text import Text

    cells = [[(str(column.header), str(cell)) for cell in column.cells] for column in table.columns]
    rows = ("\n".join(": ".join(filter(None, cell)) for cell in row) for row in zip(*cells, strict=True))
    return Text("\n\n".join([str(table.title), *rows]))


def table_of(title: str, rows: Sequence[Mapping[str, Any]]) -> "Table":
    """Return a table of `rows`, which have the same keys, with the keys as its header."""
    from rich.table import Table
    from rich.text import Text

    grid = Table(title=Text(title), title_justify="left")
    for column in rows[0] if rows else ():
        grid.add_column(column, overflow="fold")
    for row in rows:
        grid.add_row(*(Text(_cell(value)) for value in row.values()))
    return grid


def _cell(value: Any) -> str:
    if isinstance(value, list | tuple):
        return printable(", ".join("?" if item is None else str(item) for item in value)) or "-"
    return "-" if value is None or value == "" else printable(str(value))


def with_unit(size: float) -> str:
    """Format a number of bytes for people: 1.5 GB."""
    power = min(len(_UNITS) - 1, int(math.log10(size) / 3)) if size >= 1 else 0
    return f"{size / 1000**power:.{1 if power else 0}f} {_UNITS[power]}"
