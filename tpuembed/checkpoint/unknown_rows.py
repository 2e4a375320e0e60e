"""Rows that a layer looks unknown names up in, of a table whose names get other rows."""

from collections.abc import Iterator, Mapping
from typing import Any

from tpuembed.checkpoint.types import Checkpoint
from tpuembed.errors import ConfigError

__all__ = ["check_unknown_row", "features_of"]


def check_unknown_row(checkpoint: Checkpoint, table: str, oov_buckets: int) -> None:
    """Raise ConfigError if a feature of `table` looks unknown names up in a row that is not a bucket.

    If the table gets other names, another name has that row, or the row is dropped.
    """
    config: Mapping[str, Any] = checkpoint.layer_config or {}
    policy = config.get("tables", {}).get(table, {}).get("out_of_vocabulary", "error")
    for feature in features_of(config.get("features"), table):
        row = feature.get("out_of_vocabulary", policy)
        if isinstance(row, int) and row >= oov_buckets:
            raise ConfigError(
                f"checkpoint {checkpoint.path}: a feature of table {table!r} has out_of_vocabulary={row}, and by the new names "
                "that row is another one. Restore the table by number, and use oov_buckets=1 in the place of a row for unknown "
                "names."
            )


def features_of(saved: Any, table: str) -> Iterator[dict[str, Any]]:
    """Yield the saved features of `table` that take names, of any structure of features."""
    if isinstance(saved, dict) and saved.get("table") == table and isinstance(saved.get("vocabulary"), dict):
        yield saved
        return
    children = saved.values() if isinstance(saved, dict) else saved if isinstance(saved, list) else ()
    for child in children:
        yield from features_of(child, table)
