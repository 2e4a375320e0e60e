"""Rows that features know by their numbers, of a table whose names get other rows."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tpuembed.checkpoint.types import Checkpoint
from tpuembed.errors import ConfigError, warn
from tpuembed.vocabulary import NamesPlan

__all__ = ["check_rows_can_move", "features_of", "takes_names"]


def check_rows_can_move(checkpoint: Checkpoint, table: str, names: NamesPlan) -> None:
    """Check the features that know rows of `table`, which move as `names` says, by their numbers.

    Warns of features that take row numbers: what makes the numbers has to follow.

    Raises:
        ConfigError: a feature looks unknown names up in a row that is not a bucket before and after. By the new names, another
            name has that row, or it is dropped.
    """
    config: Mapping[str, Any] = checkpoint.layer_config or {}
    policy = config.get("tables", {}).get(table, {}).get("out_of_vocabulary", "error")
    saved = list(features_of(config.get("features"), table))
    for feature in saved:
        row = feature.get("out_of_vocabulary", policy)
        if takes_names(feature) and isinstance(row, int) and row >= min(names.buckets):
            raise ConfigError(
                f"checkpoint {checkpoint.path}: a feature of table {table!r} has out_of_vocabulary={row}, and by the new names "
                "that row is another one. Restore the table by number, and use oov_buckets=1 in the place of a row for unknown "
                "names."
            )
    moved = (names.numbers >= 0) & (names.numbers != np.arange(len(names.numbers)))
    if (moved.any() or names.dropped) and any(map(takes_names, saved)) and not all(map(takes_names, saved)):
        warn(
            f"checkpoint {checkpoint.path}: a feature of table {table!r} takes row numbers, and rows get other numbers. Make sure "
            "that what numbers its ids does so by the new names"
        )


def features_of(saved: Any, table: str) -> Iterator[dict[str, Any]]:
    """Yield the saved features of `table`, of any structure of features."""
    if isinstance(saved, dict) and saved.get("table") == table:
        yield saved
        return
    children = saved.values() if isinstance(saved, dict) else saved if isinstance(saved, list) else ()
    for child in children:
        yield from features_of(child, table)


def takes_names(feature: Mapping[str, Any]) -> bool:
    """Return True if a saved feature has a vocabulary."""
    return isinstance(feature.get("vocabulary"), dict)
