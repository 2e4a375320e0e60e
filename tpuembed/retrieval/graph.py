"""The graph of a retrieval: the query's model, and the search of the index that its vector is looked up in."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy.typing as npt
import tensorflow as tf

from tpuembed.errors import ConfigError
from tpuembed.export.graph.keras_model import KerasModel
from tpuembed.export.graph.mapped_table import store_array
from tpuembed.export.graph.saved_model import ExportableModel
from tpuembed.export.graph.stacked_tables import StackedTables
from tpuembed.manifest import STORAGES, ArrayEntry, RetrievalEntry, VocabularyEntry
from tpuembed.native.search import EXCLUDE, REQUIRE
from tpuembed.retrieval.partitions import BLOCK_ROWS
from tpuembed.retrieval.recall import check_width
from tpuembed.retrieval.search import search_all, search_partitions
from tpuembed.retrieval.towers import only_output
from tpuembed.vocabulary import Vocabulary

__all__ = ["INDEX_FOLDER", "RetrievalModel"]

Tensor = Any

INDEX_FOLDER: Final = "index"
_LOWEST: Final = float("-inf")


class RetrievalModel(ExportableModel):
    """Finds the best candidates for the vector that the query's model makes of its inputs."""

    def __init__(
        self,
        query: KerasModel,
        tables: StackedTables,
        entry: RetrievalEntry,
        index: Mapping[str, npt.NDArray[Any]],
    ) -> None:
        """Search the index of `entry`, whose vectors are a table of `tables`.

        `index` has its arrays; see RetrievalEntry.arrays. They may be mapped from files.
        """
        self._query, self._tables, self._entry, self._index = query, tables, entry, index
        self._arrays: dict[str, Any] = {}
        self._find = tf.function(self._answer, autograph=False, reduce_retracing=True)  # signatures share its graph
        if clash := sorted({EXCLUDE, REQUIRE} & query.input_specs().keys()):
            raise ConfigError(
                f"query: its input {clash[0]!r} has the name of an input of the signature 'filtered'. Rename it."
            )

    def input_specs(self) -> dict[str, Any]:
        """Return the query's."""
        return self._query.input_specs()

    def samples(self, vocabularies: Mapping[str, Vocabulary]) -> list[dict[str, Any]]:
        """Return those of the query's model."""
        return self._query.samples(vocabularies)

    def padding(self) -> Mapping[str, int | str]:
        """Return the padding of the query's list inputs."""
        return self._query.padding()

    def vocabularies(self) -> tuple[VocabularyEntry, ...]:
        """Return those of the query's preprocessing layers."""
        return self._query.vocabularies()

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `ids` and `scores`, [batch, k], the best first."""
        return self._find(only_output(self._query(inputs)))

    def write_index(self, folder: Path, layout: str) -> tuple[Mapping[str, Any], RetrievalEntry | None]:
        """Write the arrays: with layout mmap into files, else into variables."""
        written: dict[str, ArrayEntry] = {}
        for name, array in self._index.items():
            self._arrays[name], entry = store_array(array, f"index_{name}", folder, f"{INDEX_FOLDER}/{name}", layout)
            if entry is not None:
                written[name] = entry
        return self._arrays, dataclasses.replace(self._entry, arrays=written)

    def further_functions(self) -> dict[str, Any]:
        """Return the signatures `filtered`, and `query`, the vector of the query."""
        specs = self.input_specs()
        dtype = tf.int64 if self._entry.ids == "int64" else tf.string
        more = {
            EXCLUDE: tf.TensorSpec([None, None], dtype, name=EXCLUDE),
            REQUIRE: tf.TensorSpec([None], tf.uint64, name=REQUIRE),
        }

        @tf.function(input_signature=[{**specs, **more}], autograph=False)
        def filtered(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
            vectors = only_output(self._query({name: inputs[name] for name in specs}))
            exclude, require, batch = inputs[EXCLUDE], inputs[REQUIRE], tf.shape(vectors)[0]
            with tf.control_dependencies(
                [
                    tf.debugging.assert_equal(tf.shape(exclude)[0], batch, "exclude must have one row for each query"),
                    tf.debugging.assert_equal(
                        tf.size(require), batch, "require_tags must have one number for each query"
                    ),
                ]
            ):
                return self._answer(tf.identity(vectors), tf.identity(exclude), tf.identity(require))

        @tf.function(input_signature=[specs], autograph=False)
        def query(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {"query": self._vector(only_output(self._query(inputs)))}

        return {"filtered": filtered, "query": query}

    def _vector(self, vectors: Tensor) -> Tensor:
        check_width(vectors.shape[1], self._tables.stack_of(self._entry.table)[0].dim)
        return vectors

    def _answer(
        self, vectors: Tensor, exclude: Tensor | None = None, require: Tensor | None = None
    ) -> dict[str, Tensor]:
        entry = self._entry
        vectors = self._vector(vectors)
        k = tf.constant(entry.k)
        if self._tables.are_zeros:
            shape = [tf.shape(vectors)[0], k]
            ids = tf.fill(shape, tf.constant(-1, tf.int64)) if entry.ids == "int64" else tf.fill(shape, "")
            return {"ids": ids, "scores": tf.fill(shape, _LOWEST)}
        # At most one candidate has an excluded id, so the best of the rest are among so many more.
        few = k if exclude is None else k + tf.shape(exclude)[1]
        scores, places = self._search(vectors, require, few)
        numbers = tf.where(scores > _LOWEST, tf.gather(self._arrays["ids"], places), -1)
        if exclude is not None:
            given = numbers if entry.ids == "int64" else self._names(numbers)
            is_out = _is_among(given, exclude)
            scores, order = tf.math.top_k(tf.where(is_out, _LOWEST, scores), k)
            numbers = tf.where(scores > _LOWEST, tf.gather(numbers, order, batch_dims=1), -1)
        ids = numbers if entry.ids == "int64" else self._names(numbers)
        return {
            "ids": tf.ensure_shape(ids, [None, entry.k]),
            "scores": tf.ensure_shape(scores, [None, entry.k]),
        }

    def _search(self, vectors: Tensor, require: Tensor | None, k: Tensor) -> tuple[Tensor, Tensor]:
        entry = self._entry
        plan, variable = self._tables.stack_of(entry.table)
        codec = STORAGES[plan.storage]
        columns = codec.columns(plan.dim)
        stored, ids = variable.read_value(), self._arrays["ids"].read_value()
        tags = self._arrays["tags"].read_value() if entry.has_tags and require is not None else None

        def have(some: Tensor, wanted: Tensor) -> Tensor:
            """Return which of the tags `some` have all bits that are wanted."""
            wanted = tf.bitcast(wanted, tf.int64)
            return tf.bitwise.bitwise_and(some, wanted) == wanted

        def all_pass(first: Tensor, size: Tensor, wanted: Tensor | None = require) -> Tensor:
            """Return whether the rows from `first` on may be found."""
            found = (tf.slice(ids, [first], [size]) != -1)[None]
            if wanted is None:
                return found
            some = tf.zeros([1], tf.int64) if tags is None else tf.slice(tags, [first], [size])
            return found & have(some[None], wanted[:, None])

        def some_pass(places: Tensor, number: Tensor) -> Tensor:
            """Return whether the rows `places` may be found for the query `number`."""
            found = tf.gather(ids, places) != -1
            if require is None:
                return found
            return found & have(tf.zeros([1], tf.int64) if tags is None else tf.gather(tags, places), require[number])

        rows = lambda first, size: codec.decode_in_graph(tf, tf.slice(stored, [first, 0], [size, columns]), plan.dim)  # noqa: E731
        if entry.index == "exact":
            return search_all(vectors, rows, plan.rows, all_pass, k)
        in_blocks = tf.reshape(stored, [plan.rows // BLOCK_ROWS, BLOCK_ROWS * columns])
        blocks = lambda chosen: codec.decode_in_graph(  # noqa: E731
            tf, tf.reshape(tf.gather(in_blocks, chosen), [-1, columns]), plan.dim
        )

        def search_all_for(number: Tensor) -> tuple[Tensor, Tensor]:
            wanted = None if require is None else require[number][None]
            found, at = search_all(
                vectors[number][None], rows, plan.rows, functools.partial(all_pass, wanted=wanted), k
            )
            return found[0], at[0]

        centroids, first_blocks = (self._arrays[name].read_value() for name in ("centroids", "first_blocks"))
        probes = tf.constant(entry.nprobe, tf.int32)
        return search_partitions(vectors, centroids, first_blocks, blocks, some_pass, probes, k, search_all_for)

    def _names(self, numbers: Tensor) -> Tensor:
        """Return the strings of `numbers`, int64 [batch, n]; "" for -1."""
        flat = tf.reshape(numbers, [-1])
        offsets, names = self._arrays["offsets"], self._arrays["names"]
        starts = tf.gather(offsets, tf.maximum(flat, 0))
        ends = tf.where(flat < 0, starts, tf.gather(offsets, tf.maximum(flat, 0) + 1))
        places = tf.ragged.range(starts, ends)
        characters = tf.gather(
            tf.constant([bytes([one]) for one in range(256)]), tf.cast(tf.gather(names, places.flat_values), tf.int32)
        )
        joined = tf.strings.unsorted_segment_join(characters, places.value_rowids(), tf.size(flat))
        return tf.reshape(joined, tf.shape(numbers))


def _is_among(ids: Tensor, others: Tensor) -> Tensor:
    """Return which of `ids`, int64 or string [batch, n], are in their row of `others` [batch, m], in memory for n + m of a row."""
    count = tf.size(ids)
    if ids.dtype == tf.string:  # equal strings get equal numbers
        numbers = tf.unique(tf.concat([tf.reshape(ids, [-1]), tf.reshape(others, [-1])], 0), out_idx=tf.int64).idx
        ids, others = tf.reshape(numbers[:count], tf.shape(ids)), tf.reshape(numbers[count:], tf.shape(others))
    # One more, which is no id: there may be no others.
    others = tf.sort(tf.pad(others, [[0, 0], [0, 1]], constant_values=-1), axis=1)
    places = tf.minimum(tf.searchsorted(others, ids), tf.shape(others)[1] - 1)
    return tf.gather(others, places, batch_dims=1) == ids
