"""Pads lists of ids of different lengths, which TensorFlow Serving's JSON refuses.

Only inputs that the manifest of an export declares as lists are padded, and only in requests that are otherwise errors.
So a rectangular request never changes its meaning.
"""

from typing import Any

from tpuembed_serving.core.servable import Signature
from tpuembed_serving.core.status import invalid_argument
from tpuembed_serving.http.json.document import Document
from tpuembed_serving.http.json.tensors import is_base64_object

__all__ = ["pad_ragged"]

_WEIGHTS = "_weights"

Padding = int | float | str


def pad_ragged(document: Document, signature: Signature) -> Document | None:
    """Return a request that `decode_inputs` refused with its lists padded, or None if no list can be padded.

    Raises:
        StatusError: INVALID_ARGUMENT, a row has another number of weights than ids.
    """
    pairs = zip(signature.inputs, signature.padding, strict=False)
    wanted = {info.alias: value for info, value in pairs if value is not None}
    members = document.members
    key = "instances" if "instances" in members else "inputs"
    if not wanted or (key == "instances" and "inputs" in members):
        return None
    given = members.get(key)
    pad = _pad_rows if key == "instances" else _pad_columns
    found = pad(given, signature, wanted)
    return None if found is None else Document({**members, key: found})


def _pad_rows(rows: Any, signature: Signature, wanted: dict[str, Padding]) -> Any:
    if not isinstance(rows, list):
        return None
    if len(signature.inputs) == 1 and not any(isinstance(row, dict) for row in rows):
        return _pad(rows, wanted[signature.inputs[0].alias])
    if not all(type(row) is dict for row in rows):  # a JsonObject has a repeated key, which is an error
        return None
    columns = {alias: [row[alias] for row in rows] for alias in wanted if all(alias in row for row in rows)}
    padded = _pad_all(columns, wanted)
    if not padded:
        return None
    return [{**row, **{alias: values[index] for alias, values in padded.items()}} for index, row in enumerate(rows)]


def _pad_columns(value: Any, signature: Signature, wanted: dict[str, Padding]) -> Any:
    if not isinstance(value, dict):
        return _pad(value, wanted[signature.inputs[0].alias]) if len(signature.inputs) == 1 else None
    padded = _pad_all({alias: value[alias] for alias in wanted if alias in value}, wanted)
    return {**value, **padded} if padded else None


def _pad_all(columns: dict[str, Any], wanted: dict[str, Padding]) -> dict[str, list[list[Any]]]:
    """Return the ragged ones of `columns`, padded."""
    for alias in columns:
        if f"{alias}{_WEIGHTS}" in columns:
            _check_weights(alias, columns[alias], columns[f"{alias}{_WEIGHTS}"])
    padded = {alias: _pad(rows, wanted[alias]) for alias, rows in columns.items()}
    return {alias: rows for alias, rows in padded.items() if rows is not None}


def _pad(rows: Any, value: Padding) -> list[list[Any]] | None:
    """Return `rows` padded with `value`, or None if they are not lists of values or have one length."""
    if not _is_list_of_lists(rows):
        return None
    widest = max(map(len, rows))
    if min(map(len, rows)) == widest:
        return None
    return [row + [value] * (widest - len(row)) for row in rows]


def _is_list_of_lists(rows: Any) -> bool:
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) for row in rows):
        return False
    return not any(isinstance(value, list | dict) and not is_base64_object(value) for row in rows for value in row)


def _check_weights(alias: str, ids: Any, weights: Any) -> None:
    """Raise INVALID_ARGUMENT if a row lacks weights: padding must not hide it."""
    if not (_is_list_of_lists(ids) and _is_list_of_lists(weights)):
        return
    for index, (row, row_weights) in enumerate(zip(ids, weights, strict=False)):
        if len(row) != len(row_weights):
            sizes = f"{len(row)} values of {alias} and {len(row_weights)} of {alias}{_WEIGHTS}"
            raise invalid_argument(f"Row {index} has {sizes}. Give each value a weight")
