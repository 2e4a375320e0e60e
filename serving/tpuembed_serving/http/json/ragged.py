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
    value, padded = members.get(key), dict[str, list[Any]]()
    if key == "instances" and isinstance(value, list) and all(type(row) is dict for row in value):
        # A JsonObject has a repeated key, which is an error.
        columns = {alias: [row[alias] for row in value] for alias in wanted if all(alias in row for row in value)}
        padded = _padded(columns, wanted, check)
        found: Any = [
            {**row, **{alias: rows[index] for alias, rows in padded.items()}} for index, row in enumerate(value)
        ]
    elif key == "inputs" and isinstance(value, dict):
        padded = _padded({alias: value[alias] for alias in wanted if alias in value}, wanted, check)
        found = {**value, **padded}
    elif len(signature.inputs) == 1:
        padded = _padded(dict.fromkeys(wanted, value), wanted, check)
        (found,) = padded.values() or (None,)
    return document._replace(members={**members, key: found}) if padded else None


def _padded(columns: dict[str, Any], wanted: dict[str, Padding], check: Check) -> dict[str, list[Any]]:
    """Return the ragged ones of `columns`, filled up with what is `wanted`."""
    for alias in columns:
        if f"{alias}{_WEIGHTS}" in columns:
            _check_weights(alias, columns[alias], columns[f"{alias}{_WEIGHTS}"])
    widths = {alias: width for alias, rows in columns.items() if (width := _width(rows, check)) is not None}
    return {
        alias: [row + [wanted[alias]] * (width - len(row)) for row in columns[alias]] for alias, width in widths.items()
    }


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
