"""Restores the tables of a checkpoint, in any format that `open_checkpoint` reads, into a live layer.

The plan of each table is proven from metadata before a row is written.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tpuembed.checkpoint import Checkpoint, open_checkpoint
from tpuembed.errors import CheckpointMismatchError, ConfigError
from tpuembed.files import FilePath
from tpuembed.restore.names import NamesPlan, live_vocabularies, names_by_number
from tpuembed.restore.plan import RestoreRequest, TablePlan, plan_tables
from tpuembed.restore.stream import is_checked_while_read, restore_stamps, restore_table
from tpuembed.row_history import RowHistory
from tpuembed.table_access import HasTables, LiveTables

__all__ = ["NamesPlan", "RestoreReport", "TablePlan", "restore_saved", "restore_tables"]


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


def restore_tables(
    layer: HasTables,
    path: str | FilePath,
    tables: Iterable[str] | Mapping[str, str] | None = None,
    slots: bool = True,
    *,
    by: str = "number",
    resize: Mapping[str, str] | bool | None = None,
    lossy: bool = False,
    **options: Any,
) -> RestoreReport:
    """Stream tables of the checkpoint at `path` into the tables of `layer`, in place.

    Beyond the tables, it needs a few pieces of 16 MiB, and the memory that the checkpoint's format needs to decode a
    chunk. It compares all names, shapes, dtypes and slots before it writes the first row.

    Args:
        layer: a `TPUEmbedding` that holds its tables in memory.
        path: as `open_checkpoint` takes it.
        tables: names of tables, or {the layer's name: the checkpoint's}. None restores all. Then both must have the
            same tables.
        slots: restore the optimizers' slots too. This includes the layer's count of updates, if the checkpoint has it
            and every table that the layer trains is restored. False leaves slots and count unchanged.
        by: "number" restores each row to its number. "name" restores it to the row that the layer's vocabulary gives its
            name, for tables with a vocabulary in layer and checkpoint. See below.
        resize: {table: "grow" or "shrink"} for tables whose vocabulary may differ. The added rows of a grown table get
            initial values, from the table's initializer and its slots' defaults. (An initializer other than the default
            needs the memory of a second table meanwhile.) A shrunk table omits the checkpoint's last rows. By name, True
            lets tables with a vocabulary have different numbers of rows.
        lossy: round float64 to float32. float16 and bfloat16 need no rounding.
        options: as `open_checkpoint` takes them.

    By number, names follow their rows: the layer's vocabulary takes the names of the checkpoint's. If it has names
    already, one of both has all names of the other at the same rows, and the larger one stays.

    By name, a name of both is kept: its row and slots move to its new row. A name of the layer alone is new. Its row and
    slots do not change: in a new layer they have initial values. A name of the checkpoint alone is dropped. Rows of buckets
    are kept if both have the same number of buckets, and do not change otherwise. Tables without a vocabulary in both are
    restored by number. `TablePlan.names` of the report has the counts and examples.

    Raises:
        UnknownTableError: `tables` or `resize` name a table that the layer or the checkpoint does not have.
        CheckpointMismatchError: layer and checkpoint differ in tables, shapes, dtypes, slots or counts of updates. By name,
            also if a table has a vocabulary on one side alone, or if the dtypes of names differ. By number, also if a name
            has different rows on the two sides.
        CheckpointCorruptError: the checksum of a table or slot differs from the checkpoint's. A table whose rows are in
            order is already written by then. Restore it from another copy.
        ConfigError: an argument is of the wrong kind, tables cannot be written from here, or the layer's names were replaced
            when another layer was restored, and the checkpoint's would not take their place.
        CheckpointError: as `open_checkpoint` and its reads.
    """
    if not callable(getattr(layer, "live_tables", None)):
        raise ConfigError(f"restore_tables: layer must be a tpuembed.TPUEmbedding, got {type(layer).__name__}.")
    return _restore(layer, path, RestoreRequest.of(tables, slots, resize, lossy, by), options)


def restore_saved(layer: HasTables, path: str, tables: Mapping[str, str]) -> RestoreReport:
    """Restore `tables`, {layer's: checkpoint's}, as `tf.train.Checkpoint` would if their rows were in the layer's
    order.

    Like TensorFlow, it omits slots that the layer does not have. Slots that the checkpoint lacks stay unchanged, with a
    warning.

    Raises:
        CheckpointMismatchError, CheckpointCorruptError, ConfigError: as `restore_tables`.
    """
    return _restore(layer, path, RestoreRequest(tables, slots=True, resize={}, lossy=False, rows_only=True), {})


def _restore(
    layer: HasTables, path: str | FilePath, request: RestoreRequest, options: Mapping[str, Any]
) -> RestoreReport:
    live = layer.live_tables("restore_tables")
    with open_checkpoint(path, **options) as checkpoint:
        vocabularies = live_vocabularies(layer)
        plans = plan_tables(checkpoint, live, request, vocabularies)
        names = names_by_number(checkpoint, live, plans, vocabularies, adopt=request.rows_only)
        updates = _updates(checkpoint.path, checkpoint.update_counts(), live, plans) if request.slots else None
        history = None if live.stamps is None or updates is None else _history(checkpoint, live, plans, updates)
        _verify(checkpoint, plans)
        _stamp(live, plans, updates)
        with live.writing():
            for plan in plans:
                restore_table(checkpoint, live, plan, request.slots)
        for table, saved in names.items():
            layer.take_names(table, saved)
        if updates is not None:
            live.updates.assign(updates)
        if live.stamps is not None and history is not None:
            for plan in plans:
                restore_stamps(checkpoint, live.stamps, plan)
            live.stamps.adopt(history, live.states)
        return RestoreReport(checkpoint.path, checkpoint.format, tuple(plans), updates)


def _stamp(live: LiveTables, plans: Iterable[TablePlan], updates: int | None) -> None:
    """Stamp the rows that are about to be written. A new count of updates begins a new history."""
    if live.stamps is None:
        return
    if updates is not None:
        live.stamps.rewritten()
        return
    for plan in plans:
        written = plan.rows + plan.new_rows if plan.names is None else live.state(plan.table).config.vocabulary_size
        live.stamps.wrote(plan.table, 0, written)


def _history(checkpoint: Checkpoint, live: LiveTables, plans: Sequence[TablePlan], updates: int) -> RowHistory | None:
    """Return the history that all tables of the layer share in the checkpoint, or None.

    A base knows tables by name and has float32 rows. So tables with another name or dtype have no base. Neither have tables
    whose rows were restored by name: their numbers are others now.
    """
    if any(plan.names is not None for plan in plans):
        return None
    found = [checkpoint.row_history(plan.source) for plan in plans]
    same = {plan.table for plan in plans if plan.table == plan.source and plan.dtypes[None] == np.float32}
    history = found[0]
    if history is None or any(other != history for other in found) or same != live.states.keys():
        return None
    return history if history.updates == updates else None


def _verify(checkpoint: Checkpoint, plans: Sequence[TablePlan]) -> None:
    """Compare the checksums that are not compared during the read."""
    unproven: dict[str | None, list[str]] = {}
    for plan in plans:
        for slot in (None, *plan.slots):
            if not is_checked_while_read(checkpoint, plan, slot):
                unproven.setdefault(slot, []).append(plan.source)
    for slot, sources in unproven.items():
        checkpoint.verify(sources, slot)


def _updates(path: str, counts: Mapping[str, int], live: LiveTables, plans: Iterable[TablePlan]) -> int | None:
    """Return the layer's new count of updates, from the one layer of the checkpoint that trained all its tables, or None."""
    sources = {plan.table: plan.source for plan in plans}
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
