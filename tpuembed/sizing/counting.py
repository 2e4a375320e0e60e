"""Reads a sample of ids, and counts how many a SparseCore takes from another one's examples in one step.

A chip's examples are divided among its SparseCores in order. An id belongs to SparseCore (id + rotation) mod n, which
holds its row. An id that occurs twice in an example counts once. Source: SortListOfSparseCoreCooTensors in
tensorflow/core/tpu/kernels/sparse_core_preprocess_ops.cc, which fails if a limit is exceeded.
"""

import dataclasses
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tpuembed.config.checks import check_count
from tpuembed.errors import ConfigError, reason

__all__ = ["Counts", "FeatureIds", "Lookup", "Topology", "count", "read_sample"]

Array = np.ndarray[Any, Any]
Ids = np.ndarray[Any, np.dtype[np.int64]]

_MAX_ID = 2**63 - 1
_PADDING = 8  # the ids of one partition are padded to a multiple of it in the buffer of a chip


@dataclasses.dataclass(frozen=True)
class FeatureIds:
    """The ids of one feature in a sample.

    Attributes:
        ids: int64 [n], not negative.
        examples: int64 [n], the example of each id.
        count: the number of examples, including those without ids.
    """

    ids: Ids
    examples: Ids
    count: int

    @classmethod
    def of_array(cls, array: Any) -> "FeatureIds":
        """Return the ids of integers [examples] or [examples, ids], padded with negative ones."""
        rows = np.asarray(array)
        rows = rows[:, None] if rows.ndim == 1 else rows
        examples, places = np.nonzero(rows >= 0)
        return cls(rows[examples, places].astype(np.int64), examples.astype(np.int64), len(rows))


def read_sample(path: str | Path) -> dict[str, FeatureIds]:
    """Return {feature: its ids} of a `.npz` file: an integer array [examples] or [examples, ids] per feature, padded with -1.

    Raises:
        ConfigError: the file cannot be read, or has no example.
    """
    path = Path(path)
    try:
        with np.load(path, allow_pickle=False) as arrays:
            found = {name: _checked(path, name, arrays[name]) for name in arrays.files}
    except OSError as error:
        raise ConfigError(f"sample {path}: cannot be read: {reason(error)}") from None
    except ConfigError:
        raise
    except (ValueError, TypeError, zipfile.BadZipFile, zlib.error, EOFError):
        raise ConfigError(f"sample {path}: is not an .npz of plain arrays. Write it with numpy.savez.") from None
    if not found or not next(iter(found.values())).count:
        raise ConfigError(f"sample {path}: has no examples.")
    return found


def _checked(path: Path, name: str, array: Any) -> FeatureIds:
    if not np.issubdtype(array.dtype, np.integer) or array.ndim not in (1, 2):
        raise ConfigError(
            f"sample {path}: {name!r} must be integers [examples] or [examples, ids], got {array.dtype} {list(array.shape)}"
        )
    if array.size and int(array.max()) > _MAX_ID:
        raise ConfigError(f"sample {path}: {name!r} has id {array.max()}. The largest valid id is {_MAX_ID}.")
    return FeatureIds.of_array(array)


@dataclasses.dataclass(frozen=True)
class Topology:
    """The TPUs that a step runs on.

    Attributes:
        chips: the number of chips.
        batch_size: examples of one step of all chips.
        sparse_cores_per_chip: 4 on v5p, 2 on v6e.

    Raises:
        ConfigError: TensorFlow's ops refuse these numbers.
    """

    chips: int
    batch_size: int
    sparse_cores_per_chip: int = 4

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_count(f"topology: {field.name}", getattr(self, field.name))
        cores = self.cores
        if cores & (cores - 1):
            raise ConfigError(
                f"topology: {self.chips} chips with {self.sparse_cores_per_chip} SparseCores have {cores} SparseCores in all. "
                "TensorFlow needs a power of two."
            )
        if self.batch_size % cores:
            raise ConfigError(
                f"topology: batch_size {self.batch_size} cannot be divided among {cores} SparseCores. Make it a "
                f"multiple of {cores}."
            )

    @property
    def cores(self) -> int:
        """Return the number of SparseCores of all chips."""
        return self.chips * self.sparse_cores_per_chip


@dataclasses.dataclass(frozen=True)
class Lookup:
    """A feature's ids in one table of a stack.

    Attributes:
        ids: the ids in the sample.
        first_row: an offset that distinguishes the table's rows from those of the stack's other tables.
        rotation: the SparseCore of the table's row 0.
    """

    ids: FeatureIds
    first_row: int
    rotation: int


@dataclasses.dataclass(frozen=True)
class Counts:
    """The maximum over the steps of the sample.

    Attributes:
        ids: the ids that one SparseCore takes from another one's examples.
        unique_ids: the same, each row counted once.
        ids_per_chip: the ids of one chip's examples, each partition padded to a multiple of 8.
    """

    ids: int
    unique_ids: int
    ids_per_chip: int


def count(lookups: Sequence[Lookup], topology: Topology, steps: int) -> Counts:
    """Return the counts of the lookups of one stack (or of one table of it) over the first `steps` batches of the sample."""
    parts = [_of_lookup(lookup, topology, steps) for lookup in lookups]
    where = np.concatenate([part for part, _ in parts])
    rows = np.concatenate([row for _, row in parts])
    if not len(where):
        return Counts(0, 0, 0)
    names, ids = np.unique(where, return_counts=True)
    _, unique_ids = np.unique(_distinct(where, rows)[0], return_counts=True)
    padded = -(-ids // _PADDING) * _PADDING
    chips = names // (
        topology.cores * topology.sparse_cores_per_chip
    )  # the chip of each partition: step * chips + chip
    _, positions = np.unique(chips, return_inverse=True)
    return Counts(int(ids.max()), int(unique_ids.max()), int(np.bincount(positions, padded).max()))


def _of_lookup(lookup: Lookup, topology: Topology, steps: int) -> tuple[Array, Array]:
    """Return (partition, row) of every id. The number of a partition is (step * cores + source) * cores + destination."""
    kept = lookup.ids.examples < steps * topology.batch_size
    examples, ids = _distinct(lookup.ids.examples[kept], lookup.ids.ids[kept])
    per_core = topology.batch_size // topology.cores
    destinations = (ids + lookup.rotation) % topology.cores
    return examples // per_core * topology.cores + destinations, ids + lookup.first_row


def _distinct(first: Array, second: Array) -> tuple[Array, Array]:
    """Return the distinct pairs (first, second)."""
    order = np.lexsort((second, first))
    first, second = first[order], second[order]
    new = np.ones(len(first), bool)
    new[1:] = (first[1:] != first[:-1]) | (second[1:] != second[:-1])
    return first[new], second[new]
