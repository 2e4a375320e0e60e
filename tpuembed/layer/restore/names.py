"""Plans a restore by name from the vocabularies of a layer and of a checkpoint."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np

from tpuembed.checkpoint import Checkpoint
from tpuembed.errors import CheckpointMismatchError, ConfigError, warn
from tpuembed.layer.tables import LiveTables
from tpuembed.vocabulary import Vocabulary

__all__ = ["NamesPlan", "names_by_number", "plan_names"]

Array = np.ndarray[Any, Any]

_EXAMPLES: Final = 5


@dataclasses.dataclass(frozen=True)
class NamesPlan:
    """What happens to the rows of a table that gets another vocabulary.

    Attributes:
        kept: number of names of both, whose rows move to their new numbers.
        new: number of names of the new vocabulary alone.
        dropped: number of names of the old vocabulary alone, whose rows are omitted.
        new_names, dropped_names: the first of them.
        buckets: number of rows for unknown names, in the old and in the new vocabulary. They are kept if it is the same.
        numbers: int64 [rows with a name or bucket], the new number of each row; negative if it is omitted.
    """

    kept: int
    new: int
    dropped: int
    new_names: tuple[bytes | int, ...]
    dropped_names: tuple[bytes | int, ...]
    buckets: tuple[int, int]
    numbers: Array = dataclasses.field(repr=False, compare=False)

    @classmethod
    def of(cls, old: Vocabulary, new: Vocabulary) -> "NamesPlan":
        """Return the plan of a table whose rows have the names of `old`, and will have those of `new`.

        Raises:
            ConfigError: their names have different dtypes.
        """
        numbers = old.rows_in(new)
        is_dropped = numbers < 0
        is_dropped[: old.oov_buckets] = False
        dropped = np.flatnonzero(is_dropped)
        is_new = np.ones(new.rows, bool)
        is_new[: new.oov_buckets] = False
        is_new[numbers[numbers >= 0]] = False
        added = np.flatnonzero(is_new)
        return cls(
            kept=len(old) - len(dropped),
            new=len(added),
            dropped=len(dropped),
            new_names=tuple(new.names(added[:_EXAMPLES])),
            dropped_names=tuple(old.names(dropped[:_EXAMPLES])),
            buckets=(old.oov_buckets, new.oov_buckets),
            numbers=numbers,
        )


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
        if own is None and plan.source in checkpoint.vocabularies:
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
        moved = own.moved_in(saved)
        if adopt or not len(moved):
            found[plan.table] = saved
        elif len(saved.moved_in(own)):
            raise CheckpointMismatchError(
                f"{where} does not have the name {own.names(moved[:1])[0]!r} at row {moved[0]}, where layer {live.layer!r} has "
                "it. Restore with by='name', or build the layer with an empty vocabulary."
            )
    return found


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
        _check_rows_can_move(checkpoint, source, found[table])
    if not found:
        raise CheckpointMismatchError(
            f"checkpoint {checkpoint.path}: none of the tables to restore has a vocabulary there and in layer {layer!r}. "
            "Leave by='name' out."
        )
    return found


def _check_rows_can_move(checkpoint: Checkpoint, table: str, names: NamesPlan) -> None:
    """Check the features that know rows of `table`, which move as `names` says, by their numbers.

    Warns of features that take row numbers: what makes the numbers has to follow.

    Raises:
        ConfigError: a feature looks unknown names up in a row that is not a bucket before and after. By the new names, another
            name has that row, or it is dropped.
    """
    config: Mapping[str, Any] = checkpoint.layer_config or {}
    policy = config.get("tables", {}).get(table, {}).get("out_of_vocabulary", "error")
    saved = list(_features_of(config.get("features"), table))
    takes_names = [isinstance(feature.get("vocabulary"), dict) for feature in saved]
    for feature, named in zip(saved, takes_names, strict=True):
        row = feature.get("out_of_vocabulary", policy)
        if named and isinstance(row, int) and row >= min(names.buckets):
            raise ConfigError(
                f"checkpoint {checkpoint.path}: a feature of table {table!r} has out_of_vocabulary={row}, and by the new names "
                "that row is another one. Restore the table by number, and use oov_buckets=1 in the place of a row for unknown "
                "names."
            )
    moved = (names.numbers >= 0) & (names.numbers != np.arange(len(names.numbers)))
    if (moved.any() or names.dropped) and any(takes_names) and not all(takes_names):
        warn(
            f"checkpoint {checkpoint.path}: a feature of table {table!r} takes row numbers, and rows get other numbers. Make sure "
            "that what numbers its ids does so by the new names"
        )


def _features_of(saved: Any, table: str) -> Iterator[dict[str, Any]]:
    """Yield the saved features of `table`, of any structure of features."""
    if isinstance(saved, dict) and saved.get("table") == table:
        yield saved
        return
    children = saved.values() if isinstance(saved, dict) else saved if isinstance(saved, list) else ()
    for child in children:
        yield from _features_of(child, table)
