"""What would update rows on a TPU, out of the layer's lowered steps and run by XLA, equals the layer's and simulator's rules."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from tests.tpu.environments import JAX, TENSORFLOW_TPU
from tests.tpu.numbers.hyper_parameters import RULES, SLOTS, Rule
from tests.tpu.numbers.rules import Array, assert_same, inputs, layers, simulators, spec_of
from tests.tpu.numbers.running import SOME_TPU, run, skip_without
from tpuembed.backends import row_optimizers

pytestmark = pytest.mark.timeout(900)

Rules = Callable[[Rule, Mapping[str, Array]], list[Array]]


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
@pytest.mark.parametrize("name", RULES)
def test_equals_the_lowered_computation(name: str, ours: Rules, lowered: Mapping[str, list[Array]]) -> None:
    assert_same(lowered[name], ours(RULES[name], inputs()), name)


@pytest.mark.parametrize(("name", "other"), [("adam_inside", "adam_outside"), ("ftrl_regularized", "ftrl_multiplied")])
def test_a_rule_of_other_hyper_parameters_differs(name: str, other: str, lowered: Mapping[str, list[Array]]) -> None:
    for ours in (layers, simulators):
        with pytest.raises(AssertionError, match="differs"):
            assert_same(lowered[name], ours(RULES[other], inputs()), name)


def test_every_optimizer_is_among_the_rules() -> None:
    assert {rule.optimizer for rule in RULES.values()} == set(SLOTS)
    assert set(row_optimizers.RULES) == {spec_of(rule).kind for rule in RULES.values()}
    for rule in RULES.values():
        spec = spec_of(rule)
        assert spec.slots == SLOTS[rule.optimizer]
