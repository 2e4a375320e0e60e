"""Tables of TensorFlow's mid-level embedding classes, which `tensorflow_recommenders` wraps.

Source: tensorflow/python/tpu/tpu_embedding_base.py, tpu_embedding_for_serving.py;
tensorflow_recommenders/experimental/layers/embedding/partial_tpu_embedding.py.
"""

import dataclasses
from collections.abc import Iterator
from typing import Final

from tpuembed.checkpoint.bundle.object_graph import ObjectGraph
from tpuembed.checkpoint.bundle.own_layer import CONFIG_ATTRIBUTE, ENGINE
from tpuembed.checkpoint.bundle.rows import DENSE, RowLayout
from tpuembed.checkpoint.bundle.sparsecore import sparse_core_layouts, sparse_core_tables
from tpuembed.checkpoint.bundle.table_keys import TableKeys, mid_level_nodes, mid_level_variables, optimizer_slots
from tpuembed.errors import CheckpointFormatError
from tpuembed.formats.tensor_bundle import Bundle, Entry

__all__ = ["keras_layer_tables", "mid_level_tables"]

_KERAS_LAYERS: Final = "_keras_embedding_layers"
_SAVER: Final = "tf.TPUEmbeddingCallback"
"""What the class for TPU v2 to v4 registers."""
_ROW_ALIGNMENT: Final = 8
"""SparseCores pad rows and columns to a multiple of this."""
_HOSTS: Final = RowLayout("tpu_v1", "row slices")
"""Hosts of TPU v2 to v4 each save the rows that they keep. The first ones keep the first rows, so the slices in order are the
table. Source: TPUEmbeddingVariable in tpu_embedding_v2.py; DIV_DEFAULT in tpu_embedding_configuration.proto.
"""


def mid_level_tables(bundle: Bundle, graph: ObjectGraph) -> Iterator[TableKeys]:
    """Yield the tables of all mid-level objects, each with the order of its rows."""
    engines = {node.children.get(ENGINE) for node in graph.nodes if CONFIG_ATTRIBUTE in node.attributes}
    for number in mid_level_nodes(graph):
        if number in engines:
            continue
        node = graph.nodes[number]
        layouts = sparse_core_layouts(bundle, graph, node)
        by_hosts = node.registered_saver == _SAVER
        if layouts and by_hosts:
            raise CheckpointFormatError(
                f"checkpoint {bundle.prefix}: {graph.path(number) or 'its root'} is signed by TPUEmbedding, which "
                "keeps rows on hosts, but has the SparseCore layouts of TPUEmbeddingV2. Use the checkpoint it "
                "was restored from."
            )
        if layouts:
            yield from sparse_core_tables(bundle, graph, node, layouts)
            continue
        for table in mid_level_variables(bundle, graph, node):
            entry = bundle.entries.get(table.key)
            if not by_hosts and entry is not None and _could_be_sparse_cores(entry):
                raise CheckpointFormatError(
                    f"checkpoint {bundle.prefix}: table {table.name!r} is in {len(entry.slices)} equal slices. TPUEmbedding "
                    "saves such from TPU hosts and TPUEmbeddingV2 from SparseCores, in different orders of rows, and the "
                    "checkpoint does not record which class wrote it. Save it again with TensorFlow 2.19 or later."
                )
            yield dataclasses.replace(table, rows=_HOSTS if by_hosts else DENSE)


def _could_be_sparse_cores(entry: Entry) -> bool:
    if len(entry.shape) != 2 or len(entry.slices) < 2 or entry.shape[1] % _ROW_ALIGNMENT:
        return False
    shapes = {piece.shape for piece in entry.slices}
    return len(shapes) == 1 and all(dim == entry.shape[1] and not rows % _ROW_ALIGNMENT for rows, dim in shapes)


def keras_layer_tables(bundle: Bundle, graph: ObjectGraph) -> Iterator[TableKeys]:
    """Yield the small tables that `PartialTPUEmbedding` keeps in Keras layers, named after their feature.

    Their slots are those of the legacy optimizer of Keras 2 that trains the model. Its newer optimizers do not say whose slot a
    variable is.
    """
    for node in graph.nodes:
        if _KERAS_LAYERS not in node.children:
            continue
        layers = graph.nodes[node.children[_KERAS_LAYERS]].children
        first_names = {child: name for name, child in sorted(layers.items(), reverse=True)}
        for child, name in first_names.items():
            embeddings = graph.nodes[child].children.get("embeddings")
            if embeddings is None or (key := graph.nodes[embeddings].value_key) is None:
                continue
            yield TableKeys(name, key, optimizer_slots(bundle, graph, embeddings))
