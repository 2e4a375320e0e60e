"""Reads the config of keras-rs layers and of the optimizer in a `.keras` file."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Final

__all__ = ["LayerConfig", "OptimizerConfig", "layer_configs", "optimizer_config"]

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
class LayerConfig:
    """A DistributedEmbedding layer.

    Attributes:
        name: of the layer.
        tables: name -> its fields `vocabulary_size`, `dim` and `combiner`.
        features: the nested structure of the layer's features, each with its table; None if it cannot be read.
    """

    name: str
    tables: Mapping[str, Mapping[str, Any]]
    features: Any


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer that the model was compiled with.

    Attributes:
        slots: its slots for every trainable variable, in order.
        scalars: number of its own variables, which come before.
    """

    slots: tuple[str, ...]
    scalars: int


def layer_configs(config: Mapping[str, Any] | None) -> Iterator[LayerConfig]:
    """Yield the DistributedEmbedding layers that a model's config describes, at any depth."""
    pending: list[Any] = [config]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending.extend(reversed(node))
        elif isinstance(node, Mapping):
            fields = node.get("config")
            if node.get("class_name") == _LAYER and isinstance(fields, Mapping):
                if not str(node.get("registered_name")).startswith(_TPUEMBED_PREFIX):
                    yield from _layer_config(fields)
            else:
                pending.extend(reversed(list(node.values())))


def _layer_config(fields: Mapping[str, Any]) -> Iterator[LayerConfig]:
    name, tables = fields.get("name"), fields.get("tables")
    if not isinstance(name, str) or not isinstance(tables, list) or not all(_is_table(table) for table in tables):
        return
    renamed = [
        {"vocabulary_size": t["vocabulary_size"], "dim": t["embedding_dim"], "combiner": t.get("combiner", "mean")}
        for t in tables
    ]
    names = [table["name"] for table in tables]
    try:
        features = _features(fields.get("feature_configs"), dict(enumerate(names)))
    except (LookupError, TypeError, RecursionError):
        features = None
    yield LayerConfig(name, dict(zip(names, renamed, strict=True)), features)


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


def optimizer_config(config: Mapping[str, Any] | None) -> OptimizerConfig | None:
    """Return the optimizer if it is one of Keras' own that keeps exactly `_SLOTS`; None otherwise."""
    compiled = (config or {}).get("compile_config")
    optimizer = compiled.get("optimizer") if isinstance(compiled, Mapping) else None
    fields = optimizer.get("config") if isinstance(optimizer, Mapping) else None
    if not isinstance(optimizer, Mapping) or not isinstance(fields, Mapping):
        return None
    slots = _SLOTS.get(str(optimizer.get("class_name")))
    if slots is None or optimizer.get("module") != "keras.optimizers":
        return None
    keeps_more = fields.get("amsgrad") or fields.get("use_ema") or fields.get("gradient_accumulation_steps")
    if keeps_more or (slots == ("momenta",) and not fields.get("momentum")):
        return None
    is_number = isinstance(fields.get("learning_rate"), int | float)  # a schedule is not a variable
    return OptimizerConfig(slots, 2 if is_number else 1)
