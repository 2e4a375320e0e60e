"""Models that join many activations, and uses of activations whose gradients have unknown shapes while TensorFlow traces them.

Each model trains the same rows twice: in this layer, and in `keras.layers.Embedding` with the same optimizer.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding
from tpuembed.compat import keras_rs, tfrs
from tpuembed.errors import TrainingError

ROWS, DIM, EXAMPLES, BATCH, HOT = 30, 4, 10, 4, 3  # batches of 4, 4 and 2 examples
Features = Mapping[str, Any]


def _names(count: int) -> list[str]:
    return [f"f{index}" for index in range(count)]


def _initial(name: str) -> Any:
    return np.random.default_rng(int(name[1:])).normal(size=(ROWS, DIM)).astype(np.float32)


class KerasTables(keras.layers.Layer):
    """The truth: one keras.layers.Embedding per feature. Lists of ids are averaged, sequences are padded with zeros."""

    def __init__(self, names: Sequence[str], kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.tables = [keras.layers.Embedding(ROWS, DIM, name=name) for name in names]
        for table in self.tables:
            table.build()
            table.embeddings.assign(_initial(table.name))

    def call(self, features: Features) -> dict[str, Any]:
        return {table.name: self._activations(table, features[table.name]) for table in self.tables}

    def _activations(self, table: Any, ids: Any) -> Any:
        if self.kind == "dense":
            return table(ids)
        lists = tf.RaggedTensor.from_sparse(ids) if isinstance(ids, tf.SparseTensor) else ids
        rows = lists.with_flat_values(table(lists.flat_values))
        return rows.to_tensor(shape=[None, HOT, DIM]) if self.kind == "sequence" else tf.reduce_mean(rows, 1)

    def rows(self, name: str) -> Any:
        return next(table.embeddings.numpy() for table in self.tables if table.name == name)


class OwnTables(keras.layers.Layer):
    """The layer under test."""

    def __init__(self, names: Sequence[str], kind: str, make: Callable[[Any], Any]) -> None:
        super().__init__()
        length = HOT if kind == "sequence" else 0
        self.layer = make(
            {name: FeatureConfig(TableConfig(ROWS, DIM, name), max_sequence_length=length) for name in names}
        )
        self.write_initial_rows(names)

    def write_initial_rows(self, names: Sequence[str]) -> None:
        for name in names:
            self.layer.assign_rows(name, 0, _initial(name))

    def call(self, features: Features) -> Any:
        return self.layer(features)

    def rows(self, name: str) -> Any:
        return next(v.numpy() for config, v in self.layer.embedding_tables.items() if config.name == name)


class Ranking(keras.Model):
    """Joins the activations of all features, and scores them with one dense layer."""

    def __init__(self, tables: Any, names: Sequence[str], join: Callable[[list[Any]], Any]) -> None:
        super().__init__()
        self.tables, self.names, self.join = tables, list(names), join
        self.head = keras.layers.Dense(1, kernel_initializer=keras.initializers.RandomNormal(seed=1))

    def call(self, features: Features) -> Any:
        activations = self.tables(features)
        joined = self.join([activations[name] for name in self.names])
        return self.head(keras.ops.mean(joined, 1) if len(joined.shape) == 3 else joined)


def _data(names: Sequence[str], kind: str) -> tf.data.Dataset:
    """Each id occurs once. Of an id twice in a batch, Keras' Adagrad squares the gradients before it adds them."""
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


def _fit(model: Any, optimizer: Any, data: tf.data.Dataset, *, eagerly: bool = False) -> None:
    model.compile(optimizer, "mse", run_eagerly=eagerly)
    model.fit(data, shuffle=False, verbose=0)


def _fit_with_a_small_scale(model: Any, optimizer: Any, data: tf.data.Dataset, *, eagerly: bool = False) -> None:
    """Keras scales losses of float16 by 32,768, with which the first gradients overflow."""
    if keras.config.dtype_policy().compute_dtype == "float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=16.0)
    _fit(model, optimizer, data, eagerly=eagerly)


def _own_loop(model: Any, optimizer: Any, data: tf.data.Dataset, *, eagerly: bool = False, **options: Any) -> None:
    model(next(iter(data))[0])
    optimizer.build(model.trainable_variables)

    def step(features: Features, labels: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(features) - labels))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    # The dataset's signature: the batch has no size while the step is traced.
    signature = None if options else data.element_spec
    run = step if eagerly else tf.function(step, input_signature=signature, **options)
    for features, labels in data:
        run(features, labels)


def _compiled_by_xla(model: Any, optimizer: Any, data: tf.data.Dataset, *, eagerly: bool = False) -> None:
    _own_loop(model, optimizer, data, eagerly=eagerly, jit_compile=True, reduce_retracing=True)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
}


Join = Callable[[list[Any]], Any]
Train = Callable[..., None]


def _trained(
    tables: Any, count: int, kind: str, join: Join, train: Train, optimizer: str, *, eagerly: bool = False
) -> dict[str, Any]:
    """The rows of every table, and the weights of the dense layer."""
    model = Ranking(tables, _names(count), join)
    train(model, OPTIMIZERS[optimizer](), _data(_names(count), kind), eagerly=eagerly)
    return {**{name: tables.rows(name) for name in _names(count)}, "head": model.head.kernel.numpy()}


@functools.cache
def _by_keras(count: int, kind: str, join: Join, train: Train, optimizer: str, policy: str) -> dict[str, Any]:
    """The truth, step by step in Python because tracing Keras' layers takes longer than all of its steps.

    In half precision a graph rounds at other places than Python does, so there the truth is traced too.
    """
    eagerly = policy == "float32"
    return _trained(KerasTables(_names(count), kind), count, kind, join, train, optimizer, eagerly=eagerly)


def _assert_trains_as_keras(
    count: int,
    kind: str,
    join: Join,
    train: Train = _fit,
    optimizer: str = "adagrad",
    make: Callable[[Sequence[str], str], Any] | None = None,
) -> None:
    tables = make(_names(count), kind) if make else OwnTables(_names(count), kind, _layer(OPTIMIZERS[optimizer]()))
    found = _trained(tables, count, kind, join, train, optimizer)
    truth = _by_keras(count, kind, join, train, optimizer, keras.config.dtype_policy().name)
    for name, rows in truth.items():
        assert name == "head" or np.abs(rows - _initial(name)).max() > 1e-3, "a table that does not move proves nothing"
        np.testing.assert_allclose(found[name], rows, rtol=0, atol=1e-5, err_msg=name)


def _layer(optimizer: Any, **options: Any) -> Callable[[Any], Any]:
    return lambda config: TPUEmbedding(config, optimizer, **options)


def _concatenate(activations: list[Any]) -> Any:
    return keras.ops.concatenate(activations, -1)


def _concatenate_layer(activations: list[Any]) -> Any:
    return keras.layers.Concatenate()(activations)


@pytest.mark.parametrize(
    ("count", "kind", "join", "train", "optimizer"),
    [
        (17, "dense", keras.ops.hstack, _fit, "sgd"),
        (17, "dense", _concatenate_layer, _own_loop, "sgd"),
        (26, "dense", _concatenate, _fit, "adagrad"),
        (17, "ragged", _concatenate, _fit, "adagrad"),
        (17, "sparse", _concatenate, _own_loop, "sgd"),
        (17, "sequence", _concatenate, _fit, "sgd"),
        (17, "dense", _concatenate, _compiled_by_xla, "sgd"),
    ],
)
def test_a_model_of_many_features_trains_as_with_keras(
    count: int, kind: str, join: Join, train: Train, optimizer: str
) -> None:
    _assert_trains_as_keras(count, kind, join, train, optimizer)


class OfTfrs(OwnTables):
    def write_initial_rows(self, names: Sequence[str]) -> None:
        values = {name: variable for variable in self.layer.variables for name in names if variable.name == name}
        for name, variable in values.items():
            variable.assign(_initial(name))


class OfKerasRs(OwnTables):
    def __init__(self, names: Sequence[str]) -> None:
        keras.layers.Layer.__init__(self)
        configs = {
            name: keras_rs.FeatureConfig(
                name, keras_rs.TableConfig(name, ROWS, DIM, optimizer=OPTIMIZERS["adagrad"]()), (None, 1), (None, DIM)
            )
            for name in names
        }
        self.layer = keras_rs.DistributedEmbedding(configs)
        self.layer.build(dict.fromkeys(names, (None, 1)))
        self.layer.set_embedding_tables({name: _initial(name) for name in names})

    def call(self, features: Features) -> Any:
        return self.layer({name: ids[:, None] for name, ids in features.items()})

    def rows(self, name: str) -> Any:
        return np.asarray(self.layer.get_embedding_tables()[name])


LAYERS: dict[str, Callable[[Sequence[str], str], Any]] = {
    "track_rows": lambda names, kind: OwnTables(names, kind, _layer(OPTIMIZERS["adagrad"](), track_rows=True)),
    "tfrs.TPUEmbedding": lambda names, kind: OwnTables(
        names, kind, lambda config: tfrs.TPUEmbedding(config, OPTIMIZERS["adagrad"]())
    ),
    "tfrs.PartialTPUEmbedding": lambda names, kind: OfTfrs(
        names, kind, lambda config: tfrs.PartialTPUEmbedding(config, OPTIMIZERS["adagrad"](), size_threshold=10)
    ),
    "keras_rs.DistributedEmbedding": lambda names, _: OfKerasRs(names),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_each_layer_of_the_package_trains_many_features(layer: str) -> None:
    _assert_trains_as_keras(17, "dense", _concatenate, make=LAYERS[layer])


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_many_features_in_half_precision(policy: str) -> None:
    keras.config.set_dtype_policy(policy)
    try:
        _assert_trains_as_keras(17, "dense", _concatenate, _fit_with_a_small_scale, "sgd")
    finally:
        keras.config.set_dtype_policy("float32")


# ---- gradients without static shapes


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


@pytest.mark.parametrize("use", [_sizes_at_run_time, _slice_at_run_time, _py_function, _gradient_by_python])
@pytest.mark.parametrize("train", [_fit, _own_loop])
def test_a_gradient_of_unknown_shape_trains_as_with_keras(use: Callable[[Any], Any], train: Train) -> None:
    _assert_trains_as_keras(2, "dense", lambda both: tf.concat([use(both[0]), both[1]], 1), train, "sgd")


def _wrong_gradient(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @tf.custom_gradient
    def identity(activation: Any) -> Any:
        return tf.identity(activation), change

    return identity


WRONG: dict[str, Callable[[Any], Any]] = {
    "wider": lambda given: tf.concat([given, given], 1),
    "another rank": lambda given: given[None],
    "fewer examples": lambda given: given[1:],
    "python": lambda given: tf.py_function(lambda value: value[1:], [given], tf.float32),
    "python, another rank": lambda given: tf.py_function(lambda value: value[0], [given], tf.float32),
}


@pytest.mark.parametrize(
    ("change", "mode"),
    [
        ("wider", "eager"), ("fewer examples", "eager"), ("another rank", "eager"),
        ("wider", "function"), ("fewer examples", "function"), ("another rank", "function"), ("python", "function"),
        ("python", "static"), ("python, another rank", "static"), ("fewer examples", "xla"),
    ],
)  # fmt: skip
def test_a_gradient_of_a_different_shape_changes_no_table(change: str, mode: str) -> None:
    configs = {name: FeatureConfig(TableConfig(ROWS, DIM, name)) for name in ("good", "bad")}
    layer = TPUEmbedding(configs, "sgd")
    before = {config.name: variable.numpy() for config, variable in layer.embedding_tables.items()}
    use = _wrong_gradient(WRONG[change])

    def step(ids: Any) -> Any:
        with tf.GradientTape() as tape:
            activations = layer({"good": ids, "bad": ids})
            loss = tf.reduce_sum(activations["good"]) + tf.reduce_sum(use(activations["bad"]))
        gradients = tape.gradient(loss, layer.trainable_variables)
        layer.apply_gradients(gradients)
        return gradients

    signature = [tf.TensorSpec([None], tf.int64)]
    run = {
        "eager": step,
        "function": tf.function(step, input_signature=signature),
        "static": tf.function(step),  # traced for a batch of three
        "xla": tf.function(step, input_signature=signature, jit_compile=True),
    }[mode]
    ids = tf.constant([1, 2, 3], tf.int64)
    if mode == "eager":
        with refused(TrainingError):
            run(ids)
    else:
        # TensorFlow names the check that fails while it runs; while it traces, the layer names the feature.
        with pytest.raises((TrainingError, tf.errors.InvalidArgumentError, ValueError), match=r"shape|size"):
            run(ids)
    for config, variable in layer.embedding_tables.items():
        np.testing.assert_array_equal(variable.numpy(), before[config.name])
    assert int(layer.updates.numpy()) == 0


def test_the_running_step_names_the_feature_and_both_shapes() -> None:
    layer = TPUEmbedding({name: FeatureConfig(TableConfig(ROWS, DIM, name)) for name in ("a", "b", "c")}, "sgd")
    use = _wrong_gradient(WRONG["python"])

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def step(ids: Any) -> Any:
        with tf.GradientTape() as tape:
            activations = layer({"a": ids, "b": ids, "c": ids})
            loss = tf.add_n([tf.reduce_sum(activations["a"]), tf.reduce_sum(use(activations["b"]))])
        gradients = tape.gradient(loss, layer.trainable_variables)
        layer.apply_gradients(gradients)
        return gradients

    with pytest.raises(tf.errors.InvalidArgumentError, match=r"different shape.*\[b\]?.*2 4.*3 4") as raised:
        step(tf.constant([1, 2, 3], tf.int64))
    assert "different shape than its activations" in str(raised.value)


@pytest.mark.parametrize("change", [tf.transpose, lambda _: tf.ones([7, 2])], ids=["transposed", "of another batch"])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_grappler_does_not_drop_the_check(optimizer: str, change: Callable[[Any], Any]) -> None:
    """It merges sizes that later operations need to be equal: the batch would be 2, or 7, and the check true."""
    layer = TPUEmbedding({name: FeatureConfig(TableConfig(ROWS, 2, name)) for name in ("good", "bad")}, optimizer)
    bad, good = tf.constant([1, 2, 3], tf.int64), tf.constant([4, 5, 6], tf.int64)
    layer({"bad": bad, "good": good})
    before = {config.name: variable.numpy() for config, variable in layer.embedding_tables.items()}
    use = _wrong_gradient(change)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)] * 2)
    def step(bad: Any, good: Any) -> Any:
        with tf.GradientTape() as tape:
            activations = layer({"bad": bad, "good": good})
            loss = tf.reduce_sum(use(activations["bad"])) + tf.reduce_sum(activations["good"])
        gradients = tape.gradient(loss, layer.trainable_variables)
        layer.apply_gradients(gradients)
        return gradients

    for _ in range(10):  # the order of two tables may differ
        with pytest.raises(tf.errors.InvalidArgumentError, match="different shape than its activations"):
            step(bad, good)
    for config, variable in layer.embedding_tables.items():
        np.testing.assert_array_equal(variable.numpy(), before[config.name])
