"""Variables of TensorFlow 1 that a partitioner cut into parts: how ids were dealt to them, the checkpoint does not say.

`tf.nn.embedding_lookup` decides it: "mod" deals the ids out in turn, "div" gives each part a run of them.
Source: embedding_lookup in tensorflow/python/ops/embedding_ops.py; _iter_slices in tensorflow/python/ops/variable_scope.py.
"""

import dataclasses
from typing import ClassVar, Final

import numpy as np

from tpuembed.checkpoint.bundle.mod_sharded import Interleaved
from tpuembed.checkpoint.bundle.rows import DENSE, DenseRows, RowLayout, dealt_bytes, read_dealt_rows
from tpuembed.checkpoint.types import Array
from tpuembed.errors import CheckpointFormatError
from tpuembed.tensor_bundle import Bundle, Entry

__all__ = ["PARTITION_STRATEGIES", "partitioned_rows"]

PARTITION_STRATEGIES: Final = ("mod", "div")


class DivRows(DenseRows):
    """Row = id: the parts one after another."""

    format: ClassVar[str] = "partitioned"

    def describe(self, entry: Entry, /) -> str:
        """Parts and strategy."""
        return f"{len(entry.slices)} partitions, div"


@dataclasses.dataclass(frozen=True)
class ModRows(DenseRows):
    """Row i is row `i // parts` of part `i % parts`.

    Attributes:
        starts: the row of the variable with which each part begins.
        stored_dim: its columns.
    """

    starts: tuple[int, ...]
    stored_dim: int
    format: ClassVar[str] = "partitioned"

    @property
    def count(self) -> int:
        """The parts; see `interleaved.Interleaved`."""
        return len(self.starts)

    def first_rows(self, parts: Array) -> Array:
        """The rows of the variable with which `parts` begin."""
        return np.array(self.starts)[parts]

    def describe(self, _: Entry, /) -> str:
        """Parts and strategy."""
        return f"{self.count} partitions, mod"

    def read_into(self, bundle: Bundle, key: str, start: int, out: Array) -> None:
        """One run of bytes per part."""
        read_dealt_rows(self, bundle, key, start, out)

    def checksum(self, entry: Entry) -> None:
        """The parts' checksums are over rows in another order."""

    @property
    def dealt(self) -> Interleaved:
        """To the parts."""
        return self

    def buffer_bytes(self, bundle: Bundle, entry: Entry, rows: int) -> int:
        """A block of the runs of some parts."""
        return dealt_bytes(self, bundle, entry, rows, self.stored_dim)


def partitioned_rows(bundle: Bundle, name: str, strategy: str | None) -> RowLayout:
    """How ids lie in variable `name` of a TensorFlow 1 checkpoint.

    Raises:
        CheckpointFormatError: it is partitioned and `strategy` is None, or its parts are not what a partitioner makes.
    """
    entry = bundle.entries[name]
    if len({piece.start[0] for piece in entry.slices}) < 2:  # in one piece, or cut by columns
        return DENSE
    starts = _even_starts(bundle, name, entry)
    if strategy is None:
        raise CheckpointFormatError(
            f"checkpoint {bundle.prefix}: variable {name!r} is partitioned in {len(starts)}, and the checkpoint does not "
            "say how ids were dealt to the parts (div or mod); give partition_strategy, the one that the model gave to "
            "tf.nn.embedding_lookup (its default is mod)"
        )
    return DivRows() if strategy == "div" else ModRows(starts, entry.shape[1])


def _even_starts(bundle: Bundle, name: str, entry: Entry) -> tuple[int, ...]:
    """Where the parts begin, checked: whole rows, dealt evenly, with one more for the first."""
    rows, count = entry.shape[0], len(entry.slices)
    parts = sorted((piece.start[0], *piece.shape) for piece in entry.slices)
    starts = tuple(rows // count * part + min(part, rows % count) for part in range(count))
    expected = [(start, stop - start, entry.shape[1]) for start, stop in zip(starts, (*starts[1:], rows), strict=True)]
    if parts != expected:
        raise CheckpointFormatError(
            f"checkpoint {bundle.prefix}: variable {name!r} of {rows} rows is cut in {count} parts of "
            f"{', '.join(str(part[1]) for part in parts[:8])} rows, which no partitioner of TensorFlow makes; "
            "save it in one piece"
        )
    return starts
