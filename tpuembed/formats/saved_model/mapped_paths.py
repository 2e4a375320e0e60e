"""The paths that a graph maps its tables from, in the `ImmutableConst` nodes of saved_model.pb.

The path is a static attribute of the node. So a graph that moves to another folder is rewritten: on the disk at deploy
time, or in memory while it is loaded. Everything else in the file stays byte for byte the same.

Bytes that are no SavedModel raise a MalformedError, and graphs that do not map the stacks of a manifest a ConfigError.

Source of the field numbers: saved_model, meta_graph, graph, function, node_def, attr_value and tensor_shape .proto in
tensorflow/core/protobuf and tensorflow/core/framework.
"""

import dataclasses
import math
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePath, PurePosixPath
from typing import Final

from tpuembed.errors import ConfigError
from tpuembed.formats.dtypes import dtype_name, dtype_number, item_bytes
from tpuembed.formats.protobuf import MalformedError, Message, bytes_field, edit_messages, varint_field
from tpuembed.manifest import ArrayEntry, Manifest

__all__ = [
    "MappedTensor",
    "mapped_folders",
    "mapped_from",
    "mapped_tensors",
    "relative_graph",
    "replace_paths",
    "without_rows",
]

_OP: Final = b"ImmutableConst"
_HANDLE_OP: Final = b"VarHandleOp"
_PATH: Final = b"memory_region_name"
_NODES: Final = ((2, 2, 1), (2, 2, 2, 1, 3))
"""meta_graphs.graph_def.node, and meta_graphs.graph_def.library.function.node_def."""
_FUNCTION_NODE: Final = (3,)
_NODE_OP, _NODE_INPUT, _NODE_ATTR, _KEY, _VALUE = 2, 3, 5, 1, 2
_ATTR_BYTES, _ATTR_TYPE, _ATTR_SHAPE, _ATTR_TENSOR, _DIM, _DIM_SIZE = 2, 6, 7, 8, 2, 1
_TENSOR_DTYPE, _TENSOR_SHAPE = 1, 2


@dataclasses.dataclass(frozen=True)
class MappedTensor:
    """A tensor that a graph maps from a file.

    Attributes:
        path: of the file, as in the graph.
        dtype: its name.
        shape: of the tensor.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]


def mapped_tensors(graph: bytes) -> set[MappedTensor]:
    """Return every tensor that saved_model.pb, whose bytes are `graph`, maps from a file."""
    found: set[MappedTensor] = set()

    def note(node: bytes) -> bytes:
        if (tensor := _tensor_of(node)) is not None:
            found.add(tensor)
        return node

    for path in _NODES:
        edit_messages(graph, path, note)
    return found


def replace_paths(graph: bytes, paths: Mapping[str, str]) -> bytes:
    """Return saved_model.pb with the mapped paths that `paths` names replaced, and all others unchanged."""

    def replace(node: bytes) -> bytes:
        tensor = _tensor_of(node)
        if tensor is None or tensor.path not in paths:
            return node
        return _with_attributes(node, {_PATH: _attribute(_PATH, _path_value(paths[tensor.path]))})

    for path in _NODES:
        graph = edit_messages(graph, path, replace)
    return graph


def without_rows(graph: bytes, arrays: Collection[ArrayEntry]) -> bytes:
    """Return saved_model.pb in which the mapped tensors of `arrays` have no rows, and no files. A gather of them always fails."""
    names = {array.name.encode() for array in arrays}

    def replace(node: bytes) -> bytes:
        handle = _attributes(node, _HANDLE_OP) or {}
        if b"shared_name" in handle and handle[b"shared_name"].data(_ATTR_BYTES) in names:
            if b"shape" not in handle:
                return node
            _, *sizes = _sizes(handle[b"shape"]) or [0]
            return _with_attributes(
                node, {b"shape": _attribute(b"shape", bytes_field(_ATTR_SHAPE, _shape_of(0, *sizes)))}
            )
        tensor = _tensor_of(node)
        if tensor is None or not any(f"/{tensor.path}".endswith(f"/{array.file}") for array in arrays):
            return node
        empty = varint_field(_TENSOR_DTYPE, dtype_number(tensor.dtype)) + bytes_field(
            _TENSOR_SHAPE, _shape_of(0, *tensor.shape[1:])
        )
        attributes = {
            _PATH: _attribute(b"_" + _PATH, _path_value(tensor.path)),  # TensorFlow ignores those that begin with "_"
            b"shape": _attribute(b"value", bytes_field(_ATTR_TENSOR, empty)),
        }
        return _with_attributes(edit_messages(node, (_NODE_OP,), lambda _: b"Const"), attributes)

    def in_function(function: bytes) -> bytes:
        edited = edit_messages(function, _FUNCTION_NODE, replace)
        if edited == function:
            return function
        # Inside of a function, an input names the output that it is: "tensor" of ImmutableConst, "output" of Const.
        inputs = (*_FUNCTION_NODE, _NODE_INPUT)
        return edit_messages(edited, inputs, lambda text: text.replace(b":tensor:", b":output:"))

    nodes, (*functions, _) = _NODES
    return edit_messages(edit_messages(graph, nodes, replace), tuple(functions), in_function)


def mapped_from(graph: bytes, manifest: Manifest, folder: PurePath) -> bytes:
    """Return saved_model.pb with every table of `manifest` mapped from its file below `folder`."""
    try:
        paths = {path: str(folder / array.file) for path, array in _places(graph, manifest)}
        return graph if all(old == new for old, new in paths.items()) else replace_paths(graph, paths)
    except MalformedError as error:
        raise ConfigError(f"saved_model.pb: not a SavedModel: {error}. Export again.") from None


def relative_graph(graph: bytes, manifest: Manifest) -> bytes:
    """Return saved_model.pb with its paths relative to the version, so that relocation does not change it.

    Raises:
        ConfigError: the graph does not map the stacks of the manifest.
    """
    return mapped_from(graph, manifest, PurePosixPath()) if manifest.layout == "mmap" else graph


def mapped_folders(graph: bytes, manifest: Manifest) -> set[str]:
    """Return the folders that the stacks of `manifest` are mapped from: one, for a graph as it was written."""
    return {path.removesuffix(f"/{array.file}") for path, array in _places(graph, manifest)}


def _attributes(node: bytes, op: bytes) -> dict[bytes, Message] | None:
    """Return the attributes of a node that is such an operation; None for other nodes."""
    if op not in node or (message := Message(node)).data(_NODE_OP) != op:
        return None
    return {entry.data(_KEY): entry.message(_VALUE) for entry in message.messages(_NODE_ATTR)}


def _tensor_of(node: bytes) -> MappedTensor | None:
    """Return the tensor of a node that maps one; None for other nodes."""
    attributes = _attributes(node, _OP)
    if attributes is None:
        return None
    for name in (_PATH, b"dtype", b"shape"):
        if name not in attributes:
            raise MalformedError(f"an ImmutableConst node has no attribute {name.decode()!r}")
    dtype = dtype_name(attributes[b"dtype"].integer(_ATTR_TYPE))
    path = os.fsdecode(attributes[_PATH].data(_ATTR_BYTES))
    return MappedTensor(path, dtype, tuple(_sizes(attributes[b"shape"])))


def _with_attributes(node: bytes, entries: Mapping[bytes, bytes]) -> bytes:
    """Return a node with `entries` in the place of its own of these keys."""
    return edit_messages(node, (_NODE_ATTR,), lambda entry: entries.get(Message(entry).data(_KEY), entry))


def _attribute(key: bytes, value: bytes) -> bytes:
    return bytes_field(_KEY, key) + bytes_field(_VALUE, value)


def _path_value(path: str) -> bytes:
    return bytes_field(_ATTR_BYTES, os.fsencode(path))


def _sizes(value: Message) -> list[int]:
    return [dim.signed(_DIM_SIZE) for dim in value.message(_ATTR_SHAPE).messages(_DIM)]


def _shape_of(*sizes: int) -> bytes:
    return b"".join(bytes_field(_DIM, varint_field(_DIM_SIZE, size)) for size in sizes)


def _places(graph: bytes, manifest: Manifest) -> Iterator[tuple[str, ArrayEntry]]:
    """Yield (path, the array mapped from it), for every array of the manifest's stacks at least once."""
    tensors = mapped_tensors(graph)
    for array in manifest.arrays:
        parts = PurePosixPath(array.file).parts
        mapped = [tensor for tensor in tensors if PurePosixPath(tensor.path).parts[-len(parts) :] == parts]
        if not mapped:
            raise ConfigError(
                f"saved_model.pb: the graph does not map {array.file}, the file of stack {array.name!r}. Export again."
            )
        for tensor in mapped:
            size = item_bytes(tensor.dtype) * math.prod(tensor.shape)
            if tensor.shape[:1] != (array.rows,) or size != array.size:
                raise ConfigError(
                    f"saved_model.pb: the graph maps {tensor.dtype} {list(tensor.shape)} from {array.file}, but the "
                    f"manifest has {array.rows} rows of stack {array.name!r} in {array.size} bytes. Export again."
                )
            yield tensor.path, array
