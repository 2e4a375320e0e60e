"""What the layer saves from SparseCores: read, exported, and restored wherever its tables lie then."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.tpu.kernels import sparse_core_layout_pb2

from tests.support.checkpoint.bundles import save
from tests.support.layer.simulated import EXAMPLES, Array, Ids, random_ids
from tests.support.layer.simulated_training import Model, batches, state, train
from tests.support.messages import refused
from tpuembed import FTRL, SGD, AdagradMomentum, FeatureConfig, TableConfig, TPUEmbedding, export_saved_model
from tpuembed.checkpoint import open_checkpoint
from tpuembed.errors import CheckpointCorruptError, CheckpointMismatchError, ConfigError
from tpuembed.testing import simulated_tpu

pytestmark = pytest.mark.filterwarnings(
    "ignore:The 'warn' function is deprecated:DeprecationWarning"
)  # TensorFlow's logging

NODE = "model/embedding/_tpu_embedding"
LAYOUTS = f"{NODE}/_sparse_core_table_layouts/.ATTRIBUTES/VARIABLE_VALUE"
SparseCoreConfig = tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig
Tables = Mapping[str, TableConfig]


def stacked() -> Tables:
    """Three tables in one stack, one of them with "/" in its name; others alone, for their width or their optimizer."""
    tables = [
        TableConfig(37, 5, "a"),
        TableConfig(9, 8, "video/b", combiner="sum"),
        TableConfig(64, 7, "c", combiner="sqrtn"),
        TableConfig(20, 12, "wide"),
        TableConfig(21, 6, "ftrl", optimizer=FTRL(learning_rate=0.1)),
        TableConfig(11, 6, "sgd", optimizer=SGD()),
    ]
    return {table.name: table for table in tables}


def aligned() -> Tables:
    """One table, whose stack has its name and its shape."""
    return {"lone": TableConfig(128, 8, "lone")}


def model_of(tables: Tables, **options: Any) -> Model:
    return Model(tables, optimizer=AdagradMomentum(learning_rate=0.1, momentum=0.5), **options)


def trained(strategy: Any, tables: Tables, **options: Any) -> Model:
    with strategy.scope():
        model = model_of(tables, **options)
    train(strategy, model, batches(tables, strategy.num_replicas_in_sync, steps=2))
    return model


def write(folder: Path, model: Any) -> str:
    return str(tf.train.Checkpoint(model=model).write(str(folder / "ckpt")))


def assert_holds(path: str, truth: Mapping[str, Array]) -> None:
    """The tables and slots of `state`, whole and by ranges."""
    with open_checkpoint(path) as checkpoint:
        read = set()
        for name, info in checkpoint.tables().items():
            for slot in (None, *info.slots):
                key = name if slot is None else f"{name}/{slot}"
                read.add(key)
                np.testing.assert_array_equal(checkpoint.read(name, slot=slot), truth[key], err_msg=key)
                start, stop = info.rows // 3, info.rows - 1
                np.testing.assert_array_equal(checkpoint.read(name, start, stop, slot), truth[key][start:stop])
        assert read == set(truth) - {"kernel"}


@pytest.mark.parametrize("tables", [stacked, aligned])
@pytest.mark.parametrize(("replicas", "sparse_cores"), [(1, 4), (2, 2), (4, 4)])
def test_reads_back_row_for_row(tmp_path: Path, replicas: int, sparse_cores: int, tables: Any) -> None:
    with simulated_tpu(replicas=replicas, sparse_cores=sparse_cores) as strategy:
        model = trained(strategy, tables())
        path, truth = write(tmp_path, model), state(model)
    assert_holds(path, truth)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.format == "sparsecore"
        cores = f"{replicas * sparse_cores} SparseCores"
        layouts = {name: info.layout for name, info in checkpoint.tables().items()}
        if tables is aligned:
            assert layouts == {"lone": cores}
        else:
            assert layouts["a"] == f"stack a_c_video/b, {cores}"
            assert layouts["wide"] == cores


def test_small_tables_lie_beside_the_stacks(tmp_path: Path) -> None:
    with simulated_tpu(replicas=2) as strategy:
        model = trained(strategy, stacked(), size_threshold=20)
        path, truth = write(tmp_path, model), state(model)
    assert_holds(path, truth)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.format == "dense+sparsecore"


def of_one_width() -> Tables:
    """Which of them are in the stack, a size_threshold decides."""
    return {table.name: table for table in (TableConfig(40, 8, "a"), TableConfig(12, 8, "b"), TableConfig(64, 8, "c"))}


def keys(path: str) -> list[str]:
    """Without the layouts, which only some have."""
    return sorted(set(tf.train.load_checkpoint(path).get_variable_to_shape_map()) - {LAYOUTS})


@pytest.mark.filterwarnings(
    "ignore:TPUEmbedding. sparse_core_embedding_config has no effect"
)  # where all are replicated
@pytest.mark.parametrize("stacking", [True, False])
@pytest.mark.parametrize(("before", "after"), [(None, 12), (12, 40), (64, None)])
@pytest.mark.sampled(2)
def test_restores_under_another_threshold(
    tmp_path: Path, before: int | None, after: int | None, stacking: bool
) -> None:
    """Both ways. TensorFlow calls a stack by its tables; without stacks the keys do not depend on the threshold."""
    config = None if stacking else SparseCoreConfig(disable_table_stacking=True)
    paths = []
    for index, (first, second) in enumerate([(before, after), (after, before)]):
        with simulated_tpu(replicas=2) as strategy:
            model = trained(strategy, of_one_width(), size_threshold=first, sparse_core_embedding_config=config)
            truth = state(model)
            (tmp_path / str(index)).mkdir()
            paths.append(write(tmp_path / str(index), model))
            with strategy.scope():
                other = model_of(of_one_width(), size_threshold=second, sparse_core_embedding_config=config)
            tf.train.Checkpoint(model=other).read(paths[-1])
            same(state(other), truth)
            assert int(other.embedding._tpu_embedding.updates.numpy()) == 2
    assert (keys(paths[0]) == keys(paths[1])) != stacking


@pytest.mark.parametrize("tables", [stacked, aligned])
@pytest.mark.sampled(1)
def test_an_export_of_sparse_cores_serves_their_rows(tmp_path: Path, tables: Any) -> None:
    with simulated_tpu(replicas=2) as strategy:
        model = trained(strategy, tables())
        path, truth = write(tmp_path, model), state(model)
    report = export_saved_model(path, tmp_path / "model")
    served = tf.saved_model.load(str(report.path)).signatures["serving_default"]
    random = np.random.default_rng(1)
    batch = {name: random_ids(random, "ragged", t.vocabulary_size, 16) for name, t in tables().items()}
    padded = {name: tf.ragged.constant(ids.ids, tf.int64).to_tensor(-1) for name, ids in batch.items()}
    found = served(**padded)
    for name, table in tables().items():
        expected = batch[name].lookup(truth[name], table.combiner)
        np.testing.assert_allclose(found[name], expected, rtol=1e-6, atol=1e-6, err_msg=name)


def same(found: Mapping[str, Array], truth: Mapping[str, Array]) -> None:
    assert found.keys() == truth.keys()
    for name, expected in truth.items():
        np.testing.assert_array_equal(found[name], expected, err_msg=name)


@pytest.mark.parametrize("tables", [stacked, aligned])
@pytest.mark.parametrize(("replicas", "sparse_cores"), [(2, 4), (1, 4), (4, 2)])
@pytest.mark.sampled(2)
def test_restores_into_the_layout_of_other_tpus(tmp_path: Path, replicas: int, sparse_cores: int, tables: Any) -> None:
    """Eight SparseCores of two TPUs wrote it; four TPUs' eight have other rotations in tensors of the same shapes."""
    with simulated_tpu(replicas=2) as strategy:
        model = trained(strategy, tables())
        path, truth = write(tmp_path, model), state(model)
    with simulated_tpu(replicas=replicas, sparse_cores=sparse_cores) as strategy, strategy.scope():
        other = model_of(tables())
        status = tf.train.Checkpoint(model=other).read(path)
        if (replicas, sparse_cores) == (2, 4):
            status.assert_consumed()
        same(state(other), truth)
        assert int(other.embedding._tpu_embedding.updates.numpy()) == 2


@pytest.mark.parametrize("tables", [stacked, aligned])
def test_restores_on_the_host_and_back(tmp_path: Path, tables: Any) -> None:
    with simulated_tpu(replicas=2) as strategy:
        model = trained(strategy, tables())
        path, truth = write(tmp_path, model), state(model)
    host = model_of(tables())
    tf.train.Checkpoint(model=host).restore(path)
    same(state(host), truth)
    (tmp_path / "host").mkdir()
    again = write(tmp_path / "host", host)
    assert_holds(again, truth)  # no layouts are left that the rows do not follow
    with simulated_tpu() as strategy, strategy.scope():
        back = model_of(tables())
        tf.train.Checkpoint(model=back).restore(again)
        same(state(back), truth)
    tables_and_slots = {name: rows for name, rows in truth.items() if name != "kernel"}
    for source in (path, again):
        with simulated_tpu(sparse_cores=2) as strategy, strategy.scope():
            other = model_of(tables())
            assert other.embedding.restore_tables(source).updates == 2
            same({name: rows for name, rows in state(other).items() if name != "kernel"}, tables_and_slots)


def test_weights_files_hold_the_tables_themselves(tmp_path: Path) -> None:
    path = str(tmp_path / "model.weights.h5")
    with simulated_tpu(replicas=2) as strategy:
        model = trained(strategy, stacked())
        model.save_weights(path)
        truth = state(model)
    assert_holds(path, truth)
    host = model_of(stacked())
    train(tf.distribute.get_strategy(), host, batches(stacked(), 1, steps=1))  # Keras loads into what has been called
    host.load_weights(path)
    same(state(host), truth)


def rewritten(path: str, layouts: bytes) -> str:
    reader = tf.train.load_checkpoint(path)
    tensors = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
    return save(Path(f"{path}-rewritten"), {**tensors, LAYOUTS: layouts})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"table_name": "other", "stacked_table_name": "other"}, "have 'other', which is not a table"),
        ({"unsharded_shape": [127, 8]}, r"'lone' is \[128, 8\] in its layer's config, but \[127, 8\] on disk"),
        ({"total_rows_per_sparse_core_shard": 32}, r"is \[128, 8\], but its SparseCore layout has \[256, 8\]"),
        ({"num_sparse_cores": 16}, r"is \[128, 8\], but its SparseCore layout has \[256, 8\]"),
        (None, "_sparse_core_table_layouts are empty"),
        (
            {"sparse_core_shard_rotation": 3},
            r"'lone' is at .*'rotation': 0} by its layer's config, but at .*'rotation': 3}",
        ),
    ],
)
def test_layouts_that_contradict_the_layer_are_refused(
    tmp_path: Path, change: dict[str, Any] | None, message: str | None
) -> None:
    with simulated_tpu(replicas=2) as strategy:
        path = write(tmp_path, trained(strategy, aligned()))
    proto = sparse_core_layout_pb2.SparseCoreTableLayouts.FromString(tf.train.load_checkpoint(path).get_tensor(LAYOUTS))
    if change is None:
        proto.Clear()
    for field, value in (change or {}).items():
        if isinstance(value, list):
            del getattr(proto.tables[0], field)[:]
            getattr(proto.tables[0], field).extend(value)
        else:
            setattr(proto.tables[0], field, value)
    changed = rewritten(path, proto.SerializeToString())
    if message is None:
        with open_checkpoint(changed) as checkpoint:
            assert set(checkpoint.tables()) == {"lone"}
        return
    with pytest.raises(CheckpointCorruptError, match=message):
        open_checkpoint(changed)


def test_a_checkpoint_of_other_tables_is_refused(tmp_path: Path) -> None:
    with simulated_tpu(replicas=2) as strategy:
        path = write(tmp_path, trained(strategy, aligned()))
    with simulated_tpu() as strategy, strategy.scope():
        other = model_of({"lone": TableConfig(120, 8, "lone")})
        with refused(CheckpointMismatchError, match="Table 'lone'"):
            tf.train.Checkpoint(model=other).restore(path)


def same_width(name: str, rows: int = 16, optimizer: Any = None) -> TableConfig:
    return TableConfig(rows, 8, name, optimizer=optimizer)


@pytest.mark.parametrize(
    ("tables", "options"),
    [
        (
            [same_width("a"), same_width("b_c"), same_width("a_b", optimizer=SGD()), same_width("c", optimizer=SGD())],
            {},
        ),
        (
            [same_width("a"), same_width("b"), same_width("a_b", 5)],
            {"size_threshold": 10},
        ),
        ([same_width("a")], {"batch_size": 6}),
    ],
)
def test_names_and_batches_that_would_lose_rows_are_refused(tables: list[TableConfig], options: dict[str, Any]) -> None:
    features = {table.name: FeatureConfig(table) for table in tables}
    with simulated_tpu() as strategy, strategy.scope(), refused(ConfigError):
        TPUEmbedding(features, "adagrad", **{"batch_size": EXAMPLES, **options})


def test_a_batch_of_ids_as_the_reference_reads_it() -> None:
    """The reference of these tests against tf.nn.embedding_lookup_sparse."""
    rows = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    for combiner in ("sum", "mean", "sqrtn"):
        ids = Ids("sparse", [[1, 2, 1], [], [8]], [[0.5, 2.0, 1.0], [], [3.0]])
        sparse, weights = ids.of(slice(0, 3))
        truth = tf.nn.safe_embedding_lookup_sparse(rows, sparse, weights, combiner=combiner)
        np.testing.assert_allclose(ids.lookup(rows, combiner), truth, rtol=1e-6)
