"""Finds exports among the paths that the tools are given, and reads the tables in them."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np

from tpuembed.checkpoint import open_checkpoint
from tpuembed.checkpoint.types import Array, Checkpoint, TableInfo
from tpuembed.config.checks import did_you_mean
from tpuembed.errors import (
    CheckpointCorruptError,
    CheckpointError,
    ConfigError,
    RowRangeError,
    UnknownTableError,
    reason,
)
from tpuembed.files import FilePath, as_path
from tpuembed.formats.saved_model.stack_rows import StackRows
from tpuembed.manifest import MANIFEST_PATH, STORAGES, Manifest, StackEntry, TableEntry
from tpuembed.vocabulary import Vocabulary

__all__ = [
    "ReadableTables",
    "find_export",
    "open_tables",
    "read_numbers",
    "require_export",
    "vocabulary_of",
]

_GAP_BYTES: Final = 16 << 10
"""Reading this many bytes takes about the time of a read."""
_SPAN_BYTES: Final = 4 << 20
"""The most bytes of a read."""


def find_export(path: str | FilePath) -> tuple[FilePath, Manifest] | None:
    """Return the export at `path` and its manifest: a version, or the highest version of a MODEL_DIR; None for anything else.

    Raises:
        ConfigError: its manifest cannot be read.
    """
    place = as_path(path)
    try:
        version = _version_of(place)
    except OSError:  # opening it as a checkpoint raises the same error, and reports it
        return None
    if version is None:
        return None
    manifest = Manifest.read(version)
    return (version, manifest) if manifest else None


def require_export(path: str | FilePath) -> tuple[FilePath, Manifest]:
    """Return what `find_export` does.

    Raises:
        ConfigError: it is no export.
    """
    found = find_export(path)
    if found is None:
        raise ConfigError(
            f"{path}: not an export of tpuembed, and not a folder of exports. Name a version or a MODEL_DIR."
        )
    return found


@contextlib.contextmanager
def open_tables(path: str | FilePath, options: Mapping[str, Any]) -> "Iterator[ReadableTables]":
    """Open the export, or else the checkpoint, at `path`.

    Args:
        path: a version of an export, a MODEL_DIR (its highest version), or what `open_checkpoint` takes.
        options: what `open_checkpoint` takes beside the path.

    Raises:
        ConfigError: options are given for an export, which takes none.
        TpuEmbedError: as `open_checkpoint`.
    """
    export = find_export(path)
    if export is None:
        with open_checkpoint(path, **options) as checkpoint:
            yield checkpoint
        return
    if options:
        raise ConfigError(
            f"export {export[0]}: {', '.join(sorted(options))} is an option of checkpoints. The manifest of an "
            "export replaces it. Leave the option out."
        )
    yield _ExportTables(*export)


def vocabulary_of(tables: "ReadableTables", table: str) -> Vocabulary:
    """Return the vocabulary of `table`.

    Raises:
        UnknownTableError: there is no such table.
        ConfigError: it has none.
    """
    found = tables.vocabulary(table)
    if isinstance(tables, _ExportTables):
        raise ConfigError(
            f"export {tables.path}: exports have hashes that find names, and not the names. Leave the names out, or read the "
            "checkpoint."
        )
    if found is None:
        raise ConfigError(
            f"{tables.path}: table {table!r} has no vocabulary, so its rows have no names. Leave the names out."
        )
    return found


def read_numbers(tables: "ReadableTables", table: str, numbers: Array, slot: str | None = None) -> Array:
    """Return the rows `numbers`, int64 [n], of a table or slot, [n, dim].

    Rows that are near each other are read at once, together with the few rows between them.
    """
    info = tables.tables()[table]
    row_bytes = max(1, info.dim * info.dtype.itemsize)
    gap, most = max(1, _GAP_BYTES // row_bytes), max(1, _SPAN_BYTES // row_bytes)
    order = np.argsort(numbers, kind="stable")
    wanted = numbers[order]
    out = np.empty((len(numbers), info.dim), tables.read(table, 0, 0, slot).dtype)
    begin = 0
    while begin < len(wanted):
        end = begin + int(np.searchsorted(wanted[begin:], wanted[begin] + most))
        jumps = np.flatnonzero(np.diff(wanted[begin:end]) > gap)
        end = begin + int(jumps[0]) + 1 if len(jumps) else end
        start, stop = int(wanted[begin]), int(wanted[end - 1]) + 1
        out[order[begin:end]] = tables.read(table, start, stop, slot)[wanted[begin:end] - start]
        begin = end
    return out


class _ExportTables:
    """The tables of an export by its manifest. Rows are numbered as in training; int8 rows are decoded to float32."""

    def __init__(self, version: FilePath, manifest: Manifest) -> None:
        self.path = str(version)
        self._tables = {table.name: table for table in manifest.tables}
        self._stacks = {stack.name: stack for stack in manifest.stacks}
        if manifest.row_store is not None:
            raise ConfigError(f"export {version}: its rows are in Redis. Name the version that it was published from.")
        self._rows = {stack.name: StackRows(version, stack) for stack in manifest.stacks}

    def tables(self) -> dict[str, TableInfo]:
        """Return the tables by name."""
        return {name: self._info(table) for name, table in self._tables.items()}

    def read(self, table: str, start: int = 0, stop: int | None = None, slot: str | None = None) -> Array:
        """Return rows [start, stop) of a table, [stop - start, dim]; as Checkpoint.read."""
        if table not in self._tables:
            raise UnknownTableError(f"export {self.path}: has no table {table!r}; {did_you_mean(table, self._tables)}")
        if slot is not None:
            raise UnknownTableError(
                f"export {self.path}: has no slot {slot!r}. Exports have tables only. Read a checkpoint."
            )
        entry = self._tables[table]
        stop = entry.rows if stop is None else stop
        if not 0 <= start <= stop <= entry.rows:
            raise RowRangeError(
                f"export {self.path}: table {table!r}: rows [{start}, {stop}) are not inside its rows [0, {entry.rows}). Give "
                "rows inside them."
            )
        return self._read(entry, self._stacks[entry.stack], start, stop - start)

    def vocabulary(self, table: str) -> Vocabulary | None:  # noqa: ARG002 - as of Checkpoint
        """Return None: the names in exports are not read."""
        return None

    def _info(self, table: TableEntry) -> TableInfo:
        stored = self._stacks[table.stack].storage
        dtype = STORAGES[stored].values
        return TableInfo(table.name, table.rows, table.dim, dtype, layout=f"stored as {stored}")

    def _read(self, table: TableEntry, stack: StackEntry, start: int, count: int) -> Array:
        """Return `count` rows from row `start` of those that the stack holds of `table`."""
        try:
            stored = self._rows[stack.name].read(table.row_offset + start, count)
        except EOFError as error:
            raise CheckpointCorruptError(
                f"export {self.path}: data file {error}. Copy the version again, or export it again."
            ) from None
        except OSError as error:
            raise CheckpointError(f"export {self.path}: {stack.file} cannot be read: {reason(error)}.") from None
        codec = STORAGES[stack.storage]
        rows: Array = stored.view(codec.dtype)
        return rows if codec.values == codec.dtype else codec.decode(rows)


ReadableTables = Checkpoint | _ExportTables
"""What `head` and `diff` read."""


def _version_of(path: FilePath) -> FilePath | None:
    if _is_version(path):
        return path
    children: Iterable[FilePath] = path.iterdir() if path.is_dir() else ()
    versions = [child for child in children if child.name.isdecimal()]
    return max(filter(_is_version, versions), key=lambda child: int(child.name), default=None)


def _is_version(path: FilePath) -> bool:
    """Returns True also for a version that has lost its graph, so that the caller can report it."""
    return (path / "saved_model.pb").is_file() or (path / MANIFEST_PATH).is_file()
