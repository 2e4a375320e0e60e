"""The two-table ranking model of the published SparseCore tutorial: Adam on the tables, Adagrad on the dense layers."""

from typing import Any

import keras

from tpuembed import FeatureConfig, TableConfig, TPUEmbedding

__all__ = ["DIM", "build", "rmse"]

DIM = 32


def build(users: int, items: int) -> Any:
    """Build a functional model of inputs `user_id` and `movie_id`, int64 [batch], and output `rating`, float32 [batch,
    1].
    """
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in ("user_id", "movie_id")}
    features = {
        "user_id": FeatureConfig(TableConfig(users, DIM, "user_table")),
        "movie_id": FeatureConfig(TableConfig(items, DIM, "movie_table")),
    }
    embedded = TPUEmbedding(features, optimizer="adam", name="embedding")(inputs)
    hidden = keras.layers.Concatenate()([embedded["user_id"], embedded["movie_id"]])
    for width in (256, 64):
        hidden = keras.layers.Dense(width, activation="relu")(hidden)
    return keras.Model(inputs, keras.layers.Dense(1, name="rating")(hidden))


def rmse() -> Any:
    """Return the metric of the tutorial."""
    return keras.metrics.RootMeanSquaredError(name="rmse")
