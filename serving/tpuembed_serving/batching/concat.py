"""Requests' arrays put together row behind row, and a run's outputs taken apart again. Arrays in, arrays out.

What is done where TensorFlow Serving batches is done as there (tensorflow_serving/batching/batching_session.cc): a batch is
filled up with copies of the first row of its last request, and a tensor is widened with its own first element.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from tpuembed_serving.core.servable import Array, Columns

__all__ = ["Merged", "count_rows", "merge", "split", "take", "trailing_shapes"]


def count_rows(inputs: Sequence[Array]) -> int | None:
    """The size of the first dimension; None where an input has none, or another one, or where there is no input."""
    if type(inputs) is Columns:
        return len(inputs.matrix)
    sizes = [array.shape[:1] for array in inputs]
    first = sizes[0] if sizes else ()
    return first[0] if first and sizes.count(first) == len(sizes) else None


def trailing_shapes(inputs: Sequence[Array], padded: Sequence[bool]) -> tuple[Any, ...]:
    """What must be equal for inputs to be merged: all sizes but the first; of those that are padded, their number alone."""
    if not any(padded):
        return tuple([array.shape[1:] for array in inputs])
    return tuple([array.ndim if pad else array.shape[1:] for array, pad in zip(inputs, padded, strict=True)])


@dataclasses.dataclass(frozen=True)
class Merged:
    """Inputs of one run.

    Attributes:
        inputs: in the signature's order.
        stops: where the rows of each request end.
        rows: of the run; more than the last of `stops` where it was filled up.
        block: int64 [inputs, rows], the same inputs, where all are int64 of rank 1.
    """

    inputs: Sequence[Array]
    stops: Sequence[int]
    rows: int
    block: Array | None = None


def merge(
    requests: Sequence[Sequence[Array]], padding: Sequence[int | None], widen: bool, allowed: Sequence[int]
) -> Merged:
    """The inputs of several requests, or of one, in one.

    Args:
        requests: inputs of each, in the signature's order, that `trailing_shapes` found equal.
        padding: by input, what may stand behind its values; see `Merging.padding`.
        widen: whether inputs of different widths that have no padding are widened by their own first element.
        allowed: sizes that the run may have; any, where it is empty.
    """
    stops = list(itertools.accumulate([_rows_of(inputs) for inputs in requests]))
    rows = next((size for size in allowed if size >= stops[-1]), stops[-1])
    if rows > stops[-1] and len(requests[-1][0]):
        first = [array[:1] for array in requests[-1]]
        requests = [*requests, *[first] * (rows - stops[-1])]
    else:
        rows = stops[-1]
    if all(type(inputs) is Columns for inputs in requests):
        matrix = np.concatenate([inputs.matrix for inputs in cast("Sequence[Columns]", requests)])
        block = np.ascontiguousarray(matrix.T)
        return Merged(list(block), stops, rows, block)
    columns = list(zip(*requests, strict=True))
    if all(parts[0].dtype == np.int64 and parts[0].ndim == 1 for parts in columns):
        # One call instead of one for each input: with few rows it costs as much for all of them as for one.
        block = np.concatenate([part for parts in columns for part in parts]).reshape(len(columns), rows)
        return Merged(list(block), stops, rows, block)
    pads = padding or [None] * len(columns)
    return Merged([_join(parts, pad, widen) for parts, pad in zip(columns, pads, strict=True)], stops, rows)


def _rows_of(inputs: Sequence[Array]) -> int:
    return len(inputs.matrix if type(inputs) is Columns else inputs[0])


def _join(parts: Sequence[Array], padding: int | None, widen: bool) -> Array:
    if padding is None and not widen:
        return np.concatenate(parts)
    sizes = {part.shape[1:] for part in parts}
    if len(sizes) == 1:
        return np.concatenate(parts)
    widest = [max(axis) for axis in zip(*sizes, strict=True)]
    return np.concatenate([_widened(part, widest, padding) for part in parts])


def _widened(part: Array, widest: Sequence[int], padding: int | None) -> Array:
    missing = [(0, most - size) for size, most in zip(part.shape[1:], widest, strict=True)]
    if not any(more for _, more in missing):
        return part
    wide = np.empty((len(part), *widest), part.dtype)
    wide[...] = padding if padding is not None else part.flat[0] if part.size else np.zeros((), part.dtype)
    wide[tuple(slice(size) for size in part.shape)] = part
    return wide


def take(inputs: Sequence[Array], start: int, stop: int) -> list[Array]:
    """These rows of each."""
    return [array[start:stop] for array in inputs]


def split(outputs: Sequence[Array], merged: Merged) -> list[list[Array]] | None:
    """The outputs of each request; None where an output's rows are not those of the inputs."""
    if any(array.ndim == 0 or array.shape[0] != merged.rows for array in outputs):
        return None
    starts = [0, *merged.stops]
    return [take(outputs, start, stop) for start, stop in zip(starts, merged.stops, strict=False)]
