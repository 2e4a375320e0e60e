"""Finds ids outside their tables before a run, by the manifest of an export.

New items arrive before the table that has them, so such requests are ordinary traffic. A run that fails inside a function of
a graph leaves about 0.8 KB in TensorFlow for ever, for each level of functions (measured with TensorFlow 2.19). So the graph's
own check is the second one: it has the ids that the manifest does not describe, such as those in a serialized tf.train.Example.
"""

import dataclasses
import itertools
from collections.abc import Hashable, Sequence
from typing import Final

import numpy as np

from tpuembed.errors.ids import Span, outside_message
from tpuembed.manifest import ActivationEntry, FeatureEntry, Manifest, Packing
from tpuembed.native.lookup import group_of
from tpuembed_serving.core.servable import Array, Columns
from tpuembed_serving.core.status import StatusError, invalid_argument

__all__ = ["KnownIds", "known_ids"]

_PADDING: Final = -1
_LEAST: Final = int(np.iinfo(np.int64).min)
_MOST: Final = int(np.iinfo(np.int64).max)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _CheckedIds:
    """The ids of one feature.

    Attributes:
        feature: its name in messages.
        span: the ids of its table.
        dropped: all ids from here up to -1 are no rows, and are accepted: padding. 0 if there are none.
        place: the index of the input that has the ids.
        length: so many columns are looked up; None for all.
        group: the graph checks features of one group together, row by row.
    """

    feature: str
    span: Span
    dropped: int
    place: int
    length: int | None
    group: Hashable

    def of(self, arrays: Sequence[Array]) -> Array:
        """Return the ids as int64, which are looked up. Empty if the input has another type: the graph reports that."""
        ids = arrays[self.place]
        if ids.dtype == np.int64 and self.length is None:
            return ids
        if ids.dtype.kind not in "iu":
            return np.empty(0, np.int64)
        if ids.dtype == np.uint64:  # larger ones would become negative
            ids = np.minimum(ids, np.uint64(_MOST))
        ids = ids.astype(np.int64, copy=False)
        return ids[:, : self.length] if self.length is not None and ids.ndim > 1 else ids

    def outside(self, ids: Array) -> Array:
        """Return which of `ids` are outside the table."""
        return ((ids < 0) | (ids >= self.span.rows)) & ~((self.dropped <= ids) & (ids < 0))


class KnownIds:
    """The ids that a signature accepts. Several threads may use it."""

    def __init__(self, features: Sequence[_CheckedIds], packing: Packing | None = None) -> None:
        """Check these features. With `packing`, the only input is a matrix of all of them."""
        self._features, self._packing = features, packing
        self._places = [one.place for one in features]
        self._lowest = np.array([one.dropped for one in features], np.int64)
        self._counts = (np.array([one.span.rows for one in features], np.int64) - self._lowest).view(np.uint64)

    def may_be_outside(self, inputs: Sequence[Array]) -> bool:
        """Return False if no id is outside. Takes the inputs of one or several requests, and compares all ids at once.

        As unsigned numbers, ids below the lowest are large, so one comparison checks both ends.
        """
        if not self._features:
            return False
        if type(inputs) is Columns and self._packing is None:
            moved = inputs.matrix[:, self._places] - self._lowest
            return bool((moved.view(np.uint64) >= self._counts).any())
        ids = self._ids(inputs)
        sizes = [array.size for array in ids]
        moved = np.concatenate(ids, axis=None)
        if sizes.count(sizes[0]) == len(sizes):  # as of one id for each row
            moved = moved.reshape(len(sizes), sizes[0]) - self._lowest[:, None]
            return bool((moved.view(np.uint64) >= self._counts[:, None]).any())
        moved -= np.repeat(self._lowest, sizes)
        return bool((moved.view(np.uint64) >= np.repeat(self._counts, sizes)).any())

    def error(self, inputs: Sequence[Array]) -> StatusError | None:
        """Return the graph's error for the inputs of one request, INVALID_ARGUMENT. None if no id is outside.

        Of several ids outside, it names the one of the first row in the group that the graph checks first.
        """
        if not self.may_be_outside(inputs):
            return None
        pairs = zip(self._features, self._ids(inputs), strict=True)
        for _, group in itertools.groupby(pairs, lambda pair: pair[0].group):
            found = [(one, own[0], ids) for one, ids in group if len(own := np.argwhere(one.outside(ids)))]
            if found:
                one, place, ids_of_one = min(found, key=lambda each: each[1][0])
                number = int(ids_of_one[tuple(place)])
                return invalid_argument(outside_message(one.feature, one.span, number, int(place[0])))
        return None

    def _ids(self, inputs: Sequence[Array]) -> list[Array]:
        arrays = inputs if self._packing is None else _unpacked(inputs[0], self._packing)
        if arrays is None:  # the graph reports that
            return [np.empty(0, np.int64)] * len(self._features)
        return [one.of(arrays) for one in self._features]


def _unpacked(matrix: Array, packing: Packing) -> list[Array] | None:
    """Return the columns of each input of `packed`. None if the matrix has none that fit."""
    lists = sum(one.columns is None for one in packing.inputs)
    rest = (matrix.shape[1] if matrix.ndim == 2 else -1) - sum(one.columns or 0 for one in packing.inputs)
    if rest < 0 or (rest % lists if lists else rest):
        return None
    widths = [rest // lists if one.columns is None else one.columns for one in packing.inputs]
    return np.split(matrix, np.cumsum(widths)[:-1], axis=1)


def known_ids(signature: str, aliases: Sequence[str], manifest: Manifest) -> KnownIds | None:
    """Return the ids that the inputs of a signature accept. None if the manifest does not describe them.

    Args:
        signature: its name.
        aliases: its inputs, in order.
        manifest: of the export.
    """
    is_packed = signature == "packed" and not manifest.packing.left_out
    if not is_packed and signature != "serving_default":
        return None
    places = [one.name for one in manifest.packing.inputs] if is_packed else list(aliases)
    spans = {one.name: Span(one.name, one.rows) for one in manifest.tables}
    tables = {table.name: table for table in manifest.tables}
    checked = []
    features = sorted(manifest.features, key=lambda one: group_of(one, tables)) or manifest.from_activations.features
    for one in features:
        name = one.ids if isinstance(one, ActivationEntry) else one.name
        takes_names = bool(one.names) and not (is_packed and manifest.features)
        if name in places and one.out_of_vocabulary == "error" and not takes_names:
            group = one.name if isinstance(one, ActivationEntry) else group_of(one, tables)
            checked.append(
                _CheckedIds(
                    feature=one.name,
                    span=spans[one.table],
                    dropped=_dropped(one),
                    place=places.index(name),
                    length=one.max_sequence_length or None,
                    group=group,
                )
            )
    if not checked and not manifest.features:
        return None
    return KnownIds(checked, manifest.packing if is_packed else None)


def _dropped(feature: FeatureEntry) -> int:
    """Return the lowest id that is padding: the embedding layer, which whole models have, drops all negative ones of a list."""
    if feature.input == "id":
        return 0
    return _LEAST if isinstance(feature, ActivationEntry) else _PADDING
