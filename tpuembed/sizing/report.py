"""The limits, padding and memory of tables on SparseCores, from the ids that a SparseCore takes from another one's examples.

A chip's examples are divided among its SparseCores in order. An id belongs to SparseCore (id + rotation) mod n, which
holds its row. An id that occurs twice in an example counts once. Source: SortListOfSparseCoreCooTensors in
tensorflow/core/tpu/kernels/sparse_core_preprocess_ops.cc, which fails if a limit is exceeded.
"""

import dataclasses
import itertools
import math
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tpuembed.backends.tf_config import features_to_tf, resolve_optimizer
from tpuembed.backends.tpu.tf_stacks import stack_tables
from tpuembed.config import FeatureConfig
from tpuembed.config.checks import check_count, check_number, did_you_mean
from tpuembed.errors import ConfigError, reason

__all__ = ["FeatureIds", "SizingReport", "StackSize", "TableSize", "Topology", "estimate", "read_sample"]

Array = np.ndarray[Any, Any]
Ids = np.ndarray[Any, np.dtype[np.int64]]

_MAX_ID = 2**63 - 1
_PADDING = 8  # the ids of one partition are padded to a multiple of it in the buffer of a chip
_DEFAULT_LIMIT = 256  # TensorFlow's default for a stack without configured limits
_FLOAT_BYTES = 4
_MAX_IDS_PER_CHIP_PER_SAMPLE = 64  # TensorFlow's default
_MOST_MARGIN = 1000


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


class _LookupIds(NamedTuple):
    """A feature's ids in one table of a stack."""

    ids: FeatureIds
    first_row: int  # distinguishes the table's rows from those of the stack's other tables
    rotation: int  # the SparseCore of the table's row 0


class _IdCounts(NamedTuple):
    """The maximum over the steps of the sample."""

    ids: int  # that one SparseCore takes from another one's examples
    unique_ids: int  # the same, each row counted once
    ids_per_chip: int  # of one chip's examples, each partition padded to a multiple of 8


def _count(lookups: Sequence[_LookupIds], topology: Topology, steps: int) -> _IdCounts:
    """Return the counts of the lookups of one stack (or of one table of it) over the first `steps` batches of the sample."""
    parts, of_rows = list[Array](), list[Array]()
    for lookup in lookups:
        kept = lookup.ids.examples < steps * topology.batch_size
        examples, one = _distinct(lookup.ids.examples[kept], lookup.ids.ids[kept])
        sources = examples // (topology.batch_size // topology.cores)
        # The number of a partition is (step * cores + source) * cores + destination.
        parts.append(sources * topology.cores + (one + lookup.rotation) % topology.cores)
        of_rows.append(one + lookup.first_row)
    where, rows = np.concatenate(parts), np.concatenate(of_rows)
    if not len(where):
        return _IdCounts(0, 0, 0)
    names, ids = np.unique(where, return_counts=True)
    _, unique_ids = np.unique(_distinct(where, rows)[0], return_counts=True)
    padded = -(-ids // _PADDING) * _PADDING
    chips = names // (
        topology.cores * topology.sparse_cores_per_chip
    )  # the chip of each partition: step * chips + chip
    _, positions = np.unique(chips, return_inverse=True)
    return _IdCounts(int(ids.max()), int(unique_ids.max()), int(np.bincount(positions, padded).max()))


def _distinct(first: Array, second: Array) -> tuple[Array, Array]:
    """Return the distinct pairs (first, second)."""
    order = np.lexsort((second, first))
    first, second = first[order], second[order]
    new = np.ones(len(first), bool)
    new[1:] = (first[1:] != first[:-1]) | (second[1:] != second[:-1])
    return first[new], second[new]


@dataclasses.dataclass(frozen=True)
class StackSize:
    """Tables that are stored and looked up together.

    Attributes:
        stack: the stack's name.
        tables: the tables in it.
        rows, dim: its shape, with padding.
        seen_ids, seen_unique_ids: the maximum over the steps of the sample.
        needed_ids, needed_unique_ids: the maximum plus the margin.
        limit_ids, limit_unique_ids: the limits of the tables' configs.
        ids_per_chip_per_sample: the minimum for max_ids_per_chip_per_sample, with the margin.
        bytes_per_chip: the size of tables and slots.
    """

    stack: str
    tables: tuple[str, ...]
    rows: int
    dim: int
    seen_ids: int
    needed_ids: int
    limit_ids: int
    seen_unique_ids: int
    needed_unique_ids: int
    limit_unique_ids: int
    ids_per_chip_per_sample: int
    bytes_per_chip: int


@dataclasses.dataclass(frozen=True)
class TableSize:
    """One table.

    Attributes:
        table: its name.
        stack: the stack that holds it.
        rows, dim: the configured shape.
        padded_rows, padded_dim: the stored shape.
        slots: its optimizer's slots. Each needs as much memory as the table.
        max_ids_per_partition, max_unique_ids_per_partition: the values to configure: the needs of its ids, with the
            margin.
        bytes_per_chip: the size of the table and its slots, with padding.
    """

    table: str
    stack: str
    rows: int
    padded_rows: int
    dim: int
    padded_dim: int
    slots: tuple[str, ...]
    max_ids_per_partition: int
    max_unique_ids_per_partition: int
    bytes_per_chip: int


@dataclasses.dataclass(frozen=True)
class SizingReport:
    """The result of `estimate`.

    Attributes:
        topology: the argument of `estimate`.
        margin: the argument of `estimate`.
        steps: the number of whole batches of the sample that were counted.
        tables, stacks: sorted by name.
        bytes_per_chip: the size of all tables and slots.
        warnings: one line for each limit that is exceeded, or nearly.
    """

    topology: Topology
    margin: float
    steps: int
    tables: tuple[TableSize, ...]
    stacks: tuple[StackSize, ...]
    bytes_per_chip: int
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return dataclasses.asdict(self)


def estimate(
    features: Mapping[str, FeatureConfig],
    sample: Mapping[str, FeatureIds],
    topology: Topology,
    *,
    margin: float = 0.25,
    optimizer: Any = None,
    stacking: bool = True,
) -> SizingReport:
    """Return the needs of `features` and a sample of their ids on `topology`.

    Args:
        features: path -> FeatureConfig. The counts are compared with the limits of its table.
        sample: path -> ids, in the order of training. Only whole batches are counted. Other features in it are ignored.
        topology: the TPUs.
        margin: the fraction added to the maximum of the sample, 0.25 for a quarter.
        optimizer: for tables without their own. None counts no slots for them.
        stacking: as `disable_table_stacking=False`.

    Raises:
        ConfigError: the sample lacks a feature, has ids outside a table or less than a batch, or SparseCores do not
            support a feature.
    """
    check_number("margin", margin, 0.0)
    if margin > _MOST_MARGIN:
        raise ConfigError(f"margin must be at most {_MOST_MARGIN}, got {margin!r}. A margin of 0.25 adds a quarter.")
    steps = _check(features, sample, topology)
    default = None if optimizer is None else resolve_optimizer(optimizer)
    trained, of_chip = list[FeatureConfig](), (topology.batch_size // topology.chips,)
    for config in features.values():
        own = default if config.table.optimizer is None else config.table.optimizer
        table = dataclasses.replace(config.table, optimizer=own)
        trained.append(dataclasses.replace(config, table=table, output_shape=of_chip))
    configs = {config.table.name: config.table for config in trained}
    optimizers = {name: table.optimizer and resolve_optimizer(table.optimizer) for name, table in configs.items()}
    layouts = stack_tables(features_to_tf(trained), topology.chips, topology.sparse_cores_per_chip, stacking)
    members: dict[str, list[str]] = {}
    for name in sorted(layouts):
        members.setdefault(layouts[name][0].stack, []).append(name)

    def count_in(tables: list[str]) -> _IdCounts:
        sizes = (configs[name].vocabulary_size for name in tables)  # each table has row numbers of its own
        starts = dict(zip(tables, itertools.accumulate(sizes, initial=0), strict=False))
        looked_up = [(path, one.table.name) for path, one in features.items() if one.table.name in starts]
        lookups = [_LookupIds(sample[path], starts[name], layouts[name][0].rotation) for path, name in looked_up]
        return _count(lookups, topology, steps)

    def with_margin(seen: int) -> int:
        return max(1, math.ceil(seen * (1 + margin)))

    sizes = dict[str, TableSize]()
    for name in sorted(configs):
        counts, (layout, (padded_rows, padded_dim)) = count_in([name]), layouts[name]
        slots = optimizers[name].slots if optimizers[name] else ()
        sizes[name] = TableSize(
            table=name,
            stack=layout.stack,
            rows=layout.rows,
            padded_rows=padded_rows,
            dim=layout.dim,
            padded_dim=padded_dim,
            slots=slots,
            max_ids_per_partition=with_margin(counts.ids),
            max_unique_ids_per_partition=with_margin(counts.unique_ids),
            bytes_per_chip=int(padded_rows * padded_dim * _FLOAT_BYTES * (1 + len(slots)) // topology.chips),
        )
    stacks = list[StackSize]()
    for stack in sorted(members):
        tables = members[stack]
        counts, (layout, (_, padded_dim)) = count_in(tables), layouts[tables[0]]
        per_chip = sum(one.table.name in tables for one in features.values()) * topology.batch_size // topology.chips
        stacks.append(
            StackSize(
                stack=stack,
                tables=tuple(tables),
                rows=layout.rows_per_core * layout.sparse_cores,
                dim=padded_dim,
                seen_ids=counts.ids,
                needed_ids=with_margin(counts.ids),
                limit_ids=_limit(configs[name].max_ids_per_partition for name in tables),
                seen_unique_ids=counts.unique_ids,
                needed_unique_ids=with_margin(counts.unique_ids),
                limit_unique_ids=_limit(configs[name].max_unique_ids_per_partition for name in tables),
                ids_per_chip_per_sample=math.ceil(counts.ids_per_chip * (1 + margin) / per_chip),
                bytes_per_chip=sum(sizes[name].bytes_per_chip for name in tables),
            )
        )
    return SizingReport(
        topology=topology,
        margin=margin,
        steps=steps,
        tables=tuple(sizes.values()),
        stacks=tuple(stacks),
        bytes_per_chip=sum(stack.bytes_per_chip for stack in stacks),
        warnings=tuple(line for stack in stacks for line in _warnings(stack, sizes)),
    )


def _check(features: Mapping[str, FeatureConfig], sample: Mapping[str, FeatureIds], topology: Topology) -> int:
    """Check the features and the sample. Returns the number of whole batches of `sample`."""
    for path, config in features.items():
        if path not in sample:
            raise ConfigError(f"sample: has no feature {path!r}; {did_you_mean(path, sample)}")
        if config.max_sequence_length or len(config.output_shape or ()) > 1:
            raise ConfigError(
                f"feature {path!r}: sequences are not counted. Leave the feature out, or give it one id per example."
            )
        ids, rows = sample[path].ids, config.table.vocabulary_size
        if len(ids) and ids.max() >= rows:
            raise ConfigError(
                f"sample: feature {path!r} has id {ids.max()}. Table {config.table.name!r} has {rows} rows. Correct one of them."
            )
    counts = {path: sample[path].count for path in features}
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{path!r} {count}" for path, count in counts.items())
        raise ConfigError(f"sample: features have different numbers of examples: {shown}. Make them equal.")
    steps = next(iter(counts.values())) // topology.batch_size
    if not steps:
        raise ConfigError(
            f"sample: {next(iter(counts.values()))} examples are less than one batch of {topology.batch_size}. Give more examples."
        )
    return steps


def _limit(given: Iterable[int | None]) -> int:
    """Return the limit of a stack as the layer sets it: the sum of its tables', or TensorFlow's default if none has one."""
    limits = list(given)
    return sum(limit or _DEFAULT_LIMIT for limit in limits) if any(limits) else _DEFAULT_LIMIT


def _warnings(stack: StackSize, tables: Mapping[str, TableSize]) -> Iterator[str]:
    for what in ("ids", "unique_ids"):
        seen, needed, limit = (getattr(stack, f"{side}_{what}") for side in ("seen", "needed", "limit"))
        option = f"max_{what}_per_partition"
        remedy = ", ".join(f"{name}: {getattr(tables[name], option)}" for name in stack.tables)
        words = what.replace("_", " ")
        if seen > limit:
            yield (
                f"stack {stack.stack}: in a step of the sample, one SparseCore takes {seen} {words} from another. The limit is "
                f"{limit}, so the step fails. Set {option} of {remedy}."
            )
        elif needed > limit:
            yield (
                f"stack {stack.stack}: {seen} {words} with the margin are {needed}. The limit is {limit}. Set {option} of "
                f"{remedy}."
            )
    if stack.ids_per_chip_per_sample > _MAX_IDS_PER_CHIP_PER_SAMPLE:
        yield (
            f"stack {stack.stack}: a chip needs space for {stack.ids_per_chip_per_sample} ids per example. TensorFlow's default is "
            f"{_MAX_IDS_PER_CHIP_PER_SAMPLE}, so the step fails, or drops ids with allow_id_dropping. Set "
            "max_ids_per_chip_per_sample of the SparseCoreEmbeddingConfig."
        )
