"""Rows and tables written into a live layer, and the tables by the configs that the user passed."""

from typing import Any

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tests.support.layer.restored import Array, held
from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, input_options
from tpuembed.errors import ConfigError, RowRangeError, UnknownTableError

E = tf.tpu.experimental.embedding


def _layer(optimizer: Any = "adagrad") -> TPUEmbedding:
    tables = {"items": TableConfig(12, 3, "items"), "users": TableConfig(5, 2, "users", optimizer="sgd")}
    features = {name: FeatureConfig(table) for name, table in tables.items()}
    return TPUEmbedding(features, optimizer=optimizer, name="emb")


def _rows(*shape: int) -> Array:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


# ---- assign_rows


@pytest.mark.parametrize("slot", [None, "accumulators"])
@pytest.mark.parametrize(("start", "count"), [(0, 12), (0, 1), (11, 1), (4, 5), (12, 0), (0, 0)])
def test_rows_are_written_and_no_other(slot: str | None, start: int, count: int) -> None:
    layer = _layer()
    truth = held(layer)
    truth["items"][slot] = truth["items"][slot].copy()
    truth["items"][slot][start : start + count] = _rows(count, 3)
    layer.assign_rows("items", start, _rows(count, 3), slot)
    for table, arrays in held(layer).items():
        for name, values in arrays.items():
            np.testing.assert_array_equal(values, truth[table][name])


@pytest.mark.parametrize(
    "make",
    [
        np.asarray,
        lambda rows: rows.astype(np.float16),
        lambda rows: rows.astype(ml_dtypes.bfloat16),
        tf.constant,
        tf.Variable,
        lambda rows: tf.cast(rows, tf.bfloat16),
        keras.Variable,
        np.asfortranarray,
    ],
)
def test_rows_of_any_kind(make: Any) -> None:
    layer = _layer()
    layer.assign_rows("items", 2, make(_rows(4, 3)))
    np.testing.assert_array_equal(held(layer)["items"][None][2:6], _rows(4, 3))


@pytest.mark.parametrize("optimizer", ["adagrad", None])
def test_a_variable_is_the_same_one_and_is_trained_on(optimizer: str | None) -> None:
    layer = _layer(optimizer)
    variable = next(iter(layer.embedding_tables.values()))
    layer.assign_rows("items", 0, _rows(12, 3))
    assert next(iter(layer.embedding_tables.values())) is variable
    ids = {"items": tf.constant([5]), "users": tf.constant([0])}
    np.testing.assert_array_equal(layer(ids)["items"], _rows(12, 3)[5:6])
    layer.assign_rows("items", 5, np.zeros((1, 3), np.float32))
    np.testing.assert_array_equal(layer(ids)["items"], np.zeros((1, 3)))


def test_a_range_outside_the_table_is_an_index_error() -> None:
    layer = _layer()
    for start, count in [(-1, 1), (12, 1), (0, 13), (13, 0), (2**62, 1)]:
        with refused(RowRangeError, match=rf"\[{start}, {start + count}\)"):
            layer.assign_rows("items", start, _rows(count, 3))
    assert issubclass(RowRangeError, IndexError)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("item", 0, _rows(1, 3)), UnknownTableError),
        (("items", 0, _rows(1, 3), "momenta"), UnknownTableError),
        (("users", 0, _rows(1, 2), "accumulators"), UnknownTableError),
        (("items", 0, _rows(2, 4)), ConfigError),
        (("items", 0, _rows(3)), ConfigError),
        (("items", 0, _rows(1, 3).astype(np.float64)), ConfigError),
        (("items", 0, _rows(1, 3).astype(np.int32)), ConfigError),
        (("items", 0, [["a", "b", "c"]]), ConfigError),
        (("items", 0, _rows(1, 3), "accumulator"), UnknownTableError),
        (("items", 0.0, _rows(1, 3)), ConfigError),
        (("items", True, _rows(1, 3)), ConfigError),
    ],
)
def test_what_cannot_be_written(arguments: Any, error: type[Exception]) -> None:
    layer = _layer()
    before = held(layer)
    with refused(error):
        layer.assign_rows(*arguments)
    for table, arrays in held(layer).items():
        for name, values in arrays.items():
            np.testing.assert_array_equal(values, before[table][name])


def test_a_graph_is_refused() -> None:
    layer = _layer()
    with refused(ConfigError, match="assign_rows"):
        tf.function(lambda: layer.assign_rows("items", 0, _rows(1, 3)))()


# ---- update_embedding_table


@pytest.mark.parametrize("make", [tf.Variable, tf.constant, np.asarray, keras.Variable])
def test_update_embedding_table_copies_the_rows(make: Any) -> None:
    video, user = (E.TableConfig(7, 3, name=name) for name in ("video", "user"))
    layer = TPUEmbedding([E.FeatureConfig(video), E.FeatureConfig(user)], optimizer=E.Adagrad(0.1))
    user_rows, variable = held(layer)["user"], layer.embedding_tables[video]
    layer.update_embedding_table(video, make(_rows(7, 3)))
    assert layer.embedding_tables[video] is variable
    np.testing.assert_array_equal(variable, _rows(7, 3))
    np.testing.assert_array_equal(held(layer)["user"][None], user_rows[None])
    layer.update_embedding_table(E.TableConfig(7, 3, name="user"), make(_rows(7, 3)))
    np.testing.assert_array_equal(held(layer)["user"][None], _rows(7, 3))


@pytest.mark.filterwarnings("ignore:a TableConfig without a name")
def test_update_embedding_table_knows_an_unnamed_table_by_its_config() -> None:
    table = E.TableConfig(4, 2)
    layer = TPUEmbedding(E.FeatureConfig(table), optimizer="sgd")
    layer.update_embedding_table(table, _rows(4, 2))
    np.testing.assert_array_equal(layer.embedding_tables[table], _rows(4, 2))
    with refused(UnknownTableError):
        layer.update_embedding_table(E.TableConfig(4, 2), _rows(4, 2))


def test_update_embedding_table_refuses_what_tfrs_ignores() -> None:
    layer = _layer()
    with refused(UnknownTableError, match="table 'other'"):
        layer.update_embedding_table(TableConfig(12, 3, "other"), _rows(12, 3))
    with refused(ConfigError, match="table 'items'"):
        layer.update_embedding_table("items", _rows(11, 3))


# ---- embedding_tables


def test_arguments_of_another_kind() -> None:
    layer = _layer()
    with refused(ConfigError):
        layer.restore_tables(None)  # type: ignore[arg-type]
    with refused(ConfigError):
        layer.update_embedding_table("items", [[1.0], [1.0, 2.0]])
    with refused(ConfigError, match=r"tf\.distribute\.Strategy"):
        input_options(3)
