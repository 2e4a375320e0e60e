"""Names in the place of rows: against Keras' lookup layers, and against a counter."""

import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.contract_refusals import assert_each_is_refused
from tpuembed import SGD, FeatureConfig, TableConfig, TPUEmbedding, Vocabulary
from tpuembed.errors import ConfigError, TpuEmbedError

Array = np.ndarray[Any, Any]
DType = Literal["string", "int64"]

_RANDOM = np.random.default_rng(4)
NAMES: dict[DType, list[Any]] = {
    "string": [*(f"name {number}" for number in range(20)), "ä", "a/b", "x" * 300],
    "int64": [int(number) for number in _RANDOM.choice(2**62, 23, replace=False)],
}
UNKNOWN: dict[DType, list[Any]] = {
    "string": [f"other {number}" for number in range(30)],
    "int64": [int(number) for number in _RANDOM.choice(2**62, 30, replace=False)],
}
PADDING: dict[DType, Any] = {"string": "", "int64": -1}


def keras_lookup(dtype: DType, oov: int) -> Any:
    kind = keras.layers.StringLookup if dtype == "string" else keras.layers.IntegerLookup
    return kind(vocabulary=NAMES[dtype], num_oov_indices=oov, mask_token=None)


def layer_of(vocabulary: Any, policy: str | int = "error", **options: Any) -> TPUEmbedding:
    """A feature with a name per example, and one with a list of them, of one table of 40 rows."""
    table = TableConfig(40, 3, "t", combiner="sum", out_of_vocabulary=policy)
    features = {name: FeatureConfig(table, vocabulary=vocabulary) for name in ("one", "bag")}
    return TPUEmbedding(features, SGD(0.5), **options)


def rows_of(layer: TPUEmbedding) -> Array:
    (variable,) = layer.embedding_tables.values()
    return np.asarray(variable)


def batch(dtype: DType, unknown: bool) -> dict[str, Any]:
    """Names that occur several times, and lists of them with padding and without an element."""
    pool = NAMES[dtype] + (UNKNOWN[dtype] if unknown else [])
    picked = [pool[index] for index in np.random.default_rng(5).integers(0, len(pool), 12)]
    lists = [picked[:3], [], [picked[3], PADDING[dtype], picked[4]], picked[5:6]]
    return {"one": tf.constant(picked[6:10], dtype), "bag": tf.ragged.constant(lists, dtype)}


@pytest.mark.parametrize(("dtype", "oov"), [("string", 0), ("string", 3), ("int64", 1)])
def test_names_train_the_rows_that_keras_lookups_number(dtype: DType, oov: int) -> None:
    """The same model by numbers: Keras' lookup in front of a layer without a vocabulary."""
    vocabulary = Vocabulary(NAMES[dtype], dtype=dtype, oov_buckets=oov)
    layer, plain = layer_of(vocabulary), layer_of(None)
    next(iter(plain.embedding_tables.values())).assign(rows_of(layer))
    given, lookup = batch(dtype, unknown=oov > 0), keras_lookup(dtype, oov)
    assert vocabulary.get_vocabulary() == lookup.get_vocabulary()
    flat = given["bag"].flat_values
    is_padding = flat == PADDING[dtype]
    known = tf.where(is_padding, NAMES[dtype][0], flat)  # without buckets, Keras' lookup has no number for padding
    numbers = tf.where(is_padding, tf.constant(-1, tf.int64), lookup(known))
    ids = {"one": lookup(given["one"]), "bag": given["bag"].with_values(numbers)}
    for call in (layer, tf.function(layer)):
        for name, truth in plain(ids).items():
            for bag in (given["bag"], given["bag"].to_sparse()):
                np.testing.assert_array_equal(call({**given, "bag": bag})[name], truth)
    for one, inputs in ((layer, given), (plain, ids)):
        optimizer = keras.optimizers.SGD(0.1)
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(rows**2) for rows in one(inputs).values()])
        gradients = tape.gradient(loss, one.trainable_variables)
        optimizer.apply_gradients(zip(gradients, one.trainable_variables, strict=True))
    np.testing.assert_allclose(rows_of(layer), rows_of(plain), atol=1e-6)


@pytest.mark.parametrize("policy", ["zeros", 30])
def test_unknown_names_follow_their_policy(policy: str | int) -> None:
    layer = layer_of(Vocabulary(NAMES["string"]), policy)
    stand_in = np.zeros(3) if policy == "zeros" else rows_of(layer)[30]
    found = layer({"one": tf.constant(["nobody", "ä"]), "bag": tf.ragged.constant([["nobody", "a/b"], []])})
    np.testing.assert_array_equal(found["one"], [stand_in, rows_of(layer)[20]])
    np.testing.assert_allclose(found["bag"], [stand_in + rows_of(layer)[21], np.zeros(3)], atol=1e-6)


def test_an_unknown_name_fails_without_a_policy() -> None:
    layer = layer_of(Vocabulary(NAMES["string"]))
    with pytest.raises((TpuEmbedError, tf.errors.InvalidArgumentError), match="one"):
        layer({"one": tf.constant(["nobody"]), "bag": tf.ragged.constant([["ä"]])})


def test_a_list_of_names_is_a_vocabulary() -> None:
    table = TableConfig(9, 3, "t")
    layer = TPUEmbedding(FeatureConfig(table, vocabulary=["b", "a"], oov_buckets=2), "sgd")
    np.testing.assert_array_equal(layer(tf.constant(["a", "b"])), rows_of(layer)[[3, 2]])


def test_the_input_pipeline_finds_the_rows() -> None:
    """With takes_rows, `names_to_rows` in Dataset.map gives what the layer's own lookup would."""
    names = Vocabulary(NAMES["string"], oov_buckets=2)
    layer = layer_of(names, takes_rows=True)
    given, lookup = batch("string", unknown=True), keras_lookup("string", 2)
    data = tf.data.Dataset.from_tensors(given).map(layer.names_to_rows)
    [found] = list(data)
    np.testing.assert_array_equal(found["one"], lookup(given["one"]))
    np.testing.assert_array_equal(layer(found)["one"], rows_of(layer)[lookup(given["one"])])
    other = layer_of(Vocabulary(NAMES["string"], oov_buckets=2))
    next(iter(other.embedding_tables.values())).assign(rows_of(layer))
    np.testing.assert_array_equal(layer(found)["bag"], other(given)["bag"])


@pytest.mark.parametrize("way", ["tf.train.Checkpoint", "weights.h5", "keras"])
def test_names_come_back_with_their_rows(tmp_path: Path, way: str) -> None:
    """Into a layer whose vocabulary has the same options and no name yet."""

    def model_of(vocabulary: Vocabulary) -> Any:
        ids = keras.Input((), dtype="string", name="one")
        table = TableConfig(40, 3, "t")
        return keras.Model(ids, TPUEmbedding(FeatureConfig(table, vocabulary=vocabulary), "adagrad")(ids))

    saved, new = model_of(Vocabulary(NAMES["string"], oov_buckets=1)), model_of(Vocabulary(oov_buckets=1))
    if way == "keras":
        saved.save(tmp_path / "m.keras")
        new = keras.models.load_model(tmp_path / "m.keras")
    elif way == "weights.h5":
        saved.save_weights(tmp_path / "m.weights.h5")
        new.load_weights(tmp_path / "m.weights.h5")
    else:
        prefix = tf.train.Checkpoint(model=saved).write(str(tmp_path / "ckpt"))
        tf.train.Checkpoint(model=new).read(prefix).assert_existing_objects_matched()
    asked = tf.constant([*NAMES["string"], "nobody"])
    np.testing.assert_array_equal(new(asked), saved(asked))


# ---- the vocabulary itself


def test_adapt_counts_as_a_counter_does() -> None:
    words = np.array([f"w{index}" for index in np.random.default_rng(3).zipf(1.5, 3000) % 200])
    data = tf.data.Dataset.from_tensor_slices(words).batch(64)
    expected = [word for word, count in collections.Counter(words.tolist()).most_common() if count >= 3]
    assert 10 < len(expected) < len(set(words))
    assert Vocabulary.adapt(data, min_count=3).get_vocabulary() == expected
    ragged = tf.data.Dataset.from_tensors(tf.RaggedTensor.from_row_lengths(words, [1000, 0, 2000]))
    assert Vocabulary.adapt(ragged, min_count=3, oov_buckets=1).get_vocabulary() == ["[UNK]", *expected]
    numbers = tf.data.Dataset.from_tensor_slices(np.array([7, 5, 7, -1])).batch(2)
    assert Vocabulary.adapt(numbers, dtype="int64").get_vocabulary() == [7, 5, -1]


def test_files_have_one_name_a_line(tmp_path: Path) -> None:
    lines = ["b", "", "ä ö", "c"]
    (tmp_path / "names.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert Vocabulary.from_file(tmp_path / "names.txt", oov_buckets=1).get_vocabulary() == ["[UNK]", *lines]
    numbers = [5, -3, 2**63 - 1]
    (tmp_path / "numbers.txt").write_text("".join(f"{number}\n" for number in numbers))
    np.save(tmp_path / "numbers.npy", np.array(numbers))
    for name in ("numbers.txt", "numbers.npy"):
        assert Vocabulary.from_file(tmp_path / name, dtype="int64").get_vocabulary() == numbers


def test_what_is_no_vocabulary_is_refused(tmp_path: Path) -> None:
    two_rows = TableConfig(2, 3, "t")
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: Vocabulary(["a", "b", "a"]), "'a'"),
        (lambda: Vocabulary(["a", 3]), "3"),
        (lambda: Vocabulary("item"), "'item'"),
        (lambda: Vocabulary([2**63], dtype="int64"), "9223372036854775808"),
        (lambda: Vocabulary(["a"], oov_buckets=-1), "oov_buckets.*-1"),
        (lambda: Vocabulary(["a"], dtype="float"), "dtype.*'float'"),  # type: ignore[arg-type]
        (lambda: Vocabulary.from_file(tmp_path / "missing"), "missing"),
        (lambda: Vocabulary.adapt([["a"]], min_count=0), "min_count.*0"),
        (lambda: FeatureConfig(two_rows, vocabulary=["a", "b"], oov_buckets=1), "'t'.* 3 rows"),
        (lambda: FeatureConfig(two_rows, oov_buckets=1), "oov_buckets=1 without a vocabulary"),
        (lambda: FeatureConfig(two_rows, vocabulary=3), "'t'.*3"),
    ]
    assert_each_is_refused(ConfigError, cases)


def test_two_features_of_a_table_share_one_vocabulary() -> None:
    table = TableConfig(9, 3, "t")
    features = {name: FeatureConfig(table, vocabulary=Vocabulary(["a"])) for name in ("x", "y")}
    with pytest.raises(ConfigError, match=r"'t'.*same"):
        TPUEmbedding(features, "sgd")


def test_names_of_another_type_are_refused() -> None:
    layer = layer_of(Vocabulary(NAMES["string"]))
    with pytest.raises(ConfigError, match=r"'t'|'one'"):
        layer({"one": tf.constant([3]), "bag": tf.ragged.constant([[3]])})
