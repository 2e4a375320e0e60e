"""Reads rows of tables that `tpuembed publish` wrote to Redis."""

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import google_crc32c
import ml_dtypes
import numpy as np
import numpy.typing as npt

from tpuembed.errors import RowRangeError, RowStoreDataError, UnknownTableError
from tpuembed.manifest import Manifest, StackEntry, TableEntry
from tpuembed.row_store import ArrayKeys, PublishedModel, RowStore
from tpuembed.row_store.client import Keys
from tpuembed.row_store.records import records_of
from tpuembed.saved_model.stored_rows import decode_int8

__all__ = ["DECODE", "CheckedVersion", "RedisRows"]

Array = npt.NDArray[Any]
_Ids = npt.NDArray[np.int64]

_CACHED_VERSIONS: Final = 3
_SECONDS: Final = 30.0
_CHECK_SECONDS: Final = 1.0
_BITS_SET: Final = np.array([number.bit_count() for number in range(256)], np.int64)
DECODE: Final[Mapping[str, Callable[[Array], Array]]] = {
    "float32": lambda stored: stored.view("<f4"),
    "bfloat16": lambda stored: stored.view(ml_dtypes.bfloat16).astype(np.float32),
    "float16": lambda stored: stored.view("<f2").astype(np.float32),
    "int8": lambda stored: decode_int8(stored.view(np.int8)),
}
"""Storage type -> float32 [n, dim] of stored rows, uint8 [n, row_bytes]. See tpuembed.export.storage.formats."""


class RedisRows:
    """The rows of one model in Redis. Its methods block, and several threads may call them."""

    def __init__(self, store: RowStore, model: str) -> None:
        self._model = PublishedModel(store, model)
        self._versions: dict[int, CheckedVersion] = {}
        self._opening = threading.Lock()

    @property
    def model(self) -> PublishedModel:
        """Return the records of the model."""
        return self._model

    def read(
        self, opened: "CheckedVersion", wanted: Mapping[str, Array], timeout_seconds: float = _SECONDS
    ) -> dict[str, npt.NDArray[np.float32]]:
        """Return table -> float32 [n, dim], the rows of its `wanted` ids, int64 [n]. All tables are read at once.

        The rows are of the export that `opened` is of, also if Redis has another one of its number by now.

        Raises:
            UnknownTableError: the version has no such table.
            RowRangeError: an id is not a row of its table.
            RowStoreDataError: a row is missing, or has another length.
            RowStoreError: Redis cannot be reached, or has not answered in time.
        """
        tables = [opened.table(name) for name in wanted]
        parts, orders = list[tuple[ArrayKeys, _Ids]](), list[_Ids]()
        for table, ids in zip(tables, wanted.values(), strict=True):
            places, order = table.places(np.asarray(ids, np.int64))
            parts += places
            orders.append(order)
        if not sum(map(len, orders)):
            return {
                name: np.zeros((0, table.entry.dim), np.float32) for name, table in zip(wanted, tables, strict=True)
            }
        values = self._model.store.read(Keys.of(parts), timeout_seconds)
        found, start = {}, 0
        for (name, ids), table, order in zip(wanted.items(), tables, orders, strict=True):
            own, start = values[start : start + len(order)], start + len(order)
            stored = self._joined(opened.number, table, own, np.asarray(ids)[order])
            rows = np.empty((len(order), table.entry.dim), np.float32)
            rows[order] = DECODE[table.stack.storage](stored)
            found[name] = rows
        return found

    def _joined(self, version: int, table: "_TableRows", values: Sequence[Any], ids: Array) -> Array:
        """Return values as uint8 [n, row_bytes]. Each has the length of a row."""
        row_bytes = table.stack.row_bytes
        wrong = set(map(type, values)) - {bytes} or set(map(len, values)) - {row_bytes}
        if not wrong:
            return np.frombuffer(b"".join(values), np.uint8).reshape(len(values), row_bytes)
        place = next(n for n, one in enumerate(values) if not isinstance(one, bytes) or len(one) != row_bytes)
        value = values[place]
        fault = f"has {len(value)} bytes" if isinstance(value, bytes) else "is missing"
        raise RowStoreDataError(
            f"Redis at {self._model.store.url}: model {self._model.name}, version {version}: row {ids[place]} of table "
            f"{table.entry.name} {fault}. A row has {row_bytes} bytes. Publish the version with --rewrite, and set "
            "maxmemory-policy noeviction."
        )

    def open(self, number: int) -> "CheckedVersion":
        """Return a version. It is opened anew if Redis has another export of its number now, which is looked up once a second.

        Raises:
            UnknownTableError: Redis does not have the version.
            RowStoreDataError: a table of it is not whole, or another one.
            RowStoreError: Redis cannot be reached.
        """
        opened = self._versions.get(number)
        if opened is not None and time.monotonic() < opened.checked + _CHECK_SECONDS:
            return opened
        with self._opening:
            opened = self._versions.get(number)
            if opened is not None and self._model.digest(number) == opened.digest:
                opened.checked = time.monotonic()
            else:  # the first time, or Redis was emptied and has another export of this number
                opened = self._open(number)
                others = sorted(self._versions)[-_CACHED_VERSIONS + 1 :]
                self._versions = {**{one: self._versions[one] for one in others}, number: opened}
        return opened

    def has_other(self, opened: "CheckedVersion") -> bool:
        """Return True if Redis has another export of this number by now. The version is opened anew then."""
        opened.checked = -math.inf
        return self._model.digest(opened.number) != opened.digest

    def _open(self, number: int) -> "CheckedVersion":
        model = self._model
        record = model.version(number)
        if record is None:
            there = ", ".join(map(str, model.numbers())) or "none"
            raise UnknownTableError(
                f"Redis at {model.store.url}: has no version {number} of model {model.name}. It has {there}. Publish it."
            )
        for name, wanted in record.arrays.items():
            found = model.array(wanted.id)
            if found is None or not found.is_whole or found.emptied != wanted:
                has = (
                    "nothing"
                    if found is None
                    else f"{found.written} of {found.rows} rows, {found.size} bytes, CRC32C {found.crc32c}"
                )
                raise RowStoreDataError(
                    f"Redis at {model.store.url}: model {model.name}, version {number}: of array {name} it has {has}, but the "
                    f"manifest has {wanted.rows} rows, {wanted.size} bytes, CRC32C {wanted.crc32c}. Publish the version again."
                )
        stacks = {stack.name: stack for stack in record.manifest.stacks}
        words = {name: self._words(number, stack) for name, stack in stacks.items() if stack.overlay is not None}
        tables = {
            entry.name: _TableRows(model, entry, stacks[entry.stack], words.get(entry.stack))
            for entry in record.manifest.tables
        }
        return CheckedVersion(number, record.manifest, tables, record.digest, time.monotonic())

    def _words(self, number: int, stack: StackEntry) -> Array:
        """Return the index of an overlay, int32 [words, 2]; see OverlayEntry."""
        overlay = stack.overlay
        assert overlay is not None
        record = records_of(stack)[overlay.words.name]
        keys = self._model.keys_of(record).of(np.arange(record.rows, dtype=np.int64))
        pieces = [self._model.store.ask("GET", key.tobytes(), timeout_seconds=_SECONDS) or b"" for key in keys]
        content = b"".join(pieces)
        checksum = google_crc32c.value(content)
        if (len(content), checksum) != (record.size, record.crc32c):
            raise RowStoreDataError(
                f"Redis at {self._model.store.url}: model {self._model.name}, version {number}: the index of {stack.name} has "
                f"{len(content)} bytes, CRC32C {checksum}. The manifest has {record.size} bytes, CRC32C {record.crc32c}. Publish "
                "the version with --rewrite."
            )
        return np.frombuffer(content, "<i4").reshape(-1, 2)


@dataclasses.dataclass
class CheckedVersion:
    """A version whose records are checked. Its digest was that in Redis when it was `checked`, by `time.monotonic`."""

    number: int
    manifest: Manifest
    tables: Mapping[str, "_TableRows"]
    digest: str
    checked: float

    def table(self, name: str) -> "_TableRows":
        """Return where the rows of a table are. Raises UnknownTableError if the version has no such table."""
        if name not in self.tables:
            raise UnknownTableError(f"table {name!r} is not in the version. It has {', '.join(sorted(self.tables))}.")
        return self.tables[name]


class _TableRows:
    """Where the rows of one table are."""

    def __init__(self, model: PublishedModel, entry: TableEntry, stack: StackEntry, words: Array | None) -> None:
        self.entry, self.stack, self._words = entry, stack, words
        own, *more = [model.keys_of(record) for record in records_of(stack).values()]
        self._own, self._overlay = own, more[0] if more else None

    def places(self, ids: _Ids) -> tuple[list[tuple[ArrayKeys, _Ids]], _Ids]:
        """Return the rows of arrays that `ids` are, and int64 [n]: the place in `ids` of each of these rows.

        Raises:
            RowRangeError: an id is not a row of the table.
            RowStoreDataError: the index of an overlay contradicts itself.
        """
        entry = self.entry
        rows = ids - entry.first_row
        if len(rows) and not (rows.min() >= 0 and rows.max() < entry.rows):
            outside = ids[(rows < 0) | (rows >= entry.rows)][0]
            raise RowRangeError(
                f"table {entry.name}: id {outside} is not a row. The table has rows "
                f"[{entry.first_row}, {entry.first_row + entry.rows})."
            )
        if self._overlay is None or self._words is None:
            return [(self._own, rows + entry.row_offset)], np.arange(len(rows))
        stacked = rows + entry.row_offset
        bits, ranks = self._words[stacked // 32].T
        word, bit = np.ascontiguousarray(bits).view(np.uint32), np.uint32(1) << (stacked % 32).astype(np.uint32)
        is_new = (word & bit) != 0
        before = _BITS_SET[(word & (bit - np.uint32(1))).view(np.uint8).reshape(-1, 4)].sum(axis=1)
        new, old = np.flatnonzero(is_new), np.flatnonzero(~is_new)
        if len(old) and rows[old].max() >= entry.base_rows:
            raise RowStoreDataError(
                f"table {entry.name}: row {rows[old].max()} is neither in the base nor in the overlay. Export again."
            )
        places = [
            (self._own, rows[old] + entry.base_row_offset),
            (self._overlay, ranks[new].astype(np.int64) + 1 + before[new]),
        ]
        return places, np.concatenate([old, new])
