"""Object graphs as TensorFlow's own protobuf classes write them."""

import pytest
from tensorflow.core.protobuf import trackable_object_graph_pb2

from tests.support.messages import refused
from tpuembed.checkpoint.bundle.object_graph import ObjectGraph
from tpuembed.formats.protobuf import MalformedError


def proto(*nodes: dict[str, object]) -> bytes:
    node_protos = [trackable_object_graph_pb2.TrackableObjectGraph.TrackableObject(**node) for node in nodes]
    serialized: bytes = trackable_object_graph_pb2.TrackableObjectGraph(nodes=node_protos).SerializeToString()
    return serialized


def children(**numbers: int) -> list[dict[str, object]]:
    return [{"local_name": name, "node_id": number} for name, number in numbers.items()]


def test_every_field() -> None:
    slots = [
        {"original_variable_node_id": 1, "slot_name": "m", "slot_variable_node_id": 2},
        {"original_variable_node_id": 1, "slot_name": "v", "slot_variable_node_id": 3},
    ]
    value = {"name": "VARIABLE_VALUE", "full_name": "w", "checkpoint_key": "a/b"}
    graph = ObjectGraph.parse(
        proto(
            {"children": children(w=1), "slot_variables": slots, "registered_saver": {"name": "x.Saver"}},
            {"attributes": [value]},
            {},
            {},
        )
    )
    assert graph.nodes[0].children == {"w": 1}
    assert graph.nodes[0].registered_saver == "x.Saver"
    assert graph.nodes[0].value_key is None
    assert graph.nodes[1].value_key == "a/b"
    assert graph.nodes[1].attributes["VARIABLE_VALUE"].full_name == "w"
    assert graph.slots == {1: {"momenta": {2}, "velocities": {3}}}


def test_shortest_paths_in_a_graph_with_cycles() -> None:
    graph = ObjectGraph.parse(
        proto(
            {"children": children(me=0, long=1)},
            {"children": children(way=2, up=0)},
            {"children": children(deep=3, again=2)},
            {"children": children(root=0)},
            {"children": children(unreachable=4)},
        )
    )
    assert {number: graph.path(number) for number in (0, *graph.parents)} == {
        0: "",
        1: "long",
        2: "long/way",
        3: "long/way/deep",
    }
    with refused(MalformedError, match="node 4"):
        graph.path(4)


@pytest.mark.parametrize(
    "nodes",
    [
        [],
        [{"children": children(a=1)}],
        [{"children": children(a=-1)}],
        [{"slot_variables": [{"original_variable_node_id": 0, "slot_variable_node_id": 7}]}],
        [{"children": [*children(a=0), *children(a=0)]}],
    ],
)
def test_graphs_that_lead_nowhere(nodes: list[dict[str, object]]) -> None:
    with refused(MalformedError):
        ObjectGraph.parse(proto(*nodes))
