"""The placement of tables on shards, for random tables."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.messages import refused
from tpuembed.errors import ConfigError
from tpuembed.export.sharding.placement import TableLoad, place

LOADS = st.builds(TableLoad, st.integers(1, 10**12), st.integers(0, 100))
TABLES = st.dictionaries(st.text("abcdef", min_size=1, max_size=3), LOADS, min_size=1, max_size=12)


def cost(tables: dict[str, TableLoad], names: Any) -> float:
    chosen, every = [tables[name] for name in names], list(tables.values())
    return max(
        sum(load.bytes for load in chosen) / sum(load.bytes for load in every),
        sum(load.lookups for load in chosen) / max(1, sum(load.lookups for load in every)),
    )


@settings(deadline=None)
@given(TABLES, st.data())
def test_every_table_is_on_one_shard_and_no_shard_is_empty(tables: dict[str, TableLoad], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(tables)))
    found = place(tables, shards=count)
    assert sorted(itertools.chain.from_iterable(shard.tables for shard in found)) == sorted(tables)
    assert len(found) == count
    for shard in found:
        assert shard.tables
        assert shard.bytes == sum(tables[name].bytes for name in shard.tables)
        assert shard.lookups == sum(tables[name].lookups for name in shard.tables)
    assert found == place(dict(reversed(tables.items())), shards=count), "the order of tables changes nothing"


@settings(deadline=None)
@given(TABLES, st.data())
def test_no_shard_has_more_bytes_than_it_may(tables: dict[str, TableLoad], data: st.DataObject) -> None:
    largest, total = max(load.bytes for load in tables.values()), sum(load.bytes for load in tables.values())
    most = data.draw(st.integers(largest, total))
    found = place(tables, shard_bytes=most)
    assert all(shard.bytes <= most for shard in found)
    with pytest.raises(ConfigError, match="is on one shard" if largest > 1 else "shard_bytes"):
        place(tables, shard_bytes=largest - 1)


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(st.sampled_from("abcdefg"), LOADS, min_size=2, max_size=7))
def test_two_shards_are_nearly_as_balanced_as_can_be(tables: dict[str, TableLoad]) -> None:
    found = place(tables, shards=2)
    best = min(
        max(cost(tables, names), cost(tables, set(tables) - set(names)))
        for size in range(1, len(tables))
        for names in itertools.combinations(tables, size)
    )
    assert max(cost(tables, shard.tables) for shard in found) <= 2 * best


def test_wrong_arguments_are_refused() -> None:
    tables = {"a": TableLoad(10, 1), "b": TableLoad(1, 1)}
    wrong: list[dict[str, int]] = [
        {},
        {"shards": 1, "shard_bytes": 1},
        {"shards": 3},
        {"shards": 0},
        {"shard_bytes": 9},
        {"shard_bytes": 0},
    ]
    for options in wrong:
        with refused(ConfigError):
            place(tables, **options)
