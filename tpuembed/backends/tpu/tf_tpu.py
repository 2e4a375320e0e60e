"""TensorFlow's internals that the TPU backends need: hardware, replication, and its mid-level classes.

Only `tf_config`, `tf_stacks` and this backend module use private names.
"""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.tpu.kernels import sparse_core_layout_pb2
from tensorflow.python.distribute import device_util
from tensorflow.python.framework import ops
from tensorflow.python.ops import cond_v2, control_flow_v2_func_graphs, resource_variable_ops, while_v2
from tensorflow.python.tpu import tpu_embedding_v2, tpu_embedding_v3, tpu_replication

from tpuembed.backends.tpu.stack_ids import ids_inside, ids_with_room
from tpuembed.backends.tpu.stacked_table import StackLayout, check_shards, check_stacks
from tpuembed.lookup.ids import PaddedIds
from tpuembed.lookup.ranges import DROPPED

__all__ = [
    "LAYOUTS",
    "HardwareEngine",
    "SparseCoreEngine",
    "densify_on_host",
    "differentiates_control_flow",
    "embedding_feature",
    "host_names",
    "host_variable",
    "is_tpu_strategy",
    "run_on_host",
    "saved_layouts",
    "sparse_cores_per_chip",
    "tpu_call",
    "traced_outside_of_loops",
]

Tensor = Any
LAYOUTS = "_sparse_core_table_layouts"
"""The checkpoint node of SparseCore layouts, as TensorFlow calls it."""


def is_tpu_strategy(strategy: Any) -> bool:
    """Return True if `strategy` runs its replicas on TPUs."""
    return isinstance(strategy, tf.distribute.TPUStrategy | tf.distribute.experimental.TPUStrategy)


def embedding_feature(strategy: Any) -> str:
    """Return the embedding hardware of the TPUs of `strategy`: "V1", "V2" (SparseCore) or "UNSUPPORTED"."""
    name: str = strategy.extended.tpu_hardware_feature.embedding_feature.name
    return name


def sparse_cores_per_chip(strategy: Any) -> int:
    """Return the SparseCores of one chip. If the runtime does not report them, return 4, as TensorFlow assumes."""
    return int(strategy.extended.tpu_hardware_feature.num_embedding_devices_per_chip) or 4


def host_names(strategy: Any) -> list[str]:
    """Return the names of the hosts of the TPUs of `strategy`, such as /job:localhost/replica:0/task:0."""
    devices = strategy.extended._tpu_devices.flatten()
    return sorted({device_util.get_host_for_device(device).split("/device:")[0] for device in devices})


def host_variable(rows: int, name: str) -> Any:
    """Return an int32 [rows] variable of zeros in the memory of the TPU's host. `tf.Variable` would be in the TPUs."""
    with tf.init_scope(), tf.device("CPU:0"):
        return resource_variable_ops.ResourceVariable(
            lambda: tf.zeros([rows], tf.int32), trainable=False, name=name, dtype=tf.int32
        )


def run_on_host(function: Callable[..., Any], *tensors: Any) -> Any:
    """Run `function(*tensors)` on the TPU's host, as a part of the step that is traced for the TPU."""
    return tpu_replication.outside_compilation(function, *tensors)


def densify_on_host(feature: Any) -> PaddedIds:
    """Return sparse or ragged ids (`tpuembed.lookup.ids`), and float32 weights, padded. The TPU's host makes the matrices.

    The number of ids differs from batch to batch, but a TPU program is compiled for one shape.
    """
    dense = [tpu_replication.outside_compilation(feature.to_dense, feature.ids, DROPPED)]
    if feature.weights is not None:
        dense.append(tpu_replication.outside_compilation(feature.to_dense, feature.weights, 0.0))
    for tensor in dense:
        tensor.set_shape(feature.ids.shape)
    weights = tf.cast(dense[1], tf.float32) if len(dense) > 1 else None
    return PaddedIds(feature.path, feature.config, dense[0], weights)


def tpu_call() -> Any:
    """Return an object that identifies the body of `strategy.run` that is being traced for TPUs. Returns None outside."""
    return next((context for graph in _graphs() if (context := _tpu_context(graph)) is not None), None)


def traced_outside_of_loops() -> bool:
    """Return True if a body of `strategy.run` is traced for TPUs outside the steps of a loop (`tf.range`,
    `tf.while_loop`).

    A loop inside the body does not count: it is part of one step. A condition or another function between the loop and
    the body counts as outside. TensorFlow's pass looks for the loop whose body holds the ops (FindOwningWhileOp in
    embedding_pipelining.cc).
    """
    holding = next((graph for graph in _graphs() if _tpu_context(graph) is not None), None)
    return holding is not None and not isinstance(holding, control_flow_v2_func_graphs.WhileBodyFuncGraph)


def differentiates_control_flow() -> bool:
    """Return True if the gradient of a `tf.cond` branch or of a loop's body is being traced, also in a function called there."""
    kinds = (cond_v2._CondGradFuncGraph, while_v2._WhileBodyGradFuncGraph)
    return any(isinstance(graph, kinds) for graph in ops._default_graph_stack.stack)


def _graphs() -> Iterator[Any]:
    """Yield the graph that is being traced, the one around it, and so on."""
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)


def _tpu_context(graph: Any) -> Any:
    context = graph._get_control_flow_context()
    while context is not None and not isinstance(context, tpu_replication.TPUReplicateContext):
        context = context.outer_context
    return context


class HostShards(tpu_embedding_v2.TPUEmbeddingVariable):
    """Rows of one table (or slot) in the memory of the TPU's hosts. A checkpoint is written from them and read into
    them.

    Training changes the rows in the TPUs' memory. After a checkpoint is restored, the TPUs must load the rows from
    here.
    """

    loaded: Callable[[], None] | None = None

    def _gather_saveables_for_checkpoint(self) -> dict[str, Callable[..., Any]]:
        factories: dict[str, Callable[..., Any]] = super()._gather_saveables_for_checkpoint()
        return {name: lambda name=name, make=make: self._loading(make(name)) for name, make in factories.items()}

    def _loading(self, saveables: Sequence[Any]) -> Sequence[Any]:
        """Return the saveables of all hosts. Restoring the last one loads the restored rows into the TPUs."""
        last = saveables[-1]
        restore = last.restore

        def restore_and_load(restored_tensors: Any, restored_shapes: Any) -> Any:
            restored = restore(restored_tensors, restored_shapes)
            if self.loaded is not None:
                with tf.control_dependencies([] if tf.executing_eagerly() else [restored]):
                    self.loaded()
            return restored

        last.restore = restore_and_load
        return saveables


class HardwareEngine(tpu_embedding_v2.TPUEmbedding):
    """TensorFlow's handle of the V1 accelerator, whose tables exist before the shapes of a batch are known.

    So a checkpoint that is restored before the first batch finds its variables.
    """

    def __init__(self, features: Sequence[Any], pipelining: bool) -> None:
        """Create the tables of TensorFlow's `features`. Each table has its optimizer."""
        super().__init__(list(features), None, pipelining)
        self._verify_output_shapes_on_enqueue = False  # the layer's own checks accept shapes that TensorFlow refuses
        self.tables: Mapping[str, Mapping[str, Any]] = super()._create_variables_and_slots()
        for variables in self.tables.values():
            for variable in variables.values():
                variable.__class__ = HostShards
                variable.loaded = self._load_variables

    def _create_variables_and_slots(self) -> Mapping[str, Mapping[str, Any]]:
        return self.tables

    def start(self, output_shapes: Sequence[tuple[int, ...]]) -> None:
        """Configure the accelerator with the shapes of one replica's activations, without their last dimension."""
        if not self._built:
            with tf.init_scope():
                self.build([tf.TensorShape((*shape, 1)) for shape in output_shapes])

    @property
    def configuration(self) -> Any:
        """Return the TPUEmbeddingConfiguration proto, once started."""
        return self._config_proto

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Return a context. It fetches the tables at its start. At its end it loads the hosts' variables into the TPUs."""
        self.fetch()
        try:
            yield
        finally:
            self._load_variables()

    def fetch(self) -> None:
        """Copy the tables from the TPUs into the hosts' variables."""
        self._retrieve_variables()


class SparseCoreEngine(tpu_embedding_v3.TPUEmbeddingV2):
    """TensorFlow's handle of the SparseCores. It creates its tables at once."""

    def __init__(self, features: Sequence[Any], pipelining: bool, config: Any) -> None:
        """Create the tables of TensorFlow's `features`, whose output_shapes are known.

        Raises:
            ConfigError: two stacks, or a stack and a slot, have one name, or the shards do not match the layouts.
        """
        super().__init__(list(features), None, pipelining, config)
        self._given = config
        slots = {feature.table.name: feature.table.optimizer._slot_names() for feature in features}
        layouts = {table: self.layout(table) for table in self.embedding_layouts}
        check_stacks(layouts, slots)
        self.build()
        check_shards(layouts, {stack: _shapes(of_roles["parameters"]) for stack, of_roles in self.tables.items()})

    @property
    def tables(self) -> Mapping[str, Mapping[str, Any]]:
        """Return {stack: {"parameters" and slot names: variable, sharded over the devices}}."""
        variables: Mapping[str, Mapping[str, Any]] = self._variables
        return variables

    @property
    def layouts_node(self) -> Any:
        """Return the checkpoint node that holds the layouts of all tables."""
        return self._lookup_dependency(LAYOUTS)

    def layout(self, table: str) -> StackLayout:
        """Return the layout of `table` in its stack."""
        return StackLayout.of(self.embedding_layouts[table])

    def _preprocess_features(self, **arguments: Any) -> Any:
        """Check the ids and apply their policies, then convert them. Runs on the host."""
        given = list(zip(arguments["flat_features"], arguments["flat_inputs"], arguments["flat_weights"], strict=True))
        checked = [self._inside(feature, ids, weights) for (_, feature), ids, weights in given]
        inputs = {
            "flat_features": [(path, _summed(feature)) for (path, feature), _, _ in given],
            "flat_inputs": [ids for ids, _ in checked],
            "flat_weights": [weights for _, weights in checked],
        }
        return super()._preprocess_features(**{**arguments, **inputs})

    def _inside(self, feature: Any, ids: Any, weights: Any) -> tuple[Any, Any]:
        table, samples = feature.table, math.prod(feature.output_shape)
        rows, validate, policy = self.layout(table.name).rows, feature.validate_weights_and_indices, policy_of(feature)
        return ids_inside(ids, weights, feature.name, rows, samples, validate, policy, table.combiner, table.name)

    def _get_csr_wrapped_coo_from_sorted_coo_tensor(
        self, replicas: int, per_sample: int, minibatches: int, coos: Mapping[str, Any], *others: Any
    ) -> Any:
        """Check that the ids fit, then write them into a buffer of `per_sample` times the samples of a TPU. Runs on the host."""
        if not self._sparse_core_embedding_config.allow_id_dropping:
            sizes = {stack: per_sample * self._table_to_sample_count[stack] for stack in coos}
            coos = {stack: (*coo, ids_with_room(ends, stack, sizes[stack])) for stack, (*coo, ends) in coos.items()}
        return super()._get_csr_wrapped_coo_from_sorted_coo_tensor(replicas, per_sample, minibatches, coos, *others)

    def limit_ids(self, limits: Mapping[str, tuple[int | None, int | None]]) -> None:
        """Set how many ids and unique ids a SparseCore takes from another one per step, by table.

        A stack takes the sum of its tables' limits, with 256 for a table without one. The SparseCoreEmbeddingConfig
        takes precedence.
        """
        targets = (self._table_to_max_ids_per_sparse_core, self._table_to_max_unique_ids_per_sparse_core)
        given = [getattr(self._given, name, None) for name in ("max_ids_per_table", "max_unique_ids_per_table")]
        for which, (target, config) in enumerate(zip(targets, given, strict=True)):
            for stack, tables in self._stacked_table_to_tables.items():
                of_tables = [limits[table.name][which] for table in tables]
                if stack not in (config or {}) and any(limit is not None for limit in of_tables):
                    target[stack] = sum(limit or self.DEFAULT_MAX_IDS_PER_TABLE for limit in of_tables)


def policy_of(feature: Any) -> str | int:
    """Return the out_of_vocabulary policy of TensorFlow's `feature`, an attribute that the layer sets."""
    policy: str | int = getattr(feature, "out_of_vocabulary", "error")
    return policy


def _summed(feature: Any) -> Any:
    """Return TensorFlow's `feature` with combiner sum if its policy is zeros, because `ids_inside` returns weighted shares then."""
    if policy_of(feature) != "zeros":
        return feature
    summed = copy.copy(feature)
    summed.table = copy.copy(feature.table)
    summed.table.combiner = "sum"
    return summed


def _shapes(variable: Any) -> list[Any]:
    return [shard.shape.as_list() for shard in variable.values]


def saved_layouts(path: str) -> dict[str, StackLayout]:
    """Return {table: its layout in a stack} of the checkpoint at `path`. Empty if no SparseCores wrote it."""
    reader = tf.train.load_checkpoint(path)
    keys = [key for key in reader.get_variable_to_shape_map() if f"{LAYOUTS}/." in key]
    layouts: dict[str, StackLayout] = {}
    for key in keys:
        proto = sparse_core_layout_pb2.SparseCoreTableLayouts.FromString(reader.get_tensor(key))
        layouts.update({table.table_name: StackLayout.of(table) for table in proto.tables})
    return layouts
