"""Looks features up in Redis: which rows a request needs, and what its features make of them.

The formulas are those of `tpuembed/lookup/pooling.py`. Sums differ from those of an export's graph in their last bits, because the
order differs. A single id has the bits of the graph.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tpuembed.id_messages import Span, outside_message
from tpuembed.manifest import FeatureEntry, Manifest, TableEntry
from tpuembed_serving.core.status import invalid_argument
from tpuembed_serving.tf_serving.redis_rows import CheckedVersion, RedisRows

__all__ = ["look_up"]

Array = npt.NDArray[Any]
_PADDING = -1


def look_up(
    rows: RedisRows, opened: CheckedVersion, inputs: Mapping[str, Array], timeout_seconds: float
) -> dict[str, Array]:
    """Return feature -> float32 [batch, dim], or [batch, max_sequence_length, dim] of sequences. A row is read once.

    Args:
        rows: of the model.
        opened: the version to read.
        inputs: of `serving_default`, by name.
        timeout_seconds: for all rows.

    Raises:
        StatusError: INVALID_ARGUMENT, an input does not fit, or an id is outside its table.
        UnknownTableError, RowStoreError: as RedisRows.read.
    """
    manifest = opened.manifest
    tables = {table.name: table for table in manifest.tables}
    chosen = {one.name: _Chosen(one, tables[one.table], inputs) for one in manifest.features}
    wanted = {
        table: np.unique(np.concatenate([one.ids for one in of_table]))
        for table, of_table in _by_table(manifest, chosen).items()
    }
    found = rows.read(opened, wanted, timeout_seconds)
    return {
        name: one.pooled(found[one.feature.table][np.searchsorted(wanted[one.feature.table], one.ids)])
        for name, one in chosen.items()
    }


def _by_table(manifest: Manifest, chosen: Mapping[str, "_Chosen"]) -> dict[str, list["_Chosen"]]:
    found: dict[str, list[_Chosen]] = {}
    for one in manifest.features:
        found.setdefault(one.table, []).append(chosen[one.name])
    return found


class _Chosen:
    """The ids of one feature.

    Attributes:
        feature: the feature.
        ids: int64 [n], those to read.
    """

    def __init__(self, feature: FeatureEntry, table: TableEntry, inputs: Mapping[str, Array]) -> None:
        self.feature, self._dim = feature, table.dim
        ids = self._input(inputs, feature.name, np.int64)
        self._weights = self._input(inputs, f"{feature.name}_weights", np.float32) if feature.weighted else None
        if self._weights is not None and self._weights.shape != ids.shape:
            raise invalid_argument(
                f"input {feature.name}_weights has shape {list(self._weights.shape)}, but input {feature.name} has "
                f"{list(ids.shape)}. Send a weight for each id"
            )
        if feature.max_sequence_length:
            ids = ids[:, : feature.max_sequence_length]
        self._is_padding = (ids == _PADDING) & (feature.input != "id")
        outside = ((ids < table.first_row) | (ids >= table.first_row + table.rows)) & ~self._is_padding
        policy = feature.out_of_vocabulary
        if policy == "error" and outside.any():
            row, *column = np.argwhere(outside)[0].tolist()
            span = Span(table.name, table.first_row, table.first_row + table.rows)
            raise invalid_argument(outside_message(feature.name, span, int(ids[row, *column]), row))
        if not isinstance(policy, str):
            ids = np.where(outside, policy, ids)
            outside = np.zeros_like(outside)
        self._is_read = ~(self._is_padding | outside)
        self.ids: Array = ids[self._is_read]

    def _input(self, inputs: Mapping[str, Array], name: str, dtype: type) -> Array:
        array, rank = np.asarray(inputs[name]), 1 if self.feature.input == "id" else 2
        if array.ndim != rank:
            shape = "[batch]" if rank == 1 else "[batch, hot]"
            raise invalid_argument(f"input {name} has shape {list(array.shape)}. The signature takes {shape}")
        return array.astype(dtype, copy=False)

    def pooled(self, rows: Array) -> Array:
        """Return the activation of each example. `rows` are those of `ids`."""
        feature, shape = self.feature, self._is_read.shape
        placed = np.zeros((*shape, self._dim), np.float32)
        placed[self._is_read] = rows
        if feature.input == "id":
            return placed
        if length := feature.max_sequence_length:
            return np.pad(placed, ((0, 0), (0, length - shape[1]), (0, 0)))
        weights = np.ones(shape, np.float32) if self._weights is None else self._weights
        weights = np.where(self._is_padding, np.float32(0), weights)
        with np.errstate(all="ignore"):
            total: Array = np.einsum("bhd,bh->bd", placed, weights)
            if feature.combiner == "sum":
                return total
            divisor = weights.sum(axis=1) if feature.combiner == "mean" else np.sqrt((weights * weights).sum(axis=1))
            return np.where(divisor[:, None] == 0, np.float32(0), total / divisor[:, None])
