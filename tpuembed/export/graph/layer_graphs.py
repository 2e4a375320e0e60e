"""Whether the config in a `.keras` file contradicts which saved layer was taken for which layer of a factory's model.

A config of a functional model or a Sequential says which layer takes the output of which. So a layer has an identity that needs no
name: its class, and the identities of the layers that it takes its inputs from, or of those that take its output. An identity that
as many layers have on both sides belongs to the same layers on both sides. A layer of the model whose saved layer has another one
was confused with a layer like it.
"""

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from graphlib import TopologicalSorter
from typing import Any, Final

from tpuembed.checkpoint.keras.trained_vocabularies import snake_case
from tpuembed.checkpoint.saved_objects import Objects
from tpuembed.export.graph.weight_names import Names

__all__ = ["LayerGraph", "find_contradiction", "is_graph", "read_graph"]

_OF_THE_PROCESS: Final = frozenset({"shared_object_id", "build_config", "compile_config", "module", "registered_name"})
"""Fields of a config that say nothing of what a layer computes."""

Reference = tuple[int, int]
"""(number of a call, number of its output)."""


@dataclasses.dataclass(frozen=True)
class _Call:
    """One use of a layer.

    Attributes:
        layer: number of the layer's object, or what stands for it where it has none.
        kind: its class.
        name: of the layer, where somebody chose it.
        config: all that the config says of the layer and this use, without names that Keras makes up.
        tables: the features of a layer that holds tables; None of others.
        inputs: place among the arguments -> what stands there.
    """

    layer: Hashable
    kind: str
    name: str | None
    config: str
    tables: str | None
    inputs: Mapping[str, Reference]


@dataclasses.dataclass
class LayerGraph:
    """The uses of layers in one or several models, without the models around them.

    Attributes:
        calls: by number.
        outputs: (key in a dict of outputs, what it is) of the outermost models.
    """

    calls: list[_Call] = dataclasses.field(default_factory=list)
    outputs: list[tuple[str | None, Reference]] = dataclasses.field(default_factory=list)


def read_graph(names: Names, objects: Objects, configs: Mapping[int, Mapping[str, Any]]) -> LayerGraph:
    """The layers that configs describe.

    Args:
        names: which ones somebody chose.
        objects: the same layers as objects.
        configs: number of an object -> the config of that model, which no other one of them is in.

    Raises:
        LookupError, TypeError, ValueError, RecursionError: a config is not as Keras writes it.
    """
    graph = LayerGraph()
    for number, config in configs.items():
        reader = _Reader(names, objects, graph)
        made = reader.model(config["config"], number, "", None)
        structure = config["config"].get("output_layers")
        keys = sorted(structure) if isinstance(structure, Mapping) else []
        graph.outputs += zip(keys if len(keys) == len(made) else [None] * len(made), made, strict=True)
    return graph


class _Reader:
    """Reads one config."""

    def __init__(self, names: Names, objects: Objects, graph: LayerGraph) -> None:
        self._names, self._objects, self._graph = names, objects, graph

    def model(
        self, config: Mapping[str, Any], number: int | None, scope: str, fed: Sequence[Reference] | None
    ) -> list[Reference]:
        """Add the layers of a functional model or a Sequential, and return its outputs.

        Args:
            config: of the model.
            number: of its object, where it has one.
            scope: the names of the models around its layers.
            fed: its inputs, where they are known.
        """
        members = {} if number is None else _members(self._objects, number)
        if "output_layers" not in config:
            last = list(fed or ())[:1]
            for entry in config["layers"]:
                name = entry["config"]["name"]
                if entry["class_name"] != "InputLayer" or not last:
                    before = {"0": last[0]} if last else {}
                    last = self._use(entry, name, members.get(name), scope, before, "")[:1]
            return last
        entries = {entry["name"]: entry for entry in config["layers"]}
        inputs = [reference[0] for reference in _references(config["input_layers"])]
        known = dict(zip(inputs, fed, strict=True)) if fed is not None and len(fed) == len(inputs) else {}
        made: dict[tuple[str, int], list[Reference]] = {}

        def output(name: str, node: int, index: int) -> Reference:
            if name in known:
                return known[name]
            if (name, node) not in made:
                nodes = entries[name]["inbound_nodes"]
                arguments = nodes[node] if nodes else {}
                places = {
                    place: output(*tensor)
                    for place, tensor in _tensors([arguments.get("args", []), arguments.get("kwargs", {})])
                }
                made[name, node] = self._use(
                    entries[name],
                    name,
                    members.get(name),
                    scope,
                    places,
                    json.dumps(_constant(arguments), default=repr),
                )
            found = made[name, node]
            return found[index] if is_graph(entries[name]) else (found[0][0], index)

        for name, entry in entries.items():
            for node in range(max(1, len(entry["inbound_nodes"]))):
                if name not in known and (name, node) not in made:
                    output(name, node, 0)
        return [
            output(name, node - (is_graph(entries[name]) and "output_layers" in entries[name]["config"]), index)
            for name, node, index in _references(config["output_layers"])
        ]

    def _use(
        self,
        entry: Mapping[str, Any],
        name: str,
        number: int | None,
        scope: str,
        inputs: Mapping[str, Reference],
        constants: str,
    ) -> list[Reference]:
        kind, fields = entry["class_name"], entry["config"]
        if is_graph(entry):
            return self.model(fields, number, f"{scope}{name}/", list(inputs.values()))
        own = snake_case(kind)
        is_made_up = self._names.number(name) is not None or re.fullmatch(rf"{re.escape(own)}(_\d+)?", name)
        unnamed = {key: value for key, value in fields.items() if key != "name"}
        config = json.dumps([_canonical(self._names, unnamed), constants], sort_keys=True, default=repr)
        tables = None
        if number is not None and self._objects.nodes[number].tables:
            features = fields.get("feature_config", fields.get("feature_configs"))
            tables = json.dumps(_canonical(self._names, features), sort_keys=True, default=repr)
        layer: Hashable = f"{scope}{name}" if number is None else number
        self._graph.calls.append(_Call(layer, kind, None if is_made_up else name, config, tables, dict(inputs)))
        return [(len(self._graph.calls) - 1, 0)]


def is_graph(entry: Mapping[str, Any]) -> bool:
    """Returns True if the config says how the layers inside are connected, as for a functional model or a Sequential."""
    fields = entry.get("config")
    return isinstance(fields, Mapping) and ("output_layers" in fields or entry.get("class_name") == "Sequential")


def _members(objects: Objects, number: int) -> dict[str, int]:
    """The layers of a functional model or a Sequential by their names."""
    held = objects.nodes[number].children.get("layers")
    children = () if held is None else objects.nodes[held].children.values()
    return {name: child for child in children if (name := objects.nodes[child].name) is not None}


def _references(structure: Any) -> Iterator[tuple[str, int, int]]:
    """The (layer, node, output) in `input_layers` or `output_layers`, in Keras' order."""
    if isinstance(structure, Mapping):
        items = (
            structure["items"] if structure.get("class_name") == "__tuple__" else map(structure.get, sorted(structure))
        )
        for item in items:
            yield from _references(item)
    elif len(structure) == 3 and isinstance(structure[0], str) and isinstance(structure[1], int):
        yield structure[0], structure[1], structure[2]
    else:
        for item in structure:
            yield from _references(item)


def _tensors(node: Any, place: str = "") -> Iterator[tuple[str, tuple[str, int, int]]]:
    """(place, (layer, node, output)) of the tensors among a layer's arguments."""
    if isinstance(node, Mapping):
        if node.get("class_name") == "__keras_tensor__":
            yield place, tuple(node["config"]["keras_history"])
            return
        if node.get("class_name") == "__tuple__":
            node = node["items"]
    if isinstance(node, Mapping):
        for key in sorted(node):
            yield from _tensors(node[key], f"{place}/{key}")
    elif isinstance(node, list | tuple):
        for index, child in enumerate(node):
            yield from _tensors(child, f"{place}/{index}")


def _constant(node: Any) -> Any:
    """The arguments of a layer without the tensors."""
    if isinstance(node, Mapping):
        if node.get("class_name") == "__keras_tensor__":
            return "tensor"
        return {key: _constant(child) for key, child in sorted(node.items())}
    return [_constant(child) for child in node] if isinstance(node, list | tuple) else node


def _canonical(names: Names, node: Any) -> Any:
    """A config without names that Keras makes up, and without what belongs to a process."""
    if isinstance(node, Mapping):
        kept = {key: _canonical(names, child) for key, child in node.items() if key not in _OF_THE_PROCESS}
        name = kept.get("name")
        found = names.number(name) if isinstance(name, str) else None
        return kept if found is None else kept | {"name": found[0]}
    return [_canonical(names, child) for child in node] if isinstance(node, list | tuple) else node


def find_contradiction(
    model: LayerGraph, saved: LayerGraph, pairs: Iterable[tuple[int, int]]
) -> tuple[int, int, int] | None:
    """(layer of the model, saved layer taken for it, saved layer that it is like) where a pair is proven wrong; else None."""
    anchors = _anchors(model) & _anchors(saved)
    keys = {key for key, _ in model.outputs} & {key for key, _ in saved.outputs}
    pairs = list(pairs)
    for upwards in (True, False):
        for label in (lambda call: (call.kind, call.name), lambda call: (call.kind, call.name, call.config)):
            known: dict[Hashable, int] = {}
            mine = _identities(model, upwards, label, anchors, keys, known)
            theirs = _identities(saved, upwards, label, anchors, keys, known)
            counts, others = Counter(mine.values()), Counter(theirs.values())
            for wanted, found in pairs:
                identity = mine.get(wanted)
                if identity is None or found not in theirs or identity == theirs[found]:
                    continue
                if counts[identity] == others[identity]:
                    like = next(layer for layer, other in theirs.items() if other == identity)
                    if isinstance(like, int):
                        return wanted, found, like
    return None


def _anchors(graph: LayerGraph) -> set[tuple[str, str]]:
    """(class, name) of the layers whose names say which they are: somebody chose them, and they are used once."""
    count = Counter((call.kind, call.name) for call in graph.calls if call.name is not None)
    return {(kind, name) for (kind, name), times in count.items() if times == 1 and name is not None}


def _identities(
    graph: LayerGraph,
    upwards: bool,
    label: Callable[[_Call], Hashable],
    anchors: Collection[Hashable],
    keys: Collection[str | None],
    known: dict[Hashable, int],
) -> dict[Hashable, int]:
    """Layer -> a number, the same for those that differ in nothing that lies upwards or downwards of them.

    Args:
        graph: of one side.
        upwards: whether the inputs of a layer count, or else what takes its outputs.
        label: what of a layer itself counts.
        anchors: the layers that their names identify. What lies beyond them does not count.
        keys: of outputs that both sides have.
        known: the numbers there are; more are added.
    """
    beyond: list[list[tuple[str, int, int]]] = [[] for _ in graph.calls]
    nodes: dict[int, set[int]] = {number: set() for number in range(len(graph.calls))}
    for number, call in enumerate(graph.calls):
        for place, (other, index) in call.inputs.items():
            here, there = (number, other) if upwards else (other, number)
            beyond[here].append((place, index, there))
            nodes[here].add(there)
    found: list[int] = [0] * len(graph.calls)
    outputs = [] if upwards else graph.outputs
    for number in TopologicalSorter(nodes).static_order():
        call = graph.calls[number]
        identity: Hashable = (call.kind, call.name)
        if upwards and call.tables is not None:
            identity = call.tables  # its outputs are those of its features, in their order
        elif identity not in anchors:
            ends = [(key if key in keys else None, index) for key, (other, index) in outputs if other == number]
            edges = [(place, index, found[other]) for place, index, other in beyond[number]]
            identity = (label(call), tuple(sorted(ends, key=repr)), tuple(sorted(edges, key=repr)))
        found[number] = known.setdefault(identity, len(known))
    layers: dict[Hashable, list[int]] = {}
    for number, call in enumerate(graph.calls):
        layers.setdefault(call.layer, []).append(found[number])
    return {layer: known.setdefault(tuple(sorted(uses)), len(known)) for layer, uses in layers.items()}
