"""Prints the results of commands, one JSON object, or lines and tables for people; and the progress of long ones."""

import base64
import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from tpuembed.errors import printable

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

__all__ = [
    "byte_progress",
    "json_name",
    "json_text",
    "print_json",
    "quoted_name",
    "table_of",
    "to_terminal",
    "with_unit",
]

_WIDE = 1000
_SECONDS_BETWEEN_LINES = 5.0
_LEAST_BYTES = 1e6
"""Progress is shown in megabytes."""
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


def quoted_name(name: bytes | int | None) -> str:
    """Return a name as Python writes it, so that it does nothing to a terminal. "-" for a row without one."""
    if isinstance(name, bytes):
        text = _text(name)
        return repr(name if text is None else text)
    return "-" if name is None else str(name)


def _text(name: bytes) -> str | None:
    try:
        return name.decode()
    except UnicodeDecodeError:
        return None


def json_name(name: bytes | int | None) -> Any:
    """Return a name as a JSON value. Bytes that are not UTF-8 are {"b64": ...}, as in TensorFlow Serving's REST API."""
    if not isinstance(name, bytes):
        return name
    text = _text(name)
    return {"b64": base64.b64encode(name).decode()} if text is None else text


def with_unit(size: float) -> str:
    """Format a number of bytes for people: 1.5 GB."""
    power = min(len(_UNITS) - 1, int(math.log10(size) / 3)) if size >= 1 else 0
    return f"{size / 1000**power:.{1 if power else 0}f} {_UNITS[power]}"


@contextlib.contextmanager
def byte_progress(label: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Return a context with a callback of (bytes done, total bytes). It shows them on stderr: a bar on a terminal, else lines.

    `quiet` shows nothing.
    """
    if quiet:
        yield lambda *_: None
    elif sys.stderr.isatty():
        with _bar(label) as update:
            yield update
    else:
        yield _Lines(label)


@contextlib.contextmanager
def _bar(label: str) -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = [TextColumn(label), BarColumn(), DownloadColumn(True), TransferSpeedColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


class _Lines:
    """Prints a line every few seconds. The rate counts from the first call of an export, without the bytes done before it."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._first: tuple[float, int] | None = None
        self._next, self._before = 0.0, 0  # set by the first call

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._first is None or done < self._before:  # the next of several exports
            self._first, self._next = (now, done), now + _SECONDS_BETWEEN_LINES
        self._before = done
        if now < self._next or total < _LEAST_BYTES:
            return
        self._next = now + _SECONDS_BETWEEN_LINES
        started, before = self._first
        rate = (done - before) / (now - started)
        left = (total - done) / rate if rate else 0.0
        click.echo(
            f"{self._label}: {done / 1e6:.0f} of {total / 1e6:.0f} MB, {rate / 1e6:.0f} MB/s, {left:.0f} s left",
            err=True,
        )
