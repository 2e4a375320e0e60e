"""The config that `tpuembed.TPUEmbedding` writes beside its tables: their names, sizes and slots."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tpuembed.config import OPTIMIZERS
from tpuembed.errors import CheckpointCorruptError, CheckpointFormatError, reason

__all__ = ["check_size", "checked_count", "merge_configs", "parse_config", "slot_names"]


def parse_config(where: str, text: bytes) -> dict[str, Any]:
    """Return the config of one layer. Messages start with `where`.

    Raises:
        CheckpointCorruptError: it does not parse, or has no tables.
    """
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointCorruptError.of(f"{where} does not parse: {reason(error)}") from None
    tables = config.get("tables") if isinstance(config, dict) else None
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise CheckpointCorruptError.of(f"{where} has no mapping `tables` of mappings")
    return config


def slot_names(where: str, name: str, table: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the slots of table `name` from its config. Messages start with `where`.

    Raises:
        CheckpointFormatError: its optimizer is unknown.
    """
    optimizer = table.get("optimizer")
    if optimizer is None:
        return ()
    kind = optimizer.get("kind") if isinstance(optimizer, dict) else optimizer
    if not isinstance(kind, str) or kind not in OPTIMIZERS:
        raise CheckpointFormatError(
            f"{where}: table {name!r} has optimizer {kind!r}, but this version supports {', '.join(OPTIMIZERS)}. "
            "Upgrade tpuembed."
        )
    return OPTIMIZERS[kind].slots


def check_size(where: str, name: str, table: Mapping[str, Any], found: tuple[int, int]) -> None:
    """Raise CheckpointCorruptError unless table `name`, `found` on disk as (rows, dim), has the size in its config."""
    expected = [table.get("vocabulary_size"), table.get("dim")]
    if list(found) != expected:
        raise CheckpointCorruptError.of(
            f"{where}: table {name!r} is {expected} in its layer's config, but {list(found)} on disk"
        )


def checked_count(where: str, count: npt.NDArray[Any]) -> int:
    """Return a layer's count of updates. Raises CheckpointCorruptError if it is not one integer, or is negative."""
    if count.shape or count.dtype != np.int64 or count < 0:
        raise CheckpointCorruptError.of(
            f"{where}: a layer's count of updates is {count.dtype} {list(count.shape)} {count}"
        )
    return int(count)


def merge_configs(configs: Mapping[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Merge the configs of all layers, by their paths, without their SparseCore layouts.

    Features are merged into one dict, or kept under the paths if their names clash.
    """
    configs = {
        path: {part: said for part, said in config.items() if part != "layouts"} for path, config in configs.items()
    }
    if len(configs) < 2:
        return next(iter(configs.values()), None)
    tables = {name: table for config in configs.values() for name, table in config["tables"].items()}
    features = {path: config.get("features") for path, config in configs.items()}
    side_by_side: dict[str, Any] = {}
    for nested in features.values():
        if not isinstance(nested, dict) or "table" in nested or side_by_side.keys() & nested.keys():
            return {"tables": tables, "features": features}
        side_by_side.update(nested)
    return {"tables": tables, "features": side_by_side}
