"""What the layer looks up: each kind of ids, against numpy and against TensorFlow's own lookup."""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.contract_refusals import assert_each_is_refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, Vocabulary
from tpuembed.errors import ConfigError, TpuEmbedError

Array = np.ndarray[Any, Any]
E = tf.tpu.experimental.embedding

ROWS: Array = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
LISTS = [[3, 1, 3], [], [7], [0, 19], []]
WEIGHTS = [[0.5, 2.0, 1.0], [], [3.0], [1.0, 0.25], []]
COMBINERS = ("sum", "mean", "sqrtn")


def known_rows(shape: Any, dtype: Any = None) -> Array:
    """The initializer of the tables below. TensorFlow's lookup and numpy have the same rows."""
    assert tuple(shape) == ROWS.shape
    return ROWS


def table(name: str = "t", **options: Any) -> TableConfig:
    return TableConfig(20, 4, name, initializer=known_rows, **options)


def one_feature(of: TableConfig | None = None, **options: Any) -> TPUEmbedding:
    return TPUEmbedding({"x": FeatureConfig(of or table(), **options)}, "sgd")


def ragged(lists: list[list[Any]], dtype: Any = tf.int64) -> Any:
    return tf.ragged.constant(lists, dtype, ragged_rank=1)


def sparse(lists: list[list[Any]], dtype: Any = tf.int64) -> Any:
    return ragged(lists, dtype).to_sparse()


KINDS: Mapping[str, Callable[..., Any]] = {"ragged": ragged, "sparse": sparse}


def combined(lists: list[list[int]], weights: list[list[float]], combiner: str) -> Array:
    """One row per example. The sum of w * row, divided by 1, by the sum of w, or by the norm of w."""
    out = np.zeros((len(lists), ROWS.shape[1]))
    for example, (ids, w) in enumerate(zip(lists, np.asarray(weights, object), strict=True)):
        if ids:
            norm = {"sum": 1.0, "mean": sum(w), "sqrtn": np.linalg.norm(w)}[combiner]
            out[example] = np.asarray(w, float) @ ROWS[ids].astype(float) / norm
    return out


ONES = [[1.0] * len(ids) for ids in LISTS]


@pytest.fixture(scope="module")
def combining() -> tuple[TPUEmbedding, Any]:
    """A layer with a feature for each combiner, and its call in a graph."""
    layer = TPUEmbedding({name: FeatureConfig(table(name, combiner=name)) for name in COMBINERS}, "sgd")
    return layer, tf.function(layer)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("kind", KINDS)
def test_lists_are_combined_as_numpy_combines_them(
    combining: tuple[TPUEmbedding, Any], kind: str, weighted: bool
) -> None:
    ids = dict.fromkeys(COMBINERS, KINDS[kind](LISTS))
    weights = dict.fromkeys(COMBINERS, KINDS[kind](WEIGHTS, tf.float32)) if weighted else None
    for call in combining:
        found = call(ids, weights)
        for combiner in COMBINERS:
            truth = combined(LISTS, WEIGHTS if weighted else ONES, combiner)
            np.testing.assert_allclose(found[combiner], truth, atol=1e-6, err_msg=combiner)


def test_sparse_ids_of_rank_three_are_combined_over_their_last_axis(combining: tuple[TPUEmbedding, Any]) -> None:
    ids = tf.SparseTensor([[0, 0, 0], [0, 0, 4], [0, 2, 1], [1, 1, 0]], tf.constant([3, 5, 7, 9], tf.int64), [3, 3, 5])
    for combiner, found in combining[0](dict.fromkeys(COMBINERS, ids)).items():
        assert found.shape == (3, 3, 4)
        truth = tf.nn.safe_embedding_lookup_sparse(ROWS, ids, combiner=combiner)
        np.testing.assert_allclose(found, truth, atol=1e-6, err_msg=combiner)


def test_weights_that_stand_elsewhere_fail() -> None:
    moved = [[0.5, 2.0], [1.0], [3.0], [1.0, 0.25], []]
    for make in KINDS.values():
        with pytest.raises(tf.errors.InvalidArgumentError, match="have different positions"):
            one_feature()({"x": make(LISTS)}, {"x": make(moved, tf.float32)})


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_are_cut_and_padded(kind: str) -> None:
    shared = table()
    layer = TPUEmbedding({n: FeatureConfig(shared, max_sequence_length=int(n)) for n in "125"}, "sgd")
    found = layer(dict.fromkeys("125", KINDS[kind](LISTS)))
    for name, activations in found.items():
        truth = np.zeros((len(LISTS), int(name), 4), np.float32)
        for example, ids in enumerate(LISTS):
            kept = ids[: int(name)]
            truth[example, : len(kept)] = ROWS[kept]
        np.testing.assert_array_equal(activations, truth)


def test_dense_ids_of_each_type_and_shape_are_looked_up_one_by_one() -> None:
    layer, random = one_feature(), np.random.default_rng(1)
    for shape in ((3,), (0,), (2, 3), (2, 1, 3)):
        for dtype in ("int32", "int64", "uint8", "float32", "float64"):
            ids = random.integers(0, 20, shape)
            found = layer({"x": ids.astype(dtype)})["x"]
            np.testing.assert_array_equal(found, ROWS[ids], err_msg=f"{dtype} {shape}")


def test_python_integers_and_lists_are_ids() -> None:
    layer = one_feature()
    for ids in (7, [1, 3], [[1, 2], [19, 0]]):
        np.testing.assert_array_equal(layer({"x": ids})["x"], ROWS[np.asarray(ids)])


def test_float_ids_that_are_no_rows_fail() -> None:
    layer = one_feature()
    for bad in (0.5, -1.0, np.nan, np.inf):
        with pytest.raises(tf.errors.InvalidArgumentError, match="whole numbers"):
            layer({"x": np.array([3.0, bad], np.float32)})
    large = TPUEmbedding(FeatureConfig(TableConfig(2**24 + 1, 1, "large", initializer="zeros")))
    with pytest.raises(ConfigError, match="'large'"):  # float32 has no 16777217
        large(np.array([1.0], np.float32))


def test_a_model_that_keras_traces_with_floats_looks_up_rows() -> None:
    class Subclassed(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = TPUEmbedding(FeatureConfig(table()), "sgd")

        def call(self, ids: Any) -> Any:
            return self.embedding(ids)

    model = Subclassed()
    model.build((None, 2))
    np.testing.assert_array_equal(model.predict(np.array([[1, 2], [3, 4]]), verbose=0), ROWS[[[1, 2], [3, 4]]])


def test_the_output_has_the_structure_of_the_config() -> None:
    shared = table(combiner="sum")
    config = {"a": FeatureConfig(shared), "b": [FeatureConfig(shared), (FeatureConfig(shared),)]}
    layer = TPUEmbedding(config, "sgd")
    found = layer({"a": np.array([1]), "b": [ragged([[2, 3]]), (np.array([[4, 5]]),)]})
    tf.nest.assert_same_structure(found, {"a": 0, "b": [0, (0,)]})
    np.testing.assert_array_equal(found["a"], ROWS[[1]])
    np.testing.assert_allclose(found["b"][0], ROWS[[2]] + ROWS[[3]], atol=1e-6)
    np.testing.assert_array_equal(found["b"][1][0], ROWS[[[4, 5]]])
    bare = TPUEmbedding(FeatureConfig(shared), "sgd")
    np.testing.assert_array_equal(bare(np.array([3])), ROWS[[3]])


def test_code_with_tensorflows_configs_has_tensorflows_activations() -> None:
    """`embedding_tables` maps the objects that the user passed, which TensorFlow's own lookup takes too."""
    one = E.TableConfig(20, 4, known_rows, combiner="sqrtn", name="one")
    two = E.TableConfig(20, 4, known_rows, combiner="mean", name="two")
    features = {
        "ids": E.FeatureConfig(one),
        "nested": [E.FeatureConfig(two), {"sequence": E.FeatureConfig(one, max_sequence_length=2)}],
    }
    layer = TPUEmbedding(features, E.Adagrad(0.1))
    assert set(layer.embedding_tables) == {one, two}
    ids = {"ids": tf.constant([4, 5, 6, 7, 8]), "nested": [sparse(LISTS), {"sequence": ragged(LISTS)}]}
    weights = {"ids": None, "nested": [sparse(WEIGHTS, tf.float32), {"sequence": None}]}
    truth = E.serving_embedding_lookup(ids, weights, dict(layer.embedding_tables), features)
    found = layer(ids, weights)
    for mine, theirs in zip(tf.nest.flatten(found), tf.nest.flatten(truth), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)


def test_symbolic_inputs_have_symbolic_activations() -> None:
    shared = table(combiner="sum")
    features = {"list": FeatureConfig(shared), "pair": FeatureConfig(shared)}
    inputs = {
        "list": keras.Input((None,), dtype="int64", ragged=True, name="list"),
        "pair": keras.Input((2,), dtype="int64", name="pair"),
    }
    rows = TPUEmbedding(features, "adam")(inputs)
    assert [tuple(rows[name].shape) for name in features] == [(None, 4), (None, 2, 4)]
    model = keras.Model(inputs, keras.ops.concatenate([rows["list"][:, None], rows["pair"]], 1))
    found = model({"list": ragged(LISTS), "pair": tf.constant([[1, 2]] * 5)})
    np.testing.assert_allclose(found[:, 0], combined(LISTS, ONES, "sum"), atol=1e-6)
    np.testing.assert_array_equal(found[:, 1:], ROWS[[[1, 2]] * 5])


@pytest.mark.parametrize("policy", ["zeros", 5])
def test_ids_outside_follow_their_policy(policy: str | int) -> None:
    layer = one_feature(table(combiner="mean"), out_of_vocabulary=policy)
    stand_in = np.zeros(4) if policy == "zeros" else ROWS[5]
    found = layer({"x": np.array([3, 20, -2, 2**40])})["x"]
    np.testing.assert_array_equal(found, [ROWS[3], stand_in, stand_in, stand_in])
    sequences = one_feature(max_sequence_length=3, out_of_vocabulary=policy)
    for make in KINDS.values():  # the padding of lists is -1, and no other id
        lists = layer({"x": make([[3, 20, -1], [-2], [-1], [1]])})["x"]
        np.testing.assert_allclose(lists, [(ROWS[3] + stand_in) / 2, stand_in, np.zeros(4), ROWS[1]], atol=1e-6)
        found = sequences({"x": make([[3, -2, 20], [-1, 7]])})["x"]
        np.testing.assert_array_equal(found, [[ROWS[3], stand_in, stand_in], [np.zeros(4), ROWS[7], np.zeros(4)]])


def test_a_feature_takes_the_policy_of_its_table() -> None:
    shared = table(out_of_vocabulary="zeros")
    layer = TPUEmbedding({"a": FeatureConfig(shared), "b": FeatureConfig(shared, out_of_vocabulary=1)}, "sgd")
    found = layer({"a": np.array([20]), "b": np.array([20])})
    np.testing.assert_array_equal(found["a"], np.zeros((1, 4)))
    np.testing.assert_array_equal(found["b"], ROWS[[1]])


def test_an_id_outside_fails_and_is_named() -> None:
    words = r"feature x: id 20 of row 1 .*table t, which has 20 rows"
    cases = [(one_feature(), ids) for ids in (np.array([3, 20]), ragged([[3], [20]]), sparse([[3], [20]]))]
    cases += [(one_feature(max_sequence_length=1), make([[3], [20]])) for make in KINDS.values()]
    for layer, ids in cases:
        for call in (layer, tf.function(layer)):
            with pytest.raises(tf.errors.InvalidArgumentError, match=words):
                call({"x": ids})


def test_negative_ids_of_lists_are_dropped_unless_unchecked() -> None:
    checked = one_feature(table(combiner="mean"))
    unchecked = one_feature(validate_weights_and_indices=False)
    for make in KINDS.values():
        ids = make([[3, -1], [-7], [1]])
        np.testing.assert_allclose(checked({"x": ids})["x"], [ROWS[3], np.zeros(4), ROWS[1]], atol=1e-6)
        with pytest.raises(tf.errors.InvalidArgumentError):
            unchecked({"x": ids})


def test_an_output_shape_lays_out_ragged_ids_as_tensorflow_does() -> None:
    """As many rows as examples are combined; a multiple of them are sequences."""
    ids = ragged([[3, 1, 3], [7], [0, 19]])
    for shape in ([3], [3, 1], [3, 2], [6]):
        theirs = E.TableConfig(20, 4, known_rows, combiner="sum", name="t")
        config = {"x": E.FeatureConfig(theirs, output_shape=shape)}
        truth = E.serving_embedding_lookup({"x": ids}, None, {theirs: tf.Variable(ROWS)}, config)["x"]
        found = one_feature(table(combiner="sum"), output_shape=tuple(shape))({"x": ids})["x"]
        np.testing.assert_allclose(found, truth, atol=1e-6, err_msg=str(shape))


def test_a_serving_config_looks_up_other_features_of_the_tables() -> None:
    layer = TPUEmbedding({"x": FeatureConfig(table()), "y": FeatureConfig(table("u"))}, "sgd")
    served = {"only": FeatureConfig(table(combiner="sum"))}
    with tf.GradientTape() as tape:
        found = layer({"only": ragged([[1, 2]])}, serving_config=served)["only"]
    np.testing.assert_allclose(found, [ROWS[1] + ROWS[2]], atol=1e-6)
    assert set(tape.gradient(found, layer.trainable_variables)) == {None}
    other_size = {"only": FeatureConfig(TableConfig(21, 4, "t"))}
    with pytest.raises(ConfigError, match=r"'t'.*21"):
        layer({"only": np.array([1])}, serving_config=other_size)
    with pytest.raises(TpuEmbedError, match="'tt'") as caught:
        layer({"only": np.array([1])}, serving_config={"only": FeatureConfig(table("tt"))})
    assert isinstance(caught.value, KeyError)


def test_a_functional_model_is_refused_as_it_is_built() -> None:
    """Not minutes later, by the first batch."""

    def symbolic(ids: Any, weights: Any = None, **options: Any) -> Callable[[], Any]:
        given = None if weights is None else {"x": weights}
        return lambda: one_feature(**options)({"x": ids}, given)

    two = TPUEmbedding({name: FeatureConfig(table(name)) for name in "ab"}, "sgd")
    lists, weights = keras.Input((None,), dtype="int64", ragged=True), keras.Input((None,), ragged=True)
    dense, strings = keras.Input((3,), dtype="int64"), keras.Input((), dtype="string")
    few = keras.Input((3,), dtype="int64", sparse=True)
    names, numbers = Vocabulary(["a"], oov_buckets=1), Vocabulary([5], dtype="int64", oov_buckets=1)
    cases: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: two({"a": lists, "b": lists}, {"a": weights}),
            r"keys .*\[a, b\], got \[a\]\. Give None for a feature",
        ),
        (symbolic(strings), "'x': ids must be integers, got string. Give the feature a vocabulary"),
        (symbolic(keras.Input((), dtype="bool")), "'x': ids must be integers, got bool"),
        (symbolic(keras.Input((), dtype="int64"), vocabulary=names), "'x': .* names of type string, got int64"),
        (symbolic(strings, vocabulary=numbers), "'x': .* names of type int64, got string"),
        (symbolic(dense, max_sequence_length=2), "'x': max_sequence_length needs sparse or ragged ids"),
        (symbolic(dense, keras.Input((3,))), "'x': weights were given for dense ids"),
        (symbolic(lists, keras.Input((None,))), "'x': .*Make both ragged"),
        (symbolic(few, keras.Input((4,), sparse=True)), r"'x': .*\(None, 3\).*\(None, 4\)"),
        (symbolic(lists, weights, max_sequence_length=2), "'x': weights have no meaning"),
        (symbolic(keras.Input((), dtype="int64", ragged=True)), r"'x': ragged ids must have rank 2.*shape=\(None,\)"),
        (symbolic(keras.Input((), dtype="int64", sparse=True)), r"'x': sparse ids must have rank 2.*shape=\(None,\)"),
    ]
    assert_each_is_refused(ConfigError, cases)
    rows = two({"a": lists, "b": lists}, {"a": weights, "b": None})
    model = keras.Model([lists, weights], keras.ops.stack([rows["a"], rows["b"]]))
    given = [ragged(LISTS), ragged(WEIGHTS, tf.float32)]
    for found, shares in zip(model(given), (WEIGHTS, ONES), strict=True):
        np.testing.assert_allclose(found, combined(LISTS, shares, "mean"), atol=1e-6)
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        assert_each_is_refused(
            RuntimeError, [(lambda: two({"a": lists, "b": lists}), "created under .* is trained under")]
        )


def test_inputs_that_have_no_meaning_are_refused_by_name() -> None:
    layer = one_feature()

    def look_up(ids: Any, weights: Any = None) -> Callable[[], Any]:
        return lambda: layer({"x": ids}, None if weights is None else {"x": weights})

    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: layer({}), "x"),
        (lambda: layer({"x": np.array([1]), "z": np.array([1])}), "z"),
        (look_up(None), "'x'"),
        (look_up(np.array(["a"])), "'x': ids must be integers"),
        (look_up([[1, 2], [3]]), "'x'"),
        (look_up(tf.ragged.constant([[[1]]])), "'x': ragged ids must have rank 2"),
        (look_up(np.array([1]), np.array([1.0])), "'x': weights were given for dense ids"),
        (look_up(ragged([[1]]), sparse([[1.0]], tf.float32)), "'x'.*Make both ragged"),
        (look_up(sparse([[1]]), ragged([[1.0]], tf.float32)), "'x'.*Make both sparse"),
        (lambda: one_feature(output_shape=(3,))({"x": ragged(LISTS)}), r"output_shape \(3,\): the ids give .*\(5,\)"),
        (lambda: one_feature(output_shape=(5, 2))({"x": sparse(LISTS)}), r"output_shape \(5, 2\): the ids give"),
    ]
    assert_each_is_refused(ConfigError, cases)
    assert_each_is_refused(ValueError, cases)
