"""Trackable objects whose children have any name, and object graphs that say who saved them."""

from typing import Any

import tensorflow as tf

GRAPH_KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"


class Children(tf.Module):
    """A trackable object with children of any name."""

    def __init__(self, **named: Any) -> None:
        super().__init__()
        for name, child in named.items():
            self._track_trackable(child, name.replace("__", "/"))


def mid_level(tables: dict[str, dict[str, Any]], **more: Any) -> Children:
    variables = Children(**{name: Children(**roles) for name, roles in tables.items()})
    return Children(_feature_config=Children(), _table_config=Children(), _variables=variables, **more)


def with_registered_saver(prefix: str, name: str) -> bytes:
    """The object graph of `prefix`, its mid-level node saved by class `name`."""
    from tensorflow.core.protobuf import trackable_object_graph_pb2

    graph = trackable_object_graph_pb2.TrackableObjectGraph.FromString(
        tf.train.load_checkpoint(prefix).get_tensor(GRAPH_KEY)
    )
    [node] = [node for node in graph.nodes if "_table_config" in {child.local_name for child in node.children}]
    node.registered_saver.name = name
    serialized: bytes = graph.SerializeToString()
    return serialized
