"""Stage 1: the step that `tpuembed.TPUEmbedding` traces in a TPUStrategy, as TensorFlow's MLIR. In tensorflow-tpu's environment."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from google.protobuf import text_format  # type: ignore[import-untyped, unused-ignore]
from tensorflow.core.framework import types_pb2
from tensorflow.python import pywrap_mlir

import tpuembed.config
from tests.tpu import shims
from tests.tpu.broken import breaking
from tests.tpu.cells import MODELS, NO_LOOP, Cell, Model, Table
from tests.tpu.expected import LEARNING_RATE, OPTIONS
from tests.tpu.jobs import serve
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding

__all__ = ["traced"]

_STEPS = 3  # of a loop on the device; pipelining overlaps them


def traced(cell: Cell) -> str:
    """The step of `cell` as an MLIR module; pipelined ones in a loop on the device."""
    feature = "V2" if cell.path == "sparsecore" else "UNSUPPORTED"
    cluster = shims.made_up_cluster(feature, cell.replicas, cell.hardware.sparse_cores)
    with breaking(cell.broken), cluster as strategy:
        step, signature = _step(cell, strategy)
        run = _looped if cell.pipelining and cell.broken != NO_LOOP.broken else _once
        function = run(strategy, step).get_concrete_function(*signature)
        return _imported(function.graph, cell.replicas)


def _once(strategy: Any, step: Callable[..., Any]) -> Any:
    @tf.function
    def run(*inputs: Any) -> Any:
        return strategy.experimental_local_results(strategy.run(step, args=inputs))[0]

    return run


def _looped(strategy: Any, step: Callable[..., Any]) -> Any:
    @tf.function
    def run(*inputs: Any) -> Any:
        for _ in tf.range(_STEPS):
            strategy.run(step, args=inputs)
        return tf.constant(0.0)

    return run


# ---- the model


def _step(cell: Cell, strategy: Any) -> tuple[Callable[..., Any], Sequence[Any]]:
    """The step of one replica, and the signature of its inputs."""
    model = MODELS[cell.tables]
    with strategy.scope():
        layer = _layer(cell, model)
        dense = keras.layers.Dense(model.units)
        dense.build((None, sum(table.dim for table in model.tables)))
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(layer.trainable_variables + dense.trainable_variables)

    def loss(ids: Any, weights: Any, target: Any) -> Any:
        activations = layer(*tf.nest.map_structure(shims.width_of_batch, (ids, weights)))
        outputs = dense(tf.concat([activations[table.name] for table in model.tables], -1))
        return tf.reduce_mean(tf.square(outputs - target))

    def train(*inputs: Any) -> Any:
        with tf.GradientTape() as tape:
            value = loss(*inputs)
        variables = layer.trainable_variables + dense.trainable_variables
        optimizer.apply(tape.gradient(value, variables), variables)
        return value

    return train if cell.training else loss, _signature(cell, model)


def _layer(cell: Cell, model: Model) -> Any:
    features = {table.name: FeatureConfig(_table(cell, table), output_shape=(model.batch,)) for table in model.tables}
    optimizer = getattr(tpuembed.config, cell.optimizer)(learning_rate=LEARNING_RATE, **OPTIONS[cell.optimizer])
    on_sparse_cores: dict[str, Any] = {}
    if cell.path == "sparsecore":
        stacking = tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig(
            max_ids_per_chip_per_sample=model.ids_per_sample
        )
        on_sparse_cores = {
            "sparse_core_embedding_config": stacking,
            "pipeline_execution_with_tensor_core": cell.pipelining,
        }
    return TPUEmbedding(features, optimizer=optimizer, track_rows=cell.tracked, **on_sparse_cores)


def _table(cell: Cell, table: Table) -> TableConfig:
    return TableConfig(
        table.rows,
        table.dim,
        table.name,
        combiner=cell.combiner,
        max_ids_per_partition=table.max_ids,
        max_unique_ids_per_partition=table.max_unique_ids,
    )


def _signature(cell: Cell, model: Model) -> Sequence[Any]:
    def of_features(dtype: Any) -> dict[str, Any]:
        return {table.name: tf.SparseTensorSpec([model.batch, model.hot], dtype) for table in model.tables}

    target = tf.TensorSpec([model.batch, model.units], tf.float32)
    return of_features(tf.int64), of_features(tf.float32) if cell.weighted else None, target


# ---- from a graph to MLIR


def _imported(function: Any, replicas: int) -> str:
    graph = function.as_graph_def()
    captures = {inner.op.name: outer for outer, inner in function.captures}
    inputs = [tensor for tensor in function.inputs if tensor.op.name not in captures]
    shims.variables_by_shape(graph, captures)
    shims.packed_variables(graph)
    topology = shims.topology_by_name(graph)
    [output] = function.outputs
    result = shims.result_after_updates(
        graph, output.op.name, [operation.name for operation in function.control_outputs]
    )
    text = pywrap_mlir.ImportGraphDef(
        text_format.MessageToString(graph).encode(),
        b"",
        False,
        ",".join(tensor.op.name for tensor in inputs).encode(),
        ",".join(types_pb2.DataType.Name(tensor.dtype.as_datatype_enum) for tensor in inputs).encode(),
        ":".join(_dimensions(tensor.shape) for tensor in inputs).encode(),
        result.encode(),
    )
    return shims.devices_and_topology(text, replicas, topology)


def _dimensions(shape: Any) -> str:
    return ",".join(str(-1 if size is None else size) for size in shape)


def trace(cell: Cell, folder: Path) -> dict[str, Any]:
    """Write the module of `cell`."""
    text = traced(cell)
    (folder / f"{cell.name}.tf.mlir").write_text(text)
    return {"characters": len(text)}


if __name__ == "__main__":
    serve(trace)
