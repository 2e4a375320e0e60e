"""Progress of long work: a bar on a terminal, plain lines elsewhere; always on stderr."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

import click

__all__ = ["byte_progress"]

_SECONDS_BETWEEN_LINES = 5.0


@contextlib.contextmanager
def byte_progress(label: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Return a context with a callback of (bytes done, total bytes). `quiet` shows nothing."""
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
    """Prints a line every few seconds. The rate counts from the first call, without the bytes done before it."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._first: tuple[float, int] | None = None
        self._next = 0.0  # set by the first call

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first, self._next = (now, done), now + _SECONDS_BETWEEN_LINES
        if now < self._next:
            return
        self._next = now + _SECONDS_BETWEEN_LINES
        started, before = self._first
        rate = (done - before) / (now - started)
        left = (total - done) / rate if rate else 0.0
        click.echo(
            f"{self._label}: {done / 1e6:.0f} of {total / 1e6:.0f} MB, {rate / 1e6:.0f} MB/s, {left:.0f} s left",
            err=True,
        )
