"""Tables of hosts move in the trainer's optimizer step, whatever the trainer does with gradients before.

The same loop trains a `keras.layers.Embedding` in float64, an ordinary variable, by the same rule.
"""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.messages import refused
from tpuembed import SGD, Adagrad, Adam, FeatureConfig, TableConfig, TPUEmbedding
from tpuembed.compat import tfrs
from tpuembed.errors import ConfigError, TrainingError, TrainingWarning

Array = np.ndarray[Any, Any]
Loop = Callable[["Model", Any], None]
Rows, Dim, Batch, Hot, Rate = 20, 3, 8, 4, 0.25
_RANDOM = np.random.default_rng(7)
IDS = _RANDOM.integers(0, Rows, (6 * Batch, Hot))  # a row often occurs twice in a batch
TARGETS = _RANDOM.normal(size=(6 * Batch, 1))
KERNEL = _RANDOM.normal(size=(Hot * Dim, 1))
TABLE = _RANDOM.normal(size=(Rows, Dim)).astype(np.float32)
Scaled = keras.optimizers.LossScaleOptimizer


class RowAdam(keras.optimizers.Adam):
    """Adam without bias correction, which leaves rows without a gradient alone: the rule of TPUs."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        index, gradient = self._get_variable_index(variable), tf.convert_to_tensor(gradient)
        touched = tf.reduce_any(tf.not_equal(gradient, 0.0), -1, keepdims=True)
        m = 0.75 * self._momentums[index].value + 0.25 * gradient
        v = 0.875 * self._velocities[index].value + 0.125 * gradient * gradient
        step = tf.cast(learning_rate, gradient.dtype) * m / tf.sqrt(v + 1e-3**2)
        for slot, value in ((self._momentums[index], m), (self._velocities[index], v)):
            slot.assign(tf.where(touched, value, slot.value))
        variable.assign_sub(tf.where(touched, step, tf.zeros_like(step)))


RULES: dict[str, tuple[Any, Callable[..., Any]]] = {
    "sgd": (SGD(Rate), lambda **options: keras.optimizers.SGD(Rate, **options)),
    "adagrad": (
        Adagrad(0.2, initial_accumulator_value=0.4),
        lambda **options: keras.optimizers.Adagrad(0.2, initial_accumulator_value=0.4, epsilon=1e-30, **options),
    ),
    "adam": (Adam(0.05, beta_1=0.75, beta_2=0.875, epsilon=1e-3), lambda **options: RowAdam(0.05, **options)),
}


class Model:
    """A model with a table: the layer's, or for `rule` None an Embedding in float64."""

    def __init__(self, rule: Any) -> None:
        self.is_reference, self.dtype = rule is None, "float64" if rule is None else "float32"
        self.layer: Any
        if rule is None:
            self.layer = keras.layers.Embedding(Rows, Dim, dtype="float64")
            self.layer.build()
            self.layer.set_weights([TABLE])
        else:
            self.layer = TPUEmbedding(FeatureConfig(TableConfig(Rows, Dim, "t")), rule)
            self.layer.assign_rows("t", 0, TABLE)
        ids = keras.Input((Hot,), dtype="int64")
        self.dense = keras.layers.Dense(1, dtype=self.dtype, use_bias=False)
        self.keras = keras.Model(ids, self.dense(keras.layers.Flatten(dtype=self.dtype)(self.layer(ids))))
        self.dense.set_weights([KERNEL])

    def table(self) -> Array:
        if self.is_reference:
            return np.asarray(self.layer.get_weights()[0])
        (variable,) = self.layer.embedding_tables.values()
        return np.asarray(variable.numpy().copy())

    @property
    def weights(self) -> list[Any]:
        return list(self.keras.trainable_variables)

    def loss(self, ids: Any, targets: Any) -> Any:
        return tf.reduce_mean((self.keras(ids, training=True) - tf.cast(targets, self.dtype)) ** 2)

    def gradients(self, ids: Any, targets: Any, factor: float = 1.0, optimizer: Any = None) -> list[Any]:
        with tf.GradientTape() as tape:
            loss = self.loss(ids, targets) * factor
            if optimizer is not None:
                loss = optimizer.scale_loss(loss)
        return list(tape.gradient(loss, self.weights))

    def apply(self, optimizer: Any, gradients: Any) -> None:
        """Keras squares the gradients of duplicate rows one by one, so the reference sums them before."""
        given = list(gradients)
        if self.is_reference:
            given = [tf.identity(tf.convert_to_tensor(one)) for one in given]
        optimizer.apply(given, self.weights)


def batch(number: int) -> tuple[Any, Any]:
    part = slice(number % 6 * Batch, number % 6 * Batch + Batch)
    return tf.constant(IDS[part]), tf.constant(TARGETS[part])


def batches(count: int = 10) -> Iterator[tuple[Any, Any]]:
    return map(batch, range(count))


LOOPS: dict[str, Loop] = {}


def loop(function: Loop) -> Loop:
    LOOPS[function.__name__] = function
    return function


def steps_of(change: Callable[[list[Any]], Any], trace: Callable[[Any], Any] = tf.function) -> Loop:
    """The loop that applies `change(gradients)`."""

    def run(model: Model, optimizer: Any) -> None:
        step = trace(lambda *given: model.apply(optimizer, change(model.gradients(*given))))
        for given in batches():
            step(*given)

    return run


def eager(function: Any) -> Any:
    return function


LOOPS["eager"] = steps_of(list, eager)
LOOPS["traced"] = steps_of(list)
LOOPS["compiled"] = steps_of(list, lambda function: tf.function(function, jit_compile=True))
LOOPS["clipped by the global norm"] = steps_of(lambda given: tf.clip_by_global_norm(given, 0.4)[0])
LOOPS["clipped, eager"] = steps_of(lambda given: tf.clip_by_global_norm(given, 0.4)[0], eager)
LOOPS["half of it"] = steps_of(lambda given: [tf.math.scalar_mul(tf.constant(0.5, one.dtype), one) for one in given])


@loop
def in_a_range(model: Model, optimizer: Any) -> None:
    ids, targets = tf.constant(IDS.reshape(6, Batch, Hot)), tf.constant(TARGETS.reshape(6, Batch, 1))

    @tf.function
    def run() -> None:
        for number in tf.range(6):
            model.apply(optimizer, model.gradients(ids[number], targets[number]))

    run()


@loop
def apply_in_a_function_of_its_own(model: Model, optimizer: Any) -> None:
    take = tf.function(lambda *given: model.gradients(*given))
    apply = tf.function(lambda gradients: model.apply(optimizer, gradients))
    for given in batches():
        apply(take(*given))


@loop
def skipped_where_a_loss_is_not_finite(model: Model, optimizer: Any) -> None:
    @tf.function
    def step(ids: Any, targets: Any, factor: Any) -> None:
        with tf.GradientTape() as tape:
            loss = model.loss(ids, targets) * tf.cast(factor, model.dtype)
        gradients = tape.gradient(loss, model.weights)
        if tf.math.is_finite(loss):
            model.apply(optimizer, gradients)

    for number, given in enumerate(batches()):
        step(*given, tf.constant(np.nan if number % 3 == 0 else 1.0))


@loop
def sum_of_losses(model: Model, optimizer: Any) -> None:
    @tf.function
    def step(*given: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.add_n([model.loss(*given[at : at + 2]) for at in (0, 2, 4)]) / 3
        model.apply(optimizer, tape.gradient(loss, model.weights))

    for number in range(4):
        step(*batch(number), *batch(number + 1), *batch(number + 2))


@loop
def a_traced_forward_pass_called_twice(model: Model, optimizer: Any) -> None:
    forward = tf.function(model.loss)

    def step(*given: Any) -> None:
        with tf.GradientTape() as tape:
            loss = forward(*given[:2]) + forward(*given[2:])
        model.apply(optimizer, tape.gradient(loss, model.weights))

    traced = tf.function(step)
    for number in range(6):
        (step if number % 2 else traced)(*batch(number), *batch(number + 1))


@loop
def concatenated_micro_batches(model: Model, optimizer: Any) -> None:
    def add(parts: list[Any]) -> Any:
        if not isinstance(parts[0], tf.IndexedSlices):
            return tf.add_n(parts)
        values, ids = tf.concat([one.values for one in parts], 0), tf.concat([one.indices for one in parts], 0)
        return tf.IndexedSlices(values, ids, parts[0].dense_shape)

    for number in range(4):
        parts = [model.gradients(*batch(number + at), factor=1 / 3) for at in range(3)]
        model.apply(optimizer, [add(list(of_one)) for of_one in zip(*parts, strict=True)])


@loop
def two_optimizers(model: Model, optimizer: Any) -> None:
    del optimizer
    first, second = keras.optimizers.SGD(Rate), keras.optimizers.SGD(Rate / 2)
    tables, rest = model.layer.trainable_variables, model.dense.trainable_variables
    for given in batches():
        gradients = model.gradients(*given)
        first.apply(gradients[: len(tables)], tables)
        second.apply(gradients[len(tables) :], rest)


@loop
def saliency_between_steps(model: Model, optimizer: Any) -> None:
    for number, given in enumerate(batches(6)):
        model.apply(optimizer, model.gradients(*given))
        before = model.table()
        model.gradients(*batch(number + 2))
        with tf.GradientTape(persistent=True) as tape:
            rows = model.layer(given[0])
            loss = tf.reduce_sum(rows * rows)
        tape.gradient(loss, model.weights[0])
        tape.jacobian(loss, rows)
        np.testing.assert_array_equal(model.table(), before)


@loop
def late(model: Model, optimizer: Any) -> None:
    waiting: list[Any] = []
    for given in batches():
        waiting.append(model.gradients(*given))
        if len(waiting) == 2:
            model.apply(optimizer, waiting.pop(0))


@loop
def loss_scale(model: Model, optimizer: Any) -> None:
    scaled = Scaled(optimizer, initial_scale=1024.0, dynamic_growth_steps=3)
    step = tf.function(lambda *given: model.apply(scaled, model.gradients(given[0], given[1], optimizer=scaled)))
    scaled.build(model.weights)
    for given in batches():
        step(*given)


@loop
def overflow_in_the_table_alone(model: Model, optimizer: Any) -> None:
    scaled = Scaled(optimizer, initial_scale=1024.0)
    scaled.build(model.weights)

    @tf.custom_gradient
    def overflow(rows: Any, when: Any) -> Any:
        return rows, lambda given: (tf.where(when, given * np.inf, given), None)

    @tf.function
    def step(ids: Any, targets: Any, when: Any) -> None:
        with tf.GradientTape() as tape:
            rows = overflow(model.layer(ids), when)
            error = model.dense(tf.reshape(rows, [-1, Hot * Dim])) - tf.cast(targets, model.dtype)
            loss = scaled.scale_loss(tf.reduce_mean(error**2))
        model.apply(scaled, tape.gradient(loss, model.weights))

    for number, given in enumerate(batches()):
        step(*given, tf.constant(number % 3 == 0))
    assert float(scaled.dynamic_scale) == 1024 / 2**4


def trained(rule: Any, run: Loop, make: Callable[..., Any]) -> Model:
    model = Model(rule)
    optimizer = make()
    optimizer.build(model.weights)
    run(model, optimizer)
    return model


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("way", LOOPS)
def test_tables_follow_every_loop(way: str, kind: str) -> None:
    if way == "two_optimizers" and kind != "sgd":
        pytest.skip("its optimizers are SGD")
    rule, make = RULES[kind]
    expected, model = trained(None, LOOPS[way], make), trained(rule, LOOPS[way], make)
    assert np.abs(expected.table() - TABLE).max() > 0.01
    np.testing.assert_allclose(model.table(), expected.table(), rtol=0, atol=2e-5)
    np.testing.assert_allclose(model.dense.get_weights()[0], expected.dense.get_weights()[0], rtol=0, atol=2e-5)


FITS: dict[str, dict[str, Any]] = {
    "graph": {"jit_compile": False},
    "eager": {"run_eagerly": True},
    "three in one": {"steps_per_execution": 3},
}


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("how", FITS)
def test_fit(how: str, scaled: bool) -> None:
    def run(model: Model, optimizer: Any) -> None:
        chosen = Scaled(keras.optimizers.SGD(Rate), initial_scale=64.0, dynamic_growth_steps=2) if scaled else optimizer
        model.keras.compile(chosen, "mse", **FITS[how])
        model.keras.fit(IDS, TARGETS, batch_size=Batch, epochs=2, shuffle=False, verbose=0)

    rule, make = RULES["sgd"]
    expected, model = trained(None, run, make), trained(rule, run, make)
    np.testing.assert_allclose(model.table(), expected.table(), rtol=0, atol=2e-5)
    assert int(model.layer.updates) == 12


def test_a_trainer_without_a_keras_optimizer() -> None:
    """Its steps are those of the optimizer, and count as many updates."""
    expected = trained(RULES["adagrad"][0], LOOPS["clipped, eager"], RULES["adagrad"][1])
    model = Model(RULES["adagrad"][0])
    optimizer = RULES["adagrad"][1]()
    optimizer.build(model.dense.trainable_variables)
    own = len(model.layer.trainable_variables)
    for given in batches():
        gradients, _ = tf.clip_by_global_norm(model.gradients(*given), 0.4)
        model.layer.apply_gradients(gradients[:own])
        optimizer.apply(gradients[own:], model.dense.trainable_variables)
    np.testing.assert_array_equal(model.table(), expected.table())
    assert int(model.layer.updates) == int(expected.layer.updates) == 10


def two_places() -> Any:
    """A small table that the trainer's optimizer trains, and a large one that has its own."""
    keras.utils.set_random_seed(3)
    features = {name: FeatureConfig(TableConfig(rows, 2, name)) for name, rows in (("small", 4), ("large", 40))}
    return tfrs.PartialTPUEmbedding(features, SGD(1.0), size_threshold=10)


def gradients_of(layer: Any) -> Any:
    ids = {"small": tf.constant([1, 1]), "large": tf.constant([30, 3])}
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(rows**2) for rows in layer(ids).values()])
    return tape.gradient(loss, layer.trainable_variables)


def test_a_layer_of_two_places_takes_the_gradients_of_tables_that_it_trains() -> None:
    expected, layer = two_places(), two_places()
    keras.optimizers.SGD(0.5).apply(gradients_of(expected), expected.trainable_variables)
    gradients, optimizer = gradients_of(layer), keras.optimizers.SGD(0.5)
    is_free = [weight.path.endswith("small") for weight in layer.trainable_variables]
    assert is_free.count(True) == 1
    with refused(ConfigError, match="small.* has no optimizer"):
        layer.apply_gradients(gradients)
    pairs = list(zip(gradients, layer.trainable_variables, is_free, strict=True))
    optimizer.apply_gradients([(gradient, weight) for gradient, weight, free in pairs if free])
    layer.apply_gradients([None if free else gradient for gradient, _, free in pairs])
    for name, variable in layer.table_variables().items():
        np.testing.assert_array_equal(variable, expected.table_variables()[name])
    with refused(ConfigError, match="no gradient reached"):
        layer.apply_gradients([None] * len(gradients))
    with refused(ConfigError, match="Give one for each"):
        layer.apply_gradients(gradients[1:])


def test_dropped_ids_are_nothing_in_a_norm() -> None:
    config = TableConfig(4, 2, "t", out_of_vocabulary="zeros")
    layer = TPUEmbedding(FeatureConfig(config), SGD(1.0))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.constant([1, 9, -1])) * [[3.0, 4.0], [np.inf, 1.0], [1e30, 1.0]])
    assert float(tf.linalg.global_norm(tape.gradient(loss, layer.trainable_variables))) == 5.0


@pytest.mark.parametrize("option", ["gradient_accumulation_steps", "use_ema"])
def test_options_that_tables_cannot_follow_are_refused(option: str) -> None:
    model = Model(Adam(0.1))
    model.keras.compile(keras.optimizers.SGD(0.1, **{option: 2}), "mse")
    with refused(TrainingError, match=option):
        model.keras.fit(IDS, TARGETS, batch_size=Batch, verbose=0)
    np.testing.assert_array_equal(model.table(), TABLE)


def test_the_weights_of_a_layer_are_one_step_in_their_order() -> None:
    tables = [TableConfig(4, 2, name) for name in "ab"]
    layer = TPUEmbedding([FeatureConfig(table) for table in tables], SGD(0.1))
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(rows) for rows in layer([tf.constant([1]), tf.constant([2])])])
    pairs = list(zip(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables, strict=True))
    before = [layer.embedding_tables[table].numpy() for table in tables]
    for some in (pairs[::-1], pairs[:-1], pairs[2:]):
        with refused(TrainingError):
            keras.optimizers.SGD(0.1).apply_gradients(some)
    with refused(ConfigError, match="2"):
        layer.apply_gradients([gradient for gradient, _ in pairs[1:]])
    for table, rows in zip(tables, before, strict=True):
        np.testing.assert_array_equal(layer.embedding_tables[table].numpy(), rows)


def test_a_dense_gradient_trains_by_rules_that_ignore_zeros_and_is_refused_by_others() -> None:
    dense = steps_of(lambda given: [tf.convert_to_tensor(one) for one in given])
    for kind in ("sgd", "adagrad"):
        expected, model = trained(None, dense, RULES[kind][1]), trained(RULES[kind][0], dense, RULES[kind][1])
        np.testing.assert_allclose(model.table(), expected.table(), rtol=0, atol=2e-5)
    with refused(TrainingError, match="'t'"):
        trained(
            RULES["adam"][0],
            steps_of(lambda given: [tf.convert_to_tensor(one) for one in given], eager),
            RULES["adam"][1],
        )


def training_warning(run: Callable[[], Any]) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    (warning,) = [str(one.message) for one in caught if one.category is TrainingWarning]
    return warning


@pytest.mark.parametrize("option", ["clipnorm", "global_clipnorm", "clipvalue", "weight_decay"])
def test_options_that_keras_keeps_from_tables_are_warned_of_once(option: str) -> None:
    model = Model(SGD(Rate))
    model.keras.compile(keras.optimizers.SGD(Rate, **{option: 0.1}), "mse", run_eagerly=True)
    warning = training_warning(lambda: model.keras.fit(IDS, TARGETS, batch_size=Batch, verbose=0))
    assert option in warning
    assert "'t'" in warning


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "loss scale"])
@pytest.mark.parametrize("has_fitted", [False, True], ids=["first fit", "later fit"])
@pytest.mark.parametrize("follows", [False, True])
def test_a_callback_of_the_learning_rate_reaches_tables_with_the_optimizer_of_compile(
    follows: bool, has_fitted: bool, scaled: bool
) -> None:
    optimizer = keras.optimizers.SGD(Rate)
    model = Model(optimizer if follows else SGD(Rate))
    model.keras.compile(keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer, "mse")
    if has_fitted:
        model.keras.fit(IDS, TARGETS, batch_size=Batch, verbose=0)
    stops = keras.callbacks.LearningRateScheduler(lambda epoch, _: Rate if epoch == 0 else 0.0)

    def fit(epochs: int) -> None:
        model.keras.fit(
            IDS, TARGETS, batch_size=Batch, epochs=epochs, initial_epoch=epochs - 1, verbose=0, callbacks=[stops]
        )

    if follows:
        fit(1)
    else:
        assert "LearningRateScheduler" in training_warning(lambda: fit(1))
    before = model.table()
    fit(2)
    assert (model.table() == before).all() == follows


@pytest.mark.parametrize("kind", [keras.callbacks.LearningRateScheduler, keras.callbacks.ReduceLROnPlateau])
def test_a_callback_of_the_rate_takes_any_model(kind: Any) -> None:
    """Of a loop of one's own, or none yet."""
    callback = kind(lambda _: 0.1) if kind is keras.callbacks.LearningRateScheduler else kind()
    for model in (None, object()):
        callback.set_model(model)
        assert callback.model is model


def _scatter(pairs: Any) -> None:
    for gradient, variable in pairs:
        variable.scatter_sub(tf.IndexedSlices(Rate * gradient.values, gradient.indices))


def _subtract(pairs: Any) -> None:
    for gradient, variable in pairs:
        variable.assign_sub(Rate * tf.convert_to_tensor(gradient))


OTHERS: dict[str, Callable[[Any], Any]] = {
    "scatter": _scatter,
    "subtract": _subtract,
    "sgd": lambda pairs: tf.compat.v1.train.GradientDescentOptimizer(Rate).apply_gradients(pairs),
    "adagrad": lambda pairs: tf.compat.v1.train.AdagradOptimizer(Rate).apply_gradients(pairs),
}


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("other", OTHERS)
def test_an_optimizer_that_keeps_to_the_weights_fails(other: str, traced: bool) -> None:
    """Row 0 of a table of one row is the only id that a weight of one row could take in silence."""
    layer = TPUEmbedding(FeatureConfig(TableConfig(1, Dim, "t")), SGD(Rate))
    layer.build()
    weight = layer.trainable_variables[-1].value

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(tf.zeros([2, 1], tf.int64)))
        OTHERS[other]([(tape.gradient(loss, weight), weight)])

    def two_steps() -> None:
        for _ in range(2):
            (tf.function(step) if traced else step)()

    with pytest.raises((ValueError, TypeError, tf.errors.OpError, TrainingError)):
        two_steps()


def test_gradients_that_are_never_applied_are_warned_of(tmp_path: Path) -> None:
    model = Model(SGD(Rate))
    model.gradients(*batch(0))
    assert "apply_gradients" in training_warning(lambda: model.keras.save_weights(tmp_path / "x.weights.h5"))

    class Forgets(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            model.gradients(*data)
            return {"loss": tf.constant(0.0)}

    model = Model(SGD(Rate))
    forgets = Forgets()
    forgets.compile()
    assert "fit has ended" in training_warning(lambda: forgets.fit(IDS, TARGETS, verbose=0))
    applied = Model(SGD(Rate))
    applied.layer.apply_gradients(applied.gradients(*batch(0))[: len(applied.layer.trainable_variables)])
    with warnings.catch_warnings():
        warnings.simplefilter("error", TrainingWarning)
        applied.keras.save_weights(tmp_path / "y.weights.h5")
        tf.train.Checkpoint(layer=applied.layer).write(str(tmp_path / "ckpt"))
