"""Rows as they are stored, against float64 arithmetic and TensorFlow's casts, for every source and storage type."""

from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.support.messages import refused
from tpuembed.config import QuantizationConfig
from tpuembed.export.storage.error import ErrorSums, TableError
from tpuembed.export.storage.formats import SOURCE_DTYPES, RowEncoder
from tpuembed.manifest.storages import STORAGES, UnstorableRowError, block_rows

Array = npt.NDArray[Any]
LARGEST = float(np.finfo(np.float32).max)
TINY = float(np.finfo(np.float32).tiny)
FLOATS = ["float32", "bfloat16", "float16"]


def stored(rows: Array, storage: str, quantization: QuantizationConfig | None = None) -> tuple[Array, float]:
    """Stored rows, and the largest error that the encoder reports."""
    dim = rows.shape[1]
    out = np.zeros((len(rows), STORAGES[storage].columns(dim)), STORAGES[storage].dtype)
    return out, RowEncoder(storage, dim, quantization).encode(rows, out)


def looked_up(rows: Array, storage: str, quantization: QuantizationConfig | None = None) -> Array:
    """As a graph decodes what is stored."""
    out, _ = stored(rows, storage, quantization)
    found: Array = STORAGES[storage].decode_in_graph(tf, tf.constant(out), rows.shape[1]).numpy()
    assert found.dtype == np.float32
    np.testing.assert_array_equal(STORAGES[storage].decode(out), found)
    return found


def normal(rows: int, dim: int, source: str = "float32", scale: float = 0.05) -> Array:
    values = np.random.default_rng(rows + dim).standard_normal((rows, dim)) * scale
    return values.astype(np.float32).astype(SOURCE_DTYPES[source])


@pytest.mark.parametrize(("source", "storage"), list(product(FLOATS, FLOATS)))
def test_casts_are_tensorflows(source: str, storage: str) -> None:
    """Random bit patterns: all exponents, subnormals, halves between two values, infinities and NaN."""
    dtype = SOURCE_DTYPES[source]
    bits = np.random.default_rng(3).integers(0, 2**32, (3000, 7), np.uint32)
    if source == "float32":
        bits &= np.uint32(0xFFFFF000)  # many halves
    values = bits.astype(f"u{dtype.itemsize}").view(dtype)
    limit = 65504.0 if storage == "float16" else 3.3e38
    with np.errstate(invalid="ignore"):
        too_large = np.isfinite(values) & (np.abs(values.astype(np.float64)) > limit)
    values[too_large] = 0
    truth = tf.cast(tf.cast(values, storage), tf.float32).numpy()
    np.testing.assert_array_equal(looked_up(values, storage), truth)


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("dim", [1, 2, 3, 8, 64, 200])
def test_int8_is_within_half_a_step_of_every_value(source: str, dim: int) -> None:
    """A step is the row's range over 254; float32 arithmetic may add a few units in the last place."""
    rows = normal(2 * block_rows(dim) + 5 if dim == 64 else 500, dim, source)
    wide = rows.astype(np.float64)
    step = (wide.max(1) - wide.min(1)) / 254
    error = np.abs(looked_up(rows, "int8").astype(np.float64) - wide)
    assert np.all(error <= (step / 2 * (1 + 1e-5) + 4e-7 * np.abs(wide).max(1))[:, None])
    _, reported = stored(rows, "int8")
    assert reported == pytest.approx(error.max(), rel=1e-6)


def test_a_row_of_int8_is_its_codes_then_scale_and_centre() -> None:
    """The format, by hand: [-1, 0.5, 3] has range 4 around 1."""
    out, _ = stored(np.array([[-1.0, 0.5, 3.0]], np.float32), "int8")
    assert out.dtype == np.int8
    assert out[0, :3].tolist() == [-127, round(-0.5 / (2 / 127)), 127]
    assert out[0, 3:].tobytes() == np.array([np.float32(2) / np.float32(127), 1], "<f4").tobytes()


def test_int8_holds_rows_of_one_value_exactly() -> None:
    constants = [0.0, -0.0, 1.0, -3.7, 1e-45, 3e-45, 1e30, 65504.0, 0.1]
    for value in constants:
        rows = np.full((1, 5), value, np.float32)
        out, reported = stored(rows, "int8")
        np.testing.assert_array_equal(STORAGES["int8"].decode(out), rows)
        assert reported == 0
    ones = normal(300, 1)
    np.testing.assert_array_equal(looked_up(ones, "int8"), ones)


def test_int8_ends_of_a_row_and_zeros_of_a_symmetric_row_are_exact() -> None:
    rows = np.array([[-2.0, 0.0, 2.0, 1.0], [-0.25, 0.25, 0.0, 0.0]], np.float32)
    found = looked_up(rows, "int8")
    np.testing.assert_array_equal(found[rows == 0], 0)
    np.testing.assert_allclose(found[:, :1], rows[:, :1], rtol=1e-7)


@pytest.mark.parametrize(
    "row",
    [
        [-LARGEST, LARGEST, 0.0],
        [LARGEST, LARGEST * (1 - 1e-7), LARGEST],
        [-LARGEST, -LARGEST * 0.99, -LARGEST],
        [LARGEST, 0.0, 1.0],
        [2e38, -3e38, 1e38],
        [1000.0, 1000.0001, 1000.0002],
        [1.0, 1.0 + 2**-23, 1.0],
    ],
)
def test_int8_survives_extreme_rows(row: list[float]) -> None:
    rows = np.array([row], np.float32)
    out, reported = stored(rows, "int8")
    found, wide = STORAGES["int8"].decode(out).astype(np.float64), rows.astype(np.float64)
    assert np.isfinite(found).all()
    step = (wide.max() - wide.min()) / 254
    error = np.abs(found - wide).max()
    assert error <= step / 2 * (1 + 1e-5) + 2e-6 * np.abs(wide).max()
    assert reported >= error * (1 - 1e-6)


def test_int8_does_not_tell_numbers_apart_that_tensorflow_flushes() -> None:
    rows = np.array([[1e-40, 3e-40, 0.0], [1e-37, -1e-37, 0.0]], np.float32)
    out, reported = stored(rows, "int8")
    error = np.abs(STORAGES["int8"].decode(out).astype(np.float64) - rows).max()
    assert error <= 127 * TINY
    assert reported == pytest.approx(error, abs=TINY)


@given(
    hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 40), st.integers(1, 20)),
        elements=st.floats(-LARGEST, LARGEST, width=32),
    )
)
def test_int8_holds_any_finite_row(rows: Array) -> None:
    out, reported = stored(rows, "int8")
    wide = rows.astype(np.float64)
    error = np.abs(STORAGES["int8"].decode(out) - wide)
    bound = (wide.max(1) - wide.min(1)) / 508 * (1 + 1e-5) + 2e-6 * np.abs(wide).max(1) + 127 * TINY
    assert np.all(error <= bound[:, None])
    assert reported >= error.max() * (1 - 1e-5) - TINY


@pytest.mark.parametrize(
    ("storage", "value"),
    [
        ("int8", np.nan),
        ("int8", np.inf),
        ("int8", -np.inf),
        ("float16", 65520.0),
        ("float16", -1e30),
        ("bfloat16", LARGEST),
    ],
)
def test_a_row_that_cannot_be_held_is_named(storage: str, value: float) -> None:
    rows = np.tile(normal(block_rows(8), 8), (3, 1))
    rows[block_rows(8) + 7, 3] = value
    if storage != "int8":
        rows[5, 0] = np.nan  # kept, and no reason to overlook the other
    with refused(UnstorableRowError) as caught:
        stored(rows, storage)
    assert caught.value.index == block_rows(8) + 7


@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
def test_infinities_and_nan_are_kept_and_are_no_error(storage: str) -> None:
    rows = normal(50, 4)
    rows[3, 1], rows[4, 0], rows[9, 2] = np.nan, np.inf, -np.inf
    out, reported = stored(rows, storage)
    found = STORAGES[storage].decode(out)
    np.testing.assert_array_equal(found[~np.isfinite(rows)], rows[~np.isfinite(rows)])
    finite = np.isfinite(rows)
    assert reported == np.abs(found[finite] - rows[finite]).max()


# ---- quantization in training


def formula(value: float, lower: float, upper: float, num_buckets: int) -> float:
    """As `tf.tpu.experimental.embedding.QuantizationConfig` describes it, one value at a time."""
    value = lower if value < lower else upper if value > upper else value
    quantum = (upper - lower) / (num_buckets - 1)
    return float(np.floor((value - lower) / quantum + 0.5) * quantum + lower)


def quantized(rows: Array, config: QuantizationConfig) -> Array:
    """Of rows that are no tie: which of two values as near it takes is up to the last bit of an accelerator's arithmetic."""
    flat = [formula(float(value), config.lower, config.upper, config.num_buckets) for value in rows.ravel()]
    return np.array(flat).reshape(rows.shape)


def without_ties(rows: Array, config: QuantizationConfig) -> Array:
    steps = (rows.astype(np.float64) - config.lower) / (config.upper - config.lower) * (config.num_buckets - 1)
    return rows[(np.abs(steps - np.floor(steps) - 0.5) > 1e-3).all(1)]


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("num_buckets", [2, 3, 16, 255, 256, 257, 5000])
def test_values_are_those_that_training_looked_up(source: str, num_buckets: int) -> None:
    config = QuantizationConfig(num_buckets, -0.1, 0.08)
    rows = without_ties(normal(300, 6, source, 0.1), config)
    assert len(rows) > 200
    truth = quantized(rows, config)
    np.testing.assert_allclose(looked_up(rows, "float32", config), truth, atol=1e-7)
    if num_buckets <= 256:  # a code per bucket
        np.testing.assert_allclose(looked_up(rows, "int8", config), truth, atol=1e-7)
    for storage in ("bfloat16", "float16"):
        cast = tf.cast(tf.cast(tf.constant(truth, tf.float32), storage), tf.float32)
        np.testing.assert_allclose(looked_up(rows, storage, config), cast, rtol=2e-3)


def test_errors_are_against_quantized_float32() -> None:
    config = QuantizationConfig(16, -0.1, 0.1)
    rows = normal(100, 4, scale=1.0)
    assert stored(rows, "float32", config)[1] == 0
    assert stored(rows, "int8", config)[1] < 1e-7
    error = np.abs(looked_up(rows, "bfloat16", config) - looked_up(rows, "float32", config)).max()
    assert stored(rows, "bfloat16", config)[1] == error > 0


# ---- error sums and buffers


def test_errors_of_samples_add_up_to_those_of_all_rows() -> None:
    rows = normal(64, 8)
    rows[3] = 0
    found = looked_up(rows, "int8")
    parts = [ErrorSums.of(float(i), rows[i::4], found[i::4]) for i in range(4)]
    error = TableError.of("int8", sum(parts, ErrorSums()))
    difference = found.astype(np.float64) - rows
    assert error.rms == pytest.approx(np.sqrt((difference**2).mean()), rel=1e-6)
    kept = np.arange(64) != 3
    wide, other = rows[kept].astype(np.float64), found[kept].astype(np.float64)
    cosines = (wide * other).sum(1) / np.linalg.norm(wide, axis=1) / np.linalg.norm(other, axis=1)
    assert error.cosine == pytest.approx(cosines.mean(), abs=1e-9)
    assert error.min_cosine == pytest.approx(cosines.min(), abs=1e-9)
    assert (error.max_abs, error.sampled_rows) == (3.0, 63)
