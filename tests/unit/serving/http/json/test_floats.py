"""Numbers against literals of TensorFlow Serving's documentation of its format, and a second implementation of it."""

import struct

import numpy as np
import pytest

from tpuembed_serving.core.servable import Array
from tpuembed_serving.http.json.floats import float_tokens

LITERALS = [
    (3.0, "3.0"), (0.0, "0.0"), (-0.0, "-0.0"), (0.2, "0.2"), (0.0003, "0.0003"), (3e-05, "3e-05"),
    (555557.5, "555557.5"), (9000000.0, "9e+06"), (100000.0, "100000.0"), (1000000.0, "1e+06"),
    (16777216.0, "16777216.0"), (1 / 3, "0.333333343"), (3.4028234663852886e38, "3.40282347e+38"),
    (1e-45, "1.40130e-45".replace("0e", "e")), (float("nan"), "NaN"), (float("inf"), "Infinity"),
    (float("-inf"), "-Infinity"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "token"), LITERALS)
def test_float32_literals(value: float, token: str) -> None:
    assert float_tokens(np.array([value], dtype=np.float32)) == [token]


@pytest.mark.parametrize(
    ("value", "token"),
    [(0.1, "0.1"), (1 / 3, "0.33333333333333331"), (9e6, "9e+06"), (1e300, "1e+300"), (123456789.0, "123456789.0")],
)
def test_float64_literals(value: float, token: str) -> None:
    assert float_tokens(np.array([value])) == [token]


def reference(value: float, kind: str) -> str:
    """json_tensor.cc's WriteDecimal for one finite value; `kind` is struct's letter of the dtype."""

    def round_trip(text: str) -> float:
        try:
            (back,) = struct.unpack(kind, struct.pack(kind, float(text)))
        except OverflowError:
            return float("inf")
        return float(back)

    text = f"{value:.6g}"
    if round_trip(text) != value:
        text = f"{value:.9g}" if kind == "f" else f"{value:.17g}"
    return text if "." in text or "e" in text else text + ".0"


def random_floats(kind: str) -> Array:
    """100,000 numbers: random bits, random decimals, and round ones."""
    rng = np.random.default_rng(20)
    dtype = {"f": np.float32, "d": np.float64}[kind]
    bits = rng.integers(0, 256, 50_000 * np.dtype(dtype).itemsize, dtype=np.uint8).view(dtype)
    decimals = np.round(rng.normal(size=30_000) * 10.0 ** rng.integers(-8, 8, 30_000), 4)
    whole = rng.integers(-(10**9), 10**9, 20_000)
    values = np.concatenate([bits, decimals.astype(dtype), whole.astype(dtype)])
    return values[np.isfinite(values)]


@pytest.mark.parametrize("kind", ["f", "d"])
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_random_numbers_against_the_reference(kind: str) -> None:
    values = random_floats(kind)
    assert float_tokens(values) == [reference(value, kind) for value in values.tolist()]


@pytest.mark.parametrize("kind", ["f", "d"])
def test_every_token_reads_back_as_the_same_number(kind: str) -> None:
    values = random_floats(kind)
    read_back = np.array([float(token) for token in float_tokens(values)]).astype(values.dtype)
    np.testing.assert_array_equal(read_back, values)
