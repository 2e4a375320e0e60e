"""What a layer writes into Keras' weight files (`.weights.h5`, `.keras`): arrays by name."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from tpuembed.errors import CheckpointMismatchError

__all__ = ["holds_tables", "load_tables", "save_tables"]

_CONFIG, _UPDATES = "|config", "|updates"


def save_tables(store: Any, variables: Mapping[str, Any], updates: int, config: Mapping[str, Any]) -> None:
    """Tables and slots by name ("/" written as "|"), count of updates, and config.

    The config, JSON as bytes, tells whoever reads the file without the layer which array is a table and which a slot.

    Args:
        store: Keras' store of the layer: name -> array.
        variables: name of a table, or `<table>/<slot>` -> float32 [rows, dim].
        updates: how many the tables had.
        config: as checkpoints carry it.
    """
    for name, variable in variables.items():
        store[_saved(name)] = variable.numpy()
    store[_UPDATES] = np.int64(updates)
    store[_CONFIG] = np.frombuffer(json.dumps(config).encode(), np.uint8)


def holds_tables(store: Any) -> bool:
    """Return True if `save_tables` filled `store`; a reader of the file takes all of it for tables."""
    return _CONFIG in store


def load_tables(store: Any, layer: str, variables: Mapping[str, Any]) -> int:
    """Assign to `variables` what `save_tables` stored; the count of updates.

    Raises:
        CheckpointMismatchError: the file lacks a table or slot, has others, or has another shape; nothing is assigned.
    """
    names = [name for name in store.keys() if name != _CONFIG]  # noqa: SIM118 - an h5 store, not a dict
    in_file = {name: tuple(store[name].shape) for name in names}
    in_layer = {_saved(name): tuple(variable.shape) for name, variable in variables.items()} | {_UPDATES: ()}
    if in_file != in_layer:
        raise CheckpointMismatchError(
            f"layer {layer!r}: the file holds {in_file}, the layer {in_layer}; build the layer as it was saved, or take what "
            "there is with restore_tables"
        )
    for name, variable in variables.items():
        variable.assign(store[_saved(name)])
    return int(np.asarray(store[_UPDATES]))


def _saved(name: str) -> str:
    return name.replace("/", "|")
