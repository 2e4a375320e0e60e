"""Whether the config in a `.keras` file contradicts which saved layer was taken for which layer of a factory's model.

A config of a functional model says which layer takes the output of which. So a layer has an identity that needs no name: its class,
and the identities of the layers that it takes its inputs from, or of those that take its output. An identity that as many layers
have on both sides belongs to the same layers on both sides. A model inside of a model counts as one layer of it.
"""

import json
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from graphlib import TopologicalSorter
from typing import Any, Final

from tpuembed.export.graph.weight_names import Names
from tpuembed.vocabulary.model_files import described_objects

__all__ = ["find_contradiction"]

_OF_THE_PROCESS: Final = frozenset({"shared_object_id", "build_config", "compile_config", "module", "registered_name"})
"""Fields of a config that say nothing of what a layer computes."""
_Call = tuple[str, int]
"""A layer's name, and the number of the call."""


def find_contradiction(
    names: Names, model: Any, saved: Any, pairs: Iterable[tuple[str, str]]
) -> tuple[str, str, str] | None:
    """Return (layer of the model, saved layer taken for it, saved layer that it is like) where a pair is proven wrong; else None.

    Args:
        names: which ones somebody chose.
        model, saved: the configs.
        pairs: names of layers of the model and of the saved layers taken for them.
    """
    pairs = list(pairs)
    try:
        for upwards in (True, False):
            for with_settings in (False, True):
                known: dict[Hashable, int] = {}
                mine, theirs = (_identities(names, one, upwards, with_settings, known) for one in (model, saved))
                counts, others = Counter(mine.values()), Counter(theirs.values())
                for wanted, found in pairs:
                    identity = mine.get(wanted)
                    if identity is None or found not in theirs or identity == theirs[found]:
                        continue
                    if counts[identity] == others[identity]:
                        return wanted, found, next(name for name, other in theirs.items() if other == identity)
    except (LookupError, TypeError, ValueError, RecursionError):  # not as Keras writes configs
        pass
    return None


def _identities(
    names: Names, config: Any, upwards: bool, with_settings: bool, known: dict[Hashable, int]
) -> dict[str, int]:
    """Layer -> a number, the same for those that differ in nothing that lies upwards or downwards of them.

    Args:
        names: which ones somebody chose. Such a name is all of an identity.
        config: of a model, with those inside of it. A name that two layers have is left out.
        upwards: whether the inputs of a layer count, or else what takes its outputs.
        with_settings: whether the fields of a layer count.
        known: the numbers there are; more are added.
    """
    found: dict[str, list[int]] = {}
    for _, fields in described_objects(config):
        if "output_layers" in fields:
            calls = _calls(names, fields, upwards, with_settings, known)
            for name in {name for name, _ in calls}:
                uses = tuple(sorted(number for (layer, _), number in calls.items() if layer == name))
                found.setdefault(name, []).append(known.setdefault(uses, len(known)))
    return {name: numbers[0] for name, numbers in found.items() if len(numbers) == 1}


def _calls(
    names: Names, model: Mapping[str, Any], upwards: bool, with_settings: bool, known: dict[Hashable, int]
) -> dict[_Call, int]:
    """Return the identity of each call of a layer in one functional model; see `_identities`."""
    entries = {entry["name"]: entry for entry in model["layers"]}
    nodes = {name: entry["inbound_nodes"] or [{}] for name, entry in entries.items()}
    edges: dict[_Call, list[tuple[str, int, _Call | None]]] = {
        (name, node): [] for name in entries for node in range(len(nodes[name]))
    }
    for call in list(edges):
        arguments = nodes[call[0]][call[1]]
        for place, (source, node, index) in _tensors([arguments.get("args", []), arguments.get("kwargs", {})]):
            here, there = (call, (source, node)) if upwards else ((source, node), call)
            edges[here].append((place, index, there))
    for key, (name, node, index) in () if upwards else _outputs(model["output_layers"]):
        first = (
            "output_layers" in entries[name]["config"]
        )  # calls of a model inside of this one are counted from 1 here
        edges[name, node - first].append((key, index, None))
    found: dict[_Call, int] = {}
    order = TopologicalSorter({call: [one for _, _, one in beyond if one] for call, beyond in edges.items()})
    for call in order.static_order():
        entry = entries[call[0]]
        fields, made_up = entry["config"], names.number(call[0])
        features = fields.get("feature_config", fields.get("feature_configs"))
        identity: Hashable = (entry["class_name"], None if made_up else call[0])
        if upwards and features is not None:  # its outputs are those of its features, in their order
            identity = json.dumps(_canonical(names, features), sort_keys=True, default=repr)
        elif made_up:
            settings = ""
            if with_settings and "layers" not in fields:
                own = [
                    {key: value for key, value in fields.items() if key != "name"},
                    _constants(nodes[call[0]][call[1]]),
                ]
                settings = json.dumps(_canonical(names, own), sort_keys=True, default=repr)
            beyond = [(place, index, -1 if one is None else found[one]) for place, index, one in edges[call]]
            identity = (identity, settings, tuple(sorted(beyond)))
        found[call] = known.setdefault(identity, len(known))
    return found


def _outputs(structure: Any, key: str = "") -> Iterator[tuple[str, tuple[str, int, int]]]:
    """Yield (key in a dict of outputs, (layer, node, output)) of `output_layers`."""
    if isinstance(structure, Mapping):
        for name, item in structure.items():
            yield from _outputs(item, name)
    elif len(structure) == 3 and isinstance(structure[0], str) and isinstance(structure[1], int):
        yield key, (structure[0], structure[1], structure[2])
    else:
        for item in structure:
            yield from _outputs(item, key)


def _tensors(node: Any, place: str = "") -> Iterator[tuple[str, tuple[str, int, int]]]:
    """Yield (place, (layer, node, output)) of the tensors among a layer's arguments."""
    if isinstance(node, Mapping):
        if node.get("class_name") == "__keras_tensor__":
            yield place, tuple(node["config"]["keras_history"])
            return
        for key in sorted(node):
            yield from _tensors(node[key], f"{place}/{key}")
    elif isinstance(node, list | tuple):
        for index, child in enumerate(node):
            yield from _tensors(child, f"{place}/{index}")


def _constants(node: Any) -> Any:
    """Return the arguments of a layer without the tensors."""
    if isinstance(node, Mapping):
        is_tensor = node.get("class_name") == "__keras_tensor__"
        return "tensor" if is_tensor else {key: _constants(child) for key, child in node.items()}
    return [_constants(child) for child in node] if isinstance(node, list | tuple) else node


def _canonical(names: Names, node: Any) -> Any:
    """Return a config without names that Keras makes up, and without what belongs to a process."""
    if isinstance(node, Mapping):
        kept = {key: _canonical(names, child) for key, child in node.items() if key not in _OF_THE_PROCESS}
        name = kept.get("name")
        found = names.number(name) if isinstance(name, str) else None
        return kept if found is None else kept | {"name": found[0]}
    return [_canonical(names, child) for child in node] if isinstance(node, list | tuple) else node
