"""One table in a SparseCore stack, read and written by row number.

Row i of a table is row `(i % n + rotation) % n * T + offset + i // n` of its stack, where n SparseCores hold T rows
each. The columns after the table's are padding.

Source: SparseCoreTableLayout in tensorflow/core/tpu/kernels/sparse_core_layout.proto.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tpuembed.errors import ConfigError

__all__ = ["StackLayout", "StackedTable", "check_shards", "check_stacks"]

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class StackLayout:
    """The layout of a table in its stack.

    Attributes:
        stack: the stack's name.
        rows, dim: the table's shape, without padding.
        sparse_cores: n, the number of SparseCores that hold the stack.
        rows_per_core: T, the rows of the stack in each.
        offset: the table's first row in each SparseCore.
        rotation: the SparseCore of row 0.
    """

    stack: str
    rows: int
    dim: int
    sparse_cores: int
    rows_per_core: int
    offset: int
    rotation: int

    @classmethod
    def of(cls, proto: Any) -> "StackLayout":
        """Return the layout in TensorFlow's SparseCoreTableLayout proto."""
        return cls(
            stack=proto.stacked_table_name,
            rows=proto.unsharded_shape[0],
            dim=proto.unsharded_shape[1],
            sparse_cores=proto.num_sparse_cores,
            rows_per_core=proto.total_rows_per_sparse_core_shard,
            offset=proto.sparse_core_shard_row_offset,
            rotation=proto.sparse_core_shard_rotation,
        )

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, slice, slice]]:
        """Yield (SparseCore, its rows, the same rows within [start, stop)) for each SparseCore that holds some of [start, stop)."""
        for part in range(self.sparse_cores):
            first = start + (part - start) % self.sparse_cores
            if first < stop:
                low = self.offset + first // self.sparse_cores
                count = -(-(stop - first) // self.sparse_cores)
                core = (part + self.rotation) % self.sparse_cores
                yield core, slice(low, low + count), slice(first - start, None, self.sparse_cores)


def check_stacks(layouts: Mapping[str, StackLayout], slots: Mapping[str, Iterable[str]]) -> None:
    """Raise ConfigError if TensorFlow gave one name to two stacks, or to a stack and a slot of another.

    Args:
        layouts: the layout of every table.
        slots: the slots of every table.
    """
    firsts: dict[str, str] = {}
    for table, layout in layouts.items():
        other = table if layout.offset else firsts.setdefault(layout.stack, table)
        if other != table:
            raise ConfigError(
                f"tables {other!r} and {table!r}: TensorFlow names a stack after its tables. Both of their stacks are named "
                f"{layout.stack!r}. Rename a table."
            )
    for table, layout in layouts.items():
        for slot in (f"{layout.stack}/{slot}" for slot in slots[table]):
            if slot in firsts:
                raise ConfigError(
                    f"table {firsts[slot]!r} has the same name as a slot of the stack {layout.stack!r}. Rename the table."
                )


def check_shards(layouts: Mapping[str, StackLayout], shards: Mapping[str, Sequence[Sequence[int]]]) -> None:
    """Raise ConfigError if the TPUs' shards do not match the layouts. The TPU compiler accepts any shape and reads
    beyond it.

    Args:
        layouts: the layout of every table.
        shards: stack -> the shape of its rows in each TPU.
    """
    for table, layout in layouts.items():
        shapes = [tuple(shape) for shape in shards[layout.stack]]
        rows = layout.sparse_cores * layout.rows_per_core
        even = layout.sparse_cores % len(shapes) == 0 and len(set(shapes)) == 1
        fits = layout.offset + -(-layout.rows // layout.sparse_cores) <= layout.rows_per_core
        if not even or not fits or shapes[0][0] * len(shapes) != rows or shapes[0][1] < layout.dim:
            raise ConfigError(
                f"table {table!r} with {layout.rows} rows: {len(shapes)} TPUs hold {shapes} of the stack {layout.stack!r}. "
                f"The layout needs {layout.sparse_cores} SparseCores with {layout.rows_per_core} rows each. "
                "The layer does not support the stacks of this TensorFlow. Install a version that it was tested with."
            )


class StackedTable:
    """A [rows, dim] table, or a slot of one, as a view of its stack."""

    dtype = tf.float32

    def __init__(self, layout: StackLayout, variable: Any) -> None:
        """Wrap `variable`, which has one shard per device with the rows of that device's SparseCores."""
        self._layout, self._shards = layout, list(variable.values)
        self.shape = tf.TensorShape((layout.rows, layout.dim))

    def numpy(self) -> Array:
        """Return the table, float32 [rows, dim]."""
        return self.read_rows(0, self._layout.rows)

    def read_rows(self, start: int, stop: int) -> Array:
        """Return rows [start, stop), float32 [stop - start, dim]. It gathers, because slicing a trained shard copies it."""
        out = np.empty((stop - start, self._layout.dim), np.float32)
        for core, stored, rows in self._layout.runs(start, stop):
            device, begin = self._place(core)
            of_core = tf.gather(self._shards[device], tf.range(begin + stored.start, begin + stored.stop))
            out[rows] = of_core.numpy()[:, : self._layout.dim]
        return out

    def assign(self, values: Any) -> None:
        """Write float32 [rows, dim]."""
        self.assign_rows(0, np.asarray(values))

    def assign_rows(self, start: int, values: Array) -> None:
        """Write the rows [start, start + len(values)). Padding is unchanged."""
        for core, stored, rows in self._layout.runs(start, start + len(values)):
            device, begin = self._place(core)
            of_core = self._shards[device][begin + stored.start : begin + stored.stop, : self._layout.dim]
            of_core.assign(values[rows])

    def _place(self, core: int) -> tuple[int, int]:
        """Return the shard that holds the SparseCore's rows, and their first row in it."""
        device, within = divmod(core, self._layout.sparse_cores // len(self._shards))
        return device, within * self._layout.rows_per_core
