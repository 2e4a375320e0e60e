"""keras-rs' own layers hold their tables where no export finds them: both exporters point to ours of that name."""

from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_saved_model
from tpuembed.compat import keras_rs
from tpuembed.errors import ConfigError


class DistributedEmbedding(keras.layers.Layer):
    """Stands for keras-rs' layer, which is not installed beside this TensorFlow."""

    def __init__(self) -> None:
        super().__init__(name="native")
        self.table = keras.layers.Embedding(5, 2)

    def call(self, ids: Any) -> Any:
        return self.table(ids)


DistributedEmbedding.__module__ = "keras_rs.src.layers.embedding.tensorflow.distributed_embedding"


def native() -> Any:
    x = keras.Input((), dtype="int64", name="x")
    return keras.Model(
        x, [DistributedEmbedding()(x), TPUEmbedding(FeatureConfig(TableConfig(5, 2, "t")), optimizer="sgd")(x)]
    )


def test_both_exporters_point_to_the_layer_of_that_name(tmp_path: Path) -> None:
    model = native()
    checkpoint = tf.train.Checkpoint(model=model).write(str(tmp_path / "ckpt"))
    with refused(ConfigError, match="layer 'native'"):
        export_saved_model(checkpoint, tmp_path / "m", model=native)
    with refused(ConfigError, match="layer 'native'"):
        export_saved_model(model, tmp_path / "m")


def test_ours_is_exported(tmp_path: Path) -> None:
    table = keras_rs.TableConfig(name="t", vocabulary_size=5, embedding_dim=2)
    feature = keras_rs.FeatureConfig(name="x", table=table, input_shape=(None, 1), output_shape=(None, 2))
    x = keras.Input((1,), dtype="int32", name="x")
    model = keras.Model({"x": x}, keras_rs.layers.DistributedEmbedding({"x": feature})({"x": x}))
    assert export_saved_model(model, tmp_path / "m").tables == ("t",)
