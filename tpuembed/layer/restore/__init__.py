"""Restores the tables of a checkpoint, in any format that `open_checkpoint` reads, into a live layer.

The plan of each table is proven from metadata before a row is written.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import keras
import numpy as np

from tpuembed.backends.table_rows import PIECE_BYTES, initial_pieces, piece_rows, write_rows
from tpuembed.backends.table_state import TableState
from tpuembed.checkpoint import Checkpoint, open_checkpoint
from tpuembed.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    TpuEmbedError,
    first_few,
    warn,
)
from tpuembed.files import FilePath
from tpuembed.formats.tensor_bundle import crc
from tpuembed.layer.restore.names import NamesPlan, names_by_number
from tpuembed.layer.restore.plan import RestoreRequest, TablePlan, plan_tables
from tpuembed.layer.tables import HasTables, LiveTables, write_numbers
from tpuembed.manifest.row_history import RowHistory
from tpuembed.vocabulary import Vocabulary

__all__ = ["NamesPlan", "RestoreReport", "RestoreRequest", "TablePlan", "restore", "restore_count", "restore_saved"]

Array = np.ndarray[Any, Any]

_STAMPS: Final = PIECE_BYTES // 4


@dataclasses.dataclass(frozen=True)
class RestoreReport:
    """The result of a restore.

    Attributes:
        path, format: the checkpoint's path and format.
        tables: the plan of each table, in the layer's order.
        updates: the layer's new count of updates. None if it was not changed.
    """

    path: str
    format: str
    tables: tuple[TablePlan, ...]
    updates: int | None


def restore_saved(layer: HasTables, path: str, tables: Mapping[str, str]) -> RestoreReport:
    """Restore `tables`, {layer's: checkpoint's}, as `tf.train.Checkpoint` would if their rows were in the layer's
    order.

    Like TensorFlow, it omits slots that the layer does not have. Slots that the checkpoint lacks stay unchanged, with a
    warning.

    Raises:
        CheckpointMismatchError, CheckpointCorruptError, ConfigError: as `TPUEmbedding.restore_tables`.
    """
    return restore(layer, path, RestoreRequest(tables, slots=True, resize={}, lossy=False, rows_only=True), {})


def restore_count(layer: HasTables, states: Mapping[str, TableState], path: str) -> None:
    """Set the count of updates of a layer with schedules to that of the optimizers in the checkpoint at `path`, or warn.

    No embedding layer of ours wrote the checkpoint. TensorFlow restores it whether or not it has a count.
    """
    if not (scheduled := _scheduled(states)):
        return
    updates, why = None, "does not say how many updates its tables have had"
    try:
        live = layer.live_tables("restore_count")
        with open_checkpoint(path) as checkpoint:
            updates = _updates(path, checkpoint.update_counts, live, {table: table for table in states})
    except TpuEmbedError as error:
        why = f"the count of updates cannot be read: {error}"
    if updates is None:
        _warn_of_schedules(path, scheduled, why)
    else:
        live.updates.assign(updates)


def restore(
    layer: HasTables,
    path: str | FilePath,
    request: RestoreRequest,
    options: Mapping[str, Any],
    count: int | None = None,
) -> RestoreReport:
    """Restore the tables that `request` asks for. See `TPUEmbedding.restore_tables`. A `count` of updates replaces the file's."""
    live = layer.live_tables("restore_tables")
    with open_checkpoint(path, **options) as checkpoint:
        if request.tables is None:
            request = dataclasses.replace(request, tables=layer.sources_of(checkpoint.tables()))
        vocabularies: dict[str, Vocabulary] = dict(getattr(layer, "vocabularies", {}))
        plans = plan_tables(checkpoint, live, request, vocabularies)
        names = names_by_number(checkpoint, live, plans, vocabularies, adopt=request.rows_only)
        updates, sources = count, {plan.table: plan.source for plan in plans}
        if count is None and request.slots:
            updates = _updates(checkpoint.path, checkpoint.update_counts, live, sources)
            scheduled = _scheduled({plan.table: live.state(plan.table) for plan in plans})
            if scheduled and updates is None:
                _warn_of_schedules(checkpoint.path, scheduled, "does not say how many updates its tables have had")
        history = None if live.stamps is None or updates is None else _history(checkpoint, live, plans, updates)
        # By slot: the tables whose checksums are not compared while their rows are read.
        unproven: dict[str | None, list[str]] = {}
        for plan in plans:
            for slot in (None, *plan.slots):
                if _recorded_checksum(checkpoint, plan, slot) is None:
                    unproven.setdefault(slot, []).append(plan.source)
        for slot, unread in unproven.items():
            checkpoint.verify(unread, slot)
        if live.stamps is not None and updates is not None:
            live.stamps.rewritten()  # a new count of updates begins a new history
        elif live.stamps is not None:
            for plan in plans:
                rows = live.state(plan.table).config.vocabulary_size
                live.stamps.wrote(plan.table, 0, rows if plan.names else plan.rows + plan.new_rows)
        with live.writing():
            for plan in plans:
                _restore_table(checkpoint, live, plan, request.slots)
        for table, saved in names.items():
            layer.take_names(table, saved)
        if updates is not None:
            live.updates.assign(updates)
        if live.stamps is not None and history is not None:
            for plan in plans:
                saved_stamps, buffer = checkpoint.stamps[plan.source], np.empty(min(_STAMPS, plan.rows), np.int32)
                for start in range(0, plan.rows, _STAMPS):
                    piece = buffer[: plan.rows - start]
                    saved_stamps.read(start, piece)
                    live.stamps.write(plan.table, start, piece)
                if plan.new_rows:
                    live.stamps.wrote(plan.table, plan.rows, plan.rows + plan.new_rows)
            live.stamps.adopt(history, live.states)
        for node in live.nodes:
            node.given.note_restored(node, checkpoint.path, sources, is_chosen=not request.rows_only)
        return RestoreReport(checkpoint.path, checkpoint.format, tuple(plans), updates)


def _history(checkpoint: Checkpoint, live: LiveTables, plans: Sequence[TablePlan], updates: int) -> RowHistory | None:
    """Return the history that all tables of the layer share in the checkpoint, or None.

    A base knows tables by name and has float32 rows. So tables with another name or dtype have no base. Neither have tables
    whose rows were restored by name: their numbers are others now.
    """
    if any(plan.names is not None for plan in plans):
        return None
    stamps = checkpoint.stamps
    found = [stamps[plan.source].history if plan.source in stamps else None for plan in plans]
    same = {plan.table for plan in plans if plan.table == plan.source and plan.dtypes[None] == np.float32}
    history = found[0]
    if history is None or any(other != history for other in found) or same != live.states.keys():
        return None
    return history if history.updates == updates else None


def _updates(path: str, counts: Mapping[str, int], live: LiveTables, sources: Mapping[str, str]) -> int | None:
    """Return the layer's new count of updates, from the one layer of the checkpoint that trained all its tables, or None."""
    trained = [table for table, state in live.states.items() if state.optimizer is not None]
    if not trained or any(sources.get(table) not in counts for table in trained):
        return None
    found = {table: counts[sources[table]] for table in trained}
    if len(set(found.values())) > 1:
        raise CheckpointMismatchError(
            f"checkpoint {path}: its layers made different numbers of updates ({found}). Layer {live.layer!r} has one count "
            "for all its tables. Restore the tables of each layer in a separate call, with tables=[...]."
        )
    return next(iter(found.values()))


def _scheduled(states: Mapping[str, TableState]) -> list[str]:
    """Return the tables whose learning rate is a schedule."""
    rates = {table: getattr(state.optimizer, "learning_rate", None) for table, state in states.items()}
    return [table for table, rate in rates.items() if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)]


def _warn_of_schedules(path: str, tables: Iterable[str], why: str) -> None:
    """Warn that schedules of restored tables go on at the layer's own count, because the checkpoint has none for it."""
    warn(
        f"checkpoint {path}: {why}, so the learning-rate schedule of {first_few(map(repr, tables))} goes on at the layer's count. "
        "Give restore_tables(..., updates=N)."
    )


def _recorded_checksum(checkpoint: Checkpoint, plan: TablePlan, slot: str | None) -> int | None:
    """Return the checksum of all that a restore reads. If the checkpoint has none, `Checkpoint.verify` has to be called."""
    checksums = checkpoint.checksums
    return None if plan.skipped_rows or checksums is None else checksums.recorded(plan.source, slot)


def _restore_table(checkpoint: Checkpoint, live: LiveTables, plan: TablePlan, slots: bool) -> None:
    """Write the table, and its slots if `slots`, according to `plan`.

    Raises:
        CheckpointError: the rows cannot be read, or their checksum is wrong. The rows before them are already written.
    """
    state = live.state(plan.table)
    for slot in (None, *plan.slots):
        variable = live.variable(plan.table, slot)
        try:
            _stream(checkpoint, plan, slot, variable)
        except Exception as error:
            error.add_note(f"table {plan.table!r} of layer {live.layer!r} is partly restored. Restore it again.")
            raise
    for slot in (None, *(state.slots if slots else ())):
        for start, rows in initial_pieces(state, slot, plan.rows, plan.rows + plan.new_rows):
            write_rows(live.variable(plan.table, slot), start, rows)


def _stream(checkpoint: Checkpoint, plan: TablePlan, slot: str | None, variable: Any) -> None:
    step = piece_rows(plan.dim)
    buffer = np.empty((min(step, plan.rows), plan.dim), plan.dtypes[slot])
    checksum = 0
    for start in range(0, plan.rows, step):
        piece = buffer[: plan.rows - start]
        checkpoint.read_into(plan.source, start, piece, slot)
        checksum = crc.extend(checksum, piece.reshape(-1).view(np.uint8))
        try:
            with np.errstate(over="raise"):
                rows = piece.astype(np.float32, copy=False)
        except FloatingPointError:
            what = "a row" if slot is None else f"a row of slot {slot!r}"
            raise CheckpointMismatchError(
                f"checkpoint {checkpoint.path}: table {plan.source!r}: {what} has a number beyond the range of float32. "
                "Leave the table out."
            ) from None
        if plan.names is None:
            write_rows(variable, start, rows)
        else:
            numbers = plan.names.numbers[start : start + len(piece)]
            kept = np.flatnonzero(numbers >= 0)
            write_numbers(variable, numbers[kept], rows[kept])
    stated = _recorded_checksum(checkpoint, plan, slot)
    if stated is not None and stated != checksum:
        what = f"table {plan.source!r}" if slot is None else f"table {plan.source!r}: slot {slot!r}"
        raise CheckpointCorruptError.of(
            f"checkpoint {checkpoint.path}: {what}: its index says CRC32C {stated:#010x}. The CRC32C of its bytes is "
            f"{checksum:#010x}"
        )
