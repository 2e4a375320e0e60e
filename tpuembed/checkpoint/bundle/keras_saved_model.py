"""SavedModels of Keras 3, written by `model.export` or `tf.saved_model.save`, and the names of the variables in them.

`model.export` keeps variables in lists: `variables` and, for some or all of them, also `_all_variables`. Positions in
lists do not identify tables; TensorFlow's names of the variables do. These are the scopes that the variables were
created in. So tables are listed under the whole name, and no part of it is taken for a table's own name.

Source: keras/src/export/saved_model_export_archive.py; keras_rs/src/layers/embedding/base_distributed_embedding.py.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from tpuembed.checkpoint.bundle.object_graph import ObjectGraph
from tpuembed.tensor_bundle import Bundle

__all__ = ["archive_copies", "keras_rs_layers", "variable_names"]

_ALL, _VARIABLES = "_all_variables", "variables"
_ARCHIVE: Final = {_ALL, _VARIABLES, "trainable_variables", "non_trainable_variables"}
_KERAS_RS_LAYERS: Final = "_default_device_embedding_layers"
_EMBEDDINGS: Final = "_embeddings"


def archive_copies(bundle: Bundle, graph: ObjectGraph) -> frozenset[int]:
    """Return the variable nodes of an export that are saved twice, with the same name and the same bytes."""
    listed = {_identity(bundle, graph, number) for number in _list(graph, _VARIABLES)} - {None}
    return frozenset(number for number in _list(graph, _ALL) if _identity(bundle, graph, number) in listed)


def variable_names(bundle: Bundle, graph: ObjectGraph) -> Mapping[int, str]:
    """Return TensorFlow's unique names of the variables in an export's lists, and of keras-rs' tables."""
    tables = [graph.nodes[layer].children.get(_EMBEDDINGS) for layer in keras_rs_layers(graph)]
    nodes = {*_list(graph, _VARIABLES), *_list(graph, _ALL), *(node for node in tables if node is not None)}
    names = {number: graph.nodes[number].full_name for number in nodes - archive_copies(bundle, graph)}
    count = Counter(names.values())
    return {number: name for number, name in names.items() if name and count[name] == 1}


def keras_rs_layers(graph: ObjectGraph) -> frozenset[int]:
    """Return the nodes of the layers that hold keras-rs' tables. Only a SavedModel has them."""
    holders = (node.children[_KERAS_RS_LAYERS] for node in graph.nodes if _KERAS_RS_LAYERS in node.children)
    return frozenset(layer for holder in holders for layer in graph.nodes[holder].children.values())


def _list(graph: ObjectGraph, name: str) -> set[int]:
    """Return the nodes in a list of an export; empty for any other checkpoint."""
    root = graph.nodes[0].children
    return set(graph.nodes[root[name]].children.values()) if set(root) >= _ARCHIVE else set()


def _identity(bundle: Bundle, graph: ObjectGraph, number: int) -> tuple[Any, ...] | None:
    """Return name, type, shape and checksums of a variable; None if it has no name or no value."""
    node = graph.nodes[number]
    entry = bundle.entries.get(node.value_key or "")
    if entry is None or not node.full_name:
        return None
    return node.full_name, entry.dtype, entry.shape, tuple((part.start, part.crc32c) for part in entry.parts())
