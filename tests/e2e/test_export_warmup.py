"""Warm-up records of exports."""

from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_saved_model

pytestmark = pytest.mark.usefixtures("exports_in_this_process")


def test_a_model_that_fails_for_zeros_has_no_records(tmp_path: Path) -> None:
    """One failing record would keep the whole version from being served."""

    def build() -> Any:
        ids, city = keras.Input((), dtype="int64", name="ids"), keras.Input((), dtype="string", name="city")
        rows = TPUEmbedding({"ids": FeatureConfig(TableConfig(40, 4, "t"))}, optimizer="sgd")({"ids": ids})["ids"]
        number = keras.layers.StringLookup(vocabulary=["a", "b"], num_oov_indices=0)(city)
        return keras.Model([ids, city], {"out": rows * keras.ops.cast(number, "float32")[:, None]})

    prefix = tf.train.Checkpoint(model=build()).write(str(tmp_path / "ckpt"))
    with pytest.warns(UserWarning, match="no requests to warm up: the model fails for zeros"):
        path = export_saved_model(prefix, tmp_path / "m", model=build).path
    assert not (path / "assets.extra/tf_serving_warmup_requests").exists()
