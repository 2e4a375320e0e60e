"""Variables of TensorFlow 1 that a partitioner cut into parts. The checkpoint does not record how ids were assigned to
them.

`tf.nn.embedding_lookup` decides it: "mod" assigns ids round-robin, "div" gives each part a run of them.

Source: embedding_lookup in tensorflow/python/ops/embedding_ops.py; _iter_slices in
tensorflow/python/ops/variable_scope.py.
"""

import dataclasses
from typing import Final

import numpy as np

from tpuembed.checkpoint.bundle.rows import DENSE, RowLayout
from tpuembed.checkpoint.types import Array
from tpuembed.errors import CheckpointFormatError
from tpuembed.tensor_bundle import Bundle, Entry

__all__ = ["PARTITION_STRATEGIES", "partitioned_rows"]

PARTITION_STRATEGIES: Final = ("mod", "div")


@dataclasses.dataclass(frozen=True)
class _Partitions:
    """Mod-sharded rows: row i is row `i // parts` of part `i % parts`; see `mod_sharded.ModSharded`.

    Attributes:
        starts: the row of the variable with which each part begins.
        stored_dim: its columns.
    """

    starts: tuple[int, ...]
    stored_dim: int

    @property
    def count(self) -> int:
        return len(self.starts)

    def first_rows(self, parts: Array) -> Array:
        return np.array(self.starts)[parts]


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
    mod_sharding = _Partitions(starts, entry.shape[1]) if strategy == "mod" else None
    return RowLayout("partitioned", f"partitions, {strategy}", mod_sharding)


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
