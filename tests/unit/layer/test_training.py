"""Training: the tables' numbers after steps of every kind of loop, against float64 and against TensorFlow's own kernels."""

import json
import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.layer.models import OPTIMIZERS, Reference, assert_same_numbers, one_table
from tests.support.messages import refused
from tpuembed import SGD, Adagrad, FeatureConfig, TableConfig, TPUEmbedding
from tpuembed.compat import tfrs
from tpuembed.config import optimizer_from
from tpuembed.errors import ConfigError, TrainingError

FIRST = np.array([[1, 5], [1, 1], [7, 0]])
SECOND = np.array([5, 1, 11])
INPUTS = {"first": FIRST, "second": SECOND}
SLOPES = np.random.default_rng(3).normal(size=(3, 3, 3))  # of the three rows of each example, in the loss below


def _loss(activations: dict[str, Any]) -> Any:
    return tf.reduce_sum(activations["first"] * SLOPES[:, :2]) + tf.reduce_sum(activations["second"] * SLOPES[:, 2])


def _reference_step(reference: Reference, rate: float | None = None) -> None:
    ids = np.concatenate([FIRST.ravel(), SECOND])
    gradients = np.concatenate([SLOPES[:, :2].reshape(-1, 3), SLOPES[:, 2]])
    reference.step(ids, gradients, rate)


def _make(optimizer: Any) -> tuple[Any, Any, Reference]:
    keras.utils.set_random_seed(1)  # what float32 rounds differs from table to table
    layer = TPUEmbedding(one_table(), optimizer=optimizer)
    (table,) = layer.embedding_tables.values()
    return layer, table, Reference(table.numpy(), optimizer)


def _eager(layer: Any) -> None:
    with tf.GradientTape() as tape:
        loss = _loss(layer(INPUTS))
    gradients = tape.gradient(loss, layer.trainable_variables)
    np.testing.assert_array_equal(gradients[0], [0.0])
    layer.apply_gradients(gradients)


def _grad(layer: Any, call: Callable[[Any], Any]) -> Any:
    with tf.GradientTape() as tape:
        loss = _loss(call(INPUTS))
    gradients = tape.gradient(loss, layer.trainable_variables)
    layer.apply_gradients(gradients)
    return gradients


def _nested(layer: Any) -> Callable[[], Any]:
    inner = tf.function(lambda x: layer(x))
    return tf.function(lambda: _grad(layer, inner))


def _over_a_function(layer: Any) -> Callable[[], Any]:
    forward = tf.function(lambda x: layer(x))
    return lambda: _grad(layer, forward)


# Each makes a layer's step, which is traced once however often it is called.
STEPS: dict[str, Callable[[Any], Callable[[], Any]]] = {
    "eager": lambda layer: lambda: _eager(layer),
    "function": lambda layer: tf.function(lambda: _grad(layer, layer)),
    "nested function": _nested,
    "eager loop over a function": _over_a_function,
    "jit": lambda layer: tf.function(lambda: _grad(layer, layer), jit_compile=True),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.sampled(12)
def test_one_update_per_step_in_every_loop(kind: str, step: str) -> None:
    layer, table, reference = _make(OPTIMIZERS[kind])
    update = STEPS[step](layer)
    for _ in range(20 if step == "eager" else 3):
        update()
        _reference_step(reference)
    assert_same_numbers(table.numpy(), reference.table)
    for slot, values in reference.slots.items():
        found = next(w for w in layer.weights if w.path.endswith(f"items_{slot}"))
        assert_same_numbers(found.numpy(), values, slot)


def test_slots_may_be_made_by_the_user() -> None:
    made: dict[str, Any] = {}

    def create(table: Any, names: list[str], initializers: list[Any]) -> dict[str, Any]:
        made.update({n: tf.Variable(i(table.shape, tf.float32)) for n, i in zip(names, initializers, strict=True)})
        return made

    layer, _, reference = _make(
        Adagrad(learning_rate=0.2, initial_accumulator_value=0.4, slot_variable_creation_fn=create)
    )
    _eager(layer)
    _reference_step(reference)
    np.testing.assert_allclose(made["accumulators"].numpy(), reference.slots["accumulators"], rtol=1e-6, atol=1e-7)
    with refused(ConfigError, match="slot_variable_creation_fn"):
        _make(Adagrad(slot_variable_creation_fn=lambda *_: {}))


# ---- Keras


class _Sum(keras.layers.Layer):
    def call(self, x: dict[str, Any]) -> Any:
        return keras.ops.sum(x["first"] * SLOPES[:, :2], (1, 2)) + keras.ops.sum(x["second"] * SLOPES[:, 2], 1)


def _keras_model(optimizer: Any) -> tuple[Any, Any, Reference]:
    inputs = {
        "first": keras.Input((2,), dtype="int64", name="first"),
        "second": keras.Input((), dtype="int64", name="second"),
    }
    layer = TPUEmbedding(one_table(), optimizer=optimizer)
    model = keras.Model(inputs, _Sum()(layer(inputs)))
    (table,) = layer.embedding_tables.values()
    return model, table, Reference(table.numpy(), optimizer)


def _sum_loss(_: Any, predicted: Any) -> Any:
    return keras.ops.sum(predicted) / 3.0 * 3.0


def test_two_layers_of_a_traced_function_train_without_waiting_for_each_other() -> None:
    layer = _two_tables("PartialTPUEmbedding")
    forward = tf.function(lambda ids: layer({"first": ids, "second": ids}))

    @tf.function
    def step(ids: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(activation) for activation in forward(ids).values()])
        gradients = tape.gradient(loss, layer.trainable_variables)
        layer.apply_gradients(gradients)
        return gradients

    def train() -> None:
        for _ in range(200):
            step(tf.constant([1], tf.int64))

    thread = threading.Thread(target=train, daemon=True)  # a step of TensorFlow that waits for ever heeds no signal
    thread.start()
    thread.join(120)
    assert not thread.is_alive()


def test_two_calls_of_a_traced_function_are_two_updates() -> None:
    layer, table, reference = _make(OPTIMIZERS["sgd"])
    forward = tf.function(lambda: _loss(layer(INPUTS)))
    for _ in range(40):
        with tf.GradientTape() as tape:
            loss = forward() + forward()
        layer.apply_gradients(tape.gradient(loss, layer.trainable_variables))
        _reference_step(reference)
        _reference_step(reference)
    np.testing.assert_allclose(table.numpy(), reference.table, rtol=1e-5, atol=1e-4)


def test_one_traced_call_may_be_differentiated_in_several_places() -> None:
    layer, table, reference = _make(OPTIMIZERS["sgd"])
    forward = tf.function(lambda: _loss(layer(INPUTS)))

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = forward()
        layer.apply_gradients(tape.gradient(loss, layer.trainable_variables))

    step()
    tf.function(step)()
    tf.function(step)()
    for _ in range(3):
        _reference_step(reference)
    np.testing.assert_allclose(table.numpy(), reference.table, atol=2e-6)


# ---- learning rates


@pytest.mark.parametrize("kind", ["optimizer of Keras", "schedule", "callable"])
def test_a_traced_step_reads_the_rate_of_each_update(kind: str) -> None:
    source, rate = keras.optimizers.SGD(0.5), tf.Variable(0.5)
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0, 1], [0.5, 0.125, 2.0])
    optimizers = {
        "optimizer of Keras": source,
        "schedule": keras.optimizers.SGD(schedule),
        "callable": SGD(learning_rate=lambda: rate),
    }
    layer = TPUEmbedding(one_table(), optimizer=optimizers[kind])
    (table,) = layer.embedding_tables.values()
    reference = Reference(table.numpy(), SGD(learning_rate=0.5))
    step = tf.function(lambda: _grad(layer, layer))
    for value in (0.5, 0.125, 2.0, 2.0):
        source.learning_rate = value
        rate.assign(value)
        step()
        _reference_step(reference, value)
    np.testing.assert_allclose(table.numpy(), reference.table, atol=1e-6)


@pytest.mark.parametrize("value", [0.5, 1, np.float32(0.5), np.float64(0.5), np.array(0.5), np.int64(1)])
def test_a_rate_that_tracing_would_freeze_is_refused(value: Any) -> None:
    """One of numpy was taken, and frozen. Eagerly it is read at every update."""
    layer, table, reference = _make(SGD(learning_rate=lambda: value))
    kind = "numpy" if isinstance(value, np.generic | np.ndarray) else "Python"
    with refused(TrainingError, match=f"{kind} number"):
        tf.function(lambda: _grad(layer, layer))()
    _eager(layer)
    _reference_step(reference, float(value))
    np.testing.assert_allclose(table.numpy(), reference.table, atol=1e-6)


E = tf.tpu.experimental.embedding


@pytest.mark.parametrize(
    "make",
    [
        lambda: E.Adagrad(1, initial_accumulator_value=10),
        lambda: optimizer_from(
            {"kind": "adagrad", "learning_rate": np.float32(1), "initial_accumulator_value": np.int64(10)}
        ),
        lambda: keras.optimizers.Adagrad(1.0, initial_accumulator_value=10),
        lambda: E.AdagradMomentum(1, momentum=0, beta2=1, exponent=2, epsilon=1),
        lambda: E.Adam(1, beta_1=0, epsilon=1),
        lambda: E.FTRL(1, learning_rate_power=-1, beta=1, initial_accumulator_value=1, l1_regularization_strength=1),
        lambda: keras.optimizers.Ftrl(0.1, initial_accumulator_value=1, l1_regularization_strength=1),
        lambda: E.SGD(1, weight_decay_factor=1, clipvalue=1, clip_weight_min=-1, clip_weight_max=1),
        lambda: E.SGD(1, clipvalue=(-1, 2)),
    ],
)
@pytest.mark.sampled(1)
def test_hyper_parameters_may_be_integers(make: Callable[[], Any]) -> None:
    optimizer = make()
    layer = TPUEmbedding(one_table(), optimizer=optimizer)
    (table,) = layer.embedding_tables.values()
    spec = next(iter(layer.core.backend.states.values())).optimizer
    reference = Reference(table.numpy(), spec)
    rate = float(optimizer.learning_rate) if isinstance(optimizer, keras.optimizers.Optimizer) else None
    for step in STEPS.values():
        step(layer)()
        _reference_step(reference, rate)
    assert_same_numbers(table.numpy(), reference.table, type(optimizer).__name__)
    for name, slot in layer.named_variables().items():
        if "/" in name:
            assert_same_numbers(slot.numpy(), reference.slots[name.split("/")[1]], name)
    json.dumps(layer.get_config())


# ---- branches and loops


def _true() -> Any:
    """True, which no graph knows before it runs."""
    return tf.random.uniform([]) >= 0.0


INSIDE: dict[str, Callable[[Callable[[Any], Any]], Any]] = {
    "cond": lambda call: tf.cond(_true(), lambda: call(tf.constant([1])), lambda: 0.0),
    "switch_case": lambda call: tf.switch_case(
        tf.cast(_true(), tf.int32), [lambda: 0.0, lambda: call(tf.constant([1]))]
    ),
    "while_loop": lambda call: tf.while_loop(
        lambda i, _: i < 3, lambda i, s: (i + 1, s + call(tf.reshape(i, [1]))), (0, 0.0), maximum_iterations=3
    )[1],
    "map_fn": lambda call: tf.reduce_sum(
        tf.map_fn(lambda i: call(i[None]), tf.range(3), fn_output_signature=tf.float32)
    ),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", INSIDE)
@pytest.mark.sampled(6)
def test_a_call_in_a_branch_or_loop_is_refused_where_the_gradient_is_outside(
    kind: str, nested: bool, jit: bool
) -> None:
    layer = TPUEmbedding(FeatureConfig(TableConfig(4, 2, "t")), "sgd")
    look_up = tf.function(layer, input_signature=[tf.TensorSpec([None], tf.int32)]) if nested else layer

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = INSIDE[kind](lambda ids: tf.reduce_sum(look_up(ids)))
        gradients = tape.gradient(loss, layer.trainable_variables)
        layer.apply_gradients(gradients)
        return gradients

    with refused(TrainingError, match="switch_case"):
        tf.function(step, jit_compile=jit)()
    assert int(layer.updates.numpy()) == 0


@pytest.mark.parametrize("kind", INSIDE)
def test_a_step_in_a_branch_or_loop_updates_once_each_time(kind: str) -> None:
    layer = TPUEmbedding(FeatureConfig(TableConfig(4, 2, "t")), SGD(learning_rate=1.0))
    (table,) = layer.embedding_tables.values()
    before = table.numpy()

    def step(ids: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids))
        layer.apply_gradients(tape.gradient(loss, layer.trainable_variables))
        return loss

    tf.function(lambda: INSIDE[kind](step))()
    changed = [1] if kind in ("cond", "switch_case") else [0, 1, 2]
    expected = before.copy()
    expected[changed] -= 1.0
    np.testing.assert_allclose(table.numpy(), expected, atol=1e-6)
    assert int(layer.updates.numpy()) == len(changed)


def test_lookups_in_branches_and_loops_are_rows() -> None:
    layer = TPUEmbedding(FeatureConfig(TableConfig(4, 2, "t")), "sgd")
    (table,) = layer.embedding_tables.values()
    for kind, inside in INSIDE.items():
        rows = [1] if kind in ("cond", "switch_case") else [0, 1, 2]
        found = tf.function(lambda inside=inside: inside(lambda ids: tf.reduce_sum(layer(ids))))()
        np.testing.assert_allclose(found, table.numpy()[rows].sum(), rtol=1e-5)


# ---- cost and safety


def _two_tables(kind: str) -> Any:
    first, second = TableConfig(4, 2, "first", optimizer="adagrad"), TableConfig(40, 2, "second")
    features = {"first": FeatureConfig(first), "second": FeatureConfig(second)}
    if kind == "PartialTPUEmbedding":
        return tfrs.PartialTPUEmbedding(features, "sgd", size_threshold=10)
    return TPUEmbedding(features, "sgd" if kind == "two trained" else None)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("way", ["static", "dynamic", "nested", "eager over a function", "fit"])
@pytest.mark.parametrize("kind", ["two trained", "one trained by the model", "PartialTPUEmbedding"])
def test_a_step_that_fails_on_an_id_of_one_table_updates_none(kind: str, way: str) -> None:
    layer = _two_tables(kind)
    tables = list(layer.embedding_tables.values())
    before = [table.numpy() for table in tables]
    inner = tf.function(lambda first, second: layer({"first": first, "second": second}))

    def step(first: Any, second: Any, call: Any = None) -> Any:
        with tf.GradientTape() as tape:
            found = call(first, second) if call else layer({"first": first, "second": second})
            loss = tf.add_n([tf.reduce_sum(activation) for activation in found.values()])
        optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
        return loss

    optimizer = keras.optimizers.SGD()
    optimizer.build(layer.trainable_variables)
    model = keras.Sequential([layer, keras.layers.Lambda(lambda rows: rows["first"] + rows["second"])])
    model.compile("sgd", "mae")
    ways: dict[str, Callable[[Any, Any], Any]] = {
        "static": tf.function(step),
        "dynamic": tf.function(step, input_signature=[tf.TensorSpec([None], tf.int64)] * 2),
        "nested": tf.function(lambda first, second: step(first, second, inner)),
        "eager over a function": lambda first, second: step(first, second, inner),
        "fit": lambda first, second: model.fit({"first": first, "second": second}, np.ones((1, 2)), verbose=0),
    }
    for first, second in ((1, 99), (99, 1)):
        for _ in range(5):
            with pytest.raises(tf.errors.InvalidArgumentError):
                ways[way](tf.constant([first], tf.int64), tf.constant([second], tf.int64))
            for table, truth in zip(tables, before, strict=True):
                np.testing.assert_array_equal(table, truth)
    ways[way](tf.constant([1], tf.int64), tf.constant([1], tf.int64))
    assert (tables[0].numpy()[1] != before[0][1]).all()


def test_no_op_of_a_step_is_as_large_as_the_table() -> None:
    rows = 54_321
    layer = TPUEmbedding(one_table(rows=rows), optimizer="adam")
    graph = tf.function(lambda: _grad(layer, layer)).get_concrete_function().graph
    assert "ResourceScatterUpdate" in {op.type for op in graph.get_operations()}, "the update is in this graph"
    large = [op.name for op in graph.get_operations() for out in op.outputs if rows in out.shape.as_list()]
    assert large == []
    tables = {handle.name for handle in graph.inputs}
    reads = [
        op.name
        for op in graph.get_operations()
        if op.type == "ReadVariableOp"
        and op.inputs[0].name in tables
        and op.outputs[0].shape.rank == 2
        and op.outputs[0].shape[0] == rows
    ]
    assert reads == []
