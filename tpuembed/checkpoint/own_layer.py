"""What `tpuembed.TPUEmbedding` saves with its tables: a config, a count of updates, stamps of rows, and vocabularies.

A reader says where its files have them (`OwnLayer`). What they must be is checked here, for all formats.
"""

import abc
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tpuembed.checkpoint.types import Array, Checkpoint, SavedStamps, SavedVocabulary
from tpuembed.config import OPTIMIZERS
from tpuembed.errors import CheckpointCorruptError, CheckpointFormatError, reason
from tpuembed.manifest.row_history import RowHistory

__all__ = ["CheckpointOfLayers", "OwnLayer", "SavedArray", "check_size", "merge_configs", "parse_config", "slot_names"]


@dataclasses.dataclass(frozen=True)
class SavedArray:
    """An array beside the tables.

    Attributes:
        key: its name in the files.
        dtype: as numpy calls it.
        shape: None if the files lack it.
        fill: fills an array with its elements from a number on.
    """

    key: str
    dtype: str
    shape: tuple[int, ...] | None
    fill: Callable[[int, Array], None]

    def is_of(self, dtype: str, shape: tuple[int | None, ...]) -> bool:
        """Returns True if it has this dtype and shape."""
        return (self.dtype, self.shape) == (dtype, shape)

    @property
    def shown(self) -> str:
        """Return dtype and shape for messages."""
        return "missing" if self.shape is None else f"{self.dtype} {list(self.shape)}"

    def count(self, where: str) -> int:
        """Return the count in it. Raises CheckpointCorruptError unless it is one integer from 0 on."""
        found = np.zeros((), np.int64)
        if is_one := self.is_of("int64", ()):
            self.fill(0, found)
        if not is_one or found < 0:
            raise CheckpointCorruptError.of(
                f"{where}: a layer's count of updates is {found if is_one else self.shown}, not one integer from 0 on"
            )
        return int(found)


@dataclasses.dataclass(frozen=True)
class OwnLayer:
    """What one layer saved.

    Attributes:
        where: its name for messages.
        config: of the layer.
        updates: its count of updates, if it has one.
        history: reads the history of its rows; None if it tracks no rows.
        stamps: finds the stamps of a table.
        verify: compares an array with its checksum, the first time that it is called with its key.
        vocabularies: by the names that they are stored by.
        stored_name: returns the name that the vocabulary of a table is stored by.
    """

    where: str
    config: Mapping[str, Any]
    updates: SavedArray | None
    history: Callable[[], bytes] | None
    stamps: Callable[[str], SavedArray]
    verify: Callable[[str], None]
    vocabularies: Mapping[str, SavedArray]
    stored_name: Callable[[str], str]


class CheckpointOfLayers(Checkpoint):
    """A checkpoint that layers of tpuembed may have written."""

    @property
    @abc.abstractmethod
    def _own_layers(self) -> Sequence[OwnLayer]:
        """Return what each layer of tpuembed saved."""

    @abc.abstractmethod
    def _optimizer_steps(self) -> int | None:
        """Return how many steps the Keras optimizers made. None if there is none, or they differ."""

    @functools.cached_property
    def update_counts(self) -> Mapping[str, int]:
        """See Checkpoint.update_counts."""
        counts: dict[str, int] = {}
        for layer in self._own_layers:
            if layer.updates is not None:
                counts |= dict.fromkeys(layer.config["tables"], layer.updates.count(layer.where))
        # An optimizer that made no step trained no table.
        return counts or (dict.fromkeys(self._tables, steps) if (steps := self._optimizer_steps()) else {})

    @functools.cached_property
    def stamps(self) -> Mapping[str, SavedStamps]:
        """See Checkpoint.stamps."""
        found: dict[str, SavedStamps] = {}
        for layer in self._own_layers:
            if layer.history is None:
                continue
            history, shapes = RowHistory.from_json(layer.history(), layer.where)
            for table in layer.config["tables"]:
                array, rows = layer.stamps(table), shapes.get(table, [None])[0]
                if not array.is_of("int32", (rows,)):
                    raise CheckpointCorruptError.of(
                        f"{layer.where}: the stamps of table {table!r} are {array.shown}, not int32 [{rows}]"
                    )
                fill = functools.partial(_fill_proven, layer, array)
                found[table] = SavedStamps(self._named(table), self._tables[table].rows, history, fill)
        return found

    @functools.cached_property
    def vocabularies(self) -> Mapping[str, SavedVocabulary]:
        """See Checkpoint.vocabularies."""
        found: dict[str, SavedVocabulary] = {}
        for layer in self._own_layers:
            tables = {layer.stored_name(table): table for table in layer.config["tables"]}
            for name, array in layer.vocabularies.items():
                if (table := tables.get(name)) is None:
                    raise CheckpointCorruptError.of(
                        f"{layer.where}: has a vocabulary of {name!r}, which is not a table of its layer's config"
                    )
                if array.shape is None or array.dtype != "uint8" or len(array.shape) != 1:
                    raise CheckpointCorruptError.of(
                        f"{layer.where}: the vocabulary of table {table!r} ({array.key}) is {array.shown}, not uint8 [bytes]"
                    )
                where, rows = f"{self._shown}: the vocabulary of table {table!r}", self._tables[table].rows
                found[table] = SavedVocabulary(where, rows, array.shape[0], functools.partial(_first_bytes, array))
        return found


def _fill_proven(layer: OwnLayer, array: SavedArray, start: int, out: Array) -> None:
    layer.verify(array.key)  # a wrong stamp would hide a changed row
    array.fill(start, out)


def _first_bytes(array: SavedArray, size: int) -> bytes:
    out = np.empty(size, np.uint8)
    array.fill(0, out)
    return out.tobytes()


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
