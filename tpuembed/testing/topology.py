"""A fake cluster for a TPUStrategy: one host, some TPUs, their embedding hardware."""

from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf.tpu import topology_pb2
from tensorflow.python.client import session
from tensorflow.python.tpu import device_assignment, tpu_system_metadata
from tensorflow.python.tpu.topology import Topology

__all__ = ["HOST", "FakeCluster"]

HOST = "/job:localhost/replica:0/task:0/device:"
"""The prefix of device names, without kind and index."""


class FakeCluster:
    """The part of a cluster resolver that TPUStrategy uses."""

    task_type, task_id, environment = "localhost", 0, ""

    def __init__(self, feature: str, replicas: int, sparse_cores: int) -> None:
        """Create `replicas` TPUs with embedding hardware `feature`: UNSUPPORTED, V1, or V2 with `sparse_cores` each."""
        self._replicas = replicas
        proto = topology_pb2.TopologyProto(num_tasks=1, num_tpu_devices_per_task=replicas)
        proto.mesh_shape.extend([replicas, 1, 1, 1])
        proto.device_coordinates.extend(x for replica in range(replicas) for x in (replica, 0, 0, 0))
        self.topology = Topology(serialized=proto.SerializeToString())
        self.tpu_hardware_feature = topology_pb2.TPUHardwareFeature(
            embedding_feature=getattr(topology_pb2.TPUHardwareFeature, feature),
            num_embedding_devices_per_chip=sparse_cores,
        )

    def assignment(self) -> Any:
        """Return the device assignment: one replica per TPU."""
        return device_assignment.device_assignment(
            self.topology, computation_shape=[1, 1, 1, 1], num_replicas=self._replicas
        )

    def get_tpu_system_metadata(self) -> Any:
        """Return the devices, by name."""
        names = [("CPU", 0), *(("TPU", index) for index in range(self._replicas))]
        devices = [session._DeviceAttributes(f"{HOST}{kind}:{index}", kind, 1 << 30, 1) for kind, index in names]
        return tpu_system_metadata.TPUSystemMetadata(
            num_cores=self._replicas,
            num_hosts=1,
            num_of_cores_per_host=self._replicas,
            topology=self.topology,
            devices=devices,
        )

    def master(self) -> str:
        """Return the address of this process."""
        return ""

    get_master = master

    def cluster_spec(self) -> Any:
        """Return an empty cluster: there is no other machine."""
        return tf.train.ClusterSpec({})

    def get_job_name(self) -> str:
        """Return the job in the devices' names."""
        return "localhost"

    def num_accelerators(self, *_: Any, **__: Any) -> dict[str, int]:
        """Return the number of TPUs."""
        return {"TPU": self._replicas}

    def connect(self, *_: Any, **__: Any) -> None:
        """Do nothing: there is no cluster to connect to."""
