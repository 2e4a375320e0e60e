"""What every checkpoint reader must do, run over everything that is written to disk in a known way."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.checkpoint.bundles import save
from tests.support.checkpoint.conformance import Case, CheckpointConformance, Truth, random_table
from tests.support.goldens import FOLDER, read_golden
from tests.support.stores import S3, GcsStub, moto_server
from tpuembed.files import remote

Array = np.ndarray[Any, Any]
SIMILAR = {"checkpoint_adagrad", "checkpoint_momentum", "keras_ftrl", "keras_momentum", "keras_sgd"}
"""Goldens of keras_rs that differ from others by their optimizer alone."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(f"{group}/{path.name}", marks=[pytest.mark.nightly] if path.name in SIMILAR else [])
        for group in ("keras_rs", "orbax", "tensorflow", "tfrs", "tpu")
        for path in sorted((FOLDER / group).iterdir())
    ],
)
class TestGoldens(CheckpointConformance):
    """Of every writer and format; the truth by the scripts that wrote them."""

    @pytest.fixture
    def case(self, name: str) -> Case:
        golden = read_golden(name)
        tables = {
            table: Truth(arrays[None], {slot: rows for slot, rows in arrays.items() if slot})
            for table, arrays in golden.tables.items()
        }
        return Case(golden.path, tables, golden.options)


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
class TestOwnLayer(CheckpointConformance):
    """Written by tpuembed.TPUEmbedding; "cut": in row and column slices over several data files."""

    @pytest.fixture
    def case(self, cut: bool, tmp_path: Path) -> Case:
        import tpuembed

        video = tpuembed.TableConfig(90, 30, "video/table.v1", optimizer="adam")
        user = tpuembed.TableConfig(7, 3, "user")
        plain = tpuembed.TableConfig(5, 2, "user/x", optimizer="sgd")
        features = {
            name: tpuembed.FeatureConfig(table) for name, table in zip("abc", [video, user, plain], strict=True)
        }
        layer = tpuembed.TPUEmbedding(features, optimizer="adagrad")
        layer({name: tf.constant([0, 1]) for name in "abc"})
        tables = {}
        for config, slots in {video: ["momenta", "velocities"], user: ["accumulators"], plain: []}.items():
            children = [config.name, *(f"{config.name}/{slot}" for slot in slots)]
            variables = [layer._tpu_embedding._lookup_dependency(child) for child in children]
            for number, variable in enumerate(variables):
                variable.assign(np.random.default_rng(number).normal(size=variable.shape))
            values = [variable.numpy() for variable in variables]
            tables[config.name] = Truth(values[0], dict(zip(slots, values[1:], strict=True)))
        policy = tf.train.experimental.MaxShardSizePolicy(max_shard_size=4_000) if cut else None
        options = tf.train.CheckpointOptions(experimental_sharding_callback=policy)
        return Case(Path(tf.train.Checkpoint(model=layer).write(str(tmp_path / "ckpt"), options)), tables)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
class TestPlainVariables(CheckpointConformance):
    """No embedding layer: matrices of floats by object path; vectors, integers and cubes are no tables."""

    @pytest.fixture
    def case(self, dtype: str, tmp_path: Path) -> Case:
        kernel, deep = random_table(8, 3, dtype), random_table(6, 5, dtype)
        nested = tf.train.Checkpoint(deep=tf.Variable(deep), ids=tf.Variable([[1, 2]]), cube=tf.Variable([[[1.0]]]))
        root = tf.train.Checkpoint(a=nested, kernel=tf.Variable(kernel), bias=tf.Variable([1.0]), other=nested)
        path = root.save(str(tmp_path / "ckpt"))
        assert path.endswith("ckpt-1")
        return Case(tmp_path, {"kernel": Truth(kernel), "a/deep": Truth(deep)})


class TestMergedHosts(CheckpointConformance):
    """A table whose rows two hosts saved, each into its own data file, in a checkpoint with an object graph."""

    @pytest.fixture
    def case(self, tmp_path: Path) -> Case:
        table = random_table(11, 4)
        key = "table/.ATTRIBUTES/VARIABLE_VALUE"
        whole = tf.train.Checkpoint(table=tf.Variable(table)).write(str(tmp_path / "whole"))
        graph = tf.train.load_checkpoint(whole).get_tensor("_CHECKPOINTABLE_OBJECT_GRAPH")
        prefixes = [
            save(tmp_path / "host0", {key: table[:6], "_CHECKPOINTABLE_OBJECT_GRAPH": graph}, {key: "11 4 0,6:0,4"}),
            save(tmp_path / "host1", {key: table[6:]}, {key: "11 4 6,5:0,4"}),
        ]
        tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=prefixes, destination_prefix=str(tmp_path / "merged"))
        return Case(tmp_path / "merged", {"table": Truth(table)})


class TestTensorFlow1(CheckpointConformance):
    """Variable names, and no object graph."""

    @pytest.fixture
    def case(self, tmp_path: Path) -> Case:
        table = random_table(9, 2)
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            variables = [
                tf.compat.v1.get_variable("scope/emb", initializer=tf.constant(table)),
                tf.compat.v1.get_variable("bias", initializer=tf.constant([1.0])),
            ]
            session.run(tf.compat.v1.global_variables_initializer())
            tf.compat.v1.train.Saver(variables).save(session, str(tmp_path / "model"), global_step=3)
        return Case(tmp_path, {"scope/emb": Truth(table)})


class TestSavedModel(CheckpointConformance):
    @pytest.fixture
    def case(self, tmp_path: Path) -> Case:
        module = tf.Module()
        module.table = tf.Variable(random_table(9, 2))
        tf.saved_model.save(module, str(tmp_path / "model"))
        return Case(tmp_path / "model", {"table": Truth(random_table(9, 2))})


@pytest.fixture(scope="module")
def uploaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], tuple[str, dict[str, str]]]]:
    folder = tmp_path_factory.mktemp("store")
    table = random_table(90, 30)
    policy = tf.train.experimental.MaxShardSizePolicy(max_shard_size=4_000)
    options = tf.train.CheckpointOptions(experimental_sharding_callback=policy)
    tf.train.Checkpoint(table=tf.Variable(table)).write(str(folder / "ckpt-1"), options)
    with moto_server() as s3, GcsStub() as gcs:
        s3.make_bucket("models")
        stores: dict[str, S3 | GcsStub] = {"s3": s3, "gs": gcs}
        yield lambda name: (stores[name].upload(folder, "models", "dir"), stores[name].environment)


@pytest.mark.parametrize("store", ["s3", "gs"])
class TestObjectStores(CheckpointConformance):
    """A table in row and column slices over several data files, in moto's S3 and in a stub of Google Cloud Storage."""

    @pytest.fixture
    def case(
        self, store: str, uploaded: Callable[[str], tuple[str, dict[str, str]]], monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Case]:
        url, environment = uploaded(store)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        remote._store.cache_clear()
        yield Case(f"{url}/ckpt-1", {"table": Truth(random_table(90, 30))})
        remote._store.cache_clear()
