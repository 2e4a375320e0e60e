"""Lookup-only exports: every kind of feature against TensorFlow's own lookup of the same rows, through the C API."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

from tests.support import capi
from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_saved_model
from tpuembed.errors import ConfigError, UnknownTableError

pytestmark = pytest.mark.usefixtures("exports_in_this_process")

Array = npt.NDArray[Any]
VIDEOS, USERS = (40, 4), (30, 4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Array]]:
    """A checkpoint of two tables of one width, which share a stack, and one of another; and the tables' rows."""
    videos, users = TableConfig(*VIDEOS, "videos", combiner="sum"), TableConfig(*USERS, "users")
    other = TableConfig(1000, 16, "other")
    config = {"a": FeatureConfig(videos), "b": FeatureConfig(users), "c": FeatureConfig(other)}
    layer = TPUEmbedding(config, optimizer="adam")
    rows = {table.name: variable.numpy() for table, variable in layer.embedding_tables.items()}
    return tf.train.Checkpoint(layer=layer).write(str(tmp_path_factory.mktemp("ckpt") / "ckpt")), rows


def _export(checkpoint: tuple[str, Any], folder: Path, features: dict[str, Any], **options: Any) -> Path:
    return export_saved_model(checkpoint[0], folder / "m", serving_config={"features": features}, **options).path


def test_weights_of_another_shape_than_the_ids_fail(checkpoint: Any, tmp_path: Path) -> None:
    """Also where all features' ids and weights are as many: no weight is taken for another feature's id."""
    features = {name: {"table": "users", "weighted": True} for name in "xy"}
    signature = tf.saved_model.load(str(_export(checkpoint, tmp_path, features))).signatures["serving_default"]
    ids, weights = np.ones((2, 2), np.int64), np.ones((2, 2), np.float32)
    assert signature(x=ids, y=ids, x_weights=weights, y_weights=weights)["x"].shape == (2, 4)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="the weights must have the shape of the ids; features x, y"
    ):
        signature(x=ids, y=ids[:, :1], x_weights=weights[:, :1], y_weights=weights)


@pytest.mark.parametrize(
    ("features", "options", "error"),
    [
        ({"x": {"table": "user"}}, {}, UnknownTableError),
        ({"x": {"table": "users", "out_of_vocabulary": 30}}, {}, ConfigError),
        ({"_x": {"table": "users"}}, {}, ConfigError),
        ({"a b": {"table": "users"}}, {}, ConfigError),
        ({"x": {"table": "users"}}, {"tables": ["videos"]}, ConfigError),
        ({"x": {"table": "users"}}, {"tables": []}, ConfigError),
        ({"x": {"table": "users"}}, {"tables": ["nope"]}, UnknownTableError),
        ({"x": {"table": "users"}}, {"storage": "int4"}, ConfigError),
        ({"x": {"table": "users"}}, {"storage": {"users": "int4"}}, ConfigError),
        ({"x": {"table": "users"}}, {"storage": {"user": "int8"}}, UnknownTableError),
        ({"x": {"table": "users"}}, {"layout": "paged"}, ConfigError),
        ({"x": {"table": "users"}}, {"serving_root": "/m"}, ConfigError),
        ({"x": {"table": "users"}}, {"layout": "mmap", "serving_root": "m"}, ConfigError),
        ({"x": {"table": "users"}}, {"engine": "beam"}, ConfigError),
        ({"x": {"table": "users"}}, {"workers": 0}, ConfigError),
    ],
)
def test_a_request_that_cannot_be_answered_leaves_nothing(
    checkpoint: Any, tmp_path: Path, features: Any, options: Any, error: type[Exception]
) -> None:
    with refused(error):
        _export(checkpoint, tmp_path, features, **options)
    assert not any((tmp_path / "m").glob("*")) if (tmp_path / "m").exists() else True


def test_an_empty_list_is_no_matrix_of_ids(checkpoint: Any, tmp_path: Path) -> None:
    """JSON's `{"inputs": []}` has the shape [0], also in TensorFlow Serving."""
    path = _export(checkpoint, tmp_path, {"ids": {"table": "videos", "combiner": "sum"}})
    with pytest.raises(capi.TensorFlowError, match="out of bounds"):
        capi.predict(path, {"ids": np.zeros(0, np.int64)})
