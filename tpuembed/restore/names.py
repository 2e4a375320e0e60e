"""Plans a restore by name from the vocabularies of a layer and of a checkpoint."""

from collections.abc import Mapping
from typing import Any

from tpuembed.checkpoint import Checkpoint
from tpuembed.config.structure import flatten
from tpuembed.errors import CheckpointMismatchError, ConfigError
from tpuembed.vocabulary import NamesPlan, Vocabulary

__all__ = ["live_vocabularies", "plan_names"]


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
