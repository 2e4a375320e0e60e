"""`Vocabulary` against Keras' lookups, TensorFlow's hash, and a dictionary."""

import copy
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.messages import refused
from tpuembed.errors import CheckpointCorruptError, ConfigError
from tpuembed.vocabulary import PADDING, UNKNOWN, Vocabulary, files, name_arrays
from tpuembed.vocabulary.fingerprint import BUCKETS, fingerprints
from tpuembed.vocabulary.index import NONE, Index
from tpuembed.vocabulary.text import Texts

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


@settings(deadline=None)
@given(st.lists(st.binary(max_size=300), max_size=40))
def test_fingerprints_are_those_of_tensorflow(names: list[bytes]) -> None:
    expected = tf.strings.to_hash_bucket_fast(tf.constant(names, tf.string), BUCKETS).numpy()
    np.testing.assert_array_equal(fingerprints(Texts.of(names)), expected)


def test_fingerprints_of_every_length() -> None:
    random = np.random.default_rng(0)
    names = [random.bytes(length) for length in (*range(400), 4095, 4096, 100_001)]
    expected = tf.strings.to_hash_bucket_fast(tf.constant(names), BUCKETS).numpy()
    np.testing.assert_array_equal(fingerprints(Texts.of(names)), expected)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=60), max_size=8))
def test_an_index_is_a_dictionary(batches: list[list[int]]) -> None:
    index, expected = Index(), dict[int, int]()
    for batch in batches:
        keys = [key for key in dict.fromkeys(batch) if key not in expected]
        rows = np.arange(len(expected), len(expected) + len(keys), dtype=np.int32)
        index.add(np.array(keys, np.int64), rows)
        expected |= dict(zip(keys, rows.tolist(), strict=True))
    asked = [*expected, *(key ^ 1 for key in expected), -1, 0]
    found = index.find(np.array(asked, np.int64)).tolist()
    assert found == [expected.get(key, NONE) for key in asked]
    assert len(index) == len(expected)


def test_an_index_of_many_keys() -> None:
    keys = np.unique(np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 50_000))
    np.random.default_rng(1).shuffle(keys)
    index = Index(keys)
    np.testing.assert_array_equal(index.find(keys), np.arange(len(keys)))
    assert index.keys.size < 1.2 * len(keys)
    assert (index.find(keys + 1)[~np.isin(keys + 1, keys)] == NONE).all()


@pytest.mark.parametrize("oov_buckets", [1, 3])
def test_rows_are_those_of_keras(oov_buckets: int) -> None:
    words = [f"item {index}" for index in range(500)]
    asked = np.array([*words[::7], *(f"other {index}" for index in range(200)), ""])
    lookup = keras.layers.StringLookup(vocabulary=words, num_oov_indices=oov_buckets)
    mine = Vocabulary(words, oov_buckets=oov_buckets)
    np.testing.assert_array_equal(mine.lookup(asked), lookup(asked).numpy())
    assert mine.get_vocabulary() == lookup.get_vocabulary()
    assert mine.rows == lookup.vocabulary_size()


@pytest.mark.parametrize("oov_buckets", [1, 3])
def test_rows_of_integers_are_those_of_keras(oov_buckets: int) -> None:
    ids = np.random.default_rng(0).integers(0, 2**62, 500)
    asked = np.concatenate([ids[::7], np.random.default_rng(1).integers(0, 2**62, 200)])
    lookup = keras.layers.IntegerLookup(vocabulary=ids, num_oov_indices=oov_buckets)
    mine = Vocabulary(ids, dtype="int64", oov_buckets=oov_buckets)
    np.testing.assert_array_equal(mine.lookup(asked), lookup(asked).numpy())
    assert mine.get_vocabulary() == lookup.get_vocabulary()


class Reference:
    """What a dictionary says."""

    def __init__(self, oov_buckets: int) -> None:
        self.rows: dict[Any, int] = {}
        self.oov_buckets = oov_buckets

    def add(self, names: list[Any]) -> list[int]:
        return [self.rows.setdefault(name, self.oov_buckets + len(self.rows)) for name in names]

    def lookup(self, names: list[Any]) -> list[int]:
        return [self.rows.get(name, UNKNOWN) for name in names]


@pytest.mark.parametrize("dtype", ["string", "int64"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_growth_keeps_each_name_on_its_row(dtype: Any, data: st.DataObject) -> None:
    one = NAMES if dtype == "string" else st.integers(-(2**63), 2**63 - 1)
    mine, expected = Vocabulary(dtype=dtype), Reference(0)
    for names in data.draw(st.lists(st.lists(one, max_size=30), max_size=6)):
        given_names = np.array(names, object if dtype == "string" else np.int64)
        assert mine.add(given_names).tolist() == expected.add(names)
        if data.draw(st.booleans()):
            mine = Vocabulary.from_bytes(mine.to_bytes())
        asked = [*names, *data.draw(st.lists(one, max_size=5))]
        array = np.array(asked, object if dtype == "string" else np.int64)
        assert mine.lookup(array).tolist() == expected.lookup(asked)
    assert mine.names(list(expected.rows.values())) == list(expected.rows)
    assert len(mine) == mine.rows == len(expected.rows)


def test_hostile_names() -> None:
    mine = Vocabulary(HOSTILE)
    assert mine.lookup(HOSTILE).tolist() == list(range(len(HOSTILE)))
    assert Vocabulary.from_bytes(mine.to_bytes()).names(range(len(HOSTILE))) == HOSTILE
    assert mine.lookup([b"x" * 999_998, b"A"]).tolist() == [UNKNOWN] * 2


def test_names_with_equal_hashes_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_arrays, "fingerprints", lambda batch, salt: fingerprints(batch, salt) % 500)
    mine, expected = Vocabulary(), Reference(0)
    words = [f"{index}" for index in range(60)]
    for start in range(0, 60, 7):
        names = words[start : start + 7] * 2
        assert mine.add(names).tolist() == expected.add(names)
    assert mine._names.salt > 0
    assert mine.lookup(words).tolist() == expected.lookup(words)
    others = [f"other {index}" for index in range(2000)]
    assert mine.lookup(others).tolist() == [UNKNOWN] * 2000


def test_shapes_and_padding() -> None:
    mine = Vocabulary(["a", "b"], oov_buckets=2)
    assert mine.lookup([["a", "b"], ["b", "a"]]).tolist() == [[2, 3], [3, 2]]
    assert mine.lookup("b").shape == ()
    assert mine.lookup(np.zeros((0, 3), object)).shape == (0, 3)
    assert mine.lookup([["a", ""]], padded=True).tolist() == [[2, PADDING]]
    assert mine.lookup(np.array([b"a", b"b"])).tolist() == [2, 3]
    assert mine.names([0, 1, 2, 3]) == [None, None, b"a", b"b"]
    numbers = Vocabulary([7, -1], dtype="int64")
    assert numbers.lookup([7, -1, 8]).tolist() == [0, 1, UNKNOWN]
    assert numbers.lookup([7, -1, 8], padded=True).tolist() == [0, PADDING, UNKNOWN]


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
def test_files_have_one_name_a_line(tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PIECE_BYTES", 2)
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
        lambda: Vocabulary([2**63], dtype="int64"),
        lambda: Vocabulary(dtype="float"),  # type: ignore[arg-type]
        lambda: Vocabulary(oov_buckets=-1),
        lambda: Vocabulary(["a"]).lookup([3]),
        lambda: Vocabulary([3], dtype="int64").lookup(["a"]),
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


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_is_of_one_moment_while_another_thread_adds_names(take: Any) -> None:
    vocabulary = Vocabulary(["a", "b"], grows=True, min_count=2)
    vocabulary.grow(["c"], room=9, update=0)  # which makes its sketch
    others = list[threading.Thread]()

    class Sketched:
        """Another thread adds a name in the middle of the copy."""

        def __deepcopy__(self, memo: Any) -> "Sketched":
            others.append(threading.Thread(target=vocabulary.add, args=(["d"],)))
            others[0].start()
            others[0].join(0.3)
            return self

        def __reduce__(self) -> Any:
            if not others:
                self.__deepcopy__({})
            return int, ()

    vocabulary.__dict__["_first"] = Sketched()
    vocabulary.__dict__ = {"_first": vocabulary.__dict__.pop("_first"), **vocabulary.__dict__}
    found = take(vocabulary)
    others[0].join()
    copied = pickle.loads(found) if isinstance(found, bytes) else found
    assert copied.names(range(copied.rows)) == [b"a", b"b"]
    assert copied.lookup(["a", "b", "d"]).tolist() == [0, 1, UNKNOWN]
    assert vocabulary.lookup(["d"]).tolist() == [2]
