"""Any order of trainings, evictions, saves, restores and exports keeps each name on its own row and slots.

The truth is a dictionary of rows by name, which numpy trains.
"""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tpuembed import (
    Adagrad,
    FeatureConfig,
    TableConfig,
    TPUEmbedding,
    Vocabulary,
    export_model,
    export_saved_model,
)

pytestmark = pytest.mark.nightly

Array = np.ndarray[Any, Any]
ROWS, DIM, RATE, START = 60, 3, 0.1, 0.1
SLOPES = np.array([1.0, 2.0, -0.5], np.float32)
POOL: list[Any] = [b"\0", b"\xff", b" ", *(b"name %d" % n for n in range(57))]


class Life:
    """A layer, and what its rows must be."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng, self.folder, self.count = np.random.default_rng(seed), folder, 0
        self.layer = self.make(Vocabulary(oov_buckets=1, grows=True))
        self.truth: dict[Any, tuple[Array, Array]] = {}

    def make(self, vocabulary: Vocabulary) -> TPUEmbedding:
        ones = keras.initializers.Ones()
        table = TableConfig(
            ROWS, DIM, "t.x/y", initializer=ones, optimizer=Adagrad(RATE, initial_accumulator_value=START)
        )
        feature = FeatureConfig(table, vocabulary=vocabulary)
        return TPUEmbedding({"f": feature}, track_rows=True, name="embedding")

    @property
    def vocabulary(self) -> Vocabulary:
        return self.layer.vocabularies["t.x/y"]

    def train(self) -> None:
        chosen = self.rng.choice(len(POOL), self.rng.integers(1, 12))
        room = ROWS - 1 - len(self.truth)
        known = [POOL[i] for i in chosen if POOL[i] in self.truth]
        new = list(dict.fromkeys(POOL[i] for i in chosen if POOL[i] not in self.truth))[:room]
        names = [*known, *new]
        if not names:
            return
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(self.layer({"f": tf.constant(names)}, training=True)["f"] * SLOPES)
        tape.gradient(loss, self.layer.trainable_variables)
        for name in dict.fromkeys(names):
            row, squares = self.truth.get(name, (np.ones(DIM, np.float32), np.full(DIM, START, np.float32)))
            gradient = names.count(name) * SLOPES
            squares = squares + gradient**2
            self.truth[name] = row - RATE * gradient / np.sqrt(squares), squares

    def evict(self) -> None:
        age = int(self.rng.integers(1, 5))
        last = dict(zip(self.vocabulary.names(range(self.vocabulary.rows)), self.vocabulary.last_seen, strict=True))
        old = [name for name in self.truth if last[name] <= max(last.values()) - age]
        assert len(self.vocabulary.evict(not_seen_for=age, update=int(max(last.values())))) == len(old)
        for name in old:
            del self.truth[name]

    def path(self, suffix: str = "") -> str:
        self.count += 1
        return str(self.folder / f"{self.count}{suffix}")

    def checkpoint(self) -> str:
        return str(tf.train.Checkpoint(layer=self.layer).write(self.path()))

    def restore(self) -> None:
        path, layer = self.checkpoint(), self.make(Vocabulary(oov_buckets=1, grows=True))
        tf.train.Checkpoint(layer=layer).restore(path)
        self.layer = layer

    def restore_into_the_same(self) -> None:
        path, truth = self.checkpoint(), dict(self.truth)
        self.train()
        self.evict()
        tf.train.Checkpoint(layer=self.layer).restore(path)
        self.truth = truth

    def weights(self) -> None:
        store: dict[str, Any] = {}
        self.layer.save_own_variables(store)
        self.layer = self.make(Vocabulary(oov_buckets=1, grows=True))
        self.layer.load_own_variables(store)

    def by_number(self) -> None:
        path = self.checkpoint()
        self.layer = self.make(Vocabulary(oov_buckets=1, grows=True))
        self.layer.restore_tables(path)

    def other_names(self) -> Vocabulary:
        """Return a vocabulary of some of the names, in another order, and of others."""
        kept = [name for name in self.truth if self.rng.random() < 0.8]
        added = [name for name in POOL if name not in self.truth][:3][: ROWS - 1 - len(kept)]
        names = [*kept, *added]
        return Vocabulary([names[i] for i in self.rng.permutation(len(names))], oov_buckets=1, grows=True)

    def become(self, vocabulary: Vocabulary) -> None:
        names = vocabulary.names(range(1, vocabulary.rows))
        fresh = np.ones(DIM, np.float32), np.full(DIM, START, np.float32)
        self.truth = {name: self.truth.get(name, fresh) for name in names}

    def by_name(self) -> None:
        path, vocabulary = self.checkpoint(), self.other_names()
        self.layer = self.make(vocabulary)
        self.layer.restore_tables(path, by="name", resize=True)
        self.become(vocabulary)

    def export(self) -> None:
        if self.truth:
            export_saved_model(
                self.checkpoint(), folder := Path(self.path()), layout=str(self.rng.choice(["mmap", "variables"]))
            )
            self.check_export(folder / "1")

    def delta(self) -> None:
        if not self.truth:
            return
        folder = Path(self.path())
        export_model(self.layer, folder, layout="mmap")
        self.train()
        self.evict()
        self.train()
        export_model(self.layer, folder, layout="mmap", base=1, max_overlay=1.0)
        self.check_export(folder / "2")

    def check_export(self, version: Path) -> None:
        loaded, names = tf.saved_model.load(str(version)), list(self.truth)
        found = loaded.signatures["serving_default"](f=tf.constant(names)[:, None])["f"].numpy()
        np.testing.assert_allclose(found, [self.truth[name][0] for name in names], rtol=1e-5)

    def check(self) -> None:
        rows, values = self.vocabulary.lookup(list(self.truth)), self.layer.named_variables()
        assert len(self.vocabulary) == len(self.truth)
        assert len(set(rows.tolist())) == len(self.truth)
        for part, name in enumerate(("t.x/y", "t.x/y/accumulators")):
            found = values[name].numpy()[rows]
            np.testing.assert_allclose(found, [both[part] for both in self.truth.values()], rtol=1e-5)
        if self.truth:
            found = tf.function(self.layer)({"f": tf.constant(list(self.truth))})["f"]
            np.testing.assert_allclose(found, [row for row, _ in self.truth.values()], rtol=1e-5)


STEPS = ("evict", "restore", "restore_into_the_same", "weights", "by_number", "by_name", "export", "delta")


def live(seed: int, steps: int, folder: Path) -> None:
    life = Life(seed, folder)
    life.train()
    for step in life.rng.choice(STEPS, steps):
        for _ in range(life.rng.integers(0, 3)):
            life.train()
        getattr(life, str(step))()
        life.check()


def test_a_life_keeps_each_name_on_its_row(tmp_path: Path) -> None:
    live(1, 9, tmp_path)


@pytest.mark.parametrize("seed", range(2, 14))
def test_many_lives_keep_each_name_on_its_row(seed: int, tmp_path: Path) -> None:
    live(seed, 25, tmp_path)
