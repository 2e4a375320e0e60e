"""Reads and writes a layer's arrays in Keras' weight files (`.weights.h5`, `.keras`)."""

import json
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from tpuembed.errors import CheckpointMismatchError
from tpuembed.runtime.keras_saving import weights_store
from tpuembed.vocabulary import Vocabulary

__all__ = [
    "check_tables",
    "load_stamps",
    "load_tables",
    "save_stamps",
    "save_tables",
    "save_vocabularies",
    "saved_vocabularies",
]

_CONFIG, _UPDATES, _HISTORY = "|config", "|updates", "|history"
_STAMPS, _VOCABULARY = "|stamps|", "|vocabulary|"
_refusals: weakref.WeakKeyDictionary[Any, dict[int, str]] = weakref.WeakKeyDictionary()
"""By load: why the tables that the file has at the place of a layer were refused, by the layer's id."""


def save_tables(store: Any, variables: Mapping[str, Any], updates: int, config: Mapping[str, Any]) -> None:
    """Write tables and slots by name ("/" written as "|"), the count of updates, and the config.

    The config, JSON as bytes, says which array is a table and which a slot, for readers without the layer.

    Args:
        store: Keras' store of the layer: name -> array.
        variables: name of a table, or `<table>/<slot>` -> float32 [rows, dim].
        updates: the count of updates.
        config: the layer's config, as in checkpoints.
    """
    for name, variable in variables.items():
        store[_saved(name)] = variable.numpy()
    store[_UPDATES] = np.int64(updates)
    store[_CONFIG] = np.frombuffer(json.dumps(config).encode(), np.uint8)


def check_tables(store: Any, layer: Any, variables: Mapping[str, Any]) -> None:
    """Compare the arrays of `save_tables` with `variables`, of `layer`.

    Keras visits a layer of a subclassed model again where the file has nothing, and shows its last error. So that one repeats the
    first.

    Raises:
        CheckpointMismatchError: the file lacks a table or slot, has others, or has another shape.
    """
    beside = (_CONFIG, _HISTORY)
    names = [name for name in store.keys() if name not in beside and not name.startswith((_STAMPS, _VOCABULARY))]  # noqa: SIM118 - an h5 store
    in_file = {name: tuple(store[name].shape) for name in names}
    load = weights_store()
    refusals = {} if load is None else _refusals.setdefault(load, {})
    if not in_file:
        raise CheckpointMismatchError(
            refusals.get(id(layer))
            or f"layer {layer.name!r}: the file has no tables at its place. Keras saves a layer that several models share once, "
            "and loads it as one layer for each of them. Build the model in code, and call its load_weights with this file."
        )
    in_layer = {_saved(name): tuple(variable.shape) for name, variable in variables.items()} | {_UPDATES: ()}
    if in_file != in_layer:
        refusals[id(layer)] = (
            f"layer {layer.name!r}: the file holds {in_file}. The layer has {in_layer}. Build the layer as it was saved, or "
            "restore the tables that match with restore_tables."
        )
        raise CheckpointMismatchError(refusals[id(layer)])


def load_tables(store: Any, variables: Mapping[str, Any]) -> int:
    """Assign the arrays of `save_tables`, which `check_tables` has accepted, to `variables`. Returns the count of updates."""
    for name, variable in variables.items():
        variable.assign(store[_saved(name)])
    return int(np.asarray(store[_UPDATES]))


def save_stamps(store: Any, stamps: Iterable[tuple[str, Any]], history: str) -> None:
    """Write the stamps of rows, (table, int32 [rows]) each, and their `history` as text."""
    for table, values in stamps:
        store[_STAMPS + _saved(table)] = values
    store[_HISTORY] = np.frombuffer(history.encode(), np.uint8)


def load_stamps(store: Any, tables: Iterable[str], write: Callable[[str, int, Any], None]) -> bytes | None:
    """Call `write(table, 0, stamps)` with the arrays of `save_stamps`. Returns the history, or None if the file lacks some."""
    names = {table: _STAMPS + _saved(table) for table in tables}
    if not {_HISTORY, *names.values()} <= set(store.keys()):
        return None
    for table, name in names.items():
        write(table, 0, np.asarray(store[name]))
    return np.asarray(store[_HISTORY]).tobytes()


def save_vocabularies(store: Any, vocabularies: Mapping[str, Vocabulary]) -> None:
    """Write the names of each table's rows, as uint8 [n]."""
    for table, names in vocabularies.items():
        store[_VOCABULARY + _saved(table)] = np.frombuffer(names.to_bytes(), np.uint8)


def saved_vocabularies(store: Any, tables: Iterable[str]) -> dict[str, bytes]:
    """Return {table: what `save_vocabularies` wrote}, of the tables that have names in the file."""
    names = {table: _VOCABULARY + _saved(table) for table in tables}
    return {table: np.asarray(store[name]).tobytes() for table, name in names.items() if name in store.keys()}  # noqa: SIM118


def _saved(name: str) -> str:
    return name.replace("/", "|")
