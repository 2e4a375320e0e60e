"""Overlays of layers that track rows: bounds hold for rows that are not read, and a base has to be of the same kind."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.messages import refused, said
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_saved_model
from tpuembed.errors import ConfigError, ExportError
from tpuembed.export import plan_saved_model

pytestmark = pytest.mark.usefixtures("exports_in_this_process")

ROWS = {"users": 300, "items": 70}


def make(**options: Any) -> TPUEmbedding:
    keras.utils.set_random_seed(1)
    tables = {name: TableConfig(rows, 8, name) for name, rows in ROWS.items()}
    features = {"user": FeatureConfig(tables["users"]), "item": FeatureConfig(tables["items"])}
    return TPUEmbedding(features, "adagrad", name="embedding", **({"track_rows": True} | options))


def step(layer: TPUEmbedding, users: Any, items: Any = (1,)) -> None:
    with tf.GradientTape() as tape:
        rows = layer({"user": tf.constant(users, tf.int64), "item": tf.constant(items, tf.int64)})
        loss = tf.add_n([tf.reduce_sum((each - 1) ** 2) for each in tf.nest.flatten(rows)])
    layer.apply_gradients(tape.gradient(loss, layer.trainable_variables))


@pytest.mark.nightly
def test_a_base_that_was_not_checked_is_compared(tmp_path: Path) -> None:
    """An option that bounds all rows holds for those that are not read."""
    layer = make()
    step(layer, [1])
    layer.assign_rows("users", 200, np.full((1, 8), np.nan, np.float32))
    export_saved_model(layer, tmp_path / "m", storage="float32")
    step(layer, [2])
    assert export_saved_model(layer, tmp_path / "m", base=1).rows_compared == 0
    with pytest.warns(UserWarning, match="written without require_finite"), refused(ExportError):
        export_saved_model(layer, tmp_path / "m", base=1, require_finite=True)
    layer.assign_rows("users", 200, np.full((1, 8), 100, np.float32))
    base = export_saved_model(layer, tmp_path / "n", storage="int8", require_finite=True)
    step(layer, [3])
    bound = base.errors["users"].max_abs
    over: dict[str, Any] = {"base": 1, "storage": "int8", "require_finite": True}
    assert export_saved_model(layer, tmp_path / "n", max_error=bound, **over).rows_compared == 0
    with pytest.warns(UserWarning, match="above max_error"), refused(ExportError):
        export_saved_model(layer, tmp_path / "n", max_error=bound / 2, **over)
    layer.assign_rows("users", 4, np.full((1, 8), np.nan, np.float32))
    with refused(ExportError):
        export_saved_model(layer, tmp_path / "n", **over)  # a row that is read


def whole_model(**options: Any) -> Any:
    layer = make(**options)
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in ("user", "item")}
    rows = layer(inputs)
    return keras.Model(inputs, keras.layers.Dense(1, name="score")(rows["user"] * rows["item"])), layer


@pytest.mark.nightly
def test_a_base_of_another_kind_or_layout(tmp_path: Path) -> None:
    """Its clients would get another signature, or its servers would load what they mapped."""
    model, layer = whole_model()
    export_saved_model(model, tmp_path / "m", layout="mmap")
    for base in (1, "latest"):
        with refused(ConfigError):
            export_saved_model(layer, tmp_path / "m", layout="mmap", base=base)
    tf.train.Checkpoint(layer=layer).write(str(tmp_path / "ckpt"))
    for call in (plan_saved_model, export_saved_model):
        with refused(ConfigError):
            call(tmp_path / "ckpt", tmp_path / "m", base="latest")
    with pytest.warns(UserWarning, match="layout") as warnings:
        export_saved_model(model, tmp_path / "m", base=1)
    said(str(warnings[0].message))
    export_saved_model(layer, tmp_path / "l")
    with refused(ConfigError):
        export_saved_model(model, tmp_path / "l", base=1)
    plan = plan_saved_model(tmp_path / "ckpt", tmp_path / "l", base="latest")
    assert plan.base == 1
    assert "an overlay of version 1" in plan.describe()
