"""The paths that a graph maps its tables from, in the `ImmutableConst` nodes of saved_model.pb.

The path is a static attribute of the node. So a graph that moves to another folder is rewritten: on the disk at deploy
time, or in memory while it is loaded. Everything else in the file stays byte for byte the same.

Source of the field numbers: saved_model, meta_graph, graph, function, node_def, attr_value and tensor_shape .proto in
tensorflow/core/protobuf and tensorflow/core/framework.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import PurePath, PurePosixPath
from typing import Final

from tpuembed.errors import ConfigError
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
_DTYPES: Final = {1: "float32", 3: "int32", 4: "uint8", 6: "int8", 9: "int64", 14: "bfloat16", 19: "float16"}
_ITEM_BYTES: Final = {"float32": 4, "int32": 4, "uint8": 1, "int8": 1, "int64": 8, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass(frozen=True)
class MappedTensor:
    """A tensor that a graph maps from a file.

    Attributes:
        path: of the file, as in the graph.
        dtype: by name; "" for one that tables do not use.
        shape: of the tensor.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]


def mapped_tensors(graph: bytes) -> set[MappedTensor]:
    """Return every tensor that saved_model.pb, whose bytes are `graph`, maps from a file.

    Raises:
        MalformedError: the bytes are not a SavedModel.
    """
    found: set[MappedTensor] = set()

    def note(node: bytes) -> bytes:
        if (tensor := _tensor_of(node)) is not None:
            found.add(tensor)
        return node

    _edit_nodes(graph, note)
    return found


def replace_paths(graph: bytes, paths: Mapping[str, str]) -> bytes:
    """Return saved_model.pb with the mapped paths that `paths` names replaced, and all others unchanged.

    Raises:
        MalformedError: the bytes are not a SavedModel.
    """

    def replace(node: bytes) -> bytes:
        tensor = _tensor_of(node)
        if tensor is None or tensor.path not in paths:
            return node
        path = paths[tensor.path]
        return edit_messages(node, (_NODE_ATTR,), lambda entry: _with_path(entry, path))

    return _edit_nodes(graph, replace)


def without_rows(graph: bytes, arrays: Collection[ArrayEntry]) -> bytes:
    """Return saved_model.pb in which the mapped tensors of `arrays` have no rows, and no files. A gather of them always fails.

    Raises:
        MalformedError: the bytes are not a SavedModel.
    """

    def replace(node: bytes) -> bytes:
        if _HANDLE_OP in node and _shared_name(node) in names:
            return edit_messages(node, (_NODE_ATTR,), _without_first_size)
        tensor = _tensor_of(node) if _OP in node else None
        if tensor is None or not any(f"/{tensor.path}".endswith(f"/{array.file}") for array in arrays):
            return node
        node = edit_messages(node, (_NODE_OP,), lambda _: b"Const")
        return edit_messages(node, (_NODE_ATTR,), lambda entry: _emptied(entry, tensor))

    names = {array.name.encode() for array in arrays}

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
    """Return saved_model.pb with every table of `manifest` mapped from its file below `folder`.

    Raises:
        ConfigError: the graph does not map exactly the stacks of the manifest.
    """
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
    """Return the folders that the stacks of `manifest` are mapped from: one, for a graph as it was written.

    Raises:
        ConfigError: the graph does not map the stacks of the manifest.
    """
    return {path.removesuffix(f"/{array.file}") for path, array in _places(graph, manifest)}


def _edit_nodes(graph: bytes, edit: Callable[[bytes], bytes]) -> bytes:
    """Return saved_model.pb with what `edit` makes of each NodeDef that may map a tensor."""
    for path in _NODES:
        graph = edit_messages(graph, path, lambda node: edit(node) if _OP in node else node)
    return graph


def _tensor_of(node: bytes) -> MappedTensor | None:
    """Return the tensor of a node that maps one; None for other nodes."""
    message = Message(node)
    if message.data(_NODE_OP) != _OP:
        return None
    attributes = {entry.data(_KEY): entry.message(_VALUE) for entry in message.messages(_NODE_ATTR)}
    try:
        path, dtype, shape = attributes[_PATH], attributes[b"dtype"], attributes[b"shape"]
    except KeyError as error:
        raise MalformedError(f"an ImmutableConst node has no attribute {error.args[0].decode()!r}") from None
    dims = (dim.signed(_DIM_SIZE) for dim in shape.message(_ATTR_SHAPE).messages(_DIM))
    name = _DTYPES.get(dtype.integer(_ATTR_TYPE), "")
    return MappedTensor(os.fsdecode(path.data(_ATTR_BYTES)), name, tuple(dims))


def _with_path(entry: bytes, path: str) -> bytes:
    """Return an entry of a node's attributes with the path replaced, if it is the path."""
    if Message(entry).data(_KEY) != _PATH:
        return entry
    return bytes_field(_KEY, _PATH) + bytes_field(_VALUE, bytes_field(_ATTR_BYTES, os.fsencode(path)))


def _emptied(entry: bytes, tensor: MappedTensor) -> bytes:
    """Return an entry of the attributes of a constant without rows, from the entry of a node that maps `tensor`."""
    key = Message(entry).data(_KEY)
    if key == _PATH:  # TensorFlow ignores unknown attributes that begin with "_"
        return bytes_field(_KEY, b"_" + _PATH) + bytes_field(_VALUE, Message(entry).data(_VALUE))
    if key != b"shape":
        return entry
    number = next(number for number, name in _DTYPES.items() if name == tensor.dtype)
    content = varint_field(_TENSOR_DTYPE, number) + bytes_field(_TENSOR_SHAPE, _shape_of(0, *tensor.shape[1:]))
    return bytes_field(_KEY, b"value") + bytes_field(_VALUE, bytes_field(_ATTR_TENSOR, content))


def _shared_name(node: bytes) -> bytes:
    """Return the name of the variable of a node that returns its handle. Empty for other nodes."""
    message = Message(node)
    if message.data(_NODE_OP) != _HANDLE_OP:
        return b""
    entries = {entry.data(_KEY): entry.message(_VALUE) for entry in message.messages(_NODE_ATTR)}
    return entries[b"shared_name"].data(_ATTR_BYTES) if b"shared_name" in entries else b""


def _without_first_size(entry: bytes) -> bytes:
    """Return an entry of the attributes of a variable's handle; if it is the shape, with 0 rows."""
    if Message(entry).data(_KEY) != b"shape":
        return entry
    sizes = [dim.signed(_DIM_SIZE) for dim in Message(entry).message(_VALUE).message(_ATTR_SHAPE).messages(_DIM)]
    value = bytes_field(_ATTR_SHAPE, _shape_of(0, *sizes[1:]))
    return bytes_field(_KEY, b"shape") + bytes_field(_VALUE, value)


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
            _check(tensor, array)
            yield tensor.path, array


def _check(tensor: MappedTensor, array: ArrayEntry) -> None:
    size = _ITEM_BYTES.get(tensor.dtype, 0) * math.prod(tensor.shape)
    if tensor.shape[:1] != (array.rows,) or size != array.size:
        raise ConfigError(
            f"saved_model.pb: the graph maps {tensor.dtype} {list(tensor.shape)} from {array.file}, but the "
            f"manifest has {array.rows} rows of stack {array.name!r} in {array.size} bytes. Export again."
        )
