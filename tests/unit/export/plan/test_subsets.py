"""Parts of a checkpoint: features and tables."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_saved_model
from tpuembed.errors import ConfigError

ROWS, DIM = 40, 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Its prefix, and its tables as numpy: three of one width."""
    tables = {name: TableConfig(ROWS, DIM, name) for name in ("ads", "users", "videos")}
    layer = TPUEmbedding({name: FeatureConfig(table) for name, table in tables.items()}, optimizer="adagrad")
    prefix = tf.train.Checkpoint(model=layer).save(str(tmp_path_factory.mktemp("checkpoint") / "ckpt"))
    return prefix, {table.name: variable.numpy() for table, variable in layer.embedding_tables.items()}


def _call(path: Path, **inputs: Any) -> Any:
    signature = tf.saved_model.load(str(path)).signatures["serving_default"]
    return signature(**{name: tf.constant(ids, tf.int64) for name, ids in inputs.items()})


def test_features_by_name(tmp_path: Path, checkpoint: Any) -> None:
    prefix, tables = checkpoint
    report = export_saved_model(prefix, tmp_path, features=["ads"])
    assert (report.tables, report.dropped_features) == (("ads",), ("users", "videos"))
    np.testing.assert_array_equal(_call(report.path, ads=[[7]])["ads"], tables["ads"][[7]])


@pytest.mark.parametrize(
    "arguments",
    [
        {"features": ["adz"]},
        {"features": "ads"},
        {"features": []},
        {"features": ["ads"], "tables": ["users"]},
        {"features": ["ads"], "model": "m:f"},
    ],
)
def test_parts_that_are_not_there(tmp_path: Path, checkpoint: Any, arguments: dict[str, Any]) -> None:
    with refused(ConfigError):
        export_saved_model(checkpoint[0], tmp_path / "models", **arguments)
    assert not (tmp_path / "models").exists()
