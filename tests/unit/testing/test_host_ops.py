"""The simulated host ops against what TensorFlow's kernels made of the same inputs (tests/golden/sparse_core_ops)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tpuembed.testing.host_ops import HostOps

GOLDEN = Path(__file__).parents[2] / "golden" / "sparse_core_ops"
CALLS: list[dict[str, Any]] = json.loads((GOLDEN / "truth.json").read_text())["calls"]
CSR = "convert_to_sparse_core_csr_wrapped_coo_tensor"


def call(number: int) -> tuple[Any, list[Any]]:
    """(what our op gives, what the kernel gave) of one call."""
    golden = CALLS[number]
    with np.load(GOLDEN / "arrays.npz") as arrays:

        def load(key: Any) -> Any:
            return [load(item) for item in key] if isinstance(key, list) else arrays[key]

        inputs = {name: load(key) for name, key in golden["inputs"].items()}
        outputs = [load(key) for key in golden.get("outputs", [])]
    return getattr(HostOps(), golden["op"])(**inputs, **golden["attributes"]), outputs


def flat(values: Any) -> list[Any]:
    return [array for value in values for array in (value if isinstance(value, list) else [value])]


SUCCEED = [number for number, golden in enumerate(CALLS) if "error" not in golden]
FAIL = [number for number, golden in enumerate(CALLS) if "error" in golden]


@pytest.mark.parametrize("number", SUCCEED, ids=lambda number: f"{CALLS[number]['case']}-{number}")
def test_equals_the_kernel(number: int) -> None:
    ours, theirs = call(number)
    if CALLS[number]["op"] == CSR:
        ours, theirs = used(ours), used(theirs)
    for mine, truth in zip(flat(ours), flat(theirs), strict=True):
        if np.asarray(truth).dtype == np.float32:
            assert mine.dtype == np.float32
        np.testing.assert_array_equal(mine, truth)


def used(outputs: Any) -> list[Any]:
    """Of a CSR buffer only what the kernel fills; the sizes of all of it."""
    pointers, samples, rows, gains, pointers_used, ids_used, minibatches = outputs
    sizes = [len(buffer) for buffer in (pointers, samples, rows, gains)]
    of_ids = [buffer[: int(ids_used)] for buffer in (samples, rows, gains)]
    return [*sizes, pointers[: int(pointers_used)], *of_ids, pointers_used, ids_used, minibatches]


@pytest.mark.parametrize("number", FAIL, ids=lambda number: CALLS[number]["case"])
def test_fails_as_the_kernel_does(number: int) -> None:
    words = (
        CALLS[number]["error"]
        .split(" [Op:")[0]
        .split(" . ")[0]
        .replace("max_ids_per_chip is", "max_ids_per_chip of table stack of no_room is")
    )
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        call(number)
    assert caught.value.message.startswith(words)


def test_every_case_is_there() -> None:
    assert len(SUCCEED) > 30
    assert {CALLS[number]["case"] for number in FAIL} == {"no_room", "too_many", "too_many_unique"}
