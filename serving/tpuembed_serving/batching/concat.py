"""Concatenates the inputs of requests by rows, and splits the outputs of a batch again.

It fills up batches as TensorFlow Serving does (tensorflow_serving/batching/batching_session.cc): with copies of the first
row of the last request. A tensor is widened with its own first element.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Final, cast

import numpy as np

from tpuembed_serving.core.servable import Array, Columns

__all__ = ["Merged", "count_rows", "merge", "split", "take", "trailing_shapes"]

_NARROW: Final = 63
"""Smaller sizes are not told apart: rows of such lists are small in any batch."""


def count_rows(inputs: Sequence[Array]) -> int | None:
    """Return the size of the first dimension. None if it differs, if an input has none, or if there is no input."""
    if type(inputs) is Columns:
        return len(inputs.matrix)
    sizes = [array.shape[:1] for array in inputs]
    first = sizes[0] if sizes else ()
    return first[0] if first and sizes.count(first) == len(sizes) else None


def trailing_shapes(inputs: Sequence[Array], padded: Sequence[bool]) -> tuple[Any, ...]:
    """Return a key that is equal for inputs that can be merged: all sizes but the first, or the magnitudes of padded ones.

    All rows of a batch become as wide as its widest row. So one long list must not widen the rows of other requests much.
    """
    if not any(padded):
        return tuple([array.shape[1:] for array in inputs])
    pairs = zip(inputs, padded, strict=True)
    return tuple([_magnitudes(array.shape[1:]) if pad else array.shape[1:] for array, pad in pairs])


def _magnitudes(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple([max(_NARROW, size).bit_length() for size in sizes])


@dataclasses.dataclass(frozen=True)
class Merged:
    """The inputs of one batch.

    Attributes:
        inputs: in the signature's order.
        stops: where the rows of each request end.
        rows: the rows of the batch; more than the last of `stops` if it was filled up.
    """

    inputs: Sequence[Array]
    stops: Sequence[int]
    rows: int


def merge(
    requests: Sequence[Sequence[Array]], padding: Sequence[float | str | None], widen: bool, allowed: Sequence[int]
) -> Merged:
    """Merge the inputs of one or more requests into one batch.

    Args:
        requests: the inputs of each, in the signature's order, with equal `trailing_shapes`.
        padding: by input, the value that may follow its values; see `Merging.padding`.
        widen: whether inputs without padding are widened with their own first element.
        allowed: the sizes that the batch may have; empty for any size.
    """
    sizes = [len(inputs.matrix if type(inputs) is Columns else inputs[0]) for inputs in requests]
    stops = list(itertools.accumulate(sizes))
    rows = next((size for size in allowed if size >= stops[-1]), stops[-1])
    if rows > stops[-1] and len(requests[-1][0]):
        first = [array[:1] for array in requests[-1]]
        requests = [*requests, *[first] * (rows - stops[-1])]
    else:
        rows = stops[-1]
    if all(type(inputs) is Columns for inputs in requests):
        matrix = np.concatenate([inputs.matrix for inputs in cast("Sequence[Columns]", requests)])
        return Merged(list(np.ascontiguousarray(matrix.T)), stops, rows)
    columns = list(zip(*requests, strict=True))
    if all(parts[0].dtype == np.int64 and parts[0].ndim == 1 for parts in columns):
        # One call instead of one per input: with few rows, one call for all costs as much as a call for one.
        block = np.concatenate([part for parts in columns for part in parts]).reshape(len(columns), rows)
        return Merged(list(block), stops, rows)
    pads = padding or [None] * len(columns)
    return Merged([_join(parts, pad, widen) for parts, pad in zip(columns, pads, strict=True)], stops, rows)


def _join(parts: Sequence[Array], padding: float | str | None, widen: bool) -> Array:
    if padding is None and not widen:
        return np.concatenate(parts)
    sizes = {part.shape[1:] for part in parts}
    if len(sizes) == 1:
        return np.concatenate(parts)
    widest = [max(axis) for axis in zip(*sizes, strict=True)]
    return np.concatenate([_widened(part, widest, padding) for part in parts])


def _widened(part: Array, widest: Sequence[int], padding: float | str | None) -> Array:
    missing = [(0, most - size) for size, most in zip(part.shape[1:], widest, strict=True)]
    if not any(more for _, more in missing):
        return part
    wide = np.empty((len(part), *widest), part.dtype)
    wide[...] = padding if padding is not None else part.flat[0] if part.size else np.zeros((), part.dtype)
    wide[tuple(slice(size) for size in part.shape)] = part
    return wide


def take(inputs: Sequence[Array], start: int, stop: int) -> list[Array]:
    """Return these rows of each input."""
    return [array[start:stop] for array in inputs]


def split(outputs: Sequence[Array], merged: Merged) -> list[list[Array]] | None:
    """Return the outputs of each request, or None if an output has another number of rows than the inputs."""
    if any(array.ndim == 0 or array.shape[0] != merged.rows for array in outputs):
        return None
    starts = [0, *merged.stops]
    return [take(outputs, start, stop) for start, stop in zip(starts, merged.stops, strict=False)]
