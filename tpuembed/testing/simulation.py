"""A TPUStrategy with simulated TPUs, and the patches of TensorFlow while it is active.

TensorFlow's private names that the simulation needs are used only here.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf.tpu import topology_pb2
from tensorflow.python.client import session
from tensorflow.python.distribute import mirrored_run
from tensorflow.python.tpu import device_assignment, tpu_embedding_v3, tpu_system_metadata
from tensorflow.python.tpu.topology import Topology

from tpuembed.backends.tpu import accelerator
from tpuembed.errors import ConfigError
from tpuembed.testing.sparse_core_ops import SparseCoreOps

__all__ = ["FakeCluster", "SimulatedTPUStrategy", "simulated_tpu"]

_HOST = "/job:localhost/replica:0/task:0/device:"
"""The prefix of device names, without kind and index."""
_CPU = f"{_HOST}CPU:0"


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
        devices = [session._DeviceAttributes(f"{_HOST}{kind}:{index}", kind, 1 << 30, 1) for kind, index in names]
        return tpu_system_metadata.TPUSystemMetadata(
            num_cores=self._replicas,
            num_hosts=1,
            num_of_cores_per_host=self._replicas,
            topology=self.topology,
            devices=devices,
        )

    def cluster_spec(self) -> Any:
        """Return an empty cluster: there is no other machine."""
        return tf.train.ClusterSpec({})


class SimulatedTPUStrategy(tf.distribute.TPUStrategy):
    """A TPUStrategy whose replicas run on the CPU, eagerly, in one thread each. They wait for each other at every
    exchange.

    A variable has a copy, or a shard, for each replica, as on TPUs.
    """

    def __init__(self, feature: str, replicas: int, sparse_cores: int) -> None:
        """Create the strategy. See `simulated_tpu`."""
        cluster = FakeCluster(feature, replicas, sparse_cores)
        super().__init__(cluster, experimental_device_assignment=cluster.assignment())
        self._enable_packed_variable_in_eager_mode = False  # packing is for devices with different names
        self.extended._tpu_devices = np.array([[_CPU]] * replicas, dtype=object)
        self.extended._device_input_worker_devices = {_CPU: [_CPU] * replicas}
        self.extended._host_input_worker_devices = {_CPU: [_CPU] * replicas}
        self.extended._get_replica_id_in_sync_group = int  # one host, so the replica id is unchanged

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Run `fn` in every replica, with its values of `args` and `kwargs`.

        Raises:
            ConfigError: called in a tf.function, where numpy cannot compute, or called with `options`, which are for
                compilers.
        """
        if not tf.executing_eagerly():
            raise ConfigError(
                "simulated_tpu: steps run eagerly only. Call strategy.run outside tf.function, or compile the model with "
                "run_eagerly=True."
            )
        if options is not None:
            raise ConfigError("simulated_tpu: strategy.run takes no options here. Call it without.")
        return mirrored_run._call_for_each_replica(
            self, getattr(fn, "python_function", fn), tuple(args), dict(kwargs or {})
        )


@contextlib.contextmanager
def simulated_tpu(feature: str = "V2", replicas: int = 1, sparse_cores: int = 4) -> Iterator[SimulatedTPUStrategy]:
    """Simulate TPUs on the CPU. Layers created under the strategy's scope can be called, read and saved inside the
    context.

    Args:
        feature: V2 for TPUs with SparseCores (v5p, v6e), UNSUPPORTED for TPUs without embedding hardware (v5e).
        replicas: TPU chips, a power of two.
        sparse_cores: SparseCores of each chip, a power of two: 4 for v5p, 2 for v6e.

    Raises:
        ConfigError: an argument cannot be simulated.
    """
    if feature not in ("V2", "UNSUPPORTED"):
        raise ConfigError(f"simulated_tpu: feature must be V2 or UNSUPPORTED, got {feature!r}")
    for name, number in (("replicas", replicas), ("sparse_cores", sparse_cores)):
        if number < 1 or number & (number - 1):
            raise ConfigError(f"simulated_tpu: {name} must be a power of two, as SparseCores need, got {number!r}")
    strategy = SimulatedTPUStrategy(feature, replicas, sparse_cores)
    sharded = tpu_embedding_v3.TPUEmbeddingShardedVariable
    replaced: list[tuple[Any, str, Any]] = [
        (tpu_embedding_v3, "xla_ops", SparseCoreOps(_exchange, replicas, sparse_cores)),
        (tpu_embedding_v3, "EmbeddingPipeliningContext", _NoPipelining),
        (sharded, "read_value", lambda variable: _shard(variable).read_value()),
        (sharded, "assign", lambda variable, value: _shard(variable).assign(value)),
        (accelerator, "tpu_call", _replica),
    ]
    with contextlib.ExitStack() as patches:
        for target, name, replacement in replaced:
            patches.enter_context(mock.patch.object(target, name, replacement))
        yield strategy


def _replica() -> Any:
    """Return the running replica of `strategy.run`, another object for each run. Returns None outside."""
    context = tf.distribute.get_replica_context()
    return context if context is not None and isinstance(context.strategy, SimulatedTPUStrategy) else None


def _shard(variable: Any) -> Any:
    """Return the shard of a sharded variable that the running replica's TPU holds."""
    return variable.values[_replica().replica_id_in_sync_group]


def _exchange(compute: Callable[[Sequence[Any]], Sequence[Any]], contribution: Any) -> Any:
    """Exchange values, see `sparse_core_ops.Exchange`. All replicas wait here for the last one."""
    context = _replica()

    def merge(strategy: Any, of_replicas: Any) -> Sequence[Any]:
        return compute(strategy.experimental_local_results(of_replicas))

    return context.merge_call(merge, args=(contribution,))[context.replica_id_in_sync_group]


class _NoPipelining:
    """Replaces the context that marks ops to overlap with the next step."""

    def __init__(self, mode: str, enable: bool) -> None:
        if enable:
            raise ConfigError(
                f"simulated_tpu: pipeline_execution_with_tensor_core ({mode}) is not supported. Build the layer without it."
            )

    def Enter(self) -> None:  # noqa: N802 - as TensorFlow calls it
        """Do nothing."""

    Exit = Enter
