"""TensorFlow Recommenders' layers of `tfrs.layers.factorized_top_k`: the best candidates for queries, in one process.

They are `tf.Module`s, so that a SavedModel of one can be called, as that of a Keras 2 layer can. To serve a model, or for more
candidates than fit into memory, use `tpuembed.export_retrieval`.

Source: tensorflow_recommenders/layers/factorized_top_k.py.
"""

import abc
from collections.abc import Callable, Mapping
from typing import Any, Final, Self

import numpy as np
import tensorflow as tf

from tpuembed.config.checks import check_count
from tpuembed.errors import ConfigError
from tpuembed.retrieval.partitions import BLOCK_ROWS, assign, centroids_of, in_order
from tpuembed.retrieval.search import best, search_partitions
from tpuembed.retrieval.training import missing_id, stream_top_k, without_nan

__all__ = ["BruteForce", "ScaNN", "Streaming", "TopK"]

Tensor = Any

_LEAST_ROWS_OF_LEAF: Final = 16


class _Called:
    """Notes what a layer was called with, as types whose batch may have any size.

    Attributes:
        types: of queries.
        excluded: of queries and of their exclusions.
    """

    def __init__(self) -> None:
        self.types: list[Any] = []
        self.excluded: list[tuple[Any, tf.TensorSpec]] = []

    def note(self, queries: Any, exclusions: Tensor | None = None) -> None:
        """Add the types of `queries`, a structure of tensors whose first axis is the batch."""
        tensors = tf.nest.map_structure(tf.convert_to_tensor, queries)
        if not all(each.shape.rank for each in tf.nest.flatten(tensors)):
            return
        types = tf.nest.map_structure(lambda each: tf.TensorSpec([None, *each.shape[1:]], each.dtype), tensors)
        if types not in self.types:
            self.types.append(types)
        if exclusions is not None:
            both = types, tf.TensorSpec([None, None], exclusions.dtype)
            if both not in self.excluded:
                self.excluded.append(both)


class TopK(tf.Module, abc.ABC):
    """Finds the `k` candidates with the largest dot products with a query.

    If there are fewer than `k`, the other places have the score -infinity, and the identifier -1 or "".
    """

    def __init__(self, query_model: Callable[..., Any] | None = None, k: int = 10, name: str | None = None) -> None:
        """Search for the `k` best, with queries that `query_model` makes vectors of. None if they are vectors.

        Raises:
            ConfigError: `k` is not a positive integer.
        """
        super().__init__(name=name)
        check_count("k", k)
        self.query_model = query_model
        self._k = int(k)
        self._called = _Called()

    @abc.abstractmethod
    def index(self, candidates: Tensor, identifiers: Tensor | None = None) -> Self:
        """Replace the candidates.

        Args:
            candidates: float32 [n, dim].
            identifiers: [n]. None for 0, 1, and so on, int32.

        Raises:
            ConfigError: a shape is wrong, or the type of identifiers is another one than before.
        """

    def index_from_dataset(self, candidates: tf.data.Dataset) -> Self:
        """Replace the candidates by those of batches of vectors, or of (identifiers, vectors).

        Raises:
            ConfigError: as `index`.
        """
        _check_elements(candidates)
        batches = list(candidates)
        if not batches:
            raise ConfigError("candidates: the dataset has none. Give at least one batch.")
        if not isinstance(candidates.element_spec, tuple):
            return self.index(tf.concat(batches, 0))
        return self.index(tf.concat([each for _, each in batches], 0), tf.concat([each for each, _ in batches], 0))

    @abc.abstractmethod
    def is_exact(self) -> bool:
        """Return True if the best candidates are always found."""

    def __call__(self, queries: Any, k: int | None = None) -> tuple[Tensor, Tensor]:
        """Return (scores, identifiers) of the `k` best candidates, both [batch, k], the best first.

        Args:
            queries: of the query model, or vectors, float32 [batch, dim] or [dim].
            k: None for that of the layer.

        Raises:
            ConfigError: there are no candidates yet.
        """
        vectors = self._vectors_of(queries)
        if vectors.shape.rank == 2:
            self._called.note(queries)
            return self._search(vectors, self._k if k is None else k)
        scores, identifiers = self._search(vectors[None], self._k if k is None else k)
        return scores[0], identifiers[0]

    def query_with_exclusions(self, queries: Any, exclusions: Tensor, k: int | None = None) -> tuple[Tensor, Tensor]:
        """Return what a call returns, without the identifiers `exclusions`, [batch, n], of each query.

        TensorFlow Recommenders lowers their scores by 100,000 instead.

        Raises:
            ConfigError: there are no candidates yet, or exclusions have another shape or type than identifiers.
        """
        vectors, exclusions = self._vectors_of(queries), tf.convert_to_tensor(exclusions)
        if exclusions.shape.rank != 2:
            raise ConfigError(f"exclusions: must be of shape [batch, n], got {exclusions.shape}.")
        self._called.note(queries, exclusions)
        k = self._k if k is None else k
        scores, identifiers = self._search(vectors, k + tf.shape(exclusions)[1])
        known = identifiers
        if exclusions.dtype != known.dtype:
            if not (exclusions.dtype.is_integer and known.dtype.is_integer):
                raise ConfigError(
                    f"exclusions: are {exclusions.dtype.name}, and the identifiers {known.dtype.name}. Give one type."
                )
            exclusions, known = tf.cast(exclusions, tf.int64), tf.cast(known, tf.int64)
        is_out = tf.reduce_any(tf.equal(known[:, :, None], exclusions[:, None, :]), 2)
        scores, places = tf.math.top_k(tf.where(is_out, float("-inf"), scores), k)
        found = tf.gather(identifiers, places, batch_dims=1)
        return scores, tf.where(scores > float("-inf"), found, missing_id(found.dtype))

    @abc.abstractmethod
    def save(self, path: str, options: tf.saved_model.SaveOptions | None = None) -> None:
        """Write a SavedModel. `tf.saved_model.load` returns what can be called with as many queries as there are.

        Raises:
            ConfigError: the layer cannot be saved, or was not called before.
        """

    def _vectors_of(self, queries: Any) -> Tensor:
        vectors = queries if self.query_model is None else self.query_model(queries)
        return tf.cast(tf.convert_to_tensor(vectors), tf.float32)

    @abc.abstractmethod
    def _search(self, queries: Tensor, k: Any) -> tuple[Tensor, Tensor]:
        """Return scores and identifiers of the `k` best candidates for vectors, [batch, dim]."""


def _check_elements(candidates: tf.data.Dataset) -> None:
    spec = candidates.element_spec
    if not isinstance(spec, tuple):
        return
    if len(spec) != 2:
        raise ConfigError(f"candidates: must be batches of vectors, or of (identifiers, vectors), got {spec}.")
    if not spec[0].shape[:1].is_compatible_with(spec[1].shape[:1]):
        raise ConfigError(
            f"candidates: {spec[0].shape[0]} identifiers have {spec[1].shape[0]} vectors. Batch both alike."
        )


def _checked(candidates: Tensor, identifiers: Tensor | None) -> tuple[Tensor, Tensor]:
    vectors = tf.cast(tf.convert_to_tensor(candidates), tf.float32)
    if vectors.shape.rank != 2:
        raise ConfigError(f"candidates: must be of shape [n, dim], got {vectors.shape}.")
    names = tf.range(tf.shape(vectors)[0]) if identifiers is None else tf.convert_to_tensor(identifiers)
    if names.shape.as_list() != [vectors.shape[0]]:
        raise ConfigError(f"identifiers: {vectors.shape[0]} candidates have identifiers of shape {names.shape}.")
    _check_type(names.dtype)
    finite = tf.reduce_all(tf.math.is_finite(vectors), 1)
    if not len(vectors):
        raise ConfigError("candidates: there are none. Give at least one.")
    if not tf.reduce_all(finite):
        first = int(tf.argmin(tf.cast(finite, tf.int32)))
        raise ConfigError(
            f"candidates: vector {first} has a value that is NaN or infinite, which has no place in an order of scores. Find out "
            "why training produced it."
        )
    return vectors, names


def _check_type(dtype: tf.DType) -> None:
    if dtype.is_unsigned or dtype.is_bool:
        raise ConfigError(f"identifiers: must be integers with a sign, floats or strings, got {dtype.name}.")


class Streaming(TopK):
    """Compares a query with all candidates of a dataset, which is read anew in each call."""

    def __init__(
        self,
        query_model: Callable[..., Any] | None = None,
        k: int = 10,
        handle_incomplete_batches: bool = True,
        num_parallel_calls: int = tf.data.AUTOTUNE,
        sorted_order: bool = True,
        name: str | None = None,
    ) -> None:
        """See `TopK`. Batches of any size, and sorted results, cost nothing here: the other arguments change nothing."""
        del handle_incomplete_batches, num_parallel_calls, sorted_order
        super().__init__(query_model, k, name)
        self._candidates: tf.data.Dataset | None = None

    def index(self, candidates: Tensor, identifiers: Tensor | None = None) -> Self:
        """Raise NotImplementedError: call `index_from_dataset`."""
        raise NotImplementedError("Streaming takes datasets only. Call index_from_dataset.")

    def index_from_dataset(self, candidates: tf.data.Dataset) -> Self:
        """Replace the dataset. See `TopK`."""
        _check_elements(candidates)
        if isinstance(candidates.element_spec, tuple):
            _check_type(candidates.element_spec[0].dtype)
        else:
            candidates = candidates.scan(
                0, lambda first, batch: (first + len(batch), (tf.range(first, first + len(batch)), batch))
            )
        self._candidates = candidates
        return self

    def is_exact(self) -> bool:
        """Return True."""
        return True

    def save(self, path: str, options: tf.saved_model.SaveOptions | None = None) -> None:  # noqa: ARG002 - see `TopK`
        """Raise ConfigError: a SavedModel has no dataset."""
        raise ConfigError(
            f"Streaming: {path} cannot have its dataset. Save a BruteForce, or write a version with tpuembed.export_retrieval."
        )

    def _search(self, queries: Tensor, k: Any) -> tuple[Tensor, Tensor]:
        if self._candidates is None:
            raise ConfigError("Streaming: has no candidates. Call index_from_dataset first.")
        return stream_top_k(queries, self._candidates, k)


class _Indexed(TopK):
    """Has candidates in variables. Calls run as graphs, which stay when the candidates are replaced."""

    def __init__(self, query_model: Callable[..., Any] | None, k: int, name: str | None) -> None:
        super().__init__(query_model, k, name)
        self._candidates: Any = None
        self._identifiers: Any = None

    __call__ = tf.function(TopK.__call__)
    query_with_exclusions = tf.function(TopK.query_with_exclusions)

    def save(self, path: str, options: tf.saved_model.SaveOptions | None = None) -> None:
        """Write a SavedModel. See `TopK`.

        Its signature `serving_default` has the names of one that Keras 2 writes: `input_1`, or those of a mapping of queries,
        `output_1` for the scores, and `output_2` for the identifiers.
        """
        if not self._called.types:
            raise ConfigError(
                f"{type(self).__name__}: was not called, so that its inputs are unknown. Call it, then save it."
            )
        for types in list(self._called.types):
            self.__call__.get_concrete_function(types)
        for both in list(self._called.excluded):
            self.query_with_exclusions.get_concrete_function(*both)
        types = self._called.types[0]
        specs = dict(types) if isinstance(types, Mapping) else {"input_1": types}
        specs = {name: tf.TensorSpec(spec.shape, spec.dtype, name) for name, spec in specs.items()}

        @tf.function(input_signature=[specs], autograph=False)
        def serve(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
            scores, identifiers = self(inputs if isinstance(types, Mapping) else inputs["input_1"])
            return {"output_1": scores, "output_2": identifiers}

        tf.saved_model.save(self, path, signatures=serve, options=options)

    def _set(self, vectors: Tensor, identifiers: Tensor) -> None:
        if self._candidates is None:
            shape = tf.TensorShape([None, vectors.shape[1]])
            self._candidates = tf.Variable(vectors, shape=shape, trainable=False, name="candidates")
            self._identifiers = tf.Variable(identifiers, shape=[None], trainable=False, name="identifiers")
            return
        if identifiers.dtype != self._identifiers.dtype or vectors.shape[1] != self._candidates.shape[1]:
            raise ConfigError(
                f"{type(self).__name__}: has {self._identifiers.dtype.name} identifiers of vectors of width "
                f"{self._candidates.shape[1]}, got {identifiers.dtype.name} and {vectors.shape[1]}. Make a new layer."
            )
        self._candidates.assign(vectors)
        self._identifiers.assign(identifiers)

    def _named(self, scores: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        found = tf.gather(self._identifiers, tf.where(scores > float("-inf"), places, 0))
        return scores, tf.where(scores > float("-inf"), found, missing_id(found.dtype))

    def _check_is_indexed(self) -> None:
        if self._candidates is None:
            raise ConfigError(f"{type(self).__name__}: has no candidates. Call index or index_from_dataset first.")


class BruteForce(_Indexed):
    """Compares a query with all candidates, which are in memory."""

    def __init__(self, query_model: Callable[..., Any] | None = None, k: int = 10, name: str | None = None) -> None:
        """See `TopK`."""
        super().__init__(query_model, k, name)

    def index(self, candidates: Tensor, identifiers: Tensor | None = None) -> Self:
        """Replace the candidates. See `TopK`."""
        self._set(*_checked(candidates, identifiers))
        return self

    def is_exact(self) -> bool:
        """Return True."""
        return True

    def _search(self, queries: Tensor, k: Any) -> tuple[Tensor, Tensor]:
        self._check_is_indexed()
        scores = without_nan(tf.matmul(queries, self._candidates, transpose_b=True))
        return self._named(*best(scores, tf.convert_to_tensor(k)))


class ScaNN(_Indexed):
    """Compares a query with the candidates in the partitions that are nearest to it. The scores of what is found are exact.

    The index is this library's, of k-means partitions, and needs no `scann`.
    """

    def __init__(
        self,
        query_model: Callable[..., Any] | None = None,
        k: int = 10,
        distance_measure: str = "dot_product",
        num_leaves: int = 100,
        num_leaves_to_search: int = 10,
        training_iterations: int = 12,
        dimensions_per_block: int = 2,
        num_reordering_candidates: int | None = None,
        parallelize_batch_searches: bool = True,
        name: str | None = None,
    ) -> None:
        """Search `num_leaves_to_search` of `num_leaves` partitions, or as many as have `k` candidates.

        There are fewer partitions if they would have fewer than 16 candidates on average.

        Vectors are not compressed, so `dimensions_per_block` and `num_reordering_candidates` change nothing. Neither do
        `training_iterations` and `parallelize_batch_searches`.

        Raises:
            ConfigError: `distance_measure` is another one than the dot product, or a number is not a positive integer.
        """
        del training_iterations, dimensions_per_block, num_reordering_candidates, parallelize_batch_searches
        super().__init__(query_model, k, name)
        if distance_measure != "dot_product":
            raise ConfigError(
                f'ScaNN: distance_measure must be "dot_product", got {distance_measure!r}. For cosines, divide the vectors by '
                "their lengths."
            )
        check_count("num_leaves", num_leaves)
        check_count("num_leaves_to_search", num_leaves_to_search)
        self._leaves, self._searched = num_leaves, min(num_leaves, num_leaves_to_search)
        self._centroids: Any = None
        self._first_blocks: Any = None

    def index(self, candidates: Tensor, identifiers: Tensor | None = None) -> Self:
        """Divide candidates into partitions. See `TopK`."""
        vectors, names = _checked(candidates, identifiers)
        rows = vectors.numpy()
        centroids = centroids_of(rows, min(self._leaves, max(1, len(rows) // _LEAST_ROWS_OF_LEAF)))
        used, found = np.unique(assign(rows, centroids), return_inverse=True)
        centroids, partitions = centroids[used], found.astype(np.int32)
        sizes = np.bincount(partitions)
        order = np.empty(int((-(-sizes // BLOCK_ROWS)).sum()) * BLOCK_ROWS, np.int64)
        first = in_order(partitions, len(used), lambda _: order)
        least_rows = np.cumsum(np.sort(sizes))  # of so many partitions, whichever they are
        self._set(
            tf.where(order[:, None] >= 0, tf.gather(vectors, tf.maximum(order, 0)), 0.0),
            tf.gather(names, tf.maximum(order, 0)),
        )
        if self._centroids is None:
            shape = tf.TensorShape([None, vectors.shape[1]])
            self._centroids = tf.Variable(centroids, shape=shape, trainable=False, name="centroids")
            self._first_blocks = tf.Variable(first, shape=[None], trainable=False, name="first_blocks")
            self._least_rows = tf.Variable(least_rows, shape=[None], trainable=False, name="least_rows")
            self._numbers = tf.Variable(order, shape=[None], trainable=False, name="numbers")
        else:
            self._centroids.assign(centroids)
            self._first_blocks.assign(first)
            self._least_rows.assign(least_rows)
            self._numbers.assign(order)
        return self

    def is_exact(self) -> bool:
        """Return False."""
        return False

    def _search(self, queries: Tensor, k: Any) -> tuple[Tensor, Tensor]:
        self._check_is_indexed()
        rows, k = tf.range(BLOCK_ROWS, dtype=tf.int64), tf.convert_to_tensor(k)
        enough = tf.searchsorted(self._least_rows.read_value(), tf.cast(k, tf.int64)[None])[0] + 1
        probes = tf.minimum(tf.maximum(enough, self._searched), tf.shape(self._centroids)[0])
        return self._named(
            *search_partitions(
                queries,
                self._centroids,
                self._first_blocks,
                lambda blocks: tf.gather(self._candidates, tf.reshape(blocks[:, None] * BLOCK_ROWS + rows, [-1])),
                lambda places, _: tf.gather(self._numbers, places) >= 0,
                probes,
                k,
            )
        )
