"""Names all the way: a layer that grows, its checkpoints and weight files, exports of all kinds, deltas, and evictions.

The truth is the live layer's own row of each name, read by a numpy dictionary.
"""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tpuembed import (
    FeatureConfig,
    TableConfig,
    TPUEmbedding,
    Vocabulary,
    export_model,
    export_saved_model,
)
from tpuembed.manifest import Manifest

Array = np.ndarray[Any, Any]
DIM = 4
HOSTILE = [b"\0", b"\xff\xfe", "é".encode(), "e\u0301".encode(), b"x" * 100_000, b" ", b"[UNK]", b"0"]
NAMES = [*HOSTILE, *(b"user %d" % number for number in range(40))]


def build() -> keras.Model:
    """Return a model of a single name and of a list, from one table that grows."""
    table = TableConfig(64, DIM, "users", combiner="sum")
    vocabulary = Vocabulary(oov_buckets=2, grows=True)
    features = {
        "user": FeatureConfig(table, vocabulary=vocabulary),
        "friends": FeatureConfig(table, vocabulary=vocabulary),
    }
    inputs = {
        "user": keras.Input((), dtype="string", name="user"),
        "friends": keras.Input((None,), dtype="string", ragged=True, name="friends"),
    }
    rows = TPUEmbedding(features, "adagrad", name="embedding", track_rows=True)(inputs)
    return keras.Model(
        inputs, {"user": keras.layers.Identity(name="user_rows")(rows["user"]), "friends": rows["friends"]}
    )


def train(model: keras.Model, names: list[bytes], seed: int) -> None:
    layer, rng = model.get_layer("embedding"), np.random.default_rng(seed)
    pick = tf.constant(rng.permutation(np.array([*names, b""], object)[:-1]))
    inputs = {"user": pick, "friends": tf.RaggedTensor.from_row_lengths(pick, [len(names)])}
    inputs["friends"] = tf.concat([inputs["friends"], tf.ragged.constant([[]] * (len(names) - 1), dtype=tf.string)], 0)
    with tf.GradientTape() as tape:
        found = layer(inputs, training=True)
        loss = tf.reduce_sum(found["user"] * tf.range(1.0, DIM + 1)) + tf.reduce_sum(found["friends"])
    tape.gradient(loss, layer.trainable_variables)


def rows_by_name(model: keras.Model, names: list[bytes]) -> Array:
    layer = model.get_layer("embedding")
    vocabulary, table = layer.vocabularies["users"], layer.named_variables()["users"].numpy()
    by_row = dict(zip(vocabulary.names(range(vocabulary.rows)), table, strict=False))
    buckets = keras.layers.StringLookup(vocabulary=["-"], num_oov_indices=2)(tf.constant(names)).numpy()
    return np.array([by_row.get(name, table[bucket]) for name, bucket in zip(names, buckets, strict=True)])


def check(version: Path, model: keras.Model, whole: bool) -> None:
    """Compare the answers of an export for all names, and for unknown ones, with the layer's rows."""
    names = [*NAMES, b"nobody", b"user 99"]
    truth, given = rows_by_name(model, names), tf.constant(names)
    lists = tf.stack([given, tf.fill([len(names)], b""), given[::-1]], 1)
    loaded = tf.saved_model.load(str(version))
    found = loaded.signatures["serving_default"](user=given if whole else given[:, None], friends=lists)
    np.testing.assert_array_equal(found["user"], truth)
    np.testing.assert_allclose(found["friends"], truth + truth[::-1], rtol=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["variables", "mmap"])
@pytest.mark.parametrize("kind", ["checkpoint", "keras"])
def test_saves_are_exported_by_name(kind: str, layout: str, tmp_path: Path) -> None:
    model = build()
    for seed, count in enumerate((10, 30, len(NAMES) - 3)):
        train(model, NAMES[:count], seed)
    path = str(tmp_path / "model.keras")
    if kind == "keras":
        model.save(path)
    else:
        path = tf.train.Checkpoint(model=model).save(str(tmp_path / "ckpt"))
    export_saved_model(path, tmp_path / "lookups", layout=layout)
    check(tmp_path / "lookups" / "1", model, whole=False)
    export_saved_model(path, tmp_path / "models", model=build, layout=layout)
    check(tmp_path / "models" / "1", model, whole=True)
    manifest = Manifest.read(tmp_path / "models" / "1")
    assert manifest is not None
    assert manifest.from_activations is not None
    assert not manifest.from_activations.left_out


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["variables", "mmap"])
def test_deltas_of_a_live_layer_follow_growth_and_evictions(layout: str, tmp_path: Path) -> None:
    model, folder = build(), tmp_path / "models"
    vocabulary = model.get_layer("embedding").vocabularies["users"]
    train(model, NAMES[:20], 0)
    export_model(model, folder, layout=layout)
    check(folder / "1", model, whole=True)
    for number in range(2, 8):
        train(model, NAMES[5 * number - 5 : 5 * number + 5], number)
        if number % 2:
            assert len(vocabulary.evict(not_seen_for=2))
        train(model, NAMES[5 * number : 5 * number + 8], 10 + number)
        report = export_model(model, folder, layout=layout, base=1, max_overlay=1.0)
        assert report.base is not None
        check(folder / str(number), model, whole=True)
    assert len(vocabulary) < len(NAMES)


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["by name", "by number, with one name more"])
def test_names_that_move_keep_their_counts(how: str, tmp_path: Path) -> None:
    model = build()
    for seed in range(6):
        train(model, NAMES[:4] if seed % 2 else NAMES[:8], seed)
    old = model.get_layer("embedding").vocabularies["users"]
    path = tf.train.Checkpoint(layer=model.get_layer("embedding")).save(str(tmp_path / "ckpt"))
    names = [name for name in old.names(range(2, old.rows)) if name is not None]
    new = Vocabulary([*names, b"more"] if "number" in how else [b"more", *reversed(names)], oov_buckets=2, grows=True)
    other = build().get_layer("embedding")
    vocabulary = other.vocabularies["users"]
    vocabulary.assign(new)
    other.restore_tables(
        path, by="name" if how == "by name" else "number", **({"resize": True} if how == "by name" else {})
    )
    for name in names:
        row, before = vocabulary.lookup([name])[0], old.lookup([name])[0]
        assert vocabulary.counts[row] == old.counts[before] > 0
        assert vocabulary.last_seen[row] == old.last_seen[before] > 0
    more = vocabulary.lookup([b"more"])[0]
    assert (vocabulary.counts[more], vocabulary.last_seen[more]) == (0, 6)


@pytest.mark.nightly
@pytest.mark.parametrize("whole", [False, True])
def test_exports_after_the_first_name_was_evicted(whole: bool, tmp_path: Path) -> None:
    model = build()
    layer = model.get_layer("embedding")
    train(model, NAMES[:10], 0)
    for seed in range(1, 4):
        train(model, NAMES[10:20], seed)
    assert layer.vocabularies["users"].evict(not_seen_for=2)[0] == 2
    export_model(model if whole else layer, tmp_path / "models")
    check(tmp_path / "models" / "1", model, whole)


@pytest.mark.nightly
@pytest.mark.parametrize("whole", [False, True])
def test_a_live_model_or_layer_is_exported_by_name(whole: bool, tmp_path: Path) -> None:
    model = build()
    train(model, NAMES[:30], 0)
    export_model(model if whole else model.get_layer("embedding"), tmp_path / "models")
    check(tmp_path / "models" / "1", model, whole)
