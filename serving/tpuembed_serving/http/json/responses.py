"""Writes tensors as JSON, byte for byte as TensorFlow Serving (json_tensor.cc with RapidJSON's PrettyWriter).

Row form writes arrays inside a row on one line. Columnar form writes one line per value.
"""

import base64
import functools
import math
from collections.abc import Mapping

import numpy as np

from tpuembed_serving.core.noop import noop
from tpuembed_serving.core.pipeline import Check
from tpuembed_serving.core.servable import Array, Signature
from tpuembed_serving.core.status import invalid_argument
from tpuembed_serving.http.json.debug import quote
from tpuembed_serving.http.json.floats import float_tokens

__all__ = ["encode_error", "encode_outputs"]

_BLOCK_ELEMENTS = 16 * 2**10
_INTEGERS = frozenset({"int8", "int16", "int32", "int64", "uint8", "uint32", "uint64"})


def encode_error(message: str) -> bytes:
    """Return the body of an error."""
    return _to_bytes(f'{{\n    "error": {quote(message)}\n}}')


def encode_outputs(outputs: Mapping[str, Array], signature: Signature, row_form: bool, check: Check = noop) -> bytes:
    """Return the body of a predict answer: `outputs` by alias, in row form or columnar form.

    Large outputs are written in blocks of rows, and `check` is called before each.

    Raises:
        StatusError: an output has no JSON form, or in row form another batch dimension than the others.
    """
    if not outputs:
        raise invalid_argument("Cannot convert empty tensor map to JSON")
    write = _rows if row_form else _columns
    return write(outputs, signature.output_dtypes, check)


def _to_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _blocks(rows: int, elements: int) -> list[slice]:
    """Return slices that cover `rows` rows of so many elements in all."""
    step = max(1, rows * _BLOCK_ELEMENTS // max(1, elements))
    return [slice(start, start + step) for start in range(0, rows, step)]


def _rows(outputs: Mapping[str, Array], dtypes: Mapping[str, str], check: Check) -> bytes:
    batch = _batch_size(outputs)
    if batch == 0:
        return b'{\n    "predictions": []\n}'
    elements = sum([array.size for array in outputs.values()])
    if elements <= _BLOCK_ELEMENTS:
        return _to_bytes(f'{{\n    "predictions": [{_row_block(outputs, dtypes)}\n    ]\n}}')
    texts = [b'{\n    "predictions": [']
    for block in _blocks(batch, elements):
        check()
        if block.start:
            texts.append(b"," if len(outputs) > 1 else b", ")
        part = {alias: array[block] for alias, array in outputs.items()}
        if elements > batch * _BLOCK_ELEMENTS:
            _add_long_row(texts, {alias: array[0, ...] for alias, array in part.items()}, dtypes, check)
        else:
            texts.append(_to_bytes(_row_block(part, dtypes)))
    texts.append(b"\n    ]\n}")
    return b"".join(texts)  # releases Python's lock, unlike formatting


def _add_long_row(texts: list[bytes], row: Mapping[str, Array], dtypes: Mapping[str, str], check: Check) -> None:
    """Append the texts of one row with many elements."""
    named = len(row) > 1
    for index, (alias, array) in enumerate(row.items()):
        if named:
            texts.append(_to_bytes(("," if index else "\n        {") + f"\n            {quote(alias)}: "))
        _add_row_value(texts, alias, array, dtypes[alias], 2 + named + array.ndim, check)
    if named:
        texts.append(b"\n        }")


def _add_row_value(texts: list[bytes], alias: str, array: Array, dtype: str, containers: int, check: Check) -> None:
    """Append the texts of a tensor, with its lists on one line."""
    if array.size <= _BLOCK_ELEMENTS:
        texts.append(_to_bytes(_row_values(alias, array[np.newaxis], dtype, containers)[0]))
        return
    texts.append(b"[")
    for block in _blocks(len(array), array.size):
        check()
        if block.start:
            texts.append(b", ")
        if array.size > len(array) * _BLOCK_ELEMENTS:
            _add_row_value(texts, alias, array[block.start], dtype, containers, check)
        else:
            texts.append(_to_bytes(", ".join(_row_values(alias, array[block], dtype, containers))))
    texts.append(b"]")


def _row_block(outputs: Mapping[str, Array], dtypes: Mapping[str, str]) -> str:
    named = len(outputs) > 1
    columns = {
        alias: _row_values(alias, array, dtypes[alias], 1 + named + array.ndim) for alias, array in outputs.items()
    }
    if not named:
        (values,) = columns.values()
        return ", ".join(values)
    form = _row_form(tuple(columns))
    return ",".join([form % row for row in zip(*columns.values(), strict=True)])


@functools.lru_cache(maxsize=1024)
def _row_form(aliases: tuple[str, ...]) -> str:
    """Return a printf-style form of a row, which takes the text of each output."""
    values = ["\n            " + quote(alias).replace("%", "%%") + ": %s" for alias in aliases]
    return "\n        {" + ",".join(values) + "\n        }"


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


def _row_values(alias: str, array: Array, dtype: str, containers: int) -> list[str]:
    """Return one text per row, with its lists on one line. Each element is inside `containers` containers."""
    texts = _tokens(alias, array, dtype, containers)
    if array.shape[1:] == (1,):
        return [f"[{text}]" for text in texts]
    for axis in range(array.ndim - 1, 0, -1):
        texts = [f"[{', '.join(part)}]" for part in _split(texts, array.shape, axis)]
    return texts


def _columns(outputs: Mapping[str, Array], dtypes: Mapping[str, str], check: Check) -> bytes:
    named = len(outputs) > 1
    texts = [b'{\n    "outputs": ' + b"{" * named]
    for index, (alias, array) in enumerate(outputs.items()):
        if named:
            texts.append(_to_bytes(f"{',' * bool(index)}\n        {quote(alias)}: "))
        _add_column(texts, alias, array, dtypes[alias], 1 + named, check)
    texts.append(b"\n    }" * named + b"\n}")
    return b"".join(texts)


def _add_column(texts: list[bytes], alias: str, array: Array, dtype: str, containers: int, check: Check) -> None:
    """Append the texts of a tensor inside `containers` containers, with one line per value and bracket."""
    if array.ndim == 0:
        texts.append(_to_bytes(_tokens(alias, array, dtype, containers)[0]))
        return
    if not len(array):
        texts.append(b"[]")
        return
    outer = "\n" + "    " * containers
    inner = outer + "    "
    texts.append(_to_bytes(f"[{inner}"))
    for block in _blocks(len(array), array.size):
        if block.start:
            check()
            texts.append(_to_bytes(f",{inner}"))
        if array.size > len(array) * _BLOCK_ELEMENTS:
            _add_column(texts, alias, array[block.start], dtype, containers + 1, check)
        else:
            texts.append(_to_bytes(f",{inner}".join(_column_values(alias, array[block], dtype, containers))))
    texts.append(_to_bytes(f"{outer}]"))


def _column_values(alias: str, array: Array, dtype: str, containers: int) -> list[str]:
    """Return one text per row of a tensor, with one line per value and bracket."""
    texts = _tokens(alias, array, dtype, containers + array.ndim)
    for axis in range(array.ndim - 1, 0, -1):
        outer = "\n" + "    " * (containers + axis)
        inner = outer + "    "
        parts = _split(texts, array.shape, axis)
        texts = [f"[{inner}{f',{inner}'.join(part)}{outer}]" if part else "[]" for part in parts]
    return texts


def _split(texts: list[str], shape: tuple[int, ...], axis: int) -> list[list[str]]:
    """Return the texts of each list at depth `axis` of a tensor, in order."""
    size, lists = shape[axis], math.prod(shape[:axis])
    return [texts] if lists == 1 else [texts[start * size : (start + 1) * size] for start in range(lists)]


def _tokens(alias: str, array: Array, dtype: str, containers: int) -> list[str]:
    """Return one JSON token per element, in order. Each is inside `containers` containers."""
    if array.size == 0:
        return []
    if dtype in ("float", "double"):
        return float_tokens(array)
    if dtype in _INTEGERS:
        return list(map(str, array.ravel().tolist()))
    if dtype == "bool":
        return ["true" if value else "false" for value in array.ravel().tolist()]
    if dtype == "string":
        encode = _base64_object if alias.endswith("_bytes") else _string
        return [encode(value, containers) for value in array.ravel().tolist()]
    raise invalid_argument(f"Failed to write JSON value for tensor type: {dtype}")


def _string(value: bytes, _: int) -> str:
    return quote(value.decode("utf-8", "surrogateescape"))


def _base64_object(value: bytes, containers: int) -> str:
    indent = "\n" + "    " * containers
    return f'{{{indent}    "b64": "{base64.b64encode(value).decode("ascii")}"{indent}}}'
