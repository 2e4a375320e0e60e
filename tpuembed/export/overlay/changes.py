"""Finds the rows that differ from the base, and writes them into files of an overlay.

A thread encodes the rows of a shard as an export stores them, and compares them with the base's bytes. Both are read
once. The rows that differ are written in their order.

Of tables with stamps, the rows that were touched since the base are written, and the base is not read. Of a model in
memory, the other rows are not read either. A file is read whole, because its checksums cover whole tables.
"""

import concurrent.futures
import contextlib
import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from tpuembed.errors import ExportError, reason, warn
from tpuembed.export.overlay.base import BaseVersion
from tpuembed.export.plan.plan import ExportPlan, ShardTask, StackPlan
from tpuembed.export.request import ExportRequest
from tpuembed.export.storage.error import TableError
from tpuembed.export.stream.execute import combined, table_errors
from tpuembed.export.stream.shard import ShardResult, write_shard
from tpuembed.files import open_bytes
from tpuembed.formats.saved_model import file_crc32c
from tpuembed.manifest import HistoryEntry
from tpuembed.manifest.row_history import RowHistory

__all__ = ["Search", "stamped_tables"]

_Bytes = npt.NDArray[np.uint8]

_MOST_ROWS: Final = 2**31 - 1
"""The upper half of a word is an int32."""
_SHARD_BYTES: Final = 64 << 20
_WORDS_AT_ONCE: Final = 1 << 20
_STAMPS_AT_ONCE: Final = 1 << 20
_BITS_SET: Final = np.array([number.bit_count() for number in range(256)], np.uint8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """A search for the rows that differ from the base.

    Attributes:
        request: several threads read its checkpoint. The stacks that its model reads whole are written anew if a row differs.
        plan: has the tables of the base; see `difference`.
        base: the version to compare with.
        stamped: see `stamped_tables`.
        results: of the shards that were searched, by index.
    """

    request: ExportRequest
    plan: ExportPlan
    base: BaseVersion
    stamped: Mapping[str, int]
    results: dict[int, ShardResult] = dataclasses.field(default_factory=dict)

    def run(
        self,
        folder: Path,
        max_bytes: float,
        on_result: Callable[[ShardResult], None],
        on_progress: Callable[[int, int], None],
    ) -> tuple[tuple[StackPlan, ...], dict[str, int]] | None:
        """Write the rows that differ into files in `folder`, named ArrayPlan.file.

        Returns:
            The stacks of the plan with their overlays, and the checksum of each file that was written, by the name of its array.
            None if more than `max_bytes` differ.

        Raises:
            CheckpointError: the checkpoint cannot be read.
            ExportError: the base cannot be read, or a row cannot be stored.
        """
        plan, done = self.plan, 0
        found = {stack.name: _StackFiles(stack, folder) for stack in plan.stacks}
        workers = max(1, min(plan.workers, plan.max_memory_bytes // (2 * _SHARD_BYTES)))
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            try:
                for task, rows in zip(plan.shards, _in_order(pool, self._shard, plan.shards, workers + 1), strict=True):
                    found[task.stack].add(rows)
                    self.results[task.index] = rows.result
                    on_result(rows.result)
                    done += task.size
                    on_progress(done, plan.table_bytes)
                    if sum(files.bytes_written for files in found.values()) > max_bytes:
                        return None
            finally:
                pool.shutdown(cancel_futures=True)
        full, made, crc32c = self.full_crc32c(), [], dict[str, int]()
        for stack in plan.stacks:
            files, is_whole = found[stack.name], self._is_whole(stack)
            if files.rows > _MOST_ROWS and not is_whole:
                return None
            overlay, own = files.finish(full.get(stack.name), is_whole=is_whole)
            made.append(overlay)
            crc32c |= own
        if sum(array.size for stack in made for array in stack.arrays if array.name in crc32c) > max_bytes:
            return None
        return tuple(made), crc32c

    @property
    def _read_in_part(self) -> Collection[str]:
        """Return the tables of which only the touched rows are read."""
        return () if self.request.checkpoint.gather is None else self.stamped.keys()

    def _is_whole(self, stack: StackPlan) -> bool:
        """Returns True if the model reads the stack's table whole."""
        return any(place.table in self.request.whole_tables for place in stack.tables)

    def _shard(self, task: ShardTask) -> "_ChangedRows":
        """Return the rows of one shard that may differ. Any thread may call it."""
        stack = next(stack for stack in self.plan.stacks if stack.name == task.stack)
        place = next(place for place in stack.tables if place.table == task.table)
        entry = next(entry for entry in self.base.manifest.stacks if entry.name == task.stack)
        rows = _ChangedRows(stack, self.base.path / entry.file, keep_all=self._is_whole(stack))
        numbers, write = None, rows.compare
        checkpoint = self.request.checkpoint
        if task.table in self.stamped:
            found = []
            for start in range(task.start, task.stop, _STAMPS_AT_ONCE):
                stamps = np.empty(min(_STAMPS_AT_ONCE, task.stop - start), np.int32)
                checkpoint.stamps[task.table].read(start, stamps)
                found.append(np.flatnonzero(stamps > self.stamped[task.table]) + start)
            touched = np.concatenate(found)
            rows.chosen, write = touched + place.row_offset, rows.choose
            if checkpoint.gather is not None:
                numbers, write = touched, rows.append
        rows.result = write_shard(task, self.request.source, write, checkpoint=checkpoint, numbers=numbers)
        return rows

    def full_crc32c(self) -> dict[str, int]:
        """Return the checksum of all rows of each stack that was read whole."""
        stacks = {stack.name: stack for stack in self.plan.stacks}
        return {
            name: combined((self.results[task.index].crc32c, task.size) for task in tasks)
            for name, tasks in itertools.groupby(self.plan.shards, key=attrgetter("stack"))
            if not any(place.table in self._read_in_part for place in stacks[name].tables)
        }

    def errors(self) -> dict[str, TableError]:
        """Return the differences from float32, by table. Of tables that were read in part, those of the base count too."""
        found = table_errors(self.plan.shards, self.results)
        for table in self._read_in_part:
            found[table] = TableError(**self.base.manifest.errors[table]).merged(found[table])
        return found

    def rows_compared(self) -> int:
        """Return how many rows were compared with those of the base."""
        return sum(task.stop - task.start for task in self.plan.shards if task.table not in self.stamped)


def stamped_tables(
    plan: ExportPlan,
    base: BaseVersion,
    whole: Sequence[str],
    histories: Mapping[str, HistoryEntry],
    max_error: float | None,
) -> dict[str, int]:
    """Return the tables whose stamps tell which rows may differ from the base, with the base's count of updates.

    A row with a larger stamp was touched since. The others were checked when the base was written: a table is left out
    if this export has a bound that the base was not known to keep.

    Args:
        plan: has the tables of the base; see `difference`.
        base: the version to compare with.
        whole: tables that the model reads whole. They are left out.
        histories: of the tables of the checkpoint that are tracked.
        max_error: as ExportOptions.max_error.
    """
    found, errors = {}, base.manifest.errors
    for table in (place.table for stack in plan.stacks for place in stack.tables):
        now, before = histories.get(table), base.manifest.histories.get(table)
        if now is None or before is None or table not in errors or table in whole:
            continue
        if not RowHistory(now.spans, now.updates).since(RowHistory(before.spans, before.updates)):
            fault = "this training did not pass through it"
        elif max_error is not None and errors[table]["max_abs"] > max_error:
            fault = f"its error is {errors[table]['max_abs']:.3g}, above max_error={max_error}"
        elif plan.require_finite and not base.manifest.finite:
            fault = "it was written without require_finite, and this export requires it"
        else:
            found[table] = before.updates
            continue
        warn(f"base {base.number}: the stamps of table {table!r} are not used, so all its rows are compared: {fault}.")
    return found


def _in_order(
    pool: concurrent.futures.ThreadPoolExecutor,
    function: Callable[[ShardTask], "_ChangedRows"],
    tasks: Sequence[ShardTask],
    ahead: int,
) -> Iterator["_ChangedRows"]:
    """Yield `function` of each task in their order. At most `ahead` results are held."""
    waiting: deque[concurrent.futures.Future[_ChangedRows]] = deque()
    rest = iter(tasks)
    for task in itertools.islice(rest, ahead):
        waiting.append(pool.submit(function, task))
    while waiting:
        yield waiting.popleft().result()
        for task in itertools.islice(rest, 1):
            waiting.append(pool.submit(function, task))


class _ChangedRows:
    """The rows of one shard that differ from the base.

    Attributes:
        result: of the shard.
        numbers: int64 [n], rows of the stack, sorted.
        rows: the stored rows, in pieces.
        has_changes: a row differs.
        chosen: int64 [n], the rows of the stack to keep without a comparison, sorted.
    """

    result: ShardResult
    has_changes = False
    chosen: npt.NDArray[np.int64]

    def __init__(self, stack: StackPlan, path: Path, *, keep_all: bool) -> None:
        """Compare with rows of the base's file `path`. `keep_all` keeps the rows that do not differ too."""
        self._row_bytes, self._path, self._keep_all = stack.row_bytes, path, keep_all
        self._numbers: list[npt.NDArray[np.int64]] = []
        self.rows: list[_Bytes] = []

    @property
    def numbers(self) -> npt.NDArray[np.int64]:
        """Return the changed rows of the stack."""
        return np.concatenate(self._numbers) if self._numbers else np.empty(0, np.int64)

    def append(self, data: _Bytes, offset: int) -> None:  # noqa: ARG002 - as write_shard calls it
        """Keep the stored rows `data`, the next ones of those that are `chosen`."""
        stored = data.reshape(-1, self._row_bytes)
        before = sum(map(len, self._numbers))
        self._keep(self.chosen[before : before + len(stored)], stored.copy())

    def choose(self, data: _Bytes, offset: int) -> None:
        """Keep those that are `chosen` of the stored rows `data`, which are at `offset` as in `compare`."""
        stored, first = data.reshape(-1, self._row_bytes), offset // self._row_bytes
        start, stop = np.searchsorted(self.chosen, (first, first + len(stored)))
        chosen = self.chosen[start:stop]
        self._keep(chosen, stored[chosen - first])

    def compare(self, data: _Bytes, offset: int) -> None:
        """Keep those of the stored rows `data` that differ. They are at `offset` of the stack's file in a full export."""
        stored, first = data.reshape(-1, self._row_bytes), offset // self._row_bytes
        base = np.empty_like(stored)
        try:
            with contextlib.closing(open_bytes(self._path)) as file:
                file.read_into(offset, base.reshape(-1).data)
        except (OSError, EOFError) as error:
            raise ExportError(
                f"base {self._path}: cannot be read: {reason(error)}. Verify the version, or leave base out."
            ) from None
        words = (np.uint64, np.uint32, np.uint16, np.uint8)  # the widest that fits: fewer comparisons
        word = next(word for word in words if self._row_bytes % np.dtype(word).itemsize == 0)
        differs = (np.ascontiguousarray(stored).view(word) != base.view(word)).any(axis=1)
        self.has_changes = self.has_changes or bool(differs.any())
        places = np.flatnonzero(differs | self._keep_all)
        if len(places):
            self._numbers.append(places + first)
            self.rows.append(stored[places])

    def _keep(self, numbers: npt.NDArray[np.int64], rows: _Bytes) -> None:
        if len(numbers):
            self.has_changes = True
            self._numbers.append(numbers)
            self.rows.append(rows)


class _StackFiles:
    """The files of one stack's overlay while they are written."""

    def __init__(self, stack: StackPlan, folder: Path) -> None:
        self._stack, self._folder = stack, folder
        self._bits = np.zeros(-(-stack.rows // 32), np.uint32)
        self.rows, self._has_changes = 0, False
        self._path = folder / f"{stack.name}_rows.data"
        self._path.touch()

    @property
    def bytes_written(self) -> int:
        """Return the bytes of changed rows so far."""
        return self.rows * self._stack.row_bytes * self._has_changes

    def add(self, changed: _ChangedRows) -> None:
        """Append the rows of the next shard."""
        numbers = changed.numbers
        self._has_changes = self._has_changes or changed.has_changes
        if not len(numbers):
            return
        with open(self._path, "ab") as file:
            for piece in changed.rows:
                file.write(piece.data)
        place, bit = np.divmod(numbers, 32)
        starts = np.flatnonzero(np.diff(place, prepend=-1))  # of the words, because numbers are sorted
        self._bits[place[starts]] |= np.bitwise_or.reduceat(np.left_shift(np.uint32(1), bit.astype(np.uint32)), starts)
        self.rows += len(numbers)

    def finish(self, crc32c: int | None, *, is_whole: bool) -> tuple[StackPlan, dict[str, int]]:
        """Write the other files. Return the stack with its overlay, and the checksum of every file that is not the base's."""
        stack = self._stack
        if not self._has_changes:
            self._path.unlink()
            return stack, {}
        if is_whole:
            assert crc32c is not None, "a stack that is written whole is read whole"
            self._path.rename(self._folder / stack.file)
            return stack, {stack.name: crc32c}
        overlaid = dataclasses.replace(stack, overlay_rows=self.rows)
        _, own, words = overlaid.arrays
        (self._folder / words.file).write_bytes(_words(self._bits).data)
        return overlaid, {array.name: file_crc32c(self._folder / array.file) for array in (own, words)}


def _words(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.int32]:
    """Return the lower and upper half of each word, [n, 2]; see OverlayEntry."""
    words = np.empty((len(bits), 2), np.int32)
    words[:, 0] = bits.view(np.int32)
    before = -1
    for start in range(0, len(bits), _WORDS_AT_ONCE):
        part = bits[start : start + _WORDS_AT_ONCE]
        sums = before + np.cumsum(_BITS_SET[part.view(np.uint8)].reshape(-1, 4).sum(axis=1, dtype=np.int64))
        words[start, 1] = before
        words[start + 1 : start + len(part), 1] = sums[:-1]
        before = int(sums[-1])
    return words
