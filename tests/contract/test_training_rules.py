"""How each optimizer moves a table and its slots: in fit and in loops, against the rules in float64.

The rules are those of the TPU (tensorflow/core/protobuf/tpu/optimization_parameters.proto): the gradients of a row that
occurs several times in a batch are summed, and the row moves once.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tpuembed import (
    FTRL,
    SGD,
    Adagrad,
    AdagradMomentum,
    Adam,
    FeatureConfig,
    TableConfig,
    TPUEmbedding,
    open_checkpoint,
)

Array = np.ndarray[Any, Any]
Slots = dict[str, Array]
E = tf.tpu.experimental.embedding

ROWS, DIM, BATCH, STEPS = 12, 3, 8, 4
_RANDOM = np.random.default_rng(1)
PAIRS = _RANDOM.integers(0, ROWS, (STEPS * BATCH, 2))  # many rows occur twice in a batch
ONES = _RANDOM.integers(0, ROWS - 2, STEPS * BATCH)
SLOPES = _RANDOM.normal(size=(STEPS * BATCH, 3, DIM)).astype(np.float32)  # the gradient of each looked up row


def _sgd(w: Array, g: Array, _: Slots) -> Array:
    return w - 0.3 * g


def _adagrad(w: Array, g: Array, slots: Slots) -> Array:
    slots["accumulators"] += g * g
    return w - 0.2 * g / np.sqrt(slots["accumulators"])


def _momentum(w: Array, g: Array, slots: Slots) -> Array:
    slots["accumulators"] += g * g
    slots["momenta"] *= 0.75
    slots["momenta"] += g / np.sqrt(slots["accumulators"] + 1e-10)
    return w - 0.1 * slots["momenta"]


def _adam(w: Array, g: Array, slots: Slots) -> Array:
    m, v = slots["momenta"], slots["velocities"]
    m += 0.25 * (g - m)
    v += 0.125 * (g * g - v)
    return w - 0.05 * m / np.sqrt(v + 1e-3**2)


def _ftrl(w: Array, g: Array, slots: Slots) -> Array:
    a, linear, rate, l1, l2 = slots["accumulators"], slots["linears"], 0.3, 0.2, 0.1
    before = np.sqrt(a)
    a += g * g
    linear += g - (np.sqrt(a) - before) / rate * w
    return (np.clip(linear, -l1, l1) - linear) / (np.sqrt(a) / rate + 2 * l2)


@dataclasses.dataclass(frozen=True)
class Rule:
    """One rule, the first values of its slots, and the optimizers that mean it."""

    step: Callable[[Array, Array, Slots], Array]
    slots: Mapping[str, float]
    ours: Any
    others: Callable[[], list[Any]]


RULES: Mapping[str, Rule] = {
    "sgd": Rule(_sgd, {}, SGD(0.3), lambda: [E.SGD(0.3), keras.optimizers.SGD(0.3)]),
    "adagrad": Rule(
        _adagrad,
        {"accumulators": 0.4},
        Adagrad(0.2, initial_accumulator_value=0.4),
        lambda: [
            E.Adagrad(0.2, initial_accumulator_value=0.4),
            keras.optimizers.Adagrad(0.2, initial_accumulator_value=0.4),
        ],
    ),
    "adagrad_momentum": Rule(
        _momentum,
        {"accumulators": 0.0, "momenta": 0.0},
        AdagradMomentum(0.1, momentum=0.75),
        lambda: [E.AdagradMomentum(0.1, momentum=0.75)],
    ),
    "adam": Rule(
        _adam,
        {"momenta": 0.0, "velocities": 0.0},
        Adam(0.05, beta_1=0.75, beta_2=0.875, epsilon=1e-3),
        lambda: [E.Adam(0.05, beta_1=0.75, beta_2=0.875, epsilon=1e-3)],
    ),
    "ftrl": Rule(
        _ftrl,
        {"accumulators": 0.1, "linears": 0.0},
        FTRL(0.3, l1_regularization_strength=0.2, l2_regularization_strength=0.1),
        lambda: [
            E.FTRL(0.3, l1_regularization_strength=0.2, l2_regularization_strength=0.1),
            keras.optimizers.Ftrl(0.3, l1_regularization_strength=0.2, l2_regularization_strength=0.1),
        ],
    ),
}


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


def in_an_eager_loop(model: Any) -> None:
    in_a_loop(model, lambda step: step)


WAYS: Mapping[str, Callable[[Any], None]] = {"fit": in_fit, "loop": in_a_loop}


def trained(rows: Array, rule: Rule) -> tuple[Array, Slots]:
    """The table and its slots after all steps, in float64."""
    table = rows.astype(np.float64)
    slots = {name: np.full(rows.shape, first) for name, first in rule.slots.items()}
    for start in range(0, STEPS * BATCH, BATCH):
        part = slice(start, start + BATCH)
        ids = np.concatenate([PAIRS[part], ONES[part, None]], 1).ravel()
        gradients = SLOPES[part].reshape(-1, DIM).astype(np.float64)
        for row in np.unique(ids):
            of_row = {name: values[row] for name, values in slots.items()}
            table[row] = rule.step(table[row], gradients[ids == row].sum(0), of_row)
    return table, slots


def only_table(layer: TPUEmbedding) -> Any:
    (variable,) = layer.embedding_tables.values()
    return variable


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", RULES)
def test_tables_and_slots_move_by_the_rule(tmp_path: Path, kind: str, way: str) -> None:
    model, layer = model_of(RULES[kind].ours)
    table, slots = trained(only_table(layer).numpy(), RULES[kind])
    WAYS[way](model)
    np.testing.assert_allclose(only_table(layer), table, rtol=2e-5, atol=2e-5)
    with open_checkpoint(tf.train.Checkpoint(model=model).write(str(tmp_path / "ckpt"))) as checkpoint:
        assert set(checkpoint.tables()["items"].slots) == set(slots)
        for slot, values in slots.items():
            np.testing.assert_allclose(checkpoint.read("items", slot=slot), values, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", RULES)
def test_optimizers_of_tensorflow_and_keras_mean_the_same_rule(kind: str) -> None:
    for optimizer in RULES[kind].others():
        model, layer = model_of(optimizer)
        table, _ = trained(only_table(layer).numpy(), RULES[kind])
        in_an_eager_loop(model)
        np.testing.assert_allclose(only_table(layer), table, rtol=2e-5, atol=2e-5, err_msg=str(type(optimizer)))


def one_step(
    layer: TPUEmbedding,
    inputs: Any,
    weights: Any = None,
    loss: Any = tf.reduce_sum,
    wrap: Callable[[Any], Any] = lambda step: step,
) -> None:
    """A step of a loop with an optimizer of its own. By default the gradient of each activation is 1."""
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(layer.trainable_variables)

    def step() -> None:
        with tf.GradientTape() as tape:
            value = tf.add_n([loss(rows) for rows in tf.nest.flatten(layer(inputs, weights))])
        gradients = tape.gradient(value, layer.trainable_variables)
        optimizer.apply_gradients(zip(gradients, layer.trainable_variables, strict=True))

    wrap(step)()


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


def test_the_learning_rate_of_a_keras_optimizer_stays_live() -> None:
    optimizer = keras.optimizers.SGD(0.5)
    layer = TPUEmbedding(FeatureConfig(TableConfig(4, 2, "t")), optimizer)
    start = only_table(layer).numpy()[1]
    one_step(layer, np.array([1]))
    optimizer.learning_rate = 0.125
    one_step(layer, np.array([1]))
    np.testing.assert_allclose(only_table(layer)[1], start - 0.625, atol=1e-6)


def test_the_log_says_that_tables_do_not_correct_adams_bias(caplog: pytest.LogCaptureFixture) -> None:
    TPUEmbedding(FeatureConfig(TableConfig(4, 2, "t")), keras.optimizers.Adam(0.5))
    assert [record.name.partition(".")[0] for record in caplog.records if "bias" in record.message] == ["tpuembed"]


def test_a_schedule_counts_the_steps_of_the_layer() -> None:
    rates = [1.0, 0.25, 0.0625]
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0, 1], rates)
    layer = TPUEmbedding(FeatureConfig(TableConfig(4, 2, "t")), keras.optimizers.SGD(schedule))
    found = [only_table(layer).numpy()[1]]
    for _ in rates:
        one_step(layer, np.array([1]))
        found.append(only_table(layer).numpy()[1])
    np.testing.assert_allclose(np.diff(found, axis=0)[:, 0], -np.array(rates), atol=1e-6)


def test_gradients_and_weights_are_bounded_and_decay() -> None:
    options: dict[str, Any] = {
        "clipvalue": 0.5,
        "weight_decay_factor": 0.25,
        "clip_weight_min": -0.4,
        "clip_weight_max": 0.3,
    }
    for optimizer in (SGD(0.5, **options), E.SGD(0.5, **options)):
        layer = TPUEmbedding(FeatureConfig(TableConfig(6, 2, "t")), optimizer)
        rows = only_table(layer).numpy().astype(np.float64)
        one_step(layer, np.array([0, 1, 2, 2]))
        rows[:3] = np.clip(rows[:3] * 0.75 - 0.5 * 0.5, -0.4, 0.3)
        np.testing.assert_allclose(only_table(layer), rows, atol=1e-6)


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


def test_a_step_with_a_bad_id_moves_no_table() -> None:
    features = {"a": FeatureConfig(TableConfig(6, 2, "a")), "b": FeatureConfig(TableConfig(3, 2, "b"))}
    layer = TPUEmbedding(features, "adagrad")
    before = [variable.numpy() for variable in layer.embedding_tables.values()]
    with pytest.raises(tf.errors.InvalidArgumentError, match="id 3"):
        one_step(layer, {"a": tf.constant([1]), "b": tf.constant([3])}, wrap=tf.function)
    for variable, rows in zip(layer.embedding_tables.values(), before, strict=True):
        np.testing.assert_array_equal(variable, rows)
