"""Whole-model exports of parts of a trained model and from every kind of source, by the numbers of the trained model."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import capi
from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_saved_model, open_checkpoint
from tpuembed.errors import CheckpointMismatchError, ConfigError

pytestmark = pytest.mark.usefixtures("exports_in_this_process")

IDS = np.array([3, 0, 9])
HEADS = ("click", "watch", "like")


def _rows(ids: Any, table: str = "t") -> Any:
    return TPUEmbedding({"id": FeatureConfig(TableConfig(10, 4, table))}, optimizer="sgd")({"id": ids})["id"]


def _heads(outputs: Sequence[str] = HEADS, hidden: int = 4, dtype: str | None = None) -> Callable[[], Any]:
    """A factory of hidden layers and heads of one shape, its outputs in a list."""

    def factory() -> Any:
        ids = keras.Input((), dtype="int64", name="ids")
        x = _rows(ids)
        for number in range(hidden):
            x = keras.layers.Dense(4, activation="tanh", name=f"hidden{number}", dtype=dtype)(x)
        return keras.Model(ids, [keras.layers.Dense(4, name=name)(x) for name in outputs])

    return factory


def _trained(factory: Callable[[], Any]) -> Any:
    model = factory()
    random = np.random.default_rng(5)
    for weight in model.weights:
        if "int" not in weight.dtype:
            weight.assign(random.normal(size=weight.shape))
    return model


@pytest.fixture(scope="module")
def model() -> Any:
    return _trained(_heads())


@pytest.fixture(scope="module")
def truth(model: Any) -> dict[str, Any]:
    return dict(zip(HEADS, (np.asarray(value) for value in model(IDS)), strict=True))


@pytest.fixture(scope="module")
def sources(model: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    tf.train.Checkpoint(model=model).write(str(folder / "ckpt"))
    model.save_weights(folder / "model.weights.h5")
    model.save_weights(folder / "sharded.weights.json", max_shard_size=3e-7)
    return {
        path.name: path for path in sorted(folder.iterdir()) if ".data-" not in path.name and "_0000" not in path.name
    }


def test_a_factory_with_fewer_hidden_layers_is_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    with refused(CheckpointMismatchError):
        export_saved_model(sources["ckpt.index"], tmp_path / "m", model=_heads(hidden=3))


def test_a_model_trained_on_ids_is_served_on_strings(
    sources: dict[str, Path], truth: dict[str, Any], tmp_path: Path
) -> None:
    def factory() -> Any:
        names = keras.Input((), dtype="string", name="names")
        lookup = keras.layers.StringLookup(vocabulary=[f"v{number}" for number in range(1, 10)])
        outputs = _heads()()(lookup(names))
        return keras.Model(names, dict(zip(HEADS, outputs, strict=True)))

    for name in ("ckpt.index", "model.weights.h5"):
        report = export_saved_model(sources[name], tmp_path / name, model=factory, workers=1)
        served = tf.saved_model.load(str(report.path)).signatures["serving_default"]
        found = served(names=tf.constant([f"v{number}" for number in IDS]))
        for head in HEADS:
            np.testing.assert_allclose(found[head], truth[head], atol=1e-5, err_msg=f"{name}: {head}")


class _Towers(keras.Model):
    """Two towers of one class beside each other, each with its own table."""

    def __init__(self, tables: Sequence[str] = ("users", "items")) -> None:
        super().__init__()
        self.query, self.candidate = _tower(tables[0]), _tower(tables[1])

    def call(self, inputs: Any) -> Any:
        return keras.ops.sum(self.query(inputs["ids"]) * self.candidate(inputs["ids"]), -1)


def _tower(table: str) -> Any:
    ids = keras.Input((), dtype="int64", name="ids")
    return keras.Model(ids, keras.layers.Dense(4, name="projection")(_rows(ids, table)))


def test_one_tower_of_two_is_found_by_its_tables_and_needs_the_flag(tmp_path: Path) -> None:
    towers = _trained(_Towers)
    prefix = tf.train.Checkpoint(model=towers).write(str(tmp_path / "ckpt"))
    for table, tower in (("users", towers.query), ("items", towers.candidate)):

        def factory(table: str = table) -> Any:
            return _tower(table)

        with refused(CheckpointMismatchError):
            export_saved_model(prefix, tmp_path / table, model=factory)
        report = export_saved_model(prefix, tmp_path / table, model=factory, allow_unused_weights=True)
        (found,) = capi.predict(report.path, {"ids": IDS}).values()
        np.testing.assert_allclose(found, tower(IDS), atol=1e-5)


def test_a_weight_of_another_dtype_is_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    for name in ("ckpt.index", "model.weights.h5"):
        with refused(CheckpointMismatchError):
            export_saved_model(sources[name], tmp_path / "m", model=_heads(dtype="float16"))


def test_another_dtype_policy_than_in_training_is_refused(tmp_path: Path) -> None:
    _trained(_heads(dtype="mixed_bfloat16")).save(tmp_path / "model.keras")
    with refused(CheckpointMismatchError):
        export_saved_model(tmp_path / "model.keras", tmp_path / "m", model=_heads())
    export_saved_model(tmp_path / "model.keras", tmp_path / "m", model=_heads(dtype="mixed_bfloat16"), workers=1)


class _Holder(keras.Model):
    """Keeps layers, or a variable, in a way that some files do not save."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embedding = TPUEmbedding({"id": FeatureConfig(TableConfig(10, 4, "t"))}, optimizer="sgd")
        layers = [keras.layers.Dense(4) for _ in range(2)] if how != "raw" else []
        self.held: Any = tf.Variable([2.0, 3.0, 4.0, 5.0], name="scale") if how == "raw" else layers
        if how == "dict":
            self.held = dict(zip("ab", layers, strict=True))

    def call(self, inputs: Any) -> Any:
        x = self.embedding({"id": inputs["ids"]})["id"]
        if isinstance(self.held, tf.Variable):
            return {"out": x * self.held}
        first, second = self.held.values() if isinstance(self.held, dict) else self.held
        return {"out": first(x) + 2 * second(x)}


@pytest.mark.parametrize(("how", "works"), [("list", "w.weights.h5"), ("dict", "w.weights.h5"), ("raw", "ckpt.index")])
@pytest.mark.sampled(1)
def test_what_one_kind_of_file_does_not_save_the_other_does(how: str, works: str, tmp_path: Path) -> None:
    def factory() -> Any:
        return _Holder(how), {"ids": tf.TensorSpec([None], tf.int64)}

    model = _Holder(how)
    model({"ids": tf.constant(IDS)})
    for weight in [*model.weights, *([model.held] if how == "raw" else [])]:
        if "int" not in str(weight.dtype):
            weight.assign(np.random.default_rng(1).normal(size=weight.shape))
    truth = model({"ids": tf.constant(IDS)})["out"]
    tf.train.Checkpoint(model=model).write(str(tmp_path / "ckpt"))
    model.save_weights(tmp_path / "w.weights.h5")
    (other,) = {"w.weights.h5", "ckpt.index"} - {works}
    report = export_saved_model(tmp_path / works, tmp_path / "m", model=factory, workers=1)
    np.testing.assert_allclose(capi.predict(report.path, {"ids": IDS})["out"], truth, atol=1e-5)
    with pytest.raises(CheckpointMismatchError, match=r"has no value for .*(dense(_\d+)?/kernel|scale)"):
        export_saved_model(tmp_path / other, tmp_path / "n", model=factory)


def test_root_names_a_layer_of_a_weight_file(tmp_path: Path) -> None:
    towers = _trained(_Towers)
    towers({"ids": tf.constant(IDS)})
    towers.save_weights(tmp_path / "w.weights.h5")
    with open_checkpoint(tmp_path / "w.weights.h5", root="candidate") as checkpoint:
        assert set(checkpoint.tables()) == {"items"}
    report = export_saved_model(
        tmp_path / "w.weights.h5",
        tmp_path / "m",
        model=lambda: _tower("items"),
        checkpoint_options={"root": "candidate"},
        workers=1,
    )
    (found,) = capi.predict(report.path, {"ids": IDS}).values()
    np.testing.assert_allclose(found, towers.candidate(IDS), atol=1e-5)
    with refused(ConfigError, match="'candidates'"):
        open_checkpoint(tmp_path / "w.weights.h5", root="candidates")
