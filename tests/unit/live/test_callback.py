"""`ExportCallback`: versions while `fit` runs."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.messages import refused
from tpuembed import ExportCallback, FeatureConfig, TableConfig, TPUEmbedding
from tpuembed.errors import ConfigError, TpuEmbedError

X, Y = np.arange(12), np.linspace(0, 1, 12)


def _model() -> Any:
    x = keras.Input((), dtype="int64", name="item")
    rows = TPUEmbedding(FeatureConfig(TableConfig(12, 4, "items")), optimizer="adagrad")(x)
    model = keras.Model(x, keras.layers.Dense(1, name="score")(rows))
    model.compile("sgd", "mse")
    return model


def _score(path: Path) -> Any:
    return tf.saved_model.load(str(path)).signatures["serving_default"](item=tf.constant(X, tf.int64))["score"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("every", "at_end", "versions"), [(1, False, 3), (2, False, 1), (2, True, 2), (3, True, 1), (4, False, 0)]
)
def test_every_so_many_epochs(tmp_path: Path, every: int, at_end: bool, versions: int) -> None:
    callback = ExportCallback(tmp_path, every, at_end=at_end)
    model = _model()
    model.fit(X, Y, epochs=3, verbose=0, callbacks=[callback])
    assert [report.version for report in callback.reports] == list(range(1, versions + 1))
    assert sorted(path.name for path in tmp_path.glob("*")) == [str(n) for n in range(1, versions + 1)]
    if every != 2 and versions:
        np.testing.assert_allclose(_score(callback.reports[-1].path), model.predict(X, verbose=0), rtol=1e-6, atol=1e-7)


def test_a_failure_ends_training_or_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with refused(TpuEmbedError):
        _model().fit(X, Y, verbose=0, callbacks=[ExportCallback(tmp_path / "file")])
    with pytest.warns(UserWarning, match="not exported: .*Name a directory"):
        _model().fit(X, Y, verbose=0, callbacks=[ExportCallback(tmp_path / "file", on_error="warn")])


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = TPUEmbedding(FeatureConfig(TableConfig(12, 4, "items")), optimizer="adagrad")
        self.dense = keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return {"score": self.dense(self.embedding(inputs["item"] if isinstance(inputs, dict) else inputs))}


def test_a_subclassed_model_needs_its_specs(tmp_path: Path) -> None:
    model = Subclassed()
    model.compile("sgd", {"score": "mse"})
    specs = {"item": tf.TensorSpec([None], tf.int64)}
    callback = ExportCallback(tmp_path, input_specs=specs)
    model.fit({"item": X}, {"score": Y}, verbose=0, callbacks=[callback])
    np.testing.assert_allclose(_score(callback.reports[0].path), model({"item": X})["score"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "options",
    [
        {"every_epochs": 0},
        {"every_epochs": 1.5},
        {"on_error": "ignore"},
        {"version": 3},
        {"storag": "int8"},
        {"every_seconds": -1},
    ],
)
def test_bad_options_before_training(tmp_path: Path, options: dict[str, Any]) -> None:
    with refused(ConfigError):
        ExportCallback(tmp_path, **options)
