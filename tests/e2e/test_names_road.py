"""Names all the way: a layer, its checkpoints and weight files, another vocabulary, exports of all kinds, and deltas.

The truth is the live layer's own row of each name, read by a numpy dictionary.
"""

from collections.abc import Sequence
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


def build(names: Sequence[bytes] = ()) -> keras.Model:
    """Return a model of a single name and of a list, from one table. Without `names` it takes those of a checkpoint."""
    table = TableConfig(64, DIM, "users", combiner="sum")
    vocabulary = Vocabulary(names, oov_buckets=2)
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
        found = layer(inputs)
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
@pytest.mark.parametrize(("kind", "layout"), [("checkpoint", "variables"), ("keras", "mmap")])
def test_saves_are_exported_by_name(kind: str, layout: str, tmp_path: Path) -> None:
    model = build(NAMES[:-3])
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


def test_the_next_model_has_the_rows_of_old_names_and_new_rows_for_new_ones(tmp_path: Path) -> None:
    """What docs/how-to/names.md does with the names of a new day: adapt, restore by name, train, export."""
    monday = build(NAMES[:30])
    train(monday, NAMES[:30], 0)
    path = tf.train.Checkpoint(model=monday).save(str(tmp_path / "ckpt"))
    counted = Vocabulary.adapt([NAMES[20:], NAMES[20:40], [b"rare"]], min_count=2)
    tuesday = build(counted.names(range(len(counted))))
    layer = tuesday.get_layer("embedding")
    before = rows_by_name(tuesday, NAMES)
    names = layer.restore_tables(path, by="name", resize=True).tables[0].names
    assert (names.kept, names.new, names.dropped) == (10, 10, 20)
    truth, found = rows_by_name(monday, NAMES), rows_by_name(tuesday, NAMES)
    np.testing.assert_array_equal(found[20:30], truth[20:30])
    np.testing.assert_array_equal(found[30:40], before[30:40], "the rows of a new layer")
    train(tuesday, NAMES[20:40], 1)
    export_model(tuesday, tmp_path / "models")
    check(tmp_path / "models" / "1", tuesday, whole=True)
