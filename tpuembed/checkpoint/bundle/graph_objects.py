"""The layers of a model in the object graph of a TensorFlow checkpoint."""

from collections.abc import Collection, Iterator, Mapping
from typing import Final

from tpuembed.checkpoint.bundle.object_graph import Node, ObjectGraph, is_optimizer
from tpuembed.checkpoint.bundle.table_keys import mid_level_nodes
from tpuembed.checkpoint.saved_objects import Objects, SavedObject, Weight
from tpuembed.errors import UnknownObjectError
from tpuembed.formats.dtypes import STRING
from tpuembed.formats.tensor_bundle import Bundle

__all__ = ["find_root", "objects_of_graph"]

_TRAPS: Final = ("_gradient_trap_dummy",)
"""Attributes of embedding layers that hold the dummy which takes gradients."""
_LEGACY_OPTIMIZER: Final = frozenset({"iter", "decay", "learning_rate"})
_ITSELF: Final = "root"
"""The child by which `tf.train.Checkpoint(model)` says that the model is the root."""


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
