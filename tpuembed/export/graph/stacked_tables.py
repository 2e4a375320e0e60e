"""The exporter's tables in a graph: uninitialised stacked variables, looked up by shifted ids, with gathers only."""

import contextlib
import dataclasses
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from tpuembed.checkpoint import Checkpoint, TableInfo
from tpuembed.config import QuantizationConfig, TableConfig
from tpuembed.errors import CheckpointMismatchError, ConfigError, ExportError
from tpuembed.errors.ids import Span
from tpuembed.export.graph.mapped_table import store_array
from tpuembed.export.graph.signature import Saved, find_table, trained_with_rows, vocabulary_of
from tpuembed.export.plan.plan import Placement, StackPlan
from tpuembed.lookup import FlatIds, Ids, check_range, gather_grouped
from tpuembed.lookup.branches import not_inlined
from tpuembed.lookup.name_index import WAYS, NameIndex, salt_text
from tpuembed.lookup.pooling import EachRow
from tpuembed.lookup.ranges import IdRanges, RangedIds
from tpuembed.manifest import NAMES_FOLDER, STORAGES, NamesEntry
from tpuembed.vocabulary import Vocabulary

__all__ = ["StackedTables", "TableNames", "constant_names", "make_names", "ran_without_rows", "span_of"]

Tensor = Any
Answer = Callable[[Sequence[Ids], Callable[[], list[Tensor]]], list[Tensor]]

_MAX_ZERO_BYTES: Final = 64 << 20
_UNBOUND: Final = "tpuembed_table_without_rows"
"""The scope of lookups in tables without a value: TensorFlow's error has its name if such a lookup runs."""


@dataclasses.dataclass(frozen=True)
class TableNames:
    """The index of a vocabulary in a graph; see `tpuembed.lookup.names.NameArrays`."""

    keys: Any
    numbers: Any
    buckets: Any
    salt: bytes


class StackedTables:
    """A `tpuembed.runtime.table_scope.TableSource` over the checkpoint's tables.

    While the model is built, layers register the tables they need (`required`) and their quantization in training
    (`quantization`). A trace before `bind` records the tables that the model reads whole (`read_whole`). `bind` then
    assigns the tables to variables. The tables that features look up in by name are recorded too (`vocabularies`), and
    `bind_names` assigns their names.
    """

    def __init__(
        self,
        available: Mapping[str, TableInfo],
        saved: Saved = lambda _: None,
        with_rows: Container[tuple[str, str]] | None = (),
    ) -> None:
        """Read the tables `available` in a checkpoint.

        Args:
            available: the tables by name.
            saved: returns the checkpoint's vocabulary of a table, or None.
            with_rows: path and table of the features that may take row numbers beside names, because in training they did;
                None for all, in the trained model itself.
        """
        self.required: list[str] = []
        self.read_whole: list[str] = []
        self.quantization: dict[str, QuantizationConfig] = {}
        self.vocabularies: dict[str, Vocabulary] = {}
        self.were_asked_for = False
        self._saved, self._with_rows = saved, with_rows
        self._names: Mapping[str, TableNames] | None = None
        self._constants: dict[str, TableNames] = {}
        self._available = available
        self._places: dict[str, tuple[StackPlan, Placement]] = {}
        self._variables: Mapping[str, Any] = {}
        self._stacks: Mapping[str, StackPlan] = {}
        self._unbound: dict[str, Any] = {}
        self._whole: set[str] = set()
        self._are_zeros = False
        self._answer: Answer | None = None
        self._compared: dict[tuple[str, int], Vocabulary | None] = {}

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "StackedTables":
        """Return the tables and the names of a checkpoint."""
        return cls(checkpoint.tables(), checkpoint.vocabulary, trained_with_rows(checkpoint.layer_config))

    def register(self, table: TableConfig) -> None:
        """Record that a layer needs `table`.

        Raises:
            UnknownTableError, CheckpointMismatchError: the checkpoint has no such table, or one of another shape.
        """
        found = find_table(table.name, self._available)
        if (found.rows, found.dim) != (table.vocabulary_size, table.dim):
            raise CheckpointMismatchError(
                f"table {table.name!r} is [{table.vocabulary_size}, {table.dim}] in the model, but [{found.rows}, "
                f"{found.dim}] in the checkpoint. Build the model as it was trained."
            )
        if table.name not in self.required:
            self.required.append(table.name)
        if table.quantization_config is not None:
            self.quantization[table.name] = table.quantization_config

    def bind(self, stacks: Sequence[StackPlan], variables: Mapping[str, Any]) -> None:
        """Assign the tables to `variables`, by the name of a stack's array, which hold stored rows.

        Rows of a table that is read whole are gathered from the value read: once an operation has gathered from a
        variable, TensorFlow copies it at every read.
        """
        self._variables = variables
        self._stacks = {stack.name: stack for stack in stacks}
        self._places = {place.table: (stack, place) for stack in stacks for place in stack.tables}
        self._whole = {stack.name for stack in stacks if any(place.table in self.read_whole for place in stack.tables)}

    def bind_names(self, names: Mapping[str, TableNames]) -> None:
        """Assign the arrays of the tables in `vocabularies`."""
        self._names = names

    def note_names(self, table: str, given: Vocabulary | None = None) -> Vocabulary:
        """Record that a feature takes names of `table`, and return its vocabulary. See `name_arrays`."""
        before, key = self.vocabularies.get(table), (table, id(given))
        if before is None or (given is not None and key not in self._compared):
            rows = find_table(table, self._available).rows
            saved = self._saved if before is None else self.vocabularies.get
            wanted = saved(table) if given is None else given
            where = f"a feature of table {table!r}"
            self.vocabularies[table] = vocabulary_of(
                where, Vocabulary() if wanted is None else wanted, table, rows, saved
            )
            self._compared[key] = given  # kept, so that no other object has its id
        return self.vocabularies[table]

    def given_names(self, checkpoint: Checkpoint) -> dict[str, Vocabulary]:
        """Return {table: its names}, where the factory of a model gives them and the checkpoint has none."""
        return {table: its for table, its in self.vocabularies.items() if table not in checkpoint.vocabularies}

    def note_numbers(self, table: str, feature: str | None = None) -> None:
        """Refuse a layer that takes row numbers of `table` if the checkpoint has names: its numbers may be of another order.

        A layer may take both, row numbers for `feature`, if the trained one did.
        """
        saved = self._saved(table)
        if saved is None or not len(saved):
            return
        if feature is None:
            raise ConfigError(
                f"table {table!r}: the checkpoint has {len(saved)} names of its rows, and the model takes row numbers. Give its "
                "features the vocabulary that the table was trained with. If clients send row numbers, build the layer with "
                "takes_rows=True too."
            )
        if self._with_rows is not None and (feature, table) not in self._with_rows:
            raise ConfigError(
                f"feature {feature!r}: the model takes row numbers of table {table!r} for it, and in training no feature of that "
                "name did. Give the feature the table's vocabulary, or the name that it had in training."
            )

    def name_arrays(self, table: str, given: Vocabulary | None = None) -> TableNames:
        """Return the index of a table's names; see `TableSource`."""
        vocabulary = self.note_names(table, given)
        if self._are_zeros:
            if table not in self._constants:
                self._constants[table] = constant_names(vocabulary)
            return self._constants[table]
        if self._names is None or self._answer is not None:
            return TableNames(
                tf.zeros([1, WAYS], tf.int64), tf.fill([WAYS], -1), 1, b""
            )  # of a trace that is thrown away
        if table not in self._names:
            raise ExportError(f"table {table!r}: its names were not written before the graph that finds them was made.")
        return self._names[table]

    @property
    def are_zeros(self) -> bool:
        """Return True inside of `rows_of_zeros`."""
        return self._are_zeros

    def stack_of(self, table: str) -> tuple[StackPlan, Any]:
        """Return the stack of a table, and the variable with its stored rows."""
        stack, _ = self._places[table]
        return stack, self._variables[stack.name]

    def place(self, table: str) -> tuple[str, Placement]:
        """Return the stack of a table, and its placement there."""
        stack, place = self._places[table]
        return stack.name, place

    @contextlib.contextmanager
    def rows_of_zeros(self) -> Iterator[None]:
        """Make every lookup return zeros, to run a model whose tables have no data."""
        self._are_zeros = True
        try:
            yield
        finally:
            self._are_zeros = False
            self._constants.clear()

    @contextlib.contextmanager
    def answered_by(self, answer: Answer) -> Iterator[None]:
        """Make `answer` return the activations of every lookup. It takes the features' ids, and the lookup itself.

        Names are not found then: their rows have no meaning.
        """
        self._answer = answer
        try:
            yield
        finally:
            self._answer = None

    def answer(self, features: Sequence[Ids], look_up: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Return the activations of `features`; see `TableSource`."""
        return look_up() if self._answer is None else self._answer(features, look_up)

    def lookup(self, features: Sequence[FlatIds], tables: Sequence[str]) -> list[Tensor]:
        """Return the activations of `features`, each in its table, with one gather per stack."""
        if not self._places:
            if tf.executing_eagerly():
                raise ExportError(
                    "the model looked up its tables while it was being built. Build it from symbolic inputs."
                )
            with tf.name_scope(_UNBOUND):
                return gather_grouped(
                    list(features), list(tables), lambda table, ids: tf.gather(self._stand_in(table), ids)
                )
        stacks = [self._places[table][0].name for table in tables]
        activations: list[Tensor] = [None] * len(features)
        for stack in dict.fromkeys(stacks):
            mine = [index for index, name in enumerate(stacks) if name == stack]
            places = [self._places[tables[index]][1] for index in mine]
            own = [features[index].within(span_of(place)) for index, place in zip(mine, places, strict=True)]
            if len(own) > 1 and all(map(_is_plain, own)):
                sizes, ids = _shifted_together(own, places)
                rows = tf.split(self.gather(stack, ids), sizes, num=len(own))
                found = [feature.combine(part) for feature, part in zip(own, rows, strict=True)]
            else:
                found = gather_grouped(_shifted(own, places), [stack] * len(own), self.gather)
            for index, activation in zip(mine, found, strict=True):
                activations[index] = activation
        return activations

    def are_gathered_by(self, function: Any) -> bool:
        """Return True if a traced function uses a stack without a table that is read whole."""
        used = {id(tensor) for tensor in function.captured_inputs}
        return any(id(array.handle) in used for name, array in self._variables.items() if name not in self._whole)

    def table(self, name: str) -> "_WholeTable":
        """Return a table that is read where it is used."""
        self.were_asked_for = True
        return _WholeTable(self, find_table(name, self._available))

    def read(self, table: str) -> Tensor:
        """Return all rows of a table, float32 [rows, dim]: the stored variable itself, without a copy.

        Raises:
            ExportError: the table has no data yet, or shares its stack with other tables.
        """
        info = self._available[table]
        if not self._places and tf.executing_eagerly():
            raise ExportError(
                f"the model read table {table!r} while it was being built. Read layer.embedding_tables in the "
                "call of a layer."
            )
        if not self._places:
            if table not in self.read_whole:
                self.read_whole.append(table)
            with tf.name_scope(_UNBOUND):
                return self._stand_in(table).read_value()
        if self._are_zeros:
            if 4 * info.rows * info.dim > _MAX_ZERO_BYTES:
                raise ExportError(
                    f"table {table!r} is read whole, and is too large to test the model with zeros in its place."
                )
            return tf.zeros([info.rows, info.dim])
        stack, _ = self._places[table]
        if table not in self.read_whole:
            raise ExportError(
                f"the model reads table {table!r} whole, but did not when it was first traced. Read it in every "
                "call of the model."
            )
        return self._variables[stack.name].read_value()

    def _stand_in(self, table: str) -> Any:
        """Return a variable that stands for a table without a value. A function that keeps it cannot be saved."""
        if table not in self._unbound:
            info = self._available[table]
            with tf.init_scope():
                self._unbound[table] = resource_variable_ops.UninitializedVariable(
                    shape=[info.rows, info.dim], dtype=tf.float32, trainable=False
                )
        return self._unbound[table]

    def gather(self, stack: str, ids: Tensor) -> Tensor:
        """Return float32 [*shape, dim] for int64 `ids` of that shape, rows of the stack."""
        plan = self._stacks[stack]
        if self._are_zeros:
            return tf.zeros(tf.concat([tf.shape(ids), [plan.dim]], 0))
        codec = STORAGES[plan.storage]
        flat = ids if codec.columns(plan.dim) == plan.dim and plan.overlay_rows is None else tf.reshape(ids, [-1])
        if plan.overlay_rows is not None:
            stored = _gather_overlaid(plan, self._variables, flat)
        else:
            source = self._variables[stack].read_value() if stack in self._whole else self._variables[stack]
            stored = tf.gather(source, flat, name=f"gather_{stack}")
        rows = codec.decode_in_graph(tf, stored, plan.dim)
        return rows if flat is ids else tf.reshape(rows, _shape_of_rows(ids, plan.dim))


class _WholeTable:
    """A table as the layers of a model see it during an export. It becomes a tensor in any operation that uses it."""

    dtype, sparse, ragged = tf.float32, False, False

    def __init__(self, tables: StackedTables, info: "TableInfo") -> None:
        self.name, self.shape = info.name, tf.TensorShape([info.rows, info.dim])
        self._tables = tables

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Tensor:
        """Return the tensor; see `tf.types.experimental.TensorProtocol`."""
        value = self.read_value()
        if dtype is not None and tf.as_dtype(dtype) != value.dtype:
            raise TypeError(f"table {self.name!r} is {value.dtype.name}, not {tf.as_dtype(dtype).name}.")
        return value

    def read_value(self) -> Tensor:
        """Return the tensor, as a variable does."""
        return self._tables.read(self.name)

    value = read_value

    def get_shape(self) -> Any:
        """Return [rows, dim]."""
        return self.shape


def _as_tensors_do(operator: str) -> Any:
    return lambda table, *others: getattr(tf.Tensor, operator)(table.read_value(), *others)


for _operator in sorted(tf.Tensor.OVERLOADABLE_OPERATORS - {"__eq__", "__ne__"}):
    setattr(_WholeTable, _operator, _as_tensors_do(_operator))


def span_of(place: Placement) -> Span:
    """Return the ids of the exported rows of a table."""
    return Span(place.table, place.rows)


def _shape_of_rows(ids: Tensor, dim: int) -> Any:
    """Return [*shape of `ids`, dim]. It is a constant if one size is unknown: fewer operations to optimize at load time."""
    sizes = [] if ids.shape.rank is None else ids.shape.as_list()
    if sizes.count(None) == 1 and 0 not in sizes:
        return [*(-1 if size is None else size for size in sizes), dim]
    return tf.concat([tf.shape(ids), [dim]], 0)


def _is_plain(feature: FlatIds) -> bool:
    """Return True if row k is activation k, for any id."""
    return type(feature.strategy) is EachRow and feature.shares is None and not feature.droppable


def _shifted_together(features: Sequence[FlatIds], places: Sequence[Placement]) -> tuple[Tensor, Tensor]:
    """Return the number of ids of each plain feature, and all ids concatenated, as ids of the stack.

    Features usually have the same length. They then form the rows of a matrix, and the check and shift take a few
    operations for all.
    """
    ids = [feature.ids for feature in features]
    sizes, joined = tf.concat(tf.shape_n(ids, tf.int64), 0), tf.concat(ids, 0)
    are_even = tf.reduce_all(sizes == sizes[0])
    matrix = tf.reshape(joined, tf.where(are_even, tf.constant([len(ids), -1], tf.int64), [1, -1]))
    ranges = IdRanges(
        features=[feature.feature for feature in features],
        spans=[span_of(place) for place in places],
        policies=["error"] * len(features),
    )
    are_inside = tf.reduce_all(RangedIds(ids=matrix, ranges=ranges, spread=lambda numbers: numbers[:, None]).inside())
    offsets = tf.constant([[place.row_offset] for place in places], tf.int64)
    # The shape of a vector is its size.
    shapes = [feature.shape for feature in features if len(feature.static_shape) != 1]
    fail = not_inlined(
        lambda joined, sizes, *shapes: _shifted_apart(features, tf.split(joined, sizes, num=len(ids)), shapes, places),
        tf.TensorSpec([None], tf.int64),
        tf.TensorSpec([len(ids)], tf.int64),
        *(tf.TensorSpec(shape.shape, shape.dtype) for shape in shapes),
    )
    moved = tf.cond(
        are_even & are_inside, lambda: tf.reshape(matrix + offsets, [-1]), lambda: fail(joined, sizes, *shapes)
    )
    return sizes, moved


def _shifted_apart(
    features: Sequence[FlatIds], ids: Sequence[Tensor], shapes: Sequence[Tensor], places: Sequence[Placement]
) -> Tensor:
    """Shift features of any lengths, one by one. Ids outside of their tables fail here. See `_shifted_together`."""
    given = iter(shapes)
    apart = [
        dataclasses.replace(
            feature,
            ids=one,
            strategy=EachRow(one),
            shape=next(given) if len(feature.static_shape) != 1 else tf.shape(one, tf.int64),
        )
        for feature, one in zip(features, ids, strict=True)
    ]
    return tf.concat([feature.ids for feature in _shifted(apart, places)], 0)


def _shifted(features: Sequence[FlatIds], places: Sequence[Placement]) -> list[FlatIds]:
    """Return features of one stack with ids of the stack. An id outside its table fails; it never reads a neighbour's
    row.
    """
    pairs = list(zip(features, places, strict=True))
    shift = check_range([feature.ranged(span_of(place)) for feature, place in pairs])
    moved = []
    for feature, place in pairs:
        ids = feature.ids + (shift + place.row_offset)
        ids = tf.where(feature.ids < 0, feature.ids, ids) if feature.droppable else ids
        moved.append(dataclasses.replace(feature, ids=ids, strategy=feature.strategy.of_lists()))
    return moved


def _gather_overlaid(stack: StackPlan, variables: Mapping[str, Any], ids: Tensor) -> Tensor:
    """Return the stored rows [n, columns] for int64 `ids` [n], rows of the stack.

    A row whose bit is set in its word is in the overlay. Its place there is the number of bits up to its own, plus the
    upper half of the word. There is no branch: with no such row, these operations take less time than the parts of a branch
    that is not taken, and TensorFlow optimizes every part once per signature when it loads the graph.

    Args:
        stack: has an overlay.
        variables: the arrays of the stack, by name.
        ids: inside the stack.
    """
    base, rows, words = (variables[array.name] for array in stack.arrays)
    word = tf.gather(words, tf.bitwise.right_shift(ids, 5))
    up_to_own = tf.bitwise.left_shift(word, 63 - tf.bitwise.bitwise_and(ids, 31))  # the bit of the row is the sign
    hit = up_to_own < 0
    hits = tf.where(hit)
    found = tf.gather(base, ids, name=f"gather_{stack.name}")
    count = tf.cast(tf.raw_ops.PopulationCount(x=tf.gather_nd(up_to_own, hits)), tf.int64)
    place = tf.bitwise.right_shift(tf.gather_nd(word, hits), 32) + count
    # In place, because `TensorScatterUpdate` copies all rows. Nothing else reads the tensor, which is a copy of the base's rows.
    return tf.raw_ops.InplaceUpdate(x=found, i=tf.cast(tf.squeeze(hits, 1), tf.int32), v=tf.gather(rows, place))


def make_names(
    vocabularies: Mapping[str, Vocabulary], folder: Path, layout: str
) -> tuple[dict[str, TableNames], tuple[NamesEntry, ...]]:
    """Return the names of each table for the graph and for the manifest. With layout mmap, write their files into `folder`."""
    arrays: dict[str, TableNames] = {}
    entries = []
    for number, (table, vocabulary) in enumerate(sorted(vocabularies.items())):
        index = NameIndex(vocabulary)
        stored = [
            store_array(value, f"names_{number}_{what}", folder, f"{NAMES_FOLDER}/{number}.{what}", layout)
            for what, value in (("keys", index.keys), ("numbers", index.numbers.reshape(-1)))
        ]
        (keys, _), (numbers, _) = stored
        arrays[table] = TableNames(keys, numbers, len(index.keys), salt_text(index.salt))
        entries.append(
            NamesEntry(
                table=table,
                dtype=vocabulary.dtype,
                count=len(vocabulary),
                oov_buckets=vocabulary.oov_buckets,
                salt=salt_text(index.salt).decode(),
                arrays=tuple(entry for _, entry in stored if entry is not None),
            )
        )
    return arrays, tuple(entries)


def constant_names(vocabulary: Vocabulary) -> TableNames:
    """Return the names as constants, for a model that runs while it is exported."""
    index = NameIndex(vocabulary)
    numbers = tf.constant(index.numbers.reshape(-1))
    return TableNames(tf.constant(index.keys), numbers, len(index.keys), salt_text(index.salt))


def ran_without_rows(error: BaseException) -> bool:
    """Returns True if `error` is TensorFlow's, because a model ran before its tables had rows."""
    return isinstance(error, tf.errors.OpError) and _UNBOUND in str(error)
