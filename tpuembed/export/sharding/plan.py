"""The plan of an export for several servers: which tables and features each one has, and what is in front of them."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from tpuembed.export.formatting import format_bytes

__all__ = ["FRONT", "FrontEntry", "ShardEntry", "ShardingPlan", "SplitFeature"]

FRONT: Final = "front"
"""The name of the front's MODEL_DIR."""


@dataclasses.dataclass(frozen=True)
class ShardEntry:
    """One shard.

    Attributes:
        name: of its MODEL_DIR and its model.
        tables, features: those that it has.
        bytes: of its tables, as they are stored.
        lookups: rows that an example looks up in it.
        rows: the rows [start, stop) that it has of a table whose rows are split, by table.
    """

    name: str
    tables: tuple[str, ...]
    features: tuple[str, ...]
    bytes: int
    lookups: int
    rows: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class FrontEntry:
    """The dense part of a whole model, in front of the shards.

    Attributes:
        name: of its MODEL_DIR.
        features: whose activations it takes.
        tables: those that it reads whole itself.
        bytes: of its tables, as they are stored.
    """

    name: str
    features: tuple[str, ...]
    tables: tuple[str, ...]
    bytes: int


@dataclasses.dataclass(frozen=True)
class SplitFeature:
    """A feature of a table whose rows are split: the answers of its shards add up.

    Its shards take ids of other parts as zeros, and so ids outside of the table. The server in front of them follows
    `out_of_vocabulary`.

    Attributes:
        table: its table, of `rows` rows on all shards together.
        out_of_vocabulary, input, max_sequence_length, weighted: as in FeatureEntry.
        drops_negative: whether negative ids of a list are dropped like padding. They are ids outside of the table otherwise.
    """

    table: str
    rows: int
    out_of_vocabulary: str | int
    input: str
    max_sequence_length: int
    drops_negative: bool
    weighted: bool


@dataclasses.dataclass(frozen=True)
class ShardingPlan:
    """Which shard has what.

    Attributes:
        shards: in their order.
        padding: the value that fills up lists in requests, by input. Empty with a front, whose manifest has it.
        front: of a whole model; None for lookups.
        split: the features of tables whose rows are split, by name.
    """

    shards: tuple[ShardEntry, ...]
    padding: Mapping[str, int | str]
    front: FrontEntry | None = None
    split: Mapping[str, SplitFeature] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return dataclasses.asdict(self)

    def describe(self) -> str:
        """Return the plan as lines of text."""
        lines = [f"{len(self.shards)} shards"]
        for shard in self.shards:
            parts = {name: f" rows {start} to {stop}" for name, (start, stop) in shard.rows.items()}
            tables = ", ".join(f"{name}{parts.get(name, '')}" for name in shard.tables)
            lines.append(
                f"  {shard.name}: {format_bytes(shard.bytes)}, {shard.lookups} lookups of an example, tables {tables}"
            )
        if self.front is not None:
            tables = f", tables {', '.join(self.front.tables)}" if self.front.tables else ""
            lines.append(
                f"  {self.front.name}: {format_bytes(self.front.bytes)}, {len(self.front.features)} activations{tables}"
            )
        return "\n".join(lines)
