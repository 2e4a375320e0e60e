"""SavedModels that Keras and TensorFlow wrote: requests share runs by proof, and get what each gets alone."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tpuembed_serving.tensorflow import session as runtime

Array = np.ndarray[Any, Any]
WORDS = np.array(["a", "b c", "", "dd", "a b c d"], object)


def ids(name: str, *shape: int | None) -> Any:
    return keras.Input(shape, dtype="int64", name=name)


def towers() -> Any:
    inputs = [ids(f"f{number}") for number in range(3)]
    hidden = layers.Concatenate()([layers.Embedding(50, 8)(value) for value in inputs])
    hidden = layers.Dropout(0.5)(layers.BatchNormalization()(layers.Dense(8, activation="gelu")(hidden)))
    return keras.Model(
        inputs, {"click": layers.Dense(1, activation="sigmoid")(hidden), "watch": layers.Dense(2)(hidden)}
    )


def masked_mean() -> Any:
    history = ids("history", None)
    return keras.Model(history, layers.GlobalAveragePooling1D()(layers.Embedding(50, 8, mask_zero=True)(history)))


def attention() -> Any:
    history = ids("history", 6)
    found = layers.Embedding(50, 8)(history)
    found = layers.LayerNormalization()(layers.MultiHeadAttention(2, 4)(found, found) + found)
    return keras.Model(history, layers.Dense(2)(layers.Flatten()(layers.Conv1D(4, 3, padding="same")(found))))


def texts() -> Any:
    word, number = keras.Input((), dtype="string", name="word"), keras.Input((1,), name="number")
    parts = [
        layers.Embedding(5, 4)(layers.StringLookup(vocabulary=["a", "dd"], num_oov_indices=2)(word)),
        layers.Embedding(16, 4)(layers.Hashing(16)(word)),
        layers.Flatten()(
            layers.Embedding(6, 4)(layers.TextVectorization(vocabulary=["a", "b"], output_sequence_length=3)(word))
        ),
        layers.Flatten()(layers.Embedding(4, 4)(layers.Discretization(bin_boundaries=[0.0, 1.0])(number))),
        layers.Normalization(mean=[1.0], variance=[2.0])(number),
    ]
    return keras.Model([word, number], layers.Dense(2)(layers.Concatenate()(parts)))


KERAS: Sequence[Callable[[], Any]] = (towers, masked_mean, attention, texts)


class Ranker(tf.Module):
    """A classifier of parsed examples, as Estimators were, and a lookup by names in a hash table."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = tf.Variable(np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32))
        names = tf.lookup.KeyValueTensorInitializer(["a", "dd"], tf.constant([7, 9], tf.int64))
        self.table = tf.lookup.StaticHashTable(names, 0)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="examples")])
    def classify(self, examples: Any) -> dict[str, Any]:
        features = {
            "ids": tf.io.VarLenFeature(tf.int64),
            "ragged": tf.io.RaggedFeature(tf.int64),
            "one": tf.io.FixedLenFeature([], tf.int64, 0),
        }
        parsed = tf.io.parse_example(examples, features)
        parts = [
            tf.nn.safe_embedding_lookup_sparse(self.rows, parsed["ids"], combiner="mean"),
            tf.reduce_sum(tf.gather(self.rows, parsed["ragged"]), 1),
            tf.gather(self.rows, parsed["one"]),
        ]
        scores = tf.nn.softmax(tf.concat(parts, 1))
        return {"scores": scores, "classes": tf.tile(tf.constant([["x", "y"]]), [tf.shape(scores)[0], 1])}

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="word")])
    def by_name(self, word: Any) -> dict[str, Any]:
        tf.debugging.assert_less(tf.strings.length(word), 100)
        return {"row": tf.gather(self.rows, self.table.lookup(word))}


def example(rng: np.random.Generator) -> bytes:
    def integers(count: int) -> Any:
        return tf.train.Feature(int64_list=tf.train.Int64List(value=rng.integers(0, 50, count).tolist()))

    features = {
        "ids": integers(int(rng.integers(0, 4))),
        "ragged": integers(int(rng.integers(0, 4))),
        "one": integers(1),
    }
    return bytes(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())


def draw(rng: np.random.Generator, info: Any, shape: Sequence[int], rows: int) -> Array:
    if info.alias == "examples":
        return np.array([example(rng) for _ in range(rows)], object)
    if info.dtype == "string":
        return WORDS[rng.integers(0, len(WORDS), rows)]
    if info.dtype == "int64":
        return rng.integers(0, 50, (rows, *shape))
    return rng.normal(size=(rows, *shape)).astype(np.float32)


def check(servable: Any, name: str) -> None:
    """Its requests may share runs, and give the same in one as alone."""
    signature = servable.signatures[name]
    merging = servable.merging(signature)
    assert merging is not None
    assert merging.is_proven
    rng = np.random.default_rng(0)
    shapes = [[5 if size == -1 else size for size in shape or ()] for shape in merging.shapes]
    for _ in range(5):
        requests = [
            [draw(rng, info, shape, rows) for info, shape in zip(signature.inputs, shapes, strict=True)]
            for rows in rng.integers(1, 4, 4).tolist()
        ]
        merged = servable.run(signature, [np.concatenate(parts) for parts in zip(*requests, strict=True)])
        start = 0
        for own in requests:
            stop = start + len(own[0])
            for found, want in zip(merged, servable.run(signature, own), strict=True):
                if want.dtype.kind == "f":
                    scale = max(float(np.abs(want).max()), 1e-6)
                    np.testing.assert_allclose(found[start:stop], want, rtol=0, atol=1e-5 * scale)
                else:
                    np.testing.assert_array_equal(found[start:stop], want)
            start = stop


@pytest.mark.nightly
@pytest.mark.parametrize("build", KERAS)
def test_models_that_keras_saves(build: Callable[[], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keras.utils.set_random_seed(1)
    build().export(str(tmp_path / "m" / "1"), verbose=False)
    servable = runtime.load(tmp_path / "m" / "1")
    check(servable, "serving_default")
    servable.close()
    assert "are not batched" not in caplog.text


def test_modules_that_tensorflow_saves(tmp_path: Path) -> None:
    module = Ranker()
    signatures = {"serving_default": module.classify, "by_name": module.by_name}
    tf.saved_model.save(module, str(tmp_path / "m" / "1"), signatures=signatures)
    servable = runtime.load(tmp_path / "m" / "1")
    for name in signatures:
        check(servable, name)
    servable.close()
