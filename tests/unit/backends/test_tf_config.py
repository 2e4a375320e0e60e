"""Optimizers of every form, as the hardware's class of TensorFlow gets them."""

from typing import Any

import pytest
import tensorflow as tf

from tpuembed import SGD, Adagrad
from tpuembed.backends.tf_config import optimizer_to_tf, resolve_optimizer

E = tf.tpu.experimental.embedding
FULL = [
    E.SGD(clipvalue=2.0),
    E.SGD(use_gradient_accumulation=False),
    E.Adagrad(0.5, initial_accumulator_value=0.25, clip_weight_min=-1.0, clip_weight_max=1.0, clipvalue=(None, 2.0)),
    E.Adam(0.5, beta_1=0.1, beta_2=0.2, epsilon=1e-3, sum_inside_sqrt=False),
    E.Adam(lazy_adam=False, weight_decay_factor=0.1, multiply_weight_decay_factor_by_learning_rate=True),
    E.AdagradMomentum(0.5, momentum=0.1, use_nesterov=True, exponent=3.0, beta2=0.5, epsilon=1e-3),
    E.FTRL(0.5, -0.7, 0.1, 0.2, 0.3, 0.4, multiply_linear_by_learning_rate=True, allow_zero_accumulator=True),
]


@pytest.mark.parametrize(
    ("given", "theirs"),
    [
        ("sgd", E.SGD()),
        ("Adagrad", E.Adagrad()),
        ("adam", E.Adam()),
        ("ftrl", E.FTRL()),
        ("adagrad_momentum", E.AdagradMomentum()),
        ({"kind": "adam", "beta_1": 0.5}, E.Adam(beta_1=0.5)),
        (SGD(learning_rate=0.5), E.SGD(0.5)),
        (Adagrad(0.5, initial_accumulator_value=0.25), E.Adagrad(0.5, initial_accumulator_value=0.25)),
        *((optimizer, optimizer) for optimizer in FULL),
    ],
)
def test_optimizers_come_to_tensorflow(given: Any, theirs: Any) -> None:
    found = optimizer_to_tf(resolve_optimizer(given))
    assert type(found) is type(theirs)
    assert vars(found) == vars(theirs)
