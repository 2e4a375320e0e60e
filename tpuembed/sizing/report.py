"""The limits, padding and memory of tables on SparseCores."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from tpuembed.backends.tf_config import features_to_tf, resolve_optimizer
from tpuembed.backends.tpu.tf_stacks import stack_tables
from tpuembed.config import FeatureConfig, TableConfig
from tpuembed.config.checks import check_number, did_you_mean
from tpuembed.errors import ConfigError
from tpuembed.sizing.counting import Counts, FeatureIds, Lookup, Topology, count

__all__ = ["SizingReport", "StackSize", "TableSize", "estimate"]

_DEFAULT_LIMIT = 256  # TensorFlow's default for a stack without configured limits
_FLOAT_BYTES = 4
_MOST_MARGIN = 1000


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
    plan = _Plan.of(features, sample, topology, optimizer, stacking)
    stacks = tuple(plan.stack_size(name, steps, margin) for name in sorted(plan.by_stack()))
    tables = tuple(plan.table_size(name, steps, margin) for name in sorted(plan.tables))
    warnings = [line for stack in stacks for line in _warnings(stack, {table.table: table for table in tables})]
    return SizingReport(
        topology, margin, steps, tables, stacks, sum(stack.bytes_per_chip for stack in stacks), tuple(warnings)
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


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Tables, their layouts in TensorFlow's stacks, and the ids that look them up."""

    features: Mapping[str, FeatureConfig]
    sample: Mapping[str, FeatureIds]
    topology: Topology
    tables: Mapping[str, TableConfig]
    slots: Mapping[str, tuple[str, ...]]
    layouts: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        features: Mapping[str, FeatureConfig],
        sample: Mapping[str, FeatureIds],
        topology: Topology,
        optimizer: Any,
        stacking: bool,
    ) -> "_Plan":
        default = None if optimizer is None else resolve_optimizer(optimizer)
        trained = {path: _trained(config, default, topology) for path, config in features.items()}
        tables = {config.table.name: config.table for config in trained.values()}
        optimizers = {name: table.optimizer and resolve_optimizer(table.optimizer) for name, table in tables.items()}
        layouts = stack_tables(
            features_to_tf(list(trained.values())), topology.chips, topology.sparse_cores_per_chip, stacking
        )
        slots = {name: found.slots if found else () for name, found in optimizers.items()}
        return cls(features, sample, topology, tables, slots, layouts)

    def by_stack(self) -> dict[str, list[str]]:
        stacks: dict[str, list[str]] = {}
        for table, (layout, _) in self.layouts.items():
            stacks.setdefault(layout.stack, []).append(table)
        return {stack: sorted(tables) for stack, tables in stacks.items()}

    def _lookups(self, tables: list[str]) -> list[Lookup]:
        """Return the lookups of `tables`. Each table gets its own range of row numbers."""
        starts, next_row = {}, 0
        for table in tables:
            starts[table], next_row = next_row, next_row + self.tables[table].vocabulary_size
        return [
            Lookup(self.sample[path], starts[config.table.name], self.layouts[config.table.name][0].rotation)
            for path, config in self.features.items()
            if config.table.name in starts
        ]

    def _count(self, tables: list[str], steps: int) -> Counts:
        return count(self._lookups(tables), self.topology, steps)

    def _bytes(self, table: str) -> int:
        rows, dim = self.layouts[table][1]
        return int(rows * dim * _FLOAT_BYTES * (1 + len(self.slots[table])) // self.topology.chips)

    def table_size(self, table: str, steps: int, margin: float) -> TableSize:
        counts, (layout, (padded_rows, padded_dim)) = self._count([table], steps), self.layouts[table]
        return TableSize(
            table=table,
            stack=layout.stack,
            rows=layout.rows,
            padded_rows=padded_rows,
            dim=layout.dim,
            padded_dim=padded_dim,
            slots=self.slots[table],
            max_ids_per_partition=_with_margin(counts.ids, margin),
            max_unique_ids_per_partition=_with_margin(counts.unique_ids, margin),
            bytes_per_chip=self._bytes(table),
        )

    def stack_size(self, stack: str, steps: int, margin: float) -> StackSize:
        tables = self.by_stack()[stack]
        counts, layout = self._count(tables, steps), self.layouts[tables[0]][0]
        samples = sum(config.table.name in tables for config in self.features.values())
        per_chip = samples * self.topology.batch_size // self.topology.chips
        return StackSize(
            stack=stack,
            tables=tuple(tables),
            rows=layout.rows_per_core * layout.sparse_cores,
            dim=self.layouts[tables[0]][1][1],
            seen_ids=counts.ids,
            needed_ids=_with_margin(counts.ids, margin),
            limit_ids=self._limit(tables, "max_ids_per_partition"),
            seen_unique_ids=counts.unique_ids,
            needed_unique_ids=_with_margin(counts.unique_ids, margin),
            limit_unique_ids=self._limit(tables, "max_unique_ids_per_partition"),
            ids_per_chip_per_sample=math.ceil(counts.ids_per_chip * (1 + margin) / per_chip),
            bytes_per_chip=sum(self._bytes(table) for table in tables),
        )

    def _limit(self, tables: list[str], field: str) -> int:
        """Return the limit of a stack as the layer sets it: the sum of the tables' limits, or TensorFlow's default if
        no table has one."""
        given = [getattr(self.tables[table], field) for table in tables]
        return _DEFAULT_LIMIT if not any(given) else sum(limit or _DEFAULT_LIMIT for limit in given)


def _trained(config: FeatureConfig, default: Any, topology: Topology) -> FeatureConfig:
    """Return `config` with its table's optimizer filled in, and the output_shape of one chip."""
    optimizer = default if config.table.optimizer is None else config.table.optimizer
    table = dataclasses.replace(config.table, optimizer=optimizer)
    return dataclasses.replace(config, table=table, output_shape=(topology.batch_size // topology.chips,))


def _with_margin(seen: int, margin: float) -> int:
    return max(1, math.ceil(seen * (1 + margin)))


_MAX_IDS_PER_CHIP_PER_SAMPLE = 64  # TensorFlow's default


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
