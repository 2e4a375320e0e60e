"""Graphs by hand: those that mix rows give other numbers in a run of several requests, and are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from tests.support.row_graphs import RowGraph
from tpuembed import FeatureConfig, TableConfig
from tpuembed.lookup import ids_of
from tpuembed.row_proof import prove

SPECS = {
    "x": tf.TensorSpec([None, 4], tf.float32),
    "v": tf.TensorSpec([None], tf.float32),
    "k": tf.TensorSpec([None], tf.int64),
    "ids": tf.TensorSpec([None, None], tf.int64),
    "s": tf.TensorSpec([None], tf.string),
    "flag": tf.TensorSpec([None], tf.bool),
    "e": tf.TensorSpec([None], tf.string),
}
KERNEL = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
TABLE = np.random.default_rng(1).normal(size=(50, 4)).astype(np.float32)
Graph = Callable[..., Any]
R = tf.raw_ops


def example(rng: np.random.Generator) -> bytes:
    """Lists of 0 to 3 ids and words, and a number."""
    ids = tf.train.Feature(int64_list=tf.train.Int64List(value=rng.integers(0, 50, rng.integers(0, 4)).tolist()))
    words = tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"a", b"b", b"c"][: rng.integers(0, 4)]))
    one = tf.train.Feature(int64_list=tf.train.Int64List(value=[int(rng.integers(0, 50))]))
    features = tf.train.Features(feature={"ids": ids, "words": words, "one": one})
    return bytes(tf.train.Example(features=features).SerializeToString())


def parsed(e: Any, **features: Any) -> Any:
    return tf.io.parse_example(e, features)


def requests(seed: int = 0, count: int = 4) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    found = []
    for rows in rng.integers(1, 4, count).tolist():
        found.append(
            {
                "x": rng.normal(size=(rows, 4)).astype(np.float32),
                "v": rng.normal(size=rows).astype(np.float32),
                "k": rng.integers(0, 4, rows),
                "ids": np.where(rng.random((rows, 3)) < 0.4, -1, rng.integers(0, 4, (rows, 3))),
                "s": np.array([["a b", "c", "", "d e f", "7"][n] for n in rng.integers(0, 5, rows)], object),
                "flag": rng.random(rows) < 0.3,
                "e": np.array([example(rng) for _ in range(rows)], object),
            }
        )
    return found


def graph(build: Graph) -> RowGraph:
    names = build.__code__.co_varnames[: build.__code__.co_argcount]
    return RowGraph(build, {name: SPECS[name] for name in names})


def differences(made: RowGraph, build: Graph, scale: float = 0.0, runs: int = 12) -> list[str]:
    names = build.__code__.co_varnames[: build.__code__.co_argcount]
    found = []
    for seed in range(runs):
        found += made.differences([{name: each[name] for name in names} for each in requests(seed)], scale)
    return found


def listwise(x: Any, flag: Any) -> Any:
    """A softmax over the list of a request, which a flag switches on."""
    return tf.cond(tf.reduce_any(flag), lambda: tf.nn.softmax(x, axis=0), lambda: x)


def partitioned(x: Any, k: Any) -> Any:
    parts = tf.dynamic_partition(x, tf.cast(k > 1, tf.int32), 2)
    return tf.concat(parts, 0)


def checked(x: Any, v: Any) -> Any:
    with tf.control_dependencies([tf.debugging.check_numerics(tf.math.log(tf.reduce_sum(v)), "sum")]):
        return tf.identity(x)


def counted_up(x: Any) -> Any:
    calls = tf.compat.v1.get_variable("calls", [], tf.float32, tf.compat.v1.zeros_initializer(), use_resource=True)
    with tf.control_dependencies([calls.assign_add(1.0)]):
        return x + calls.read_value()


LISTS = {"ids": tf.io.VarLenFeature(tf.int64)}
RAGGED = {"ids": tf.io.RaggedFeature(tf.int64)}
ONE = {"one": tf.io.FixedLenFeature([], tf.int64)}


def padded_lists(e: Any) -> Any:
    return tf.sparse.to_dense(parsed(e, **LISTS)["ids"], -1)


def in_other_rows(e: Any, *shape: int) -> Any:
    """What is in pairs along the lists, laid out anew: the padding is then between the values."""
    ids = padded_lists(e)
    pairs = (ids >= 0)[:, :, None] & tf.constant([True, False])
    sizes = [tf.shape(ids)[0], tf.shape(ids)[1]]
    return tf.reshape(pairs, [sizes[0] * shape[0], *shape[1:], sizes[1]])


def in_flat_rows(e: Any) -> Any:
    ids = padded_lists(e)
    pairs = tf.reshape((ids >= 0)[:, :, None] & tf.constant([True, False]), [-1])
    return tf.reduce_any(tf.reshape(pairs, [tf.shape(ids)[0], 2, tf.shape(ids)[1]]), 2)


def summed_backward(e: Any, fill: int, *, reverse: bool = True) -> Any:
    """Sums along padded lists, in entries of which one is taken for each row."""
    ids = tf.sparse.to_dense(parsed(e, **LISTS)["ids"], fill)
    sums = tf.cumsum(ids, 1, reverse=reverse)
    return tf.reduce_sum(tf.gather(TABLE, tf.math.floormod(tf.ragged.boolean_mask(sums, sums > 0), 50)), 1)


def fails_in_a_message(x: Any) -> Any:
    """What an assertion would say fails for one row, and not for two."""
    words = tf.gather(tf.constant([1.0, 2.0]), 3 - tf.minimum(tf.shape(x)[0], 3))
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(x > -9), [words])]):
        return tf.identity(x)


def asserted_of_widths(x: Any, ids: Any) -> Any:
    """Sizes that are the same in every run are compared, and a message has a sum over all rows."""
    is_one = tf.reduce_all(tf.equal(tf.shape(ids), tf.stack([tf.shape(x)[0], 3])))
    sums = [tf.reduce_sum(x), tf.math.count_nonzero(x < 0)]
    with tf.control_dependencies([tf.debugging.Assert(is_one, sums), tf.debugging.Assert(tf.reduce_all(x < 9), sums)]):
        return tf.identity(x)


def asserted_of_some(x: Any, flag: Any) -> Any:
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_any(flag), ["none"])]):
        return tf.identity(x)


def counted(k: Any) -> Any:
    found, places = tf.unique(k)
    return tf.gather(tf.math.unsorted_segment_sum(tf.ones_like(k), places, tf.size(found)), places)


def between_distinct(k: Any) -> Any:
    """How far two ids stand from each other among those that differ."""
    _, places = tf.unique(tf.reshape(tf.stack([k, k + 1], 1), [-1]))
    pairs = tf.reshape(places, [-1, 2])
    return pairs[:, 1] - pairs[:, 0]


def by_entries(x: Any, column: Any) -> Any:
    """Sums over all entries of a row, if `column` has one axis; over all entries of the run, if it has two."""
    where = tf.where(x > 0)
    found = tf.gather(x, column(where)) * tf.gather(x, where[:, 0])
    return tf.math.unsorted_segment_sum(tf.reduce_sum(found, 1), where[:, 0], tf.shape(x, tf.int64)[0])


def entries_of_all(x: Any) -> Any:
    where = tf.where(x > 0)
    found = tf.gather(x, where[None, :, 0])
    found = tf.reshape(found + tf.reduce_sum(found, 1, keepdims=True), [-1, 4])
    return tf.math.unsorted_segment_sum(found, where[:, 0], tf.shape(x, tf.int64)[0])


def batched_constant(x: Any) -> Any:
    constant = tf.gather(tf.ones([1, 5]), tf.constant([[0, 1, 2, 3]]), axis=1, batch_dims=1)
    return x + tf.reduce_sum(x + constant, 0)


def kept_axis(x: Any) -> Any:
    """A sum over the rows, if a constant of three axes is taken for one of two."""
    constant = tf.reduce_all(tf.constant([True]), 0, keepdims=True)
    y = x + tf.cast(tf.expand_dims(tf.expand_dims(constant, 0), 0), tf.float32)
    return tf.reshape(x + tf.reduce_sum(y, 1, keepdims=True), [-1, 4])


def product_of_ranks(x: Any) -> Any:
    y = x[:, None] + tf.matmul(tf.constant(TABLE[:1]), tf.constant(TABLE[None, None, :4]))
    return tf.reshape(x[:, None] + tf.reduce_mean(y, 1, keepdims=True), [-1, 4])


def unknown_table() -> Any:
    return tf.gather_nd(tf.constant(TABLE), tf.range(50)[:, None])


def raw_branch(condition: Any, x: Any, one: Any, other: Any) -> Any:
    """A branch whose condition may have axes."""
    specs = [tf.TensorSpec(condition.shape, tf.bool), tf.TensorSpec([None, 4])]
    branches = [tf.function(branch).get_concrete_function(*specs) for branch in (one, other)]
    names = {"then_branch": branches[0], "else_branch": branches[1]}
    return tf.raw_ops.If(cond=condition, input=[condition, x], Tout=[tf.float32], output_shapes=[[None, 4]], **names)[0]


def added_up(_: Any, x: Any) -> Any:
    return tf.cumsum(x)


def unchanged(_: Any, x: Any) -> Any:
    return tf.identity(x)


def failing(_: Any, x: Any) -> Any:
    with tf.control_dependencies([tf.debugging.Assert(False, ["no"])]):
        return tf.identity(x)


def shape_of_two_axes(x: Any) -> Any:
    sizes = tf.reshape(tf.gather(tf.expand_dims(tf.shape(x), 0), [0]), [-1])
    return tf.reduce_sum(tf.reshape(x, sizes)[:, None] + x, 1)


def narrowed(ids: Any) -> Any:
    """The size of an axis that is asked for is -1, so that it is as wide as before."""
    width = tf.shape(ids)[1]
    part = tf.reshape(ids, tf.stack([tf.shape(ids)[0], width - 4]))
    return tf.cond(width > tf.shape(part)[1], lambda: ids, lambda: tf.cumsum(ids))


def mean_if(condition: Any, x: Any) -> Any:
    """A mean over rows, where a constant condition holds."""
    return tf.cond(condition, lambda: x - tf.reduce_mean(x, 0), lambda: x)


def two_written(one: Any, other: Any, dtype: Any) -> Any:
    """The first of two tensors in a list."""
    return tf.TensorArray(dtype, 2, clear_after_read=False).write(0, one).write(1, other).read(0)


def one_set(element_shape: Any, item: Any) -> Any:
    """A list of two tensors, of which only the first is set."""
    kept = R.TensorListReserve(element_shape=element_shape, num_elements=2, element_dtype=item.dtype)
    return R.TensorListSetItem(input_handle=kept, index=0, item=item)


def default_out_of_a_list(x: Any) -> Any:
    where = tf.where(x > 0)
    dense = R.RaggedTensorToTensor(
        shape=tf.constant(-1, tf.int64),
        values=tf.gather_nd(x, where),
        default_value=two_written(1.0, 0.0, tf.float32),
        row_partition_tensors=[tf.shape(x, tf.int64)[0], where[:, 0]],
        row_partition_types=["FIRST_DIM_SIZE", "VALUE_ROWIDS"],
    )
    return tf.reduce_sum(dense, 1)


def condition_never_set(x: Any) -> Any:
    kept = one_set(tf.constant([], tf.int32), tf.constant(True))
    shape = tf.constant([], tf.int32)
    found = R.TensorListGetItem(input_handle=kept, index=1, element_shape=shape, element_dtype=tf.bool)
    return tf.cond(found, lambda: x, lambda: x - tf.reduce_mean(x, 0))


def rows_never_set(x: Any) -> Any:
    kept = one_set([-1, 4], x)
    found = R.TensorListGetItem(input_handle=kept, index=1, element_shape=[1, 4], element_dtype=tf.float32)
    return tf.reshape(tf.nn.softmax(tf.reshape(x, [R.Shape(input=found)[0], -1])), [-1, 4])


def rank_never_set(x: Any) -> Any:
    """A tensor that was never set has one axis more than the one that was."""
    kept = one_set(-1, tf.ones([1, 4]))
    found = R.TensorListGetItem(input_handle=kept, index=1, element_shape=[1, 1, 4], element_dtype=tf.float32)
    return tf.reshape(x + tf.reduce_sum(x + found, 1, keepdims=True), [-1, 4])


def columns_in_a_list(x: Any) -> Any:
    columns = tf.transpose(tf.reshape(x, [-1, 4, 1]), [1, 0, 2])
    kept = R.TensorListFromTensor(tensor=columns, element_shape=[8, 1])
    return R.TensorListGetItem(input_handle=kept, index=0, element_shape=[-1, 1], element_dtype=tf.float32)


def ends_in_a_column(x: Any) -> Any:
    """Row ends of another shape are no row splits: their differences meet the counts of all rows."""
    counts = tf.reduce_sum(tf.cast(x > 0, tf.int32), 1)
    splits = tf.concat([[[0]], tf.reshape(tf.cumsum(counts), [-1, 1])], 0)
    return tf.reduce_sum(tf.expand_dims(splits[1:] - splits[:-1] + counts, 1), -1)


def as_many_rows_as_ids(x: Any, ids: Any) -> Any:
    where = tf.where(x > 0)
    return R.RaggedTensorToTensor(
        shape=tf.stack([tf.shape(ids, tf.int64)[1], tf.constant(5, tf.int64)]),
        values=tf.gather_nd(x, where),
        default_value=0.0,
        row_partition_tensors=[tf.shape(x, tf.int64)[0], where[:, 0]],
        row_partition_types=["FIRST_DIM_SIZE", "VALUE_ROWIDS"],
    )


def highest_that_wraps(k: Any) -> Any:
    highest = tf.cast(tf.reduce_max(tf.where(tf.equal(k, 3), tf.constant(2**32, tf.int64), k)), tf.int32)
    with tf.control_dependencies([tf.debugging.Assert(highest < 1, ["too high"])]):
        return tf.identity(k)


def defaults_of_keys(k: Any) -> Any:
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)
    defaults = tf.constant(np.arange(8), tf.int64)
    return R.LookupTableFindV2(table_handle=table.resource_handle, keys=k, default_value=defaults)


def named_examples(e: Any) -> Any:
    none = tf.constant([], tf.string)
    return R.ParseExampleV2(
        serialized=e,
        names=tf.constant(["a"] * 8),
        sparse_keys=none,
        dense_keys=tf.constant(["one"]),
        ragged_keys=none,
        dense_defaults=[tf.constant([], tf.int64)],
        num_sparse=0,
        sparse_types=[],
        ragged_value_types=[],
        ragged_split_types=[],
        dense_shapes=[[1]],
    ).dense_values[0]


def zeros_of_two_signs(v: Any) -> Any:
    found, places = tf.unique(v * 0.0)
    return tf.gather(1.0 / found, places)


def condition_in_a_vector(x: Any) -> Any:
    """A vector of one element is true to an If, whatever the element is."""
    every = tf.expand_dims(tf.reduce_all(x > -1), 0)
    specs = [tf.TensorSpec([1], tf.bool), tf.TensorSpec([None, 4], tf.float32)]

    def fails(condition: Any, x: Any) -> Any:
        with tf.control_dependencies([tf.debugging.Assert(False, [condition])]):
            return tf.identity(x)

    return R.If(
        cond=every,
        input=[every, x],
        Tout=[tf.float32],
        then_branch=tf.function(lambda condition, x: tf.where(condition, x, -x)).get_concrete_function(*specs),
        else_branch=tf.function(fails).get_concrete_function(*specs),
        output_shapes=[[None, 4]],
    )[0]


MIXING: dict[str, Graph] = {
    "a new axis behind a column of indices": lambda x: by_entries(x, lambda where: where[:, 0, None]),
    "a new axis before a column of indices": entries_of_all,
    "a new axis before the columns of indices": lambda x: by_entries(x, lambda where: where[..., None, 0]),
    "rows by positions of three axes": lambda x: tf.reduce_sum(
        x * tf.gather_nd(x, tf.range(tf.shape(x)[0])[:, None, None]), 1
    ),
    "entries out of a table of unknown rank": lambda k: tf.gather(unknown_table(), tf.boolean_mask(k, k > 0)),
    "distinct ids out of a table of unknown rank": lambda k: tf.gather(unknown_table(), tf.unique(k)[0]),
    "a constant that is looked up beside itself": batched_constant,
    "a constant that keeps its axis": kept_axis,
    "a product of constants of different ranks": product_of_ranks,
    "a branch by a constant vector": lambda x: raw_branch(tf.constant([False]), x, added_up, unchanged),
    "a branch by a reduced constant vector": lambda x: raw_branch(
        tf.reduce_all(tf.constant([False]), 0, keepdims=True), x, added_up, unchanged
    ),
    "a branch by a vector of whether all rows hold": lambda x: raw_branch(
        tf.expand_dims(tf.reduce_all(x[:, 0] > 0), 0), x, lambda all_of, x: tf.where(all_of, x, -x), failing
    ),
    "a branch by a shape of whether all rows hold": lambda x: raw_branch(
        tf.reshape(tf.reduce_all(x[:, 0] > 0), [1]), x, lambda all_of, x: tf.where(all_of, x, -x), failing
    ),
    "a size out of a shape of two axes": shape_of_two_axes,
    "a size that is -1 when it runs": narrowed,
    "a condition out of a list": lambda x: mean_if(two_written(True, False, tf.bool), x),
    "a default out of a list": default_out_of_a_list,
    "a condition that was never set in a list": condition_never_set,
    "rows that were never set in a list": rows_never_set,
    "a tensor of another rank that was never set in a list": rank_never_set,
    "a list of a fixed number of rows": lambda x: (
        tf.TensorArray(tf.float32, 1, element_shape=[8, 4]).write(0, x).stack()[0]
    ),
    "a list stacked to a fixed number of rows": lambda x: R.TensorListStack(
        input_handle=one_set([-1, 4], x), element_shape=[8, 4], element_dtype=tf.float32
    )[0],
    "a list made of a fixed number of rows": columns_in_a_list,
    "a fixed shape": lambda x: tf.ensure_shape(x, [8, 4]),
    "a number that a cast wraps": lambda x: mean_if(tf.cast(tf.constant(2**32 + 1, tf.int64), tf.int32) < 5, x),
    "a product that wraps": lambda x: mean_if(tf.constant(65536) * tf.constant(65536) <= 0, x),
    "a sum that wraps": lambda x: mean_if(tf.constant(2**31 - 1) + 1 <= 0, x),
    "a difference that wraps": lambda x: mean_if(tf.constant(-(2**31)) - 1 >= 0, x),
    "a product of a vector that wraps": lambda x: mean_if(tf.reduce_prod(tf.constant([65536, 65536])) <= 0, x),
    "a batch size that wraps": lambda x: mean_if(tf.shape(x)[0] * 65536 * 65536 <= 0, x),
    "a batch size and a number that wrap": lambda x: mean_if(tf.shape(x)[0] + (2**31 - 1) <= 0, x),
    "an axis that a cast wraps": lambda x: (
        x + tf.reduce_sum(x[:, :, None], tf.cast(tf.constant([2**32], tf.int64), tf.int32), keepdims=True)[:, :, 0]
    ),
    "the highest id, wrapped by a cast": highest_that_wraps,
    "row ends in a column": ends_in_a_column,
    "as many rows as a row has ids": as_many_rows_as_ids,
    "a default for each key": defaults_of_keys,
    "examples with names": named_examples,
    "zeros of two signs": zeros_of_two_signs,
    "a condition in a vector": condition_in_a_vector,
    "how often each id stands in a run": counted,
    "distances among distinct ids": between_distinct,
    "positions of distinct ids": lambda k: tf.unique(k)[1],
    "widths of split words": lambda s: tf.fill(tf.shape(s), tf.shape(tf.strings.split(s).to_tensor(""))[1]),
    "the mean over padding": lambda s: tf.reduce_mean(
        tf.cast(tf.strings.length(tf.strings.split(s).to_tensor("")), tf.float32), 1
    ),
    "padded lists in other rows": lambda e: tf.reshape(tf.reduce_any(in_other_rows(e, 2), 1), [-1, 2]),
    "padded lists in other columns": lambda e: tf.reduce_any(in_other_rows(e, 1, 2), 2),
    "padded lists in other columns of a vector": in_flat_rows,
    "sums backward from padding": lambda e: summed_backward(e, -1),
    "sums over to padding": lambda e: summed_backward(e, 0, reverse=False),
    "the highest over padding": lambda s: tf.reduce_max(tf.strings.length(tf.strings.split(s).to_tensor("xyz")), 1),
    "a highest length decides a mask": lambda ids, k: tf.reduce_sum(
        tf.cast(tf.sequence_mask(tf.reduce_sum(tf.cast(ids >= 0, tf.int64), 1), tf.reduce_max(k)), tf.int32), 1
    ),
    "listwise softmax behind a flag": listwise,
    "mean over an unnamed axis of a vector": lambda v: v - tf.reduce_mean(v, -1),
    "random numbers from a constant seed": lambda x: x + tf.random.stateless_uniform(tf.shape(x), [1, 2]),
    "the batch size as a number": lambda k: k + tf.shape(k, tf.int64)[0],
    "the batch size as a fill value": lambda k: tf.fill(tf.shape(k), tf.shape(k)[0]),
    "the batch size as a bound": lambda k: tf.minimum(k, tf.shape(k, tf.int64)[0] - 1),
    "positions as numbers": lambda k: k + tf.range(tf.shape(k, tf.int64)[0]),
    "positions of one hot": lambda x: x + tf.one_hot(tf.range(tf.shape(x)[0]), 4),
    "the first row by its number": lambda x: x + tf.gather(x, [0]),
    "the last row": lambda x: x * x[-1],
    "the next row": lambda x: tf.gather(x, tf.maximum(tf.range(tf.shape(x)[0]) - 1, 0)),
    "reverse by its operation": lambda x: tf.reverse(x, [0]),
    "sum over rows by a product": lambda x: x + tf.matmul(x, x, transpose_a=True)[:1],
    "sum over rows by einsum": lambda x: x + tf.einsum("bi,bj->ij", x, x)[0],
    "a transpose that is taken for rows": lambda x: tf.reshape(tf.transpose(x), [-1, 4]),
    "pairs of rows": lambda x: tf.reshape(tf.cumsum(tf.reshape(x, [-1, 2]), 0), tf.shape(x)),
    "a sum of what was several rows": lambda x: (
        tf.fill([tf.shape(x)[0]], 0.0) + tf.reduce_sum(tf.reshape(x, [1, -1]), 1)
    ),
    "a batch that is a constant": lambda x: x + tf.reshape(tf.constant([1.0, 2.0, 3.0]), [-1, 1])[: tf.shape(x)[0]],
    "partition": partitioned,
    "masked rows": lambda x, flag: tf.boolean_mask(x, flag),
    "masked rows that are put back": lambda x, flag: tf.pad(
        tf.boolean_mask(x, flag), [[0, tf.shape(x)[0] - tf.reduce_sum(tf.cast(flag, tf.int32))], [0, 0]]
    ),
    "a condition on all rows": lambda x, flag: tf.where(tf.reduce_any(flag), x, -x),
    "a message that fails for one row": fails_in_a_message,
    "an assertion that some row holds": asserted_of_some,
    "lists whose last rows may be left out": lambda e: tf.nn.embedding_lookup_sparse(
        tf.constant(TABLE), parsed(e, **LISTS)["ids"], None, combiner="sum"
    ),
    "a check of the sum": checked,
    "a variable that is assigned": counted_up,
    "joined strings": lambda s: tf.fill(tf.shape(s), tf.strings.reduce_join(s)),
    "bits of pairs": lambda x: x + tf.cast(tf.size(tf.unique(tf.reshape(x, [-1]))[0]), tf.float32),
    "the widest row": lambda s: (
        tf.strings.split(s).to_tensor("")[:, :1] + tf.as_string(tf.shape(tf.strings.split(s).to_tensor(""))[1])
    ),
    "l2 over rows": lambda x: tf.math.l2_normalize(x, axis=0),
    "a histogram": lambda k: tf.gather(tf.math.bincount(k, minlength=4), k),
    "a scatter": lambda x, k: tf.tensor_scatter_nd_add(x, tf.minimum(k, 0)[:, None], x),
    "an einsum over batches": lambda x: tf.einsum("bi,ci->bc", x, x)[:, 0],
    "concatenated behind each other": lambda x: tf.concat([x[:1], x * 2], 0)[: tf.shape(x)[0]],
    "concatenated before each other": lambda x: tf.concat([x[:1], x[:-1]], 0),
    "split of rows": lambda x: tf.concat(tf.split(tf.tile(x, [2, 1]), 2)[::-1], 0),
    "tiled rows": lambda x: tf.tile(x, [2, 1])[1 : tf.shape(x)[0] + 1],
    "ragged means over rows": lambda ids: tf.reduce_sum(tf.ragged.boolean_mask(ids, ids >= 0), 0)[:1] + ids[:, 0],
}


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_rows_is_refused(name: str) -> None:
    build = MIXING[name]
    with graph(build) as made:
        verdict = made.verdict
        assert not verdict.is_proven
        assert verdict.reason.startswith("output 'y': ")
        unstable = ("random", "dropout", "assigned", "constant seed", "batch that is a constant")
        if not any(word in name for word in unstable):
            assert differences(made, build), "the graph does not mix rows: the test proves nothing"


FIXED: dict[str, Graph] = {
    "a broadcast": lambda x: x + tf.broadcast_to(x, [1, 4]),
    "a placeholder": lambda x: tf.identity(tf.compat.v1.placeholder_with_default(x, [8, 4])),
}


@pytest.mark.parametrize("name", FIXED)
def test_a_fixed_number_of_rows_is_refused(name: str) -> None:
    with graph(FIXED[name]) as made:
        assert "a fixed number of rows is asked for" in made.verdict.reason


def weighted(x: Any, flag: Any) -> Any:
    """A constant decides, not the request."""
    use = tf.constant(True)
    return tf.cond(use, lambda: tf.nn.relu(x), lambda: tf.nn.softmax(x, axis=0)) * tf.cast(flag, tf.float32)[:, None]


def guarded(k: Any) -> Any:
    with tf.control_dependencies(
        [
            tf.debugging.assert_less(k, tf.constant(4, tf.int64)),
            tf.debugging.assert_greater(k, tf.constant(-1, tf.int64)),
        ]
    ):
        return tf.gather(TABLE, k)


def hashed(s: Any) -> Any:
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(["a b", "c"], tf.constant([1, 2], tf.int64)), 0
    )
    return tf.gather(TABLE, table.lookup(s)) + tf.gather(TABLE, tf.strings.to_hash_bucket_fast(s, 50))


def hashed_words(e: Any) -> Any:
    words = parsed(e, words=tf.io.VarLenFeature(tf.string))["words"]
    ids = tf.SparseTensor(words.indices, tf.strings.to_hash_bucket_fast(words.values, 50), words.dense_shape)
    return tf.nn.safe_embedding_lookup_sparse(tf.constant(TABLE), ids, combiner="sqrtn")


def padded_examples(e: Any) -> Any:
    ids = tf.sparse.to_dense(parsed(e, **LISTS)["ids"], -1)
    rows = tf.where((ids >= 0)[..., None], tf.gather(TABLE, tf.maximum(ids, 0)), 0.0)
    return tf.math.divide_no_nan(tf.reduce_sum(rows, 1), tf.reduce_sum(tf.cast(ids >= 0, tf.float32), 1, keepdims=True))


def distinct(k: Any) -> Any:
    """Each id is looked up once, and put where it stands."""
    found, places = tf.unique(k)
    return tf.gather(tf.tanh(tf.gather(TABLE, found)), places)


def trimmed(ids: Any) -> Any:
    """Rows of the lists of a matrix padded with -1, which keep the -1 that stand before other ids."""
    within = tf.cumsum(tf.cast(tf.not_equal(ids, -1), tf.int32), 1, reverse=True) > 0
    return tf.reduce_sum(tf.gather(TABLE, tf.maximum(tf.ragged.boolean_mask(ids, within), 0)), 1)


APART: dict[str, Graph] = {
    "sums backward from zeros": lambda e: summed_backward(e, 0),
    "trimmed lists": trimmed,
    "parsed lists, trimmed": lambda e: trimmed(padded_lists(e)),
    "parsed ids": lambda e: tf.gather(TABLE, parsed(e, **ONE)["one"]),
    "parsed lists, padded": padded_examples,
    "parsed lists, looked up by TensorFlow": lambda e: tf.nn.safe_embedding_lookup_sparse(
        tf.constant(TABLE), parsed(e, **LISTS)["ids"], combiner="mean"
    ),
    "parsed words, hashed": hashed_words,
    "parsed ragged lists": lambda e: tf.reduce_mean(tf.gather(TABLE, parsed(e, **RAGGED)["ids"]), 1),
    "sums of parsed ragged lists": lambda e: tf.reduce_sum(tf.gather(TABLE, parsed(e, **RAGGED)["ids"]), 1),
    "split words": lambda s: tf.reduce_sum(
        tf.gather(TABLE, tf.strings.to_hash_bucket_fast(tf.strings.split(s), 50)), 1
    ),
    "masked lists": lambda ids: tf.reduce_sum(tf.gather(TABLE, tf.ragged.boolean_mask(ids, ids >= 0)), 1),
    "distinct ids": distinct,
    "a mask of lengths": lambda ids: tf.sequence_mask(tf.reduce_sum(tf.cast(ids >= 0, tf.int32), 1), tf.shape(ids)[1]),
    "ranks of a row": lambda x: tf.argsort(x, 1),
    "dot of pairs": lambda x: tf.reshape(tf.matmul(*[tf.reshape(x, [-1, 2, 2])] * 2, transpose_b=True), [-1, 4]),
    "turned, and over what was a row": lambda x: tf.reduce_sum(tf.transpose(x), 0),
    "rank 3": lambda x: tf.tensordot(tf.reshape(x, [tf.shape(x)[0], 2, 2]), KERNEL[:2], 1)[:, :, 0],
    "a constant decides": weighted,
    "assertions on ids": guarded,
    "assertions on widths": asserted_of_widths,
    "strings": lambda s: tf.strings.join([tf.strings.upper(s), "x", tf.strings.substr(s, 0, 1)]),
    "hashes and tables": hashed,
    "buckets": lambda x: tf.raw_ops.Bucketize(input=x, boundaries=[-1.0, 0.0, 1.0]),
    "a position of a row that is taken back": lambda x: tf.gather(x, tf.range(tf.shape(x)[0])),
    "rows of equal rows": lambda v: tf.cast(tf.range(tf.shape(v)[0]) == tf.range(tf.shape(v)[0]), tf.float32) + v,
    "numbers out of strings": lambda k: tf.strings.to_number(tf.as_string(k), tf.float32),
}


@pytest.mark.parametrize("name", APART)
def test_what_keeps_rows_apart_is_proven(name: str) -> None:
    build = APART[name]
    with graph(build) as made:
        assert made.verdict.reason == ""
        assert differences(made, build, 1e-5) == []


@pytest.mark.parametrize("layer", [keras.layers.GRU, keras.layers.LSTM])
def test_recurrent_layers_that_keras_exports_are_proven(layer: Any, tmp_path: Path) -> None:
    ids = keras.Input([None], dtype="int64")
    state = layer(3)(keras.layers.Embedding(4, 4, mask_zero=True)(ids))
    keras.Model(ids, state).export(tmp_path, verbose=False)
    exported = saved_model_pb2.SavedModel.FromString((tmp_path / "saved_model.pb").read_bytes())
    assert prove(exported.meta_graphs[0], "serving_default").reason == ""
    loaded = tf.saved_model.load(tmp_path)
    alone = [np.maximum(each["ids"], 0) for each in requests()]
    merged = loaded.serve(tf.constant(np.concatenate(alone)))
    parts = [loaded.serve(tf.constant(each)) for each in alone]
    np.testing.assert_allclose(merged, np.concatenate(parts), rtol=1e-5, atol=1e-6)


def test_the_name_of_a_lookup_proves_nothing_in_a_model_of_somebody_else() -> None:
    def over_rows(x: Any) -> Any:
        with tf.name_scope("tpuembed_lookup"):
            return tf.nn.softmax(x, axis=0)

    with graph(over_rows) as mixing:
        assert not mixing.verdict.is_proven


def looked_up(ids: Any) -> Any:
    """As an export looks `ids` up."""
    flat = ids_of("a", FeatureConfig(TableConfig(50, 4, "t", "sum")), ids).flatten()
    return flat.combine(tf.gather(TABLE, flat.row_ids()))


def lookup_of(*features: Any) -> list[Any]:
    with tf.name_scope("tpuembed_lookup"):
        return [looked_up(ids) for ids in features]


def lists_of(ids: Any) -> Any:
    return tf.ragged.boolean_mask(ids, ids > 0)


def entries_beside_lists(ids: Any) -> Any:
    lists = tf.sparse.from_dense(tf.maximum(ids, 0))
    return lookup_of(lists, lists.values)[1]


def cast_entries_beside_lists(ids: Any) -> Any:
    """The entries of the lists are ids of rows as well."""
    lists = tf.sparse.from_dense(tf.cast(tf.maximum(ids, 0), tf.int32))
    with tf.name_scope("tpuembed_lookup"):
        return [looked_up(tf.cast(each, tf.int64)) for each in (lists, lists.values)][1]


def of_positions(k: Any) -> Any:
    return lookup_of(k, tf.range(tf.shape(k, tf.int64)[0]))[1]


UNFIT: dict[str, Graph] = {
    "a sum over padded ids": lambda ids: tf.reduce_sum(lookup_of(lists_of(ids).to_tensor(0))[0], 1),
    "a mean over padded ids": lambda ids: tf.reduce_mean(lookup_of(tf.maximum(lists_of(ids).to_tensor(-1), 0))[0], 1),
    "entries beside their lists": entries_beside_lists,
    "cast entries beside their lists": cast_entries_beside_lists,
    "positions": of_positions,
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_a_lookup_of_rows_may_not_have_is_refused(name: str) -> None:
    build = UNFIT[name]
    with graph(build) as made:
        assert not made.export_verdict.is_proven
        assert differences(made, build), "the graph does not mix rows: the test proves nothing"


FIT: dict[str, Graph] = {
    "ids": lambda k: lookup_of(k)[0],
    "lists of one width": lambda ids: tf.reduce_sum(lookup_of(tf.maximum(ids, 0))[0], 1),
    "sparse lists": lambda ids: lookup_of(tf.sparse.from_dense(tf.maximum(ids, 0)))[0],
    "ragged lists": lambda ids: lookup_of(lists_of(ids))[0],
    "parsed lists and an id": lambda e, k: sum(lookup_of(parsed(e, **LISTS)["ids"], k)),
    "parsed ragged lists": lambda e: lookup_of(parsed(e, **RAGGED)["ids"])[0],
}


@pytest.mark.parametrize("name", FIT)
def test_a_lookup_of_rows_is_proven(name: str) -> None:
    build = FIT[name]
    with graph(build) as made:
        assert made.export_verdict.reason == ""
        assert differences(made, build, 1e-5) == []
