"""Finds the tables in a weight file: those of `keras_rs.layers.DistributedEmbedding` and of tpuembed's own layer.

Source: keras_rs/src/layers/embedding/base_distributed_embedding.py (`_default_device_init`); `tpuembed.TPUEmbedding`.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from tpuembed.checkpoint.bundle.layer_config import check_size, checked_count, parse_config, slot_names
from tpuembed.checkpoint.keras.hdf5 import Dataset
from tpuembed.checkpoint.keras.weights import Group, Weights
from tpuembed.errors import CheckpointCorruptError, CheckpointFormatError
from tpuembed.manifest.row_history import RowHistory

__all__ = [
    "CONFIG",
    "Table",
    "keras_rs_tables",
    "own_layer_configs",
    "own_layer_stamps",
    "own_layer_tables",
    "own_layer_updates",
    "own_layer_vocabularies",
]

_TABLE_PATH: Final = re.compile(r"(?:(?P<layer>.+)/)?_default_device_embedding_layers/(?P<kind>.+)", re.DOTALL)
_TABLE_KIND: Final = re.compile(r"embed_reduce(?:_(?P<number>\d+))?")
CONFIG: Final = "|config"
"""The name of a layer's config among its arrays. Only an embedding layer has one."""
_UPDATES, _HISTORY, _STAMPS = "|updates", "|history", "|stamps|"
_VOCABULARY: Final = "|vocabulary|"
_MAX_CONFIG_BYTES: Final = 16 << 20


@dataclasses.dataclass(frozen=True)
class Table:
    """A table, its array, and those of its slots.

    Attributes:
        layer: the path of its layer.
        order: its position among the layer's tables.
    """

    name: str
    layer: str
    order: int
    dataset: Dataset
    slots: Mapping[str, Dataset] = dataclasses.field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int]:
        """Return rows and columns."""
        rows, dim = self.dataset.shape or (0, 0)
        return rows, dim

    @property
    def dtype(self) -> Any:
        """Return the dtype of its elements."""
        return self.dataset.matrix_dtype


def keras_rs_tables(weights: Weights) -> Iterator[Table]:
    """Yield the tables of keras-rs layers. Keras numbers them in the order of the layer's features.

    Raises:
        CheckpointCorruptError: a table has no name or no rows.
        CheckpointFormatError: a table is stored in another form.
    """
    for group in weights.groups.values():
        match = _TABLE_PATH.fullmatch(group.path)
        if match is None:
            continue
        kind = _TABLE_KIND.fullmatch(match["kind"])
        if kind is None:
            raise CheckpointFormatError(
                f"weights {weights.path}: among the tables of layer {match['layer']!r} is {match['kind']!r}, but "
                "keras-rs calls them embed_reduce. Restore it from another copy, or upgrade tpuembed."
            )
        number = int(kind["number"] or 0)
        yield Table(_table_name(weights, group), match["layer"] or "", number, _only_matrix(weights, group))


def _table_name(weights: Weights, group: Group) -> str:
    if not group.name or not group.name.isprintable() or "/" in group.name:
        raise CheckpointCorruptError.of(
            f"weights {weights.path}: the table at {group.path!r} is called {group.name!r}, which is not a valid name "
            "in keras-rs"
        )
    return group.name


def _only_matrix(weights: Weights, group: Group) -> Dataset:
    if not group.datasets:
        raise CheckpointCorruptError.of(f"weights {weights.path}: table {group.name!r} has no rows")
    dataset = group.datasets.get("0")
    if set(group.datasets) != {"0"} or dataset is None or dataset.matrix_dtype is None:
        shown = ", ".join(f"{name}: {one.dtype} {one.shape}" for name, one in sorted(group.datasets.items())[:5])
        raise CheckpointFormatError(
            f"weights {weights.path}: table {group.name!r} should be one matrix of floats, but is {shown}. Save "
            "it without quantization or LoRA."
        )
    return dataset


def own_layer_configs(weights: Weights) -> dict[str, dict[str, Any]]:
    """Return path -> config, for each of tpuembed's layers.

    Raises:
        CheckpointFormatError: a version of tpuembed without configs wrote it.
        CheckpointCorruptError: it does not parse.
    """
    return {
        group.path: parse_config(_config_of(weights, group), _config_bytes(weights, group))
        for group in weights.groups.values()
        if _UPDATES in group.datasets or CONFIG in group.datasets
    }


def _config_of(weights: Weights, group: Group) -> str:
    return f"weights {weights.path}: the config of layer {group.name or group.path!r}"


def _config_bytes(weights: Weights, group: Group) -> bytes:
    dataset = group.datasets.get(CONFIG)
    if dataset is None:
        raise CheckpointFormatError(
            f"weights {weights.path}: layer {group.name or group.path!r} has tables but no config, which distinguishes "
            "them from slots. Load it into the layer and save it again with this version of tpuembed."
        )
    if dataset.dtype != "|u1" or dataset.bytes > _MAX_CONFIG_BYTES:
        raise CheckpointCorruptError.of(f"{_config_of(weights, group)} is {dataset.dtype} {dataset.shape}, not bytes")
    return dataset.read().tobytes()


def own_layer_tables(weights: Weights, configs: Mapping[str, dict[str, Any]]) -> Iterator[Table]:
    """Yield the tables that the `configs` name, each checked against its config.

    Raises:
        CheckpointCorruptError: a table or slot is missing, has another size, or is not in the config.
        CheckpointFormatError: a table's optimizer is unknown.
    """
    for path, config in configs.items():
        where = f"weights {weights.path}: layer {path!r}"
        left = {
            name: dataset
            for name, dataset in weights.groups[path].datasets.items()
            if name not in (CONFIG, _UPDATES, _HISTORY) and not name.startswith((_STAMPS, _VOCABULARY))
        }
        for order, (name, fields) in enumerate(config["tables"].items()):
            slots = {slot: f"{name}/{slot}" for slot in slot_names(where, name, fields)}
            found = {child: _take(where, left, child) for child in (name, *slots.values())}
            table = Table(name, path, order, found[name], {slot: found[child] for slot, child in slots.items()})
            check_size(where, name, fields, table.shape)
            yield table
        if left:
            raise CheckpointCorruptError.of(f"{where} has {min(left)!r}, which is not a table or slot of its config")


def own_layer_updates(weights: Weights) -> dict[str, int]:
    """Return table name -> the count of updates of the tpuembed layer that has it.

    Raises:
        CheckpointCorruptError: a count is not an integer, or is negative, or a config does not parse.
    """
    counts: dict[str, int] = {}
    for path, config in own_layer_configs(weights).items():
        dataset = weights.groups[path].datasets.get(_UPDATES)
        if dataset is not None:
            where = f"weights {weights.path}: layer {path!r}"
            if dataset.dtype != "<i8" or dataset.shape != ():
                raise CheckpointCorruptError.of(
                    f"{where}: its count of updates is {dataset.dtype} {dataset.shape}, not one integer"
                )
            count = checked_count(where, dataset.read())
            counts |= dict.fromkeys(config["tables"], count)
    return counts


def own_layer_stamps(weights: Weights) -> dict[str, tuple[RowHistory, Dataset]]:
    """Return table name -> (history, stamps [rows]), of tpuembed's layers that track rows.

    Raises:
        CheckpointCorruptError: a history is none, or stamps are missing or of another size.
    """
    found: dict[str, tuple[RowHistory, Dataset]] = {}
    for path, config in own_layer_configs(weights).items():
        datasets = weights.groups[path].datasets
        saved = datasets.get(_HISTORY)
        if saved is None:
            continue
        where = f"weights {weights.path}: layer {path!r}"
        if saved.dtype != "|u1" or saved.bytes > _MAX_CONFIG_BYTES:
            raise CheckpointCorruptError.of(f"{where}: its history is {saved.dtype} {saved.shape}, not bytes")
        history, shapes = RowHistory.from_json(saved.read().tobytes(), where)
        for table in config["tables"]:
            dataset = datasets.get(_STAMPS + table.replace("/", "|"))
            rows = shapes.get(table, [None])[0]
            shown = "none" if dataset is None else f"{dataset.dtype} {dataset.shape}"
            if dataset is None or dataset.dtype != "<i4" or dataset.shape != (rows,):
                raise CheckpointCorruptError.of(
                    f"{where}: the stamps of table {table!r} are {shown}, not <i4 ({rows},)"
                )
            found[table] = history, dataset
    return found


def own_layer_vocabularies(weights: Weights) -> dict[str, Dataset]:
    """Return table name -> its vocabulary, bytes [n], of the tables that have one.

    Raises:
        CheckpointCorruptError: a vocabulary is no bytes, or is of no table of the layer.
    """
    found: dict[str, Dataset] = {}
    for path, config in own_layer_configs(weights).items():
        where = f"weights {weights.path}: layer {path!r}"
        tables = {_VOCABULARY + table.replace("/", "|"): table for table in config["tables"]}
        for name, dataset in weights.groups[path].datasets.items():
            if not name.startswith(_VOCABULARY):
                continue
            if name not in tables:
                raise CheckpointCorruptError.of(f"{where} has {name!r}, which is not of a table of its config")
            if dataset.dtype != "|u1" or len(dataset.shape or ()) != 1:
                raise CheckpointCorruptError.of(
                    f"{where}: the vocabulary of table {tables[name]!r} is {dataset.dtype} {dataset.shape}, not bytes"
                )
            found[tables[name]] = dataset
    return found


def _take(where: str, left: dict[str, Dataset], child: str) -> Dataset:
    """Remove the array of a table or slot from `left`, under the name that the layer stores it by, and return it."""
    dataset = left.pop(child.replace("/", "|"), None)
    if dataset is None or dataset.matrix_dtype is None:
        found = "there is none" if dataset is None else f"it is {dataset.dtype} {dataset.shape}"
        raise CheckpointCorruptError.of(f"{where}: its config needs a matrix {child!r}, but {found}")
    return dataset
