"""Finds the tables of a weight file, of `keras_rs.layers.DistributedEmbedding` and of tpuembed's own layer.

They are checked against the config of the layer, or of the model, if the file has it.

Source: keras_rs/src/layers/embedding/base_distributed_embedding.py (`_default_device_init`); `tpuembed.TPUEmbedding`.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Final

from tpuembed.checkpoint.keras.hdf5 import Dataset
from tpuembed.checkpoint.keras.weights import Weights
from tpuembed.checkpoint.own_layer import OwnLayer, SavedArray, check_size, merge_configs, parse_config, slot_names
from tpuembed.checkpoint.types import Array, by_name
from tpuembed.errors import CheckpointCorruptError, CheckpointFormatError, first_few

__all__ = ["CONFIG", "Table", "discover", "optimizer_steps", "own_layer_configs", "own_layers"]

_TABLE_PATH: Final = re.compile(r"(?:(?P<layer>.+)/)?_default_device_embedding_layers/(?P<kind>.+)", re.DOTALL)
_TABLE_KIND: Final = re.compile(r"embed_reduce(?:_(?P<number>\d+))?")
CONFIG: Final = "|config"
"""The name of a layer's config among its arrays. Only an embedding layer has one."""
_UPDATES, _HISTORY, _STAMPS = "|updates", "|history", "|stamps|"
_VOCABULARY: Final = "|vocabulary|"
_DTYPES: Final = {"|u1": "uint8", "<i4": "int32", "<i8": "int64"}
_MAX_TEXT_BYTES: Final = 16 << 20
_SPARSE_CORE_REMEDY: Final = (
    "Keras does not save tables on SparseCores. Save them with tf.train.Checkpoint(emb=layer._tpu_embedding)"
)
_OPTIMIZER: Final = "optimizer"
_SCALES: Final = "LossScaleOptimizer"
"""Its arrays are others."""
_LAYER_GROUP: Final = re.compile(r"distributed_embedding(_\d+)?")
_LAYER: Final = "DistributedEmbedding"
_TPUEMBED_PREFIX: Final = "tpuembed"
"""The prefix of the registered name of tpuembed's layers of that class name, which have their own config beside their
arrays.
"""
_SLOTS: Final = {
    "Adagrad": ("accumulators",),
    "Adam": ("momenta", "velocities"),
    "AdamW": ("momenta", "velocities"),
    "Ftrl": ("accumulators", "linears"),
    "SGD": ("momenta",),
}
"""Keras' optimizers -> the slots that each keeps for a variable, in order of creation.
Source: the `build` methods in keras/src/optimizers/.
"""


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


def _keras_rs_tables(weights: Weights) -> Iterator[Table]:
    """Yield the tables of keras-rs layers. Keras numbers them in the order of the layer's features."""
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
        if not group.datasets:
            raise CheckpointCorruptError.of(f"weights {weights.path}: table {group.name!r} has no rows")
        dataset = group.datasets.get("0")
        if set(group.datasets) != {"0"} or dataset is None or dataset.matrix_dtype is None:
            shown = ", ".join(f"{name}: {one.dtype} {one.shape}" for name, one in sorted(group.datasets.items())[:5])
            raise CheckpointFormatError(
                f"weights {weights.path}: table {group.name!r} should be one matrix of floats, but is {shown}. Save "
                "it without quantization or LoRA."
            )
        yield Table(group.name, match["layer"] or "", int(kind["number"] or 0), dataset)


def own_layer_configs(weights: Weights) -> dict[str, dict[str, Any]]:
    """Return path -> config, for each of tpuembed's layers."""
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


def _own_layer_tables(weights: Weights, configs: Mapping[str, dict[str, Any]]) -> Iterator[Table]:
    """Yield the tables that the `configs` name, each checked against its config."""
    for path, config in configs.items():
        where = f"weights {weights.path}: layer {path!r}"
        left = {
            name: dataset
            for name, dataset in weights.groups[path].datasets.items()
            if name not in (CONFIG, _UPDATES, _HISTORY) and not name.startswith((_STAMPS, _VOCABULARY))
        }
        for order, (name, fields) in enumerate(config["tables"].items()):
            slots = {slot: f"{name}/{slot}" for slot in slot_names(where, name, fields)}
            found: dict[str, Dataset] = {}
            for child in (name, *slots.values()):
                dataset = left.pop(_stored_name(child), None)
                if dataset is None or dataset.matrix_dtype is None:
                    what = "there is none" if dataset is None else f"it is {dataset.dtype} {dataset.shape}"
                    raise CheckpointCorruptError.of(f"{where}: its config needs a matrix {child!r}, but {what}")
                found[child] = dataset
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
            updates=_saved_array(datasets, _UPDATES) if _UPDATES in datasets else None,
            history=None if history is None else functools.partial(_read_text, f"{where}: its history", history),
            stamps=lambda table, datasets=datasets: _saved_array(datasets, _STAMPS + _stored_name(table)),  # type: ignore[misc]
            verify=lambda _: verify(),
            vocabularies={
                name.removeprefix(_VOCABULARY): _saved_array(datasets, name)
                for name in datasets
                if name.startswith(_VOCABULARY)
            },
            stored_name=_stored_name,
        )


def _stored_name(name: str) -> str:
    return name.replace("/", "|")


def _saved_array(datasets: Mapping[str, Dataset], key: str) -> SavedArray:
    """Return an array of a layer, which may be missing."""
    dataset = datasets.get(key)
    if dataset is None:
        return SavedArray(key, "", None, lambda _start, _out: None)

    def fill(start: int, out: Array) -> None:
        if out.shape:
            dataset.check_written()
            dataset.read_into(start, out)
        else:
            out[()] = dataset.read()

    return SavedArray(key, _DTYPES.get(dataset.dtype, dataset.dtype), dataset.shape, fill)


def discover(
    weights: Weights, own_configs: Mapping[str, dict[str, Any]]
) -> tuple[dict[str, Table], dict[str, Any] | None]:
    """Return the tables by name, and the config of the layers that hold them if it is known. `own_configs` are of our
    layers.
    """
    keras_rs = _with_optimizer_slots(weights, list(_keras_rs_tables(weights)))
    configs = list(_keras_rs_configs(weights.config))
    _check_keras_rs(weights, keras_rs, configs, own_configs)
    tables = by_name(
        [*_own_layer_tables(weights, own_configs), *keras_rs],
        lambda one, other: (
            f"weights {weights.path}: two tables are called {one.name!r} ({one.dataset.path} and "
            f"{other.dataset.path}). Rename one and save again."
        ),
    )
    if not tables:
        raise CheckpointFormatError(f"weights {weights.path}: {_why_none(weights)}.")
    for table in tables.values():
        form = (table.shape, table.dataset.dtype, table.dataset.stated_dtype)
        for slot, dataset in table.slots.items():
            if (dataset.shape, dataset.dtype, dataset.stated_dtype) != form:
                raise CheckpointCorruptError.of(
                    f"weights {weights.path}: table {table.name!r} is {table.dtype} {list(table.shape)}, but its slot "
                    f"{slot!r} ({dataset.path}) is {dataset.dtype} {list(dataset.shape or ())}"
                )
    readable = {name: config for name, config in configs if config["features"] is not None}
    return tables, merge_configs({**own_configs, **readable})


def _check_keras_rs(
    weights: Weights, tables: Sequence[Table], configs: Sequence[tuple[str, dict[str, Any]]], own: Collection[str]
) -> None:
    """Raise an error if a keras-rs layer's tables are missing or differ from its config. `own` are tpuembed's layers."""
    layers = {table.layer for table in tables}
    named = {path for path in weights.groups if _LAYER_GROUP.fullmatch(PurePosixPath(path).name)}
    for path in sorted((layers | named) - set(own)):
        group = weights.groups.get(path)
        if group is not None and group.datasets:
            raise CheckpointFormatError(
                f"weights {weights.path}: layer {group.name or path!r} has variables of its own, which stand for "
                f"tables that are missing. {_SPARSE_CORE_REMEDY}."
            )
    paths = {group.name: path for path, group in weights.groups.items() if path in layers}
    for name, config in configs:
        if sum(other == name for other, _ in configs) > 1:
            continue
        found = {
            table.name: table
            for table in sorted(tables, key=lambda table: table.order)
            if table.layer == paths.get(name)
        }
        wanted = config["tables"]
        if missing := sorted(wanted.keys() - found.keys()):
            raise CheckpointFormatError(
                f"weights {weights.path}: layer {name!r} has tables {', '.join(map(repr, missing))}, but the "
                f"file has no rows of them. {_SPARSE_CORE_REMEDY}."
            )
        if found.keys() == wanted.keys() and list(found) != list(wanted):
            raise CheckpointCorruptError.of(
                f"weights {weights.path}: layer {name!r} has tables {first_few(map(repr, wanted))} in its "
                f"config's order, but {first_few(map(repr, found))} in that of the weights"
            )
        for table in found.values():
            fields = wanted.get(table.name, {})
            expected = [fields.get("vocabulary_size"), fields.get("dim")]
            if list(table.shape) != expected:
                raise CheckpointCorruptError.of(
                    f"weights {weights.path}: table {table.name!r} is {expected} in the config of layer {name!r}, "
                    f"but {list(table.shape)} in the weights"
                )


def _why_none(weights: Weights) -> str:
    """Return the reason why the file has no tables, for an error message."""
    if not weights.groups:
        return (
            "has no variables in Keras 3's groups, and older versions of Keras do not record which arrays are "
            "tables. Load it into its model and save that with tf.train.Checkpoint(model=model)"
        )
    if all(group.name is None for group in weights.groups.values()):
        return (
            "its layers have no names (Keras 2 wrote it, for example for tensorflow_recommenders), so no array "
            "can be identified as a table. Load it into its model and save that with "
            "tf.train.Checkpoint(model=model)"
        )
    return (
        "has no table of keras_rs.layers.DistributedEmbedding or tpuembed.TPUEmbedding among "
        f"{sum(len(group.datasets) for group in weights.groups.values())} arrays. If the model has one on "
        f"SparseCores: {_SPARSE_CORE_REMEDY}"
    )


def _with_optimizer_slots(weights: Weights, tables: Sequence[Table]) -> list[Table]:
    """Return `tables` with their proven slots. A table whose slots could be another variable's gets none.

    Keras numbers the arrays of an optimizer and does not name them: first its own scalars, then for each trainable variable, in
    the model's order, its slots. Source: keras/src/optimizers/base_optimizer.py (`build`, `save_own_variables`).

    Slots are proven for a table whose shape no other variable has. They are also proven for all tables of one layer
    that share a shape with no other variable, because layer and optimizer number them in the same order.
    """
    optimizer = _compiled_optimizer(weights.config)
    fields = optimizer.get("config")
    names = _SLOTS.get(str(optimizer.get("class_name")), ())
    if not names or not isinstance(fields, Mapping) or optimizer.get("module") != "keras.optimizers":
        return list(tables)
    keeps_more = fields.get("amsgrad") or fields.get("use_ema") or fields.get("gradient_accumulation_steps")
    if keeps_more or (names == ("momenta",) and not fields.get("momentum")):
        return list(tables)
    group = weights.groups.get(_OPTIMIZER)
    datasets = {} if group is None else group.datasets
    variables = [dataset for number in range(len(datasets)) if (dataset := datasets.get(str(number))) is not None]
    scalars = 2 if isinstance(fields.get("learning_rate"), int | float) else 1  # a schedule is not a variable
    own, rest = variables[:scalars], variables[scalars:]
    kept = [rest[first : first + len(names)] for first in range(0, len(rest), len(names))]
    if len(variables) < len(datasets) or any(dataset.shape != () for dataset in own) or len(rest) % len(names):
        return list(tables)
    if any(dataset.shape != slots[0].shape for slots in kept for dataset in slots):
        return list(tables)
    return [_with_slots(weights, table, tables, names, kept) for table in tables]


def _with_slots(
    weights: Weights, table: Table, tables: Sequence[Table], names: Sequence[str], kept: Sequence[Sequence[Dataset]]
) -> Table:
    alike = sorted((other for other in tables if other.shape == table.shape), key=lambda other: other.order)
    candidates = [slots for slots in kept if slots[0].shape == table.shape]
    layers = {other.layer for other in alike}
    variables = [
        dataset
        for group in weights.groups.values()
        for dataset in group.datasets.values()
        if group.path.partition("/")[0] != _OPTIMIZER and dataset.shape == table.shape
    ]
    if layers != {table.layer} or not len(candidates) == len(alike) == len(variables):
        return table
    slots = candidates[alike.index(table)]
    form = (table.dataset.dtype, table.dataset.stated_dtype)
    if any((slot.dtype, slot.stated_dtype) != form for slot in slots):
        return table
    return dataclasses.replace(table, slots=dict(zip(names, slots, strict=True)))


def _keras_rs_configs(config: Mapping[str, Any] | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the config of each DistributedEmbedding layer that a model's config describes, at any depth.

    Tables have the fields `vocabulary_size`, `dim` and `combiner`. The features are None if they cannot be read.
    """
    pending: list[Any] = [config]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending.extend(reversed(node))
        if not isinstance(node, Mapping):
            continue
        fields = node.get("config")
        if node.get("class_name") != _LAYER or not isinstance(fields, Mapping):
            pending.extend(reversed(list(node.values())))
            continue
        name, tables = fields.get("name"), fields.get("tables")
        is_own = str(node.get("registered_name")).startswith(_TPUEMBED_PREFIX)
        if is_own or not isinstance(name, str) or not isinstance(tables, list) or not all(map(_is_table, tables)):
            continue
        renamed = {
            table["name"]: {
                "vocabulary_size": table["vocabulary_size"],
                "dim": table["embedding_dim"],
                "combiner": table.get("combiner", "mean"),
            }
            for table in tables
        }
        try:
            features = _features(fields.get("feature_configs"), {n: table["name"] for n, table in enumerate(tables)})
        except (LookupError, TypeError, RecursionError):
            features = None
        yield name, {"tables": renamed, "features": features}


def _is_table(table: Any) -> bool:
    return (
        isinstance(table, Mapping)
        and isinstance(table.get("name"), str)
        and all(type(table.get(field)) is int for field in ("vocabulary_size", "embedding_dim"))
    )


def _features(node: Any, tables: Mapping[int, str]) -> Any:
    """Return `node` with the table numbers of features replaced by names.

    Source: BaseDistributedEmbedding.get_config; Keras writes a tuple as `{"class_name": "__tuple__", "items": [...]}`.
    """
    if isinstance(node, list):
        return [_features(child, tables) for child in node]
    if not isinstance(node, Mapping):
        raise TypeError(f"{node!r} is not a feature")
    if node.get("class_name") == "__tuple__":
        return _features(node["items"], tables)
    if isinstance(node.get("name"), str) and type(node.get("table")) is int:
        return {"table": tables[node["table"]]}
    return {key: _features(child, tables) for key, child in node.items()}


def _compiled_optimizer(config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return what a model's config says of the optimizer that it was compiled with; empty if it says nothing."""
    compiled = (config or {}).get("compile_config")
    optimizer = compiled.get("optimizer") if isinstance(compiled, Mapping) else None
    return optimizer if isinstance(optimizer, Mapping) else {}


def optimizer_steps(weights: Weights) -> int | None:
    """Return how many steps the optimizer of a `.keras` file made: its first array. None if it is not one of Keras' own."""
    optimizer, group = _compiled_optimizer(weights.config), weights.groups.get(_OPTIMIZER)
    if group is None or optimizer.get("module") != "keras.optimizers" or optimizer.get("class_name") == _SCALES:
        return None
    count = group.datasets.get("0")
    if count is None or count.shape != () or count.dtype not in ("<i4", "<i8"):
        return None
    return dataclasses.replace(_saved_array(group.datasets, "0"), dtype="int64").count(
        f"weights {weights.path}: the optimizer"
    )
