"""Checkpoints whose tables are in a tensor bundle. The `RowLayout` of each table knows the order of its rows."""

import functools
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from tpuembed.checkpoint.bundle.checksums import DISK_PIECE_BYTES, BundleChecksums
from tpuembed.checkpoint.bundle.graph_objects import find_root, objects_of_graph
from tpuembed.checkpoint.bundle.keras_graph import check_keras_model, keras_rs_tables
from tpuembed.checkpoint.bundle.layer_config import checked_count, merge_configs
from tpuembed.checkpoint.bundle.mid_level import keras_layer_tables, mid_level_tables
from tpuembed.checkpoint.bundle.object_graph import OBJECT_GRAPH_KEY, VALUE, ObjectGraph
from tpuembed.checkpoint.bundle.own_layer import (
    own_layer_configs,
    own_layer_stamps,
    own_layer_tables,
    own_layer_vocabularies,
)
from tpuembed.checkpoint.bundle.plain_variables import PARTITION_STRATEGIES, graph_variables, named_variables
from tpuembed.checkpoint.bundle.table_keys import TableKeys, merge_tables, mid_level_nodes, table_info
from tpuembed.checkpoint.location import find_bundle
from tpuembed.checkpoint.saved_objects import Objects, Weight
from tpuembed.checkpoint.types import Array, Checkpoint, RowStamps, SavedVocabulary
from tpuembed.config.checks import check_choice
from tpuembed.errors import CheckpointCorruptError, CheckpointFormatError, ConfigError
from tpuembed.files import FilePath
from tpuembed.formats.protobuf import MalformedError
from tpuembed.formats.tensor_bundle import Bundle, index_path
from tpuembed.formats.tensor_bundle.dtypes import numpy_dtype
from tpuembed.manifest.row_history import RowHistory

__all__ = ["BundleCheckpoint"]

_STORE_PIECE_BYTES: Final = 64 << 20
"""The total size of the parallel requests."""
_UPDATES: Final = "tpuembed_iterations"
"""The attribute of tpuembed's layers with their count of updates."""
_OBJECT_VALUE: Final = f"/.ATTRIBUTES/{VALUE}"
"""The end of the keys of variables in TensorFlow 2."""

Found = tuple[dict[str, TableKeys], dict[str, Any] | None]
"""Tables by name, and the config of the layers that wrote them, if the checkpoint has it."""


class BundleCheckpoint(Checkpoint):
    """A checkpoint written by `tpuembed.TPUEmbedding`, TensorFlow's embedding classes on any hardware, their wrappers,
    plain variables, or TensorFlow 1.

    Attributes:
        format: of its tables: "dense", "tpu_v1", "sparsecore" or "partitioned", joined with "+" if they differ.
        path: the bundle's prefix; its index file if there is also a directory of the prefix's name.
        options: as they were given.
        bundle: all tensors of the checkpoint.
        graph: its objects; None for TensorFlow 1.
        layer_config: of the tpuembed layers that wrote it; None for others.
    """

    kind: Final = "a TensorFlow checkpoint"
    accepted_options: Final = frozenset({"partition_strategy", "root"})

    def __init__(self, bundle: Bundle, options: Mapping[str, Any]) -> None:
        self.bundle = bundle
        self.path = str(index_path(bundle.prefix) if bundle.prefix.is_dir() else bundle.prefix)
        self.options = dict(options)
        self._verified: set[str] = set()
        if "partition_strategy" in options:
            check_choice("partition_strategy", options["partition_strategy"], PARTITION_STRATEGIES)
        try:
            has_graph = OBJECT_GRAPH_KEY in bundle.entries
            graph = ObjectGraph.parse(bundle.read_string(OBJECT_GRAPH_KEY)) if has_graph else None
            self.graph = _below_root(graph, options.get("root"), f"checkpoint {bundle.prefix}")
            self._keys, self.layer_config = _tables_of(bundle, self.graph, options.get("partition_strategy"))
        except MalformedError as error:
            raise CheckpointCorruptError.of(f"checkpoint {bundle.prefix}: its object graph: {error}") from None
        self.format = "+".join(sorted({keys.rows.format for keys in self._keys.values()}))
        self._tables = {name: table_info(bundle, keys) for name, keys in sorted(self._keys.items())}

    @classmethod
    def recognises(cls, path: FilePath) -> bool:
        """Returns True if `path` leads to a tensor bundle."""
        return find_bundle(path) is not None

    @classmethod
    def open(cls, path: FilePath, options: Mapping[str, Any]) -> Self:
        """Open the bundle that `path`, which `recognises` accepts, leads to."""
        bundle = Bundle.open(find_bundle(path) or path)
        try:
            return cls(bundle, options)
        except BaseException:
            bundle.close()
            raise

    def close(self) -> None:
        """Close the files."""
        self.bundle.close()

    def _dtype(self, table: str, slot: str | None) -> np.dtype[Any]:
        return numpy_dtype(self.bundle.entries[self._key(table, slot)].dtype)

    def _fill(self, table: str, slot: str | None, start: int, out: Array) -> None:
        self._keys[table].rows.read_into(self.bundle, self._key(table, slot), start, out)

    @functools.cached_property
    def checksums(self) -> BundleChecksums:
        """See Checkpoint.checksums."""
        return BundleChecksums(self.bundle, self._keys, self._tables)

    def read_buffer_bytes(self, table: str, rows: int) -> int:
        """See Checkpoint.read_buffer_bytes."""
        entry = self.bundle.entries[self._key(table, None)]
        return self._keys[table].rows.buffer_bytes(self.bundle, entry, rows)

    def verify(self, tables: Iterable[str], slot: str | None = None) -> None:
        """Read every tensor that holds some of `tables`, or that slot of theirs, once, and compare it with its
        checksums.

        A checksum covers a whole slice, so every table of a stack is read.

        Raises:
            UnknownTableError: there is no such table or slot.
            CheckpointCorruptError: a checksum is wrong; the message names data file, tensor and both checksums.
        """
        piece_bytes = DISK_PIECE_BYTES if isinstance(self.bundle.prefix, Path) else _STORE_PIECE_BYTES
        for key in sorted({self._key(table, slot) for table in tables}):
            self.bundle.verify(key, piece_bytes)

    @property
    def layers(self) -> "_GraphLayers | None":
        """See Checkpoint.layers; None for TensorFlow 1."""
        return None if self.graph is None else _GraphLayers(self, self.graph, self._keys, self._configs)

    @functools.cached_property
    def keys_beside(self) -> frozenset[str]:
        """Return the keys of what tpuembed's layers save beside their tables."""
        return frozenset({key for _, key in self._stamp_keys.values()} | set(self._vocabulary_keys.values()))

    @functools.cached_property
    def update_counts(self) -> Mapping[str, int]:
        """See Checkpoint.update_counts."""
        if self.graph is None:
            return {}
        counts: dict[str, int] = {}
        for number, config in self._configs.items():
            attribute = self.graph.nodes[number].attributes.get(_UPDATES)
            if attribute is not None and attribute.checkpoint_key in self.bundle.entries:
                count = checked_count(f"checkpoint {self.path}", self.bundle.read(attribute.checkpoint_key))
                counts |= dict.fromkeys(config["tables"], count)
        if not counts and (steps := self._optimizer_steps(self.graph)) is not None:
            counts = dict.fromkeys(self.tables(), steps)
        return counts

    def _optimizer_steps(self, graph: ObjectGraph) -> int | None:
        """Return how many steps the checkpoint's Keras optimizers made. None if it has none, or they differ."""
        keys = {key for node in graph.step_counters if (key := graph.nodes[node].value_key) in self.bundle.entries}
        counts = {checked_count(f"checkpoint {self.path}", self.bundle.read(key)) for key in keys if key is not None}
        return (counts.pop() or None) if len(counts) == 1 else None  # one that made no step trained no table

    @functools.cached_property
    def _configs(self) -> Mapping[int, dict[str, Any]]:
        return {} if self.graph is None else own_layer_configs(self.bundle, self.graph)

    @functools.cached_property
    def stamps(self) -> Mapping[str, RowStamps]:
        """See Checkpoint.stamps."""
        return {
            table: RowStamps(
                self._named(table), self._tables[table].rows, history, functools.partial(self._fill_stamps, key)
            )
            for table, (history, key) in self._stamp_keys.items()
        }

    @functools.cached_property
    def _stamp_keys(self) -> Mapping[str, tuple[RowHistory, str]]:
        return {} if self.graph is None else own_layer_stamps(self.bundle, self.graph, self._configs)

    def _fill_stamps(self, key: str, start: int, out: Array) -> None:
        """Read stamps that are compared with their checksum at the first read: a wrong one would hide a changed row."""
        if key not in self._verified:
            self.bundle.verify(key)
            self._verified.add(key)
        self.bundle.read_rows(key, start, start + len(out), out)

    @functools.cached_property
    def vocabularies(self) -> Mapping[str, SavedVocabulary]:
        """See Checkpoint.vocabularies."""
        return {
            table: SavedVocabulary(
                f"{self._shown}: the vocabulary of table {table!r}",
                self._tables[table].rows,
                self.bundle.entries[key].shape[0],
                lambda size, key=key: self.bundle.read_rows(key, 0, size).tobytes(),  # type: ignore[misc]
            )
            for table, key in self._vocabulary_keys.items()
        }

    @functools.cached_property
    def _vocabulary_keys(self) -> Mapping[str, str]:
        return {} if self.graph is None else own_layer_vocabularies(self.bundle, self.graph, self._configs)

    def fingerprint(self) -> str:
        """Return the fingerprint of the bundle, of its index and of all its files' sizes and modification times."""
        return self.bundle.fingerprint()

    def _key(self, table: str, slot: str | None) -> str:
        """Return the bundle's key of a table or slot."""
        self._check(table, slot)
        keys = self._keys[table]
        return keys.key if slot is None else keys.slots[slot]

    def _check(self, table: str, slot: str | None) -> None:
        if table not in self._tables and table in self.bundle.entries:
            self.bundle.entry(table)  # raises for a tensor with holes
        super()._check(table, slot)


class _GraphLayers:
    """The layers in the object graph; see SavedLayers. A bundle has no config of a model."""

    config = None

    def __init__(
        self,
        checkpoint: BundleCheckpoint,
        graph: ObjectGraph,
        keys: Mapping[str, TableKeys],
        configs: Mapping[int, Mapping[str, Any]],
    ) -> None:
        self._checkpoint, self._graph, self._keys, self._configs = checkpoint, graph, keys, configs

    def objects(self, tables: Collection[str]) -> Objects:
        """See SavedLayers.objects."""
        are_known = self._configs or mid_level_nodes(self._graph)
        held = self._keys if are_known else [name for name in tables if name in self._keys]
        keys = {key for name in held for key in (self._keys[name].key, *self._keys[name].slots.values())}
        return objects_of_graph(
            self._checkpoint.bundle,
            self._graph,
            keys | self._checkpoint.keys_beside,
            {number: config["tables"] for number, config in self._configs.items()},
            self._checkpoint.options.get("root", "").strip("/"),
        )

    def read(self, weight: Weight) -> Array:
        """Return the value of a variable, compared with its checksum."""
        self._checkpoint.bundle.verify(weight.key)
        return self._checkpoint.bundle.read(weight.key)


def _below_root(graph: ObjectGraph | None, root: Any, where: str) -> ObjectGraph | None:
    """Return the objects below the one that the option `root` names; all objects without the option."""
    if root is None:
        return graph
    if not isinstance(root, str) or not root.strip("/"):
        raise ConfigError(f"{where}: option root must be the path of an object, such as model/query, got {root!r}.")
    if graph is None:
        raise ConfigError(f"{where}: option root={root!r}: a checkpoint of TensorFlow 1 has no objects. Leave it out.")
    return graph.below(find_root(graph, root, where))


def _tables_of(bundle: Bundle, graph: ObjectGraph | None, partition_strategy: str | None = None) -> Found:
    """Return the tables of embedding layers. If the checkpoint has no such layer, return all matrices of floats.

    A TensorFlow 1 checkpoint has no `graph`, and may need the `partition_strategy` of its partitioned variables.

    Raises:
        ConfigError: a partition strategy is given for a checkpoint with an object graph, whose rows are in order.
        CheckpointFormatError: there is no table, two have the same name, or a layer's format is not supported.
        CheckpointCorruptError: graph, config and bundle contradict each other.
        MalformedError: the graph is far too deep.
    """
    if graph is not None and partition_strategy is not None:
        raise ConfigError(
            f"checkpoint {bundle.prefix}: partition_strategy is only for checkpoints of TensorFlow 1. This one "
            "has an object graph, which determines the order of its rows. Leave it out."
        )
    if graph is not None:
        _check_no_holes(bundle)
    tables, config = _discover(bundle, graph, partition_strategy)
    if not tables:
        _check_no_holes(bundle)
        raise CheckpointFormatError(
            f"checkpoint {bundle.prefix}: has no table, neither an embedding layer's nor a variable that is a matrix "
            f"of floats, among {len(bundle.entries)} tensors. Check that the layer was built before the checkpoint was "
            "saved. (TensorFlow does not save keras_rs.layers.DistributedEmbedding: use model.save_weights.)"
        )
    _check_all_there(bundle, graph)
    return tables, config


def _check_no_holes(bundle: Bundle) -> None:
    """Raise CheckpointCorruptError for a tensor with holes. Only TensorFlow 1 writes such; see `Entry.holes`."""
    for key, entry in bundle.entries.items():
        if entry.holes:
            bundle.entry(key)


def _check_all_there(bundle: Bundle, graph: ObjectGraph | None) -> None:
    """Raise CheckpointCorruptError if the graph or values are missing: the rest could be read, but lack a table or
    slot.
    """
    if graph is None:
        for key in bundle.entries:
            if key.endswith(_OBJECT_VALUE):
                raise CheckpointCorruptError.of(
                    f"checkpoint {bundle.prefix}: {key} is the value of an object, but the index has no object graph, "
                    "which determines the order of its rows"
                )
        return
    for number, node in enumerate(graph.nodes):
        if node.value_key is not None and node.value_key not in bundle.entries:
            raise CheckpointCorruptError.of(
                f"checkpoint {bundle.prefix}: its object graph puts {graph.path(number)} at {node.value_key}, which "
                "the index does not have"
            )


def _discover(bundle: Bundle, graph: ObjectGraph | None, partition_strategy: str | None) -> Found:
    if graph is None:
        return merge_tables(bundle, named_variables(bundle, partition_strategy)), None
    configs = own_layer_configs(bundle, graph)
    layers = merge_tables(
        bundle,
        [
            *own_layer_tables(bundle, graph, configs),
            *mid_level_tables(bundle, graph),
            *keras_layer_tables(bundle, graph),
            *keras_rs_tables(bundle, graph),
        ],
    )
    if layers or configs or mid_level_nodes(graph):
        return layers, merge_configs({graph.path(number): config for number, config in configs.items()})
    check_keras_model(bundle, graph)
    return merge_tables(bundle, graph_variables(bundle, graph)), None
