"""Sources of a whole model: Keras' own files, the folders of its callbacks, and the model in memory."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.contract_lookups import answers
from tpuembed import ExportCallback, FeatureConfig, TableConfig, TPUEmbedding, export_saved_model
from tpuembed.errors import ConfigError

Array = np.ndarray[Any, Any]
IDS = np.arange(12)


def build() -> Any:
    item = keras.Input((), dtype="int64", name="item")
    rows = TPUEmbedding(FeatureConfig(TableConfig(12, 4, "items")), optimizer="adagrad", name="embedding")(item)
    hidden = keras.layers.Dense(3, activation="tanh", name="hidden")(rows)
    return keras.Model(item, keras.layers.Dense(1, name="score")(hidden))


class Fitted:
    """A model that callbacks saved in each of two epochs, and that was saved afterwards.

    Attributes:
        scores: What the model computed at the end of each epoch, for IDS.
    """

    def __init__(self, folder: Path) -> None:
        keras.utils.set_random_seed(3)
        self.folder, self.model, self.scores = folder, build(), list[Array]()
        self.export = ExportCallback(folder / "exports", every_epochs=1)
        (folder / "checkpoints").mkdir()
        path = str(folder / "checkpoints" / "{epoch:02d}.weights.h5")
        callbacks = [
            self.export,
            keras.callbacks.ModelCheckpoint(path, save_weights_only=True),
            keras.callbacks.BackupAndRestore(str(folder / "backup"), delete_checkpoint=False),
            keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: self.scores.append(self.score())),
        ]
        self.model.compile("adam", "mse")
        self.model.fit(IDS, np.linspace(0, 1, 12), epochs=2, callbacks=callbacks, verbose=0)
        self.model.save(folder / "model.keras")
        self.model.save_weights(folder / "model.weights.h5")

    def score(self) -> Array:
        found: Array = self.model(tf.constant(IDS)).numpy()
        return found


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    return Fitted(tmp_path_factory.mktemp("fitted"))


def assert_scores(version: Path, wanted: Array) -> None:
    np.testing.assert_allclose(answers(version, {"item": IDS})["score"], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("source", ["model.keras", "model.weights.h5", "backup", "checkpoints"])
def test_files_and_folders_of_keras(fitted: Fitted, tmp_path: Path, source: str) -> None:
    report = export_saved_model(fitted.folder / source, tmp_path / "m", model=build, workers=1)
    assert_scores(report.path, fitted.scores[-1])


def test_the_callback_exports_every_epoch_while_training(fitted: Fitted) -> None:
    assert [report.version for report in fitted.export.reports] == [1, 2]
    first, last = fitted.scores
    assert np.abs(first - last).max() > 1e-5
    for report, wanted in zip(fitted.export.reports, fitted.scores, strict=True):
        assert_scores(report.path, wanted)


def test_a_model_in_memory(fitted: Fitted, tmp_path: Path) -> None:
    report = export_saved_model(fitted.model, tmp_path / "m")
    assert (report.version, report.tables, report.bytes_written) == (1, ("items",), 12 * 4 * 4)
    assert_scores(report.path, fitted.scores[-1])


@pytest.mark.parametrize("options", [{"every_epochs": 0}, {"every_epochs": 1, "every_seconds": 1}, {"storag": "int8"}])
def test_a_callback_refuses_bad_options_before_training(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        ExportCallback(tmp_path, **options)
