"""Code written for keras-rs' DistributedEmbedding: only its import is changed. Ratings by user and movie, with `fit`.

Runs under the default strategy, or with `--replicas N` on N copies of the model, each on a CPU device of its own. On TPUs
with SparseCores the tables are placed on them: "auto".
"""

import argparse
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tpuembed.compat import keras_rs

USERS, MOVIES, RATINGS, DIM = 60, 80, 1024, 8
BATCH_SIZE = 128  # of all replicas


def ratings(batch_size: int) -> tuple[Any, Any]:
    """Batches to train and to test on: ratings from 0 to 1, better from half of the users and for half of the movies."""
    random = np.random.default_rng(0)
    users, movies = random.integers(0, USERS, RATINGS), random.integers(0, MOVIES, RATINGS)
    liked = users % 2 * 0.4 + movies % 2 * 0.4 + random.uniform(0.0, 0.2, RATINGS)
    inputs = {"user_id": users.astype(np.int32), "movie_id": movies.astype(np.int32)}
    data = tf.data.Dataset.from_tensor_slices((inputs, liked.astype(np.float32)[:, None]))
    train, test = data.take(RATINGS * 3 // 4), data.skip(RATINGS * 3 // 4)
    train, test = (part.batch(batch_size, drop_remainder=True).cache() for part in (train, test))
    return train, test


def feature_configs(batch_size: int) -> dict[str, Any]:
    """A table for each feature; shapes have the batch of all replicas."""
    rows = {"movie": MOVIES, "user": USERS}
    tables = {
        name: keras_rs.layers.TableConfig(
            name=f"{name}_table", vocabulary_size=count, embedding_dim=DIM, optimizer="adam", placement="auto"
        )
        for name, count in rows.items()
    }
    return {
        f"{name}_id": keras_rs.layers.FeatureConfig(
            name=name, table=table, input_shape=(batch_size,), output_shape=(batch_size, DIM)
        )
        for name, table in tables.items()
    }


class EmbeddingModel(keras.Model):
    """Embeddings of user and movie, and a tower of dense layers on both."""

    def __init__(self, configs: Any) -> None:
        super().__init__()
        self.embedding_layer = keras_rs.layers.DistributedEmbedding(feature_configs=configs)
        self.ratings = keras.Sequential(
            [
                keras.layers.Dense(32, activation="relu"),
                keras.layers.Dense(16, activation="relu"),
                keras.layers.Dense(1),
            ]
        )

    def call(self, features: Any) -> Any:
        embedding = self.embedding_layer(features)
        return self.ratings(keras.ops.concatenate([embedding["user_id"], embedding["movie_id"]], axis=1))


def main(replicas: int) -> dict[str, float]:
    keras.utils.set_random_seed(1)
    strategy = tf.distribute.get_strategy()
    if replicas > 1:
        devices = [tf.config.LogicalDeviceConfiguration()] * replicas
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
        strategy = tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])
    train, test = ratings(BATCH_SIZE)
    with strategy.scope():
        model = EmbeddingModel(feature_configs(BATCH_SIZE))
        model.compile(
            loss=keras.losses.MeanSquaredError(), metrics=[keras.metrics.RootMeanSquaredError()], optimizer="adagrad"
        )
    before = model.embedding_layer.get_embedding_tables()
    with strategy.scope():
        history = model.fit(train, epochs=5, verbose=0, shuffle=False).history
        found = model.evaluate(test, return_dict=True, verbose=0)
    after = model.embedding_layer.get_embedding_tables()
    moved = min(float(np.abs(after[name] - before[name]).max()) for name in before)
    return {"first_epoch": history["loss"][0], "last_epoch": history["loss"][-1], "table_moved": moved, **found}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=1)
    print(main(parser.parse_args().replicas))
