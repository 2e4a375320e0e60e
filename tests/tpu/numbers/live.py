"""Checks of the SparseCore path with TensorFlow's own host kernels, run by tensorflow-tpu's interpreter.

python -m tests.tpu.numbers.live NAME...     # of CHECKS

prints {"outcomes": {name: null, or why it failed}, "calls": {kernel: how often it ran and was compared}} as JSON.
"""

import contextlib
import functools
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final
from unittest import mock

os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", TPU_LIBRARY_PATH="/nonexistent.so")

import numpy as np
import tensorflow as tf
from tensorflow.python.tpu.ops import gen_xla_ops

from tests.support.layer.simulated import EXAMPLES, Array, Ids, inputs
from tests.support.layer.simulated_cases import FEATURES, TABLES, batch, layer_of, looked_up, looked_up_in_one, rows_of
from tests.tpu.numbers import kernels
from tpuembed import SGD
from tpuembed.backends.tpu.stack_ids import ids_with_room
from tpuembed.testing import simulated_tpu, simulation

__all__ = ["CHECKS"]

SEEDS: Final = 8
CHIPS: Final = ((1, 4), (1, 2), (2, 4), (2, 2), (4, 4), (4, 2))
"""Replicas, and SparseCores of each."""


@contextlib.contextmanager
def live(replicas: int = 1, cores: int = 4) -> Iterator[Any]:
    """A simulated TPU whose hosts run TensorFlow's kernels; the strategy."""
    with (
        mock.patch.object(simulation, "SparseCoreOps", kernels.LiveOps),
        simulated_tpu("V2", replicas, cores) as strategy,
    ):
        yield strategy


def _layer(strategy: Any, rows: Mapping[str, Array], stacked: bool = True, **options: Any) -> Any:
    with strategy.scope():
        return layer_of(rows, stacked, **options)


def _equal_lookups(strategy: Any, layer: Any, rows: Mapping[str, Array], seeds: Sequence[int]) -> None:
    for seed in seeds:
        ids = batch(strategy.num_replicas_in_sync, seed)
        found = looked_up(strategy, layer, ids)
        for name, (table, _, _) in FEATURES.items():
            truth = ids[name].lookup(rows[table], TABLES[table].combiner)
            np.testing.assert_allclose(found[name], truth, rtol=1e-6, atol=1e-6, err_msg=f"{name}, seed {seed}")


def lookups_equal_plain_ones() -> None:
    """Activations of random ragged, sparse and dense batches equal a lookup in float64, on 1, 2 and 4 chips, stacked or not."""
    rows = rows_of(1)
    for number, (replicas, cores) in enumerate(CHIPS):
        with live(replicas, cores) as strategy:
            layer = _layer(strategy, rows, stacked=number % 3 != 2, optimizer="sgd")
            _equal_lookups(strategy, layer, rows, range(SEEDS))


def a_step_moves_the_rows_that_it_looked_up() -> None:
    """One SGD step: each row moves by the rate times the gradients of the activations that it is in, times its gains there."""
    rate, rows = 0.25, rows_of(3)
    for replicas in (1, 2):
        with live(replicas) as strategy:
            layer = _layer(strategy, rows, optimizer=SGD(learning_rate=rate))
            ids, gradients = batch(replicas, 5), _gradients(replicas)
            strategy.run(_step, args=(layer, *inputs(strategy, ids), _of_replicas(strategy, gradients)))
            for table, variable in layer.embedding_tables.items():
                truth = rows[table.name] - rate * _moved(ids, gradients, table.name)
                np.testing.assert_allclose(variable.numpy(), truth, rtol=1e-6, atol=2e-6, err_msg=table.name)


def _step(layer: Any, features: Any, weights: Any, gradients: Mapping[str, Any]) -> None:
    with tf.GradientTape() as tape:
        activations = layer(features, weights)
        loss = tf.add_n([tf.reduce_sum(activations[name] * gradients[name]) for name in gradients])
    layer.apply_gradients(tape.gradient(loss, layer.trainable_variables))


def _gradients(replicas: int) -> dict[str, Array]:
    """Feature -> [examples of all replicas, dim], halves and quarters."""
    random = np.random.default_rng(6)
    shapes = {name: (EXAMPLES * replicas, TABLES[table].dim) for name, (table, _, _) in FEATURES.items()}
    return {name: random.integers(-4, 5, shape).astype(np.float32) / 4 for name, shape in shapes.items()}


def _of_replicas(strategy: Any, gradients: Mapping[str, Array]) -> Any:
    def of(context: Any) -> Any:
        first = context.replica_id_in_sync_group * EXAMPLES
        return {name: tf.constant(array[first : first + EXAMPLES]) for name, array in gradients.items()}

    return strategy.experimental_distribute_values_from_function(of)


def _moved(ids: Mapping[str, Ids], gradients: Mapping[str, Array], table: str) -> Array:
    """[rows, dim] sums of gradients; a lookup of a table of one-hot rows is how much of each row an activation holds."""
    config = TABLES[table]
    found = [
        ids[name].lookup(np.eye(config.vocabulary_size), config.combiner).T @ gradients[name]
        for name, (of, _, _) in FEATURES.items()
        if of == table
    ]
    return np.sum(found, axis=0)


# ---- limits


def _one_table(strategy: Any, per_example: list[int], **options: Any) -> Array:
    """Every example has the same ids."""
    return looked_up_in_one(strategy, [per_example] * EXAMPLES * strategy.num_replicas_in_sync, **options)


def _fails(words: str, strategy: Any, per_example: list[int], **options: Any) -> None:
    _fails_with(words, lambda: _one_table(strategy, per_example, **options))


def _fails_with(words: str, attempt: Callable[[], object]) -> None:
    try:
        attempt()
    except tf.errors.InvalidArgumentError as error:
        said = str(error)
    else:
        said = "nothing failed"
    assert words in said, f"{words!r} is not in {said}"


def limits_hold_to_the_id() -> None:
    """As many ids of one owner as its limits say pass; one more fails with SparseCore, count, limit and table."""
    for replicas in (1, 2):
        owners = 4 * replicas
        ids = [0, owners, 2 * owners]  # all of the first SparseCore; a SparseCore has two examples
        with live(replicas) as strategy:
            found = _one_table(strategy, ids, max_ids_per_partition=6, max_unique_ids_per_partition=3)
            np.testing.assert_allclose(found[0], 8.0 * sum(ids) + 3 * np.arange(8))
            words = "gets 6 ids while the max ids per sparse core is set to be 5 for table t"
            _fails(words, strategy, ids, max_ids_per_partition=5)
            words = "gets 3 unique ids while the max unique ids per sparse core is set to be 2 for table t"
            _fails(words, strategy, ids, max_unique_ids_per_partition=2)
            _fails("gets 6 ids", strategy, ids, max_ids_per_partition=5, allow_id_dropping=True)


def room_holds_to_the_id() -> None:
    """A buffer that is full to its last place passes; ids beyond it fail with stack and count, or are dropped if they may be."""
    full = [3, 7, 11, 15]  # of one owner: 8 places on each of 4 SparseCores, of two examples each
    with live() as strategy:
        found = _one_table(strategy, full, max_ids_per_chip_per_sample=4)
        np.testing.assert_allclose(found[0], 8.0 * sum(full) + 4 * np.arange(8))
        words = "tables of stack 't': the ids of one replica's batch do not fit into a buffer of 32 places"
        _fails(words, strategy, [*full, 19], max_ids_per_chip_per_sample=4)
        _fails(words, strategy, [0, *full], max_ids_per_chip_per_sample=4)
        found = _one_table(strategy, [0, 1, 2, 3], max_ids_per_chip_per_sample=2, allow_id_dropping=True)
        np.testing.assert_allclose(found[:2], [np.arange(8.0) * 2 + 8.0] * 2)
        np.testing.assert_array_equal(found[2:], 0.0)


def room_is_refused_where_the_kernel_refuses_it() -> None:
    """The layer's own check of the buffer, which names the stack, fails for the same counts as the kernel, which does not."""
    random = np.random.default_rng(4)
    refused = [
        _kernel_and_layer_refuse(random.integers(0, 12, (2, 4)), int(random.integers(2, 12))) for _ in range(200)
    ]
    assert all(kernel == layer for kernel, layer in refused), refused
    assert 40 < sum(kernel for kernel, _ in refused) < 160, "both happen"


def _kernel_and_layer_refuse(counts: Array, per_sample: int) -> tuple[bool, bool]:
    """Of counts [SparseCores, owners], a buffer of `per_sample` times 8 samples."""
    ends = [np.concatenate([[0], np.cumsum(of_core)]).astype(np.int32) for of_core in counts]
    coos = [np.zeros(end[-1], np.int32) for end in ends]

    def kernel() -> None:
        gen_xla_ops.convert_to_sparse_core_csr_wrapped_coo_tensor(
            sorted_row_ids_list=coos,
            sorted_col_ids_list=coos,
            sorted_gains_list=[coo.astype(np.float32) for coo in coos],
            id_counts_list=ends,
            splits=np.int64(0),
            sample_count_per_sc=4,
            num_replica=2,
            max_minibatches_per_sc=1,
            max_ids_per_chip_per_sample=per_sample,
            table_vocab_size=64,
            feature_width=8,
            table_name="t",
            allow_id_dropping=False,
        )

    return _refuses(kernel), _refuses(lambda: ids_with_room([tf.constant(end) for end in ends], "t", 8 * per_sample))


def _refuses(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except tf.errors.InvalidArgumentError:
        return True
    return False


def ids_outside_of_their_table_fail() -> None:
    """The last row is looked up, the next id, a row of padding to the kernels, fails with the feature and the id."""
    with live() as strategy:
        found = looked_up_in_one(strategy, [[59]] * EXAMPLES, rows=60)
        np.testing.assert_allclose(found[:, 0], 8.0 * 59)
        outside = functools.partial(looked_up_in_one, strategy, [[60]] * EXAMPLES, rows=60)
        _fails_with("feature x: id 60 of row 0 is not in table t, which has 60 rows", outside)


CHECKS: Final[Mapping[str, Callable[[], None]]] = {
    check.__name__: check
    for check in (
        lookups_equal_plain_ones,
        a_step_moves_the_rows_that_it_looked_up,
        limits_hold_to_the_id,
        room_holds_to_the_id,
        room_is_refused_where_the_kernel_refuses_it,
        ids_outside_of_their_table_fail,
    )
}
"""Name -> a check, which fails by raising."""


def outcome(name: str) -> str | None:
    """None where the check holds, else why it does not."""
    try:
        CHECKS[name]()
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})"
    return None


if __name__ == "__main__":
    outcomes = {name: outcome(name) for name in sys.argv[1:]}
    print(json.dumps({"outcomes": outcomes, "calls": kernels.calls}))
