"""`Vocabulary` and its index, against a dictionary."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.messages import refused
from tpuembed.errors import CheckpointCorruptError, ConfigError
from tpuembed.lookup import name_index
from tpuembed.lookup.name_index import NONE, Index, NameIndex, fingerprints
from tpuembed.lookup.names import find_keys
from tpuembed.vocabulary import UNKNOWN, Vocabulary

HOSTILE = [
    b"",
    b"\0",
    b"\0\0",
    b"a\0",
    b"a",
    "ä".encode(),
    "a\u0308".encode(),
    b"\xff\xfe",
    b"x" * 1_000_000,
    b"x" * 999_999,
]
NAMES = st.one_of(st.binary(max_size=80), st.sampled_from(HOSTILE[:-2]))


INTEGERS = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-20, 20))


def find(index: Index, keys: Any) -> Any:
    """Return the rows of keys, as a graph finds them."""
    arrays: Any = SimpleNamespace(keys=index.keys, numbers=index.rows.reshape(-1), buckets=len(index.keys))
    return find_keys(tf.constant(keys, tf.int64), arrays).numpy()


@settings(deadline=None)
@given(st.lists(INTEGERS, max_size=400, unique=True))
def test_an_index_is_a_dictionary(keys: list[int]) -> None:
    index, expected = Index(np.array(keys, np.int64)), {key: row for row, key in enumerate(keys)}
    asked = [*expected, *(key ^ 1 for key in expected), -1, 0]
    found = find(index, asked).tolist()
    assert found == [expected.get(key, NONE) for key in asked]


def test_an_index_of_many_keys() -> None:
    keys = np.unique(np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 50_000))
    np.random.default_rng(1).shuffle(keys)
    index = Index(keys)
    np.testing.assert_array_equal(find(index, keys), np.arange(len(keys)))
    assert index.keys.size < 1.2 * len(keys)
    assert (find(index, keys + 1)[~np.isin(keys + 1, keys)] == NONE).all()


@pytest.mark.parametrize("factor", [2, 1024, 2**40, 3 * 5 * 7, -1, 6151])
def test_keys_that_are_multiples_fill_a_table(factor: int) -> None:
    keys = np.arange(20_000) * np.int64(factor)
    index = Index(keys)
    np.testing.assert_array_equal(find(index, keys), np.arange(len(keys)))
    assert len(keys) > 0.7 * index.keys.size


def test_keys_that_were_made_to_collide_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = np.arange(40) * np.int64(np.lcm.reduce(np.arange(8, 24)))
    assert (find(Index(keys), keys) == np.arange(40)).all()
    monkeypatch.setattr(Index, "_first", lambda _, keys: np.zeros(len(keys), np.int64))
    monkeypatch.setattr(Index, "_second", lambda _, keys: np.ones(len(keys), np.int64))
    with refused(ConfigError):
        Index(np.arange(40) * np.int64(2**55))


@pytest.mark.parametrize("dtype", ["string", "int64"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_each_name_has_its_own_row(dtype: Any, data: st.DataObject) -> None:
    one = NAMES if dtype == "string" else INTEGERS
    names = data.draw(st.lists(one, max_size=100, unique=True))
    expected = {name: row for row, name in enumerate(names)}
    mine = Vocabulary(names, dtype=dtype)
    if data.draw(st.booleans()):
        mine = Vocabulary.from_bytes(mine.to_bytes())
    asked = [*names, *data.draw(st.lists(one, max_size=5))]
    array = np.array(asked, object if dtype == "string" else np.int64)
    assert mine.lookup(array).tolist() == [expected.get(name, UNKNOWN) for name in asked]
    assert mine.names(range(len(names))) == names
    assert len(mine) == mine.rows == len(names)


def test_hostile_names() -> None:
    mine = Vocabulary(HOSTILE)
    assert mine.lookup(HOSTILE).tolist() == list(range(len(HOSTILE)))
    assert Vocabulary.from_bytes(mine.to_bytes()).names(range(len(HOSTILE))) == HOSTILE
    assert mine.lookup([b"x" * 999_998, b"A"]).tolist() == [UNKNOWN] * 2


def test_names_with_equal_hashes_get_a_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_index, "fingerprints", lambda names, salt: fingerprints(names, salt) % 500)
    assert NameIndex(Vocabulary(map(str, range(60)))).salt > 0
    monkeypatch.setattr(name_index, "fingerprints", lambda names, _: np.zeros(len(names), np.int64))
    with refused(ConfigError):
        NameIndex(Vocabulary(["a", "b"]))


def test_shapes() -> None:
    mine = Vocabulary(["a", "b"], oov_buckets=2)
    assert mine.lookup([["a", "b"], ["b", "a"]]).tolist() == [[2, 3], [3, 2]]
    assert mine.lookup("b").shape == ()
    assert mine.lookup(np.zeros((0, 3), object)).shape == (0, 3)
    assert mine.lookup(np.array([b"a", b"b"])).tolist() == [2, 3]
    assert mine.names([0, 1, 2, 3]) == [None, None, b"a", b"b"]
    assert mine.lookup(["c"]).tolist() == [UNKNOWN]
    numbers = Vocabulary([7, -1], dtype="int64")
    assert numbers.lookup([7, -1, 8]).tolist() == [0, 1, UNKNOWN]


def test_adapt_takes_tensors_of_all_kinds() -> None:
    ragged = tf.ragged.constant([["b", "a"], ["b"]])
    whole = tf.data.Dataset.from_tensors
    for data in (
        whole(ragged),
        whole(ragged.to_sparse()),
        whole(tf.constant([["b"], ["a"], ["b"]])),
        tf.data.Dataset.from_tensor_slices(["b", "a", "b"]),
        [ragged],
    ):
        assert Vocabulary.adapt(data).get_vocabulary() == ["b", "a"]
    assert Vocabulary.adapt(tf.data.Dataset.range(2), dtype="int64").get_vocabulary() == [0, 1]
    for parts in (({"user": ["a"]}), (["a"], ["label"])):
        with refused(ConfigError, match="one array of names"):
            Vocabulary.adapt(whole(parts))


@pytest.mark.parametrize("content", [b"", b"a", b"a\n", b"a\nb", b"\n", b"a\n\nb\n", b"\0\n\xff\n", b"a\r\nb\n"])
def test_files_have_one_name_a_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "names").write_bytes(content)
    lines = content.split(b"\n")
    expected = lines[:-1] if lines[-1] == b"" else lines
    found = Vocabulary.from_file(tmp_path / "names")
    assert found.names(np.arange(len(found))) == expected


def test_refusals(tmp_path: Path) -> None:
    (tmp_path / "twice").write_text("a\nb\na\n")
    (tmp_path / "words").write_text("5\nx\n")
    (tmp_path / "digits").write_text("1_0\n")
    (tmp_path / "marked").write_bytes("\ufeffann\nbob\n".encode())
    np.save(tmp_path / "float.npy", np.zeros(3))
    np.save(tmp_path / "unsigned.npy", np.array([1, 2**63 + 1], np.uint64))
    calls: list[Callable[[], Any]] = [
        lambda: Vocabulary(["a", "b", "a"]),
        lambda: Vocabulary([3, 3], dtype="int64"),
        lambda: Vocabulary(["a", 3]),
        lambda: Vocabulary("item"),
        lambda: Vocabulary(None),  # type: ignore[arg-type]
        lambda: Vocabulary(["\ud800"]),
        lambda: Vocabulary([3.5], dtype="int64"),
        lambda: Vocabulary([True], dtype="int64"),
        lambda: Vocabulary([-1, 2**63], dtype="int64"),
        lambda: Vocabulary([["a"], ["b"]]),
        lambda: Vocabulary([2**63], dtype="int64"),
        lambda: Vocabulary(dtype="float"),  # type: ignore[arg-type]
        lambda: Vocabulary(oov_buckets=-1),
        lambda: Vocabulary(oov_buckets=2**31),
        lambda: Vocabulary(["a"]).lookup([3]),
        lambda: Vocabulary([3], dtype="int64").lookup(["a"]),
        lambda: Vocabulary(dtype="int64").lookup(np.array([2**63], np.uint64)),
        lambda: Vocabulary(["a"]).names([1]),
        lambda: Vocabulary([b"\xff"]).get_vocabulary(),
        lambda: Vocabulary.from_file(tmp_path / "missing"),
        lambda: Vocabulary.from_file(tmp_path / "twice"),
        lambda: Vocabulary.from_file(tmp_path / "words", dtype="int64"),
        lambda: Vocabulary.from_file(tmp_path / "digits", dtype="int64"),
        lambda: Vocabulary.from_file(tmp_path / "marked"),
        lambda: Vocabulary.from_file(tmp_path / "float.npy", dtype="int64"),
        lambda: Vocabulary.from_file(tmp_path / "unsigned.npy", dtype="int64"),
        lambda: Vocabulary.adapt([["a"]], min_count=0),
    ]
    for call in calls:
        with refused(ConfigError):
            call()


@pytest.mark.parametrize("dtype", ["string", "int64"])
def test_damaged_bytes_are_refused(dtype: Any) -> None:
    content = Vocabulary(["a", "bc"] if dtype == "string" else [1, 2], dtype=dtype).to_bytes()
    for place in range(0, len(content), 3):
        damaged = bytearray(content)
        damaged[place] ^= 1
        with pytest.raises(CheckpointCorruptError):
            Vocabulary.from_bytes(bytes(damaged))
        with pytest.raises(CheckpointCorruptError):
            Vocabulary.from_bytes(content[:place])
    with refused(CheckpointCorruptError):
        Vocabulary.from_bytes(b"")


def test_lines_that_end_with_crlf_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "names"
    for content in (b"ann\r\nbob\r\n", b"\r\n"):
        path.write_bytes(content)
        with refused(ConfigError):
            Vocabulary.from_file(path)
    path.write_bytes(b"ann\r\nbob\n")  # one name may end so
    assert Vocabulary.from_file(path).get_vocabulary() == ["ann\r", "bob"]
    path.write_bytes(b"5\r\n7\r\n")
    assert Vocabulary.from_file(path, dtype="int64").get_vocabulary()[-2:] == [5, 7]


@pytest.mark.parametrize("dtype", ["string", "int64"])
def test_the_same_names_have_the_same_rows(dtype: Any) -> None:
    """Against the lists of both."""
    random, seen = np.random.default_rng(1), set[bool]()
    known: list[Any] = [b"", b"x" * 5000, b"a", b"b"] if dtype == "string" else [0, 2**60, 1, 2]
    for _ in range(200):
        made = []
        for _ in range(2):
            names = [known[at] for at in random.permutation(4)] if random.random() < 0.4 else known
            made.append(Vocabulary(names[: random.integers(3, 5)], dtype=dtype, oov_buckets=1))
        mine, other = made
        wanted = mine.names(np.arange(mine.rows)) == other.names(np.arange(other.rows))
        assert mine.same_names(other) is wanted
        seen.add(wanted)
    assert seen == {True, False}
