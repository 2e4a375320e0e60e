"""Writes answers as JSON: the values of TensorFlow Serving's answers (json_tensor.cc), in orjson's form.

A float has the fewest digits that read back as the same number of its dtype. NaN and infinities, which JSON lacks, are the tokens
NaN, Infinity and -Infinity, as in TensorFlow Serving.
"""

import base64
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import numpy as np
import orjson

from tpuembed_serving.core.noop import noop
from tpuembed_serving.core.pipeline import Check
from tpuembed_serving.core.servable import Array, Signature
from tpuembed_serving.core.status import invalid_argument

__all__ = ["encode_error", "encode_outputs", "numbers", "plain_numbers", "write_json"]

# orjson keeps Python's lock, for about a millisecond with so many floats. Other requests wait as long.
_BLOCK_ELEMENTS: Final = 16 * 2**10
_NUMBERS: Final = frozenset({"float", "double", "int8", "int16", "int32", "int64", "uint8", "uint32", "uint64", "bool"})
Write = Callable[[Array], bytes]


def encode_error(message: str) -> bytes:
    """Returns the body of an error."""
    return write_json({"error": message})


def encode_outputs(outputs: Mapping[str, Array], signature: Signature, row_form: bool, check: Check = noop) -> bytes:
    """Returns the body of a predict answer: `outputs` by alias, in row form or columnar form.

    Large outputs are written in blocks, and `check` is called before each.

    Raises:
        StatusError: an output has no JSON form, or in row form another batch dimension than the others.
    """
    if not outputs:
        raise invalid_argument("Cannot convert empty tensor map to JSON")
    batch = _batch_size(outputs) if row_form else 0
    writers = {alias: _writer(alias, array, signature.output_dtypes[alias]) for alias, array in outputs.items()}
    if row_form and len(outputs) > 1:
        return b'{"predictions":[%b]}' % b",".join(_row_blocks(outputs, writers, batch, check))
    key = b"predictions" if row_form else b"outputs"
    texts = {alias: _tensor(array, writers[alias], check) for alias, array in outputs.items()}
    return b'{"%b":%b}' % (key, _object(texts) if len(texts) > 1 else next(iter(texts.values())))


def write_json(value: Any) -> bytes:
    """Returns a value as JSON. Surrogate escapes become the bytes that they stand for."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogateescape")


def numbers(array: Array, check: Check = noop) -> bytes:
    """Returns a tensor of numbers or of booleans as JSON. `check` is called before each block."""
    return _tensor(array, _write_numbers, check)


def plain_numbers(array: Array) -> Any:
    """Returns a tensor of floats as nested lists. Each number is the double that has the fewest digits of the float."""
    flat = np.ascontiguousarray(array).ravel()
    values = orjson.loads(orjson.dumps(flat, option=orjson.OPT_SERIALIZE_NUMPY))
    for index in np.flatnonzero(~np.isfinite(flat)).tolist():  # orjson writes null for these
        values[index] = float(flat[index])
    nested = np.empty(len(values), object)
    nested[:] = values
    return nested.reshape(array.shape).tolist()


def _batch_size(outputs: Mapping[str, Array]) -> int:
    batch = -1
    for alias, array in outputs.items():
        if array.ndim == 0:
            raise invalid_argument(f"Tensor name: {alias} has no shape information ")
        if batch >= 0 and array.shape[0] != batch:
            sizes = f"{array.shape[0]} expecting: {batch}"
            raise invalid_argument(f"Tensor name: {alias} has inconsistent batch size: {sizes}")
        batch = array.shape[0]
    return batch


def _writer(alias: str, array: Array, dtype: str) -> Write:
    """Returns what writes a block of an output, whose alias decides whether strings are base64."""
    if dtype in _NUMBERS:
        return _write_numbers
    if dtype == "string":
        return _write_base64 if alias.endswith("_bytes") else _write_strings
    if array.size:
        raise invalid_argument(f"Failed to write JSON value for tensor type: {dtype}")
    return _write_strings


def _write_numbers(array: Array) -> bytes:
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return write_json(plain_numbers(array))
    return orjson.dumps(np.ascontiguousarray(array) if array.ndim else array[()], option=orjson.OPT_SERIALIZE_NUMPY)


def _write_strings(array: Array) -> bytes:
    return write_json(_mapped(array, lambda value: value.decode("utf-8", "surrogateescape")))


def _write_base64(array: Array) -> bytes:
    return write_json(_mapped(array, lambda value: {"b64": base64.b64encode(value).decode("ascii")}))


def _mapped(array: Array, change: Callable[[bytes], Any]) -> Any:
    """Returns the strings of a tensor, changed, as nested lists."""
    found = np.empty(array.size, object)
    found[:] = [change(value) for value in array.ravel().tolist()]
    return found.reshape(array.shape).tolist()


def _tensor(array: Array, write: Write, check: Check) -> bytes:
    """Returns a tensor, written block by block."""
    if array.size <= _BLOCK_ELEMENTS:
        return write(array)
    step = _rows_of_block(len(array), array.size)
    parts = []
    for start in range(0, len(array), step):
        check()
        block = array[start : start + step]
        parts.append(_tensor(array[start], write, check) if block.size > _BLOCK_ELEMENTS else write(block)[1:-1])
    return b"[%b]" % b",".join(parts)


def _rows_of_block(rows: int, elements: int) -> int:
    return max(1, rows * _BLOCK_ELEMENTS // max(1, elements))


def _row_blocks(
    outputs: Mapping[str, Array], writers: Mapping[str, Write], batch: int, check: Check
) -> Iterable[bytes]:
    """Yields objects of rows, joined by commas."""
    step = _rows_of_block(batch, sum([array.size for array in outputs.values()]))
    for start in range(0, batch, step):
        check()
        block = {alias: array[start : start + step] for alias, array in outputs.items()}
        if (
            all(_is_plain(array) for array in block.values())
            and sum([a.size for a in block.values()]) <= _BLOCK_ELEMENTS
        ):
            rows = zip(*[_elements(array) for array in block.values()], strict=True)
            objects = [dict(zip(block, row, strict=True)) for row in rows]
            yield orjson.dumps(objects, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
            continue
        for row in range(len(next(iter(block.values())))):
            # `...` keeps an array of rank 0 an array
            yield _object({alias: _tensor(array[row, ...], writers[alias], check) for alias, array in block.items()})


def _is_plain(array: Array) -> bool:
    """Returns True if orjson writes the values of the array as they are."""
    return array.dtype.kind in "iub" or (array.dtype.kind == "f" and bool(np.isfinite(array).all()))


def _elements(array: Array) -> list[Any]:
    """Returns the rows of an array. A float32 stays one, because as a double it would have more digits."""
    return list(np.ascontiguousarray(array)) if array.ndim > 1 or array.dtype == np.float32 else array.tolist()


def _object(texts: Mapping[str, bytes]) -> bytes:
    return b"{%b}" % b",".join([write_json(key) + b":" + text for key, text in texts.items()])
