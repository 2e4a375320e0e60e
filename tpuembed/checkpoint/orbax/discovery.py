"""Finds the arrays of an Orbax checkpoint that are tables and slots.

Source of the names: keras.Model.get_state_tree, keras/src/optimizers/base_optimizer.py (add_variable_from_reference).
"""

import dataclasses
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Final

from tpuembed.checkpoint.orbax.metadata import Leaf
from tpuembed.errors import CheckpointFormatError

__all__ = ["KNOWN_SLOTS", "TableLeaves", "keras_tables", "matrices", "merge", "slot_name"]

_VARIABLES: Final = frozenset({"trainable_variables", "non_trainable_variables"})
_OPTIMIZERS: Final = "optimizer_variables"
_EMBEDDINGS: Final = "embeddings"
_CHANGED_BY: Final = ("lora_embeddings_a", "embeddings_scale")
"""Leaves beside `embeddings` that change the rows that the layer looks up."""
_SLOTS: Final = {
    "accumulator": "accumulators",
    "linear": "linears",
    "momentum": "momenta",
    "velocity": "velocities",
}
"""Slot names of Keras 3 and jax-tpu-embedding -> those of `tf.tpu.experimental.embedding`; others stay unchanged."""
KNOWN_SLOTS: Final = frozenset(_SLOTS.values())
"""These slots have a value per element of the table. Other slots may have any shape."""


@dataclasses.dataclass(frozen=True)
class TableLeaves:
    """A table that is stored row by row, and its slots by their names."""

    name: str
    table: Leaf
    slots: Mapping[str, Leaf] = dataclasses.field(default_factory=dict)


_OF_KERAS: Final[Mapping[str, frozenset[str]]] = {
    "adagrad": frozenset({"accumulator"}),
    "adam": frozenset({"momentum", "velocity"}),
    "adamw": frozenset({"momentum", "velocity"}),
    "ftrl": frozenset({"accumulator", "linear"}),
    "lamb": frozenset({"momentum", "velocity"}),
    "sgd": frozenset({"momentum"}),
}
"""Keras' optimizers by their default names -> their slots that TensorFlow also has. Other optimizers use the same names
for other quantities: RMSprop's velocity, Lion's momentum.
"""


def slot_name(name: str) -> str:
    """Return TensorFlow's name of the slot that Keras or JAX calls `name`."""
    return _SLOTS.get(name, name)


def keras_tables(leaves: Sequence[Leaf]) -> Iterator[TableLeaves]:
    """Yield the embedding layers of keras-rs and Keras, by their table's name, with their slots in optimizers.

    Raises:
        CheckpointFormatError: a table is more than its `embeddings`.
    """
    variables = [leaf for leaf in leaves if leaf.path[0] in _VARIABLES]
    paths = {leaf.path for leaf in variables}
    kept = _optimizer_slots([leaf for leaf in leaves if leaf.path[0] == _OPTIMIZERS], variables)
    for leaf in variables:
        if leaf.path[-1] != _EMBEDDINGS or len(leaf.path) < 3:
            continue
        for name in _CHANGED_BY:
            if (*leaf.path[:-1], name) in paths:
                raise CheckpointFormatError(
                    f"checkpoint {leaf.item.folder}: table {leaf.shown} has {name!r} beside it, which changes the "
                    "rows that the layer looks up. Merge it into the table and save again."
                )
        yield TableLeaves(leaf.path[-2], leaf, kept.get(leaf.path, {}))


def _optimizer_slots(leaves: Iterable[Leaf], variables: Iterable[Leaf]) -> dict[tuple[str, ...], dict[str, Leaf]]:
    """Return the slots by the path of their variable. They are named after that path, joined by "_", and the slot."""
    prefixes: defaultdict[str, list[Leaf]] = defaultdict(list)
    for variable in variables:
        prefixes["_".join(variable.path[1:])].append(variable)
    kept: defaultdict[tuple[str, ...], dict[str, Leaf]] = defaultdict(dict)
    for leaf in leaves:
        prefix = _longest_prefix(leaf.path[-1], prefixes)
        if prefix is not None:
            optimizer, name = leaf.path[1].rstrip("0123456789").removesuffix("_"), leaf.path[-1][len(prefix) + 1 :]
            name = slot_name(name) if name in _OF_KERAS.get(optimizer, ()) else name
            _refuse_ambiguous(leaf, name, prefixes[prefix], kept[prefixes[prefix][0].path].get(name))
            kept[prefixes[prefix][0].path][name] = leaf
    return kept


def _refuse_ambiguous(leaf: Leaf, name: str, variables: Sequence[Leaf], other: Leaf | None) -> None:
    """Raise CheckpointFormatError for one slot of two variables, or two slots of one name for one variable."""
    if len(variables) > 1:
        raise CheckpointFormatError(
            f"checkpoint {leaf.item.folder}: {leaf.shown} may be {name!r} of {variables[0].shown} or of "
            f"{variables[1].shown}. Rename one and save again."
        )
    if other is not None:
        raise CheckpointFormatError(
            f"checkpoint {leaf.item.folder}: {other.shown} and {leaf.shown} are both {name!r} of "
            f"{variables[0].shown}. Save again with one optimizer."
        )


def _longest_prefix(name: str, prefixes: Container[str]) -> str | None:
    """Return the longest of `prefixes` that `name` has before a "_"."""
    end = name.rfind("_")
    while end > 0:
        if name[:end] in prefixes:
            return name[:end]
        end = name.rfind("_", 0, end)
    return None


def matrices(leaves: Iterable[Leaf], several_items: bool) -> Iterator[TableLeaves]:
    """Yield arrays that may be matrices, by path, which starts with the item's name if there are several items."""
    for leaf in leaves:
        if leaf.is_array and leaf.rank in {None, 2}:
            path = (leaf.item.folder.name, *leaf.path) if several_items else leaf.path
            yield TableLeaves("/".join(path), leaf)


def merge(tables: Iterable[TableLeaves]) -> dict[str, TableLeaves]:
    """Return `tables` by name.

    Raises:
        CheckpointFormatError: two have the same name.
    """
    merged: dict[str, TableLeaves] = {}
    for table in tables:
        other = merged.setdefault(table.name, table)
        if other is not table:
            raise CheckpointFormatError(
                f"checkpoint {table.table.item.folder}: arrays {other.table.shown} and {table.table.shown} are both "
                f"table {table.name!r}. Rename one and save again."
            )
    return merged
