"""SavedModels of Keras 3, which hold variables without the names of tables."""

from pathlib import Path

import keras
import pytest
import tensorflow as tf

from tests.support.messages import refused
from tpuembed.checkpoint import open_checkpoint
from tpuembed.errors import CheckpointFormatError

GOLDENS = Path(__file__).parents[3] / "golden" / "keras_rs_saved_models"


@pytest.mark.parametrize("name", ["exported", "misleading", "saved", "untrained"])
def test_tables_of_keras_rs(name: str) -> None:
    with refused(CheckpointFormatError):
        open_checkpoint(GOLDENS / name / "model")


def test_an_exported_embedding_of_keras(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((3,), dtype="int32"), keras.layers.Embedding(5, 2)])
    model.export(tmp_path / "exported", verbose=False)
    with refused(CheckpointFormatError):
        open_checkpoint(tmp_path / "exported")
    tf.saved_model.save(model, str(tmp_path / "saved"))
    with open_checkpoint(tmp_path / "saved") as checkpoint:
        assert [(info.rows, info.dim) for info in checkpoint.tables().values()] == [(5, 2)]
