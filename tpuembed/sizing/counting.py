"""How many ids a SparseCore takes from another one's examples in one step.

A chip's examples are divided among its SparseCores in order; an id goes to SparseCore (id + rotation) mod n, where its row
is. An id that an example has twice is one. Source: SortListOfSparseCoreCooTensors in
tensorflow/core/tpu/kernels/sparse_core_preprocess_ops.cc, which fails where a limit is passed.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tpuembed.sizing.sample import FeatureIds

__all__ = ["Counts", "Lookup", "Partitions", "count"]

Array = np.ndarray[Any, Any]
_PADDING = 8  # ids of one partition are padded to a multiple of it in the buffer of a chip


@dataclasses.dataclass(frozen=True)
class Partitions:
    """How a step's examples and rows are divided.

    Attributes:
        batch_size: examples of one step of all chips.
        chips: how many.
        cores_per_chip: SparseCores of each.
    """

    batch_size: int
    chips: int
    cores_per_chip: int

    @property
    def cores(self) -> int:
        """SparseCores of all chips."""
        return self.chips * self.cores_per_chip


@dataclasses.dataclass(frozen=True)
class Lookup:
    """A feature's ids in one table of a stack.

    Attributes:
        ids: of the sample.
        first_row: a number that sets the table's rows apart from the stack's other tables'.
        rotation: the SparseCore of the table's row 0.
    """

    ids: FeatureIds
    first_row: int
    rotation: int


@dataclasses.dataclass(frozen=True)
class Counts:
    """The most of any step of the sample.

    Attributes:
        ids: that one SparseCore takes from another one's examples.
        unique_ids: the same, each row counted once.
        ids_per_chip: of one chip's examples, each partition padded to a multiple of 8.
    """

    ids: int
    unique_ids: int
    ids_per_chip: int


def count(lookups: Sequence[Lookup], partitions: Partitions, steps: int) -> Counts:
    """Counts of the lookups of one stack (or of one table of it) over the first `steps` batches of the sample."""
    parts = [_of_lookup(lookup, partitions, steps) for lookup in lookups]
    where = np.concatenate([part for part, _ in parts])
    rows = np.concatenate([row for _, row in parts])
    if not len(where):
        return Counts(0, 0, 0)
    names, ids = np.unique(where, return_counts=True)
    _, unique_ids = np.unique(_distinct(where, rows)[0], return_counts=True)
    padded = -(-ids // _PADDING) * _PADDING
    chips = names // (partitions.cores * partitions.cores_per_chip)  # of a step; step * chips + chip
    _, positions = np.unique(chips, return_inverse=True)
    return Counts(int(ids.max()), int(unique_ids.max()), int(np.bincount(positions, padded).max()))


def _of_lookup(lookup: Lookup, partitions: Partitions, steps: int) -> tuple[Array, Array]:
    """(partition, row) of every id; a partition is numbered (step * cores + source) * cores + destination."""
    kept = lookup.ids.examples < steps * partitions.batch_size
    examples, ids = _distinct(lookup.ids.examples[kept], lookup.ids.ids[kept])
    per_core = partitions.batch_size // partitions.cores
    destinations = (ids + lookup.rotation) % partitions.cores
    return examples // per_core * partitions.cores + destinations, ids + lookup.first_row


def _distinct(first: Array, second: Array) -> tuple[Array, Array]:
    """The pairs (first, second), each once."""
    order = np.lexsort((second, first))
    first, second = first[order], second[order]
    new = np.ones(len(first), bool)
    new[1:] = (first[1:] != first[:-1]) | (second[1:] != second[:-1])
    return first[new], second[new]
