"""Tables that `TPUEmbedding` saved from TPU v2 to v4: each host saves the rows it keeps, in a slice of its own.

The first hosts keep the first rows (the engine's DIV order), so the slices one after another are the table.
Source: TPUEmbeddingVariable in tensorflow/python/tpu/tpu_embedding_v2.py; DIV_DEFAULT in
tensorflow/core/protobuf/tpu/tpu_embedding_configuration.proto.
"""

from typing import ClassVar, Final

from tpuembed.checkpoint.bundle.object_graph import Node
from tpuembed.checkpoint.bundle.rows import DENSE, DenseRows, RowLayout
from tpuembed.errors import CheckpointFormatError
from tpuembed.tensor_bundle import Bundle, Entry

__all__ = ["host_rows", "saved_by_hosts"]

_SAVER: Final = "tf.TPUEmbeddingCallback"
_ROW_ALIGNMENT: Final = 8
"""What SparseCores pad rows and columns to."""


class HostRows(DenseRows):
    """Row = id; one host saves one piece."""

    format: ClassVar[str] = "tpu_v1"

    def describe(self, entry: Entry, /) -> str:
        """The number of hosts that kept rows."""
        return f"{len(entry.slices)} row slices" if entry.slices else ""


_HOSTS: Final = HostRows()


def saved_by_hosts(node: Node) -> bool:
    """Whether the class for TPU v2 to v4 saved this mid-level object."""
    return node.registered_saver == _SAVER


def host_rows(bundle: Bundle, node: Node, table: str, key: str) -> RowLayout:
    """How rows lie in the variable of a mid-level object that has no SparseCore layouts.

    Raises:
        CheckpointFormatError: in slices as SparseCores cut them, with nothing that says which class saved them.
    """
    if saved_by_hosts(node):
        return _HOSTS
    if key in bundle.entries and _could_be_sparse_cores(bundle.entries[key]):
        raise CheckpointFormatError(
            f"checkpoint {bundle.prefix}: table {table!r} lies in {len(bundle.entries[key].slices)} equal slices, as "
            "TPUEmbedding saves it from TPU hosts and TPUEmbeddingV2 from SparseCores, and neither has signed it: its "
            "rows may be in another order; save it again with TensorFlow 2.19 or later"
        )
    return DENSE


def _could_be_sparse_cores(entry: Entry) -> bool:
    if len(entry.shape) != 2 or len(entry.slices) < 2 or entry.shape[1] % _ROW_ALIGNMENT:
        return False
    shapes = {piece.shape for piece in entry.slices}
    return len(shapes) == 1 and all(dim == entry.shape[1] and not rows % _ROW_ALIGNMENT for rows, dim in shapes)
