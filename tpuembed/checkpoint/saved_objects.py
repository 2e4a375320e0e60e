"""The objects of a saved model as a tree of layers: which weights each holds, and by what names they are told apart.

A reader makes one of what it finds on the disk; the exporter makes one of the model that a factory built; `export.weight_names`
compares the two.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from tpuembed.checkpoint.bundle.keras_optimizers import is_optimizer
from tpuembed.checkpoint.bundle.mid_level_variables import mid_level_nodes
from tpuembed.checkpoint.bundle.object_graph import Node, ObjectGraph
from tpuembed.errors import UnknownObjectError
from tpuembed.tensor_bundle import Bundle
from tpuembed.tensor_bundle.dtypes import STRING

__all__ = ["Objects", "SavedObject", "Weight", "find_root", "objects_of_graph"]

_TRAPS: Final = ("_gradient_trap_dummy",)
"""Attributes of embedding layers that hold the dummy which takes gradients."""
_LEGACY_OPTIMIZER: Final = frozenset({"iter", "decay", "learning_rate"})
_ITSELF: Final = "root"
"""The child by which `tf.train.Checkpoint(model)` says that the model is the root."""


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


def find_root(graph: ObjectGraph, path: str, where: str) -> int:
    """The number of the object at `path`, attributes joined with "/".

    Raises:
        UnknownObjectError: there is none; it says which there are.
    """
    number, done = 0, ""
    for name in filter(None, path.split("/")):
        children = graph.nodes[number].children
        if name not in children:
            raise UnknownObjectError.of(
                f"{where}: has no object {done + name!r} (option root={path!r})", _holders_of_layers(graph)
            )
        number, done = children[name], f"{done}{name}/"
    return number


def _holders_of_layers(graph: ObjectGraph) -> Iterator[str]:
    """The paths of the objects that hold objects with values, nearest first: models, and layers of layers; no lists."""
    closed = set(mid_level_nodes(graph))
    reached = [number for number in _reached(graph, closed) if number not in closed]
    inside = {number: [*graph.nodes[number].children.items()] for number in reached}
    holding: set[int] = {
        number for number in reached if any(graph.nodes[child].value_key is not None for _, child in inside[number])
    } | closed
    while more := {
        number for number in reached if number not in holding and any(child in holding for _, child in inside[number])
    }:
        holding |= more
    for number in reached:
        node = graph.nodes[number]
        is_list = all(name.isdigit() for name in node.children)
        if number and not is_list and any(child in holding and child != number for _, child in inside[number]):
            yield graph.path(number)


def objects_of_graph(
    bundle: Bundle,
    graph: ObjectGraph,
    table_keys: Collection[str],
    configs: Mapping[int, Collection[str]],
    root: str | None = None,
) -> Objects:
    """Return the layers of a TensorFlow checkpoint, below `root` if the user named one.

    `table_keys` are no weights: tables and their slots. `configs` has the tables that each object holds.
    """
    closed = {*configs, *mid_level_nodes(graph)}
    reached = list(_reached(graph, closed))
    numbers = {number: index for index, number in enumerate(reached)}
    kept = graph.optimizer_variables

    def is_weight(number: int) -> bool:
        key = graph.nodes[number].value_key
        return key is not None and number not in kept and key not in table_keys and bundle.entries[key].dtype != STRING

    nodes = []
    for number in reached:
        node = graph.nodes[number]
        inside = {} if number in closed else node.children
        nodes.append(
            SavedObject(
                path=f"{root}/{graph.path(number)}".rstrip("/") if root else graph.path(number),
                children={
                    name: numbers[child]
                    for name, child in inside.items()
                    if child in numbers and child != number and graph.nodes[child].value_key is None
                },
                weights={
                    name: _weight(bundle, graph, child)
                    for name, child in inside.items()
                    if is_weight(child) and name not in _TRAPS
                },
                tables=frozenset(configs.get(number, ())),
                is_list=bool(inside) and all(name.isdigit() for name in inside),
            )
        )
    return Objects(tuple(nodes), root_is_model=bool(root) or graph.nodes[0].children.get(_ITSELF) == 0)


def _reached(graph: ObjectGraph, closed: Collection[int]) -> Iterator[int]:
    """The objects that a way leads to which passes no optimizer, and ends at `closed` ones."""
    seen, queue = {0}, [0]
    for number in queue:
        yield number
        if number in closed:
            continue
        for child in graph.nodes[number].children.values():
            if child not in seen and not _is_optimizer(graph.nodes[child]):
                seen.add(child)
                queue.append(child)


def _is_optimizer(node: Node) -> bool:
    """Returns True if an object is an optimizer of Keras 3 or 2, or a legacy one."""
    return is_optimizer(node.children) or bool(node.slot_variables) or node.children.keys() >= _LEGACY_OPTIMIZER


def _weight(bundle: Bundle, graph: ObjectGraph, number: int) -> Weight:
    node = graph.nodes[number]
    key = node.value_key
    assert key is not None
    entry = bundle.entries[key]
    return Weight(key, node.full_name, tuple(entry.shape), entry.dtype)
