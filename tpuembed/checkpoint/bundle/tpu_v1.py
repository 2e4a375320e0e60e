"""Tables that `TPUEmbedding` saved from TPU v2 to v4: each host saves the rows it keeps, in a slice of its own.

The first hosts keep the first rows (the engine's DIV order), so the slices one after another are the table.

Source: TPUEmbeddingVariable in tensorflow/python/tpu/tpu_embedding_v2.py; DIV_DEFAULT in
tensorflow/core/protobuf/tpu/tpu_embedding_configuration.proto.
"""

from typing import Final

from tpuembed.checkpoint.bundle.object_graph import Node
from tpuembed.checkpoint.bundle.rows import DENSE, RowLayout
from tpuembed.errors import CheckpointFormatError
from tpuembed.tensor_bundle import Bundle, Entry

__all__ = ["host_rows", "saved_by_hosts"]

_SAVER: Final = "tf.TPUEmbeddingCallback"
_ROW_ALIGNMENT: Final = 8
"""SparseCores pad rows and columns to a multiple of this."""


_HOSTS: Final = RowLayout("tpu_v1", "row slices")


def saved_by_hosts(node: Node) -> bool:
    """Returns True if the class for TPU v2 to v4 saved this mid-level object."""
    return node.registered_saver == _SAVER


def host_rows(bundle: Bundle, node: Node, table: str, key: str) -> RowLayout:
    """Return the order of rows in the variable of a mid-level object that has no SparseCore layouts.

    Raises:
        CheckpointFormatError: slices are cut as SparseCores cut them, and the class that saved them is not recorded.
    """
    if saved_by_hosts(node):
        return _HOSTS
    if key in bundle.entries and _could_be_sparse_cores(bundle.entries[key]):
        raise CheckpointFormatError(
            f"checkpoint {bundle.prefix}: table {table!r} is in {len(bundle.entries[key].slices)} equal slices. "
            "TPUEmbedding saves such from TPU hosts and TPUEmbeddingV2 from SparseCores, in different orders of rows, "
            "and the checkpoint does not record which class wrote it. Save it again with TensorFlow 2.19 or later."
        )
    return DENSE


def _could_be_sparse_cores(entry: Entry) -> bool:
    if len(entry.shape) != 2 or len(entry.slices) < 2 or entry.shape[1] % _ROW_ALIGNMENT:
        return False
    shapes = {piece.shape for piece in entry.slices}
    return len(shapes) == 1 and all(dim == entry.shape[1] and not rows % _ROW_ALIGNMENT for rows, dim in shapes)
