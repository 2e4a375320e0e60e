"""Checkpoints whose tables are in a tensor bundle. The `RowLayout` of each table knows the order of its rows."""

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from tpuembed.checkpoint.bundle.checksums import DISK_PIECE_BYTES, BundleChecksums
from tpuembed.checkpoint.bundle.graph_objects import find_root, objects_of_graph
from tpuembed.checkpoint.bundle.keras_graph import check_keras_model, keras_rs_tables
from tpuembed.checkpoint.bundle.mid_level import keras_layer_tables, mid_level_tables
from tpuembed.checkpoint.bundle.object_graph import OBJECT_GRAPH_KEY, VALUE, ObjectGraph
from tpuembed.checkpoint.bundle.own_layer import own_layer_configs, own_layer_tables, own_layers, saved_array
from tpuembed.checkpoint.bundle.plain_variables import PARTITION_STRATEGIES, graph_variables, named_variables
from tpuembed.checkpoint.bundle.table_keys import TableKeys, mid_level_nodes, table_info
from tpuembed.checkpoint.location import find_bundle
from tpuembed.checkpoint.own_layer import CheckpointOfLayers, OwnLayer, merge_configs
from tpuembed.checkpoint.saved_objects import Objects, Weight
from tpuembed.checkpoint.types import Array, by_name
from tpuembed.config.checks import check_choice
from tpuembed.errors import CheckpointCorruptError, CheckpointFormatError, ConfigError
from tpuembed.files import FilePath
from tpuembed.formats.dtypes import numpy_dtype
from tpuembed.formats.protobuf import MalformedError
from tpuembed.formats.tensor_bundle import Bundle, index_path

__all__ = ["BundleCheckpoint"]

_STORE_PIECE_BYTES: Final = 64 << 20
"""The total size of the parallel requests."""
_OBJECT_VALUE: Final = f"/.ATTRIBUTES/{VALUE}"
"""The end of the keys of variables in TensorFlow 2."""


class BundleCheckpoint(CheckpointOfLayers):
    """A checkpoint written by `tpuembed.TPUEmbedding`, TensorFlow's embedding classes on any hardware, their wrappers,
    plain variables, or TensorFlow 1.

    Attributes:
        format: of its tables: "dense", "tpu_v1", "sparsecore" or "partitioned", joined with "+" if they differ.
        path: the bundle's prefix; its index file if there is also a directory of the prefix's name.
        bundle: all tensors of the checkpoint.
        graph: its objects; None for TensorFlow 1.
    """

    kind: Final = "a TensorFlow checkpoint"
    accepted_options: Final = frozenset({"partition_strategy", "root"})

    def __init__(self, bundle: Bundle, options: Mapping[str, Any]) -> None:
        self.bundle = bundle
        self.path = str(index_path(bundle.prefix) if bundle.prefix.is_dir() else bundle.prefix)
        self.options = dict(options)
        if "partition_strategy" in options:
            check_choice("partition_strategy", options["partition_strategy"], PARTITION_STRATEGIES)
        where = f"checkpoint {bundle.prefix}"
        try:
            has_graph = OBJECT_GRAPH_KEY in bundle.entries
            graph = ObjectGraph.parse(bundle.read_string(OBJECT_GRAPH_KEY)) if has_graph else None
            if (root := options.get("root")) is not None:
                if not isinstance(root, str) or not root.strip("/"):
                    raise ConfigError(
                        f"{where}: option root must be the path of an object, such as model/query, got {root!r}."
                    )
                if graph is None:
                    raise ConfigError(
                        f"{where}: option root={root!r}: a checkpoint of TensorFlow 1 has no objects. Leave it out."
                    )
                graph = graph.below(find_root(graph, root, where))
            self.graph = graph
            self._configs = {} if graph is None else own_layer_configs(bundle, graph)
            self._keys = _tables_of(bundle, graph, self._configs, options.get("partition_strategy"))
            if graph is not None:
                by_path = {graph.path(number): config for number, config in self._configs.items()}
                self.layer_config = merge_configs(by_path)
        except MalformedError as error:
            raise CheckpointCorruptError.of(f"{where}: its object graph: {error}") from None
        self.format = "+".join(sorted({keys.rows.format for keys in self._keys.values()}))
        self._tables = {name: table_info(bundle, keys) for name, keys in self._keys.items()}

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
        """See Checkpoint.verify. A checksum covers a whole slice, so every table of a stack is read, once."""
        piece_bytes = DISK_PIECE_BYTES if isinstance(self.bundle.prefix, Path) else _STORE_PIECE_BYTES
        for key in sorted({self._key(table, slot) for table in tables}):
            self.bundle.verify(key, piece_bytes)

    @property
    def layers(self) -> "_GraphLayers | None":
        """See Checkpoint.layers; None for TensorFlow 1."""
        return None if self.graph is None else _GraphLayers(self, self.graph)

    @functools.cached_property
    def _own_layers(self) -> Sequence[OwnLayer]:
        return () if self.graph is None else tuple(own_layers(self.bundle, self.graph, self._configs))

    def _optimizer_steps(self) -> int | None:
        nodes = [] if self.graph is None else [self.graph.nodes[number] for number in self.graph.step_counters]
        keys = {node.value_key for node in nodes if node.value_key is not None} & self.bundle.entries.keys()
        counts = {saved_array(self.bundle, key).count(self._shown) for key in keys}
        return counts.pop() if len(counts) == 1 else None

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

    def __init__(self, checkpoint: BundleCheckpoint, graph: ObjectGraph) -> None:
        self._checkpoint, self._graph = checkpoint, graph

    def objects(self, tables: Collection[str]) -> Objects:
        """See SavedLayers.objects."""
        found, configs = self._checkpoint._keys, self._checkpoint._configs
        held = found if configs or mid_level_nodes(self._graph) else [name for name in tables if name in found]
        keys = {key for name in held for key in (found[name].key, *found[name].slots.values())}
        for layer in self._checkpoint._own_layers:
            keys |= {array.key for array in layer.vocabularies.values()}
            keys |= {layer.stamps(table).key for table in layer.config["tables"] if layer.history is not None}
        return objects_of_graph(
            self._checkpoint.bundle,
            self._graph,
            keys,
            {number: config["tables"] for number, config in configs.items()},
            self._checkpoint.options.get("root", "").strip("/"),
        )

    def read(self, weight: Weight) -> Array:
        """Return the value of a variable, compared with its checksum."""
        self._checkpoint.bundle.verify(weight.key)
        return self._checkpoint.bundle.read(weight.key)


def _tables_of(
    bundle: Bundle, graph: ObjectGraph | None, configs: Mapping[int, Mapping[str, Any]], strategy: str | None
) -> dict[str, TableKeys]:
    """Return the tables of embedding layers by name; if the checkpoint has no such layer, all matrices of floats.

    A TensorFlow 1 checkpoint has no `graph`, and may need the partition `strategy` of its partitioned variables.
    """
    if graph is None:
        tables = _by_name(bundle, named_variables(bundle, strategy))
    elif strategy is not None:
        raise ConfigError(
            f"checkpoint {bundle.prefix}: partition_strategy is only for checkpoints of TensorFlow 1. This one "
            "has an object graph, which determines the order of its rows. Leave it out."
        )
    else:
        _check_no_holes(bundle)
        tables = _by_name(
            bundle,
            [
                *own_layer_tables(bundle, graph, configs),
                *mid_level_tables(bundle, graph),
                *keras_layer_tables(bundle, graph),
                *keras_rs_tables(bundle, graph),
            ],
        )
        if not tables and not configs and not mid_level_nodes(graph):
            check_keras_model(bundle, graph)
            tables = _by_name(bundle, graph_variables(bundle, graph))
    if not tables:
        _check_no_holes(bundle)
        raise CheckpointFormatError(
            f"checkpoint {bundle.prefix}: has no table, neither an embedding layer's nor a variable that is a matrix "
            f"of floats, among {len(bundle.entries)} tensors. Check that the layer was built before the checkpoint was "
            "saved. (TensorFlow does not save keras_rs.layers.DistributedEmbedding: use model.save_weights.)"
        )
    # Without the graph or a value, the rest could be read, but would lack a table or slot.
    for key in bundle.entries if graph is None else ():
        if key.endswith(_OBJECT_VALUE):
            raise CheckpointCorruptError.of(
                f"checkpoint {bundle.prefix}: {key} is the value of an object, but the index has no object graph, "
                "which determines the order of its rows"
            )
    for number, node in enumerate(graph.nodes if graph is not None else ()):
        if graph is not None and node.value_key is not None and node.value_key not in bundle.entries:
            raise CheckpointCorruptError.of(
                f"checkpoint {bundle.prefix}: its object graph puts {graph.path(number)} at {node.value_key}, which "
                "the index does not have"
            )
    return tables


def _by_name(bundle: Bundle, tables: Iterable[TableKeys]) -> dict[str, TableKeys]:
    def refusal(one: TableKeys, other: TableKeys) -> str:
        first, second = one.key.split("/"), other.key.split("/")
        shared = next((index for index, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), 0)
        return (
            f"checkpoint {bundle.prefix}: two embedding layers have a table {one.name!r} ({one.key} and {other.key}). Rename "
            "one and save again, or choose with --checkpoint-option root=PATH, such as "
            f"root={'/'.join(first[: shared + 1])}."
        )

    return by_name(tables, refusal)


def _check_no_holes(bundle: Bundle) -> None:
    """Raise CheckpointCorruptError for a tensor with holes. Only TensorFlow 1 writes such; see `Entry.holes`."""
    for key, entry in bundle.entries.items():
        if entry.holes:
            bundle.entry(key)
