"""Names become rows in a graph: stock operations find them in the arrays of a vocabulary's index."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

from tpuembed.errors import ConfigError
from tpuembed.errors.ids import MOST_OF_NAME, unknown_name_texts
from tpuembed.lookup.branches import not_inlined
from tpuembed.lookup.name_index import BUCKETS, MIX, WAYS
from tpuembed.lookup.ranges import DROPPED, NOT_FOR_XLA, NOWHERE, OUTSIDE
from tpuembed.vocabulary import Vocabulary

__all__ = [
    "NameArrays",
    "NamedIds",
    "as_names",
    "check_names",
    "check_type_of_names",
    "find_keys",
    "find_names",
    "key_places",
    "name_keys",
    "row_numbers",
]

Tensor = Any


class NameArrays(Protocol):
    """The arrays of a vocabulary's index, in a graph.

    Attributes:
        keys: int64 [buckets, WAYS]; `tf.gather` takes it.
        numbers: int32 [buckets * WAYS], the number of each key's name. -1 for a place without a key.
        buckets: int64 [], the number of buckets.
        salt: text before each name when it is hashed.
    """

    @property
    def keys(self) -> Any: ...  # noqa: D102 - see the class
    @property
    def numbers(self) -> Any: ...  # noqa: D102
    @property
    def buckets(self) -> Any: ...  # noqa: D102
    @property
    def salt(self) -> bytes: ...  # noqa: D102


def find_names(names: Tensor, arrays: NameArrays) -> Tensor:
    """Return the number of each name, int64 [n], or -1 if the vocabulary has no such name.

    A string of a fingerprint that a name has is taken for that name. An unknown string has one with a probability of
    n / 2^63 for n names, and anybody can make such a string of a known name.

    Args:
        names: string or int64, [n].
        arrays: those of the vocabulary.
    """
    return find_keys(name_keys(names, arrays.salt), arrays)


def find_keys(keys: Tensor, arrays: NameArrays) -> Tensor:
    """Return the number of the name with each key, int64 [n], or -1. See `find_names`."""
    places = key_places(keys, arrays.buckets)
    found = tf.equal(tf.reshape(tf.gather(arrays.keys, places), [-1, 2 * WAYS]), keys[:, None])
    way = tf.argmax(tf.cast(found, tf.int8), 1)  # the first way, if it is nowhere: so its number is dropped below
    bucket = tf.where(way < WAYS, places[:, 0], places[:, 1])
    number = tf.cast(tf.gather(arrays.numbers, bucket * WAYS + way % WAYS), tf.int64)
    return tf.where(tf.reduce_any(found, 1), number, tf.constant(-1, tf.int64))


def name_keys(names: Tensor, salt: bytes | Tensor) -> Tensor:
    """Return what finds each name in an index, int64 of the shape of `names`: integers themselves, and fingerprints of strings.

    Args:
        names: string or int64.
        salt: the text before each name, or the number of the salt as a tensor, see `NameIndex`.
    """
    if names.dtype != tf.string:
        return names
    if not isinstance(salt, bytes):
        given, parts = names, [tf.strings.as_string(salt), "\0", names]
        names = tf.cond(tf.equal(salt, 0), lambda: given, lambda: tf.strings.join(parts))
    elif salt:
        names = tf.strings.join([salt, names])
    return tf.strings.to_hash_bucket_fast(names, BUCKETS)


def key_places(keys: Tensor, buckets: Tensor) -> Tensor:
    """Return the two buckets that a key may be in, int64 [n, 2]."""
    mixed = tf.bitwise.right_shift(keys * tf.constant(MIX, tf.int64), tf.constant(1, tf.int64))
    second = tf.bitwise.bitwise_and(mixed, tf.constant(2**63 - 1, tf.int64)) % buckets
    return tf.stack([keys % buckets, second], 1)


def row_numbers(names: Tensor, numbers: Tensor, vocabulary: Vocabulary, padded: bool) -> Tensor:
    """Return the row of each name, int64 of the shape of `names`.

    Args:
        names: string or int64, of any shape.
        numbers: of `find_names`, of the same shape.
        vocabulary: says which rows unknown names have. Without buckets one is NOWHERE, outside of every table.
        padded: "" and the integer -1 are padding, DROPPED.
    """
    buckets, unknown = vocabulary.oov_buckets, tf.constant(NOWHERE, tf.int64)
    if buckets:  # as Keras' StringLookup and IntegerLookup choose one
        of_text = names.dtype == tf.string
        unknown = tf.strings.to_hash_bucket_fast(names, buckets) if of_text else tf.math.floormod(names, buckets)
    rows = tf.where(numbers < 0, unknown, numbers + buckets)
    if not padded:
        return rows
    empty = tf.constant("" if names.dtype == tf.string else -1, names.dtype)
    return tf.where(tf.equal(names, empty), tf.constant(DROPPED, tf.int64), rows)


def as_names(what: str, names: Tensor, dtype: str) -> Tensor:
    """Return a tensor of names as string or int64. Raises ConfigError for another type. `what` begins the message."""
    check_type_of_names(what, names.dtype, dtype)
    return names if names.dtype == tf.as_dtype(dtype) else tf.cast(names, tf.int64)


def check_type_of_names(what: str, given: tf.DType, dtype: str) -> None:
    """Raise ConfigError if tensors of the type `given` cannot hold names of `dtype`. `what` begins the message."""
    is_narrow = dtype == "int64" and given.is_integer and given != tf.uint64
    if given != tf.as_dtype(dtype) and not is_narrow:
        raise ConfigError(f"{what}: its vocabulary has names of type {dtype}, got {given.name}. Pass names.")


@dataclasses.dataclass(frozen=True)
class NamedIds:
    """The names of a feature whose unknown names fail.

    Attributes:
        feature: its name.
        table: the table's name.
        count: number of names in its vocabulary.
        names: string or int64, [batch] or [batch, hot].
        rows: of `row_numbers`, of the same shape.
    """

    feature: str
    table: str
    count: int
    names: Tensor
    rows: Tensor


def check_names(features: Sequence[NamedIds]) -> list[Any]:
    """Return what has to run before the rows are used. It fails for the first unknown name of the first feature that has one.

    As in `check_range`, a separate function makes the message, and is called only if a name is unknown.
    """
    if not features:
        return []
    rows = tf.concat([tf.reshape(each.rows, [-1]) for each in features], 0)

    def fail() -> Tensor:
        with tf.control_dependencies(
            [tf.raw_ops.Assert(condition=False, data=[_unknown_message(features, rows)], name=OUTSIDE)]
        ):
            return tf.constant(False)

    return [tf.cond(tf.reduce_all(rows < NOWHERE), lambda: tf.constant(True), not_inlined(fail))]


def _unknown_message(features: Sequence[NamedIds], rows: Tensor) -> Tensor:
    """Return the message for the first unknown name, a string tensor: its first bytes, in valid UTF-8."""
    first = tf.where(tf.equal(rows, NOWHERE))[0, 0]
    sizes = tf.stack([tf.size(each.names, tf.int64) for each in features])
    ends = tf.cumsum(sizes)
    which = tf.reduce_sum(tf.cast(ends <= first, tf.int64))
    place = first - tf.gather(ends - sizes, which)
    one = tf.constant(1, tf.int64)
    hot = tf.stack([one if each.names.shape.rank == 1 else tf.shape(each.names, tf.int64)[1] for each in features])
    texts = [each.names if each.names.dtype == tf.string else tf.strings.as_string(each.names) for each in features]
    name = tf.gather(tf.concat([tf.reshape(each, [-1]) for each in texts], 0), first)
    length = tf.strings.length(name)
    head = tf.strings.substr(name, 0, tf.minimum(length, MOST_OF_NAME))
    shown = tf.strings.unicode_transcode(
        head, "UTF-8", "UTF-8", errors="replace", replace_control_characters=True, name=NOT_FOR_XLA
    )
    more = tf.where(length > MOST_OF_NAME, "...", "")
    pairs = [unknown_name_texts(each.feature, each.table, each.count) for each in features]
    before, between, after = (tf.gather(list(parts), which) for parts in zip(*pairs, strict=True))
    return tf.strings.join([before, shown, more, between, tf.strings.as_string(place // tf.gather(hot, which)), after])
