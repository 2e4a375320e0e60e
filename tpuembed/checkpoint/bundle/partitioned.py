"""Variables of TensorFlow 1 that a partitioner cut into parts. The checkpoint does not record how ids were assigned to
them.

`tf.nn.embedding_lookup` decides it: "mod" assigns ids round-robin, "div" gives each part a run of them.

Source: embedding_lookup in tensorflow/python/ops/embedding_ops.py; _iter_slices in
tensorflow/python/ops/variable_scope.py.
"""

import dataclasses
from typing import ClassVar, Final

import numpy as np

from tpuembed.checkpoint.bundle.mod_sharded import ModSharded
from tpuembed.checkpoint.bundle.rows import DENSE, DenseRows, RowLayout, mod_sharded_bytes, read_mod_sharded_rows
from tpuembed.checkpoint.types import Array
from tpuembed.errors import CheckpointFormatError
from tpuembed.tensor_bundle import Bundle, Entry

__all__ = ["PARTITION_STRATEGIES", "partitioned_rows"]

PARTITION_STRATEGIES: Final = ("mod", "div")


class DivRows(DenseRows):
    """Rows in the order of their ids: the parts one after another."""

    format: ClassVar[str] = "partitioned"

    def describe(self, entry: Entry, /) -> str:
        """Return the number of parts, and the strategy."""
        return f"{len(entry.slices)} partitions, div"


@dataclasses.dataclass(frozen=True)
class ModRows(DenseRows):
    """Mod-sharded rows: row i is row `i // parts` of part `i % parts`.

    Attributes:
        starts: the row of the variable with which each part begins.
        stored_dim: its columns.
    """

    starts: tuple[int, ...]
    stored_dim: int
    format: ClassVar[str] = "partitioned"

    @property
    def count(self) -> int:
        """Return the number of parts; see `mod_sharded.ModSharded`."""
        return len(self.starts)

    def first_rows(self, parts: Array) -> Array:
        """Return the rows of the variable with which `parts` begin."""
        return np.array(self.starts)[parts]

    def describe(self, _: Entry, /) -> str:
        """Return the number of parts, and the strategy."""
        return f"{self.count} partitions, mod"

    def read_into(self, bundle: Bundle, key: str, start: int, out: Array) -> None:
        """Read one run of bytes per part."""
        read_mod_sharded_rows(self, bundle, key, start, out)

    def checksum(self, entry: Entry) -> None:
        """Return None: the parts' checksums cover rows in another order."""

    @property
    def mod_sharding(self) -> ModSharded:
        """Return the rows themselves."""
        return self

    def buffer_bytes(self, bundle: Bundle, entry: Entry, rows: int) -> int:
        """Return the bytes of a block of the runs of some parts."""
        return mod_sharded_bytes(self, bundle, entry, rows, self.stored_dim)


def partitioned_rows(bundle: Bundle, name: str, strategy: str | None) -> RowLayout:
    """Return the order of rows in variable `name` of a TensorFlow 1 checkpoint.

    Raises:
        CheckpointFormatError: it is partitioned and `strategy` is None, or no partitioner makes such parts.
    """
    entry = bundle.entries[name]
    if len({piece.start[0] for piece in entry.slices}) < 2:  # in one piece, or cut by columns
        return DENSE
    starts = _even_starts(bundle, name, entry)
    if strategy is None:
        raise CheckpointFormatError(
            f"checkpoint {bundle.prefix}: variable {name!r} is partitioned in {len(starts)}, and the checkpoint "
            "does not record how ids were assigned to the parts (div or mod). Give partition_strategy, the one "
            "that the model gave to tf.nn.embedding_lookup (its default is mod)."
        )
    return DivRows() if strategy == "div" else ModRows(starts, entry.shape[1])


def _even_starts(bundle: Bundle, name: str, entry: Entry) -> tuple[int, ...]:
    """Return the first row of each part. Checks that parts have whole rows, evenly divided, with the first parts one
    row longer.
    """
    rows, count = entry.shape[0], len(entry.slices)
    parts = sorted((piece.start[0], *piece.shape) for piece in entry.slices)
    starts = tuple(rows // count * part + min(part, rows % count) for part in range(count))
    expected = [(start, stop - start, entry.shape[1]) for start, stop in zip(starts, (*starts[1:], rows), strict=True)]
    if parts != expected:
        raise CheckpointFormatError(
            f"checkpoint {bundle.prefix}: variable {name!r} of {rows} rows is cut in {count} parts of "
            f"{', '.join(str(part[1]) for part in parts[:8])} rows, which no partitioner of TensorFlow makes. "
            "Save it in one piece."
        )
    return starts
