"""The vocabularies of a layer: their names become rows in calls, and are saved beside the tables.

A graph finds names in a variable, which is a copy of the vocabulary's index: a restore may replace the names after the graph
was traced.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tpuembed.backends.checkpoint_keys import saved_attributes, saved_keys
from tpuembed.backends.table_rows import copies
from tpuembed.backends.tf_config import SavedNode, local
from tpuembed.backends.tpu.tf_tpu import is_tpu_strategy
from tpuembed.config import FeatureConfig
from tpuembed.errors import CheckpointMismatchError, ConfigError
from tpuembed.lookup.name_index import WAYS, NameIndex
from tpuembed.lookup.names import as_names, key_places, name_keys, row_numbers
from tpuembed.vocabulary import Vocabulary, VocabularyHeader, attribute_of

__all__ = ["LayerVocabularies", "check_names_can_arrive", "shared_vocabularies"]

Tensor = Any
_Array = npt.NDArray[Any]

_NODE: Final = "_vocabularies"
"""The name of the node below the layer."""


def shared_vocabularies(features: Sequence[tuple[str, FeatureConfig]]) -> dict[str, Vocabulary]:
    """Return {table: its vocabulary} of the features, each with its path.

    Raises:
        ConfigError: features of one table have different vocabularies.
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
    return found


def check_names_can_arrive(vocabularies: Mapping[str, Vocabulary], takes_rows: bool) -> None:
    """Raise ConfigError if names cannot become rows where the layer runs."""
    if is_tpu_strategy(tf.distribute.get_strategy()) and not takes_rows:
        raise ConfigError(
            f"table {next(iter(vocabularies))!r} has a vocabulary, and names cannot reach a TPU. Build the layer with "
            "takes_rows=True, and call layer.names_to_rows in the input pipeline (Dataset.map)."
        )


class LayerVocabularies(SavedNode):
    """The checkpoint node `_vocabularies`, with the bytes of each table's vocabulary."""

    def __init__(self, vocabularies: Mapping[str, Vocabulary], capacities: Mapping[str, int]) -> None:
        """Make the graph's copies of `vocabularies`.

        Args:
            vocabularies: table name -> its vocabulary.
            capacities: table name -> its rows.
        """
        self.copies = {
            table: _GraphCopy(table, vocabulary, capacities[table]) for table, vocabulary in vocabularies.items()
        }

    @property
    def current(self) -> dict[str, Vocabulary]:
        """Return {table: the vocabulary of its rows}."""
        return {table: copy.vocabulary for table, copy in self.copies.items()}

    def rows_of(self, table: str, names: Tensor, padded: bool) -> Tensor:
        """Return the row of each name, int64 [n]. See `tpuembed.lookup.names.row_numbers`.

        Args:
            table: a table with a vocabulary.
            names: of the vocabulary's type, [n].
            padded: "" and the integer -1 are padding.
        """
        return self.copies[table].rows_of(names, padded)

    def take(self, table: str, saved: Vocabulary) -> None:
        """Replace the names of `table`, whose rows are restored with them."""
        self.copies[table].take(saved)

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

    def variables(self) -> dict[str, Any]:
        """Return the variables of the graph's copies, for SavedModels of the live layer."""
        return {f"{table}_cells": copy.cells for table, copy in self.copies.items()}

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
    content = tf.numpy_function(lambda: np.frombuffer(copy.vocabulary.to_bytes(), np.uint8), [], tf.uint8)
    content.set_shape([None])
    return content


class _GraphCopy:
    """The index of one vocabulary in a variable, int64 [buckets + 1, 2 * WAYS]: the keys of a bucket, then their numbers.

    The last row begins with the number of the salt. All is in one variable, and `_find` reads it once, because another thread may
    assign another index meanwhile.

    Attributes:
        vocabulary: the names of the table's rows: those that its features were given, or of what the rows were restored from.
        cells: the variable.
    """

    def __init__(self, table: str, vocabulary: Vocabulary, capacity: int) -> None:
        self.vocabulary = vocabulary
        self._table, self._capacity = table, capacity
        with tf.init_scope():
            self.cells = tf.Variable(
                _cells(vocabulary), shape=[None, 2 * WAYS], trainable=False, name="vocabulary_cells"
            )

    def take(self, saved: Vocabulary) -> None:
        """Replace the names by those that the table's rows are restored with."""
        self.vocabulary = saved
        cells = _cells(saved)
        with tf.init_scope():
            for copy in copies(self.cells):
                copy.assign(cells)

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

    def rows_of(self, names: Tensor, padded: bool) -> Tensor:
        if not len(self.vocabulary):
            raise ConfigError(
                f"table {self._table!r}: its vocabulary has no names, so all names would be unknown. Restore a checkpoint that "
                "has them, or give them to the tpuembed.Vocabulary."
            )
        names = as_names(f"table {self._table!r}", names, self.vocabulary.dtype)
        return row_numbers(names, self._find(names), self.vocabulary, padded)

    def _find(self, names: Tensor) -> Tensor:
        """Return the number of each name; -1 for an unknown one."""
        cells = local(self.cells).read_value()  # it copies nothing
        keys = name_keys(names, cells[-1, 0])
        buckets = tf.shape(cells, tf.int64)[0] - 1
        found = tf.gather(cells, key_places(keys, buckets))
        is_hit = tf.equal(found[:, :, :WAYS], keys[:, None, None])
        return tf.reduce_max(tf.where(is_hit, found[:, :, WAYS:], tf.constant(-1, tf.int64)), [1, 2])


def _cells(vocabulary: Vocabulary) -> _Array:
    index = NameIndex(vocabulary)
    cells = np.concatenate([index.keys, index.numbers.astype(np.int64)], 1)
    last = np.zeros((1, 2 * WAYS), np.int64)
    last[0, 0] = index.salt
    return np.concatenate([cells, last])
