"""Finds the tables in a weight file: those of `keras_rs.layers.DistributedEmbedding` and of tpuembed's own layer.

Source: keras_rs/src/layers/embedding/base_distributed_embedding.py (`_default_device_init`); `tpuembed.TPUEmbedding`.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from tpuembed.checkpoint.keras.hdf5 import Dataset
from tpuembed.checkpoint.keras.weights import Group, Weights
from tpuembed.checkpoint.own_layer import OwnLayer, SavedArray, check_size, parse_config, slot_names
from tpuembed.checkpoint.types import Array
from tpuembed.errors import CheckpointCorruptError, CheckpointFormatError

__all__ = ["CONFIG", "Table", "keras_rs_tables", "own_layer_configs", "own_layer_tables", "own_layers", "saved_array"]

_TABLE_PATH: Final = re.compile(r"(?:(?P<layer>.+)/)?_default_device_embedding_layers/(?P<kind>.+)", re.DOTALL)
_TABLE_KIND: Final = re.compile(r"embed_reduce(?:_(?P<number>\d+))?")
CONFIG: Final = "|config"
"""The name of a layer's config among its arrays. Only an embedding layer has one."""
_UPDATES, _HISTORY, _STAMPS = "|updates", "|history", "|stamps|"
_VOCABULARY: Final = "|vocabulary|"
_DTYPES: Final = {"|u1": "uint8", "<i4": "int32", "<i8": "int64"}
_MAX_TEXT_BYTES: Final = 16 << 20


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
        if not group.name or not group.name.isprintable() or "/" in group.name:
            raise CheckpointCorruptError.of(
                f"weights {weights.path}: the table at {group.path!r} is called {group.name!r}, which is not a valid name "
                "in keras-rs"
            )
        yield Table(group.name, match["layer"] or "", int(kind["number"] or 0), _only_matrix(weights, group))


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
    configs: dict[str, dict[str, Any]] = {}
    for path, group in weights.groups.items():
        if CONFIG not in group.datasets and _UPDATES not in group.datasets:
            continue
        layer = repr(group.name or path)
        if CONFIG not in group.datasets:
            raise CheckpointFormatError(
                f"weights {weights.path}: layer {layer} has tables but no config, which distinguishes "
                "them from slots. Load it into the layer and save it again with this version of tpuembed."
            )
        where = f"weights {weights.path}: the config of layer {layer}"
        configs[path] = parse_config(where, _read_text(where, group.datasets[CONFIG]))
    return configs


def _read_text(where: str, dataset: Dataset) -> bytes:
    if dataset.dtype != "|u1" or dataset.bytes > _MAX_TEXT_BYTES:
        raise CheckpointCorruptError.of(f"{where} is {dataset.dtype} {dataset.shape}, not bytes")
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


def own_layers(
    weights: Weights, configs: Mapping[str, dict[str, Any]], verify: Callable[[], None]
) -> Iterator[OwnLayer]:
    """Yield what each layer saved beside its tables. `verify` compares the file with its checksums."""
    for path, config in configs.items():
        datasets, where = weights.groups[path].datasets, f"weights {weights.path}: layer {path!r}"
        history = datasets.get(_HISTORY)
        yield OwnLayer(
            where=where,
            config=config,
            updates=saved_array(_UPDATES, datasets[_UPDATES]) if _UPDATES in datasets else None,
            history=None if history is None else functools.partial(_read_text, f"{where}: its history", history),
            stamps=functools.partial(_stamps, datasets, verify),
            vocabularies={
                name.removeprefix(_VOCABULARY): saved_array(name, dataset)
                for name, dataset in datasets.items()
                if name.startswith(_VOCABULARY)
            },
            stored_name=_stored_name,
        )


def _stored_name(name: str) -> str:
    return name.replace("/", "|")


def _stamps(datasets: Mapping[str, Dataset], verify: Callable[[], None], table: str) -> SavedArray:
    key = _STAMPS + _stored_name(table)
    stamps = saved_array(key, datasets.get(key))

    def fill(start: int, out: Array) -> None:
        verify()
        stamps.fill(start, out)

    return dataclasses.replace(stamps, fill=fill)


def saved_array(key: str, dataset: Dataset | None) -> SavedArray:
    """Return an array of a layer; `dataset` is None if the file lacks it."""
    if dataset is None:
        return SavedArray(key, "", None, lambda _start, _out: None)

    def fill(start: int, out: Array) -> None:
        if out.shape:
            dataset.check_written()
            dataset.read_into(start, out)
        else:
            out[()] = dataset.read()

    return SavedArray(key, _DTYPES.get(dataset.dtype, dataset.dtype), dataset.shape, fill)


def _take(where: str, left: dict[str, Dataset], child: str) -> Dataset:
    """Remove the array of a table or slot from `left`, under the name that the layer stores it by, and return it."""
    dataset = left.pop(_stored_name(child), None)
    if dataset is None or dataset.matrix_dtype is None:
        found = "there is none" if dataset is None else f"it is {dataset.dtype} {dataset.shape}"
        raise CheckpointCorruptError.of(f"{where}: its config needs a matrix {child!r}, but {found}")
    return dataset
