"""Lookups of the layer's SparseCore backend, through TensorFlow's own class, equal lookups in numpy."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.layer.simulated import EXAMPLES, Array, Ids, inputs, make_layer
from tests.support.layer.simulated_cases import FEATURES, TABLES, batch, layer_of, looked_up, looked_up_in_one, rows_of
from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding
from tpuembed.errors import ConfigError
from tpuembed.testing import simulated_tpu

pytestmark = pytest.mark.filterwarnings(
    "ignore:The 'warn' function is deprecated:DeprecationWarning"
)  # TensorFlow's logging


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize(("replicas", "sparse_cores"), [(1, 4), (1, 2), (2, 4), (2, 2), (4, 4), (4, 2)])
@pytest.mark.sampled(4)
def test_lookups_equal_numpy(replicas: int, sparse_cores: int, stacked: bool) -> None:
    rows = rows_of(1)
    with simulated_tpu(replicas=replicas, sparse_cores=sparse_cores) as strategy, strategy.scope():
        layer = layer_of(rows, stacked, optimizer="sgd")
        stacks = set(layer._tpu_embedding._trackable_children()) - {"updates", "_sparse_core_table_layouts"}
        assert stacks == ({"a_b_c_e", "d_f"} if stacked else TABLES.keys())
        for seed in range(3):
            ids = batch(replicas, seed)
            found = looked_up(strategy, layer, ids)
            for name, (of, _, _) in FEATURES.items():
                truth = ids[name].lookup(rows[of], TABLES[of].combiner)
                np.testing.assert_allclose(found[name], truth, rtol=1e-6, atol=1e-6, err_msg=name)


def one_table(strategy: Any, per_example: list[int], **options: Any) -> Array:
    """Activations of one table; every example has the same ids."""
    return looked_up_in_one(strategy, [per_example] * EXAMPLES * strategy.num_replicas_in_sync, **options)


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_exceeded_limit_names_table_count_and_limit(replicas: int) -> None:
    owners = 4 * replicas
    of_one_owner = [0, owners, 2 * owners]
    with simulated_tpu(replicas=replicas) as strategy:
        truth = one_table(strategy, of_one_owner, max_ids_per_partition=6, max_unique_ids_per_partition=3)
        np.testing.assert_allclose(truth[0], 8.0 * sum(of_one_owner) + 3 * np.arange(8))
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"Sparse core 0 gets 6 ids .* to be 5 for table t\."):
            one_table(strategy, of_one_owner, max_ids_per_partition=5)
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"gets 3 unique ids .* to be 2 for table t\."):
            one_table(strategy, of_one_owner, max_unique_ids_per_partition=2)
        # The kernel does not drop for these two; see tests/golden/sparse_core_ops, too_many.
        with pytest.raises(tf.errors.InvalidArgumentError, match="6 ids"):
            one_table(strategy, of_one_owner, max_ids_per_partition=5, allow_id_dropping=True)
        one_table(strategy, of_one_owner)  # a failure leaves nothing behind


def test_ids_that_find_no_room_raise_or_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    with simulated_tpu() as strategy:
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"stack 't': the ids .* a buffer of 16 places. Raise"):
            one_table(strategy, [0, 1, 2, 3], max_ids_per_chip_per_sample=2)
        found = one_table(strategy, [0, 1, 2, 3], max_ids_per_chip_per_sample=2, allow_id_dropping=True)
    # 16 places: two owners' runs of 8, of which each holds one id of the first SparseCore's two examples.
    np.testing.assert_allclose(found[:2], [np.arange(8.0) * 2 + 8.0] * 2)
    np.testing.assert_array_equal(found[2:], 0.0)
    assert "Table t is dropping 28 ids" in caplog.text


@pytest.mark.parametrize("form", ["dense", "ragged", "sparse"])
@pytest.mark.parametrize(
    ("dtype", "outside"), [(tf.int32, 9), (tf.int64, 16), (tf.int64, 2**32 + 5), (tf.uint64, 2**64 - 1), (tf.int32, -1)]
)
def test_an_id_outside_of_its_table_fails_and_trains_nothing(form: str, dtype: Any, outside: int) -> None:
    """TensorFlow's class reads padding for id 9, and another table's rows for id 16."""
    if outside == -1 and form != "dense":
        return  # dropped there
    rows = {name: np.full((9, 4), value, np.float32) for name, value in (("a", 1.0), ("b", 7.0))}
    ids = tf.concat([tf.cast([8, 1, 1, 1, 1, 1, 1], dtype), tf.constant([outside], dtype)], 0)
    ragged = tf.RaggedTensor.from_row_lengths(ids, [1] * 8)
    given = {"dense": ids, "ragged": ragged, "sparse": ragged.to_sparse()}[form]
    with simulated_tpu() as strategy, strategy.scope():
        tables = {name: TableConfig(9, 4, name, combiner="mean") for name in rows}
        layer = make_layer(tables, rows, optimizer="sgd")

        def step(a: Any, b: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(found) for found in layer({"a": a, "b": b}).values()])
            layer.apply_gradients(tape.gradient(loss, layer.trainable_variables))

        with pytest.raises(
            tf.errors.InvalidArgumentError,
            match=f"feature a: id {outside} of row 7 is not in table a, which has 9 rows",
        ):
            strategy.run(step, args=(given, tf.zeros(EXAMPLES, tf.int64)))
        for config, table in layer.embedding_tables.items():
            np.testing.assert_array_equal(table.numpy(), rows[config.name])


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_negative_ids_are_dropped_where_ids_are_validated(kind: str, combiner: str) -> None:
    rows = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    given = Ids(
        kind,
        [[1, -1, 2], [-1], [3], [], [4, -7], [5], [6], [-2, 8]],
        [[0.5, 9.0, 2.0], [9.0], [1.0], [], [2.0, 9.0], [1.0], [1.0], [9.0, 3.0]],
    )
    kept = [
        [(i, w) for i, w in zip(ids, ws, strict=True) if i >= 0]
        for ids, ws in zip(given.ids, given.weights or [], strict=True)
    ]
    truth = Ids(kind, [[i for i, _ in row] for row in kept], [[w for _, w in row] for row in kept]).lookup(
        rows, combiner
    )
    with simulated_tpu() as strategy, strategy.scope():
        for validate in (True, False):
            table = TableConfig(9, 4, "t", combiner=combiner)
            layer = TPUEmbedding(
                {"x": FeatureConfig(table, validate_weights_and_indices=validate)}, "sgd", batch_size=EXAMPLES
            )
            layer.assign_rows("t", 0, rows)
            if validate:
                found = looked_up(strategy, layer, {"x": given})["x"]
                np.testing.assert_allclose(found, truth, rtol=1e-6, atol=1e-6)
            else:
                with pytest.raises(tf.errors.InvalidArgumentError, match="feature x: id -1 of row 0 is not in table t"):
                    looked_up(strategy, layer, {"x": given})


def test_ragged_ids_of_too_few_examples_fail() -> None:
    """Off the TPU they are sequences of two ids; SparseCores would put all of them into the first half of the batch."""
    with simulated_tpu() as strategy, strategy.scope():
        layer = TPUEmbedding(FeatureConfig(TableConfig(9, 4, "t"), output_shape=(4, 2)), "sgd")
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"ragged ids must have 8 examples"):
            strategy.run(lambda: layer(tf.ragged.constant([[1], [2, 3], [4], [5]], tf.int64)))
        found = strategy.run(lambda: layer(tf.ragged.constant([[1], [2, 3], [4], [5], [], [6], [7], [8]], tf.int64)))
        assert found.shape == (4, 2, 4)
        assert np.isfinite(found.numpy()).all()


def test_a_dropped_id_touches_no_row() -> None:
    """Adam moves every row that a step looks up, whatever its gradient."""
    with simulated_tpu() as strategy, strategy.scope():
        rows = np.ones((9, 4), np.float32)
        layer = make_layer({"x": TableConfig(9, 4, "t")}, {"t": rows}, optimizer="adam")
        layer.assign_rows("t", 0, rows, slot="momenta")
        ids = tf.ragged.constant([[-1, 3]] * EXAMPLES, tf.int64)

        def step() -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer({"x": ids})["x"])
            layer.apply_gradients(tape.gradient(loss, layer.trainable_variables))

        strategy.run(step)
        (table,) = layer.embedding_tables.values()
        moved = np.flatnonzero((table.numpy() != rows).any(1))
    assert moved.tolist() == [3]


@pytest.mark.parametrize("bad", [-1, 64])
def test_tensorflows_own_class_and_an_id_outside_of_its_stack(bad: int) -> None:
    embedding = tf.tpu.experimental.embedding
    with simulated_tpu(replicas=2) as strategy, strategy.scope():
        ones = tf.constant_initializer(1.0)
        feature = embedding.FeatureConfig(embedding.TableConfig(64, 8, ones, name="t"), output_shape=[EXAMPLES])
        theirs = embedding.TPUEmbeddingV2(feature, embedding.SGD(0.1))
        activations, _ = strategy.run(lambda: theirs(tf.range(EXAMPLES)))
        for of_replica in strategy.experimental_local_results(activations):
            np.testing.assert_array_equal(of_replica, np.ones((EXAMPLES, 8)))
        with pytest.raises(tf.errors.InvalidArgumentError, match="outside the stack"):
            strategy.run(lambda: theirs(tf.fill([EXAMPLES], bad)))


def test_what_is_not_simulated_is_refused() -> None:
    with refused(ConfigError, match="'V1'"), simulated_tpu("V1"):
        pass
    for wrong in ({"replicas": 3}, {"sparse_cores": 0}):
        with refused(ConfigError), simulated_tpu(**wrong):  # type: ignore[arg-type]
            pass
    with simulated_tpu() as strategy:
        with refused(ConfigError):
            strategy.run(lambda: None, options=tf.distribute.RunOptions())
        with refused(ConfigError, match=r"tf\.function"):
            tf.function(lambda: strategy.run(lambda: None))()
        with strategy.scope():
            features = FeatureConfig(TableConfig(9, 4, "t"), output_shape=(EXAMPLES,))
            layer = TPUEmbedding(features, "sgd", pipeline_execution_with_tensor_core=True)
        with refused(ConfigError, match="pipeline_execution_with_tensor_core"):
            strategy.run(lambda: layer(tf.zeros(EXAMPLES, tf.int64)))


@pytest.mark.parametrize("policy", ["zeros", 5])
@pytest.mark.parametrize("replicas", [1, 2])
def test_ids_outside_of_their_tables_are_looked_up_as_the_features_say(replicas: int, policy: str | int) -> None:
    """Looked up and trained as off the TPU: a step of SGD of every kind of ids and combiner, with and without weights."""
    random, rows = np.random.default_rng(3), rows_of(2)
    del rows["e"]  # has one row
    features = {name: feature for name, feature in FEATURES.items() if feature[0] in rows}
    ids = {name: one for name, one in batch(replicas, 0).items() if name in features}
    for name, (of, kind, _) in features.items():
        size = TABLES[of].vocabulary_size
        far = [size, 2**40, -7, 2**31 + 5, *([-1] if kind == "dense" else [])]
        given = [[int(random.choice(far)) if random.random() < 0.4 else i for i in row] for row in ids[name].ids]
        ids[name] = dataclasses.replace(ids[name], ids=given)

    def trained() -> tuple[dict[str, Array], dict[str, Array]]:
        shape = (EXAMPLES,) if tf.distribute.has_strategy() else None
        options: Any = {"output_shape": shape, "out_of_vocabulary": policy}
        layer = TPUEmbedding(
            {name: FeatureConfig(TABLES[of], **options) for name, (of, *_) in features.items()}, "adagrad"
        )
        for table in rows:
            layer.assign_rows(table, 0, rows[table])

        def step(features: Any, weights: Any) -> Any:
            with tf.GradientTape() as tape:
                found = layer(features, weights)
                loss = tf.add_n([tf.reduce_sum(one * one) for one in found.values()])
            layer.apply_gradients(tape.gradient(loss, layer.trainable_variables))
            return found

        strategy = tf.distribute.get_strategy()
        if tf.distribute.has_strategy():
            found = strategy.run(step, args=inputs(strategy, ids))
            local = strategy.experimental_local_results
            values = {name: np.concatenate([part.numpy() for part in local(of)]) for name, of in found.items()}
        else:
            everything = {name: one.of(slice(None)) for name, one in ids.items()}
            pairs = [{name: leaf[which] for name, leaf in everything.items()} for which in (0, 1)]
            values = {name: one.numpy() for name, one in step(*pairs).items()}
        return values, {config.name: table.numpy() for config, table in layer.embedding_tables.items()}

    on_host = trained()
    with simulated_tpu(replicas=replicas) as strategy, strategy.scope():
        on_cores = trained()
    for here, there in zip(on_host, on_cores, strict=True):
        for name, truth in here.items():
            np.testing.assert_allclose(there[name], truth, rtol=1e-5, atol=1e-5, err_msg=name)
