"""The plan of a restore by name: the new number of each row of a checkpoint, and which names are kept, new and dropped."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from tpuembed.checkpoint import Checkpoint
from tpuembed.config.structure import flatten
from tpuembed.errors import CheckpointMismatchError, ConfigError
from tpuembed.vocabulary import Vocabulary

__all__ = ["NamesPlan", "live_vocabularies", "plan_names"]

Array = np.ndarray[Any, Any]

_EXAMPLES: Final = 5


@dataclasses.dataclass(frozen=True)
class NamesPlan:
    """What happens to the names of a table.

    Attributes:
        kept: number of names of both, whose rows move to their new numbers.
        new: number of names of the layer alone, whose rows do not change.
        dropped: number of names of the checkpoint alone, whose rows are omitted.
        new_names, dropped_names: the first of them.
        buckets: number of rows for unknown names, in the checkpoint and in the layer. They are kept if it is the same.
        numbers: int64 [rows with a name or bucket], the new number of each row of the checkpoint; negative if it is omitted.
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
        """Return the plan of a table whose rows have the names of `old`, and will have those of `new`."""
        numbers = old.rows_in(new)
        dropped = np.flatnonzero(numbers[old.oov_buckets :] < 0) + old.oov_buckets
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


def live_vocabularies(layer: Any) -> dict[str, Vocabulary]:
    """Return table name -> vocabulary, of the tables of `layer` whose features have one.

    Raises:
        ConfigError: two features of a table have different names.
    """
    found: dict[str, Vocabulary] = {}
    for path, feature in flatten(getattr(getattr(layer, "_parts", None), "features", ())):
        vocabulary, table = feature.vocabulary, feature.table.name
        if vocabulary is None:
            continue
        other = found.setdefault(table, vocabulary)
        if other is not vocabulary and other.to_bytes() != vocabulary.to_bytes():
            raise ConfigError(
                f"layer {layer.name!r}: feature {path!r} has another vocabulary than other features of table {table!r}. Give "
                "them one vocabulary."
            )
    return found


def plan_names(
    checkpoint: Checkpoint, layer: str, pairs: Mapping[str, str], vocabularies: Mapping[str, Vocabulary]
) -> dict[str, NamesPlan]:
    """Return the plans of the tables of `pairs`, {the layer's name: the checkpoint's}, that have a vocabulary in both.

    Raises:
        CheckpointMismatchError: none has one, a table has one on one side alone, or dtypes differ.
        CheckpointCorruptError: a vocabulary is damaged.
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
        found[table] = NamesPlan.of(saved, own)
    if not found:
        raise CheckpointMismatchError(
            f"checkpoint {checkpoint.path}: none of the tables to restore has a vocabulary there and in layer {layer!r}. "
            "Leave by='name' out."
        )
    return found
