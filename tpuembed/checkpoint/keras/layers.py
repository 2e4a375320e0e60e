"""The layers in a weight file besides tables: their names, their variables, and what a config says of them."""

from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any, Final

import numpy as np

from tpuembed.checkpoint.keras.hdf5 import Dataset
from tpuembed.checkpoint.keras.tables import Table
from tpuembed.checkpoint.keras.weights import Weights
from tpuembed.checkpoint.saved_objects import Objects, SavedObject, Weight

__all__ = ["config_below", "layer_policies", "objects_of_weights"]

_OPTIMIZER: Final = "optimizer"


def objects_of_weights(weights: Weights, tables: Iterable[Table]) -> Objects:
    """The layers of a weight file as objects; a layer of `tables` holds these alone."""
    held: dict[str, set[str]] = {}
    for table in tables:
        held.setdefault(table.layer, set()).add(table.name)
    paths = {""} | {path for path in weights.groups if path.partition("/")[0] != _OPTIMIZER}
    paths |= {str(parent) for path in paths for parent in PurePosixPath(path).parents} - {"."}
    inside = [path for path in paths if any(path.startswith(f"{layer}/") for layer in held if layer)]
    order = sorted(paths - set(inside))
    numbers = {path: number for number, path in enumerate(order)}
    nodes = []
    for path in order:
        depth = path.count("/") + 1 if path else 0
        children = {
            other.rpartition("/")[2]: numbers[other]
            for other in order
            if other and other.count("/") == depth and other.startswith(f"{path}/" if path else "")
        }
        group = weights.groups.get(path)
        name = None if group is None else group.name
        own = {} if group is None or path in held else _own(weights, path, group.datasets)
        nodes.append(SavedObject(path, name, children, own, frozenset(held.get(path, ())), is_list=group is None))
    is_named = all(
        group.name is not None for path, group in weights.groups.items() if group.datasets and path in numbers
    )
    return Objects(tuple(nodes), is_named, root_is_model=True)


def _own(weights: Weights, path: str, datasets: Mapping[str, Dataset]) -> dict[str, Weight]:
    scopes = _scopes(weights, path)
    return {
        key: Weight(f"{path}/{key}", f"{scopes}{key}", dataset.shape or (), _dtype(dataset))
        for key, dataset in datasets.items()
    }


def _scopes(weights: Weights, path: str) -> str:
    """The names of a layer and of those around it, without the model's own."""
    parts = path.split("/") if path else []
    groups = [weights.groups.get("/".join(parts[: end + 1])) for end in range(len(parts))]
    return "".join(f"{group.name}/" for group in groups if group is not None and group.name is not None)


def _dtype(dataset: Dataset) -> str:
    if dataset.stated_dtype is not None:
        return dataset.stated_dtype
    try:
        return np.dtype(dataset.dtype).name
    except TypeError:
        return dataset.dtype


def config_below(weights: Weights, root: str) -> Mapping[str, Any] | None:
    """The config of the layer at `root`, such as layers/functional_1; None where a model's config does not hold it."""
    config: Mapping[str, Any] | None = weights.config
    parts = root.strip("/").split("/") if root.strip("/") else []
    for end in range(len(parts)):
        group = weights.groups.get("/".join(parts[: end + 1]))
        if group is None:  # a list of layers
            continue
        inside = (config or {}).get("config")
        layers = inside.get("layers") if isinstance(inside, Mapping) else None
        named = [
            entry
            for entry in (layers if isinstance(layers, list) else [])
            if isinstance(entry, Mapping) and isinstance(entry.get("config"), Mapping)
        ]
        config = next((entry for entry in named if entry["config"].get("name") == group.name), None)
    return config


def layer_policies(config: Mapping[str, Any] | None) -> dict[str, str]:
    """Layer -> the name of its dtype policy, of those that a model's config names once."""
    found: dict[str, set[str | None]] = {}
    pending: list[Any] = [config]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending.extend(node)
        elif isinstance(node, Mapping):
            pending.extend(node.values())
            fields = node.get("config")
            if isinstance(fields, Mapping) and isinstance(fields.get("name"), str) and "dtype" in fields:
                found.setdefault(fields["name"], set()).add(_policy(fields["dtype"]))
    return {name: policy for name, policies in found.items() for policy in policies if policy and len(policies) == 1}


def _policy(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    fields = value.get("config") if isinstance(value, Mapping) else None
    name = fields.get("name") if isinstance(fields, Mapping) else None
    return name if isinstance(name, str) else None
