"""Configs and the constructor: TensorFlow's names and defaults, valid once built, and refusals by name."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tpuembed
from tests.support.contract_refusals import assert_each_is_refused
from tests.support.messages import refused
from tpuembed import FTRL, SGD, Adagrad, AdagradMomentum, Adam, FeatureConfig, QuantizationConfig, TableConfig
from tpuembed import TPUEmbedding as Layer
from tpuembed.errors import ConfigError

E = tf.tpu.experimental.embedding
TABLE = TableConfig(9, 2, "t")

OF_OTHER_HARDWARE = {"layout", "dtype", "low_dimensional_packing_status"}
"""Options of TensorFlow's that the contract does not have."""


def options_of(kind: Any) -> dict[str, inspect.Parameter]:
    """The options that `kind` is made with, by name."""
    return {name: option for name, option in inspect.signature(kind).parameters.items() if name != "self"}


def test_options_have_tensorflows_names_and_defaults() -> None:
    for name in ("SGD", "Adagrad", "AdagradMomentum", "Adam", "FTRL", "TableConfig", "FeatureConfig"):
        ours, theirs = options_of(getattr(tpuembed, name)), options_of(getattr(E, name))
        assert theirs.keys() - ours.keys() <= OF_OTHER_HARDWARE
        for option in theirs.keys() & ours.keys() - {"name"}:  # a table must have a name here
            assert ours[option].default == theirs[option].default, (name, option)


def test_the_signatures_of_the_contract() -> None:
    def positional(kind: Any) -> list[str]:
        return [name for name, option in options_of(kind).items() if option.kind is option.POSITIONAL_OR_KEYWORD]

    assert positional(Layer) == [
        *("feature_config", "optimizer", "pipeline_execution_with_tensor_core", "batch_size"),
        *("embedding_feature", "sparse_core_embedding_config"),
    ]
    assert {"size_threshold", "track_rows", "takes_rows", "name"} <= options_of(Layer).keys()
    table = ["vocabulary_size", "dim", "name", "combiner", "initializer", "optimizer", "quantization_config"]
    assert positional(TableConfig)[:7] == table
    feature = ["table", "name", "max_sequence_length", "output_shape", "validate_weights_and_indices"]
    assert positional(FeatureConfig)[:5] == feature
    assert positional(Layer.call)[:4] == ["features", "weights", "serving_config"]


def test_configs_are_frozen_and_hashable() -> None:
    table = TableConfig(3, 2, "t")
    with pytest.raises(dataclasses.FrozenInstanceError):
        table.dim = 3  # type: ignore[misc]
    assert {table: 1}[TableConfig(3, 2, "t")] == 1
    assert FeatureConfig(table) == FeatureConfig(TableConfig(3, 2, "t"))


def test_a_table_is_valid_once_built() -> None:
    def table(**options: Any) -> Callable[[], Any]:
        return lambda: TableConfig(**{"vocabulary_size": 9, "dim": 2, "name": "t", **options})

    cases = [
        (table(vocabulary_size=0), "'t': vocabulary_size .*0"),
        (table(vocabulary_size=3.0), r"'t': vocabulary_size .*3\.0"),
        (table(dim=True), "'t': dim .*True"),
        (table(name=""), "name"),
        (table(combiner="max"), "'t': combiner .*sum, mean, sqrtn.*'max'"),
        (table(optimizer="adamw"), "'t': .*'adamw'"),
        (table(initializer=3), "'t': initializer .*3"),
        (table(quantization_config=3), "'t': quantization_config"),
        (table(out_of_vocabulary="ones"), "'t': out_of_vocabulary .*'ones'"),
        (table(out_of_vocabulary=9), "'t': out_of_vocabulary row 9 .*9 rows"),
    ]
    assert_each_is_refused(ConfigError, cases)
    assert_each_is_refused(ValueError, cases)


def test_a_feature_is_valid_once_built() -> None:
    def feature(**options: Any) -> Callable[[], Any]:
        return lambda: FeatureConfig(**{"table": TABLE, **options})

    cases = [
        (feature(table=3), "table .*3"),
        (feature(name=3), "name .*3"),
        (feature(max_sequence_length=-1), "max_sequence_length .*-1"),
        (feature(output_shape=3), "output_shape .*3"),
        (feature(output_shape=(0,)), "output_shape .*0"),
        (feature(validate_weights_and_indices=1), "validate_weights_and_indices .*1"),
        (feature(out_of_vocabulary=-1), "'t': out_of_vocabulary .*-1"),
    ]
    assert_each_is_refused(ConfigError, cases)


def test_an_optimizer_is_valid_once_built() -> None:
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: SGD(-1.0), "sgd: learning_rate .*-1"),
        (lambda: SGD(clipvalue=(1.0, -1.0)), "clipvalue"),
        (lambda: Adagrad(initial_accumulator_value=0.0), "initial_accumulator_value .*0"),
        (lambda: AdagradMomentum(momentum=1.0), "momentum .*1"),
        (lambda: Adam(beta_1=1.5), r"beta_1 .*1\.5"),
        (lambda: Adam(epsilon=float("nan")), "epsilon .*nan"),
        (lambda: FTRL(learning_rate_power=0.5), r"learning_rate_power .*0\.5"),
        (lambda: QuantizationConfig(4, 1.0, 1.0), "upper"),
    ]
    assert_each_is_refused(ConfigError, cases)


def test_an_option_that_cannot_be_honoured_is_refused_by_name() -> None:
    def layer(**options: Any) -> Callable[[], Any]:
        return lambda: Layer(**{"feature_config": {"x": FeatureConfig(TABLE)}, "optimizer": "sgd", **options})

    twice = {"x": FeatureConfig(TABLE), "y": FeatureConfig(TableConfig(9, 2, "t"))}
    quantized = TableConfig(3, 2, "t", quantization_config=QuantizationConfig(4, 0.0, 1.0))
    cases = [
        (layer(feature_config={}), "feature"),
        (layer(feature_config={"x": 3}), "3"),
        (layer(feature_config=twice), "'t'"),
        (layer(feature_config=FeatureConfig(quantized)), "'t': quantization_config"),
        (layer(size_threshold=-1), "size_threshold .*-1"),
        (layer(takes_rows="yes"), "takes_rows .*'yes'"),
        (layer(track_rows=1), "track_rows .*1"),
        (layer(track_rows=True, optimizer=Adam(lazy_adam=False)), "track_rows"),
        (layer(track_rows=True, optimizer=None), "track_rows"),
        (layer(optimizer=Adagrad(use_gradient_accumulation=False)), "'t': use_gradient_accumulation"),
        (
            layer(optimizer=SGD(weight_decay_factor=0.1, use_gradient_accumulation=False)),
            "'t': use_gradient_accumulation",
        ),
    ]
    assert_each_is_refused(ConfigError, cases)


@pytest.mark.parametrize(
    "optimizer",
    [
        keras.optimizers.SGD(momentum=0.9),
        keras.optimizers.Adam(amsgrad=True),
        keras.optimizers.Adam(clipnorm=1.0),
        keras.optimizers.Adam(global_clipnorm=1.0),
        keras.optimizers.Adam(weight_decay=0.1),
        keras.optimizers.Adam(use_ema=True),
        keras.optimizers.Adam(gradient_accumulation_steps=2),
        keras.optimizers.Adam(loss_scale_factor=2.0),
        keras.optimizers.Adagrad(epsilon=1e-3),
        keras.optimizers.RMSprop(),
        keras.optimizers.Ftrl(l2_shrinkage_regularization_strength=0.1),
        E.Adam(low_dimensional_packing_status=True),
        "rmsprop",
        {"kind": "adam", "beta1": 0.5},
        3,
    ],
)
def test_an_optimizer_that_tables_cannot_honour_is_refused_by_name(optimizer: Any) -> None:
    with refused(ConfigError):
        Layer(FeatureConfig(TABLE), optimizer)


def test_tensorflows_configs_mean_ours() -> None:
    def config_by(module: Any) -> Any:
        videos = module.TableConfig(30, 8, name="videos", combiner="sqrtn", optimizer=module.Adagrad(0.3))
        users = module.TableConfig(10, 4, name="users", initializer=keras.initializers.Ones())
        features = {
            "watched": module.FeatureConfig(
                videos, max_sequence_length=5, name="w", validate_weights_and_indices=False
            ),
            "more": [module.FeatureConfig(videos, output_shape=[None, 2]), module.FeatureConfig(users)],
        }
        return Layer(features, module.SGD(0.1), name="layer").get_config()

    assert config_by(E) == config_by(tpuembed)


def test_an_unnamed_table_gets_tensorflows_name_and_a_warning() -> None:
    a, b = E.TableConfig(3, 2), E.TableConfig(4, 2)
    with pytest.warns(UserWarning, match="Give it a name"):
        layer = Layer({"z": E.FeatureConfig(a), "c": E.FeatureConfig(b), "d": E.FeatureConfig(a)}, "sgd")
    assert {name: rows.shape[0] for name, rows in layer.named_variables().items()} == {"table_0": 4, "table_1": 3}


def test_options_of_accelerators_are_warned_of_where_there_is_none() -> None:
    options: dict[str, Any] = {"pipeline_execution_with_tensor_core": True, "batch_size": 8, "embedding_feature": "V1"}
    with pytest.warns(UserWarning, match="has no effect") as caught:
        Layer(FeatureConfig(TABLE), "sgd", **options)
    said = " ".join(str(warning.message) for warning in caught)
    assert all(option in said for option in options)


def test_initializers_of_each_kind() -> None:
    keras_dict = {"class_name": "Ones", "config": {}}
    for initializer in ("ones", keras.initializers.Ones(), keras_dict, lambda shape, dtype: tf.ones(shape, dtype)):
        table = TableConfig(9, 2, "t", initializer=initializer)
        layer = Layer(FeatureConfig(table), "sgd")
        np.testing.assert_array_equal(layer.embedding_tables[table], np.ones((9, 2)), err_msg=str(initializer))


def test_the_default_initializer_is_tensorflows() -> None:
    """A normal distribution of 1/sqrt(dim) that is cut at two deviations. Two tables begin differently."""
    tables = {name: TableConfig(20_000, 4, name) for name in ("a", "b")}
    layer = Layer({name: FeatureConfig(table) for name, table in tables.items()}, "sgd")
    drawn = {name: layer.embedding_tables[table].numpy() for name, table in tables.items()}
    theirs = tf.initializers.TruncatedNormal(mean=0.0, stddev=0.5)((20_000, 4)).numpy()
    for rows in drawn.values():
        assert np.abs(rows).max() <= 1.0
        assert rows.std() == pytest.approx(theirs.std(), rel=0.02)
        assert abs(rows.mean()) < 0.01
    assert not np.array_equal(drawn["a"], drawn["b"])
