"""A TPUStrategy over TPUs that are not there: steps can be traced for it, never run.

The topology is made up, the strategy is TensorFlow's own. Everything happens in a graph: nothing may be placed on a device.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import tensorflow as tf
from tensorflow.core.protobuf.tpu import topology_pb2
from tensorflow.python.client import session
from tensorflow.python.tpu import device_assignment, tpu_embedding_v2, tpu_system_metadata
from tensorflow.python.tpu.topology import Topology

__all__ = ["fake_tpu"]

_HOST = "/job:localhost/replica:0/task:0/device:"


class _Resolver:
    """What TPUStrategy asks a cluster resolver for."""

    task_type, task_id, environment = "localhost", 0, ""

    def __init__(self, replicas: int, feature: str, sparse_cores: int) -> None:
        self._replicas = replicas
        proto = topology_pb2.TopologyProto(num_tasks=1, num_tpu_devices_per_task=replicas)
        proto.mesh_shape.extend([replicas, 1, 1, 1])
        proto.device_coordinates.extend(x for replica in range(replicas) for x in (replica, 0, 0, 0))
        self.topology = Topology(serialized=proto.SerializeToString())
        self.tpu_hardware_feature = topology_pb2.TPUHardwareFeature(
            embedding_feature=getattr(topology_pb2.TPUHardwareFeature, feature),
            num_embedding_devices_per_chip=sparse_cores,
        )

    def get_tpu_system_metadata(self) -> Any:
        names = [("CPU", 0), *(("TPU", index) for index in range(self._replicas))]
        devices = [session._DeviceAttributes(f"{_HOST}{kind}:{index}", kind, 1 << 30, 1) for kind, index in names]
        return tpu_system_metadata.TPUSystemMetadata(
            num_cores=self._replicas,
            num_hosts=1,
            num_of_cores_per_host=self._replicas,
            topology=self.topology,
            devices=devices,
        )

    def master(self) -> str:
        return ""

    get_master = master

    def cluster_spec(self) -> Any:
        return tf.train.ClusterSpec({})

    def get_job_name(self) -> str:
        return "localhost"

    def num_accelerators(self, *_: Any, **__: Any) -> dict[str, int]:
        return {"TPU": self._replicas}

    def connect(self, *_: Any, **__: Any) -> None:
        pass


@contextlib.contextmanager
def fake_tpu(feature: str, replicas: int = 1, sparse_cores: int = 4) -> Iterator[Any]:
    """A graph, and a TPUStrategy in it whose TPUs have the embedding hardware `feature`: UNSUPPORTED, V1 or V2."""
    with tf.Graph().as_default(), mock.patch.object(tpu_embedding_v2.tpu_ops, "is_tpu_embedding_initialized", bool):
        resolver = _Resolver(replicas, feature, sparse_cores)
        assignment = device_assignment.device_assignment(
            resolver.topology, computation_shape=[1, 1, 1, 1], num_replicas=replicas
        )
        yield tf.distribute.TPUStrategy(resolver, experimental_device_assignment=assignment)
