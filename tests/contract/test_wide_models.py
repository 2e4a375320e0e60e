"""Models that join many activations, and uses of activations whose gradients have unknown shapes while TensorFlow traces them.

Each model trains the same rows twice: in this layer, and in `keras.layers.Embedding` with the same optimizer.
"""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.messages import refused
from tpuembed import SGD, FeatureConfig, TableConfig, TPUEmbedding
from tpuembed.errors import TrainingError

ROWS, DIM, EXAMPLES, BATCH, HOT = 30, 4, 10, 4, 3  # batches of 4, 4 and 2 examples
Join = Callable[[list[Any]], Any]


def begin(name: str) -> Any:
    rows = np.random.default_rng(int(name[1:])).normal(size=(ROWS, DIM)).astype(np.float32)
    return lambda *_, **__: rows


class Ranking(keras.Model):
    """Scores what `join` makes of all activations. The truth has one keras.layers.Embedding for each feature."""

    def __init__(self, names: list[str], kind: str, join: Join, is_truth: bool) -> None:
        super().__init__()
        self.names, self.kind, self.join, self.is_truth = names, kind, join, is_truth
        if is_truth:
            self.embeddings = [keras.layers.Embedding(ROWS, DIM, begin(name), name=name) for name in names]
        else:
            tables = {name: TableConfig(ROWS, DIM, name, initializer=begin(name)) for name in names}
            length = HOT if kind == "sequence" else 0
            features = {name: FeatureConfig(table, max_sequence_length=length) for name, table in tables.items()}
            self.layer = TPUEmbedding(features, SGD(0.1))
        self.head = keras.layers.Dense(1, kernel_initializer=keras.initializers.RandomNormal(seed=1))

    def call(self, features: Mapping[str, Any]) -> Any:
        if self.is_truth:
            found = [self.by_keras(table, features[table.name]) for table in self.embeddings]
        else:
            activations = self.layer(features)
            found = [activations[name] for name in self.names]
        joined = self.join(found)
        return self.head(keras.ops.mean(joined, 1) if len(joined.shape) == 3 else joined)

    def by_keras(self, table: Any, ids: Any) -> Any:
        """Lists of ids are averaged, sequences are padded with zeros."""
        if self.kind == "dense":
            return table(ids)
        lists = tf.RaggedTensor.from_sparse(ids) if isinstance(ids, tf.SparseTensor) else ids
        rows = lists.with_flat_values(table(lists.flat_values))
        return rows.to_tensor(shape=[None, HOT, DIM]) if self.kind == "sequence" else tf.reduce_mean(rows, 1)

    def tables(self) -> dict[str, Any]:
        if self.is_truth:
            return {table.name: table.embeddings.numpy() for table in self.embeddings}
        return {config.name: table.numpy() for config, table in self.layer.embedding_tables.items()}


def data_of(names: list[str], kind: str) -> tf.data.Dataset:
    random = np.random.default_rng(5)
    features: dict[str, Any] = {}
    for name in names:
        if kind == "dense":
            features[name] = random.permutation(ROWS)[:EXAMPLES]
            continue
        lengths = random.integers(1, HOT + 1, EXAMPLES)
        features[name] = tf.RaggedTensor.from_row_lengths(random.permutation(ROWS)[: lengths.sum()], lengths)
    labels = random.normal(size=(EXAMPLES, 1)).astype(np.float32)
    batches = tf.data.Dataset.from_tensor_slices((features, labels)).batch(BATCH)
    if kind != "sparse":
        return batches
    return batches.map(lambda x, y: ({name: ids.to_sparse() for name, ids in x.items()}, y))


def train(model: Ranking, way: str, data: tf.data.Dataset, eagerly: bool) -> None:
    optimizer: Any = keras.optimizers.SGD(0.1)
    if keras.config.dtype_policy().compute_dtype == "float16":  # Keras scales by 32,768: the first gradients overflow
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=16.0)
    if way == "fit":
        model.compile(optimizer, "mse", run_eagerly=eagerly)
        model.fit(data, shuffle=False, verbose=0)
        return
    model(next(iter(data))[0])
    optimizer.build(model.trainable_variables)

    def step(features: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(features) - labels))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    # The dataset's signature: the batch has no size while the step is traced.
    traced = {"loop": {"input_signature": data.element_spec}, "xla": {"jit_compile": True, "reduce_retracing": True}}
    run = step if eagerly else tf.function(step, **traced[way])
    for features, labels in data:
        run(features, labels)


def _concatenate(activations: list[Any]) -> Any:
    return keras.ops.concatenate(activations, -1)


def _sizes_at_run_time(activation: Any) -> Any:
    one = tf.shape(activation)[0] * 0 + 1
    return tf.ensure_shape(tf.split(activation, [one, DIM - 1], axis=1)[1], [None, DIM - 1])


def _slice_at_run_time(activation: Any) -> Any:
    return tf.slice(activation, [0, 1], [tf.shape(activation)[0], 2])


def _py_function(activation: Any) -> Any:
    return tf.ensure_shape(tf.py_function(lambda given: given * 2.0, [activation], tf.float32), [None, DIM])


@tf.custom_gradient
def _gradient_by_python(activation: Any) -> Any:
    return tf.identity(activation), lambda given: tf.py_function(lambda value: value * 0.5, [given], tf.float32)


def first(use: Callable[[Any], Any]) -> Join:
    return lambda activations: tf.concat([use(activations[0]), *activations[1:]], 1)


@pytest.mark.parametrize(
    ("count", "kind", "join", "way", "policy"),
    [
        (17, "dense", keras.ops.hstack, "fit", "float32"),
        (26, "dense", keras.layers.Concatenate(), "loop", "float32"),
        (17, "ragged", _concatenate, "fit", "float32"),
        (17, "sparse", _concatenate, "loop", "float32"),
        (17, "sequence", _concatenate, "fit", "float32"),
        (17, "dense", _concatenate, "xla", "float32"),
        (17, "dense", _concatenate, "fit", "mixed_bfloat16"),
        (17, "dense", _concatenate, "fit", "mixed_float16"),
        *(
            (2, "dense", first(use), way, "float32")
            for use in (_sizes_at_run_time, _slice_at_run_time, _py_function, _gradient_by_python)
            for way in ("fit", "loop")
        ),
    ],
)
def test_a_model_trains_as_with_keras(count: int, kind: str, join: Join, way: str, policy: str) -> None:
    names, found = [f"f{index}" for index in range(count)], []
    keras.config.set_dtype_policy(policy)
    try:
        for is_truth in (True, False):
            model = Ranking(names, kind, join, is_truth)
            # Tracing Keras' layers takes longer than all of their steps. In half precision a graph rounds at other places.
            train(model, way, data_of(names, kind), eagerly=is_truth and policy == "float32")
            found.append({**model.tables(), "head": model.head.kernel.numpy()})
    finally:
        keras.config.set_dtype_policy("float32")
    for name, rows in found[0].items():
        assert name == "head" or np.abs(rows - begin(name)()).max() > 1e-3, "a table that does not move proves nothing"
        np.testing.assert_allclose(found[1][name], rows, rtol=0, atol=1e-5, err_msg=name)


# ---- gradients of other shapes

WRONG: dict[str, Callable[[Any], Any]] = {
    "wider": lambda given: tf.concat([given, given], 1),
    "another rank": lambda given: given[None],
    "fewer examples": lambda given: given[1:],
    "python": lambda given: tf.py_function(lambda value: value[1:], [given], tf.float32),
    "python, another rank": lambda given: tf.py_function(lambda value: value[0], [given], tf.float32),
    # Grappler merges sizes that later operations need to be equal: the batch would be 4, or 7, and the check true.
    "transposed": tf.transpose,
    "another batch": lambda _: tf.ones([7, DIM]),
}


@pytest.mark.parametrize(
    ("change", "mode", "optimizer"),
    [
        ("wider", "eager", "sgd"), ("fewer examples", "eager", "sgd"), ("another rank", "eager", "sgd"),
        ("wider", "function", "sgd"), ("fewer examples", "function", "sgd"), ("another rank", "function", "sgd"),
        ("python", "function", "sgd"), ("transposed", "function", "sgd"), ("transposed", "function", "adagrad"),
        ("another batch", "function", "sgd"), ("another batch", "function", "adagrad"),
        ("python", "static", "sgd"), ("python, another rank", "static", "sgd"), ("fewer examples", "xla", "sgd"),
    ],
)  # fmt: skip
def test_a_gradient_of_a_different_shape_changes_no_table(change: str, mode: str, optimizer: str) -> None:
    layer = TPUEmbedding({name: FeatureConfig(TableConfig(ROWS, DIM, name)) for name in ("good", "bad")}, optimizer)
    before = {config.name: variable.numpy() for config, variable in layer.embedding_tables.items()}

    @tf.custom_gradient
    def use(activation: Any) -> Any:
        return tf.identity(activation), WRONG[change]

    def step(bad: Any, good: Any) -> Any:
        with tf.GradientTape() as tape:
            activations = layer({"bad": bad, "good": good})
            loss = tf.reduce_sum(use(activations["bad"])) + tf.reduce_sum(activations["good"])
        gradients = tape.gradient(loss, layer.trainable_variables)
        layer.apply_gradients(gradients)
        return gradients

    signature = [tf.TensorSpec([None], tf.int64)] * 2
    run = {
        "eager": step,
        "function": tf.function(step, input_signature=signature),
        "static": tf.function(step),  # traced for a batch of three
        "xla": tf.function(step, input_signature=signature, jit_compile=True),
    }[mode]
    ids = tf.constant([1, 2, 3], tf.int64), tf.constant([4, 5, 6], tf.int64)
    # TensorFlow names the check that fails while it runs; while it traces, the layer names the feature.
    words = (
        r"different shape than its activations.*\[bad\]?.*2 4.*3 4"
        if (change, mode) == ("python", "function")
        else "shape|size"
    )
    for _ in range(10 if mode == "function" else 1):  # the order of two tables may differ
        if mode == "eager":
            with refused(TrainingError):
                run(*ids)
        else:
            with pytest.raises((TrainingError, tf.errors.InvalidArgumentError, ValueError), match=words):
                run(*ids)
    for config, variable in layer.embedding_tables.items():
        np.testing.assert_array_equal(variable.numpy(), before[config.name])
    assert int(layer.updates.numpy()) == 0
