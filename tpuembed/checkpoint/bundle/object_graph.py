"""The graph of Python objects in a TensorFlow 2 checkpoint, and the keys of their values in the bundle.

Source: tensorflow/core/protobuf/trackable_object_graph.proto.
"""

import dataclasses
import functools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Self

from tpuembed.formats.protobuf import MalformedError, Message

__all__ = [
    "OBJECT_GRAPH_KEY",
    "VALUE",
    "Attribute",
    "Node",
    "ObjectGraph",
    "SlotVariable",
    "is_keras_3_optimizer",
    "is_optimizer",
]

OBJECT_GRAPH_KEY: Final = "_CHECKPOINTABLE_OBJECT_GRAPH"
VALUE: Final = "VARIABLE_VALUE"
"""The attribute that holds a variable's value."""

_MAX_DEPTH: Final = 1000

# The class of an object is not saved. An optimizer is recognised by exactly the attributes of its class, so that a list of the same
# name in another class (RMSprop's `_velocities`, Lion's `_momentums`) is not mistaken for a slot.
# Source: keras/src/optimizers/ of Keras 3; tf_keras/src/optimizers/ of Keras 2, its optimizers that are not "legacy".
_OPTIMIZER: Final = frozenset({"_iterations", "_variables"})
_OF_EVERY_OPTIMIZER: Final = _OPTIMIZER | {
    "_accumulated_gradients",
    "_current_learning_rate",
    "_index_dict",
    "_learning_rate",
    "_model_variables_moving_average",
    "_trainable_variables",
    "_trainable_variables_indices",
    "_velocity_hats",
    "loss_scale",
}
_SLOTS: Final[Mapping[frozenset[str], Mapping[str, str]]] = {
    frozenset(lists): lists
    for lists in (
        {"_accumulators": "accumulators"},
        {"_accumulators": "accumulators", "_linears": "linears"},
        {"_momentums": "momenta", "_velocities": "velocities"},
        {"momentums": "momenta"},
    )
}
"""Lists of Adagrad, Ftrl, Adam (AdamW, Lamb) and SGD -> the slot names of `tf.tpu.experimental.embedding`."""
_LEGACY_SLOTS: Final = {
    "accumulator": "accumulators",
    "linear": "linears",
    "m": "momenta",
    "momentum": "momenta",
    "v": "velocities",
}
_ADAMAX: Final = "Adamax"


def is_optimizer(attributes: Iterable[str]) -> bool:
    """Returns True if these are attributes of an optimizer of Keras 3, or of one of Keras 2 that is not legacy."""
    return set(attributes) >= _OPTIMIZER


def is_keras_3_optimizer(attributes: Iterable[str]) -> bool:
    """Returns True if these are attributes of an optimizer of Keras 3. Only those list the variables that they train."""
    return _OPTIMIZER | {"_trainable_variables"} <= set(attributes)


@dataclasses.dataclass(frozen=True)
class Attribute:
    """One saved value of an object: its name in the graph, and its key in the bundle."""

    full_name: str
    checkpoint_key: str


@dataclasses.dataclass(frozen=True)
class SlotVariable:
    """A slot of a Keras 2 optimizer: variable node `slot` is the slot `name` of variable node `original`."""

    original: int
    name: str
    slot: int


@dataclasses.dataclass(frozen=True)
class Node:
    """One object.

    Attributes:
        children: attribute name -> node number.
        attributes: name -> saved value.
        slot_variables: the slots that this object keeps for variables, if it is an optimizer.
        registered_saver: the name of a custom saver; usually empty.
    """

    children: Mapping[str, int]
    attributes: Mapping[str, Attribute]
    slot_variables: tuple[SlotVariable, ...]
    registered_saver: str

    @property
    def value_key(self) -> str | None:
        """Return the bundle's key of a variable's value; None for other objects."""
        attribute = self.attributes.get(VALUE)
        return None if attribute is None else attribute.checkpoint_key

    @property
    def full_name(self) -> str:
        """Return TensorFlow's name of the variable; empty for other objects."""
        return self.attributes[VALUE].full_name if VALUE in self.attributes else ""


@dataclasses.dataclass(frozen=True)
class ObjectGraph:
    """All objects; number 0 is the root. Cycles are usual."""

    nodes: tuple[Node, ...]

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Parse a serialized TrackableObjectGraph.

        Raises:
            MalformedError: it does not parse, or a reference leads to no node.
        """
        nodes = tuple(_parse_node(message) for message in Message(data).messages(1))
        if not nodes:
            raise MalformedError("it has no nodes")
        for number, node in enumerate(nodes):
            slots = (end for slot in node.slot_variables for end in (slot.original, slot.slot))
            for target in (*node.children.values(), *slots):
                if not 0 <= target < len(nodes):
                    raise MalformedError(f"node {number} refers to node {target} of {len(nodes)}")
        return cls(nodes)

    def below(self, root: int) -> Self:
        """Return the graph of `root` and everything below it. Slots that optimizers outside keep for its variables are
        left out.
        """
        kept = [root]
        numbers = {root: 0}
        for number in kept:  # grows during the loop
            for child in self.nodes[number].children.values():
                if child not in numbers:
                    numbers[child] = len(kept)
                    kept.append(child)
        nodes = []
        for node in (self.nodes[number] for number in kept):
            slots = (slot for slot in node.slot_variables if slot.original in numbers and slot.slot in numbers)
            moved = (SlotVariable(numbers[slot.original], slot.name, numbers[slot.slot]) for slot in slots)
            children = {name: numbers[child] for name, child in node.children.items()}
            nodes.append(dataclasses.replace(node, children=children, slot_variables=tuple(moved)))
        return type(self)(tuple(nodes))

    @functools.cached_property
    def parents(self) -> Mapping[int, tuple[int, str]]:
        """Return node number -> (its parent on a shortest path from the root, its name there), nearest nodes first."""
        found: dict[int, tuple[int, str]] = {}
        queue = deque([0])
        while queue:
            number = queue.popleft()
            for name, child in self.nodes[number].children.items():
                if child and child not in found:
                    found[child] = number, name
                    queue.append(child)
        return found

    def path(self, number: int) -> str:
        """Return the names on a shortest path from the root to a node, joined with "/"; the root is "".

        Raises:
            MalformedError: there is no path, or it is far too long.
        """
        names: list[str] = []
        while number:
            if len(names) == _MAX_DEPTH:
                raise MalformedError(f"a node is over {_MAX_DEPTH} objects deep")
            if number not in self.parents:
                raise MalformedError(f"there is no path from the root to node {number}")
            number, name = self.parents[number]
            names.append(name)
        return "/".join(reversed(names))

    @functools.cached_property
    def slots(self) -> Mapping[int, Mapping[str, frozenset[int]]]:
        """Return variable node -> slot -> nodes (one per optimizer), for legacy optimizers of Keras 2 and those of
        Keras 3.
        """
        found: dict[int, dict[str, frozenset[int]]] = {}
        for node in self.nodes:
            for slot in (*self._legacy_slots(node), *self._keras_3_slots(node)):
                of_variable = found.setdefault(slot.original, {})
                of_variable[slot.name] = of_variable.get(slot.name, frozenset()) | {slot.slot}
        return found

    def _legacy_slots(self, optimizer: Node) -> Iterator[SlotVariable]:
        """Yield the slots of an optimizer that names its slots and their variables: of Keras 2, or of TensorFlow 1."""
        beside = {slot.name for slot in optimizer.slot_variables}
        for slot in optimizer.slot_variables:
            # RMSprop's "momentum" is another quantity than SGD's. The "v" of Adamax is a maximum, and the name of its
            # variable begins with the optimizer's.
            keeps_name = slot.name == "momentum" and "rms" in beside
            keeps_name |= slot.name == "v" and _ADAMAX in self.nodes[slot.slot].full_name.split("/")
            yield slot if keeps_name else dataclasses.replace(slot, name=_LEGACY_SLOTS.get(slot.name, slot.name))

    def _keras_3_slots(self, optimizer: Node) -> Iterator[SlotVariable]:
        """Yield the slots of an optimizer of Keras 3: lists of variables, parallel to the list of trained variables."""
        if not is_keras_3_optimizer(optimizer.children):
            return
        trained = self.nodes[optimizer.children["_trainable_variables"]].children
        lists = _SLOTS.get(frozenset(optimizer.children) - _OF_EVERY_OPTIMIZER, {})  # empty if it is unknown
        for attribute, name in lists.items():
            kept = self.nodes[optimizer.children[attribute]].children
            if set(kept) == set(trained):
                yield from (SlotVariable(trained[index], name, kept[index]) for index in trained)

    @functools.cached_property
    def optimizer_variables(self) -> frozenset[int]:
        """Return the variable nodes that optimizers keep for themselves or for the variables that they train."""
        kept = {slot.slot for node in self.nodes for slot in node.slot_variables}
        lists = (self.nodes[node.children["_variables"]] for node in self.nodes if is_optimizer(node.children))
        return frozenset(kept.union(*(node.children.values() for node in lists)))

    @functools.cached_property
    def step_counters(self) -> frozenset[int]:
        """Return the variable nodes in which optimizers of Keras, legacy ones too, count their steps."""
        new = {node.children["_iterations"] for node in self.nodes if is_optimizer(node.children)}
        # A learning rate is a child unless it is a schedule. `decay` then is.
        of_legacy = [node for node in self.nodes if node.children.keys() & {"learning_rate", "decay"}]
        legacy = {node.children["iter"] for node in of_legacy if "iter" in node.children}
        return frozenset(new | legacy)


def _parse_node(message: Message) -> Node:
    children = [(child.text(2), child.signed(1)) for child in message.messages(1)]
    attributes = [(value.text(1), Attribute(value.text(2), value.text(3))) for value in message.messages(2)]
    for names in ([name for name, _ in children], [name for name, _ in attributes]):
        if len(set(names)) != len(names):
            raise MalformedError(f"a node gives a name twice, among {', '.join(sorted(names))}")
    slots = (SlotVariable(slot.signed(1), slot.text(2), slot.signed(3)) for slot in message.messages(3))
    return Node(
        children=dict(children),
        attributes=dict(attributes),
        slot_variables=tuple(slots),
        registered_saver=message.message(4).text(1),
    )
