"""Configs to and from TensorFlow's and Keras' objects, and what is refused on the way."""

from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.support.messages import refused
from tpuembed import (
    FTRL,
    SGD,
    Adagrad,
    AdagradMomentum,
    Adam,
    FeatureConfig,
    QuantizationConfig,
    TableConfig,
    TPUEmbedding,
)
from tpuembed.backends.tf_config import features_from, features_to_tf, optimizer_to_tf, resolve_optimizer
from tpuembed.errors import ConfigError

E = tf.tpu.experimental.embedding


def _tf_features() -> dict[str, Any]:
    videos = E.TableConfig(
        30,
        8,
        name="videos",
        combiner="sqrtn",
        optimizer=E.Adagrad(0.3),
        quantization_config=E.QuantizationConfig(16, -1.0, 1.0),
    )
    users = E.TableConfig(10, 4, name="users", initializer=tf.random_uniform_initializer(-1, 1, seed=3))
    return {
        "watched": E.FeatureConfig(videos, max_sequence_length=5, name="w", validate_weights_and_indices=False),
        "more": [E.FeatureConfig(videos, output_shape=[None, 2]), E.FeatureConfig(users)],
    }


def test_tensorflows_features_become_ours_and_come_back() -> None:
    theirs = _tf_features()
    ours, names = features_from(theirs)
    videos, users = ours["watched"].table, ours["more"][1].table
    assert ours["more"][0].table is videos
    assert (videos.vocabulary_size, videos.dim, videos.combiner) == (30, 8, "sqrtn")
    assert videos.quantization_config == QuantizationConfig(16, -1.0, 1.0)
    assert videos.initializer is None, "TensorFlow's default initializer is ours"
    assert users.initializer is theirs["more"][1].table.initializer
    assert (ours["watched"].max_sequence_length, ours["watched"].name) == (5, "w")
    assert not ours["watched"].validate_weights_and_indices
    assert ours["more"][0].output_shape == (None, 2)
    assert names == {theirs["watched"].table: "videos", theirs["more"][1].table: "users"}

    back = features_to_tf(ours)
    assert back["more"][0].table is back["watched"].table
    for mine, original in zip(tf.nest.flatten(back), tf.nest.flatten(theirs), strict=True):
        for field in ("max_sequence_length", "validate_weights_and_indices", "name"):
            assert getattr(mine, field) == getattr(original, field)
        for field in ("vocabulary_size", "dim", "combiner", "name"):
            assert getattr(mine.table, field) == getattr(original.table, field)


def test_an_unnamed_table_gets_tensorflows_name_and_a_warning() -> None:
    a, b = E.TableConfig(3, 2), E.TableConfig(4, 2)
    with pytest.warns(UserWarning, match="Give it a name"):
        _, names = features_from({"z": E.FeatureConfig(a), "c": E.FeatureConfig(b), "d": E.FeatureConfig(a)})
    assert names == {b: "table_0", a: "table_1"}


def test_two_tables_of_one_name_are_refused_and_one_object_is_one_table() -> None:
    table = FeatureConfig(TableConfig(3, 2, "t"))
    layer = TPUEmbedding({"x": table, "y": table}, optimizer="sgd")
    assert len(layer.weights) == 4, (
        "the table, the weight of its gradient, the count of updates, the weight of the step"
    )
    with refused(ConfigError, match="'t'"):
        TPUEmbedding({"x": table, "y": FeatureConfig(TableConfig(3, 2, "t"))})
    with refused(ConfigError, match="'t'"):
        TPUEmbedding({"x": FeatureConfig(TableConfig(3, 2, "t")), "y": FeatureConfig(TableConfig(4, 2, "t"))})


@pytest.mark.parametrize(
    ("given", "spec"),
    [
        ("sgd", SGD()),
        ("Adagrad", Adagrad()),
        ("adam", Adam()),
        (E.SGD(0.5), SGD(learning_rate=0.5)),
        (E.Adagrad(0.5, initial_accumulator_value=0.25), Adagrad(learning_rate=0.5, initial_accumulator_value=0.25)),
        (
            E.Adam(0.5, beta_1=0.1, beta_2=0.2, epsilon=1e-3, sum_inside_sqrt=False),
            Adam(learning_rate=0.5, beta_1=0.1, beta_2=0.2, epsilon=1e-3, sum_inside_sqrt=False),
        ),
        ({"kind": "adam", "beta_1": 0.5}, Adam(beta_1=0.5)),
        ("ftrl", FTRL()),
        ("adagrad_momentum", AdagradMomentum()),
        (E.SGD(clipvalue=2.0), SGD(clipvalue=2.0)),
        (
            E.Adam(lazy_adam=False, weight_decay_factor=0.1, multiply_weight_decay_factor_by_learning_rate=True),
            Adam(lazy_adam=False, weight_decay_factor=0.1, multiply_weight_decay_factor_by_learning_rate=True),
        ),
        (
            E.Adagrad(clip_weight_min=-1.0, clip_weight_max=1.0, clipvalue=(None, 2.0), use_gradient_accumulation=True),
            Adagrad(clip_weight_min=-1.0, clip_weight_max=1.0, clipvalue=(None, 2.0)),
        ),
        (E.SGD(use_gradient_accumulation=False), SGD(use_gradient_accumulation=False)),
        (
            E.AdagradMomentum(0.5, momentum=0.1, use_nesterov=True, exponent=3.0, beta2=0.5, epsilon=1e-3),
            AdagradMomentum(learning_rate=0.5, momentum=0.1, use_nesterov=True, exponent=3.0, beta2=0.5, epsilon=1e-3),
        ),
        (
            E.FTRL(0.5, -0.7, 0.1, 0.2, 0.3, 0.4, multiply_linear_by_learning_rate=True, allow_zero_accumulator=True),
            FTRL(
                learning_rate=0.5,
                learning_rate_power=-0.7,
                l1_regularization_strength=0.1,
                l2_regularization_strength=0.2,
                beta=0.3,
                initial_accumulator_value=0.4,
                multiply_linear_by_learning_rate=True,
                allow_zero_accumulator=True,
            ),
        ),
    ],
)
def test_optimizers_are_resolved(given: Any, spec: Any) -> None:
    assert resolve_optimizer(given) == spec
    theirs = optimizer_to_tf(spec)
    assert isinstance(theirs, getattr(E, type(spec).__name__))
    assert resolve_optimizer(theirs) == spec


@pytest.mark.parametrize(
    "optimizer",
    [
        keras.optimizers.SGD(momentum=0.9),
        keras.optimizers.SGD(nesterov=True, momentum=0.1),
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
def test_what_the_tables_cannot_honour_is_refused_by_name(optimizer: Any) -> None:
    with refused(ConfigError):
        resolve_optimizer(optimizer)


def test_keras_ftrl_and_clipvalue_are_translated() -> None:
    ftrl: Any = resolve_optimizer(keras.optimizers.Ftrl(0.5, -0.7, 0.4, 0.1, 0.2, beta=0.3, clipvalue=2.0))
    assert (ftrl.learning_rate_power, ftrl.initial_accumulator_value, ftrl.beta) == (-0.7, 0.4, 0.3)
    assert (ftrl.l1_regularization_strength, ftrl.l2_regularization_strength) == (0.1, 0.2)
    assert ftrl.clipvalue == (-2.0, 2.0)
