"""Keras 3 models in `tf.train.Checkpoint`: their optimizers, and the tables of keras-rs, which only optimizers hold
there.

A `keras_rs.layers.DistributedEmbedding` hides its tables from TensorFlow. A checkpoint of a model that was compiled and
trained has them as `optimizer/_trainable_variables/<i>`, and their names only as TensorFlow's names of the variables. A
checkpoint of any other model does not have them. TensorFlow's name of a variable is the scope that it was created in,
which may be that of an enclosing layer. Keras' optimizers name their slots after the variable's own path, which proves
the name.

Source: keras/src/backend/tensorflow/trackable.py, keras/src/optimizers/base_optimizer.py.
"""

import re
from collections.abc import Iterator
from typing import Final

from tpuembed.checkpoint.bundle.object_graph import Node, ObjectGraph, is_keras_3_optimizer
from tpuembed.checkpoint.bundle.table_keys import TableKeys, is_table, mid_level_nodes, optimizer_slots
from tpuembed.errors import CheckpointFormatError, first_few
from tpuembed.formats.tensor_bundle import Bundle

__all__ = ["check_keras_model", "keras_rs_tables"]

_TRAINABLE, _VARIABLES = "_trainable_variables", "_variables"
_TRAP: Final = "_gradient_trap_dummy"
_KERAS_RS_LAYERS: Final = "_default_device_embedding_layers"
"""The child of keras-rs' layers with their tables, which only a SavedModel has."""
_ARCHIVE: Final = {"_all_variables", "variables", "trainable_variables", "non_trainable_variables"}
"""The lists that `model.export` writes. Source: keras/src/export/saved_model_export_archive.py."""
_TABLE_VARIABLE: Final = re.compile(r"(?P<layer>.+)/(?P<table>[^/]+)/embeddings")
_SLOT_REST: Final = re.compile(r"embeddings_(?!.*embeddings_)[a-z_]+")
_NUMBER: Final = re.compile(r"_\d+$")


def keras_rs_tables(bundle: Bundle, graph: ObjectGraph) -> Iterator[TableKeys]:
    """Yield the tables that only an optimizer holds: `<layer>/<table>/embeddings`."""
    # A layer on SparseCores has one weight of its own, and its tables only below an object of TensorFlow's class.
    # Source: `_gradient_trap_dummy` in keras_rs/src/layers/embedding/tensorflow/distributed_embedding.py.
    weights = [graph.nodes[node.children[_TRAP]] for node in graph.nodes if _TRAP in node.children]
    if len(weights) > len(mid_level_nodes(graph)):
        layers = sorted(weight.full_name.rpartition("/")[0] or str(weight.value_key) for weight in weights)
        raise CheckpointFormatError(
            f"checkpoint {bundle.prefix}: the tables of keras_rs.layers.DistributedEmbedding {first_few(layers)} are "
            "on SparseCores, and TensorFlow does not save them with the model. Save them with "
            "tf.train.Checkpoint(emb=layer._tpu_embedding)."
        )
    if any(_KERAS_RS_LAYERS in node.children for node in graph.nodes):
        raise _saved_model(bundle)
    lists = {node.children[_TRAINABLE] for node in graph.nodes if is_keras_3_optimizer(node.children)}
    elsewhere = {
        child for number, node in enumerate(graph.nodes) if number not in lists for child in node.children.values()
    }
    for number in sorted({child for one in lists for child in graph.nodes[one].children.values()} - elsewhere):
        key, name = graph.nodes[number].value_key, graph.nodes[number].full_name
        if key is None or not name.endswith("/embeddings") or key not in bundle.entries:
            continue
        match = _TABLE_VARIABLE.fullmatch(name)
        if match is not None and _is_path(graph, number, match["layer"], match["table"]):
            yield TableKeys(match["table"], key, optimizer_slots(bundle, graph, number))
        elif is_table(bundle.entries[key]):
            raise CheckpointFormatError(
                f"checkpoint {bundle.prefix}: the table at {key} has the name {name!r}, but it cannot be proven "
                "that this is the table's own name. (Keras 3 does not save more for many subclassed models and "
                "layers, or if an optimizer has no slots.) Restore it into the model and save that with "
                "model.save_weights('model.weights.h5')."
            )


def _saved_model(bundle: Bundle) -> CheckpointFormatError:
    return CheckpointFormatError(
        f"checkpoint {bundle.prefix}: is a SavedModel of Keras 3, which does not say the names of its tables. Save the model with "
        "model.save('model.keras') or model.save_weights('model.weights.h5'), and read that file."
    )


def _is_path(graph: ObjectGraph, number: int, layer: str, table: str) -> bool:
    """Returns True if a variable's path ends with `<layer>/<table>/embeddings`. Its slots are named after it, joined by
    "_".

    The scope of an enclosing layer would be found in the middle of the path. TensorFlow numbers scopes that it enters
    twice (`layer_1`). A number at `table` could be part of the table's own name.

    Source: add_variable_from_reference in keras/src/optimizers/base_optimizer.py.
    """
    scopes = "".join(f"(?:{re.escape(scope)}|{re.escape(_NUMBER.sub('', scope))})_" for scope in layer.split("/"))
    found = re.compile(rf"(?<![^_/])(?={scopes}{re.escape(table)}_(?P<rest>.+))")
    names = []  # of everything that optimizers keep for the variable, in lists parallel to the trained variables
    for optimizer in (node for node in graph.nodes if is_keras_3_optimizer(node.children)):
        trained = graph.nodes[optimizer.children[_TRAINABLE]].children
        for attribute in optimizer.children.keys() - {_TRAINABLE, _VARIABLES}:
            kept = graph.nodes[optimizer.children[attribute]].children
            if set(kept) == set(trained):
                names += [graph.nodes[kept[index]].full_name for index in trained if trained[index] == number]
    rests = [[match["rest"] for match in found.finditer(name)] for name in names]
    return bool(names) and all(len(rest) == 1 and _SLOT_REST.fullmatch(rest[0]) for rest in rests)


def check_keras_model(bundle: Bundle, graph: ObjectGraph) -> None:
    """Raise CheckpointFormatError if this is a Keras 3 model without a variable that can be a table, or without their names."""
    if set(graph.nodes[0].children) >= _ARCHIVE:
        raise _saved_model(bundle)
    names = sorted(filter(None, (node.full_name for node in graph.nodes)))
    is_keras_3 = any(_is_keras_3(graph, node) for node in graph.nodes)
    if not is_keras_3 or any(name.rpartition("/")[2] == "embeddings" for name in names):
        return
    # A layer that saved nothing is an empty object below a model or, in a functional one, an operation.
    empty = []
    for number, (parent, name) in graph.parents.items():
        node = graph.nodes[number]
        is_operation = parent != 0 and graph.parents[parent][1] == "_operations"
        is_attribute = "_operations" not in graph.nodes[parent].children and not name.startswith("_")
        if not node.children and not node.attributes and (is_operation or is_attribute):
            empty.append(graph.path(number))
    raise CheckpointFormatError(
        f"checkpoint {bundle.prefix}: has no embedding table. Of a Keras 3 model it has {first_few(names) or 'no variable'}, and "
        f"nothing of {first_few(empty) or 'no variable'}. TensorFlow saves a keras_rs.layers.DistributedEmbedding only in the "
        "optimizer of a compiled and trained model. Save with model.save_weights('model.weights.h5'), or from "
        "SparseCores with tf.train.Checkpoint(emb=layer._tpu_embedding)."
    )


def _is_keras_3(graph: ObjectGraph, node: Node) -> bool:
    """Returns True if `node` is a functional model, an optimizer or a layer with a kernel, by Keras 3's names of their
    parts.
    """
    kernel = node.children.get("_kernel")
    return (
        {"_operations", "_tracked"} <= set(node.children)
        or is_keras_3_optimizer(node.children)
        or (kernel is not None and graph.nodes[kernel].full_name.endswith("/kernel"))
    )
