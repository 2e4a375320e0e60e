"""The reader of Keras' weight files."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Self

import numpy as np

from tpuembed.checkpoint.keras.hdf5 import READ_BYTES
from tpuembed.checkpoint.keras.layers import config_below, objects_of_weights
from tpuembed.checkpoint.keras.tables import Table, discover, optimizer_steps, own_layer_configs, own_layers
from tpuembed.checkpoint.keras.weights import Weights, find_weights
from tpuembed.checkpoint.own_layer import CheckpointOfLayers, OwnLayer
from tpuembed.checkpoint.saved_objects import Objects, Weight
from tpuembed.checkpoint.types import Array, TableInfo
from tpuembed.errors import CheckpointError, reason
from tpuembed.files import FilePath, versions

__all__ = ["KerasCheckpoint"]


class KerasCheckpoint(CheckpointOfLayers):
    """A checkpoint in `.weights.h5`, sharded `.weights.json` or `.keras`, with tables of keras-rs or of
    `tpuembed.TPUEmbedding`. If a `.keras` file has the config of keras-rs' layers, it is part of `layer_config`.
    """

    format = "keras"
    kind: Final = "Keras weights"
    accepted_options: Final = frozenset({"root"})

    def __init__(self, weights: Weights, options: Mapping[str, Any]) -> None:
        self.path = str(weights.path)
        self.options = dict(options)
        self._config = config_below(weights, str(options.get("root", "")))
        self._weights = weights = weights.below(options["root"]) if "root" in options else weights
        self._own_configs = own_layer_configs(weights)
        tables, self.layer_config = discover(weights, self._own_configs)
        self._found = tables
        for table in tables.values():
            for dataset in (table.dataset, *table.slots.values()):
                dataset.check_written()
        self._is_verified = False
        self._tables = {
            name: TableInfo(
                name,
                *table.shape,
                table.dtype,
                tuple(sorted(table.slots)),
                f"in {table.dataset.file.name.rpartition('/')[2]}" if len(weights.windows) > 1 else "",
            )
            for name, table in tables.items()
        }

    @classmethod
    def recognises(cls, path: FilePath) -> bool:
        """Returns True if `path` leads to weights that Keras wrote."""
        return find_weights(path) is not None

    @classmethod
    def open(cls, path: FilePath, options: Mapping[str, Any]) -> Self:
        """Open the weights that `path`, which `recognises` accepts, leads to."""
        weights = Weights.open(find_weights(path) or path)
        try:
            return cls(weights, options)
        except BaseException:
            weights.close()
            raise

    def close(self) -> None:
        """Close the files."""
        self._weights.close()

    def _dtype(self, table: str, slot: str | None) -> np.dtype[Any]:  # noqa: ARG002 - slots have the table's
        return self._tables[table].dtype

    def _fill(self, table: str, slot: str | None, start: int, out: Array) -> None:
        found = self._found[table]
        dataset = found.dataset if slot is None else found.slots[slot]
        dataset.read_into(start, out)

    def read_buffer_bytes(self, table: str, rows: int) -> int:
        """See Checkpoint.read_buffer_bytes."""
        self._check(table, None)
        return READ_BYTES if rows else 0

    def verify(self, tables: Iterable[str], slot: str | None = None) -> None:
        """Compare all weights of a `.keras` file with the CRC32 of the archive, once; other files keep no checksums."""
        super().verify(tables, slot)
        self._verify()

    def _verify(self) -> None:
        if not self._is_verified:
            self._weights.verify()
            self._is_verified = True

    @functools.cached_property
    def _own_layers(self) -> Sequence[OwnLayer]:
        return tuple(own_layers(self._weights, self._own_configs, self._verify))

    def _optimizer_steps(self) -> int | None:
        return optimizer_steps(self._weights)

    @functools.cached_property
    def layers(self) -> "_FileLayers":
        """See Checkpoint.layers."""
        return _FileLayers(self._config, self._weights, tuple(self._found.values()), self._verify)

    def fingerprint(self) -> str:
        """Return a digest of the sizes and versions of the files, and of the forms of the arrays in them."""
        try:
            found = versions(self._weights.files)
        except OSError as error:
            raise CheckpointError(f"weights {self.path}: cannot be read any more: {reason(error)}.") from None
        forms = {
            group.path: {name: [one.shape, one.dtype, one.stated_dtype] for name, one in group.datasets.items()}
            for group in self._weights.groups.values()
        }
        parts = [[dataclasses.astuple(version) for version in found], forms]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class _FileLayers:
    """The layers in a weight file; see SavedLayers. `config` is in a `.keras` file, of the model at `root`."""

    config: Mapping[str, Any] | None
    weights: Weights
    tables: Sequence[Table]
    verify: Callable[[], None]

    def objects(self, tables: Collection[str]) -> Objects:  # noqa: ARG002 - tables are known by their groups
        """Return the layers, by Keras' groups of variables; see SavedLayers.objects."""
        return objects_of_weights(self.weights, self.tables)

    def read(self, weight: Weight) -> Array:
        """Return the array of a weight, once all weights are verified."""
        self.verify()
        group, _, name = weight.key.rpartition("/")
        return self.weights.groups[group].datasets[name].read()
