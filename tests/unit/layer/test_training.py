"""Steps in branches, steps that fail, and what a step's graph reads."""

import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding
from tpuembed.compat import tfrs
from tpuembed.errors import TrainingError


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
    layer = TPUEmbedding(FeatureConfig(TableConfig(rows, 3, "t")), optimizer="adam")

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(tf.constant([[1, 5], [1, 1]])))
        layer.apply_gradients(tape.gradient(loss, layer.trainable_variables))

    operations = step.get_concrete_function().graph.get_operations()
    assert "ResourceScatterUpdate" in {op.type for op in operations}, "the update is in this graph"
    assert [op.name for op in operations for out in op.outputs if rows in out.shape.as_list()] == []
