"""What would update rows on a TPU, out of the layer's lowered steps and run by XLA, equals the layer's and simulator's rules."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from tests.tpu.environments import JAX, TENSORFLOW_TPU
from tests.tpu.numbers.broken_rules import HANDED_ON, LAYERS, OWN, SIMULATORS
from tests.tpu.numbers.hyper_parameters import RULES, SLOTS, Rule
from tests.tpu.numbers.rules import Array, assert_same, inputs, layers, simulators, spec_of
from tests.tpu.numbers.running import SOME_TPU, run, skip_without
from tests.tpu.numbers.variant import Variant
from tpuembed.backends import row_optimizers

pytestmark = pytest.mark.timeout(900)

Rules = Callable[[Rule, Mapping[str, Array]], list[Array]]
RIGHT = [name for name, rule in RULES.items() if not rule.instead]
OURS = {LAYERS: layers, SIMULATORS: simulators}


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[Array]]:
    """Rule -> new rows and slots by the lowered computation, of `inputs`."""
    skip_without(TENSORFLOW_TPU, JAX)
    folder = tmp_path_factory.mktemp("rules")
    run(TENSORFLOW_TPU, "tests.tpu.numbers.lowering", "trace", str(folder))
    run(TENSORFLOW_TPU, "tests.tpu.numbers.lowering", "lower", str(folder), names=SOME_TPU)
    given: Any = inputs()
    np.savez(folder / "inputs.npz", **given)
    run(JAX, "tests.tpu.numbers.executing", str(folder))
    with np.load(folder / "outputs.npz") as outputs:
        numbers = {name: range(1 + len(SLOTS[rule.optimizer])) for name, rule in RULES.items()}
        return {name: [outputs[f"{name}/{number}"] for number in of_rule] for name, of_rule in numbers.items()}


@pytest.mark.parametrize("ours", [layers, simulators])
@pytest.mark.parametrize("name", RIGHT)
def test_equals_the_lowered_computation(name: str, ours: Rules, lowered: Mapping[str, list[Array]]) -> None:
    assert_same(lowered[name], ours(RULES[name], inputs()), name)


@pytest.mark.parametrize("name", [variant.on for variant in HANDED_ON])
def test_a_layer_that_hands_on_another_constant_is_caught(name: str, lowered: Mapping[str, list[Array]]) -> None:
    for ours in (layers, simulators):
        with pytest.raises(AssertionError, match="differs"):
            assert_same(lowered[name], ours(RULES[name], inputs()), name)


@pytest.mark.parametrize("variant", OWN, ids=lambda variant: variant.name)
def test_a_broken_rule_is_caught(variant: Variant, lowered: Mapping[str, list[Array]]) -> None:
    ours = OURS[variant.check]
    with variant.patch(), pytest.raises(AssertionError, match="differs"):
        assert_same(lowered[variant.on], ours(RULES[variant.on], inputs()), variant.name)


def test_every_optimizer_is_among_the_rules() -> None:
    assert {RULES[name].optimizer for name in RIGHT} == set(SLOTS)
    assert set(row_optimizers.RULES) == {spec_of(RULES[name]).kind for name in RIGHT}
    for rule in (RULES[name] for name in RIGHT):
        spec = spec_of(rule)
        assert spec.slots == SLOTS[rule.optimizer]
