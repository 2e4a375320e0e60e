"""slot_variable_creation_fn on every hardware: the user's variables are the slots, or are refused by name."""

import contextlib
import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.fake_tpu import fake_tpu
from tpuembed import Adagrad, FeatureConfig, TableConfig, TPUEmbedding
from tpuembed.errors import ConfigError
from tpuembed.testing import simulated_tpu

HARDWARE = ("V1", "V2", "UNSUPPORTED")
EXAMPLES = 16


def features() -> dict[str, FeatureConfig]:
    tables = (TableConfig(100, 8, "a"), TableConfig(20, 8, "b"))
    return {table.name: FeatureConfig(table, output_shape=(EXAMPLES,)) for table in tables}


def on_any_device(table: Any, slots: list[str], initializers: list[Any]) -> dict[str, Any]:
    """The initial value as a function of the shape, which variables that are divided among devices need."""
    shape = tuple(table.shape)
    values = [functools.partial(initializer, shape=shape, dtype=tf.float32) for initializer in initializers]
    made = [tf.Variable(value, trainable=False, shape=shape, name="mine") for value in values]
    return dict(zip(slots, made, strict=True))


@pytest.mark.parametrize("hardware", HARDWARE)
def test_the_users_variables_are_the_slots(hardware: str) -> None:
    made: dict[int, Any] = {}

    def create(*arguments: Any) -> Any:
        slots = on_any_device(*arguments)
        made.update({id(variable): variable for variable in slots.values()})
        return slots

    with fake_tpu(hardware) as strategy, strategy.scope():
        layer = TPUEmbedding(features(), Adagrad(slot_variable_creation_fn=create))
        children = layer._tpu_embedding._trackable_children()
    slots = {name: child for name, child in children.items() if name.endswith("/accumulators")}
    assert sorted(slots) == (["a_b/accumulators"] if hardware == "V2" else ["a/accumulators", "b/accumulators"])
    assert {id(variable) for variable in slots.values()} == set(made)


@pytest.mark.filterwarnings("ignore:The 'warn' function is deprecated:DeprecationWarning")  # TensorFlow's logging
@pytest.mark.parametrize("place", ["sparse cores", "host"])
def test_slots_of_the_user_are_trained(place: str) -> None:
    host = contextlib.nullcontext(tf.distribute.get_strategy())
    with simulated_tpu(replicas=2) if place == "sparse cores" else host as strategy:
        with strategy.scope():
            layer = TPUEmbedding(
                features(), Adagrad(initial_accumulator_value=0.25, slot_variable_creation_fn=on_any_device)
            )

        def step() -> None:
            with tf.GradientTape() as tape:
                rows = layer({"a": tf.fill([EXAMPLES], 7), "b": tf.fill([EXAMPLES], 3)})
                loss = tf.reduce_sum(rows["a"]) + tf.reduce_sum(rows["b"])
            layer.apply_gradients(tape.gradient(loss, layer.trainable_variables))

        strategy.run(step)
        accumulators = layer.named_variables()["b/accumulators"].numpy()
    expected = np.full((20, 8), 0.25)
    expected[3] += (EXAMPLES * strategy.num_replicas_in_sync) ** 2.0
    np.testing.assert_allclose(accumulators, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("hardware", HARDWARE)
@pytest.mark.parametrize(
    "create",
    [
        lambda *_: {},
        lambda *_: None,
        lambda _, slots, __: dict.fromkeys(slots, 3),
        lambda table, slots, _: dict.fromkeys(slots, tf.constant(0.1, shape=tuple(table.shape))),
    ],
)
def test_what_is_no_slot_is_refused_by_name(hardware: str, create: Any) -> None:
    with (
        fake_tpu(hardware) as strategy,
        strategy.scope(),
        pytest.raises(ConfigError, match=r"table 'a(_b/0)?': slot_variable_creation_fn must return a float32 variable"),
    ):
        TPUEmbedding(features(), Adagrad(slot_variable_creation_fn=create))
