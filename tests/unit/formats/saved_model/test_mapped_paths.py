"""Paths in saved_model.pb, read and rewritten; TensorFlow's own classes say what is in it."""

from pathlib import PurePosixPath

import pytest
from tensorflow.core.framework import types_pb2
from tensorflow.core.protobuf import saved_model_pb2

from tests.support.messages import refused
from tests.support.saved_model_graphs import FILES, constant, graph, manifest, paths
from tpuembed.errors import ConfigError
from tpuembed.formats.protobuf import MalformedError
from tpuembed.formats.saved_model import MappedTensor, mapped_from, mapped_tensors, relative_graph, replace_paths

A, B = (f"/old/3/{file}" for file in FILES)
USERS = "/somewhere/a model's own file"


def saved() -> bytes:
    nodes = [constant(A.encode(), [3, 4]), constant(B.encode(), [5, 2])]
    content: bytes = graph([nodes[0]], [*nodes, constant(USERS.encode(), [9])]).SerializeToString()
    return content


def test_every_mapped_tensor_is_found_wherever_it_is() -> None:
    assert mapped_tensors(saved()) == {
        MappedTensor(A, "float32", (3, 4)),
        MappedTensor(B, "float32", (5, 2)),
        MappedTensor(USERS, "float32", (9,)),
    }


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (types_pb2.DT_FLOAT, "float32"),
        (types_pb2.DT_BFLOAT16, "bfloat16"),
        (types_pb2.DT_HALF, "float16"),
        (types_pb2.DT_UINT8, "uint8"),
        (types_pb2.DT_INT8, "int8"),
        (types_pb2.DT_STRING, "string"),
    ],
)
def test_the_types_of_tables(code: int, name: str) -> None:
    content = graph([constant(b"/x", [2], code)], []).SerializeToString()
    assert mapped_tensors(content) == {MappedTensor("/x", name, (2,))}


@pytest.mark.parametrize("new", ["/n", "/a much longer path/" + "x" * 300, "/ü\udcff"])
def test_only_the_path_changes(new: str) -> None:
    changed = replace_paths(saved(), {A: new})
    before, after = (saved_model_pb2.SavedModel.FromString(content) for content in (saved(), changed))
    raw = new.encode(errors="surrogateescape")
    assert paths(changed) == [raw, raw, B.encode(), USERS.encode()]
    assert replace_paths(changed, {new: A}) == saved()
    for message in (before, after):
        for node in [
            *message.meta_graphs[0].graph_def.node,
            *message.meta_graphs[0].graph_def.library.function[0].node_def,
        ]:
            if node.op == "ImmutableConst":
                node.attr["memory_region_name"].s = b""
    assert before == after


def test_tables_are_mapped_from_another_folder() -> None:
    moved = mapped_from(saved(), manifest(), PurePosixPath("/new/7"))
    assert paths(moved) == [
        p.encode() for p in (f"/new/7/{FILES[0]}", f"/new/7/{FILES[0]}", f"/new/7/{FILES[1]}", USERS)
    ]
    assert mapped_from(moved, manifest(), PurePosixPath("/new/7")) == moved
    assert mapped_from(moved, manifest(), PurePosixPath("/old/3")) == saved()


def test_a_graph_is_recorded_as_it_is_wherever_it_is() -> None:
    moved = mapped_from(saved(), manifest(), PurePosixPath("/new/7"))
    assert relative_graph(moved, manifest()) == relative_graph(saved(), manifest())
    other = saved().replace(b"predict", b"predicT")
    assert relative_graph(other, manifest()) != relative_graph(saved(), manifest())


@pytest.mark.parametrize(
    "nodes",
    [
        [(A, [3, 4])],
        [(A, [3, 4]), (f"/x/my{FILES[1]}", [5, 2])],
        [(A, [3, 5]), (B, [5, 2])],
        [(A, [4, 3]), (B, [5, 2])],
        [(A, [-3, 4]), (B, [5, 2])],
    ],
)
def test_a_graph_that_is_not_the_manifests(nodes: list[tuple[str, list[int]]]) -> None:
    content = graph([], [constant(path.encode(), shape) for path, shape in nodes]).SerializeToString()
    with refused(ConfigError):
        mapped_from(content, manifest(), PurePosixPath("/new"))


def test_bytes_that_are_no_graph() -> None:
    for content in (saved()[:-1], b"\x0a\xff\xff\xff\xff\x7f", b"not a graph"):
        with pytest.raises(MalformedError):
            mapped_tensors(content)
        with refused(ConfigError):
            mapped_from(content, manifest(), PurePosixPath("/new"))


def test_a_node_without_a_path() -> None:
    node = constant(b"/x", [1])
    del node.attr["shape"]
    with refused(MalformedError, match="no attribute 'shape'"):
        mapped_tensors(graph([node], []).SerializeToString())
