"""SavedModel protos made with TensorFlow's own classes, and the manifests that go with them."""

from collections.abc import Mapping, Sequence
from typing import Any

from tensorflow.core.framework import node_def_pb2, types_pb2
from tensorflow.core.protobuf import saved_model_pb2

from tpuembed.manifest import FromActivations, Manifest, Packing, StackEntry, TableEntry

FILES = ("variables/variables.data-00001-of-00003", "variables/variables.data-00002-of-00003")


def constant(path: bytes, shape: Sequence[int], dtype: int = types_pb2.DT_FLOAT) -> Any:
    """An ImmutableConst node."""
    node = node_def_pb2.NodeDef(name="constant", op="ImmutableConst", input=["^other"])
    node.attr["memory_region_name"].s = path
    node.attr["dtype"].type = dtype
    for size in shape:
        node.attr["shape"].shape.dim.add(size=size)
    node.attr["_scoped_allocator"].list.SetInParent()
    return node


def graph(in_graph: Sequence[Any], in_functions: Sequence[Any]) -> Any:
    """A SavedModel with these nodes among others, in the graph and in a function of it."""
    saved = saved_model_pb2.SavedModel(saved_model_schema_version=1)
    meta = saved.meta_graphs.add()
    meta.meta_info_def.tags.append("serve")
    meta.graph_def.node.add(name="x", op="Const").attr["value"].tensor.tensor_content = b"ImmutableConst" * 100
    meta.graph_def.node.extend(in_graph)
    function = meta.graph_def.library.function.add()
    function.signature.name = "init"
    function.node_def.add(name="y", op="NoOp").attr["memory_region_name"].s = b"no path of ours"
    function.node_def.extend(in_functions)
    meta.signature_def["serving_default"].method_name = "predict"
    return saved


def paths(saved: bytes) -> list[bytes]:
    """Of all ImmutableConst nodes, as TensorFlow's classes read them."""
    (meta,) = saved_model_pb2.SavedModel.FromString(saved).meta_graphs
    nodes = [
        *meta.graph_def.node,
        *(node for function in meta.graph_def.library.function for node in function.node_def),
    ]
    return [node.attr["memory_region_name"].s for node in nodes if node.op == "ImmutableConst"]


def manifest(layout: str = "mmap", **changes: Any) -> Manifest:
    """Two stacks of one table each, float32 [3, 4] and [5, 2]; `changes` go to the first stack."""
    stacks = [stack("a", 3, 4, FILES[0], **changes), stack("b", 5, 2, FILES[1])]
    tables = tuple(
        TableEntry(name=f"t_{one.name}", rows=one.rows, dim=one.dim, dtype="float32", stack=one.name, row_offset=0)
        for one in stacks
    )
    return Manifest(
        tool_version="0",
        source={},
        layout=layout,
        tables=tables,
        stacks=tuple(stacks),
        signatures={},
        packing=Packing(left_out="none"),
        from_activations=FromActivations(left_out="none"),
    )


def stack(name: str, rows: int, dim: int, file: str, **changes: Any) -> StackEntry:
    fields: Mapping[str, Any] = {
        "name": name, "key": f"k_{name}", "rows": rows, "dim": dim, "storage": "float32",
        "file": file, "offset": 0, "size": rows * dim * 4, "crc32c": 7,
    }  # fmt: skip
    return StackEntry(**{**fields, **changes})
