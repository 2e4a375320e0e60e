"""Buckets that a key chooses: those of TensorFlow's `to_hash_bucket_strong`, and of Keras' Hashing layer with a salt."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, Vocabulary, export_saved_model
from tpuembed.config import feature_config_from_dict
from tpuembed.errors import CheckpointMismatchError, ConfigError
from tpuembed.export.graph.table_names import constant_names
from tpuembed.lookup.names import find_names
from tpuembed.lookup.ranges import NOWHERE
from tpuembed.restore import NamesPlan
from tpuembed.vocabulary import BUCKETS, VocabularyHeader
from tpuembed.vocabulary.fingerprint import fingerprints
from tpuembed.vocabulary.text import Texts

KEYS = [(0, 0), (133, 137), (2**63 - 1, -(2**63)), (-1, 6364136223846793005)]
KEY = (133, 137)
KNOWN = ["ann", "bob", "eve"]


def unknown_names(seed: int) -> list[bytes]:
    """Return random bytes of all lengths up to 70, in random order, and of some longer ones."""
    random = np.random.default_rng(seed)
    sizes = random.permutation([*range(1, 71), *range(1, 71), 255, 256, 1000, 1 << 13])
    return [random.bytes(int(size)) for size in sizes] + [b"\0" * size for size in range(1, 20)]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("buckets", [1, 2, 97, 2**31 - 1 - 3])
@pytest.mark.sampled(6)
def test_buckets_are_those_of_tensorflow(key: tuple[int, int], buckets: int) -> None:
    names = [b"", *unknown_names(buckets)]
    vocabulary = Vocabulary(KNOWN, oov_buckets=buckets, oov_key=key)
    expected = tf.strings.to_hash_bucket_strong(tf.constant(names), buckets, list(key)).numpy()
    np.testing.assert_array_equal(vocabulary.lookup(names), expected)
    np.testing.assert_array_equal(vocabulary.lookup(KNOWN), buckets + np.arange(3))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("grows", [False, True])
def test_a_layer_chooses_the_buckets_of_keras_hashing(grows: bool, training: bool) -> None:
    vocabulary = Vocabulary(KNOWN, oov_buckets=7, oov_key=KEY, grows=grows)
    layer = TPUEmbedding({"user": FeatureConfig(TableConfig(10, 4, "users"), vocabulary=vocabulary)}, optimizer="sgd")
    names = tf.constant([b"bob", *unknown_names(1)])  # the table has no room, so that none of them gets a row
    expected = np.array(keras.layers.Hashing(7, salt=list(KEY))(names))
    expected[0] = 8
    rows = layer.names_to_rows({"user": names}, training=training)["user"]
    np.testing.assert_array_equal(rows, expected)
    found = layer({"user": names}, training=training)["user"]
    np.testing.assert_array_equal(found, np.asarray(next(iter(layer.embedding_tables.values())))[expected])


def test_it_is_saved_and_told_apart() -> None:
    keyed, plain = (Vocabulary(KNOWN, oov_buckets=7, oov_key=key) for key in (KEY, None))
    content = keyed.to_bytes()
    again = Vocabulary.from_bytes(content)
    assert again.oov_key == VocabularyHeader.from_bytes(content).oov_key == KEY
    assert Vocabulary.from_options(keyed.options(), "here").oov_key == KEY
    assert "oov_key" not in plain.options()
    assert again.same_names(keyed)
    assert not keyed.same_names(plain)
    moved = NamesPlan.of(keyed, plain).numbers
    np.testing.assert_array_equal(moved, [-2] * 7 + [7, 8, 9])  # a bucket has other names
    with refused(ConfigError):
        plain.assign(keyed)


def test_a_checkpoint_with_another_key_is_refused(tmp_path: Any) -> None:
    def layer(key: tuple[int, int] | None) -> TPUEmbedding:
        vocabulary = Vocabulary(KNOWN, oov_buckets=2, oov_key=key)
        made = TPUEmbedding({"user": FeatureConfig(TableConfig(9, 4, "users"), vocabulary=vocabulary)}, optimizer="sgd")
        made.build({"user": (None,)})
        return made

    path = tf.train.Checkpoint(layer=layer(KEY)).write(str(tmp_path / "ckpt"))
    tf.train.Checkpoint(layer=layer(KEY)).read(path)
    layer(KEY).restore_tables(path)
    for key in (None, (137, 133)):
        with refused(CheckpointMismatchError):
            tf.train.Checkpoint(layer=layer(key)).read(path)
        with refused(CheckpointMismatchError):
            layer(key).restore_tables(path)


@pytest.mark.parametrize("other", [None, (-7, 137137137)])
def test_no_message_has_a_key(tmp_path: Any, other: tuple[int, int] | None) -> None:
    secret = (133133133133, 713713713713)
    one, two = (Vocabulary(KNOWN, oov_buckets=2, oov_key=key) for key in (secret, other))

    def layer(vocabulary: Vocabulary) -> TPUEmbedding:
        made = TPUEmbedding({"user": FeatureConfig(TableConfig(9, 4, "users"), vocabulary=vocabulary)}, optimizer="sgd")
        made.build({"user": (None,)})
        return made

    path = tf.train.Checkpoint(layer=layer(one)).write(str(tmp_path / "ckpt"))
    table = {"vocabulary_size": 9, "dim": 4}
    features = {
        name: {"table": "t", "vocabulary": each.options()} for name, each in zip(("a", "b"), (one, two), strict=True)
    }
    actions: list[Any] = [
        lambda: one.assign(two),
        lambda: two.assign(one),
        lambda: layer(two).restore_tables(path),
        lambda: tf.train.Checkpoint(layer=layer(two)).read(path),
        lambda: export_saved_model(
            path,
            tmp_path / "m",
            serving_config={"features": {"user": FeatureConfig(TableConfig(9, 4, "users"), vocabulary=two)}},
        ),
        lambda: feature_config_from_dict({"tables": {"t": table}, "features": features}),
        lambda: Vocabulary(KNOWN, oov_buckets=2, oov_key=(*secret, 1)),  # type: ignore[arg-type]
    ]
    for number, act in enumerate(actions):
        with pytest.raises((ConfigError, CheckpointMismatchError), match="oov_key") as caught:
            act()
        assert not any(str(part) in str(caught.value) for part in (*secret, 137137137)), number


@pytest.mark.parametrize("key", [(1,), (1, 2, 3), (1, 2**63), (1, True), (1, "2"), 7, "ab"])
def test_a_wrong_key_is_refused(key: Any) -> None:
    with refused(ConfigError):
        Vocabulary(KNOWN, oov_buckets=2, oov_key=key)


def test_a_key_of_integers_is_refused() -> None:
    with refused(ConfigError):
        Vocabulary(dtype="int64", oov_buckets=2, oov_key=KEY)


@pytest.mark.parametrize("salt", [b"", b"1\0", b"x" * 70])
@pytest.mark.parametrize("key", KEYS)
def test_fingerprints_are_those_of_tensorflow(key: tuple[int, int], salt: bytes) -> None:
    names = [b"", *unknown_names(3)]
    expected = tf.strings.to_hash_bucket_strong(tf.constant([salt + name for name in names]), BUCKETS, list(key))
    np.testing.assert_array_equal(fingerprints(Texts.of(names), salt, key), expected)


TWINS = [b"0123456789abcdef0123456789abcdef", b"01234567hostile!\x81\x8f\xbaQY5\x84\xad\xfcK\xae\x1eir\xf3]"]
"""Two names of one fingerprint without a key. The second was computed from the first."""


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("buckets", [0, 4])
def test_nobody_without_the_key_makes_a_name_that_is_taken_for_another(buckets: int, grows: bool) -> None:
    assert len(set(fingerprints(Texts.of(TWINS)).tolist())) == 1
    vocabulary = Vocabulary([*KNOWN, TWINS[0]], oov_buckets=buckets, oov_key=KEY, grows=grows)
    table = TableConfig(10, 4, "users", out_of_vocabulary="zeros")
    layer = TPUEmbedding({"user": FeatureConfig(table, vocabulary=vocabulary)}, optimizer="sgd")
    names = tf.constant(TWINS)
    unknown = int(tf.strings.to_hash_bucket_strong(names, buckets, list(KEY))[1]) if buckets else NOWHERE
    for call in (layer.names_to_rows, tf.function(layer.names_to_rows)):
        rows = call({"user": names})["user"].numpy()
        assert rows.tolist() == [buckets + 3, unknown]
    numbers = find_names(names, constant_names(vocabulary))
    assert numbers.numpy().tolist() == [3, -1]
    if grows:
        rows = layer.names_to_rows({"user": names}, training=True)["user"]
        assert rows.numpy().tolist() == [buckets + 3, buckets + 4]
        assert find_names(names, constant_names(vocabulary)).numpy().tolist() == [3, 4]
