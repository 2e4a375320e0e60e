"""A ranking model with lists of ids, dense values and two outputs, as a factory and as trained in memory."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tpuembed import FeatureConfig, TableConfig, TPUEmbedding

__all__ = ["FACTORY", "WholeModel", "build", "draw", "for_model", "predict", "train"]

Array = npt.NDArray[Any]

FACTORY: Final = "tests.support.contract_models:build"
"""What `--model` takes for `build`, from the root of the repository."""

USERS, VIDEOS = 50, 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeModel:
    """A trained model, a checkpoint of it, and the export of that.

    Attributes:
        model: What `build` returned, trained.
        prefix: A `tf.train.Checkpoint(model=model)`.
        model_dir: Holds the export as version 1.
    """

    model: Any
    prefix: Path
    model_dir: Path

    @property
    def version(self) -> Path:
        return self.model_dir / "1"


def build() -> Any:
    """Return the model: ids of a user, a list of watched videos and a dense input; a score and a vector."""
    user = keras.Input((), dtype="int64", name="user")
    watched = keras.Input((None,), dtype="int64", ragged=True, name="watched")
    price = keras.Input((2,), dtype="float32", name="price")
    features = {
        "user": FeatureConfig(TableConfig(USERS, 4, "users")),
        "watched": FeatureConfig(TableConfig(VIDEOS, 6, "videos", combiner="sqrtn")),
    }
    rows = TPUEmbedding(features, optimizer="adagrad", name="embedding")({"user": user, "watched": watched})
    joined = keras.ops.concatenate([rows["user"], rows["watched"], price], -1)
    vector = keras.layers.Dense(3, activation="tanh", name="vector")(joined)
    score = keras.layers.Dense(1, name="score")(vector)
    return keras.Model({"user": user, "watched": watched, "price": price}, {"score": score, "vector": vector})


def draw(batch: int, seed: int = 0) -> dict[str, Array]:
    """Return inputs of the export: [batch] users, padded [batch, 4] videos, [batch, 2] prices."""
    random = np.random.default_rng(seed)
    videos = random.integers(0, VIDEOS, (batch, 4))
    padding = np.arange(4) >= random.integers(0, 5, batch)[:, None]
    return {
        "user": random.integers(0, USERS, batch),
        "watched": np.where(padding, -1, videos),
        "price": random.normal(size=(batch, 2)).astype(np.float32),
    }


def for_model(inputs: Mapping[str, Array]) -> dict[str, Any]:
    """Return the same inputs as the model takes them: the lists are ragged."""
    watched = tf.ragged.boolean_mask(inputs["watched"], inputs["watched"] != -1)
    return {**{name: tf.constant(value) for name, value in inputs.items()}, "watched": watched}


def predict(model: Any, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return what the model in memory computes."""
    return {name: value.numpy() for name, value in model(for_model(inputs), training=False).items()}


def train() -> Any:
    """Return the model after three steps, so that no weight has its initial value."""
    keras.utils.set_random_seed(3)
    model = build()
    model.compile("adam", {"score": "mse", "vector": "mse"})
    goals = {"score": np.ones((64, 1), np.float32), "vector": np.zeros((64, 3), np.float32)}
    data = tf.data.Dataset.from_tensors((for_model(draw(64)), goals)).repeat(3)
    model.fit(data, shuffle=False, verbose=0)
    return model
