"""How each optimizer moves a table and its slots: in fit and in loops, against the rules in float64.

The rules are those of the TPU (tensorflow/core/protobuf/tpu/optimization_parameters.proto): the gradients of a row that
occurs several times in a batch are summed, and the row moves once.
"""

import functools
import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tpuembed
from tests.support.layer.models import OPTIMIZERS, Reference, assert_same_numbers
from tests.support.messages import refused
from tpuembed import FTRL, SGD, Adagrad, FeatureConfig, TableConfig, TPUEmbedding, open_checkpoint
from tpuembed.errors import TrainingError

Array = np.ndarray[Any, Any]
E = tf.tpu.experimental.embedding

ROWS, DIM, BATCH, STEPS = 12, 3, 8, 4
_RANDOM = np.random.default_rng(1)
PAIRS = _RANDOM.integers(0, ROWS, (STEPS * BATCH, 2))  # many rows occur twice in a batch
ONES = _RANDOM.integers(0, ROWS - 2, STEPS * BATCH)
SLOPES = _RANDOM.normal(size=(STEPS * BATCH, 3, DIM)).astype(np.float32)  # the gradient of each looked up row


TENSORFLOWS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"learning_rate": 0.3}),
    (
        "SGD",
        {"learning_rate": 1, "weight_decay_factor": 1, "clipvalue": 1, "clip_weight_min": -1, "clip_weight_max": 1},
    ),
    ("SGD", {"learning_rate": 1, "clipvalue": (-1, 2)}),
    ("Adagrad", {"learning_rate": 0.2, "initial_accumulator_value": 0.4, "clipvalue": (None, 0.5)}),
    ("Adagrad", {"learning_rate": 1, "initial_accumulator_value": 10, "use_gradient_accumulation": True}),
    ("AdagradMomentum", {"learning_rate": 0.1, "momentum": 0.7, "use_nesterov": True, "exponent": 3.0, "beta2": 0.6}),
    ("AdagradMomentum", {"learning_rate": 1, "momentum": 0, "beta2": 1, "exponent": 2, "epsilon": 1}),
    ("Adam", {"learning_rate": 0.05, "beta_1": 0.75, "beta_2": 0.875, "epsilon": 1e-3}),
    ("Adam", {"learning_rate": 1, "beta_1": 0, "epsilon": 1, "sum_inside_sqrt": False, "lazy_adam": False}),
    (
        "FTRL",
        {"learning_rate": 0.3, "learning_rate_power": -0.7, "beta": 0.3, "multiply_linear_by_learning_rate": True},
    ),
    ("FTRL", {"learning_rate": 0.3, "initial_accumulator_value": 0.2, "allow_zero_accumulator": True}),
    (
        "FTRL",
        {
            "learning_rate": 1,
            "learning_rate_power": -1,
            "beta": 1,
            "initial_accumulator_value": 1,
            "l1_regularization_strength": 1,
            "l2_regularization_strength": 2,
        },
    ),
]
"""Classes of TensorFlow, of the names of ours, and their options: some of them are integers, for which floats stand."""

KERAS: list[tuple[Callable[[], Any], Any]] = [
    (lambda: keras.optimizers.SGD(0.3), SGD(0.3)),
    (lambda: keras.optimizers.Adagrad(1.0, 10), Adagrad(1.0, initial_accumulator_value=10.0)),
    (
        lambda: keras.optimizers.Ftrl(0.5, -0.7, 1, 0.1, 0.2, beta=0.3, clipvalue=0.5),
        FTRL(
            0.5,
            learning_rate_power=-0.7,
            initial_accumulator_value=1.0,
            l1_regularization_strength=0.1,
            l2_regularization_strength=0.2,
            beta=0.3,
            clipvalue=0.5,
        ),
    ),
]


def model_of(optimizer: Any) -> tuple[Any, TPUEmbedding]:
    """A model whose outputs are the rows of two features of one table, and a weight of the user's own."""
    shared = TableConfig(ROWS, DIM, "items")
    layer = TPUEmbedding({"pair": FeatureConfig(shared), "one": FeatureConfig(shared)}, optimizer)
    inputs = {name: keras.Input((n,), dtype="int64", name=name) for name, n in (("pair", 2), ("one", 1))}
    rows = layer(inputs)
    shift = keras.layers.Dense(DIM, kernel_initializer="zeros")(keras.ops.ones((1, 1)))
    return keras.Model(inputs, keras.ops.concatenate([rows["pair"], rows["one"]], 1) + shift), layer


def slope_loss(slopes: Any, rows: Any) -> Any:
    return keras.ops.sum(slopes * rows)


def in_fit(model: Any) -> None:
    model.compile("adam", slope_loss)
    model.fit({"pair": PAIRS, "one": ONES[:, None]}, SLOPES, batch_size=BATCH, shuffle=False, verbose=0)


def in_a_loop(model: Any, wrap: Callable[[Any], Any] = tf.function) -> None:
    optimizer = keras.optimizers.Adam()

    def step(pairs: Any, ones: Any, slopes: Any) -> None:
        with tf.GradientTape() as tape:
            loss = slope_loss(slopes, model({"pair": pairs, "one": ones}, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    optimizer.build(model.trainable_variables)
    run = wrap(step)
    for start in range(0, STEPS * BATCH, BATCH):
        part = slice(start, start + BATCH)
        run(tf.constant(PAIRS[part]), tf.constant(ONES[part, None]), tf.constant(SLOPES[part]))


WAYS: Mapping[str, Callable[[Any], None]] = {"fit": in_fit, "loop": in_a_loop}


def trained(rows: Array, optimizer: Any) -> Reference:
    """The table and its slots after all steps, in float64."""
    reference = Reference(rows, optimizer)
    for start in range(0, STEPS * BATCH, BATCH):
        part = slice(start, start + BATCH)
        ids = np.concatenate([PAIRS[part], ONES[part, None]], 1).ravel()
        reference.step(ids, SLOPES[part].reshape(-1, DIM).astype(np.float64))
    return reference


def only_table(layer: TPUEmbedding) -> Any:
    (variable,) = layer.embedding_tables.values()
    return variable


@pytest.mark.parametrize(("kind", "way"), [*zip(OPTIMIZERS, itertools.cycle(WAYS))])
def test_tables_and_slots_move_by_the_rule(tmp_path: Path, kind: str, way: str) -> None:
    model, layer = model_of(OPTIMIZERS[kind])
    truth = trained(only_table(layer).numpy(), OPTIMIZERS[kind])
    WAYS[way](model)
    assert_same_numbers(only_table(layer), truth.table)
    with open_checkpoint(tf.train.Checkpoint(model=model).write(str(tmp_path / "ckpt"))) as checkpoint:
        assert set(checkpoint.tables()["items"].slots) == set(truth.slots)
        for slot, values in truth.slots.items():
            assert_same_numbers(checkpoint.read("items", slot=slot), values, slot)


@pytest.mark.parametrize(
    ("make", "ours"),
    [
        *(
            (functools.partial(getattr(E, name), **options), getattr(tpuembed, name)(**options))
            for name, options in TENSORFLOWS
        ),
        *KERAS,
    ],
)
def test_optimizers_of_tensorflow_and_keras_mean_the_same_rule(make: Callable[[], Any], ours: Any) -> None:
    model, layer = model_of(make())
    truth = trained(only_table(layer).numpy(), ours)
    in_a_loop(model, lambda step: step)
    assert_same_numbers(only_table(layer), truth.table)
    json.dumps(layer.get_config())


def step_of(
    layer: TPUEmbedding,
    inputs: Any,
    weights: Any = None,
    loss: Any = tf.reduce_sum,
    wrap: Callable[[Any], Any] = lambda step: step,
) -> Any:
    """A step of a loop with an optimizer of its own. By default the gradient of each activation is 1."""
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(layer.trainable_variables)

    def step() -> None:
        with tf.GradientTape() as tape:
            value = tf.add_n([loss(rows) for rows in tf.nest.flatten(layer(inputs, weights))])
        gradients = tape.gradient(value, layer.trainable_variables)
        optimizer.apply_gradients(zip(gradients, layer.trainable_variables, strict=True))

    return wrap(step)


def one_step(layer: TPUEmbedding, inputs: Any, weights: Any = None, **options: Any) -> None:
    step_of(layer, inputs, weights, **options)()


def test_a_name_means_tensorflows_defaults() -> None:
    defaults = E.Adagrad()
    layer = TPUEmbedding(FeatureConfig(TableConfig(4, 2, "t")), "adagrad")
    rows = only_table(layer).numpy()
    one_step(layer, np.array([1, 1]))
    rows[1] -= defaults.learning_rate * 2 / np.sqrt(defaults.initial_accumulator_value + 4)
    np.testing.assert_allclose(only_table(layer), rows, atol=1e-7)


def test_a_table_has_its_own_optimizer_or_the_layers() -> None:
    own, plain = TableConfig(4, 2, "own", optimizer=SGD(1.0)), TableConfig(4, 2, "plain")
    layer = TPUEmbedding({"a": FeatureConfig(own), "b": FeatureConfig(plain)}, SGD(0.25))
    before = {config.name: variable.numpy() for config, variable in layer.embedding_tables.items()}
    one_step(layer, {"a": np.array([1]), "b": np.array([2])})
    for config, row, rate in ((own, 1, 1.0), (plain, 2, 0.25)):
        before[config.name][row] -= rate
        np.testing.assert_allclose(layer.embedding_tables[config], before[config.name], atol=1e-6)


@pytest.mark.parametrize("wrap", [lambda step: step, tf.function], ids=["eager", "traced"])
@pytest.mark.parametrize("kind", ["optimizer of Keras", "schedule", "callable"])
def test_each_update_reads_the_learning_rate(kind: str, wrap: Any) -> None:
    rates = [0.5, 0.125, 2.0, 2.0]
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0, 1], rates[:3])
    source, rate = keras.optimizers.SGD(0.5), tf.Variable(0.5)
    optimizers = {
        "optimizer of Keras": source,
        "schedule": keras.optimizers.SGD(schedule),
        "callable": SGD(lambda: rate),
    }
    layer = TPUEmbedding(FeatureConfig(TableConfig(4, 2, "t")), optimizers[kind])
    step, found = step_of(layer, np.array([1]), wrap=wrap), [only_table(layer).numpy()[1]]
    for value in rates:
        source.learning_rate = value
        rate.assign(value)
        step()
        found.append(only_table(layer).numpy()[1])
    np.testing.assert_allclose(np.diff(found, axis=0)[:, 0], -np.array(rates), atol=1e-6)


@pytest.mark.parametrize("value", [0.5, 1, np.float32(0.5), np.float64(0.5), np.array(0.5), np.int64(1)])
def test_a_rate_that_tracing_would_freeze_is_refused(value: Any) -> None:
    """One of numpy was taken, and frozen. Eagerly it is read at every update."""
    layer = TPUEmbedding(FeatureConfig(TableConfig(4, 2, "t")), SGD(lambda: value))
    rows = only_table(layer).numpy()
    kind = "numpy" if isinstance(value, np.generic | np.ndarray) else "Python"
    with refused(TrainingError, match=f"{kind} number"):
        one_step(layer, np.array([1]), wrap=tf.function)
    one_step(layer, np.array([1]))
    rows[1] -= float(value)
    np.testing.assert_allclose(only_table(layer), rows, atol=1e-6)


def test_the_log_says_that_tables_do_not_correct_adams_bias(caplog: pytest.LogCaptureFixture) -> None:
    TPUEmbedding(FeatureConfig(TableConfig(4, 2, "t")), keras.optimizers.Adam(0.5))
    assert [record.name.partition(".")[0] for record in caplog.records if "bias" in record.message] == ["tpuembed"]


@pytest.mark.parametrize("by_rate", [False, True])
def test_rows_decay_before_the_rule_of_ftrl(by_rate: bool) -> None:
    options: dict[str, Any] = {"weight_decay_factor": 0.25, "multiply_weight_decay_factor_by_learning_rate": by_rate}
    for optimizer in (FTRL(0.5, beta=0.5, **options), E.FTRL(0.5, beta=0.5, **options)):
        layer = TPUEmbedding(FeatureConfig(TableConfig(6, 2, "t")), optimizer)
        rows = only_table(layer).numpy().astype(np.float64)
        accumulator, linear = np.full((6, 2), 0.1), np.zeros((6, 2))
        for _ in range(3):
            one_step(layer, np.array([0, 1, 2, 2]))
            gradient = np.array([1.0, 1.0, 2.0])[:, None]
            decayed = rows[:3] * (1 - 0.25 * (0.5 if by_rate else 1.0))
            root = np.sqrt(accumulator[:3] + gradient**2)
            linear[:3] += gradient - (root - np.sqrt(accumulator[:3])) / 0.5 * decayed
            rows[:3] = -linear[:3] / ((root + 0.5) / 0.5)
            accumulator[:3] += gradient**2
        np.testing.assert_allclose(only_table(layer), rows, atol=1e-5)


def test_a_row_of_ftrl_without_a_gradient_yet_is_zeros() -> None:
    """Its denominator is 0."""
    rule = FTRL(initial_accumulator_value=0.0, allow_zero_accumulator=True)
    layer = TPUEmbedding(FeatureConfig(TableConfig(4, 2, "t")), rule)
    one_step(layer, np.array([1]), loss=lambda rows: 0.0 * tf.reduce_sum(rows))
    np.testing.assert_array_equal(only_table(layer)[1], [0.0, 0.0])


def test_gradients_of_duplicates_may_stay_apart_where_that_changes_nothing() -> None:
    layer = TPUEmbedding(FeatureConfig(TableConfig(6, 2, "t")), SGD(0.5, use_gradient_accumulation=False))
    rows = only_table(layer).numpy()
    one_step(layer, np.array([0, 2, 2]))
    np.testing.assert_allclose(only_table(layer), rows - np.array([0.5, 0, 1, 0, 0, 0])[:, None], atol=1e-6)


def test_gradients_reach_rows_through_combiners_and_weights() -> None:
    ids = tf.ragged.constant([[1, 2, 1], [], [5]], dtype=tf.int64)
    weights = tf.ragged.constant([[1.0, 2.0, 0.5], [], [3.0]])
    for combiner in ("sum", "mean", "sqrtn"):
        layer = TPUEmbedding({"x": FeatureConfig(TableConfig(8, 3, "t", combiner=combiner))}, SGD(1.0))
        truth = tf.Variable(only_table(layer))
        one_step(layer, {"x": ids}, {"x": weights}, loss=lambda rows: tf.reduce_sum(rows**2))
        with tf.GradientTape() as tape:
            found = tf.nn.embedding_lookup_sparse(truth, ids.to_sparse(), weights.to_sparse(), combiner=combiner)
            loss = tf.reduce_sum(found**2)
        truth.assign_sub(tf.convert_to_tensor(tape.gradient(loss, truth)))
        np.testing.assert_allclose(only_table(layer), truth, atol=1e-5, err_msg=combiner)


@pytest.mark.parametrize(("policy", "moved"), [("zeros", [1]), (4, [1, 4])])
def test_ids_outside_train_what_their_policy_says(policy: str | int, moved: list[int]) -> None:
    layer = TPUEmbedding({"x": FeatureConfig(TableConfig(6, 2, "t", out_of_vocabulary=policy))}, SGD(1.0))
    rows = only_table(layer).numpy()
    one_step(layer, {"x": np.array([1, 6, 99])})
    changed = np.flatnonzero((only_table(layer).numpy() != rows).any(1)).tolist()
    assert changed == moved
    np.testing.assert_allclose(only_table(layer)[moved[-1]], rows[moved[-1]] - (2 if policy == 4 else 1), atol=1e-6)
