"""Reads a few rows of a table of a checkpoint or of an export."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from tpuembed.checkpoint.tools.exports import first_row, open_tables
from tpuembed.checkpoint.types import Array
from tpuembed.files import FilePath

__all__ = ["Rows", "read_rows", "stream_rows"]

_DEFAULT_ROWS: Final = 5
_PIECE_BYTES: Final = 4 << 20
_MAX_ROWS: Final = 1 << 16
"""Rows to read at a time if they have no columns."""


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Rows [start, start + len(values)) of a table, or of one of its slots.

    Attributes:
        table, slot: the table and slot; slot None is the table itself.
        start: the first row's number.
        values: [n, dim], of the table's dtype.
    """

    table: str
    slot: str | None
    start: int
    values: Array


def read_rows(
    path: str | FilePath,
    table: str,
    start: int | None = None,
    stop: int | None = None,
    *,
    slot: str | None = None,
    checkpoint_options: Mapping[str, Any] | None = None,
) -> Rows:
    """Read rows [start, stop) of a table in the checkpoint or the export at `path`.

    Args:
        path: as for `open_checkpoint`; or a version of an export, or a MODEL_DIR, whose highest version is read.
        table: its name.
        start: None is the first existing row, which is above 0 if an export has only some rows of the table.
        stop: None is five rows after `start`, or the table's end.
        slot: one of the table's slots instead.
        checkpoint_options: further arguments of `open_checkpoint`.

    Raises:
        UnknownTableError: there is no such table or slot.
        RowRangeError: the range is not inside the table.
        TpuEmbedError: as `open_checkpoint`.
    """
    pieces = list(stream_rows(path, table, start, stop, slot=slot, checkpoint_options=checkpoint_options))
    return dataclasses.replace(pieces[0], values=np.concatenate([piece.values for piece in pieces]))


def stream_rows(
    path: str | FilePath,
    table: str,
    start: int | None = None,
    stop: int | None = None,
    *,
    slot: str | None = None,
    checkpoint_options: Mapping[str, Any] | None = None,
) -> Iterator[Rows]:
    """Yield the rows of `read_rows`, a few megabytes at a time. There is at least one piece, which may have no rows.

    Raises:
        UnknownTableError, RowRangeError, TpuEmbedError: as `read_rows`, and before the first piece.
    """
    with open_tables(path, checkpoint_options or {}) as checkpoint:
        info = checkpoint.tables().get(table)
        start = first_row(checkpoint, table) if start is None else start
        rows = 0 if info is None else info.rows
        stop = max(start, min(start + _DEFAULT_ROWS, rows)) if stop is None else stop
        if info is None or not 0 <= start <= stop <= rows:
            checkpoint.read(table, start, stop, slot)  # raises the error
        step = max(1, _PIECE_BYTES // (info.dim * info.dtype.itemsize)) if info and info.dim else _MAX_ROWS
        for first in range(start, max(stop, start + 1), step):
            yield Rows(table, slot, first, checkpoint.read(table, first, min(first + step, stop), slot))
