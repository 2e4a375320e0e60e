"""Tables of a checkpoint, of any format that `open_checkpoint` reads, streamed into a live layer.

plan     what goes where, proven from metadata before a row is written
stream   the rows themselves, piece by piece
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tpuembed.checkpoint import Checkpoint, open_checkpoint
from tpuembed.checkpoint.bundle.update_counts import update_counts
from tpuembed.errors import CheckpointMismatchError, ConfigError
from tpuembed.files import FilePath
from tpuembed.restore.plan import Request, TablePlan, plan_tables
from tpuembed.restore.stream import is_checked_while_read, restore_table
from tpuembed.table_access import HasTables, LiveTables

__all__ = ["RestoreReport", "TablePlan", "restore_saved", "restore_tables"]


@dataclasses.dataclass(frozen=True)
class RestoreReport:
    """What a restore did.

    Attributes:
        path, format: of the checkpoint.
        tables: what became of each table, in the layer's order.
        updates: the count of updates that the layer now goes on from; None where it was left as it was.
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
    resize: Mapping[str, str] | None = None,
    lossy: bool = False,
    **options: Any,
) -> RestoreReport:
    """Stream tables of the checkpoint at `path` into the tables of `layer`, in place.

    Memory beyond the tables stays at a few pieces of 16 MiB, whatever their size (and what the checkpoint's format needs
    to decode a chunk of its own). All names, shapes, dtypes and slots are compared before the first row is written.

    Args:
        layer: a `TPUEmbedding` that holds its tables in memory.
        path: as `open_checkpoint` takes it.
        tables: names of tables; or {the layer's name: the checkpoint's}. None for all: then both must have the same ones.
        slots: restore the optimizers' slots too, and the layer's count of updates where the checkpoint has it and every
            table that the layer trains is restored. False leaves slots and count as they are.
        resize: {table: "grow" or "shrink"} for tables whose vocabulary may differ. Rows that a grown table has more begin
            anew: with the table's initializer, and its slots with their initial values. (An initializer other than the
            default takes a second table's memory meanwhile.) A shrunk table leaves the checkpoint's last rows out.
        lossy: round float64 to float32. float16 and bfloat16 need no rounding.
        options: as `open_checkpoint` takes them.

    Raises:
        UnknownTableError: `tables` or `resize` name one that the layer or the checkpoint does not have.
        CheckpointMismatchError: layer and checkpoint disagree: tables, shapes, dtypes, slots or counts of updates.
        CheckpointCorruptError: a table or slot does not have the checksum that the checkpoint states. Where its rows lie in order
            it has been written by then, and is to be restored from another copy.
        ConfigError: an argument of the wrong kind, or a place where no table can be written.
        CheckpointError: as `open_checkpoint` and its reads.
    """
    if not callable(getattr(layer, "live_tables", None)):
        raise ConfigError(f"restore_tables: layer must be a tpuembed.TPUEmbedding, got {layer!r}")
    return _restore(layer, path, Request.of(tables, slots, resize, lossy), options)


def restore_saved(layer: HasTables, path: str, tables: Mapping[str, str]) -> RestoreReport:
    """What `tf.train.Checkpoint` would restore of `tables`, {layer's: checkpoint's}, if they lay where the layer has them.

    As TensorFlow does, it leaves out slots that the layer does not have; slots that the checkpoint lacks stay as they are,
    with a warning.

    Raises:
        CheckpointMismatchError, CheckpointCorruptError, ConfigError: as `restore_tables`.
    """
    return _restore(layer, path, Request(tables, slots=True, resize={}, lossy=False, rows_alone=True), {})


def _restore(layer: HasTables, path: str | FilePath, request: Request, options: Mapping[str, Any]) -> RestoreReport:
    live = layer.live_tables("restore_tables")
    with open_checkpoint(path, **options) as checkpoint:
        plans = plan_tables(checkpoint, live, request)
        updates = _updates(checkpoint.path, update_counts(checkpoint), live, plans) if request.slots else None
        _verify(checkpoint, plans)
        with live.writing():
            for plan in plans:
                restore_table(checkpoint, live, plan, request.slots)
        if updates is not None:
            live.updates.assign(updates)
        return RestoreReport(checkpoint.path, checkpoint.format, tuple(plans), updates)


def _verify(checkpoint: Checkpoint, plans: Sequence[TablePlan]) -> None:
    """Compare with their checksums what is not compared while it is read."""
    unproven: dict[str | None, list[str]] = {}
    for plan in plans:
        for slot in (None, *plan.slots):
            if not is_checked_while_read(checkpoint, plan, slot):
                unproven.setdefault(slot, []).append(plan.source)
    for slot, sources in unproven.items():
        checkpoint.verify(sources, slot)


def _updates(path: str, counts: Mapping[str, int], live: LiveTables, plans: Iterable[TablePlan]) -> int | None:
    """The layer's new count of updates: that of the one layer which trained all tables that this layer trains."""
    sources = {plan.table: plan.source for plan in plans}
    trained = [table for table, state in live.states.items() if state.optimizer is not None]
    if not trained or any(sources.get(table) not in counts for table in trained):
        return None
    found = {table: counts[sources[table]] for table in trained}
    if len(set(found.values())) > 1:
        raise CheckpointMismatchError(
            f"checkpoint {path}: its layers made different numbers of updates ({found}), and layer {live.layer!r} counts one "
            "for all its tables; restore the tables of each, tables=[...], in a call of its own"
        )
    return next(iter(found.values()))
