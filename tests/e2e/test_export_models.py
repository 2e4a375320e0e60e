"""Whole-model exports: what does not fit together is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_saved_model
from tpuembed.errors import CheckpointMismatchError, ConfigError, UnknownTableError

pytestmark = pytest.mark.usefixtures("exports_in_this_process")


def _table(name: str = "t", rows: int = 10) -> TableConfig:
    return TableConfig(rows, 4, name)


def _single() -> Any:
    """One bare input, one bare output."""
    x = keras.Input((), dtype="int64", name="item")
    rows = TPUEmbedding(FeatureConfig(_table()), optimizer="sgd")(x)
    return keras.Model(x, keras.layers.Dense(2, name="scores")(rows))


class _Tower(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = TPUEmbedding({"item": FeatureConfig(_table())}, optimizer="adagrad")
        self.dense = keras.layers.Dense(2)

    def call(self, inputs: dict[str, Any]) -> Any:
        return {"out": self.dense(self.embedding({"item": inputs["item"]})["item"])}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    prefix: str = tf.train.Checkpoint(model=_single()).write(str(tmp_path_factory.mktemp("ckpt") / "ckpt"))
    return prefix


def _wider() -> Any:
    x = keras.Input((), dtype="int64", name="item")
    return keras.Model(x, keras.layers.Dense(3)(TPUEmbedding(FeatureConfig(_table()), optimizer="sgd")(x)))


def _deeper() -> Any:
    x = keras.Input((), dtype="int64", name="item")
    rows = TPUEmbedding(FeatureConfig(_table()), optimizer="sgd")(x)
    return keras.Model(x, keras.layers.Dense(2)(keras.layers.Dense(2, name="extra")(rows)))


def _other_table(**options: Any) -> Callable[[], Any]:
    def factory() -> Any:
        x = keras.Input((), dtype="int64", name="item")
        return keras.Model(x, TPUEmbedding(FeatureConfig(_table(**options)), optimizer="sgd")(x))

    return factory


def _no_table() -> Any:
    x = keras.Input((2,), name="x")
    return keras.Model(x, keras.layers.Dense(1)(x))


def _raises() -> Any:
    raise RuntimeError("no GPU today")


def _fails_when_called() -> Any:
    class Broken(_Tower):
        def call(self, inputs: dict[str, Any]) -> Any:
            return inputs["missing"]

    return Broken(), {"item": tf.TensorSpec([None], tf.int64)}


@pytest.mark.filterwarnings("ignore::UserWarning:keras")  # about the model that breaks
@pytest.mark.parametrize(
    ("factory", "error"),
    [
        (_wider, CheckpointMismatchError),
        (_deeper, CheckpointMismatchError),
        (_other_table(name="tt"), UnknownTableError),
        (_other_table(rows=11), CheckpointMismatchError),
        (_no_table, ConfigError),
        (_raises, ConfigError),
        (_fails_when_called, ConfigError),
        (lambda: 3, ConfigError),
        (lambda: _Tower(), ConfigError),
        (lambda: (_Tower(), {"item": 3}), ConfigError),
        ("tests.e2e.test_export_models", ConfigError),
        ("tests/e2e/test_export_models.py:_single", ConfigError),
        ("tests.e2e:_singel", ConfigError),
        ("docs:_single", ConfigError),
    ],
)
def test_a_model_that_does_not_fit_is_refused_and_leaves_nothing(
    checkpoint: str, tmp_path: Path, factory: Any, error: type[Exception]
) -> None:
    with refused(error):
        export_saved_model(checkpoint, tmp_path / "m", model=factory)
    assert not list(tmp_path.glob("m/*"))


def test_a_live_model_is_refused(checkpoint: str, tmp_path: Path) -> None:
    with refused(ConfigError):
        export_saved_model(checkpoint, tmp_path / "m", model=_single())


def test_two_saved_models_that_fit_are_ambiguous(tmp_path: Path) -> None:
    first, second = _no_table(), _no_table()
    layer = TPUEmbedding(FeatureConfig(_table()), optimizer="sgd")
    prefix = tf.train.Checkpoint(a=first, b=second, layer=layer).write(str(tmp_path / "ckpt"))

    def factory() -> Any:
        TPUEmbedding(FeatureConfig(_table()), optimizer="sgd")
        return _no_table()

    with refused(CheckpointMismatchError):
        export_saved_model(prefix, tmp_path / "m", model=factory)


def test_a_serving_config_must_agree_with_the_model(checkpoint: str, tmp_path: Path) -> None:
    good = {"features": {"item": {"table": "t", "input": "id"}}}
    assert export_saved_model(checkpoint, tmp_path / "m", model=_single, serving_config=good).version == 1
    for change in ({"input": "ids"}, {"input": "id", "out_of_vocabulary": "zeros"}):
        bad = {"features": {"item": {"table": "t", **change}}}
        with refused(ConfigError):
            export_saved_model(checkpoint, tmp_path / "m", model=_single, serving_config=bad)
    config = {"features": {"items": {"table": "t", "input": "id"}}}
    with refused(ConfigError):
        export_saved_model(checkpoint, tmp_path / "m", model=_single, serving_config=config)
