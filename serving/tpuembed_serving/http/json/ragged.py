"""Pads lists of ids of different lengths, which TensorFlow Serving's JSON refuses.

Only inputs that the manifest of an export declares as lists are padded, and only in requests that are otherwise errors.
So a rectangular request never changes its meaning.
"""

from typing import Any, Final

from tpuembed_serving.core.noop import noop
from tpuembed_serving.core.pipeline import Check
from tpuembed_serving.core.servable import Signature
from tpuembed_serving.core.status import TooLargeError, invalid_argument
from tpuembed_serving.http.json.document import Document
from tpuembed_serving.http.json.tensors import is_base64_object

__all__ = ["pad_ragged"]

_WEIGHTS = "_weights"
_MAX_PADDED: Final = 8 * 2**20
_MAX_TIMES: Final = 8
"""Padded lists may have `_MAX_PADDED` values, or this many times the values that were sent. One long list widens all rows."""

Padding = int | float | str


def pad_ragged(document: Document, signature: Signature, check: Check = noop) -> Document | None:
    """Return a request that `decode_inputs` refused with its lists padded, or None if no list can be padded.

    `check` is called before slow work.

    Raises:
        StatusError: INVALID_ARGUMENT, a row has another number of weights than ids; RESOURCE_EXHAUSTED, the padded lists
            are too large.
    """
    pairs = zip(signature.inputs, signature.padding, strict=False)
    wanted = {info.alias: value for info, value in pairs if value is not None}
    members = document.members
    key = "instances" if "instances" in members else "inputs"
    if not wanted or (key == "instances" and "inputs" in members):
        return None
    pad = _pad_rows if key == "instances" else _pad_columns
    found = pad(members.get(key), signature, wanted, check)
    return None if found is None else document._replace(members={**members, key: found})


def _pad_rows(rows: Any, signature: Signature, wanted: dict[str, Padding], check: Check) -> Any:
    if not isinstance(rows, list):
        return None
    if len(signature.inputs) == 1 and not any(isinstance(row, dict) for row in rows):
        return _pad(rows, wanted[signature.inputs[0].alias], check)
    if not all(type(row) is dict for row in rows):  # a JsonObject has a repeated key, which is an error
        return None
    columns = {alias: [row[alias] for row in rows] for alias in wanted if all(alias in row for row in rows)}
    widths = _widths(columns, check)
    pads = [(alias, width, [wanted[alias]]) for alias, width in widths.items()]
    if not pads:
        return None
    return [
        {**row, **{alias: row[alias] + pad * (width - len(row[alias])) for alias, width, pad in pads}} for row in rows
    ]


def _pad_columns(value: Any, signature: Signature, wanted: dict[str, Padding], check: Check) -> Any:
    if not isinstance(value, dict):
        return _pad(value, wanted[signature.inputs[0].alias], check) if len(signature.inputs) == 1 else None
    columns = {alias: value[alias] for alias in wanted if alias in value}
    widths = _widths(columns, check)
    padded = {alias: _filled(columns[alias], wanted[alias], width) for alias, width in widths.items()}
    return {**value, **padded} if padded else None


def _pad(rows: Any, value: Padding, check: Check) -> list[Any] | None:
    """Return `rows` padded with `value`, or None if they are not lists of values or have one length."""
    width = _width(rows, check)
    return None if width is None else _filled(rows, value, width)


def _filled(rows: list[list[Any]], value: Padding, width: int) -> list[Any]:
    return [row + [value] * (width - len(row)) for row in rows]


def _widths(columns: dict[str, Any], check: Check) -> dict[str, int]:
    """Return the longest length of the ragged ones of `columns`."""
    for alias in columns:
        if f"{alias}{_WEIGHTS}" in columns:
            _check_weights(alias, columns[alias], columns[f"{alias}{_WEIGHTS}"])
    widths = {alias: _width(rows, check) for alias, rows in columns.items()}
    return {alias: width for alias, width in widths.items() if width is not None}


def _width(rows: Any, check: Check) -> int | None:
    """Return the longest length of `rows`, or None if they are not lists of values or have one length."""
    if not _is_list_of_lists(rows):
        return None
    sizes = list(map(len, rows))
    widest = max(sizes)
    if min(sizes) == widest:
        return None
    size = widest * len(sizes)
    if size > _MAX_PADDED and size > _MAX_TIMES * sum(sizes):
        raise TooLargeError(
            f"lists of different lengths are padded to the longest, which makes {len(sizes)} rows of {widest} values. The limit "
            f"is {_MAX_PADDED} values. Send long lists in requests of their own"
        )
    check(size)
    return widest


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
