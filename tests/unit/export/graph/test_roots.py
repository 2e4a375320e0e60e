"""A wrong `root` of an export: the message lists the objects that the factory's model could be, and each of them is one."""

import copy
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_saved_model, open_checkpoint
from tpuembed.errors import TpuEmbedError, UnknownObjectError

pytestmark = pytest.mark.usefixtures("exports_in_this_process")


def tower(feature: str, table: str, last: str | None = "score") -> Any:
    ids = keras.Input((), dtype="int64", name=feature)
    rows = TPUEmbedding({feature: FeatureConfig(TableConfig(9, 4, table))}, optimizer="sgd")({feature: ids})
    return keras.Model(ids, keras.layers.Dense(2, name=last)(rows[feature]))


def of_two_towers() -> Any:
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in ("user", "item")}
    towers = [tower(name, f"{name}s")(inputs[name]) for name in inputs]
    return keras.Model(inputs, keras.layers.Dense(1, name="both")(keras.ops.concatenate(towers, 1)))


class Towers(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.item = tower("user", "users"), tower("item", "items")

    def call(self, ids: Any) -> Any:
        return keras.ops.sum(self.query(ids["user"]) * self.item(ids["item"]), axis=1)


def query() -> Any:
    return tower("user", "users")


def saved(model: Any, folder: Path, file: str) -> Path:
    path = folder / file
    if file == "ckpt":
        tf.train.Checkpoint(model=model).write(str(path))
    elif file == "w.weights.h5":
        model.save_weights(path)
    else:
        model.save(path)
    return path


def refusal(path: Path, folder: Path, model: Any, root: str) -> str:
    keras.backend.clear_session()
    with refused(TpuEmbedError) as caught:
        export_saved_model(path, folder / "out", model=model, checkpoint_options={"root": root}, workers=1)
    return str(caught.value)


@pytest.mark.parametrize(
    ("train", "file", "fits", "other"),
    [
        (of_two_towers, "ckpt", "model/_operations/2", "model/_operations/3"),
        (of_two_towers, "m.keras", "layers/functional", "layers/functional_1"),
        (Towers, "ckpt", "model/query", "model/item"),
        (Towers, "w.weights.h5", "layers/functional", "item"),  # Keras takes attributes in the order of their names
    ],
)
@pytest.mark.sampled(1)
def test_the_tower_that_is_meant_is_listed(tmp_path: Path, train: Any, file: str, fits: str, other: str) -> None:
    model = train()
    model({name: tf.constant([1, 2], tf.int64) for name in ("user", "item")})
    path = saved(model, tmp_path, file)
    with open_checkpoint(path, root=fits) as checkpoint:
        assert set(checkpoint.tables()) == {"users"}
    for root in ("model/nothing", other):
        text = refusal(path, tmp_path, query, root)
        assert text.endswith(f" root={fits}"), text
    assert not (tmp_path / "out").exists()
    keras.backend.clear_session()
    export_saved_model(path, tmp_path / "out", model=query, checkpoint_options={"root": fits}, workers=1)


def test_of_many_the_first_five_are_listed_though_their_tables_have_one_name(tmp_path: Path) -> None:
    """Without `root` such a checkpoint cannot be opened."""
    towers = {f"t{number}": tower("user", "users") for number in range(6)}
    prefix = tf.train.Checkpoint(**towers).write(str(tmp_path / "ckpt"))
    text = refusal(Path(prefix), tmp_path, query, "nothing")
    assert text.endswith(" root=t0"), text


def test_a_model_that_needs_no_root(tmp_path: Path) -> None:
    path = saved(query(), tmp_path, "w.weights.h5")
    refusal(path, tmp_path, query, "model")


def test_where_nothing_fits_the_objects_are_listed(tmp_path: Path) -> None:
    path = saved(of_two_towers(), tmp_path, "w.weights.h5")
    ending = ": layers/functional, layers/functional_1"
    assert refusal(path, tmp_path, lambda: tower("user", "users", "other"), "model").endswith(ending)
    with pytest.raises(UnknownObjectError) as caught:
        open_checkpoint(path, root="model")
    assert str(caught.value).endswith(ending)
    assert caught.value.objects == ("layers/functional", "layers/functional_1")
    assert str(copy.copy(caught.value)) == str(caught.value)


def test_a_factory_that_fails_leaves_the_error_as_it_is(tmp_path: Path) -> None:
    path = saved(of_two_towers(), tmp_path, "ckpt")

    def fails() -> Any:
        raise OSError("no such file")

    text = refusal(path, tmp_path, fails, "model/query")
    assert ": model, model/_operations/2" in text
    assert "optimizer" not in text
