"""The layer trains MovieLens as well as Keras' own Embedding layers do, the dense part and the tables with the same optimizers."""

import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tpuembed_cli.ratings import data, model
from tpuembed_cli.ratings.data import Ratings

RATINGS = Path(__file__).parents[2] / ".data" / "ml-100k.inter"
BATCH, EPOCHS, SEEDS = 256, 5, (1, 2, 3)


def _embedding(rows: int) -> Any:
    """Keras' layer over a table that begins as the layer's does."""
    spread = keras.initializers.TruncatedNormal(0.0, model.DIM**-0.5)
    return keras.layers.Embedding(rows, model.DIM, embeddings_initializer=spread)


class TwoOptimizers(keras.Model):
    """The demo's model with Keras' embeddings, trained by Keras' Adam, and its dense layers by the compiled optimizer."""

    def __init__(self, users: int, items: int) -> None:
        super().__init__()
        self.user, self.movie = _embedding(users), _embedding(items)
        widths = [keras.layers.Dense(width, activation="relu") for width in (256, 64)]
        self.dense = keras.Sequential([*widths, keras.layers.Dense(1)])
        self.of_tables = keras.optimizers.Adam()

    def call(self, x: Any) -> Any:
        return self.dense(keras.ops.concatenate([self.user(x["user_id"]), self.movie(x["movie_id"])], -1))

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        tables = [*self.user.trainable_variables, *self.movie.trainable_variables]
        dense = self.dense.trainable_variables
        gradients = tape.gradient(loss, [variable.value for variable in (*tables, *dense)])
        self.of_tables.apply(gradients[: len(tables)], tables)
        self.optimizer.apply(gradients[len(tables) :], dense)
        return {"loss": loss}


def _inputs(ratings: Ratings) -> dict[str, Any]:
    return {"user_id": ratings.users, "movie_id": ratings.items}


def _test_rmse(trained: Any, train: Ratings, test: Ratings, seed: int) -> float:
    trained.compile(optimizer="adagrad", loss="mse")
    batches = tf.data.Dataset.from_tensor_slices((_inputs(train), train.labels[:, None]))
    trained.fit(batches.shuffle(len(train), seed=seed).batch(BATCH), epochs=EPOCHS, verbose=0, shuffle=False)
    predicted = trained.predict(_inputs(test), batch_size=4096, verbose=0)[:, 0]
    return float(np.sqrt(np.mean(np.square(predicted - test.labels))))


@pytest.mark.nightly
def test_as_good_as_keras_embeddings_over_three_seeds() -> None:
    if not RATINGS.exists():
        assert not os.environ.get("CI"), f"{RATINGS} is missing: run tests/fetch_movielens.py"
        pytest.skip(f"MovieLens 100K is not at {RATINGS}: run tests/fetch_movielens.py")
    ratings = data.load(RATINGS)
    train, test = data.split(ratings)
    sizes = int(ratings.users.max()) + 1, int(ratings.items.max()) + 1
    found: dict[str, list[float]] = {"layer": [], "keras": []}
    for seed in SEEDS:
        for name, make in (("layer", model.build), ("keras", TwoOptimizers)):
            keras.utils.set_random_seed(seed)
            found[name].append(_test_rmse(make(*sizes), train, test, seed))
    print(found)
    differences = [ours - theirs for ours, theirs in zip(found["layer"], found["keras"], strict=True)]
    assert max(map(abs, differences)) <= 0.005, found
