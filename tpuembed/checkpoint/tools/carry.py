"""Writes a TensorFlow checkpoint anew, with the rows of one table at the numbers that another vocabulary gives their names.

It holds a few pieces of rows, and the names of both vocabularies.
"""

import dataclasses
import json
import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from tpuembed.checkpoint import open_checkpoint
from tpuembed.checkpoint.bundle.checkpoint import BundleCheckpoint
from tpuembed.checkpoint.moved_rows import check_rows_can_move, features_of, takes_names
from tpuembed.checkpoint.types import Array
from tpuembed.config.checks import check_choice, did_you_mean
from tpuembed.config.optimizers import optimizer_from
from tpuembed.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFormatError,
    ConfigError,
    UnknownTableError,
    reason,
)
from tpuembed.files import FilePath, flush, open_bytes
from tpuembed.row_history import RowHistory
from tpuembed.tensor_bundle import Bundle, Entry, Slice, crc, encode_strings, index_path, shard_path, write_index
from tpuembed.tensor_bundle.verification import damaged_parts
from tpuembed.vocabulary import UNKNOWN, NamesPlan, Vocabulary
from tpuembed.vocabulary.saved import IDENTITY

__all__ = ["CarryReport", "carry_checkpoint"]

Progress = Callable[[int, int], None]
Initializer = Callable[[tuple[int, int]], Array]
"""Returns the initial values of rows, floats of the shape that it is given: [n, dim]."""

_PIECE_BYTES: Final = 16 << 20
_SCATTERED: Final = 1 << 12
"""The most rows to write before their pages leave the memory. Each may be on a page of its own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CarryReport:
    """The result of carrying a table to another vocabulary.

    Attributes:
        path: the prefix of the new checkpoint.
        table: the table.
        rows: its number of rows before and now.
        names: what happened to each name.
    """

    path: str
    table: str
    rows: tuple[int, int]
    names: NamesPlan


def carry_checkpoint(
    path: str | FilePath,
    vocabulary: Vocabulary | str | Path,
    out: str | Path,
    *,
    table: str | None = None,
    initializer: str | Initializer = "default",
    checkpoint_options: Mapping[str, Any] | None = None,
    on_progress: Progress | None = None,
) -> CarryReport:
    """Write the checkpoint `out`, which is that at `path` with a table's rows and slots at the numbers of `vocabulary`.

    A name of both vocabularies keeps its row and slots. A new name gets values of `initializer`, and its slots get their
    initial values. A dropped name's row is omitted. If the table has too few rows, it grows. All other tensors, and the
    objects that hold them, stay as they are. A layer's history of rows begins anew, so the next export reads all rows.

    Args:
        path: a TensorFlow checkpoint of a `tpuembed.TPUEmbedding`, as for `open_checkpoint`.
        vocabulary: the new one; or a file of `Vocabulary.to_bytes()`, or of one name a line. Names of a text file have the
            dtype and the buckets of the old vocabulary.
        out: the prefix of the new checkpoint, on a disk. Nothing may be there.
        table: its name. None is the one table that has a vocabulary.
        initializer: of the rows of new names, because checkpoints do not have the layer's: "default", which is that of
            TableConfig; "zeros", "ones", or a function of a shape [n, dim] that returns the rows.
        checkpoint_options: further arguments of `open_checkpoint`.
        on_progress: called with (bytes written, total bytes).

    Raises:
        UnknownTableError: there is no such table.
        CheckpointFormatError: the checkpoint is of another kind, or its rows lie in another order in the files.
        CheckpointCorruptError: a checksum is wrong.
        ConfigError: the table has no vocabulary, the new one has another dtype or cannot be read, `out` exists,
            `initializer` is unknown, or out_of_vocabulary is a row of the table.
        CheckpointError: `out` cannot be written; or as `open_checkpoint`.
    """
    target = Path(out)
    _check_free(target)
    with open_checkpoint(path, **(checkpoint_options or {})) as checkpoint:
        if not isinstance(checkpoint, BundleCheckpoint):
            raise CheckpointFormatError(
                f"checkpoint {checkpoint.path}: is of format {checkpoint.format}. Only checkpoints of TensorFlow are carried. "
                "Restore it into a layer with restore_tables(by='name')."
            )
        name = _chosen(checkpoint, table)
        old = checkpoint.vocabulary(name)
        if old is None:
            raise ConfigError(f"checkpoint {checkpoint.path}: table {name!r} has no vocabulary. Choose another table.")
        new = vocabulary if isinstance(vocabulary, Vocabulary) else _read_vocabulary(Path(vocabulary), old)
        if new.dtype != old.dtype:
            raise ConfigError(
                f"checkpoint {checkpoint.path}: names of table {name!r} are {old.dtype}, and those of the new vocabulary are "
                f"{new.dtype}. Give names of one dtype."
            )
        names = NamesPlan.of(old, new)
        check_rows_can_move(checkpoint, name, names)
        new.continue_counts(old, checkpoint.update_counts().get(name, 0))
        carried = _Carried(checkpoint, name, names, new, initializer)
        target.parent.mkdir(parents=True, exist_ok=True)
        _write(carried, target, on_progress)
        return CarryReport(path=str(target), table=name, rows=(carried.info.rows, carried.rows), names=carried.names)


def _check_free(target: Path) -> None:
    """Raise ConfigError if a file of a checkpoint `target` exists."""
    names = (path.name for path in target.parent.iterdir()) if target.parent.is_dir() else ()
    if any(name.startswith((f"{target.name}.index", f"{target.name}.data-")) for name in names):
        raise ConfigError(f"carry: checkpoint {target} exists. Choose another prefix, or remove it.")


def _chosen(checkpoint: BundleCheckpoint, table: str | None) -> str:
    tables = checkpoint.tables()
    named = [name for name in tables if checkpoint.vocabulary_header(name) is not None]
    if table is not None:
        if table not in tables:
            raise UnknownTableError(
                f"checkpoint {checkpoint.path}: has no table {table!r}; {did_you_mean(table, tables)}"
            )
        return table
    if len(named) != 1:
        shown = ", ".join(map(repr, named)) or "none"
        raise ConfigError(
            f"checkpoint {checkpoint.path}: the tables with a vocabulary are: {shown}. "
            + ("Choose one with --table." if named else "Choose another checkpoint.")
        )
    return named[0]


def _read_vocabulary(path: Path, old: Vocabulary) -> Vocabulary:
    try:
        with path.open("rb") as file:
            is_saved = Vocabulary.is_saved(file.read(64))
        return (
            Vocabulary.from_bytes(path.read_bytes(), f"vocabulary {path}")
            if is_saved
            else Vocabulary.from_file(
                path,
                dtype=old.dtype,
                oov_buckets=old.oov_buckets,
                oov_key=old.oov_key,
                grows=old.grows,
                min_count=old.min_count,
            )
        )
    except OSError as error:
        raise ConfigError(f"vocabulary {path}: cannot be read: {reason(error)}.") from None


class _Carried:
    """The plan: which tensors are written anew, and the new number of each row.

    Attributes:
        bundle: of the checkpoint.
        rows: of the table now.
        names: what happens to each name.
        numbers: int64 [rows before], the new number of each row; UNKNOWN if it is omitted.
        tensors: key -> slot, of the table (slot None) and of its slots.
        replaced: key -> new entry without a place, and its bytes: the config, the vocabulary, and the history and stamps.
    """

    def __init__(
        self,
        checkpoint: BundleCheckpoint,
        table: str,
        names: NamesPlan,
        new: Vocabulary,
        initializer: str | Initializer,
    ) -> None:
        self.checkpoint, self.bundle, self.table, self.names = checkpoint, checkpoint.bundle, table, names
        self.info = checkpoint.tables()[table]
        self.rows = max(self.info.rows, new.rows)
        self.numbers = np.full(self.info.rows, UNKNOWN, np.int64)
        self.numbers[: len(names.numbers)] = names.numbers
        keys = checkpoint.keys_of(table)
        self.tensors = {keys.key: None, **{key: slot for slot, key in keys.slots.items()}}
        places = checkpoint.beside(table)
        config = json.loads(self.bundle.read_string(places.config))
        self._options: dict[str, Any] = config["tables"][table]
        self._check_places(keys.rows.mod_sharding is not None)
        self._options["vocabulary_size"] = self.rows
        for feature in filter(takes_names, features_of(config.get("features"), table)):
            identity = {key: value for key, value in new.options().items() if key in IDENTITY}
            feature["vocabulary"] = {k: v for k, v in feature["vocabulary"].items() if k not in IDENTITY} | identity
        self.replaced = {
            places.config: _string(json.dumps(config).encode()),
            places.vocabulary: _array(np.frombuffer(new.to_bytes(), np.uint8)),
        }
        if places.history is not None and places.stamps is not None:
            history, shapes = RowHistory.from_json(self.bundle.read_string(places.history), checkpoint.path)
            anew = dataclasses.replace(history, spans=((RowHistory.token(), 0),))
            text = anew.to_json(shapes | {table: [self.rows, self.info.dim]})
            self.replaced[places.history] = _string(text.encode())
            self.replaced[places.stamps] = _array(np.zeros(self.rows, np.int32))
        self._initializer = _initializer(initializer, self.info.dim)

    def _check_places(self, is_mod_sharded: bool) -> None:
        """Raise CheckpointFormatError unless every tensor is in one piece, and none but these is as large as the table."""
        where = f"checkpoint {self.checkpoint.path}: table {self.table!r}"
        if is_mod_sharded or any(self.bundle.entries[key].slices for key in self.tensors):
            raise CheckpointFormatError(
                f"{where} is saved as {self.info.layout or 'slices'}. Only tables in one piece are carried. Restore it into a "
                "layer with restore_tables(by='name')."
            )
        if self._options.get("optimizer") is not None:
            return
        others = {
            key
            for name in self.checkpoint.tables()
            for key in (self.checkpoint.keys_of(name).key, *self.checkpoint.keys_of(name).slots.values())
        }
        shape = (self.info.rows, self.info.dim)
        same = sorted(key for key, entry in self.bundle.entries.items() if entry.shape == shape and key not in others)
        if same:
            raise CheckpointFormatError(
                f"{where} has no optimizer of its own, and {same[0]} has its shape, so it may hold its slots. Restore it into a "
                "layer with restore_tables(by='name')."
            )

    def initial_rows(self, slot: str | None, count: int, dtype: np.dtype[Any]) -> Array:
        """Return `count` new rows of the table, or of a slot, [count, dim].

        Raises:
            ConfigError: the initializer gives another shape.
        """
        shape = (count, self.info.dim)
        if slot is not None:
            value = optimizer_from(self._options["optimizer"]).slot_initial_value(slot)
            return np.full(shape, value, dtype)
        found = np.asarray(self._initializer(shape))
        if found.shape != shape:
            raise ConfigError(f"carry: initializer returned {list(found.shape)} for {list(shape)}. Return that shape.")
        return found.astype(dtype)


def _string(text: bytes) -> tuple[Entry, bytes]:
    payload, checksum = encode_strings([text])
    return Entry(dtype="string", shape=(), size=len(payload), crc32c=checksum), payload


def _array(values: Array) -> tuple[Entry, bytes]:
    payload = values.tobytes()
    return Entry(dtype=str(values.dtype), shape=values.shape, size=len(payload), crc32c=crc.value(payload)), payload


def _initializer(given: str | Initializer, dim: int) -> Initializer:
    if callable(given):
        return given
    check_choice("carry: initializer", given, ("default", "zeros", "ones"))
    if given != "default":
        return np.zeros if given == "zeros" else np.ones
    rng = np.random.default_rng()
    return lambda shape: _normal(rng, shape) / math.sqrt(dim)


def _normal(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    """Return normal numbers. Those beyond two standard deviations are drawn again."""
    values = rng.standard_normal(shape)
    while len(beyond := np.argwhere(np.abs(values) > 2)):
        values[tuple(beyond.T)] = rng.standard_normal(len(beyond))
    return values


def _write(carried: _Carried, target: Path, on_progress: Progress | None) -> None:
    """Write the data files, and the index last. A failure removes what was written."""
    entries, shards = dict(carried.bundle.entries), 1 + len(carried.tensors)
    row_bytes = carried.info.dim * carried.info.dtype.itemsize
    total = len(carried.tensors) * carried.rows * row_bytes
    total += sum(part.size for key, entry in entries.items() if key not in carried.tensors for part in entry.parts())
    done = 0

    def wrote(count: int) -> None:
        nonlocal done
        done += count
        if on_progress:
            on_progress(min(done, total), total)

    for damage in damaged_parts(carried.bundle, lambda _: None, without=carried.tensors):
        raise CheckpointCorruptError.of(f"checkpoint {carried.checkpoint.path}: {damage.name}: {damage.reason}")
    files: list[Path] = []

    def create(path: Path) -> Path:
        path.touch(exist_ok=False)
        files.append(path)
        return path

    try:
        _write_others(carried, entries, create(shard_path(target, 0, shards)), wrote)
        for shard, (key, slot) in enumerate(carried.tensors.items(), 1):
            checksum = _write_rows(carried, key, slot, create(shard_path(target, shard, shards)), wrote)
            size = carried.rows * row_bytes
            shape = (carried.rows, carried.info.dim)
            entries[key] = Entry(dtype=entries[key].dtype, shape=shape, shard=shard, size=size, crc32c=checksum)
        temporary = create(target.with_name(f"{target.name}.index.partial"))
        write_index(temporary, entries, shards)
        flush(temporary)
        temporary.replace(index_path(target))
    except BaseException as error:
        for file in files:
            file.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise CheckpointError(f"carry: checkpoint {target} cannot be written: {reason(error)}.") from None
        raise


def _write_others(carried: _Carried, entries: dict[str, Entry], path: Path, wrote: Callable[[int], None]) -> None:
    """Write all tensors but the table and its slots, one after the other, and enter their places into `entries`."""
    with path.open("r+b") as file:
        for key, entry in carried.bundle.entries.items():
            if key in carried.tensors:
                continue
            if key in carried.replaced:
                entry, payload = carried.replaced[key]
                entries[key] = dataclasses.replace(entry, offset=file.tell())
                file.write(payload)
                wrote(len(payload))
                continue
            places = []
            for part in entry.parts():
                places.append(dataclasses.replace(part, shard=0, offset=file.tell()))
                for piece in _bytes_of(carried.bundle, part):
                    file.write(piece)
                    wrote(len(piece))
            entries[key] = (
                dataclasses.replace(entry, slices=tuple(places))
                if entry.slices
                else dataclasses.replace(entry, shard=0, offset=places[0].offset)
            )
        file.flush()
        os.fsync(file.fileno())


def _bytes_of(bundle: Bundle, part: Slice) -> Iterator[memoryview]:
    source = open_bytes(bundle.data_path(part.shard))
    try:
        buffer = memoryview(bytearray(min(_PIECE_BYTES, part.size)))
        for start in range(0, part.size, _PIECE_BYTES):
            piece = buffer[: part.size - start]
            source.read_into(part.offset + start, piece)
            yield piece
    finally:
        source.close()


def _write_rows(carried: _Carried, key: str, slot: str | None, path: Path, wrote: Callable[[int], None]) -> int:
    """Write the rows of a table or slot at their new numbers. Return their CRC32C.

    The file is mapped, and read in order once more for its checksum. Its pages leave the memory after each piece.
    """
    info, dtype = carried.info, carried.checkpoint.read(carried.table, 0, 0, slot).dtype
    row_bytes = info.dim * dtype.itemsize
    step = max(1, _PIECE_BYTES // max(1, row_bytes))
    with path.open("r+b") as file:
        _reserve(file.fileno(), carried.rows * row_bytes)
        mapped = mmap.mmap(file.fileno(), carried.rows * row_bytes)  # closed with the last array of it
        rows = np.frombuffer(mapped, np.uint8).reshape(carried.rows, row_bytes)
        _scatter(carried, key, slot, rows, mapped, step)
        checksum, initial = 0, _without_rows(carried)
        for start in range(0, carried.rows, step):
            piece = rows[start : start + step]
            empty = np.flatnonzero(initial[start : start + step])
            if len(empty):
                piece[empty] = carried.initial_rows(slot, len(empty), dtype).view(np.uint8)
            checksum = crc.extend(checksum, piece.reshape(-1))
            wrote(piece.nbytes)
            _release(mapped)
        mapped.flush()
        os.fsync(file.fileno())
    return checksum


def _reserve(file: int, size: int) -> None:
    """Take the disk's space now: a full disk would end the process when a page is written."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)


def _scatter(carried: _Carried, key: str, slot: str | None, rows: Array, mapped: mmap.mmap, step: int) -> None:
    """Copy the kept rows to their new numbers, and compare the checksum of all rows that were read."""
    info, checksum = carried.info, 0
    buffer = np.empty((min(step, info.rows), info.dim), carried.checkpoint.read(carried.table, 0, 0, slot).dtype)
    for start in range(0, info.rows, step):
        piece = buffer[: info.rows - start]
        carried.checkpoint.read_into(carried.table, start, piece, slot)
        stored = piece.view(np.uint8).reshape(len(piece), rows.shape[1])
        checksum = crc.extend(checksum, stored.reshape(-1))
        numbers = carried.numbers[start : start + len(piece)]
        kept = np.flatnonzero(numbers >= 0)
        for some in np.split(kept, range(_SCATTERED, len(kept), _SCATTERED)):
            rows[numbers[some]] = stored[some]
            _release(mapped)
    stated = carried.bundle.entries[key].crc32c
    if checksum != stated:
        raise CheckpointCorruptError.of(
            f"checkpoint {carried.checkpoint.path}: {key}: its index says CRC32C {stated:#010x}. The CRC32C of its bytes is "
            f"{checksum:#010x}"
        )


def _without_rows(carried: _Carried) -> Array:
    """Return which of the new rows no row was copied to, bool [rows]."""
    found = np.ones(carried.rows, bool)
    found[carried.numbers[carried.numbers >= 0]] = False
    return found


def _release(mapped: mmap.mmap) -> None:
    """Take the pages out of this process. What was written stays in the system's cache of the file."""
    if hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)
