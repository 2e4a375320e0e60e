"""Finds exports among the paths that the tools are given, and reads the tables in them."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from tpuembed.checkpoint import open_checkpoint
from tpuembed.checkpoint.types import Array, Checkpoint, TableInfo
from tpuembed.errors import CheckpointCorruptError, CheckpointError, ConfigError, reason
from tpuembed.files import FilePath, as_path, versions
from tpuembed.formats.saved_model.stack_rows import StackRows
from tpuembed.manifest import MANIFEST_PATH, STORAGES, Manifest
from tpuembed.vocabulary import Vocabulary

__all__ = ["find_export", "open_tables", "read_numbers", "require_export", "vocabulary_of"]

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
        if not _is_version(place):
            children = [child for child in place.iterdir() if child.name.isdecimal()] if place.is_dir() else []
            found = [child for child in children if _is_version(child)]
            if not found:
                return None
            place = max(found, key=lambda child: int(child.name))
    except OSError:  # opening it as a checkpoint raises the same error, and reports it
        return None
    manifest = Manifest.read(place)
    return (place, manifest) if manifest else None


def _is_version(path: FilePath) -> bool:
    """Returns True also for a version that has lost its graph, so that the caller can report it."""
    return (path / "saved_model.pb").is_file() or (path / MANIFEST_PATH).is_file()


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


def open_tables(path: str | FilePath, options: Mapping[str, Any]) -> Checkpoint:
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
        return open_checkpoint(path, **options)
    if options:
        raise ConfigError(
            f"export {export[0]}: {', '.join(sorted(options))} is an option of checkpoints. The manifest of an "
            "export replaces it. Leave the option out."
        )
    return _ExportTables(*export)


def vocabulary_of(tables: Checkpoint, table: str) -> Vocabulary:
    """Return the vocabulary of `table`.

    Raises:
        UnknownTableError: there is no such table.
        ConfigError: it has none.
    """
    found = tables.vocabulary(table)
    if found is None:
        raise ConfigError(
            f"{tables.path}: table {table!r} has no vocabulary, so its rows have no names. Leave the names out."
        )
    return found


def read_numbers(tables: Checkpoint, table: str, numbers: Array, slot: str | None = None) -> Array:
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


class _ExportTables(Checkpoint):
    """The tables of an export by its manifest. Rows are numbered as in training; int8 rows are decoded to float32."""

    format = "export"

    def __init__(self, version: FilePath, manifest: Manifest) -> None:
        if manifest.row_store is not None:
            raise ConfigError(f"export {version}: its rows are in Redis. Name the version that it was published from.")
        self.path, self._version = str(version), version
        self._entries = {table.name: table for table in manifest.tables}
        self._stacks = {stack.name: stack for stack in manifest.stacks}
        self._rows = {stack.name: StackRows(version, stack) for stack in manifest.stacks}
        self._tables = {}
        for table in manifest.tables:
            stored = self._stacks[table.stack].storage
            dtype = STORAGES[stored].values
            self._tables[table.name] = TableInfo(table.name, table.rows, table.dim, dtype, layout=f"stored as {stored}")

    def _dtype(self, table: str, slot: str | None) -> np.dtype[Any]:  # noqa: ARG002 - exports have no slots
        return self._tables[table].dtype

    def _fill(self, table: str, slot: str | None, start: int, out: Array) -> None:  # noqa: ARG002
        entry = self._entries[table]
        stack = self._stacks[entry.stack]
        codec = STORAGES[stack.storage]
        try:
            stored = self._rows[stack.name].read(entry.row_offset + start, len(out)).view(codec.dtype)
        except EOFError as error:
            raise CheckpointCorruptError(
                f"export {self.path}: data file {error}. Copy the version again, or export it again."
            ) from None
        except OSError as error:
            raise CheckpointError(f"export {self.path}: {stack.file} cannot be read: {reason(error)}.") from None
        out[...] = codec.decode(stored) if codec.values != codec.dtype else stored

    def vocabulary(self, table: str) -> Vocabulary | None:
        """Raise ConfigError: the names in exports are not read."""
        self._check(table, None)
        raise ConfigError(
            f"export {self.path}: exports have hashes that find names, and not the names. Leave the names out, or read the "
            "checkpoint."
        )

    def fingerprint(self) -> str:
        """Return the version of the manifest, which has the checksums of all files."""
        return str(versions([self._version / MANIFEST_PATH]))

    def close(self) -> None:
        """Do nothing: no file stays open."""

    @property
    def _shown(self) -> str:
        return f"export {self.path}"
