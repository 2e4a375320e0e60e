"""One table inside of a SparseCore stack, read and written by row number.

Row i of a table is row `(i % n + rotation) % n * T + offset + i // n` of its stack, where n SparseCores hold T rows each;
columns after the table's are padding.

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
    """Where a table lies in its stack.

    Attributes:
        stack: the stack's name.
        rows, dim: the table's shape, without padding.
        sparse_cores: n, how many hold the stack.
        rows_per_core: T, rows of the stack in each.
        offset: of the table's first row in each SparseCore.
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
        """Of TensorFlow's SparseCoreTableLayout proto."""
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
        """(SparseCore, rows in it, rows of [start, stop) that they are) for each that holds some of them."""
        for part in range(self.sparse_cores):
            first = start + (part - start) % self.sparse_cores
            if first < stop:
                low = self.offset + first // self.sparse_cores
                count = -(-(stop - first) // self.sparse_cores)
                core = (part + self.rotation) % self.sparse_cores
                yield core, slice(low, low + count), slice(first - start, None, self.sparse_cores)


def check_stacks(layouts: Mapping[str, StackLayout], slots: Mapping[str, Iterable[str]]) -> None:
    """Raise ConfigError where TensorFlow gave two stacks, or a stack and a slot of another, one name.

    Args:
        layouts: of every table.
        slots: of every table.
    """
    firsts: dict[str, str] = {}
    for table, layout in layouts.items():
        other = table if layout.offset else firsts.setdefault(layout.stack, table)
        if other != table:
            raise ConfigError(
                f"tables {other!r} and {table!r}: TensorFlow calls a stack by its tables, and so two stacks {layout.stack!r}; "
                "rename a table"
            )
    for table, layout in layouts.items():
        for slot in (f"{layout.stack}/{slot}" for slot in slots[table]):
            if slot in firsts:
                raise ConfigError(
                    f"table {firsts[slot]!r} is called like a slot of the stack {layout.stack!r}; rename it"
                )


def check_shards(layouts: Mapping[str, StackLayout], shards: Mapping[str, Sequence[Sequence[int]]]) -> None:
    """Raise ConfigError where the TPUs do not hold what the layouts say; the TPU compiler takes any shape, and reads beyond it.

    Args:
        layouts: of every table.
        shards: stack -> the shape of its rows in each TPU.
    """
    for table, layout in layouts.items():
        shapes = [tuple(shape) for shape in shards[layout.stack]]
        rows = layout.sparse_cores * layout.rows_per_core
        even = layout.sparse_cores % len(shapes) == 0 and len(set(shapes)) == 1
        fits = layout.offset + -(-layout.rows // layout.sparse_cores) <= layout.rows_per_core
        if not even or not fits or shapes[0][0] * len(shapes) != rows or shapes[0][1] < layout.dim:
            raise ConfigError(
                f"table {table!r} of {layout.rows} rows: {len(shapes)} TPUs with {shapes} of the stack {layout.stack!r} cannot be "
                f"shared by {layout.sparse_cores} SparseCores with {layout.rows_per_core} rows each; this TensorFlow's stacks are "
                "not those that the layer knows: install a version that it was tested with"
            )


class StackedTable:
    """A [rows, dim] table, or a slot of one, as a view of its stack."""

    dtype = tf.float32

    def __init__(self, layout: StackLayout, variable: Any) -> None:
        """`variable` has one shard per device, each with the rows of that device's SparseCores."""
        self._layout, self._shards = layout, list(variable.values)
        self.shape = tf.TensorShape((layout.rows, layout.dim))

    def numpy(self) -> Array:
        """float32 [rows, dim]."""
        return self.read_rows(0, self._layout.rows)

    def read_rows(self, start: int, stop: int) -> Array:
        """Rows [start, stop), float32 [stop - start, dim]. Gathered: slicing a shard that has been trained copies it."""
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
        """Write the rows [start, start + len(values)); padding stays as it is."""
        for core, stored, rows in self._layout.runs(start, start + len(values)):
            device, begin = self._place(core)
            of_core = self._shards[device][begin + stored.start : begin + stored.stop, : self._layout.dim]
            of_core.assign(values[rows])

    def _place(self, core: int) -> tuple[int, int]:
        """The shard that holds the SparseCore's rows, and where they begin in it."""
        device, within = divmod(core, self._layout.sparse_cores // len(self._shards))
        return device, within * self._layout.rows_per_core
