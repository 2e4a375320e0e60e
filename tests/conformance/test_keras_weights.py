"""Keras' weight files: files of tpuembed's own layer, and arrays in chunks of every form."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import keras
import numpy as np
import pytest
import tensorflow as tf

import tpuembed
from tests.support.checkpoint.conformance import Case, CheckpointConformance, Truth, random_table

GOLDENS = Path(__file__).parents[1] / "golden" / "keras_rs"


def own_model() -> Any:
    """Tables whose names look like paths, and like a slot of another table."""
    tables = {
        "a": tpuembed.TableConfig(90, 30, "video/table.v1", optimizer="adam"),
        "b": tpuembed.TableConfig(7, 3, "user", optimizer="sgd"),
        "c": tpuembed.TableConfig(7, 3, "user/accumulators", optimizer="adagrad"),
        "d": tpuembed.TableConfig(5, 2, "tag|x"),
    }
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in tables}
    features = {name: tpuembed.FeatureConfig(table) for name, table in tables.items()}
    rows = tpuembed.TPUEmbedding(features, optimizer="adagrad", name="embedding")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(list(rows.values()))))
    model.compile("adam", "mse")
    model.fit({name: np.array([0, 1]) for name in tables}, np.zeros(2), verbose=0)
    return model


@pytest.fixture(scope="module")
def model() -> Any:
    """Of `own_model`, every weight a different number."""
    model = own_model()
    for number, weight in enumerate(model.get_layer("embedding").weights):
        weight.assign(np.random.default_rng(number).normal(size=weight.shape))
    return model


@pytest.mark.parametrize("ending", ["weights.h5", "keras", "weights.json"])
class TestOwnLayer(CheckpointConformance):
    """Written by tpuembed.TPUEmbedding through Keras; the truth by what the layer holds."""

    SLOTS: ClassVar = {
        "video/table.v1": ["momenta", "velocities"],
        "user": [],
        "user/accumulators": ["accumulators"],
        "tag|x": ["accumulators"],
    }

    @pytest.fixture
    def case(self, model: Any, ending: str, tmp_path: Path) -> Case:
        path = tmp_path / f"model.{ending}"
        if ending == "keras":
            model.save(path)
        else:
            model.save_weights(path, **({"max_shard_size": 12_000 / 2**30} if ending == "weights.json" else {}))
            assert ending != "weights.json" or len(list(tmp_path.iterdir())) > 3
        return Case(path, {name: self._truth(model, name, slots) for name, slots in self.SLOTS.items()})

    def _truth(self, model: Any, name: str, slots: list[str]) -> Truth:
        node = model.get_layer("embedding")._tpu_embedding
        values = {child: node._lookup_dependency(child).numpy() for child in [name, *(f"{name}/{s}" for s in slots)]}
        return Truth(values[name], {slot: values[f"{name}/{slot}"] for slot in slots})


class EmbedReduce(keras.layers.Layer):
    """As keras-rs' own, for dtypes that it does not make."""

    def __init__(self, rows: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.embeddings = self.add_weight(shape=rows.shape, dtype=self.variable_dtype)
        self.embeddings.assign(rows)


class DistributedEmbedding(keras.layers.Layer):
    def __init__(self, tables: Mapping[str, Any], dtype: str) -> None:
        super().__init__(name="de")
        self._default_device_embedding_layers = {
            name: EmbedReduce(rows, name=name, dtype=dtype) for name, rows in tables.items()
        }
        self.built = True

    def call(self, inputs: Any) -> Any:
        return inputs


@pytest.mark.parametrize(
    "dtype", ["bfloat16", *(pytest.param(dtype, marks=pytest.mark.nightly) for dtype in ("float16", "float64"))]
)
class TestKerasDtypes(CheckpointConformance):
    """As Keras itself writes them: bfloat16 as bytes with an attribute."""

    @pytest.fixture
    def case(self, dtype: str, tmp_path: Path) -> Case:
        tables = {"a": random_table(9, 4, dtype), "b": random_table(5, 3, dtype)}
        model = keras.Sequential([keras.Input((1,)), DistributedEmbedding(tables, dtype)])
        model.save_weights(tmp_path / "model.weights.h5")
        held = model.layers[0]._default_device_embedding_layers
        truth = {
            name: np.asarray(held[name].embeddings.value).astype(tf.as_dtype(dtype).as_numpy_dtype) for name in tables
        }
        return Case(tmp_path, {name: Truth(rows) for name, rows in truth.items()})


def test_folder_by_link(tmp_path: Path) -> None:
    """A link to the whole folder is followed; only a link out of it is refused."""
    (tmp_path / "link").symlink_to(GOLDENS / "sharded")
    with tpuembed.open_checkpoint(tmp_path / "link" / "model.weights.json") as checkpoint:
        assert set(checkpoint.tables()) == {"item", "tag", "user", "video.v1"}
