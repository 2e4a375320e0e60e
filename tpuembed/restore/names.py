"""Plans a restore by name from the vocabularies of a layer and of a checkpoint."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from tpuembed.backends.tf_config import local
from tpuembed.checkpoint import Checkpoint
from tpuembed.checkpoint.moved_rows import check_rows_can_move
from tpuembed.errors import CheckpointMismatchError, warn
from tpuembed.layer_vocabularies import check_shared
from tpuembed.table_access import LiveTables
from tpuembed.vocabulary import NamesPlan, Vocabulary

__all__ = ["continue_counts", "live_vocabularies", "names_by_number", "plan_names"]

Array = np.ndarray[Any, Any]


def live_vocabularies(layer: Any) -> dict[str, Vocabulary]:
    """Return table name -> vocabulary, of the tables of `layer` whose features have one."""
    return dict(getattr(layer, "vocabularies", {}))


def names_by_number(
    checkpoint: Checkpoint,
    live: LiveTables,
    plans: Iterable[Any],
    vocabularies: Mapping[str, Vocabulary],
    adopt: bool,
) -> dict[str, Vocabulary]:
    """Return the checkpoint's vocabulary of each table that is restored by number and takes its names.

    A layer's vocabulary that has all of its names at the same rows, and more, keeps its own.

    Args:
        plans: TablePlans of all tables.
        vocabularies: those of the layer's tables.
        adopt: do not compare the names with the layer's.

    Raises:
        CheckpointMismatchError: the names have another type or other buckets, do not fit into the table, or the layer's names
            have other rows.
    """
    found: dict[str, Vocabulary] = {}
    for plan in plans:
        own = vocabularies.get(plan.table)
        if own is None and checkpoint.vocabulary_header(plan.source) is not None:
            warn(
                f"checkpoint {checkpoint.path}: table {plan.source!r} has names, and table {plan.table!r} of layer {live.layer!r} "
                "takes row numbers. The rows are restored by number, and what the layer saves has no names. To keep them, give the "
                "features vocabulary=Vocabulary()"
            )
        saved = None if own is None or plan.names is not None else checkpoint.vocabulary(plan.source)
        if own is None or saved is None:
            continue
        where = f"checkpoint {checkpoint.path}: the vocabulary of table {plan.source!r}"
        capacity = live.state(plan.table).config.vocabulary_size
        if unlike := own.unlike(saved):
            option, mine, its = unlike
            raise CheckpointMismatchError(
                f"{where} has {option} {its}. That of layer {live.layer!r} has {mine}. Make them equal."
            )
        if saved.rows > capacity:
            raise CheckpointMismatchError(
                f"{where} needs {saved.rows} rows. The table of layer {live.layer!r} has {capacity}. Restore it with by='name' "
                "into a layer whose vocabulary has the names to keep."
            )
        moved = _moved(own, saved)
        if adopt or not len(moved):
            found[plan.table] = saved
        elif len(_moved(saved, own)):
            raise CheckpointMismatchError(
                f"{where} does not have the name {own.names(moved[:1])[0]!r} at row {moved[0]}, where layer {live.layer!r} has "
                "it. Restore with by='name', or build the layer with an empty vocabulary."
            )
    check_shared(f"checkpoint {checkpoint.path}", vocabularies, found)
    return found


def continue_counts(
    checkpoint: Checkpoint,
    live: LiveTables,
    plans: Iterable[Any],
    vocabularies: Mapping[str, Vocabulary],
    replaced: Collection[str],
) -> None:
    """Give vocabularies that kept their own names the counts and last updates of the names that the checkpoint has.

    Updates are numbered as the layer counts them.

    `replaced` are the tables whose names were replaced by the checkpoint's.
    """
    growing = [plan for plan in plans if plan.table in vocabularies and vocabularies[plan.table].grows]
    for plan in growing:
        own, updates = vocabularies[plan.table], int(local(live.updates).numpy())
        saved = None if plan.table in replaced else checkpoint.vocabulary(plan.source)
        if saved is not None:
            own.continue_counts(saved, updates)
        own.count_updates_from(updates)


def _moved(vocabulary: Vocabulary, other: Vocabulary) -> Array:
    """Return the rows, int64 [n], whose name has another row in `other`, or none."""
    rows = vocabulary.rows_in(other)
    moved = rows != np.arange(len(rows))
    moved[vocabulary.free_rows] = False
    return np.flatnonzero(moved)


def plan_names(
    checkpoint: Checkpoint, layer: str, pairs: Mapping[str, str], vocabularies: Mapping[str, Vocabulary]
) -> dict[str, NamesPlan]:
    """Return the plans of the tables of `pairs`, {the layer's name: the checkpoint's}, that have a vocabulary in both.

    Raises:
        CheckpointMismatchError: none has one, a table has one on one side alone, dtypes differ, or all names would be dropped.
        CheckpointCorruptError: a vocabulary is damaged.
        ConfigError: out_of_vocabulary is a row of the table in the checkpoint.
    """
    found: dict[str, NamesPlan] = {}
    for table, source in pairs.items():
        where = f"checkpoint {checkpoint.path}: table {source!r}"
        own, saved = vocabularies.get(table), checkpoint.vocabulary(source)
        if own is None and saved is None:
            continue
        if own is None or saved is None:
            has, lacks = ("has a vocabulary", "has none") if own is None else ("has no vocabulary", "has one")
            raise CheckpointMismatchError(
                f"{where} {has}. Table {table!r} of layer {layer!r} {lacks}. Restore the table by number, in a separate call."
            )
        if own.dtype != saved.dtype:
            raise CheckpointMismatchError(
                f"{where} has names of dtype {saved.dtype}. Table {table!r} of layer {layer!r} has {own.dtype}. Restore the "
                "table by number, in a separate call."
            )
        if len(saved) and not len(own):
            raise CheckpointMismatchError(
                f"{where} has {len(saved)} names. The vocabulary of table {table!r} of layer {layer!r} has none, so all of them "
                "would be dropped. Leave by='name' out to take the checkpoint's names, give the vocabulary the names to keep, or "
                "restore other tables alone with tables=[...]."
            )
        found[table] = NamesPlan.of(saved, own)
        check_rows_can_move(checkpoint, source, found[table])
    if not found:
        raise CheckpointMismatchError(
            f"checkpoint {checkpoint.path}: none of the tables to restore has a vocabulary there and in layer {layer!r}. "
            "Leave by='name' out."
        )
    return found
