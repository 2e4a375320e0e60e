"""Where a graph maps its tables from: the paths of the `ImmutableConst` nodes in saved_model.pb.

The path is a static attribute of the node, so a graph that moves to another folder is rewritten: on the disk at deploy time,
or in memory while it is loaded. Everything else in the file stays byte for byte as it is.

Source of the field numbers: saved_model, meta_graph, graph, function, node_def, attr_value and tensor_shape .proto in
tensorflow/core/protobuf and tensorflow/core/framework.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath, PurePosixPath
from typing import Final

import google_crc32c

from tpuembed.errors import ConfigError
from tpuembed.manifest import Manifest, StackEntry
from tpuembed.protobuf import MalformedError, Message, bytes_field, edit_messages

__all__ = ["MappedTensor", "graph_crc32c", "mapped_from", "mapped_tensors", "replace_paths"]

_OP: Final = b"ImmutableConst"
_PATH: Final = b"memory_region_name"
_NODES: Final = ((2, 2, 1), (2, 2, 2, 1, 3))
"""meta_graphs.graph_def.node, and meta_graphs.graph_def.library.function.node_def."""
_NODE_OP, _NODE_ATTR, _KEY, _VALUE = 2, 5, 1, 2
_ATTR_BYTES, _ATTR_TYPE, _ATTR_SHAPE, _DIM, _DIM_SIZE = 2, 6, 7, 2, 1
_DTYPES: Final = {1: "float32", 4: "uint8", 6: "int8", 14: "bfloat16", 19: "float16"}
_ITEM_BYTES: Final = {"float32": 4, "uint8": 1, "int8": 1, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass(frozen=True)
class MappedTensor:
    """A tensor that a graph maps from a file.

    Attributes:
        path: of the file, as the graph has it.
        dtype: by name; "" for one that no table has.
        shape: of the tensor.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]


def mapped_tensors(graph: bytes) -> set[MappedTensor]:
    """Every tensor that saved_model.pb, whose bytes are `graph`, maps from a file.

    Raises:
        MalformedError: the bytes are no SavedModel.
    """
    found: set[MappedTensor] = set()

    def note(node: bytes) -> bytes:
        if (tensor := _tensor_of(node)) is not None:
            found.add(tensor)
        return node

    _edit_nodes(graph, note)
    return found


def replace_paths(graph: bytes, paths: Mapping[str, str]) -> bytes:
    """saved_model.pb with the mapped paths that `paths` names replaced, and all others as they are.

    Raises:
        MalformedError: the bytes are no SavedModel.
    """

    def replace(node: bytes) -> bytes:
        tensor = _tensor_of(node)
        if tensor is None or tensor.path not in paths:
            return node
        path = paths[tensor.path]
        return edit_messages(node, (_NODE_ATTR,), lambda entry: _with_path(entry, path))

    return _edit_nodes(graph, replace)


def mapped_from(graph: bytes, manifest: Manifest, folder: PurePath) -> bytes:
    """saved_model.pb with every table of `manifest` mapped from its file below `folder`, wherever it was mapped from.

    Raises:
        ConfigError: the graph does not map exactly what the manifest says.
    """
    try:
        paths = {path: str(folder / stack.file) for path, stack in _places(graph, manifest)}
        return replace_paths(graph, paths)
    except MalformedError as error:
        raise ConfigError(f"saved_model.pb: no SavedModel: {error}; export again") from None


def graph_crc32c(graph: bytes, manifest: Manifest) -> int:
    """CRC32C of saved_model.pb as it would be in the folder "": the same wherever the export was relocated to.

    Raises:
        ConfigError: the graph does not map what the manifest says.
    """
    mapped = manifest.layout == "mmap"
    return int(google_crc32c.value(mapped_from(graph, manifest, PurePosixPath()) if mapped else graph))


def _edit_nodes(graph: bytes, edit: Callable[[bytes], bytes]) -> bytes:
    for path in _NODES:
        graph = edit_messages(graph, path, lambda node: edit(node) if _OP in node else node)
    return graph


def _tensor_of(node: bytes) -> MappedTensor | None:
    """The tensor of a node that maps one; None for other nodes."""
    message = Message(node)
    if message.data(_NODE_OP) != _OP:
        return None
    attributes = {entry.data(_KEY): entry.message(_VALUE) for entry in message.messages(_NODE_ATTR)}
    try:
        path, dtype, shape = attributes[_PATH], attributes[b"dtype"], attributes[b"shape"]
    except KeyError as error:
        raise MalformedError(f"an ImmutableConst node has no attribute {error}") from None
    dims = (dim.signed(_DIM_SIZE) for dim in shape.message(_ATTR_SHAPE).messages(_DIM))
    name = _DTYPES.get(dtype.integer(_ATTR_TYPE), "")
    return MappedTensor(os.fsdecode(path.data(_ATTR_BYTES)), name, tuple(dims))


def _with_path(entry: bytes, path: str) -> bytes:
    """An entry of a node's attributes, with another path where it is the path."""
    if Message(entry).data(_KEY) != _PATH:
        return entry
    return bytes_field(_KEY, _PATH) + bytes_field(_VALUE, bytes_field(_ATTR_BYTES, os.fsencode(path)))


def _places(graph: bytes, manifest: Manifest) -> Iterator[tuple[str, StackEntry]]:
    """(path, the stack mapped from it); every stack of the manifest at least once."""
    tensors = mapped_tensors(graph)
    for stack in manifest.stacks:
        mapped = [tensor for tensor in tensors if _ends_with(tensor.path, stack.file)]
        if not mapped:
            raise ConfigError(
                f"saved_model.pb: the graph maps no {stack.file}, which holds stack {stack.name!r}; export again"
            )
        for tensor in mapped:
            _check(tensor, stack)
            yield tensor.path, stack


def _ends_with(path: str, file: str) -> bool:
    parts = PurePosixPath(file).parts
    return PurePosixPath(path).parts[-len(parts) :] == parts


def _check(tensor: MappedTensor, stack: StackEntry) -> None:
    size = _ITEM_BYTES.get(tensor.dtype, 0)
    for dim in tensor.shape:
        size *= dim
    if tensor.shape[:1] != (stack.rows,) or size != stack.size:
        raise ConfigError(
            f"saved_model.pb: the graph maps {tensor.dtype} {list(tensor.shape)} from {stack.file}, and the manifest says "
            f"{stack.rows} rows of stack {stack.name!r} in {stack.size} bytes; export again"
        )
