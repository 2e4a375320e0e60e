"""`first_not_finite` against numpy's isfinite: every 16-bit number, and any bits of float32."""

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tpuembed.export.storage.formats import first_not_finite
from tpuembed.manifest import storages


def brute_force(rows: npt.NDArray[Any]) -> int | None:
    with np.errstate(invalid="ignore"):
        bad = ~np.isfinite(rows.astype(np.float32)).all(axis=1)
    return int(np.argmax(bad)) if bad.any() else None


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.nightly
def test_every_number_of_16_bits(dtype: Any) -> None:
    numbers = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    for number in numbers:
        rows = np.array([[1, -2], [0, number], [number, number]], dtype)
        assert first_not_finite(rows) == brute_force(rows)


@given(arrays.arrays(np.uint32, st.tuples(st.integers(1, 9), st.integers(1, 5))))
def test_any_bits_of_float32(bits: Any) -> None:
    rows = bits.view(np.float32)
    assert first_not_finite(rows) == brute_force(rows)


EDGES = [0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0, 1 << 31]


@pytest.mark.parametrize("bits", EDGES)
def test_the_edges_of_float32(bits: int) -> None:
    rows = np.array([[bits, 0], [0, bits]], np.uint32).view(np.float32)[1:]
    assert first_not_finite(rows) == brute_force(rows)


@pytest.mark.parametrize("row", [0, 6, 7, 8, 19])
def test_a_row_of_any_block(row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storages, "_BLOCK_ELEMENTS", 7 * (3 + 16))
    rows = np.zeros((20, 3), np.float32)
    rows[row, 2] = -np.inf
    rows[19, 0] = np.nan
    assert first_not_finite(rows) == row
