"""The vocabularies of a layer: their names become rows in calls, grow in training, and are saved beside the tables.

A graph finds names in a variable, which is a copy of the vocabulary's index. A vocabulary that grows is ahead of its copy.
So the graph asks Python for the names that it does not find, and the copy is made anew after every tenth name.
"""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tpuembed.backends.checkpoint_keys import saved_attributes, saved_keys
from tpuembed.backends.table_rows import copies
from tpuembed.backends.tf_config import SavedNode, local
from tpuembed.backends.tf_tpu import is_tpu_strategy
from tpuembed.config import FeatureConfig
from tpuembed.errors import CheckpointMismatchError, ConfigError
from tpuembed.lookup.names import as_names, key_places, name_keys, row_numbers
from tpuembed.lookup.ranges import NOWHERE
from tpuembed.vocabulary import UNKNOWN, WAYS, Vocabulary, VocabularyHeader, attribute_of

__all__ = ["LayerVocabularies", "check_names_can_arrive", "check_shared", "shared_vocabularies"]

Tensor = Any
_Array = npt.NDArray[Any]

_NODE: Final = "_vocabularies"
"""The name of the node below the layer."""
_WAITING: Final = 0.1
"""The share of a vocabulary's names that its copy may lack."""
_LEAST_WAITING: Final = 1000


def shared_vocabularies(features: Sequence[tuple[str, FeatureConfig]]) -> dict[str, Vocabulary]:
    """Return {table: its vocabulary} of the features, each with its path.

    Raises:
        ConfigError: features of one table have different vocabularies, or a growing vocabulary belongs to two tables.
    """
    found: dict[str, Vocabulary] = {}
    for path, feature in features:
        if feature.vocabulary is None:
            continue
        if found.setdefault(feature.table.name, feature.vocabulary) is not feature.vocabulary:
            raise ConfigError(
                f"feature {path!r}: another feature of table {feature.table.name!r} has another vocabulary. Give both the same "
                "tpuembed.Vocabulary."
            )
    for table, vocabulary in found.items():
        others = [other for other, its in found.items() if its is vocabulary and other != table]
        if vocabulary.grows and others:
            raise ConfigError(
                f"tables {table!r} and {others[0]!r} have one vocabulary, and it grows. Give each table its own."
            )
    return found


def check_shared(where: str, own: Mapping[str, Vocabulary], saved: Mapping[str, Vocabulary]) -> None:
    """Raise CheckpointMismatchError if tables with one vocabulary would get different names.

    Args:
        where: begins the message.
        own: {table: its vocabulary}.
        saved: {table: the names that it gets}.
    """
    first: dict[int, str] = {}
    got = {id(own[table]): table for table in saved}
    for table, vocabulary in own.items():
        other = got.get(id(vocabulary), table)
        if table not in saved and other != table and not vocabulary.same_names(saved[other]):
            raise CheckpointMismatchError(
                f"{where}: it has names of table {other!r} and none of {table!r}, and both have one vocabulary in the layer. Give "
                "each table a tpuembed.Vocabulary of its own."
            )
    for table, names in saved.items():
        other = first.setdefault(id(own[table]), table)
        if not names.same_names(saved[other]):
            raise CheckpointMismatchError(
                f"{where}: tables {other!r} and {table!r} have different names there, and one vocabulary in the layer. Give each "
                "table a tpuembed.Vocabulary of its own."
            )


def check_names_can_arrive(vocabularies: Mapping[str, Vocabulary], takes_rows: bool) -> None:
    """Raise ConfigError if names cannot become rows where the layer runs, or cannot grow there."""
    strategy = tf.distribute.get_strategy()
    if not is_tpu_strategy(strategy):
        return
    table = next(iter(vocabularies))
    if not takes_rows:
        raise ConfigError(
            f"table {table!r} has a vocabulary, and names cannot reach a TPU. Build the layer with takes_rows=True, and call "
            "layer.names_to_rows in the input pipeline (Dataset.map)."
        )
    hosts = strategy.extended.num_hosts
    growing = [table for table, vocabulary in vocabularies.items() if vocabulary.grows]
    if growing and hosts > 1:
        raise ConfigError(
            f"table {growing[0]!r}: its vocabulary grows, which needs one process. The TPU has {hosts} hosts. Adapt the "
            "vocabulary before training, and set grows=False."
        )


class LayerVocabularies(SavedNode):
    """The checkpoint node `_vocabularies`, with the bytes of each table's vocabulary."""

    def __init__(
        self,
        vocabularies: Mapping[str, Vocabulary],
        capacities: Mapping[str, int],
        reserved: Mapping[str, Collection[int]],
        updates: Any,
        reset: Callable[[str, _Array], None],
    ) -> None:
        """Make the graph's copies of `vocabularies`, by table.

        Args:
            vocabularies: table name -> its vocabulary.
            capacities: table name -> its rows.
            reserved: table name -> the rows that features have for unknown names.
            updates: the variable that counts the layer's updates.
            reset: called with a table and rows of it, int64 [n], whose names were evicted. Gives them their initial values.
        """
        self.copies = {
            table: _GraphCopy(table, vocabulary, capacities[table], updates)
            for table, vocabulary in vocabularies.items()
        }
        self._reset = reset
        for table, vocabulary in vocabularies.items():
            vocabulary.watch(self, table, capacities[table], reserved[table])
            self.copies[table].lacks_names()  # another layer may train meanwhile

    def names_changed(self, table: str, freed: _Array) -> None:
        """Follow a change of the names of `table` from outside of training. `freed` are rows, int64 [n], that lost their names."""
        copy = self.copies[table]
        if copy.before is None:
            copy.refresh()
            if len(freed):
                self._reset(table, freed)
        elif Vocabulary.from_bytes(copy.before).same_names(copy.vocabulary):
            copy.before = None
            copy.refresh()

    def names_replaced(self, table: str, before: bytes) -> None:
        """Note that another layer was restored, and names have other rows than those of `table`, whose names are `before`.

        Graphs and saves go on with the names of before. All else is refused, until this layer is restored too.
        """
        self.copies[table].before = self.copies[table].before or before

    def check_names(self, tables: Collection[str] | None = None) -> None:
        """Raise ConfigError if the names of a table are those of another layer; see `names_replaced`. None means all tables."""
        for table, copy in self.copies.items():
            if tables is None or table in tables:
                copy.check_names()

    def names_grew(self, table: str) -> None:
        """Follow training that gave names of `table` rows."""
        if self.copies[table].before is None:
            self.copies[table].lacks_names()

    def rows_of(self, table: str, names: Tensor, padded: bool, training: bool | None) -> Tensor:
        """Return the row of each name, int64 [n]. See `tpuembed.lookup.names.row_numbers`.

        Args:
            table: a table with a vocabulary.
            names: of the vocabulary's type, [n].
            padded: "" and the integer -1 are padding.
            training: give new names rows, if the vocabulary grows.
        """
        return self.copies[table].rows_of(names, padded, bool(training))

    def to_bytes(self, table: str) -> bytes:
        """Return the vocabulary of `table`, as it is saved."""
        return self.copies[table].to_bytes()

    def take(self, table: str, saved: Vocabulary) -> None:
        """Replace the names of `table`, whose rows are restored with them."""
        copy = self.copies[table]
        copy.before = None
        copy.vocabulary.assign(saved, by=self)

    def load(self, contents: Mapping[str, bytes], where: str) -> None:
        """Replace the names of vocabularies by saved ones, {table: bytes}. `where` begins the messages of errors.

        Raises:
            CheckpointCorruptError: one is damaged.
            CheckpointMismatchError: a saved vocabulary has another type or other buckets, or needs more rows. No name has
                changed then.
        """
        for table, vocabulary in self.checked(contents, where).items():
            self.take(table, vocabulary)

    def checked(self, contents: Mapping[str, bytes], where: str) -> dict[str, Vocabulary]:
        """Return the saved vocabularies of {table: bytes}. Raises as `load`."""
        found = {}
        for table, content in contents.items():
            what = f"{where}: the vocabulary of table {table!r}"
            found[table] = Vocabulary.from_bytes(content, what)
            self.copies[table].check(found[table], what)
        check_shared(where, {table: copy.vocabulary for table, copy in self.copies.items()}, found)
        return found

    def check_saved(self, path: str) -> None:
        """Raise an error if TensorFlow would fail on the vocabularies of the checkpoint at `path`, after it restored rows.

        Vocabularies of one name in several layers of a checkpoint are not compared: only TensorFlow knows which is whose.

        Raises:
            CheckpointMismatchError: as `load`, or the checkpoint has those of some tables alone.
        """
        keys = saved_keys(path)
        found = {table: saved_attributes(keys, _NODE, attribute_of(table)) for table in self.copies}
        if any(len(those) > 1 for those in found.values()):
            return
        lacking = [table for table, those in found.items() if not those]
        if lacking and len(lacking) < len(found):
            raise CheckpointMismatchError(
                f"checkpoint {path}: it has no vocabulary of table {lacking[0]!r}, and those of other tables. Restore the tables "
                "with restore_tables."
            )
        reader, where = tf.train.load_checkpoint(path), f"checkpoint {path}"
        contents = {table: reader.get_tensor(those[0]) for table, those in found.items() if those}
        for table, content in contents.items():
            what = f"{where}: the vocabulary of table {table!r}"
            first = content[: VocabularyHeader.MOST_BYTES].tobytes()
            self.copies[table].check(VocabularyHeader.from_bytes(first, what), what)
        if len({id(copy.vocabulary) for copy in self.copies.values()}) < len(self.copies):
            self.checked({table: content.tobytes() for table, content in contents.items()}, where)

    def variables(self) -> dict[str, Any]:
        """Return the variables of the graph's copies, for SavedModels of the live layer. The copies are made complete."""
        self.check_names()
        for copy in self.copies.values():
            copy.refresh()
        return {
            f"{table}_{name}": variable
            for table, copy in self.copies.items()
            for name, variable in copy.variables.items()
        }

    def _serialize_to_tensors(self) -> dict[str, Any]:
        # As operations: asynchronous saves run them in a graph.
        return {attribute_of(table): _saved(copy) for table, copy in self.copies.items()}

    def _restore_from_tensors(self, restored: Mapping[str, Any]) -> Any:
        try:
            self.load({table: restored[attribute_of(table)].numpy().tobytes() for table in self.copies}, "checkpoint")
        except CheckpointMismatchError as error:
            raise CheckpointMismatchError(
                f"{error} The layer's rows are those of the checkpoint already: build the layer again before you use it."
            ) from None
        return tf.no_op()


def _saved(copy: "_GraphCopy") -> Tensor:
    content = tf.numpy_function(lambda: np.frombuffer(copy.to_bytes(), np.uint8), [], tf.uint8)
    content.set_shape([None])
    return content


class _GraphCopy:
    """The index of one vocabulary in a variable, int64 [buckets + 1, 2 * WAYS]: the keys of a bucket, then their numbers.

    The last row begins with the number of the salt. All is in one variable, and `_find` reads it once, because another thread may
    assign a larger index meanwhile. A second variable is 1 if the copy has all names. It is assigned after the first and read
    before it: so a 1 never belongs to a later index than the one that is read.
    """

    def __init__(self, table: str, vocabulary: Vocabulary, capacity: int, updates: Any) -> None:
        self.vocabulary = vocabulary
        self._table, self._capacity, self._updates = table, capacity, updates
        self._lock = threading.Lock()
        self.before: bytes | None = None
        self._names = len(vocabulary)
        with tf.init_scope():
            self._cells = tf.Variable(
                _cells(vocabulary), shape=[None, 2 * WAYS], trainable=False, name="vocabulary_cells"
            )
            self._is_complete = tf.Variable(
                1, dtype=tf.int64, trainable=False, name="vocabulary_is_complete"
            )  # no bool: replicas cannot keep one

    @property
    def variables(self) -> dict[str, Any]:
        return {"cells": self._cells, "is_complete": self._is_complete}

    def refresh(self) -> None:
        """Copy the vocabulary anew: names were removed or replaced, or too many are not in the copy."""
        with self._lock:
            self._refresh()

    def lacks_names(self) -> None:
        """Note that the vocabulary has names that are not in the copy. Copy it anew if they are many."""
        with self._lock:
            waiting = len(self.vocabulary) - self._names
            if waiting > max(_LEAST_WAITING, _WAITING * self._names):
                self._refresh()
            elif waiting:
                _assign(self._is_complete, 0)

    def to_bytes(self) -> bytes:
        """Return the names of the table's rows, as they are saved."""
        return self.vocabulary.to_bytes() if self.before is None else self.before

    def check_names(self) -> None:
        """Raise ConfigError if the vocabulary has names that are not those of the table's rows."""
        if self.before is not None:
            raise ConfigError(
                f"table {self._table!r}: its vocabulary belongs to another layer too, and got other names when that one was "
                "restored. Restore this layer from the same checkpoint, or give it a tpuembed.Vocabulary of its own."
            )

    def check(self, saved: Vocabulary | VocabularyHeader, where: str) -> None:
        """Raise CheckpointMismatchError if a saved vocabulary has another type or other buckets, or needs more rows."""
        own = self.vocabulary
        if unlike := own.unlike(saved):
            option, mine, its = unlike
            raise CheckpointMismatchError(
                f"{where}: its {option} is {its}, and the layer's {mine}. Build the layer as it was saved."
            )
        if saved.rows > self._capacity:
            raise CheckpointMismatchError(
                f"{where}: it needs {saved.rows} rows, and the layer's table has {self._capacity}. Make vocabulary_size larger."
            )

    def rows_of(self, names: Tensor, padded: bool, training: bool) -> Tensor:
        self.check_names()
        vocabulary = self.vocabulary
        if not len(vocabulary) and not vocabulary.grows:
            raise ConfigError(
                f"table {self._table!r}: its vocabulary has no names, so all names would be unknown. Restore a checkpoint that "
                "has them, or give them to the tpuembed.Vocabulary."
            )
        names = as_names(f"table {self._table!r}", names, vocabulary.dtype)
        is_complete = local(self._is_complete).read_value()
        with tf.control_dependencies([is_complete]):
            numbers = self._find(names)
        rows = row_numbers(names, numbers, vocabulary, padded)
        if not vocabulary.grows:
            return rows
        missing = tf.where(numbers < 0)[:, 0]
        asked = tf.gather(names, missing)
        if training:
            known = tf.gather(rows, tf.where(numbers >= 0)[:, 0])
            update = local(self._updates).read_value() + 1
            found = tf.numpy_function(
                lambda asked, known, update: self._grow(asked, known, int(update), padded),
                [asked, known, update],
                tf.int64,
            )
        else:
            found = tf.cond(
                tf.equal(tf.size(asked), 0) | tf.equal(is_complete, 1),
                lambda: tf.gather(rows, missing),
                lambda: tf.numpy_function(lambda asked: self._look_up(asked, padded), [asked], tf.int64),
            )
        found = tf.ensure_shape(found, [None])
        return tf.tensor_scatter_nd_update(rows, missing[:, None], found)

    def _find(self, names: Tensor) -> Tensor:
        """Return the number of each name in the copy; -1 for one that it lacks."""
        cells = local(self._cells).read_value()  # it copies nothing
        keys = name_keys(names, cells[-1, 0])
        buckets = tf.shape(cells, tf.int64)[0] - 1
        found = tf.gather(cells, key_places(keys, buckets))
        is_hit = tf.equal(found[:, :, :WAYS], keys[:, None, None])
        return tf.reduce_max(tf.where(is_hit, found[:, :, WAYS:], tf.constant(-1, tf.int64)), [1, 2])

    # ---- in Python

    def _grow(self, asked: _Array, known: _Array, update: int, padded: bool) -> _Array:
        self.check_names()
        found = self.vocabulary.grow(asked, room=self._capacity, update=update, padded=padded)
        self.vocabulary.seen(known, update=update)
        return _outside(found)

    def _look_up(self, asked: _Array, padded: bool) -> _Array:
        self.check_names()
        return _outside(self.vocabulary.lookup(asked, padded=padded))

    def _refresh(self) -> None:
        self._names = len(self.vocabulary)
        _assign(self._cells, _cells(self.vocabulary))
        _assign(self._is_complete, int(self._names == len(self.vocabulary)))


def _cells(vocabulary: Vocabulary) -> _Array:
    salt, keys, numbers = vocabulary.snapshot()
    cells = np.concatenate([keys, numbers.astype(np.int64)], 1)
    last = np.zeros((1, 2 * WAYS), np.int64)
    last[0, 0] = salt
    return np.concatenate([cells, last])


def _assign(variable: Any, value: Any) -> None:
    with tf.init_scope():
        for copy in copies(variable):
            copy.assign(value)


def _outside(rows: _Array) -> _Array:
    """Return rows as graphs have them: an unknown name is NOWHERE."""
    return np.where(rows == UNKNOWN, np.int64(NOWHERE), rows)
