"""Names become rows in native/lookup.c as they do in TensorFlow's graph."""

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

from tpuembed import native_lookup as native
from tpuembed.lookup.names import find_names, row_numbers
from tpuembed.vocabulary import WAYS
from tpuembed.vocabulary.index import Index

pytestmark = pytest.mark.skipif(
    bool(native.available()), reason=f"native/lookup.c is not compiled: {native.available()}"
)

Array = npt.NDArray[Any]
NOWHERE = 1 << 62


def find(
    names: list[Any], keys: Array, numbers: Array, *, salt: bytes = b"", oov_buckets: int = 0, padded: bool = False
) -> tuple[Array, int]:
    """Return the rows of the C library, and the first unknown name."""
    library = native._library()
    assert not isinstance(library, str)
    struct = native._Names(
        keys=keys.ctypes.data,
        numbers=numbers.ctypes.data,
        buckets=len(keys),
        oov_buckets=oov_buckets,
        salt_bytes=len(salt),
        padded=padded,
    )
    is_text = bool(names) and isinstance(names[0], bytes)
    values = np.array([len(name) for name in names] if is_text else names, np.int64)
    content = b"".join(salt + name for name in names) if is_text else None
    rows = np.full(len(names), -77, np.int64)
    unknown = library.tpuembed_find_names(
        None, ctypes.addressof(struct), content, values.ctypes.data, len(names), rows.ctypes.data
    )
    return rows, unknown


def empty_index(buckets: int = 17) -> tuple[Array, Array]:
    return np.full((buckets, WAYS), -1, np.int64), np.full((buckets, WAYS), -1, np.int32)


def texts(random: np.random.Generator, lengths: Any) -> list[bytes]:
    return [random.bytes(length) for length in lengths]


def random_texts() -> list[bytes]:
    random = np.random.default_rng(0)
    short = texts(random, [length for length in range(301) for _ in range(20)])
    return [*short, *texts(random, random.integers(301, 5000, 200)), *texts(random, (1 << 20, (1 << 20) + 63))]


@pytest.mark.parametrize("buckets", [2**63 - 1, 1, 7, 2**40])
def test_the_hash_of_any_text_is_that_of_tensorflow(buckets: int) -> None:
    """All lengths from 0 to 300, and some beyond, of any bytes."""
    names = random_texts()
    expected = tf.strings.to_hash_bucket_fast(tf.constant(names), buckets).numpy()
    rows, unknown = find(names, *empty_index(), oov_buckets=buckets)
    np.testing.assert_array_equal(rows, expected)
    assert unknown == -1


@pytest.mark.parametrize("salt", [b"", b"1\0", b"123\0", b"x" * 70])
def test_a_salt_stands_before_names_that_are_found_and_not_before_unknown_ones(salt: bytes) -> None:
    names = list(dict.fromkeys(random_texts()))
    keys = tf.strings.to_hash_bucket_fast(tf.constant([salt + name for name in names]), 2**63 - 1).numpy()
    is_known = np.arange(len(names)) % 2 == 0
    index = Index(keys[is_known])
    rows, unknown = find(names, index.keys, index.rows, salt=salt, oov_buckets=5)
    expected = tf.strings.to_hash_bucket_fast(tf.constant(names), 5).numpy()
    expected[is_known] = 5 + np.arange(is_known.sum())
    np.testing.assert_array_equal(rows, expected)
    assert unknown == -1


class _Arrays:
    def __init__(self, index: Index, salt: bytes) -> None:
        self.keys, self.numbers = tf.constant(index.keys), tf.constant(index.rows.reshape(-1))
        self.buckets, self.salt = tf.constant(len(index.keys), tf.int64), salt


def graph(names: Array, index: Index, salt: bytes, oov_buckets: int, padded: bool) -> Array:
    given = tf.constant(names)
    numbers = find_names(given, _Arrays(index, salt))
    return row_numbers(given, numbers, oov_buckets, padded).numpy()  # type: ignore[no-any-return]


EXTREMES = [-(2**63), 2**63 - 1, -1, 0, 1, -2, 2**62, -(2**62), 2**32, -(2**32)]


@pytest.mark.parametrize("oov_buckets", [0, 1, 3])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_rows_are_those_of_the_graph(seed: int, padded: bool, oov_buckets: int) -> None:
    """Of any bytes and integers; the index has -1 as a name, or not."""
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 400))
    for kind in ("string", "int64"):
        salt = random.choice([b"", b"1\0"]) if kind == "string" else b""
        if kind == "string":
            hostile = [b"", b"\0", b"\0\0", b"\xff\xfe", b"a\0b", b"x" * (1 << 20)]
            pool = list(dict.fromkeys([*hostile, *texts(random, random.integers(0, 80, 2 * count))]))
            order = random.permutation(len(pool))
            pool = [pool[place] for place in order]
            keys = tf.strings.to_hash_bucket_fast(tf.constant([salt + name for name in pool]), 2**63 - 1).numpy()
        else:
            pool = np.unique([*EXTREMES, *random.integers(-(2**63), 2**63 - 1, 2 * count)]).tolist()
            random.shuffle(pool)
            keys = np.array(pool, np.int64)
        index = Index(keys[: len(keys) // 2])
        late = int(random.integers(0, 600))  # from here on, names are unknown too
        asked = [
            pool[place] for place in random.integers(0, np.where(np.arange(700) < late, len(pool) // 2, len(pool)))
        ]
        names = np.array(asked, object if kind == "string" else np.int64)
        rows, unknown = find(asked, index.keys, index.rows, salt=salt, oov_buckets=oov_buckets, padded=padded)
        expected = graph(names, index, salt, oov_buckets, padded)
        np.testing.assert_array_equal(rows, expected)
        nowhere = np.flatnonzero(expected == NOWHERE)
        assert unknown == (nowhere[0] if len(nowhere) else -1)
        assert len(nowhere) > 0 or oov_buckets


def test_a_damaged_index_gives_the_numbers_of_the_graph() -> None:
    """A key in both of its buckets, keys that are twice in one, and numbers that are none."""
    random = np.random.default_rng(1)
    index = Index(np.arange(60))
    index.keys[:] = random.integers(0, 20, index.keys.shape)
    index.rows[:] = random.integers(-3, 2**31, index.rows.shape)
    names = np.arange(-10, 30)
    for oov_buckets in (0, 4):
        rows, _ = find(names.tolist(), index.keys, index.rows, oov_buckets=oov_buckets)
        np.testing.assert_array_equal(rows, graph(names, index, b"", oov_buckets, padded=False))
