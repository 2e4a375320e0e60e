"""Whole-model exports: forms of models and checkpoints, and what cannot be exported."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import capi
from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_saved_model
from tpuembed.errors import CheckpointMismatchError, ConfigError, UnknownTableError

pytestmark = pytest.mark.usefixtures("exports_in_this_process")

IDS = np.array([3, 0, 9])


def _table(name: str = "t", rows: int = 10, dim: int = 4) -> TableConfig:
    return TableConfig(rows, dim, name)


def _single() -> Any:
    """One bare input, one bare output."""
    x = keras.Input((), dtype="int64", name="item")
    rows = TPUEmbedding(FeatureConfig(_table()), optimizer="sgd")(x)
    return keras.Model(x, keras.layers.Dense(2, name="scores")(rows))


def _listed() -> Any:
    """Two layers of one table each; inputs and outputs in lists; a part without any table."""
    x, y = keras.Input((), dtype="int64", name="x"), keras.Input((3,), dtype="float32", name="y")
    first = TPUEmbedding(FeatureConfig(_table("one")), optimizer="sgd")(x)
    second = TPUEmbedding([FeatureConfig(_table("two", dim=2))], optimizer="adam")([x])[0]
    joined = keras.ops.concatenate([first, second, keras.layers.Dense(3)(y)], -1)
    return keras.Model([x, y], [keras.layers.Dense(1, name="a")(joined), keras.layers.Dense(1, name="b")(first)])


class _Tower(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = TPUEmbedding({"item": FeatureConfig(_table())}, optimizer="adagrad")
        self.dense = keras.layers.Dense(2)

    def call(self, inputs: dict[str, Any]) -> Any:
        return {"out": self.dense(self.embedding({"item": inputs["item"]})["item"])}


def _subclassed() -> Any:
    return _Tower(), {"item": tf.TensorSpec([None], tf.int64)}


INPUTS: dict[Callable[[], Any], dict[str, Any]] = {
    _single: {"item": IDS},
    _listed: {"x": IDS, "y": np.ones((3, 3), np.float32)},
    _subclassed: {"item": IDS},
}


def _trained(factory: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """A model with weights that are not its initial ones, and its outputs for INPUTS by name."""
    keras.utils.set_random_seed(3)
    made = factory()
    model = made[0] if isinstance(made, tuple) else made
    values = {name: tf.constant(value) for name, value in INPUTS[factory].items()}
    given: Any = values if factory is _subclassed else list(values.values())
    model(given if len(values) > 1 or factory is _subclassed else given[0])
    for weight in model.weights:
        weight.assign(np.random.default_rng(len(weight.path)).normal(size=weight.shape))
    out = model(given if len(values) > 1 or factory is _subclassed else given[0], training=False)
    if isinstance(out, dict):
        return model, {name: value.numpy() for name, value in out.items()}
    out = out if isinstance(out, list) else [out]
    return model, {name: value.numpy() for name, value in zip(model.output_names, out, strict=True)}


ROOTS: dict[str, Callable[[Any], Any]] = {
    "model": lambda model: tf.train.Checkpoint(model=model),
    "root": lambda model: tf.train.Checkpoint(model),
    "nested": lambda model: tf.train.Checkpoint(step=tf.Variable(1), trainer=tf.train.Checkpoint(net=model)),
    "twice": lambda model: tf.train.Checkpoint(model=model, best=model),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("factory", INPUTS, ids=lambda f: f.__name__)
def test_every_form_computes_the_trained_models_numbers(factory: Callable[[], Any], root: str, tmp_path: Path) -> None:
    model, truth = _trained(factory)
    prefix = ROOTS[root](model).write(str(tmp_path / "ckpt"))
    report = export_saved_model(prefix, tmp_path / "m", model=factory, workers=1)
    found = capi.predict(report.path, INPUTS[factory])
    assert set(found) == set(truth)
    for name, values in truth.items():
        np.testing.assert_allclose(found[name], values, atol=1e-6, err_msg=name)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    prefix: str = tf.train.Checkpoint(model=_trained(_single)[0]).write(str(tmp_path_factory.mktemp("ckpt") / "ckpt"))
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


def test_towers_of_one_shape_are_told_apart_by_their_tables(tmp_path: Path) -> None:
    query, candidate = _tower("queries")(), _tower("candidates")()
    prefix = tf.train.Checkpoint(q=query, c=candidate).write(str(tmp_path / "ckpt"))
    for name, tower in (("queries", query), ("candidates", candidate)):
        report = export_saved_model(prefix, tmp_path / name, model=_tower(name))
        (found,) = capi.predict(report.path, {"item": IDS}).values()
        np.testing.assert_allclose(found, tower(IDS), atol=1e-6)


def _tower(table: str) -> Callable[[], Any]:
    def factory() -> Any:
        x = keras.Input((), dtype="int64", name="item")
        return keras.Model(x, keras.layers.Dense(2)(TPUEmbedding(FeatureConfig(_table(table)), optimizer="sgd")(x)))

    return factory


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
