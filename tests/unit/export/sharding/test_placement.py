"""The placement of tables on shards, for random tables."""

import itertools
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.messages import refused
from tpuembed.errors import ConfigError, UnknownTableError
from tpuembed.export.sharding.placement import PlacedShard, TableLoad, place, weighed

pytestmark = pytest.mark.nightly

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
    with pytest.raises(ConfigError, match="a row of table" if largest > 1 else "shard_bytes"):
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


ROW_BYTES = st.integers(1, 4000)
SPLITTABLE = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=3),
    st.builds(
        lambda row, rows, lookups: TableLoad(row * rows, lookups, rows),
        ROW_BYTES,
        st.integers(1, 5000),
        st.integers(0, 9),
    ),
    min_size=1,
    max_size=8,
)


def check_rows(tables: dict[str, TableLoad], found: tuple[PlacedShard, ...]) -> dict[str, list[tuple[int, int]]]:
    """Check that every row is on one shard, and return the parts of the tables that are split."""
    parts: dict[str, list[tuple[int, int]]] = {}
    for name, load in tables.items():
        rows = [shard.rows.get(name, (0, load.rows)) for shard in found if name in shard.tables]
        covered = sorted(rows)
        assert [start for start, _ in covered] == [0, *(stop for _, stop in covered[:-1])]
        assert covered[-1][1] == load.rows
        if len(rows) > 1:
            parts[name] = covered
            sizes = [stop - start for start, stop in covered]
            assert max(sizes) - min(sizes) <= 1, "rows are balanced"
        else:
            assert not any(name in shard.rows for shard in found)
    for shard in found:
        assert shard.tables
        bounds = {name: shard.rows.get(name, (0, tables[name].rows)) for name in shard.tables}
        assert shard.bytes == sum(
            tables[name].bytes // tables[name].rows * (stop - start) for name, (start, stop) in bounds.items()
        )
    return parts


@settings(deadline=None)
@given(SPLITTABLE, st.data())
def test_only_tables_that_are_larger_than_a_shard_are_split(tables: dict[str, TableLoad], data: st.DataObject) -> None:
    row, total = max(load.bytes // load.rows for load in tables.values()), sum(load.bytes for load in tables.values())
    most = data.draw(st.integers(max(row, total // 50), total))
    found = place(tables, shard_bytes=most)
    assert all(shard.bytes <= most for shard in found)
    assert found == place(dict(reversed(tables.items())), shard_bytes=most), "the order of tables changes nothing"
    parts = check_rows(tables, found)
    assert parts.keys() == {name for name, load in tables.items() if load.bytes > most}
    for name, rows in parts.items():
        most_rows = most // (tables[name].bytes // tables[name].rows)
        assert len(rows) == -(-tables[name].rows // most_rows), "in as few parts as fit"


@settings(deadline=None)
@given(SPLITTABLE, st.data())
def test_a_table_is_split_as_often_as_asked(tables: dict[str, TableLoad], data: st.DataObject) -> None:
    names = sorted(name for name, load in tables.items() if load.rows > 1)
    split = {
        name: data.draw(st.integers(2, min(6, tables[name].rows)))
        for name in (data.draw(st.lists(st.sampled_from(names), unique=True)) if names else [])
    }
    count = data.draw(st.integers(max(split.values(), default=1), sum(split.get(name, 1) for name in tables)))
    found = place(tables, shards=count, split=split)
    assert len(found) == count
    assert found == place(dict(reversed(tables.items())), shards=count, split=split)
    assert {name: len(rows) for name, rows in check_rows(tables, found).items()} == split
    again = weighed([{name: shard.rows.get(name) for name in shard.tables} for shard in found], tables)
    assert again == found


def test_parts_of_one_table_balance_the_bytes() -> None:
    tables = {"large": TableLoad(1000, 10, 100), "small": TableLoad(200, 1, 20)}
    found = place(tables, shards=4, split={"large": 4})
    assert [shard.rows["large"] for shard in found] == [(0, 25), (25, 50), (50, 75), (75, 100)]
    assert sorted(shard.bytes for shard in found) == [250, 250, 250, 450]
    assert [shard.lookups for shard in found] == [4, 3, 3, 3], "a part has its share of the lookups, rounded up"


def test_more_shards_than_are_supported_are_refused_at_once() -> None:
    tables = {"a": TableLoad(500_000, 1, 5000), "b": TableLoad(250_000, 9, 2500)}
    wrong: list[dict[str, Any]] = [
        {"shard_bytes": 100},
        {"shard_bytes": 10**5, "split": {"a": 1025}},
        {"shards": 1025},
        {"shards": 1025, "split": {"a": 1025}},
        {"shards": 10, "split": {"b": 1025}},
    ]
    for options in wrong:
        with refused(ConfigError):
            place(tables, **options)
    with refused(ConfigError):
        place({"large": TableLoad(10**15, 1, 10**12)}, shard_bytes=10**3)
    many = {f"{number}": TableLoad(100, 1) for number in range(1025)}
    with refused(ConfigError):  # tables of 100 bytes, of which one fits
        place(many, shard_bytes=150)


@pytest.mark.parametrize("options", [{"shard_bytes": 1_100_000}, {"shards": 1024}], ids=str)
def test_as_many_shards_as_are_supported_are_placed_in_seconds(options: dict[str, Any]) -> None:
    rows = {f"table {number}": 10_000 + 3000 * number for number in range(80)}
    tables = {name: TableLoad(100 * count, 1 + count % 40, count) for name, count in rows.items()}
    parts = {} if "shard_bytes" in options else dict.fromkeys(tables, 100)
    start = time.monotonic()
    found = place(tables, **options, split=parts)
    assert time.monotonic() - start < 10
    assert 900 < len(found) <= 1024


def test_wrong_arguments_are_refused() -> None:
    tables = {"a": TableLoad(10, 1, 5), "b": TableLoad(1, 1), "named": TableLoad(9, 1, 9, has_names=True)}
    wrong: list[dict[str, Any]] = [
        {},
        {"shards": 1, "shard_bytes": 1},
        {"shards": 4},
        {"shards": 0},
        {"shard_bytes": 8},
        {"shard_bytes": 1},
        {"shard_bytes": 0},
        {"shards": 2, "split": {"a": 3}},
        {"shards": 2, "split": {"a": 1}},
        {"shards": 2, "split": {"b": 2}},
        {"shards": 2, "split": {"named": 2}},
        {"shards": 2, "split": {"c": 2}},
        {"shard_bytes": 9, "split": {"a": 2, "named": 2}},
        {"shard_bytes": 4, "split": {"a": 2}},
    ]
    for options in wrong:
        with refused((ConfigError, UnknownTableError)):
            place(tables, **options)
