"""Converts a predict request in row form ("instances") or columnar form ("inputs") to the inputs of a signature."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from tpuembed_serving.core.noop import noop
from tpuembed_serving.core.pipeline import Check
from tpuembed_serving.core.servable import Array, Columns, Signature, TensorInfo
from tpuembed_serving.core.status import StatusError, invalid_argument
from tpuembed_serving.http.json.debug import debug_string
from tpuembed_serving.http.json.document import Document, format_error, long_integers
from tpuembed_serving.http.json.tensors import dense_shape, fast_tensor, fill, is_base64_object, to_array

__all__ = ["PredictInputs", "decode_inputs", "signature_name"]


_ROWS_BETWEEN_CHECKS: Final = 256


class PredictInputs(NamedTuple):
    """The arrays in the order of the signature's inputs, and the form of the answer."""

    arrays: Sequence[Array]
    row_form: bool


def signature_name(document: Document) -> str:
    """Return the signature that the request names, or "".

    Raises:
        StatusError: the name is not a string.
    """
    name = document.members.get("signature_name", "")
    if not isinstance(name, str):
        text = "not formatted correctly. 'signature_name' key must be a string value."
        raise format_error(document.members, text)
    return name


def decode_inputs(document: Document, signature: Signature, check: Check = noop) -> PredictInputs:
    """Return the signature's inputs from a request. `check` is called now and then.

    Raises:
        StatusError: an input is missing, unknown, ragged, or of another type.
    """
    members = document.members
    if "instances" in members and "inputs" in members:
        text = "Not formatted correctly expecting only one of 'inputs' or 'instances' keys to exist "
        raise format_error(members, text)
    try:
        if "instances" in members:
            return PredictInputs(_decode_rows(document, signature, check), row_form=True)
        if "inputs" in members:
            return PredictInputs(_decode_columns(document, signature, check), row_form=False)
    except StatusError as error:
        if " cannot hold " not in error.message:
            raise
        raise invalid_argument(_with_sent_digits(error.message, document.text)) from None
    raise invalid_argument("Missing 'inputs' or 'instances' key")


def _with_sent_digits(message: str, text: bytes) -> str:
    """Name an integer beyond 64 bits as it was sent: the parser made a double of it."""
    for value, digits in long_integers(text).items():
        message = message.replace(f"cannot hold {value:.1f}.", f"cannot hold {digits}.")
    return message


def _decode_rows(document: Document, signature: Signature, check: Check) -> Sequence[Array]:
    rows = document.members["instances"]
    if not isinstance(rows, list):
        raise format_error(document.members, "Expecting 'instances' to be an list/array")
    if not rows:
        raise format_error(document.members, "No values in 'instances' array")
    if len(signature.inputs) > 1 and not isinstance(rows[0], dict):
        text = "instances is a plain list, but expecting list of objects as multiple input tensors required as per "
        raise invalid_argument(f"{text}tensorinfo_map")
    return _fast_rows(rows, signature) or _RowDecoder(signature.inputs).decode(rows, check)


def _fast_rows(rows: list[Any], signature: Signature) -> Sequence[Array] | None:
    """Decode whole columns at once. Returns None if a row differs in form from the first."""
    inputs = signature.inputs
    if type(rows[0]) is not dict:
        array = fast_tensor(rows, inputs[0])
        return None if array is None else [array]
    arrays = []
    try:
        if set(map(len, rows)) != {len(inputs)} or inputs[0].alias == "b64":
            return None
        matrix = _int64_matrix(rows, signature)
        if matrix is not None:
            return Columns(matrix)
        for info in inputs:
            array = fast_tensor([row[info.alias] for row in rows], info)
            if array is None:
                return None
            arrays.append(array)
    except (KeyError, TypeError):  # another key, or a row that is not an object
        return None
    return arrays


def _int64_matrix(rows: list[Any], signature: Signature) -> Array | None:
    """Return int64 [rows, inputs] in one call if every value is an int64 scalar, as in lookups of ids. Otherwise None."""
    if signature.int64_row is None or type(rows[0].get(signature.inputs[0].alias)) is not int:
        return None
    values = list(map(signature.int64_row, rows))
    if set(map(type, itertools.chain.from_iterable(values))) != {int}:
        return None
    try:
        return np.array(values, np.int64)
    except OverflowError:
        return None


def _is_row_object(value: Any) -> bool:
    return isinstance(value, dict) and not is_base64_object(value)


class _RowDecoder:
    """Decodes element by element in order, so that the first error is the one that TensorFlow Serving reports."""

    def __init__(self, inputs: Sequence[TensorInfo]) -> None:
        self._infos = {info.alias: info for info in inputs}
        self._first_alias = inputs[0].alias
        self._leaves: dict[str, list[Any]] = {info.alias: [] for info in inputs}
        self._shapes: dict[str, list[int]] = {}

    def decode(self, rows: list[Any], check: Check) -> list[Array]:
        """Return one array per input, batch first."""
        add = self._add_object if _is_row_object(rows[0]) else self._add_value
        for index, row in enumerate(rows):
            if index % _ROWS_BETWEEN_CHECKS == 0:
                check()
            add(index, row)
        missing = [alias for alias in self._infos if alias not in self._shapes]
        if missing:
            raise _missing_inputs(list(self._shapes), list(self._infos))
        return [
            to_array(self._leaves[alias], [len(rows), *self._shapes[alias]], info)
            for alias, info in self._infos.items()
        ]

    def _add_object(self, index: int, row: Any) -> None:
        if not _is_row_object(row):
            raise invalid_argument(f"Expecting object but got list at item {index} of input list")
        for alias, value in row.items():
            self._add(value, alias, f"{index} key: {alias}")
        if len(row) != len(self._infos):
            names = f"{debug_string(row)} keys must be equal to: {','.join(self._infos)}"
            raise invalid_argument(f"Failed to process element: {index} of 'instances' list. JSON object: {names}")

    def _add_value(self, index: int, row: Any) -> None:
        if _is_row_object(row):
            raise invalid_argument(f"Expecting value/list but got object at item {index} of input list")
        self._add(row, self._first_alias, f"{index}")

    def _add(self, value: Any, alias: str, where: str) -> None:
        try:
            self._add_instance(value, alias)
        except StatusError as error:
            text = f"Failed to process element: {where} of 'instances' list. Error: {error.to_string()}"
            raise invalid_argument(text) from None

    def _add_instance(self, value: Any, alias: str) -> None:
        info = self._infos.get(alias)
        if info is None:
            raise invalid_argument(f"JSON object: does not have named input: {alias}")
        shape, leaves = dense_shape(value), list[Any]()
        fill(value, shape, info, leaves)
        expected = self._shapes.setdefault(alias, shape)
        if shape != expected:
            raise _shape_error(expected, shape)
        self._leaves[alias] += leaves


def _shape_error(expected: list[int], shape: list[int]) -> StatusError:
    sizes = _size(expected), _size(shape)
    if sizes[0] != sizes[1]:
        return invalid_argument(f"Expecting tensor size: {sizes[0]} but got: {sizes[1]}")
    return invalid_argument(f"Expecting shape {_shape_text(expected)} but got: {_shape_text(shape)}")


def _size(shape: list[int]) -> int:
    size = 1
    for dim in shape:
        size *= dim
    return size


def _shape_text(shape: list[int]) -> str:
    return f"[{','.join(map(str, shape))}]"


def _missing_inputs(sent: list[str], wanted: list[str]) -> StatusError:
    """Return the error of TensorFlow Serving's predict (predict_util.cc) if a value was given for one of several inputs."""
    missing = ",".join(alias for alias in wanted if alias not in sent)
    return invalid_argument(
        f"input size does not match signature: {len(sent)}!={len(wanted)} len({{{','.join(sent)}}}) != "
        f"len({{{','.join(wanted)}}}). Sent extra: {{}}. Missing but required: {{{missing}}}."
    )


def _decode_columns(document: Document, signature: Signature, check: Check) -> list[Array]:
    value, inputs = document.members["inputs"], signature.inputs
    if isinstance(value, dict) and not is_base64_object(value):
        return [_column(_named(value, info.alias), info, check) for info in inputs]
    if len(inputs) > 1:
        text = "inputs is a plain value/list, but expecting an object as multiple input tensors required as per "
        raise invalid_argument(f"{text}tensorinfo_map")
    return [_column(value, inputs[0], check)]


def _named(value: Mapping[str, Any], alias: str) -> Any:
    if alias not in value:
        raise invalid_argument(f"Missing named input: {alias} in 'inputs' object.")
    return value[alias]


def _column(value: Any, info: TensorInfo, check: Check) -> Array:
    array = fast_tensor(value, info)
    if array is not None:
        return array
    shape, leaves = dense_shape(value), list[Any]()
    fill(value, shape, info, leaves, check=check)
    return to_array(leaves, shape, info)
