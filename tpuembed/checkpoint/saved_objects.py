"""The objects of a saved model as a tree of layers: which weights each holds, and by what names they are told apart.

A reader makes one of what it finds on the disk; the exporter makes one of the model that a factory built; `export.weight_names`
compares the two.
"""

import dataclasses
from collections.abc import Mapping

__all__ = ["Objects", "SavedObject", "Weight"]


@dataclasses.dataclass(frozen=True)
class Weight:
    """A variable of a layer.

    Attributes:
        key: what the reader finds its value by; no two weights of one source have the same.
        name: the scopes that it was made in and its own name, joined with "/"; empty where the source does not say.
        shape: of its value.
        dtype: of its value, as numpy and ml_dtypes call it.
    """

    key: str
    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def is_count(self) -> bool:
        """Returns True if the weight is a count: an integer without a shape, or one of a Keras 2 metric. Models need no count."""
        return not self.shape and ("int" in self.dtype or self.name in ("total", "count"))


@dataclasses.dataclass(frozen=True)
class SavedObject:
    """A layer, a model, or a list of them.

    Attributes:
        path: for messages, and what `root=` takes.
        name: of the layer; None where the source does not say.
        children: attribute -> number of the object.
        weights: attribute -> what it holds itself.
        tables: names of the tables that it holds itself, where they are known.
        is_list: whether the keys of `children` are places in a list, or among the layers of one class in it.
    """

    path: str
    name: str | None = None
    children: Mapping[str, int] = dataclasses.field(default_factory=dict)
    weights: Mapping[str, Weight] = dataclasses.field(default_factory=dict)
    tables: frozenset[str] = frozenset()
    is_list: bool = False

    def ordered(self) -> list[int]:
        """The children in the order of their keys, as they are numbered: 2 before 10, and dense_2 before dense_10."""
        return [self.children[key] for key in sorted(self.children, key=_place)]


def _place(key: str) -> tuple[str, int]:
    stem, _, number = key.rpartition("_")
    if key.isdigit():
        return "", int(key)
    return (stem, int(number)) if stem and number.isdigit() else (key, -1)


@dataclasses.dataclass(frozen=True)
class Objects:
    """All objects of one source; number 0 is the root.

    Attributes:
        nodes: by number.
        is_named: False where the source has lost the names of layers.
        root_is_model: whether the root is the model itself, and not a holder of it.
    """

    nodes: tuple[SavedObject, ...]
    is_named: bool = True
    root_is_model: bool = False

    def below(self, number: int) -> list[int]:
        """The numbers of an object and of all below it, in the order in which they are met."""
        seen, order, pending = {number}, [], [number]
        while pending:
            order.append(current := pending.pop())
            for child in reversed([*self.nodes[current].children.values()]):
                if child not in seen:
                    seen.add(child)
                    pending.append(child)
        return order

    def weights(self, number: int = 0) -> dict[str, Weight]:
        """The weights of an object and of all below it, by their keys."""
        return {weight.key: weight for n in self.below(number) for weight in self.nodes[n].weights.values()}

    def tables(self, number: int) -> frozenset[str]:
        """The tables of an object and of all below it."""
        return frozenset[str]().union(*(self.nodes[n].tables for n in self.below(number)))
