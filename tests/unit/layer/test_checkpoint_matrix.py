"""What is saved in any way on any hardware is read in any way on any other: tables, slots and count of updates."""

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tpuembed import FeatureConfig, TableConfig, TPUEmbedding
from tpuembed.testing import simulated_tpu

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore:The 'warn' function is deprecated:DeprecationWarning"),  # TensorFlow's logging
]
BATCH = 8
SHAPES = {"a/x.1": (30, 8), "b": (9, 5), "c": (40, 8)}


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Gives a strategy; `size_threshold` of a layer on it."""

    strategy: Callable[[], AbstractContextManager[Any]]
    size_threshold: int | None = None


HARDWARE: Mapping[str, Hardware] = {
    "host": Hardware(lambda: nullcontext(tf.distribute.get_strategy())),
    "mirrored": Hardware(lambda: nullcontext(tf.distribute.MirroredStrategy(["CPU:0"]))),
    "SparseCores": Hardware(lambda: simulated_tpu(replicas=2)),
    "other SparseCores": Hardware(lambda: simulated_tpu(replicas=1, sparse_cores=2)),
    "replicated": Hardware(lambda: simulated_tpu(replicas=2, feature="UNSUPPORTED")),
    "mixed": Hardware(lambda: simulated_tpu(replicas=2), size_threshold=9),
}


def build(strategy: Any, hardware: Hardware, optimizer: str) -> Any:
    with strategy.scope():
        features = {
            f"f{number}": FeatureConfig(TableConfig(rows, dim, name), output_shape=(BATCH,))
            for number, (name, (rows, dim)) in enumerate(SHAPES.items())
        }
        inputs = {name: keras.Input((), batch_size=BATCH, dtype="int64", name=name) for name in features}
        layer = TPUEmbedding(features, optimizer, size_threshold=hardware.size_threshold, name="emb")
        return keras.Model(inputs, keras.layers.Dense(1)(keras.ops.concatenate(list(layer(inputs).values()), 1)))


def held(model: Any) -> dict[str, Any]:
    layer = model.get_layer("emb")
    return {name: variable.numpy() for name, variable in layer.named_variables().items()} | {
        "updates": int(layer.updates.numpy())
    }


def save(folder: Path, name: str, optimizer: str) -> dict[str, Any]:
    with HARDWARE[name].strategy() as strategy:
        model, random = build(strategy, HARDWARE[name], optimizer), np.random.default_rng(0)
        for variable in model.get_layer("emb").named_variables().values():
            variable.assign(random.normal(size=variable.shape).astype(np.float32))
        model.get_layer("emb").updates.assign(7)
        tf.train.Checkpoint(model=model).write(str(folder / "ckpt"))
        model.save_weights(folder / "m.weights.h5")
        model.save(folder / "m.keras")
        return held(model)


def by_checkpoint(model: Any, folder: Path) -> None:
    tf.train.Checkpoint(model=model).read(str(folder / "ckpt")).expect_partial()


def by_weights(model: Any, folder: Path) -> None:
    model.load_weights(folder / "m.weights.h5")


def by_restore(model: Any, folder: Path) -> None:
    model.get_layer("emb").restore_tables(folder / "ckpt")


def by_restore_of_weights(model: Any, folder: Path) -> None:
    model.get_layer("emb").restore_tables(folder / "m.weights.h5")


@pytest.mark.parametrize("optimizer", ["adam", "ftrl"])
@pytest.mark.parametrize("name", list(HARDWARE))
def test_what_is_saved_on_any_hardware_is_loaded_on_any_other(tmp_path: Path, name: str, optimizer: str) -> None:
    truth = save(tmp_path, name, optimizer)
    for other, hardware in HARDWARE.items():
        with hardware.strategy() as strategy:
            for load in (by_checkpoint, by_weights, by_restore, by_restore_of_weights):
                model = build(strategy, hardware, optimizer)
                load(model, tmp_path)
                assert_same(held(model), truth, f"{name} to {other}, {load.__name__}")
            with strategy.scope():
                again = keras.models.load_model(tmp_path / "m.keras")
            assert_same(held(again), truth, f"{name} to {other}, .keras")


def assert_same(found: Mapping[str, Any], truth: Mapping[str, Any], what: str) -> None:
    assert found.keys() == truth.keys()
    for name, rows in truth.items():
        np.testing.assert_array_equal(found[name], rows, err_msg=f"{what}: {name}")
