"""Growth, admission and eviction of `Vocabulary`, against a dictionary that does the same one name at a time."""

import collections
import copy
import io
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.messages import refused
from tpuembed.errors import ConfigError
from tpuembed.vocabulary import PADDING, UNKNOWN, Vocabulary, name_arrays
from tpuembed.vocabulary.fingerprint import fingerprints
from tpuembed.vocabulary.index import NONE, Index
from tpuembed.vocabulary.sketch import MOST, Sketch

pytestmark = pytest.mark.nightly

ROOM = 12
BUCKETS = 2


class Reference:
    """What a dictionary does, one name at a time."""

    def __init__(self) -> None:
        self.rows: dict[Any, int] = {}
        self.free: list[int] = []
        self.used = BUCKETS
        self.counts = collections.Counter[Any]()
        self.last_seen: dict[Any, int] = {}
        self.update = 0
        self.waiting = collections.Counter[Any]()

    def give(self, name: Any, room: int) -> None:
        if self.free and self.free[0] < room:
            self.rows[name] = self.free.pop(0)
        elif self.used < room:
            self.rows[name] = self.used
            self.used += 1
        else:
            return
        self.counts[name] = self.waiting.pop(name, 0)
        self.last_seen[name] = self.update

    def grow(self, names: list[Any], update: int, min_count: int) -> None:
        times = collections.Counter(names)
        is_full = not (self.free or self.used < ROOM)
        for name in times:
            if name not in self.rows:
                if min_count > 1 and self.waiting[name] + times[name] < min_count:
                    self.waiting[name] += 0 if is_full else times[name]
                else:
                    self.give(name, ROOM)
        if not self.update and update > 1 and not any(self.counts.values()):
            self.last_seen = {name: max(seen, update - 1) for name, seen in self.last_seen.items()}
        self.update = max(self.update, update)
        for name, count in times.items():
            if name in self.rows:
                self.counts[name] += count
                self.last_seen[name] = max(self.last_seen[name], update)

    def evict(self, not_seen_for: int | None, min_count: int | None) -> list[int]:
        old = [
            name
            for name in self.rows
            if (not_seen_for is None or self.last_seen[name] <= self.update - not_seen_for)
            and (min_count is None or self.counts[name] < min_count)
        ]
        rows = sorted(self.rows.pop(name) for name in old)
        self.free = sorted([*self.free, *rows])
        self.waiting.clear()
        for name in old:
            del self.counts[name], self.last_seen[name]
        return rows


def array_of(names: list[Any], dtype: str) -> Any:
    return np.array(names, object if dtype == "string" else np.int64)


def check(mine: Vocabulary, expected: Reference, others: list[Any]) -> None:
    names, dtype = list(expected.rows), mine.dtype
    assert mine.lookup(array_of(names, dtype)).tolist() == list(expected.rows.values())
    assert len(mine) == len(names)
    assert mine.rows == expected.used
    assert mine.free_rows.tolist() == expected.free
    by_row = {row: name for name, row in expected.rows.items()}
    assert len(by_row) == len(names)  # no two names on one row
    assert mine.names(range(mine.rows)) == [by_row.get(row) for row in range(mine.rows)]
    unknown = [name for name in others if name not in expected.rows]
    assert (mine.lookup(array_of(unknown, dtype)) < BUCKETS).all()
    assert mine.counts.tolist() == [expected.counts[by_row[row]] if row in by_row else 0 for row in range(mine.rows)]
    assert mine.last_seen.tolist() == [
        expected.last_seen[by_row[row]] if row in by_row else -1 for row in range(mine.rows)
    ]
    taken = mine.numbers[mine.numbers != NONE]
    assert sorted((taken + BUCKETS).tolist()) == sorted(expected.rows.values())


@pytest.mark.parametrize("min_count", [1, 3])
@pytest.mark.parametrize("dtype", ["string", "int64"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_life_keeps_each_name_on_its_own_row(dtype: Any, min_count: int, data: st.DataObject) -> None:
    some = [f"{n}".encode() * n for n in range(20)] if dtype == "string" else [*range(-10, 9), 2**63 - 1]
    lists = st.lists(st.sampled_from(some), max_size=12)
    mine = Vocabulary(dtype=dtype, oov_buckets=BUCKETS, grows=True, min_count=min_count)
    expected, update = Reference(), 0
    for step in data.draw(st.lists(st.sampled_from(["add", "grow", "grow", "evict", "save", "assign"]))):
        if step == "add":
            names = data.draw(lists)
            for name in dict.fromkeys(names):
                if name not in expected.rows:
                    expected.waiting.pop(name, 0)
                    expected.give(name, 2**31)
            assert mine.add(array_of(names, dtype)).tolist() == [expected.rows[name] for name in names]
            expected.waiting.clear()
            mine._names._sketch = None
        elif step == "grow":
            names, update = data.draw(lists), update + data.draw(st.integers(0, 3))
            expected.grow(names, update, min_count)
            rows = mine.grow(array_of(names, dtype), room=ROOM, update=update)
            known = [name in expected.rows for name in names]
            assert rows[known].tolist() == [expected.rows[name] for name in names if name in expected.rows]
            assert (rows[np.logical_not(known)] < BUCKETS).all()
        elif step == "evict":
            age, least = data.draw(st.sampled_from([(1, None), (3, None), (None, 2), (2, 4)]))
            assert mine.evict(not_seen_for=age, min_count=least).tolist() == expected.evict(age, least)
        elif step == "save":
            mine = Vocabulary.from_bytes(mine.to_bytes())
            expected.waiting.clear()
        else:
            other = Vocabulary(["x"] if dtype == "string" else [77], **mine.options())
            other.assign(mine)
            mine.add(array_of([b"later"] if dtype == "string" else [99], dtype))  # the other does not have it
            mine = other
            expected.waiting.clear()
        check(mine, expected, some)


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sets(st.integers(-5, 60))), max_size=12))
def test_an_index_with_removals_is_a_dictionary(steps: list[tuple[bool, set[int]]]) -> None:
    index, expected = Index(), dict[int, int]()
    for is_removal, keys in steps:
        some = [key for key in keys if (key in expected) == is_removal]
        if is_removal:
            index.remove(np.array(some, np.int64))
            expected = {key: row for key, row in expected.items() if key not in some}
        else:
            rows = np.arange(1000, 1000 + len(some), dtype=np.int32)
            index.add(np.array(some, np.int64), rows)
            expected |= dict(zip(some, rows.tolist(), strict=True))
        asked = np.arange(-10, 70)
        assert index.find(asked).tolist() == [expected.get(key, NONE) for key in asked.tolist()]
        assert len(index) == len(expected)


def test_an_index_lives_through_many_removals() -> None:
    random, expected, index = np.random.default_rng(0), dict[int, int](), Index()
    for turn in range(30):
        keys = [key for key in np.unique(random.integers(0, 2**62, 3000)).tolist() if key not in expected]
        index.add(np.array(keys), np.arange(len(keys), dtype=np.int32) + turn)
        expected |= {key: turn + place for place, key in enumerate(keys)}
        gone = random.permutation(list(expected))[: len(expected) // 2]
        index.remove(gone)
        for key in gone.tolist():
            del expected[key]
        asked = np.concatenate([np.fromiter(expected, np.int64), gone])
        assert index.find(asked).tolist() == [*expected.values(), *[NONE] * len(gone)]
    assert index.keys.size < 3 * 6000


@pytest.mark.parametrize("factor", [2, 1024, 2**40, 3 * 5 * 7, -1, 6151])
def test_keys_that_are_multiples_fill_a_table(factor: int) -> None:
    keys = np.arange(20_000) * np.int64(factor)
    index = Index(keys)
    np.testing.assert_array_equal(index.find(keys), np.arange(len(keys)))
    assert len(keys) > 0.7 * index.keys.size


def test_keys_that_were_made_to_collide_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = np.arange(40) * np.int64(np.lcm.reduce(np.arange(8, 24)))
    assert (Index(keys).find(keys) == np.arange(40)).all()
    index = Index()
    monkeypatch.setattr(index, "_first", lambda keys: np.zeros(len(keys), np.int64))
    monkeypatch.setattr(index, "_second", lambda keys: np.ones(len(keys), np.int64))
    with refused(ConfigError):
        index.add(np.arange(40) * np.int64(2**55), np.arange(40, dtype=np.int32))


def test_names_get_rows_while_there_is_room() -> None:
    mine = Vocabulary(["a"], grows=True)
    assert mine.grow(["b", "a", "c", "b", "d"], room=3, update=1).tolist() == [1, 0, 2, 1, UNKNOWN]
    assert mine.grow([["d", ""], ["a", ""]], room=9, update=2, padded=True).tolist() == [[3, PADDING], [0, PADDING]]
    assert mine.get_vocabulary() == ["a", "b", "c", "d"]
    assert mine.counts.tolist() == [2, 2, 1, 1]
    assert mine.last_seen.tolist() == [2, 1, 1, 2]
    assert mine.evict(not_seen_for=1).tolist() == [1, 2]
    assert mine.get_vocabulary() == ["a", None, None, "d"]
    assert mine.grow(["e"], room=1, update=3).tolist() == [UNKNOWN]
    assert mine.grow(["e", "f", "b", "g"], room=5, update=3).tolist() == [1, 2, 4, UNKNOWN]


def test_padding_is_no_name() -> None:
    numbers = Vocabulary(dtype="int64", grows=True)
    assert numbers.grow([[5, -1], [-1, -1]], room=9, update=1, padded=True).tolist() == [[0, -1], [-1, -1]]
    assert numbers.get_vocabulary() == [5]
    assert numbers.grow([-1], room=9, update=1).tolist() == [1]
    assert numbers.grow([-1], room=9, update=2, padded=True).tolist() == [PADDING]
    assert numbers.counts.tolist() == [1, 1]


def test_a_name_is_admitted_when_it_was_seen_often_enough() -> None:
    mine = Vocabulary(grows=True, oov_buckets=1, min_count=3)
    assert mine.grow(["a", "a", "b"], room=9, update=1).tolist() == [0, 0, 0]
    assert mine.grow(["b", "a", "c", "c", "c"], room=9, update=2).tolist() == [0, 1, 2, 2, 2]
    assert mine.counts.tolist() == [0, 3, 3]
    assert Vocabulary.from_bytes(mine.to_bytes()).options() == mine.options()
    assert Vocabulary.from_options(mine.options(), "here").min_count == 3
    assert mine.evict(min_count=9).tolist() == [1, 2]
    assert mine.grow(["a", "a"], room=9, update=3).tolist() == [0, 0]  # a new name


def test_rows_that_were_seen_elsewhere() -> None:
    mine = Vocabulary(["a", "b", "c"], oov_buckets=2, grows=True)
    mine.seen([[0, 2], [PADDING, 2], [UNKNOWN, 4]], update=5)
    assert mine.counts.tolist() == [0, 0, 2, 0, 1]
    assert mine.last_seen.tolist() == [-1, -1, 5, 4, 5]
    mine.seen([2], update=3)
    assert mine.last_seen.tolist() == [-1, -1, 5, 4, 5]
    mine.evict(not_seen_for=1)
    mine.seen([3], update=9)  # free
    assert mine.counts.tolist() == [0, 0, 3, 0, 1]


def test_counts_end_at_their_highest() -> None:
    mine = Vocabulary(["a"], grows=True)
    mine._names.sightings.counts[:] = 2**32 - 2
    mine.grow(["a"] * 5, room=1, update=1)
    assert mine.counts.tolist() == [2**32 - 1]


@pytest.mark.parametrize("grows", [True, False])
@pytest.mark.parametrize("dtype", ["string", "int64"])
def test_names_are_removed_by_themselves(dtype: Any, grows: bool) -> None:
    names: list[Any] = [b"", b"ann", b"\xff", b"bob"] if dtype == "string" else [-1, 0, -(2**63), 7]
    new: list[Any] = [b"new", b"newer"] if dtype == "string" else [100, 101]
    mine = Vocabulary(names, dtype=dtype, oov_buckets=BUCKETS, grows=grows)
    with refused(ConfigError, match="among its 4 names"):
        mine.remove([names[1], new[0]])
    assert len(mine) == 4
    assert mine.remove([[names[2], names[0]], [names[0], names[0]]]).tolist() == [BUCKETS, BUCKETS + 2]
    assert (len(mine), mine.rows, mine.free_rows.tolist()) == (2, BUCKETS + 4, [BUCKETS, BUCKETS + 2])
    assert mine.names(range(mine.rows)) == [None, None, None, names[1], None, names[3]]
    assert not mine.has(names[0])
    assert Vocabulary.from_bytes(mine.to_bytes()).same_names(mine)
    assert mine.add([*new, names[0]]).tolist() == [BUCKETS, BUCKETS + 2, BUCKETS + 4]
    assert mine.names(range(BUCKETS, mine.rows)) == [new[0], names[1], new[1], names[3], names[0]]
    assert mine.remove(names[:0]).tolist() == []


def test_a_name_that_is_added_in_mid_training_is_not_old() -> None:
    mine = Vocabulary(["a"], grows=True)
    mine.grow(["a"], room=5, update=100)
    mine.add(["b"])
    assert mine.evict(not_seen_for=1).tolist() == []
    assert mine.evict(not_seen_for=1, update=101).tolist() == [0, 1]


@pytest.mark.parametrize("way", ["bytes", "assign", "file"])
def test_names_that_were_not_counted_before_are_not_old(way: str, tmp_path: Path) -> None:
    """A checkpoint of a fixed vocabulary, of update 20, is restored into one that grows."""
    fixed, mine = Vocabulary(["a", "b"]), Vocabulary(grows=True)
    if way == "file":
        (tmp_path / "names").write_bytes(b"a\nb\n")
        mine = Vocabulary.from_file(tmp_path / "names", grows=True)
    else:
        mine.assign(Vocabulary.from_bytes(fixed.to_bytes()) if way == "bytes" else fixed)
    saved = Vocabulary.from_bytes(mine.to_bytes())
    for each in (mine, saved):
        assert each.evict(not_seen_for=1, update=20).tolist() == []
        each.grow(["a", "c"], room=9, update=21)
        assert each.evict(not_seen_for=10).tolist() == []
        assert each.last_seen.tolist() == [21, 20, 21]
        for update in range(22, 31):
            each.grow(["a", "c"], room=9, update=update)
        assert each.evict(not_seen_for=10).tolist() == [1]


def test_the_bytes_of_evicted_names_are_given_back() -> None:
    mine = Vocabulary(grows=True)
    for turn in range(50):
        names = [f"{turn} {index}" + "x" * 500 for index in range(20)]
        assert mine.grow(names, room=20, update=turn).tolist() == list(range(20))
        assert len(mine.evict(not_seen_for=1, update=turn + 1)) == 20
    assert len(mine.to_bytes()) < 1000
    assert len(mine._names.store._data) < 100_000  # type: ignore[attr-defined]


def test_a_new_name_with_the_hash_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_arrays, "fingerprints", lambda batch, salt: fingerprints(batch, salt) % 150)
    mine, expected = Vocabulary(grows=True, oov_buckets=BUCKETS), Reference()
    for turn in range(1, 40):
        words = [f"{turn} {index}".encode() for index in range(4)] * 2
        expected.grow(words, turn, 1)
        mine.grow(words, room=ROOM, update=turn)
        assert mine.evict(not_seen_for=2).tolist() == expected.evict(2, None)
        check(mine, expected, words)
    assert mine._names.salt > 0


def test_a_sketch_is_never_too_low() -> None:
    random, sketch, expected = np.random.default_rng(0), Sketch(), collections.Counter[int]()
    for _ in range(20):
        keys, times = np.unique(random.zipf(1.3, 5000) % 100_000, return_counts=True)
        expected.update(dict(zip(keys.tolist(), times.tolist(), strict=True)))
        found = sketch.count(keys, times)
        exact = np.minimum([expected[key] for key in keys.tolist()], MOST)
        assert (found >= exact).all()
        assert (found == exact).mean() > 0.999


def test_a_sketch_ages() -> None:
    sketch, keys = Sketch(), np.arange(600_000)
    sketch.count(np.array([-7]), np.array([100]))
    for turn in range(6):
        sketch.count(keys + turn * len(keys), np.ones(len(keys), np.int64))
    assert sketch.count(np.array([-7]), np.array([0])) == 50
    assert sketch._used < 1 << 21


def test_threads_share_a_vocabulary() -> None:
    mine = Vocabulary(grows=True, oov_buckets=1)
    words = np.array([f"w{index}" for index in range(3000)], object)
    found: list[dict[str, int]] = [{} for _ in range(6)]
    errors: list[BaseException] = []

    def work(own: dict[str, int], seed: int) -> None:
        random = np.random.default_rng(seed)
        try:
            for update in range(60):
                some = random.choice(words, 200)
                rows = mine.grow(some, room=5000, update=update)
                for name, row in zip(some.tolist(), rows.tolist(), strict=True):
                    assert own.setdefault(name, row) == row
                assert mine.lookup(some).tolist() == rows.tolist()
                if update % 20 == 0:
                    saved = Vocabulary.from_bytes(mine.to_bytes())
                    assert saved.lookup(some).tolist() == rows.tolist()
                    mine.seen(rows, update=update)
                    mine.names(rows)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(own, seed)) for seed, own in enumerate(found)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    merged: dict[str, int] = {}
    for own in found:
        for name, row in own.items():
            assert merged.setdefault(name, row) == row
    assert len(set(merged.values())) == len(merged) == len(mine)
    assert int(mine.counts.sum()) == 6 * (60 + 3) * 200


@pytest.mark.parametrize("method", ["same_names", "rows_in", "continue_counts", "assign"])
def test_two_vocabularies_in_two_threads_never_wait_for_each_other(method: str) -> None:
    names = [b"%d" % number for number in range(3000)]
    two = [Vocabulary(names, grows=True) for _ in range(2)]
    more = (0,) if method == "continue_counts" else ()

    def work(own: Vocabulary, other: Vocabulary) -> None:
        for _ in range(40):
            getattr(own, method)(other, *more)

    threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in (two, two[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("method", ["remove", "evict"])
def test_a_name_that_left_is_counted_from_zero(method: str) -> None:
    mine = Vocabulary(grows=True, min_count=3, oov_buckets=1)
    for _ in range(3):
        mine.grow([b"ann"], room=9, update=1)
    mine.remove([b"ann"]) if method == "remove" else mine.evict(min_count=9)
    assert mine.grow([b"ann"], room=9, update=2).tolist() == [0]


def test_copies_are_independent() -> None:
    mine = Vocabulary(["a"], grows=True)
    for other in (copy.copy(mine), copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
        other.add(["b"])
        assert other.lookup(["a", "b"]).tolist() == [0, 1]
    assert len(mine) == 1
    file = io.BytesIO()
    mine.write_to(file)
    assert file.getvalue() == mine.to_bytes()


def test_refusals() -> None:
    fixed, mine = Vocabulary(["a"]), Vocabulary(["a"], grows=True)
    for call in (
        lambda: Vocabulary(min_count=2),
        lambda: Vocabulary(grows=True, min_count=256),
        lambda: fixed.grow(["b"], room=9, update=1),
        lambda: fixed.evict(min_count=2),
        lambda: fixed.counts,
        lambda: mine.evict(),
        lambda: mine.evict(not_seen_for=0),
        lambda: mine.grow(["b"], room=9, update=2**31),
        lambda: mine.grow(["b"], room=-1, update=0),
        lambda: mine.seen([1], update=1),
        lambda: mine.assign(Vocabulary(dtype="int64")),
        lambda: mine.assign(Vocabulary(oov_buckets=3)),
        lambda: Vocabulary(dtype="int64").lookup(np.array([2**63], np.uint64)),
        lambda: Vocabulary(oov_buckets=2**31),
    ):
        with refused(ConfigError):
            call()


@pytest.mark.parametrize("dtype", ["string", "int64"])
def test_the_same_names_have_the_same_rows(dtype: Any) -> None:
    """Against the lists of both. Rows without a name count too."""
    random, seen = np.random.default_rng(1), set[bool]()
    known: list[Any] = [b"", b"x" * 5000, b"a", b"b"] if dtype == "string" else [0, 2**60, 1, 2]
    for _ in range(200):
        made = []
        for _ in range(2):
            names = [known[at] for at in random.permutation(4)] if random.random() < 0.4 else known
            one = Vocabulary(names, dtype=dtype, oov_buckets=1)
            if random.random() < 0.6:
                one.remove([known[random.integers(0, 4)]])
            made.append(one)
        mine, other = made
        wanted = mine.names(np.arange(mine.rows)) == other.names(np.arange(other.rows))
        assert mine.same_names(other) is wanted
        seen.add(wanted)
    assert seen == {True, False}
