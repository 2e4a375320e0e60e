"""`track_rows=True` for tables in an accelerator, whose host stamps the rows: on simulated SparseCores, and in traces."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.fake_tpu import fake_tpu
from tests.support.layer.models import OPTIMIZERS
from tests.support.layer.simulated_training import Model, batches, state, train
from tests.support.messages import refused
from tpuembed import Adam, FeatureConfig, TableConfig, TPUEmbedding
from tpuembed.backends.tpu import accelerator
from tpuembed.errors import ConfigError
from tpuembed.live.tables import live_checkpoint
from tpuembed.testing import simulated_tpu

NOT_IN_SPARSE_CORES = {"ftrl from zero", "sgd, clipped and decayed", "adagrad, clipped and decayed", "adam, every row"}
Array = np.ndarray[Any, Any]


def stamps_of(layer: TPUEmbedding) -> dict[str, Array]:
    live, found = live_checkpoint(layer), {}
    for table in layer.embedding_tables:
        found[table.name] = np.empty(table.vocabulary_size, np.int32)
        live.stamps[table.name].read(0, found[table.name])
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("replicas", "size_threshold"), [(1, None), (2, None), (2, 12)])
def test_every_row_that_a_step_moved_is_stamped(replicas: int, size_threshold: int | None) -> None:
    """Against the ids, and against the rows before and after; with a threshold, small tables are replicated."""
    kinds = [kind for kind in OPTIMIZERS if kind not in NOT_IN_SPARSE_CORES]
    tables = [TableConfig(37 - 2 * n, 8, f"t{n}", optimizer=OPTIMIZERS[kind]) for n, kind in enumerate(kinds)]
    features = {f"f{n}": table for n, table in enumerate([*tables, tables[0]])}
    with simulated_tpu(replicas=replicas) as strategy:
        with strategy.scope():
            model = Model(features, track_rows=True, size_threshold=size_threshold)
        expected = {table.name: np.zeros(table.vocabulary_size, np.int32) for table in tables}
        for update, ids in enumerate(batches(features, replicas, steps=4), 1):
            before = state(model)
            after = train(strategy, model, [ids])
            for feature, of_feature in ids.items():
                expected[features[feature].name][[i for row in of_feature.ids for i in row]] = update
            for name, stamps in stamps_of(model.embedding).items():
                np.testing.assert_array_equal(stamps, expected[name])
                moved = (after[name] != before[name]).any(axis=1)
                assert moved.any()
                assert (stamps[moved] == update).all()


POLICIES: Mapping[str, Any] = {"zeros": "zeros", "row": 4, "error": "error"}


@pytest.mark.parametrize("policy", POLICIES)
def test_ids_outside_the_table_are_stamped_as_their_policy_says(policy: str) -> None:
    ids = [[3, -1], [7, 7], [], [100, 5], [-2], [0], [], [2**40]]
    if policy == "error":
        ids = [[i for i in row if i < 9] for row in ids]  # negative ids of lists are dropped
    with simulated_tpu() as strategy:
        with strategy.scope():
            table = TableConfig(9, 8, "t", combiner="sum")
            feature = FeatureConfig(
                table, output_shape=(8,), out_of_vocabulary=POLICIES[policy], validate_weights_and_indices=True
            )
            layer = TPUEmbedding(feature, "adagrad", track_rows=True)
        before = next(iter(layer.embedding_tables.values())).numpy()
        lists = tf.ragged.constant(ids, dtype=tf.int64, ragged_rank=1)
        for features in (lists, lists.to_sparse()):
            strategy.run(step, args=(layer, features))
        moved = (next(iter(layer.embedding_tables.values())).numpy() != before).any(axis=1)
        rows = {0, 3, 5, 7} | ({4} if policy == "row" else set())
        assert set(np.flatnonzero(moved)) == rows
        np.testing.assert_array_equal(stamps_of(layer)["t"], [2 if row in rows else 0 for row in range(9)])


def step(layer: TPUEmbedding, features: Any) -> None:
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(rows * rows + rows) for rows in tf.nest.flatten(layer(features))])
    layer.apply_gradients(tape.gradient(loss, layer.trainable_variables))


def test_a_lookup_stamps_no_row() -> None:
    with simulated_tpu() as strategy:
        with strategy.scope():
            layer = TPUEmbedding(FeatureConfig(TableConfig(9, 8, "t"), output_shape=(8,)), "adam", track_rows=True)
        strategy.run(layer, args=(tf.range(8),))
        assert not stamps_of(layer)["t"].any()


def test_stamps_move_between_sparse_cores_and_the_host(tmp_path: Path) -> None:
    features = {"a": TableConfig(37, 5, "a"), "b": TableConfig(12, 8, "b")}
    with simulated_tpu(replicas=2) as strategy:
        with strategy.scope():
            model = Model(features, optimizer="adam", track_rows=True)
        train(strategy, model, batches(features, 2, steps=3))
        path = tf.train.Checkpoint(layer=model.embedding).write(str(tmp_path / "tpu"))
        saved, stamps = live_checkpoint(model.embedding).stamps["a"].history, stamps_of(model.embedding)
        assert any(of_table.max() == 3 for of_table in stamps.values())
    host = Model(features, optimizer="adam", track_rows=True).embedding
    tf.train.Checkpoint(layer=host).read(path).expect_partial()
    for name, expected in stamps.items():
        np.testing.assert_array_equal(stamps_of(host)[name], expected)
    history = live_checkpoint(host).stamps["a"].history
    assert saved is not None
    assert history is not None
    assert history.since(saved)
    step(host, {"a": tf.constant([1]), "b": tf.constant([2])})
    path = tf.train.Checkpoint(layer=host).write(str(tmp_path / "host"))
    with simulated_tpu(replicas=1, sparse_cores=2) as strategy:
        with strategy.scope():
            back = Model(features, optimizer="adam", track_rows=True).embedding
        tf.train.Checkpoint(layer=back).read(path).expect_partial()
        for name, expected in stamps_of(host).items():
            np.testing.assert_array_equal(stamps_of(back)[name], expected)
        assert stamps_of(back)["b"][2] == 4


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("hardware", ["V1", "V2"])
def test_the_stamps_of_a_traced_step_are_written_outside_of_the_tpu_program(hardware: str, replicas: int) -> None:
    with fake_tpu(hardware, replicas) as strategy:
        with strategy.scope():
            tables = [TableConfig(rows, 8, name) for rows, name in ((100, "large"), (5, "small"))]
            features = {table.name: FeatureConfig(table, output_shape=(16,)) for table in tables}
            layer = TPUEmbedding(features, "adagrad", track_rows=True, size_threshold=10)

        def run(ids: Any) -> None:
            step(layer, ids)

        strategy.run(run, args=({name: tf.compat.v1.placeholder(tf.int32, [16]) for name in features},))
        graph = tf.compat.v1.get_default_graph()
        (call,) = [op for op in graph.get_operations() if op.type == "EagerPyFunc"]
        assert "_xla_outside_compilation" in call.node_def.attr
        scatters = [op for op in graph.get_operations() if op.type == "ResourceScatterUpdate"]
        assert [op.inputs[2].dtype for op in scatters].count(tf.int32) == 1  # of the small table, in the TPUs


@pytest.mark.parametrize("hardware", ["V1", "V2"])
def test_what_cannot_be_tracked_is_refused_by_name(hardware: str, monkeypatch: pytest.MonkeyPatch) -> None:
    feature = FeatureConfig(TableConfig(40, 8, "t"), output_shape=(16,))
    with fake_tpu(hardware) as strategy, strategy.scope():
        with refused(ConfigError, match="pipeline_execution_with_tensor_core"):
            TPUEmbedding(feature, "adam", track_rows=True, pipeline_execution_with_tensor_core=True)
        if hardware == "V1":  # SparseCores have no such Adam
            with refused(ConfigError, match="lazy_adam=False"):
                TPUEmbedding(feature, Adam(lazy_adam=False), track_rows=True)
        for hosts in (["/job:worker/replica:0/task:0"], [f"/job:localhost/replica:0/task:{n}" for n in range(2)]):
            monkeypatch.setattr(accelerator, "host_names", lambda _, hosts=hosts: hosts)
            with refused(ConfigError, match="The hosts are"):
                TPUEmbedding(feature, "adam", track_rows=True)
        TPUEmbedding(feature, "adam")
