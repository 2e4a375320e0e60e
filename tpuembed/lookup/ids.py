"""One feature of one call: its ids, of one kind, made once where they enter. Every lookup flattens them the same way.

`ids_of` returns the kind: dense ids are looked up one by one, sparse and ragged ids are pooled over their last axis, and
padded ids are such ids as a matrix, for programs that are compiled for one shape.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from tpuembed.config import FeatureConfig
from tpuembed.config.structure import flatten_up_to, pack_like
from tpuembed.errors import ConfigError
from tpuembed.lookup.flat_ids import FlatIds
from tpuembed.lookup.names import check_type_of_names
from tpuembed.lookup.pooling import EachRow, PaddedMatrix, Segments, shares
from tpuembed.lookup.ranges import DROPPED, ESCAPED

__all__ = [
    "DenseIds",
    "Ids",
    "PaddedIds",
    "RaggedIds",
    "SparseIds",
    "as_tensors",
    "cut",
    "ids_of",
    "kind_of",
    "merged_shape",
]

Tensor = Any
Shape = tuple[int | None, ...]

_EXACT_INTEGERS = {tf.float16: 2**11, tf.bfloat16: 2**8, tf.float32: 2**24, tf.float64: 2**53}


def named(path: str) -> str:
    """Return how messages call the feature at `path`, which is empty for the only one."""
    return f"feature {path!r}" if path else "the feature"


def ids_of(path: str, config: FeatureConfig, ids: Any, weights: Any = None, input_shape: Shape | None = None) -> "Ids":
    """Return one feature's ids and weights.

    Args:
        path: the path of the feature in the structure, for messages.
        config: its FeatureConfig.
        ids: a tensor of any kind, symbolic ones included, or a value that converts to a tensor.
        weights: of the same kind, or None.
        input_shape: the known part of the ids' shape that `build` was given, or None.

    Raises:
        ConfigError: there are no ids, or ids of unknown rank.
    """
    if ids is None:
        raise ConfigError(f"{named(path)}: no ids were given. Pass a tensor for every feature.")
    kind = kind_of(ids)
    if kind is DenseIds and not isinstance(ids, keras.KerasTensor):
        ids = tf.convert_to_tensor(ids)
    if not isinstance(ids, keras.KerasTensor) and ids.shape.rank is None:
        raise ConfigError(f"{named(path)}: the rank of its ids is unknown. Set their shape (tf.ensure_shape).")
    return kind(path, config, ids, weights, input_shape)


def kind_of(tensor: Any) -> type["Ids"]:
    """Return the class of a tensor's ids. Only this function asks for the kind of a tensor."""
    if isinstance(tensor, tf.RaggedTensor) or getattr(tensor, "ragged", False):
        return RaggedIds
    return SparseIds if isinstance(tensor, tf.SparseTensor) or getattr(tensor, "sparse", False) else DenseIds


@dataclasses.dataclass(frozen=True)
class Ids(abc.ABC):
    """The ids of one feature. See `ids_of`. Methods raise ConfigError for ids, weights and shapes that have no meaning together.

    Attributes:
        kind: the word for it in messages.
        is_combined: True if the rows of the last axis become one activation, or a sequence.
        names: what the ids were made of, of the same kind as they are. None if they were given.
    """

    path: str
    config: FeatureConfig
    ids: Any
    weights: Any = None
    input_shape: Shape | None = None
    names: Any = None

    kind: ClassVar[str]
    is_combined: ClassVar[bool] = True

    @property
    def table(self) -> str:
        """Return the name of its table."""
        return self.config.table.name

    def flatten(self, densify: Callable[["Ids"], "PaddedIds"] | None = None) -> FlatIds:
        """Return the ids as lookups on CPUs take them.

        Args:
            densify: returns sparse or ragged ids as padded ones, for programs that are compiled for one shape.
        """
        given, policy = self.as_int64(), self.config.out_of_vocabulary
        assert policy is not None, "a FeatureConfig takes its table's"
        layout = self._layout()
        given.check(layout.length)
        flat = (densify(given) if densify is not None and self.is_combined else given)._flat(layout.length)
        checks = [
            tf.debugging.assert_equal(
                flat.shape[axis], tf.constant(size, tf.int64), f"{what}: the ids give another shape"
            )
            for axis, size, what in layout.checks
        ]
        with tf.control_dependencies([check for check in checks if check is not None]):
            shape = tf.identity(flat.shape) if checks else flat.shape
        return dataclasses.replace(
            flat,
            shape=tf.constant(layout.shape, tf.int64) if layout.is_reshaped else shape,
            static_shape=layout.shape,
            row_shape=shape if layout.is_reshaped else None,
            feature=self.path or self.config.name or self.table,
            policy=policy,
            has_names=self.config.vocabulary is not None,
        )

    def known_shape(self) -> Shape:
        """Return what output_shape, build() and the ids say of the activations' shape, without their last dimension."""
        return self._layout(before_lookup=True).shape

    def check_symbolic(self, takes_names: bool) -> None:
        """Raise ConfigError if symbolic ids, or names, and weights of a functional model can never be looked up. See `check`."""
        dtype, vocabulary = tf.as_dtype(self.ids.dtype), self.config.vocabulary
        if takes_names and vocabulary is not None:
            check_type_of_names(named(self.path), dtype, vocabulary.dtype)
        else:
            self._check_integers(dtype)
        if not self.is_of_input():
            return  # other layers of Keras do not say that their outputs are ragged or sparse
        self.check(self._layout(before_lookup=True).length)
        if self.weights is None:
            return
        of_ids, of_weights = tuple(self.ids.shape), tuple(self.weights.shape)
        pairs = zip(of_ids, of_weights, strict=False)
        if len(of_ids) != len(of_weights) or any(None not in pair and pair[0] != pair[1] for pair in pairs):
            raise ConfigError(
                f"{named(self.path)}: the ids have the shape {of_ids}, and the weights {of_weights}. Give one weight for each id."
            )

    def is_of_input(self) -> bool:
        """Return True if ids and weights are each a `keras.Input`, whose kind is the one that the layer will get."""
        given = (tensor for tensor in (self.ids, self.weights) if tensor is not None)
        histories = [getattr(tensor, "_keras_history", None) for tensor in given]
        return all(each is not None and isinstance(each.operation, keras.layers.InputLayer) for each in histories)

    # ---- shapes

    def _layout(self, before_lookup: bool = False) -> "_Layout":
        """Return the arrangement of the activations. Before a lookup, output_shape counts where only the lookup can tell."""
        wanted, given = self.config.output_shape, tuple(self.ids.shape)
        batch = given[0] if given and given[0] is not None else (self.input_shape or (None,))[0]
        length = self._length(batch, before_lookup)
        shape, checks = self._leading(given, length), list[tuple[int, int, str]]()
        if self.input_shape is not None:
            of_build = self.input_shape
            if self.is_combined:  # its last axes are those of `shape`
                of_build = (*of_build[:-1], *shape[max(len(of_build) - 1, 0) :])
            what = f"{named(self.path)}: build()'s input_shape {self.input_shape}"
            shape = _completed(shape, of_build, what, checks)
        if wanted is None:
            return _Layout(length, shape, checks)
        if self._fills(shape, wanted, before_lookup):
            return _Layout(length, wanted, checks, is_reshaped=True)
        shape = _completed(shape, wanted, f"{named(self.path)}: output_shape {wanted}", checks)
        return _Layout(length, shape, checks)

    def _length(self, batch: int | None, before_lookup: bool) -> int:  # noqa: ARG002 - for ragged ids
        """Return the number of rows of an example that are kept as a sequence. Returns 0 if they become one activation."""
        return self.config.max_sequence_length

    def _leading(self, shape: Shape, length: int) -> Shape:
        """Return the shape of the activations of ids of `shape`, without the last dimension."""
        if not self.is_combined:
            return shape
        return (shape[0], length) if length else shape[:-1]

    def _fills(self, shape: Shape, wanted: Shape, before_lookup: bool) -> bool:  # noqa: ARG002 - for ragged ids
        """Return True if activations of `shape` are reshaped to output_shape."""
        return False

    # ---- values

    def as_int64(self) -> "Ids":
        """Return the ids as int64.

        Keras traces some models with float inputs. So a float type is accepted if it can hold every id of the table.
        The step fails if a float id is NaN, infinite, negative or fractional. XLA drops the check: there, such an id counts as
        outside the table.
        """
        dtype = self.ids.dtype
        self._check_integers(dtype)

        def convert(values: Tensor) -> Tensor:
            if not dtype.is_floating:  # otherwise the highest of uint64 become negative
                return tf.cast(tf.minimum(values, tf.int64.max) if dtype == tf.uint64 else values, tf.int64)
            wide = tf.cast(values, tf.float64)
            whole = (wide >= 0) & (wide < 2.0**63) & tf.equal(wide, tf.floor(wide))
            message = "float ids must be whole numbers from 0; got one that is negative, fractional or not finite"
            check = tf.debugging.Assert(tf.reduce_all(whole), [f"feature {self.path}: {message}"])
            with tf.control_dependencies([] if check is None else [check]):
                return tf.where(whole, tf.cast(values, tf.int64), tf.int64.max)

        return dataclasses.replace(self, ids=self._map(convert))

    def _check_integers(self, dtype: Any) -> None:
        """Raise ConfigError if a tensor of this type cannot hold the ids of the table."""
        table = self.config.table
        if not (dtype.is_integer or dtype.is_floating):
            mend = ""
            if dtype.name == "string":
                mend = " Give the feature a vocabulary to take names."
                if self.config.vocabulary is not None:
                    mend = " The layer takes rows: make them with its names_to_rows, or build it without takes_rows."
            raise ConfigError(f"{named(self.path)}: ids must be integers, got {dtype.name}.{mend}")
        if dtype.is_floating and table.vocabulary_size > _EXACT_INTEGERS.get(dtype, 0):
            raise ConfigError(
                f"{named(self.path)}: {dtype.name} cannot hold every id of table {table.name!r} "
                f"({table.vocabulary_size} rows). Pass integer ids."
            )

    def from_names(self, rows_of: Callable[[Tensor, bool], Tensor]) -> "Ids":
        """Return the ids of names.

        Args:
            rows_of: called with the names, [n], and True if they are lists with padding. Returns the row of each, int64 [n].
        """

        def convert(names: Tensor) -> Tensor:
            rows = tf.reshape(rows_of(tf.reshape(names, [-1]), self.is_combined), tf.shape(names))
            rows.set_shape(names.shape)
            return rows

        return dataclasses.replace(self, ids=self._map(convert), names=self.ids)

    def check(self, length: int) -> None:  # noqa: B027 - padded ids were checked before they were padded
        """Raise ConfigError if the ids, or their weights, have no meaning. `length` is that of a sequence, or 0."""

    def _map(self, function: Callable[[Tensor], Tensor]) -> Any:
        """Return the ids with `function` of their values."""
        return function(self.ids)

    @abc.abstractmethod
    def _flat(self, length: int) -> FlatIds:
        """Return the lookup of int64 ids, as sequences of `length` if it is not 0."""


@dataclasses.dataclass(frozen=True)
class _Layout:
    """The arrangement of activations.

    Attributes:
        length: the number of rows of an example that are kept as a sequence, or 0.
        shape: the known part of the shape, without the last dimension.
        checks: (axis, size, message) of sizes that only the lookup can compare.
        is_reshaped: True if the activations are reshaped to `shape`.
    """

    length: int
    shape: Shape
    checks: list[tuple[int, int, str]]
    is_reshaped: bool = False


@dataclasses.dataclass(frozen=True)
class DenseIds(Ids):
    """A Tensor of any rank, looked up one by one."""

    kind = "dense"
    is_combined = False

    def check(self, length: int) -> None:
        """Raise ConfigError if there are weights, or a sequence is wanted."""
        if self.weights is not None:
            raise ConfigError(
                f"{named(self.path)}: weights were given for dense ids, which are not combined. Drop the weights."
            )
        if length:
            raise ConfigError(
                f"{named(self.path)}: max_sequence_length needs sparse or ragged ids. Dense ids keep their shape. Drop it."
            )

    def _flat(self, length: int) -> FlatIds:  # noqa: ARG002
        flat = tf.reshape(self.ids, [-1])
        shape = tf.shape(self.ids, tf.int64)
        return FlatIds(ids=flat, shape=shape, static_shape=tuple(self.ids.shape), strategy=EachRow(flat))


@dataclasses.dataclass(frozen=True)
class PaddedIds(Ids):
    """An int64 Tensor [..., hot] padded with DROPPED, with float32 weights of the same shape."""

    kind = "padded"

    def _flat(self, length: int) -> FlatIds:
        ids, combiner = self.ids, self.config.table.combiner
        if self.config.out_of_vocabulary == "error":
            ids = tf.maximum(ids, DROPPED)
        leading = tuple(ids.shape)[:-1]
        if length:
            ids = cut(ids, length)
            shape, flat = tf.shape(ids, tf.int64), tf.reshape(ids, [-1])
            return FlatIds(
                ids=flat, shape=shape, static_shape=(leading[0], length), strategy=EachRow(flat), droppable=True
            )
        shape, flat, weights = tf.shape(ids, tf.int64)[:-1], tf.reshape(ids, [-1]), self.weights
        if weights is not None or combiner != "sum":
            present = tf.not_equal(flat, DROPPED)
            weights = (
                tf.cast(present, tf.float32) if weights is None else tf.where(present, tf.reshape(weights, [-1]), 0.0)
            )
        # A product would lose a number of examples that is known while tracing.
        examples = shape[0] if len(leading) == 1 else tf.reduce_prod(shape)
        strategy = PaddedMatrix(flat, examples, tf.shape(ids)[-1])
        return FlatIds(
            ids=flat,
            shape=shape,
            static_shape=leading,
            strategy=strategy,
            shares=shares(weights, strategy, combiner),
            droppable=True,
        )


@dataclasses.dataclass(frozen=True)
class _ListedIds(Ids):
    """Ids whose values are a vector, with the example and the position of each."""

    @abc.abstractmethod
    def to_dense(self, values: Any, padding: float) -> Tensor:
        """Return `values` of the kind as a dense tensor."""

    @abc.abstractmethod
    def _entries(self) -> "_Entries":
        """Return the values and weights."""

    def _same_positions(self, weights: Tensor, where: Tensor, ids_where: Tensor) -> Tensor:
        """Return float32 `weights`, after a check that they have the same positions as the ids."""
        if not self.config.validate_weights_and_indices or where is ids_where:
            return tf.cast(weights, tf.float32)
        message = f"{named(self.path)}: the weights and the ids have different positions"
        check = tf.debugging.assert_equal(tf.cast(where, tf.int64), tf.cast(ids_where, tf.int64), message)
        with tf.control_dependencies([check] if check is not None else []):
            return tf.cast(weights, tf.float32)

    def check(self, length: int) -> None:
        """Raise ConfigError if the weights are of another kind, or belong to a sequence."""
        if self.weights is None:
            return
        if kind_of(self.weights) is not type(self):
            raise ConfigError(
                f"{named(self.path)}: the ids are {self.kind}, and the weights are {kind_of(self.weights).kind} "
                f"({type(self.weights).__name__}). Make both {self.kind}."
            )
        if length:
            raise ConfigError(
                f"{named(self.path)}: weights have no meaning with max_sequence_length or an output_shape of sequences. "
                "Drop one."
            )

    def _flat(self, length: int) -> FlatIds:
        entries, validate = self._entries(), self.config.validate_weights_and_indices
        ids, segments = entries.ids, entries.segments
        droppable = validate or length > 0
        if droppable and not validate:
            ids = tf.where(tf.equal(ids, DROPPED), tf.constant(ESCAPED, tf.int64), ids)
        keep = None
        if length:
            keep = entries.positions < length
            segments = segments * length + entries.positions
        if validate:
            # With another policy than "error", ids below DROPPED count as outside the table and are kept.
            valid = ids >= 0 if self.config.out_of_vocabulary == "error" else tf.not_equal(ids, DROPPED)
            keep = valid if keep is None else keep & valid
        if keep is not None:
            ids, segments = tf.where(keep, ids, DROPPED), tf.where(keep, segments, -1)
        shape = tf.concat([entries.shape, tf.constant([length] if length else [], tf.int64)], 0)
        strategy = Segments(segments, tf.reduce_prod(shape))
        return FlatIds(
            ids=ids,
            shape=shape,
            static_shape=self._leading(tuple(self.ids.shape), length),
            strategy=strategy,
            shares=None if length else shares(entries.weights, strategy, self.config.table.combiner),
            droppable=droppable,
        )


@dataclasses.dataclass(frozen=True)
class _Entries:
    """Sparse or ragged ids: n values, the example of each, its position there, its weight, and the examples' shape."""

    ids: Tensor
    segments: Tensor
    positions: Tensor
    weights: Tensor | None
    shape: Tensor


@dataclasses.dataclass(frozen=True)
class SparseIds(_ListedIds):
    """A SparseTensor of rank 2 or above."""

    kind = "sparse"

    def _map(self, function: Callable[[Tensor], Tensor]) -> Any:
        mapped = tf.SparseTensor(self.ids.indices, function(self.ids.values), self.ids.dense_shape)
        mapped.set_shape(self.ids.shape)  # it is lost otherwise
        return mapped

    def to_dense(self, values: Any, padding: float) -> Tensor:
        """Return `values` as a dense tensor."""
        return tf.sparse.to_dense(values, tf.cast(padding, values.dtype))

    def check(self, length: int) -> None:
        """Raise ConfigError for a rank that is not combined too."""
        rank = len(self.ids.shape)
        if rank < 2:
            raise ConfigError(
                f"{named(self.path)}: sparse ids must have rank 2 or above, got {rank}. A keras.Input of them has shape=(None,)."
            )
        super().check(length)
        if length and rank != 2:
            raise ConfigError(f"{named(self.path)}: max_sequence_length needs sparse ids of rank 2, got rank {rank}.")

    def _entries(self) -> _Entries:
        ids, weights = self.ids, self.weights
        shape = tf.cast(ids.dense_shape[:-1], tf.int64)
        strides = tf.math.cumprod(shape, exclusive=True, reverse=True)
        segments = tf.reduce_sum(ids.indices[:, :-1] * strides, 1)
        if weights is not None:
            weights = self._same_positions(weights.values, weights.indices, ids.indices)
        return _Entries(ids.values, segments, ids.indices[:, -1], weights, shape)


@dataclasses.dataclass(frozen=True)
class RaggedIds(_ListedIds):
    """A RaggedTensor of rank 2."""

    kind = "ragged"

    def check(self, length: int) -> None:
        """Raise ConfigError for a rank that is not combined too."""
        rank = len(self.ids.shape)
        if rank != 2 or (isinstance(self.ids, tf.RaggedTensor) and self.ids.ragged_rank != 1):
            raise ConfigError(
                f"{named(self.path)}: ragged ids must have rank 2, got rank {rank}. A keras.Input of them has shape=(None,)."
            )
        super().check(length)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Any:
        return tf.ragged.map_flat_values(function, self.ids)

    def to_dense(self, values: Any, padding: float) -> Tensor:
        """Return `values` as a dense tensor."""
        return values.to_tensor(tf.cast(padding, values.dtype))

    def _entries(self) -> _Entries:
        ids, weights = self.ids, self.weights
        segments = tf.cast(ids.value_rowids(), tf.int64)
        starts = tf.cast(tf.gather(ids.row_starts(), segments), tf.int64)
        positions = tf.range(tf.size(segments, tf.int64)) - starts
        if weights is not None:
            weights = self._same_positions(weights.values, weights.row_splits, ids.row_splits)
        return _Entries(ids.values, segments, positions, weights, tf.reshape(tf.cast(ids.nrows(), tf.int64), [1]))

    def _length(self, batch: int | None, before_lookup: bool) -> int:
        """Return how many rows of each example fit into output_shape. Returns 0 if it needs one combined row.

        Source: `serving_embedding_lookup`. It reads an output_shape with as many rows as examples as combined rows, and
        one with a multiple of them as sequences.
        """
        wanted = self.config.output_shape
        if self.config.max_sequence_length or wanted is None:
            return self.config.max_sequence_length
        size = tf.TensorShape(wanted).num_elements()
        if batch is not None and size is not None:
            return size // batch if size > batch > 0 and size % batch == 0 else 0
        if len(wanted) > 1 and not before_lookup:
            raise ConfigError(
                f"{named(self.path)}: output_shape {wanted} of {batch or 'an unknown number of'} ragged examples may mean "
                "combined rows or sequences. Make both shapes known (tf.ensure_shape), or set max_sequence_length instead."
            )
        return 0

    def _fills(self, shape: Shape, wanted: Shape, before_lookup: bool) -> bool:
        rows, room = tf.TensorShape(shape).num_elements(), tf.TensorShape(wanted).num_elements()
        if rows is None or room is None:
            return before_lookup and len(wanted) > len(shape)
        return rows == room


def _completed(known: Shape, wanted: Shape, what: str, checks: list[tuple[int, int, str]]) -> Shape:
    """Return `known` with its unknown sizes from `wanted`, and append to `checks` the sizes that were unknown."""
    merged = merged_shape(known, wanted, what)
    checks += [(axis, size, what) for axis, size in enumerate(wanted) if size is not None and known[axis] is None]
    return merged


def merged_shape(known: Shape, wanted: Shape, what: str) -> Shape:
    """Return the merged known sizes of two shapes. Raises ConfigError if they contradict each other: `what` begins it."""
    if not tf.TensorShape(known).is_compatible_with(wanted):
        raise ConfigError(
            f"{what}: the ids give activations of {known}. A combined feature has its ids' shape without the last "
            "dimension, a dense one its ids' shape. Make them equal."
        )
    return tuple(tf.TensorShape(known).merge_with(wanted))


def cut(ids: Tensor, length: int) -> Tensor:
    """Return ids [batch, hot] as [batch, length]: cut, or padded with DROPPED."""
    padding = tf.fill([tf.shape(ids)[0], length], tf.constant(DROPPED, tf.int64))
    return tf.ensure_shape(tf.concat([ids, padding], 1)[:, :length], [None, length])


# ---- Python numbers


def as_tensors(structure: Any, features: Any, what: str) -> Any:
    """Return `features` with Python numbers and names, and lists of them, as tensors, because Keras layers do not take them.

    Raises:
        ConfigError: `features`, which it calls `what`, has another structure than `structure`, or lists differ in length.
    """
    leaves = [(path, leaf) for path, _, leaf in flatten_up_to(structure, features, what)]
    if not any(_is_python(leaf) for _, leaf in leaves):
        return features
    tensors = list[Any]()
    for path, leaf in leaves:
        if not _is_python(leaf):
            tensors.append(leaf)
            continue
        try:
            values = np.asarray(leaf)
            if values.dtype.kind in "SUO":  # numpy cuts NULs from the ends of its own strings
                values = np.asarray(leaf, object)
        except ValueError:
            raise ConfigError(
                f"{named(path)}: lists of different lengths. Pass tf.ragged.constant(ids, dtype=tf.int64)."
            ) from None
        is_whole = values.dtype.kind == "i" or not values.size
        tensors.append(tf.constant(values.astype(np.int64) if is_whole else values))
    return pack_like(structure, tensors)


def _is_python(leaf: Any) -> bool:
    """Return True if `leaf` is a Python number or a name, or lists of them."""
    if isinstance(leaf, list | tuple):
        return all(_is_python(item) or isinstance(item, np.number) for item in leaf)
    return isinstance(leaf, int | float | str | bytes) and not isinstance(leaf, bool)
