"""Finds a range of a table's rows in a stored array, as runs of rows that are adjacent in the file."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from tpuembed.checkpoint.bundle.mod_sharded import ModSharded

__all__ = ["Run", "contiguous_run", "mod_sharded_runs", "split_run"]


@dataclasses.dataclass(frozen=True)
class Run:
    """A copy of `rows` stored rows from `source` on to rows `target`, `target + step`, ... of the output."""

    source: int
    rows: int
    target: int
    step: int


def contiguous_run(start: int, stop: int) -> Iterator[Run]:
    """Yield the run of the rows [start, stop) of a table that is stored row by row."""
    if start < stop:
        yield Run(start, stop - start, 0, 1)


def mod_sharded_runs(table: ModSharded, start: int, stop: int) -> Iterator[Run]:
    """Yield the runs of the rows [start, stop) of a mod-sharded table: one per part that has any of them."""
    rows = np.arange(start, min(stop, start + table.count))
    groups, parts = np.divmod(rows, table.count)
    for row, source in zip(rows.tolist(), (table.first_rows(parts) + groups).tolist(), strict=True):
        yield Run(source, (stop - 1 - row) // table.count + 1, row - start, table.count)


def split_run(run: Run, size: int) -> Iterator[Run]:
    """Yield `run` in pieces, cut where a stored row is a multiple of `size`."""
    done = 0
    while done < run.rows:
        source = run.source + done
        rows = min(run.rows - done, size - source % size)
        yield Run(source, rows, run.target + done * run.step, run.step)
        done += rows
