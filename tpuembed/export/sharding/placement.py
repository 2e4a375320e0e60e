"""Places tables on shards. A table is on one shard, so that each feature is answered by one server."""

import dataclasses
import itertools
from collections.abc import Mapping

from tpuembed.config.checks import check_count
from tpuembed.errors import ConfigError
from tpuembed.export.formatting import format_bytes

__all__ = ["PlacedShard", "TableLoad", "place"]


@dataclasses.dataclass(frozen=True)
class TableLoad:
    """What a table costs its server.

    Attributes:
        bytes: of its rows, as they are stored.
        lookups: rows that an example looks up in it, of all features together.
    """

    bytes: int
    lookups: int


@dataclasses.dataclass(frozen=True)
class PlacedShard:
    """The tables of one server.

    Attributes:
        tables: their names, sorted.
        bytes: of all of them.
        lookups: of an example.
    """

    tables: tuple[str, ...]
    bytes: int
    lookups: int


def place(
    tables: Mapping[str, TableLoad], *, shards: int | None = None, shard_bytes: int | None = None
) -> tuple[PlacedShard, ...]:
    """Return the tables of each shard, balanced by bytes and by lookups.

    The cost of a table is its share of all bytes or its share of all lookups, whichever is more. Tables are placed one after the
    other, the most costly first, each on the shard that has the least then. The result depends on the arguments alone.

    Args:
        tables: by name.
        shards: how many. Give this, or `shard_bytes`.
        shard_bytes: the most bytes of a shard. There are as few shards as this placement needs.

    Raises:
        ConfigError: there are fewer tables than shards, a table is larger than `shard_bytes`, or an argument is wrong.
    """
    if (shards is None) == (shard_bytes is None):
        raise ConfigError("shards: give either the number of shards, or shard_bytes, the most bytes of one.")
    if shards is not None:
        check_count("shards", shards)
        if shards > len(tables):
            raise ConfigError(
                f"shards: {shards} are more than the {len(tables)} tables, and a table is on one shard. Give fewer."
            )
        return _placed(tables, shards)
    assert shard_bytes is not None
    check_count("shard_bytes", shard_bytes)
    largest = max(tables, key=lambda name: tables[name].bytes)
    if tables[largest].bytes > shard_bytes:
        raise ConfigError(
            f"shard_bytes: table {largest!r} has {format_bytes(tables[largest].bytes)} ({tables[largest].bytes} bytes), more than "
            f"{shard_bytes}. A table is on one shard: give more bytes, or store the table in fewer (storage)."
        )
    least = max(1, -(-sum(load.bytes for load in tables.values()) // shard_bytes))
    placements = (_placed(tables, count) for count in itertools.count(least))
    return next(found for found in placements if all(shard.bytes <= shard_bytes for shard in found))


def _placed(tables: Mapping[str, TableLoad], shards: int) -> tuple[PlacedShard, ...]:
    all_bytes = max(1, sum(load.bytes for load in tables.values()))
    all_lookups = max(1, sum(load.lookups for load in tables.values()))

    def cost(size: int, lookups: int) -> float:
        return max(size / all_bytes, lookups / all_lookups)

    found: list[list[str]] = [[] for _ in range(shards)]
    sums = [(0, 0)] * shards
    for name in sorted(tables, key=lambda name: (-cost(tables[name].bytes, tables[name].lookups), name)):
        load = tables[name]
        after = [(size + load.bytes, lookups + load.lookups) for size, lookups in sums]
        chosen = min(range(shards), key=lambda shard: (bool(found[shard]), cost(*after[shard]), shard))
        found[chosen].append(name)
        sums[chosen] = after[chosen]
    return tuple(PlacedShard(tuple(sorted(names)), *both) for names, both in zip(found, sums, strict=True))
