"""The SparseCore path with TensorFlow's own host kernels, which only tensorflow-tpu has, in a process of its own."""

import json
from typing import Any

import pytest

from tests.tpu.environments import TENSORFLOW_TPU
from tests.tpu.numbers.running import run

pytestmark = pytest.mark.timeout(600)

CHECKS = [
    "lookups_equal_plain_ones",
    "a_step_moves_the_rows_that_it_looked_up",
    "limits_hold_to_the_id",
    "room_holds_to_the_id",
    "room_is_refused_where_the_kernel_refuses_it",
    "ids_outside_of_their_table_fail",
]
"""Of `live`, which this process cannot import."""
KERNELS = {
    "convert_to_list_of_sparse_core_coo_tensors",
    "sort_list_of_sparse_core_coo_tensors",
    "convert_to_sparse_core_csr_wrapped_coo_tensor",
}


@pytest.fixture(scope="module")
def found() -> Any:
    """What `live` found of all checks."""
    printed = run(TENSORFLOW_TPU, "tests.tpu.numbers.live", *CHECKS, seconds=500)
    return json.loads(printed.splitlines()[-1])


@pytest.mark.parametrize("check", CHECKS)
def test_holds_with_the_kernels(check: str, found: Any) -> None:
    assert found["outcomes"][check] is None


def test_every_call_of_a_kernel_was_compared_with_the_simulators(found: Any) -> None:
    assert set(found["calls"]) == KERNELS
    assert min(found["calls"].values()) > 300
