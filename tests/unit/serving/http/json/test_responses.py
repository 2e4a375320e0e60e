"""Response bodies: their values, read back by Python's own parser, and the few forms that JSON does not settle."""

import json
import math
from typing import Any

import numpy as np
import pytest

from tests.support.serving.doubles import signature
from tpuembed_serving.core.servable import Array
from tpuembed_serving.core.status import StatusError
from tpuembed_serving.http.json import encode_error, encode_outputs

DTYPES = {"float32": "float", "float64": "double", "object": "string", "float16": "half"}


def encode(row_form: bool, **outputs: Any) -> str:
    arrays: dict[str, Array] = {alias: np.asarray(value) for alias, value in outputs.items()}
    dtypes = {alias: DTYPES.get(str(array.dtype), str(array.dtype)) for alias, array in arrays.items()}
    return encode_outputs(arrays, signature({}, dtypes), row_form).decode()


def floats(*values: float) -> Array:
    return np.array(values, dtype=np.float32)


def text(*values: bytes) -> Array:
    return np.array(values, dtype=object)


def test_strings_are_escaped_as_little_as_can_be() -> None:
    value = 'a"\\/\b\f\n\r\t\x01\x1f\x7f\u00e9'.encode()
    wanted = '{"predictions":["a\\"\\\\/\\b\\f\\n\\r\\t\\u0001\\u001f\x7f\u00e9"]}'
    assert encode(True, y=text(value)) == wanted


def test_bytes_that_are_no_utf8_go_out_as_they_are() -> None:
    body = encode_outputs({"y": text(b"\xff")}, signature({}, {"y": "string"}), row_form=True)
    assert body == b'{"predictions":["\xff"]}'


@pytest.mark.parametrize("row_form", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numbers_that_json_lacks(row_form: bool, dtype: Any) -> None:
    """One output, and two, of which one is finite. The finite numbers keep their digits."""
    odd = np.array([[math.nan, 0.1], [math.inf, -math.inf]], dtype)
    name = "predictions" if row_form else "outputs"
    assert encode(row_form, y=odd) == f'{{"{name}":[[NaN,0.1],[Infinity,-Infinity]]}}'
    both = encode(row_form, y=odd, z=np.array([1, 2]))
    rows = '[{"y":[NaN,0.1],"z":1},{"y":[Infinity,-Infinity],"z":2}]'
    assert both == f'{{"{name}":{rows if row_form else """{"y":[[NaN,0.1],[Infinity,-Infinity]],"z":[1,2]}"""}}}'


@pytest.mark.parametrize("odd", [[], [math.nan]])
@pytest.mark.parametrize("columns", [1, 2])
def test_every_float_reads_back_from_its_fewest_digits(odd: list[float], columns: int) -> None:
    """Random bits. With a NaN among them they take another way."""
    bits = np.random.default_rng(20).integers(0, 256, 4 * 20_000, dtype=np.uint8).view(np.float32)
    values = np.concatenate([bits[np.isfinite(bits)], floats(*odd)])
    body = encode(True, **{f"y{number}": values for number in range(columns)})
    tokens = json.loads(body, parse_float=str, parse_constant=str)["predictions"]
    digits = [row["y0"] for row in tokens] if columns == 2 else tokens
    np.testing.assert_array_equal(np.array([np.float32(token) for token in digits]), values)
    shortest = [np.format_float_scientific(value, unique=True, trim="-").partition("e")[0] for value in values[:500]]
    wanted = [len(one.replace(".", "").lstrip("-")) for one in shortest]
    found = [len(one.partition("e")[0].replace(".", "").lstrip("-").strip("0") or "0") for one in digits[:500]]
    assert found == wanted


def test_no_outputs_are_refused() -> None:
    with pytest.raises(StatusError, match=r"^Cannot convert empty tensor map to JSON$"):
        encode(True)


def test_an_error() -> None:
    assert encode_error('no "x"\n') == b'{"error":"no \\"x\\"\\n"}'
