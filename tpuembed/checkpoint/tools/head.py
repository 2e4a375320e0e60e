"""Reads a few rows of a table of a checkpoint or of an export."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from tpuembed.checkpoint.tools.exports import open_tables, read_numbers, vocabulary_of
from tpuembed.checkpoint.types import Array
from tpuembed.errors import ConfigError
from tpuembed.files import FilePath
from tpuembed.vocabulary import Vocabulary

__all__ = ["Rows", "read_rows", "stream_named_rows", "stream_rows"]

_DEFAULT_ROWS: Final = 5
_PIECE_BYTES: Final = 4 << 20
_MAX_ROWS: Final = 1 << 16
"""Rows to read at a time if they have no columns."""


Name = bytes | int | None
"""The name of a row. None for a row without one, such as that of a bucket."""


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Rows [start, start + len(values)) of a table, or of one of its slots.

    Attributes:
        table, slot: the table and slot; slot None is the table itself.
        start: the first row's number.
        values: [n, dim], of the table's dtype.
        names: of the rows, bytes or int, and None for a row without a name; None if they were not asked for.
        numbers: of rows that were chosen by name, which are in the order of the names; None for consecutive rows.
    """

    table: str
    slot: str | None
    start: int
    values: Array
    names: tuple[Name, ...] | None = None
    numbers: tuple[int, ...] | None = None


def read_rows(
    path: str | FilePath,
    table: str,
    start: int | None = None,
    stop: int | None = None,
    *,
    slot: str | None = None,
    names: bool = False,
    checkpoint_options: Mapping[str, Any] | None = None,
) -> Rows:
    """Read rows [start, stop) of a table in the checkpoint or the export at `path`.

    Args:
        path: as for `open_checkpoint`; or a version of an export, or a MODEL_DIR, whose highest version is read.
        table: its name.
        start: None is the first row.
        stop: None is five rows after `start`, or the table's end.
        slot: one of the table's slots instead.
        names: return the names of the rows too.
        checkpoint_options: further arguments of `open_checkpoint`.

    Raises:
        UnknownTableError: there is no such table or slot.
        RowRangeError: the range is not inside the table.
        ConfigError: `names` is set, and the table has no vocabulary.
        TpuEmbedError: as `open_checkpoint`.
    """
    pieces = list(stream_rows(path, table, start, stop, slot=slot, names=names, checkpoint_options=checkpoint_options))
    found = tuple(name for piece in pieces for name in piece.names or ()) if names else None
    return dataclasses.replace(pieces[0], values=np.concatenate([piece.values for piece in pieces]), names=found)


def stream_rows(
    path: str | FilePath,
    table: str,
    start: int | None = None,
    stop: int | None = None,
    *,
    slot: str | None = None,
    names: bool = False,
    checkpoint_options: Mapping[str, Any] | None = None,
) -> Iterator[Rows]:
    """Yield the rows of `read_rows`, a few megabytes at a time. There is at least one piece, which may have no rows.

    Raises:
        UnknownTableError, RowRangeError, ConfigError, TpuEmbedError: as `read_rows`, and before the first piece.
    """
    with open_tables(path, checkpoint_options or {}) as checkpoint:
        checkpoint.read(table, 0, 0, slot)  # raises for an unknown table or slot
        info = checkpoint.tables()[table]
        start = start or 0
        stop = max(start, min(start + _DEFAULT_ROWS, info.rows)) if stop is None else stop
        if not 0 <= start <= stop <= info.rows:
            checkpoint.read(table, start, stop, slot)  # raises the error
        step = max(1, _PIECE_BYTES // (info.dim * info.dtype.itemsize)) if info.dim else _MAX_ROWS
        vocabulary = vocabulary_of(checkpoint, table) if names else None
        for first in range(start, max(stop, start + 1), step):
            last = min(first + step, stop)
            values = checkpoint.read(table, first, last, slot)
            yield Rows(table, slot, first, values, _names_of(vocabulary, np.arange(first, last)))


def stream_named_rows(
    path: str | FilePath,
    table: str,
    names: Sequence[str | bytes | int],
    *,
    slot: str | None = None,
    checkpoint_options: Mapping[str, Any] | None = None,
) -> Iterator[Rows]:
    """Yield the rows of `names`, in their order, a few megabytes at a time.

    Args:
        path, table, slot, checkpoint_options: as for `read_rows`.
        names: of rows. If names are integers, text is read as an integer.

    Raises:
        UnknownTableError, TpuEmbedError: as `read_rows`, and before the first piece.
        ConfigError: the table has no vocabulary, or no such name.
    """
    with open_tables(path, checkpoint_options or {}) as checkpoint:
        vocabulary = vocabulary_of(checkpoint, table)
        where, info = f"{checkpoint.path}: table {table!r}", checkpoint.tables()[table]
        if vocabulary.dtype == "int64":
            try:
                names = [int(name) for name in names]
            except ValueError:
                raise ConfigError(f"{where}: its names are integers, got {list(names)!r}.") from None
        numbers = vocabulary.lookup(names)
        for name, number in zip(names, numbers.tolist(), strict=True):
            if number < vocabulary.oov_buckets:
                raise ConfigError(f"{where} has no row of the name {name!r}. Print names with head --names.")
        step = max(1, _PIECE_BYTES // max(1, info.dim * info.dtype.itemsize))
        for first in range(0, len(numbers), step):
            chosen = numbers[first : first + step]
            values = read_numbers(checkpoint, table, chosen, slot)
            yield Rows(table, slot, int(chosen[0]), values, _names_of(vocabulary, chosen), tuple(chosen.tolist()))


def _names_of(vocabulary: Vocabulary | None, numbers: Array) -> tuple[Name, ...] | None:
    """Return the names of rows. Rows after those of the vocabulary have none."""
    if vocabulary is None:
        return None
    named = numbers[numbers < vocabulary.rows]
    found = dict(zip(named.tolist(), vocabulary.names(named), strict=True))
    return tuple(found.get(number) for number in numbers.tolist())
