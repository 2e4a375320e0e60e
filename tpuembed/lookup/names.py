"""Names become rows in a graph: stock operations find them in the arrays of a vocabulary's index."""

from typing import Any, Protocol

import tensorflow as tf

from tpuembed.errors import ConfigError
from tpuembed.lookup.ranges import DROPPED, NOWHERE
from tpuembed.vocabulary import BUCKETS, MIX, WAYS, salt_text

__all__ = ["NameArrays", "as_names", "bucket_rows", "find_names", "key_places", "name_keys", "row_numbers"]

Tensor = Any


class NameArrays(Protocol):
    """The arrays of a vocabulary's index, in a graph.

    Attributes:
        keys: int64 [buckets, WAYS]; `tf.gather` takes it.
        numbers: int32 [buckets * WAYS], the number of each key's name. -1 for a place without a key.
        buckets: int64 [], the number of buckets.
        salt: `Vocabulary.salt_number`.
    """

    keys: Any
    numbers: Any
    buckets: Any
    salt: int


def find_names(names: Tensor, arrays: NameArrays) -> Tensor:
    """Return the number of each name, int64 [n], or -1 if the vocabulary has no such name.

    A string of a fingerprint that a name has is taken for that name. An unknown string has one with a probability of
    n / 2^63 for n names.

    Args:
        names: string or int64, [n].
        arrays: those of the vocabulary.
    """
    keys = name_keys(names, arrays.salt)
    places = key_places(keys, arrays.buckets)
    found = tf.equal(tf.reshape(tf.gather(arrays.keys, places), [-1, 2 * WAYS]), keys[:, None])
    way = tf.argmax(tf.cast(found, tf.int8), 1)  # the first way, if it is nowhere: so its number is dropped below
    bucket = tf.where(way < WAYS, places[:, 0], places[:, 1])
    number = tf.cast(tf.gather(arrays.numbers, bucket * WAYS + way % WAYS), tf.int64)
    return tf.where(tf.reduce_any(found, 1), number, tf.constant(-1, tf.int64))


def name_keys(names: Tensor, salt: int | Tensor) -> Tensor:
    """Return what finds each name in an index, int64 [n]: integers themselves, and the fingerprints of strings.

    Args:
        names: string or int64, [n].
        salt: `Vocabulary.salt_number`.
    """
    if names.dtype != tf.string:
        return names
    if isinstance(salt, int):
        return _fingerprints(tf.strings.join([salt_text(salt), names]) if salt else names)
    return tf.cond(
        tf.equal(salt, 0),
        lambda: _fingerprints(names),
        lambda: _fingerprints(tf.strings.join([tf.strings.as_string(salt), "\0", names])),
    )


def _fingerprints(names: Tensor) -> Tensor:
    return tf.strings.to_hash_bucket_fast(names, BUCKETS)


def key_places(keys: Tensor, buckets: Tensor) -> Tensor:
    """Return the two buckets that a key may be in, int64 [n, 2]."""
    mixed = tf.bitwise.right_shift(keys * tf.constant(MIX, tf.int64), tf.constant(1, tf.int64))
    second = tf.bitwise.bitwise_and(mixed, tf.constant(2**63 - 1, tf.int64)) % buckets
    return tf.stack([keys % buckets, second], 1)


def row_numbers(names: Tensor, numbers: Tensor, oov_buckets: int, padded: bool) -> Tensor:
    """Return the row of each name, int64 [n].

    Args:
        names: string or int64, [n].
        numbers: of `find_names`.
        oov_buckets: rows for unknown names. Without them an unknown name is NOWHERE, outside of every table.
        padded: "" and the integer -1 are padding, DROPPED.
    """
    unknown = bucket_rows(names, oov_buckets) if oov_buckets else tf.constant(NOWHERE, tf.int64)
    rows = tf.where(numbers < 0, unknown, numbers + oov_buckets)
    if not padded:
        return rows
    empty = tf.constant("" if names.dtype == tf.string else -1, names.dtype)
    return tf.where(tf.equal(names, empty), tf.constant(DROPPED, tf.int64), rows)


def bucket_rows(names: Tensor, oov_buckets: int) -> Tensor:
    """Return the bucket of each name, int64 [n], as Keras' StringLookup and IntegerLookup choose it."""
    if names.dtype == tf.string:
        return tf.strings.to_hash_bucket_fast(names, oov_buckets)
    return tf.math.floormod(names, tf.constant(oov_buckets, tf.int64))


def as_names(what: str, names: Tensor, dtype: str) -> Tensor:
    """Return a tensor of names as string or int64. Raises ConfigError for another type. `what` begins the message."""
    if names.dtype == tf.as_dtype(dtype):
        return names
    if dtype == "int64" and names.dtype.is_integer and names.dtype != tf.uint64:
        return tf.cast(names, tf.int64)
    raise ConfigError(f"{what}: its vocabulary has names of type {dtype}, got {names.dtype.name}. Pass names.")
