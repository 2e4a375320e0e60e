"""What the config of a `.keras` file says of its keras-rs layers and of its optimizer."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Final

__all__ = ["LayerConfig", "OptimizerConfig", "layer_configs", "optimizer_config"]

_LAYER: Final = "DistributedEmbedding"
_OURS: Final = "tpuembed"
"""How the registered name of a layer of that name begins which carries a config of its own beside its arrays."""
_SLOTS: Final = {
    "Adagrad": ("accumulators",),
    "Adam": ("momenta", "velocities"),
    "AdamW": ("momenta", "velocities"),
    "Ftrl": ("accumulators", "linears"),
    "SGD": ("momenta",),
}
"""Of Keras' optimizers: what each keeps for a variable, in the order in which it makes them.

Source: the `build` methods in keras/src/optimizers/.
"""


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """A DistributedEmbedding layer.

    Attributes:
        name: of the layer.
        tables: name -> its fields `vocabulary_size`, `dim` and `combiner`.
        features: the nested structure of the layer's features, each with its table; None where it cannot be read.
    """

    name: str
    tables: Mapping[str, Mapping[str, Any]]
    features: Any


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer that the model was compiled with.

    Attributes:
        slots: what it keeps for every trainable variable, in order.
        scalars: how many variables of its own come before.
    """

    slots: tuple[str, ...]
    scalars: int


def layer_configs(config: Mapping[str, Any] | None) -> Iterator[LayerConfig]:
    """The DistributedEmbedding layers that a model's config describes, however deep."""
    pending: list[Any] = [config]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending.extend(reversed(node))
        elif isinstance(node, Mapping):
            fields = node.get("config")
            if node.get("class_name") == _LAYER and isinstance(fields, Mapping):
                if not str(node.get("registered_name")).startswith(_OURS):
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
    """`node`, in which a feature gives its table by number, with names instead.

    Source: BaseDistributedEmbedding.get_config; Keras writes a tuple as `{"class_name": "__tuple__", "items": [...]}`.
    """
    if isinstance(node, list):
        return [_features(child, tables) for child in node]
    if not isinstance(node, Mapping):
        raise TypeError(f"{node!r} is no feature")
    if node.get("class_name") == "__tuple__":
        return _features(node["items"], tables)
    if isinstance(node.get("name"), str) and type(node.get("table")) is int:
        return {"table": tables[node["table"]]}
    return {key: _features(child, tables) for key, child in node.items()}


def optimizer_config(config: Mapping[str, Any] | None) -> OptimizerConfig | None:
    """The optimizer, where the config names one of Keras' own that keeps nothing but `_SLOTS`; None elsewhere."""
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
    is_number = isinstance(fields.get("learning_rate"), int | float)  # a schedule is no variable
    return OptimizerConfig(slots, 2 if is_number else 1)
