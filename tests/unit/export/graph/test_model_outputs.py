"""Every output of a model is in the signature once, under a name of its own, with the numbers that `predict` gives in its place."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_saved_model
from tpuembed.errors import ConfigError
from tpuembed.export.graph.keras_model import wrap_model
from tpuembed_serving.tensorflow import session as runtime

X = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)


def dense(name: str, units: int = 2) -> Any:
    return keras.layers.Dense(units, name=name, bias_initializer="normal")


def x_input() -> Any:
    return keras.Input((4,), name="x")


def heads(name: str, structure: Callable[[Any], Any]) -> Any:
    x = x_input()
    return keras.Model(x, structure(x), name=name)


def two_heads(name: str = "ranker") -> Any:
    return heads(name, lambda x: [dense("click")(x), dense("watch")(x)])


def called(model: Any) -> dict[str, Any]:
    """The outputs by name, as they are traced for the signature."""
    wrapped = wrap_model(model, "test")
    spec = wrapped.input_specs()
    function = tf.function(wrapped, input_signature=[spec], autograph=False)
    given = {name: tf.constant(X) for name in spec}
    return {name: value.numpy() for name, value in function(given).items()}


def leaves(structure: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(structure, dict):
        for key in sorted(structure):
            yield from leaves(structure[key], (*path, key))
    elif isinstance(structure, list | tuple):
        for index, child in enumerate(structure):
            yield from leaves(child, (*path, index))
    else:
        yield path, structure


def outer(sub: Any) -> Any:
    x = x_input()
    return keras.Model(x, sub(x))


def test_a_model_around_one_with_two_heads_answers_both() -> None:
    model = outer(two_heads())
    found = called(model)
    click, watch = model.predict(X, verbose=0)
    assert found.keys() == {"ranker/click", "ranker/watch"}
    np.testing.assert_allclose(found["ranker/click"], click, atol=1e-6)
    np.testing.assert_allclose(found["ranker/watch"], watch, atol=1e-6)


def shared_head() -> Any:
    x, head = x_input(), dense("head", 4)
    first = head(x)
    return keras.Model(x, [first, head(first)])


def states() -> Any:
    x = x_input()
    return keras.Model(x, keras.layers.LSTM(2, return_state=True, name="lstm")(keras.ops.expand_dims(x, 1)))


def two_towers() -> Any:
    x = x_input()
    return keras.Model(x, [*two_heads("a")(x), *two_heads("b")(x)])


def one_tower_twice() -> Any:
    x, tower = x_input(), two_heads("a")
    return keras.Model(x, [*tower(x), *tower(2 * x)])


def some_heads() -> Any:
    x = x_input()
    return keras.Model(x, [two_heads("a")(x)[1], dense("own")(x)])


def echo() -> Any:
    x = x_input()
    return keras.Model(x, [x, dense("own")(x), x])


def by_dict() -> Any:
    x = x_input()
    inner = heads("inner", lambda x: {"z": dense("one")(x), "a": [dense("two")(x), dense("three")(x)]})
    made = inner(x)
    return keras.Model(x, [made["a"][0], made["z"], made["a"][1]])


class Subclassed(keras.Model):
    def __init__(self, structure: Callable[[Any], Any]) -> None:
        super().__init__()
        self.structure = structure

    def call(self, x: Any) -> Any:
        return self.structure(x)


def subclassed(structure: Callable[[Any], Any]) -> Any:
    return Subclassed(structure), tf.TensorSpec([None, 4], tf.float32, name="x")


class Reversed(keras.Model):
    """A functional model that answers its outputs the other way round."""

    def call(self, inputs: Any, training: Any = None) -> Any:
        first, second = super().call(inputs, training=training)
        return [second, first]


def with_a_call_of_its_own() -> Any:
    x = x_input()
    return Reversed(x, [keras.layers.Dense(4, name="click")(x), keras.layers.Dense(4, name="watch")(x)])


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (shared_head, ["head/0", "head/1"]),
        (states, ["lstm/0", "lstm/1", "lstm/2"]),
        (two_towers, ["a/click", "a/watch", "b/click", "b/watch"]),
        (one_tower_twice, ["a/click/0", "a/watch/0", "a/click/1", "a/watch/1"]),
        (lambda: outer(outer_named("mid")), ["mid/ranker/click", "mid/ranker/watch"]),
        (some_heads, ["a/watch", "own"]),
        (echo, ["x/0", "own", "x/1"]),
        (by_dict, ["inner/a/0", "inner/z", "inner/a/1"]),
        (lambda: outer(heads("one", lambda x: dense("score")(x))), ["one"]),
        (lambda: heads("m", lambda x: dense("score")(x)), ["score"]),
        (lambda: heads("m", lambda x: [dense("score")(x)]), ["score"]),
        (lambda: heads("m", lambda x: [dense("p")(x), (dense("q")(x), [dense("r")(x)])]), ["p", "q", "r"]),
        (lambda: heads("m", lambda x: [{"k": dense("p")(x)}, {"k": dense("q")(x)}]), ["k/0", "k/1"]),
        (lambda: heads("m", lambda x: {"b": dense("p")(x), "a": (dense("q")(x), dense("r")(x))}), ["a/0", "a/1", "b"]),
        (lambda: keras.Sequential([x_input(), dense("p"), dense("q")]), ["q"]),
        (lambda: subclassed(lambda x: x), ["output_0"]),
        (lambda: subclassed(lambda x: [x, (2 * x, 3 * x)]), ["output_0", "output_1", "output_2"]),
        (lambda: subclassed(lambda x: {"b": x, "a": [2 * x, 3 * x]}), ["a/0", "a/1", "b"]),
        (lambda: subclassed(lambda x: {"a/b": x, "a": {"b": 2 * x}}), ["a/b/0", "a/b/1"]),
        (with_a_call_of_its_own, ["output_0", "output_1"]),
    ],
)
def test_outputs_have_these_names_and_predicts_numbers(model: Callable[[], Any], names: list[str]) -> None:
    made = model()
    found = called(made)
    assert sorted(found) == sorted(names)
    truth = (made[0] if isinstance(made, tuple) else made)(tf.constant(X), training=False)
    for name, (_, value) in zip(names, leaves(truth), strict=True):
        np.testing.assert_allclose(found[name], value, atol=1e-6, err_msg=name)


def outer_named(name: str) -> Any:
    x = x_input()
    return keras.Model(x, two_heads()(x), name=name)


# ---- what a signature can answer


@pytest.mark.parametrize(
    "structure",
    [
        lambda x: {"r": tf.RaggedTensor.from_row_lengths(x, [2, 0, 1])},
        lambda x: {"r": tf.sparse.from_dense(x)},
        lambda x: {"r": x, "s": None},
    ],
)
def test_outputs_that_no_signature_can_answer_are_refused(structure: Callable[[Any], Any]) -> None:
    with refused(ConfigError):
        called(subclassed(structure))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_answered_as_float32(dtype: str) -> None:
    found = called(subclassed(lambda x: keras.ops.cast(x, dtype)))["output_0"]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, tf.cast(tf.cast(X, dtype), tf.float32))


# ---- whole exports


def ranker() -> Any:
    x = keras.Input((), dtype="int64", name="item")
    rows = TPUEmbedding(FeatureConfig(TableConfig(9, 4, "t")), optimizer="sgd")(x)
    return keras.Model(x, two_heads()(rows))


def served(path: Path, ids: Any) -> dict[str, Any]:
    servable = runtime.load(path)
    try:
        signature = servable.signatures["serving_default"]
        values = servable.run(signature, [ids])
        return {info.alias: value for info, value in zip(signature.outputs, values, strict=True)}
    finally:
        servable.close()


def test_half_outputs_are_served(tmp_path: Path) -> None:
    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__(name="m")
            self.embedding = TPUEmbedding(FeatureConfig(TableConfig(9, 4, "t")), optimizer="sgd")

        def call(self, ids: Any) -> Any:
            return {"rows": tf.cast(self.embedding(ids), tf.bfloat16)}

    report = export_saved_model((Model(), tf.TensorSpec([None], tf.int64)), tmp_path / "m")
    assert served(report.path, np.array([2, 0, 1]))["rows"].dtype == np.float32
