"""Places tables on shards. A table is on one shard, so that each feature is answered by one server, or its rows are split."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from tpuembed.config.checks import check_count, did_you_mean
from tpuembed.errors import ConfigError, UnknownTableError
from tpuembed.export.formatting import format_bytes

__all__ = ["PlacedShard", "TableLoad", "place", "weighed"]

_MOST_SHARDS: Final = 1024
"""Each is a server that every request calls."""


@dataclasses.dataclass(frozen=True)
class TableLoad:
    """What a table costs its server.

    Attributes:
        bytes: of its rows, as they are stored.
        lookups: rows that an example looks up in it, of all features together.
        rows: how many it has.
        has_names: whether a feature takes names of its rows, which are then on one shard.
    """

    bytes: int
    lookups: int
    rows: int = 1
    has_names: bool = False


@dataclasses.dataclass(frozen=True)
class PlacedShard:
    """The tables of one server.

    Attributes:
        tables: their names, sorted.
        bytes: of all of them.
        lookups: of an example.
        rows: the rows [start, stop) that it has of a table whose rows are split, by table.
    """

    tables: tuple[str, ...]
    bytes: int
    lookups: int
    rows: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Part:
    """Rows [start, stop) of a table, or all of them if `rows` is None. Of `lookups`, a part has its share."""

    table: str
    rows: tuple[int, int] | None
    bytes: int
    lookups: int


def place(
    tables: Mapping[str, TableLoad],
    *,
    shards: int | None = None,
    shard_bytes: int | None = None,
    split: Mapping[str, int] | None = None,
) -> tuple[PlacedShard, ...]:
    """Return the tables of each shard, balanced by bytes and by lookups.

    The cost of a table is its share of all bytes or its share of all lookups, whichever is more. Tables are placed one after the
    other, the most costly first, each on the shard that has the least then. The result depends on the arguments alone.

    The rows of a table that is larger than `shard_bytes` are split into as few parts as fit. A shard has one part of a table.

    Args:
        tables: by name.
        shards: how many. Give this, or `shard_bytes`.
        shard_bytes: the most bytes of a shard. There are as few shards as this placement needs.
        split: the number of parts of a table whose rows are split, by table.

    Raises:
        ConfigError: there are fewer tables and parts than shards, or more parts than shards; a table that cannot be split is
            larger than `shard_bytes`, or a part is; there are more than 1,024 shards or parts; or an argument is wrong.
        UnknownTableError: `split` names another table.
    """
    if (shards is None) == (shard_bytes is None):
        raise ConfigError("shards: give either the number of shards, or shard_bytes, the most bytes of one.")
    counts = {name: _parts(name, tables, count) for name, count in (split or {}).items()}
    if shard_bytes is not None:
        check_count("shard_bytes", shard_bytes)
        counts = {name: _parts_within(name, load, shard_bytes, counts.get(name)) for name, load in tables.items()}
        all_bytes = sum(load.bytes for load in tables.values())
        _check_supported(shard_bytes, max(-(-all_bytes // shard_bytes), *counts.values()), all_bytes)
    items = [part for name, load in tables.items() for part in _split(name, load, counts.get(name, 1))]
    most = max(counts, key=lambda name: (counts[name], name), default="")
    if shard_bytes is not None:
        for count in range(max(-(-all_bytes // shard_bytes), counts[most]), min(len(items), _MOST_SHARDS) + 1):
            if (found := _placed(items, count, tables, shard_bytes)) is not None:
                return found
        _check_supported(shard_bytes, _MOST_SHARDS + 1, all_bytes)
    check_count("shards", shards, maximum=_MOST_SHARDS)
    assert shards is not None
    if shards > len(items):
        raise ConfigError(
            f"shards: {shards} are more than the {len(items)} tables and parts of tables. Give fewer, or split a table."
        )
    if counts and counts[most] > shards:
        raise ConfigError(
            f"split: table {most!r} has {counts[most]} parts, more than the {shards} shards, and a shard has one part of a table. "
            "Give fewer parts, or more shards."
        )
    placed = _placed(items, shards, tables)
    assert placed is not None
    return placed


def _check_supported(shard_bytes: int, shards: int, all_bytes: int) -> None:
    """Raise ConfigError if `shard_bytes` makes too many shards of tables with `all_bytes`."""
    if shards > _MOST_SHARDS:
        larger = format_bytes(all_bytes // 8).replace(" ", "")
        raise ConfigError(
            f"shard_bytes={shard_bytes:,} would make about {shards:,} shards of {format_bytes(all_bytes)} in all, and at most "
            f"{_MOST_SHARDS:,} are supported. Give a larger size, such as {larger}."
        )


def _parts(name: str, tables: Mapping[str, TableLoad], count: Any) -> int:
    if name not in tables:
        raise UnknownTableError(f"split: table {name!r} is not exported; {did_you_mean(name, tables)}")
    check_count(f"split: parts of table {name!r}", count, 2, _MOST_SHARDS)
    if tables[name].has_names:
        raise ConfigError(
            f"split: features take names of table {name!r}, whose rows are then on one shard. Leave it out, or serve row numbers "
            "(takes_rows)."
        )
    if count > tables[name].rows:
        raise ConfigError(
            f"split: table {name!r} has {tables[name].rows} rows, fewer than the {count} parts. Give fewer parts."
        )
    return int(count)


def _parts_within(name: str, load: TableLoad, shard_bytes: int, count: int | None) -> int:
    """Return the number of parts of a table, each of at most `shard_bytes`. `count` is given for those that are split anyway."""
    if load.bytes <= shard_bytes and count is None:
        return 1
    row_bytes = -(-load.bytes // load.rows)
    part = row_bytes * -(-load.rows // count) if count else row_bytes
    if count is None and load.has_names:
        raise ConfigError(
            f"shard_bytes: table {name!r} has {format_bytes(load.bytes)} ({load.bytes} bytes), more than {shard_bytes}, and "
            "features take names of its rows, which are then on one shard. Give more bytes, or store the table in fewer (storage)."
        )
    if part > shard_bytes:
        what = f"each of the {count} parts" if count else "a row"
        raise ConfigError(
            f"shard_bytes: {what} of table {name!r} has {part} bytes, more than {shard_bytes}. Give more bytes"
            f"{', or more parts' if count else ''}."
        )
    return count or -(-load.rows // (shard_bytes // row_bytes))


def weighed(
    shards: Iterable[Mapping[str, tuple[int, int] | None]], tables: Mapping[str, TableLoad]
) -> tuple[PlacedShard, ...]:
    """Return shards with their loads.

    Args:
        shards: for each the rows [start, stop) that it has of a table, by table; None for all of them.
        tables: by name.
    """
    shards = list(shards)
    counts = Counter(name for shard in shards for name in shard)
    found = []
    for shard in shards:
        parts = [_part(name, tables[name], counts[name], rows) for name, rows in sorted(shard.items())]
        found.append(
            PlacedShard(
                tables=tuple(part.table for part in parts),
                bytes=sum(part.bytes for part in parts),
                lookups=sum(part.lookups for part in parts),
                rows={part.table: part.rows for part in parts if part.rows is not None},
            )
        )
    return tuple(found)


def _split(name: str, load: TableLoad, count: int) -> list[_Part]:
    bounds = [load.rows * number // count for number in range(count + 1)]
    return [_part(name, load, count, None if count == 1 else rows) for rows in itertools.pairwise(bounds)]


def _part(name: str, load: TableLoad, count: int, rows: tuple[int, int] | None) -> _Part:
    """Return one of `count` parts of a table."""
    start, stop = rows or (0, load.rows)
    return _Part(name, rows, load.bytes * (stop - start) // load.rows, -(-load.lookups // count))


def _placed(
    parts: list[_Part], shards: int, tables: Mapping[str, TableLoad], most_bytes: int | None = None
) -> tuple[PlacedShard, ...] | None:
    """Return the placement; None if a shard has more than `most_bytes` then."""
    all_bytes = max(1, sum(part.bytes for part in parts))
    all_lookups = max(1, sum(part.lookups for part in parts))
    sums_bytes, sums_lookups = np.zeros(shards, np.int64), np.zeros(shards, np.int64)

    def cost(part: _Part) -> float:
        return max(part.bytes / all_bytes, part.lookups / all_lookups)

    found: list[dict[str, tuple[int, int] | None]] = [{} for _ in range(shards)]
    has = {part.table: np.zeros(shards, bool) for part in parts}
    ordered = sorted(parts, key=lambda part: (-cost(part), part.table, part.rows or (0, 0)))
    for number, part in enumerate(ordered):
        chosen = number  # while one is empty
        if number >= shards:
            after = np.maximum((sums_bytes + part.bytes) / all_bytes, (sums_lookups + part.lookups) / all_lookups)
            after[has[part.table]] = np.inf
            chosen = int(after.argmin())
        found[chosen][part.table] = part.rows
        has[part.table][chosen] = True
        sums_bytes[chosen] += part.bytes
        sums_lookups[chosen] += part.lookups
        if most_bytes is not None and sums_bytes[chosen] > most_bytes:
            return None
    return weighed(found, tables)
