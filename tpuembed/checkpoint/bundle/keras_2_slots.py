"""Slots of Keras 2's optimizers, except its legacy ones. Their lists do not name the slots' variables: names must prove
it.

A slot of variable `user/embeddings` is called `Adam/m/user/embeddings`: the optimizer's scope, the slot, the variable.

Source: `add_variable_from_reference` and `build` in tf_keras/src/optimizers/.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from tpuembed.checkpoint.bundle.keras_optimizers import is_keras_3_optimizer, is_optimizer, slot_lists
from tpuembed.checkpoint.bundle.object_graph import Node, ObjectGraph
from tpuembed.tensor_bundle import Bundle

__all__ = ["keras_2_slots"]

_NAMES: Final = {
    "_accumulators": "accumulator",
    "_linears": "linear",
    "_momentums": "m",
    "_velocities": "v",
    "momentums": "m",
}
"""Lists of slots -> the part for the slot in the names of their variables."""
_SGD: Final = re.compile(r"(.*/)?SGD(_\d+)?/", re.DOTALL)
"""The scope of SGD. Lion has the attributes of SGD, but its slots are other quantities."""

_MAX_SCOPES: Final = 100
"""The most scopes of a name to examine: joining more of them would take too much memory."""

_Kind = tuple[str, tuple[int, ...]]
"""A variable's name and shape."""


def keras_2_slots(bundle: Bundle, graph: ObjectGraph) -> dict[int, dict[str, str]]:
    """Return variable node -> slot name -> key for proven slots. If two optimizers have a slot of one name, it is left
    out.
    """
    variables = _by_kind(bundle, graph)
    found: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for node in graph.nodes:
        if is_optimizer(node.children) and not is_keras_3_optimizer(node.children):
            for kind, slot, key in _slots_of(bundle, graph, node):
                if len(variables.get(kind, ())) == 1:
                    found[variables[kind][0]][slot].append(key)
    return {
        number: {slot: keys[0] for slot, keys in slots.items() if len(keys) == 1} for number, slots in found.items()
    }


def _by_kind(bundle: Bundle, graph: ObjectGraph) -> Mapping[_Kind, list[int]]:
    """Return the variables that optimizers may train."""
    found: dict[_Kind, list[int]] = defaultdict(list)
    for number, node in enumerate(graph.nodes):
        key = node.value_key
        if key is not None and key in bundle.entries and number not in graph.optimizer_variables:
            found[node.full_name, bundle.entries[key].shape].append(number)
    return found


def _slots_of(bundle: Bundle, graph: ObjectGraph, optimizer: Node) -> Iterator[tuple[_Kind, str, str]]:
    """Yield each slot of an optimizer: the name and shape of its variable, the slot's name, and its key."""
    lists = {
        attribute: [graph.nodes[child] for child in graph.nodes[optimizer.children[attribute]].children.values()]
        for attribute in slot_lists(optimizer.children)
    }
    scope = _scope([(_NAMES[attribute], node.full_name) for attribute, nodes in lists.items() for node in nodes])
    is_sure = scope is not None and ("momentums" not in lists or _SGD.fullmatch(scope))
    for attribute, nodes in lists.items() if is_sure else ():
        for node in nodes:
            key = node.value_key
            if key is not None and key in bundle.entries:
                kind = node.full_name.removeprefix(f"{scope}{_NAMES[attribute]}/"), bundle.entries[key].shape
                yield kind, slot_lists(optimizer.children)[attribute], key


def _scope(names: Sequence[tuple[str, str]]) -> str | None:
    """Return the common scope, with its slash, before the slot in all `names`, (slot, full name); None if it is not
    unique.
    """
    common: set[str] | None = None
    for slot, name in names:
        parts = name.split("/", _MAX_SCOPES)
        scopes = {"".join(f"{part}/" for part in parts[:at]) for at, part in enumerate(parts[:-1]) if part == slot}
        common = scopes if common is None else common & scopes
    return common.pop() if common is not None and len(common) == 1 else None
