"""One training and one evaluation step of a model, traced for a V1 accelerator that is not there, and read back."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute.values import PerReplica
from tensorflow.python.framework import op_def_registry

from tests.support.fake_tpu import fake_tpu
from tests.tpu.v1.models import BATCH, Ids, Model
from tpuembed import TPUEmbedding

__all__ = ["Step", "Traced", "trace"]

Array = np.ndarray[Any, Any]

ENQUEUE, RECEIVE, SEND = (
    "EnqueueTPUEmbeddingArbitraryTensorBatch",
    "RecvTPUEmbeddingActivations",
    "SendTPUEmbeddingGradients",
)


@dataclasses.dataclass(frozen=True)
class Step:
    """The ops of one call of the layer in a graph; `sends` is empty where nothing is trained."""

    graph: Any
    replicas: int
    enqueues: Sequence[Any]
    receives: Sequence[Any]
    sends: Sequence[Any]

    def arguments(self, op: Any) -> dict[str, Any]:
        """The op's inputs by the names that its definition has for them: a tensor, or a list of them."""
        return _arguments(op)

    @functools.cached_property
    def enqueued(self) -> list[dict[str, list[Array]]]:
        """The enqueue op's lists of arrays by their names, of every replica."""
        [enqueue] = self.enqueues
        lists = {name: value for name, value in _arguments(enqueue).items() if isinstance(value, list)}
        return [self.on_host(lists, replica) for replica in range(self.replicas)]

    def on_host(self, tensors: Any, replica: int, cut: Mapping[str, Array] | None = None) -> Any:
        """What `tensors` are for the batch of `replica`, and for the values that `cut` has of other tensors, by name."""
        return _run(self.graph, tensors, replica, cut or {}) if tf.nest.flatten(tensors) else tensors


@dataclasses.dataclass(frozen=True)
class Traced:
    """What a layer asked of the accelerator.

    Attributes:
        configuration: its TPUEmbeddingConfiguration.
        given: the serialized configurations that ops got: kind of op -> bytes.
        loads: the ops that put the hosts' rows into the accelerator, of one load of all tables.
        initial: table -> "parameters" or slot -> the hosts' rows that are loaded.
    """

    configuration: Any
    given: Mapping[str, bytes]
    training: Step
    evaluation: Step
    loads: Sequence["Load"]
    initial: Mapping[str, Mapping[str, Array]]


@dataclasses.dataclass(frozen=True)
class Load:
    """One LoadTPUEmbedding...Parameters op; `inputs`: its argument -> the "parameters" or slot that it reads."""

    op: str
    table: str
    shard: int
    shards: int
    inputs: Mapping[str, str]


def trace(model: Model) -> Traced:
    """Trace a training and then an evaluation step of a layer of `model`."""
    with fake_tpu("V1", model.replicas) as strategy:
        graph = tf.compat.v1.get_default_graph()
        with strategy.scope():
            layer = TPUEmbedding(
                dict(model.features),
                model.optimizer,
                pipeline_execution_with_tensor_core=model.pipelining,
                batch_size=BATCH,
            )
        arguments = _inputs(model)
        strategy.run(lambda ids, weights: _train(layer, ids, weights), args=arguments)
        trained = len(graph.get_operations())
        strategy.run(lambda ids, weights: list(layer(ids, weights).values()), args=arguments)
        ops = graph.get_operations()
        backend: Any = layer.core.backend
        engine = backend.engine
        return Traced(
            configuration=engine.configuration,
            given=_configurations(graph),
            training=_step(graph, model.replicas, ops[:trained]),
            evaluation=_step(graph, model.replicas, ops[trained:]),
            loads=_loads(graph, engine.tables),
            initial=_initial(graph, engine.tables),
        )


def _train(layer: Any, ids: Any, weights: Any) -> Any:
    """The loss is half the sum of the squares of all activations, so that their gradients are the activations themselves."""
    with tf.GradientTape() as tape:
        activations = [tf.reshape(each, [-1]) for each in layer(ids, weights).values()]
        loss = tf.add_n([tf.reduce_sum(each**2) / 2.0 for each in activations])
    gradients = tape.gradient(loss, layer.trainable_variables)
    layer.apply_gradients(gradients)
    return gradients


def _inputs(model: Model) -> tuple[Any, Any]:
    """(ids, weights) for `strategy.run`, different for every replica, of as many ids as a batch may have."""
    batches = [model.batch(replica) for replica in range(model.replicas)]
    tensors = [{name: _tensors(ids, model.kinds[name]) for name, ids in batch.items()} for batch in batches]
    return tuple(
        {name: _per_replica([batch[name][which] for batch in tensors]) for name in model.features} for which in (0, 1)
    )  # type: ignore[return-value]


def _per_replica(values: Sequence[Any]) -> Any:
    return None if values[0] is None else PerReplica(values)


def _tensors(ids: Ids, kind: str) -> tuple[Any, Any]:
    if kind == "dense":
        return tf.constant(ids.values), None
    values = _unsized(ids.values)
    splits = tf.constant(np.concatenate([[0], np.cumsum(ids.counts)]), tf.int64)
    weights = None if ids.weights is None else _unsized(ids.weights)
    if kind == "ragged":
        ragged = tf.RaggedTensor.from_row_splits(values, splits, validate=False)
        return ragged, None if weights is None else ragged.with_values(weights)
    examples = np.repeat(np.arange(BATCH), ids.counts)
    places = np.concatenate([np.arange(count) for count in ids.counts])
    sparse = tf.SparseTensor(_unsized(np.stack([examples, places], 1)), values, tf.constant([BATCH, 4], tf.int64))
    return sparse, None if weights is None else sparse.with_values(weights)


def _unsized(values: Array) -> Any:
    """`values`, whose number is not known while the step is traced."""
    return tf.compat.v1.placeholder_with_default(values, [None, *values.shape[1:]])


def _step(graph: Any, replicas: int, ops: Sequence[Any]) -> Step:
    return Step(graph, replicas, *([op for op in ops if op.type == kind] for kind in (ENQUEUE, RECEIVE, SEND)))


def _arguments(op: Any) -> dict[str, Any]:
    inputs, found = iter(op.inputs), {}
    for argument in op_def_registry.get(op.type).input_arg:
        count = op.get_attr(argument.number_attr) if argument.number_attr else None
        found[argument.name] = next(inputs) if count is None else [next(inputs) for _ in range(count)]
    return found


def _configurations(graph: Any) -> dict[str, bytes]:
    """The configurations that ops of the graph, and of its functions, were given."""
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    return {node.op: node.attr["config"].s for node in nodes if "Embedding" in node.op and node.attr["config"].s}


# ---- running what feeds an op


def _run(graph: Any, tensors: Any, replica: int, cut: Mapping[str, Array]) -> Any:
    wanted = tf.nest.flatten(tensors)
    nodes = {node.name: node for node in graph.as_graph_def().node}
    needed = tf.compat.v1.GraphDef()
    for name in _needed({tensor.op.name for tensor in wanted}, nodes, {name.split(":")[0] for name in cut}):
        needed.node.append(_plain(nodes[name], replica))
    with tf.Graph().as_default() as host:
        fed = {name: tf.compat.v1.placeholder(tf.float32, value.shape) for name, value in cut.items()}
        names = [tensor.name for tensor in wanted]
        found = tf.import_graph_def(needed, input_map=fed, return_elements=names, name="")
        with tf.compat.v1.Session(graph=host) as session:
            session.run([op for op in host.get_operations() if op.type == "AssignVariableOp"])
            values = session.run(found, {fed[name]: value for name, value in cut.items()})
    return tf.nest.pack_sequence_as(tensors, values)


def _needed(names: set[str], nodes: Mapping[str, Any], cut: set[str]) -> Iterator[str]:
    """What `names` are computed from, without what is cut; with the first assignments of variables, which initialize them."""
    first = {node.input[0]: node.name for node in reversed(list(nodes.values())) if node.op == "AssignVariableOp"}
    seen: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in seen or name in cut:
            continue
        seen.add(name)
        yield name
        waiting += [source.split(":")[0] for source in nodes[name].input if not source.startswith("^")]
        waiting += [first[name]] if name in first else []


def _plain(node: Any, replica: int) -> Any:
    """The node as the host of `replica` runs it: without marks for TPUs, and with that replica's inputs."""
    copy = tf.compat.v1.NodeDef()
    copy.CopyFrom(node)
    inputs = [source for source in node.input if not source.startswith("^")]
    copy.ClearField("input")
    copy.device = ""
    for mark in [key for key in copy.attr if key.startswith("_")]:
        del copy.attr[mark]
    if node.op == "TPUReplicatedInput":
        copy.op = "Identity"
        kind = node.attr["T"]
        copy.ClearField("attr")
        copy.attr["T"].CopyFrom(kind)
        inputs = [inputs[replica]]
    copy.input.extend(inputs)
    return copy


# ---- what is loaded


def _loads(graph: Any, tables: Mapping[str, Mapping[str, Any]]) -> list[Load]:
    """Of the function that the layer calls once to load its tables."""
    [call] = [
        op
        for op in graph.get_operations()
        if op.type == "StatefulPartitionedCall" and "load_variables" in op.get_attr("f").name
    ]
    name = call.get_attr("f").name
    [function] = [f for f in graph.as_graph_def().library.function if f.signature.name == name]
    handles = {
        shard.handle.name: role
        for variables in tables.values()
        for role, variable in variables.items()
        for shard in variable.variables
    }
    given = dict(zip((a.name for a in function.signature.input_arg), (t.name for t in call.inputs), strict=True))
    reads = {n.name: handles[given[n.input[0]]] for n in function.node_def if n.op == "ReadVariableOp"}
    return [_load(node, reads) for node in function.node_def if node.op.startswith("LoadTPUEmbedding")]


def _load(node: Any, reads: Mapping[str, str]) -> Load:
    arguments = [argument.name for argument in op_def_registry.get(node.op).input_arg]
    sources = [reads[source.split(":")[0]] for source in node.input if not source.startswith("^")]
    inputs = dict(zip(arguments, sources, strict=True))
    attributes = node.attr
    return Load(
        node.op,
        attributes["table_name"].s.decode(),
        attributes["shard_id"].i,
        attributes["num_shards"].i,
        inputs,
    )


def _initial(graph: Any, tables: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Array]]:
    """What the hosts' variables are initialized with."""
    values = {
        name: {role: [shard.initializer.inputs[1] for shard in v.variables] for role, v in variables.items()}
        for name, variables in tables.items()
    }
    found = _run(graph, values, 0, {})
    return {name: {role: np.concatenate(v) for role, v in variables.items()} for name, variables in found.items()}
