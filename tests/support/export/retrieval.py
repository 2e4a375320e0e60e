"""A query's tower for tests of retrievals."""

import keras

from tpuembed import FeatureConfig, TableConfig, TPUEmbedding

__all__ = ["user_tower"]


def user_tower(users: int, dim: int) -> keras.Model:
    """Return a model whose vector of a user is its row of the table `users`. Its second layer is the embedding layer."""
    ids = keras.Input((), dtype="int64", name="user")
    layer = TPUEmbedding({"user": FeatureConfig(TableConfig(users, dim, "users"))}, optimizer="sgd", name="of_user")
    return keras.Model({"user": ids}, layer({"user": ids})["user"])
