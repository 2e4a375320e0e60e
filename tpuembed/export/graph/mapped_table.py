"""A stack that a graph maps from its file instead of loading it. It is looked up like a variable, and never copied to
memory.

The resource is a variable that no checkpoint restores. Its initializer assigns a constant to it that is the mapped file
itself (`ImmutableConst`). The assignment shares the memory. So all processes, and both versions during a swap, use the
one copy in the page cache.
"""

from pathlib import Path
from typing import Any, Final

import google_crc32c
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from tpuembed.manifest import ArrayEntry

__all__ = ["MappedTable", "store_array"]

Tensor = Any

_WRITE_BYTES: Final = 8 << 20


class MappedTable(tf.saved_model.experimental.TrackableResource):
    """A table in a file, from its first byte on: [rows, columns], or [rows] of an overlay's arrays.

    The exporter only traces `_initialize`, and never runs it: run eagerly, the constant is a copy of the whole table.
    """

    def __init__(self, name: str, shape: tuple[int, ...], dtype: tf.DType, path: str) -> None:
        super().__init__()
        self._name, self.shape, self.dtype, self._path = name, shape, dtype, path
        _ = self.resource_handle  # create the resource now: a traced function captures it

    @property
    def handle(self) -> Tensor:
        """Return the handle of the variable, as `tf.raw_ops` take it."""
        return self.resource_handle

    def sparse_read(self, indices: Tensor, name: str | None = None) -> Tensor:
        """Return rows at `indices`, [n] or of any shape; called by `tf.gather`."""
        rows = tf.raw_ops.ResourceGather(resource=self.handle, indices=indices, dtype=self.dtype, name=name)
        rows.set_shape(indices.shape.concatenate(self.shape[1:]))  # the handle of an eager op has no shape
        return rows

    def read_value(self) -> Tensor:
        """Return the whole table. It is not copied unless a `sparse_read` of it has run."""
        value = tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)
        value.set_shape(self.shape)
        return value

    def _create_resource(self) -> Tensor:
        """Return the variable of that name. A session has its own; Python's loader appends a number per load to the
        name.
        """
        return tf.raw_ops.VarHandleOp(dtype=self.dtype, shape=self.shape, shared_name=self._name, container="")

    def _initialize(self) -> None:
        mapped = tf.raw_ops.ImmutableConst(dtype=self.dtype, shape=self.shape, memory_region_name=self._path)
        # Constant folding would copy the table, but skips nodes with this attribute.
        value = attr_value_pb2.AttrValue(list=attr_value_pb2.AttrValue.ListValue())
        mapped.op._set_attr("_scoped_allocator", value)
        tf.raw_ops.AssignVariableOp(resource=self.resource_handle, value=mapped)

    def _destroy_resource(self) -> None:
        """Destroy the variable, so that the file is unmapped when its model is gone."""
        tf.raw_ops.DestroyResourceOp(resource=self.resource_handle, ignore_lookup_error=True)


def store_array(
    array: npt.NDArray[Any], name: str, folder: Path, file: str, layout: str
) -> tuple[Any, ArrayEntry | None]:
    """Return what a graph reads an array from, and its entry in the manifest: None if it is a variable.

    Args:
        array: perhaps itself mapped from a file.
        name: of the variable and the entry.
        folder: of the version.
        file: with layout "mmap", the path below `folder` that the array is written to, in pieces.
        layout: see LAYOUTS.
    """
    if layout != "mmap":
        return tf.Variable(np.asarray(array), trainable=False, name=name), None
    path, checksum = folder / file, 0
    path.parent.mkdir(parents=True, exist_ok=True)
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    with path.open("wb") as out:
        for start in range(0, len(flat), _WRITE_BYTES):
            piece = np.array(flat[start : start + _WRITE_BYTES])
            out.write(piece.data)
            checksum = google_crc32c.extend(checksum, piece)
    entry = ArrayEntry(name=name, key="", rows=len(array), file=file, size=len(flat), crc32c=int(checksum))
    return MappedTable(name, array.shape, tf.as_dtype(array.dtype), file), entry
