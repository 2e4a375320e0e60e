"""The conformance suite over TensorFlow's embedding class for CPUs, over SavedModels, and over tables of half width."""

from pathlib import Path

import pytest
import tensorflow as tf
from tensorflow.core.tpu.kernels import sparse_core_layout_pb2

from tests.support.checkpoint.bundles import save
from tests.support.checkpoint.conformance import Case, CheckpointConformance, Truth, random_table, truths
from tests.support.checkpoint.objects import mid_level, with_registered_saver
from tests.support.checkpoint.tpu_checkpoints import (
    SHAPES,
    layout_fields,
    random_values,
    serialized_layouts,
    serving_embedding,
    stack_tables,
)

GRAPH_KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"


@pytest.mark.parametrize("optimizer", ["adagrad_momentum", "ftrl"])
class TestServingClass(CheckpointConformance):
    """Written by TPUEmbeddingForServing, which tensorflow_recommenders uses on CPUs, and cut by size."""

    @pytest.fixture
    def case(self, optimizer: str, tmp_path: Path) -> Case:
        values = random_values(SHAPES, optimizer)
        root = tf.train.Checkpoint(emb=serving_embedding(values, optimizer))
        policy = tf.train.experimental.MaxShardSizePolicy(max_shard_size=9_000)
        root.write(str(tmp_path / "ckpt"), tf.train.CheckpointOptions(experimental_sharding_callback=policy))
        assert len(list(tmp_path.glob("*.data-*"))) > 10
        return Case(tmp_path / "ckpt", truths(values, optimizer))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
class TestHalfWidthOnHosts(CheckpointConformance):
    """As TPUEmbedding would cut tables of other dtypes than its own: three hosts, each with a slice of rows and of slots."""

    @pytest.fixture
    def case(self, dtype: str, tmp_path: Path) -> Case:
        whole = {"parameters": random_table(11, 5, dtype), "accumulators": random_table(11, 5, dtype) + 1}
        node = mid_level({"a": {role: tf.Variable(rows) for role, rows in whole.items()}})
        prefix = str(tf.train.Checkpoint(layer=node).write(str(tmp_path / "one")))
        rows_of = {key: whole[key.split("/")[3]] for key, shape in tf.train.list_variables(prefix) if shape}
        parts = [save(tmp_path / "graph", {GRAPH_KEY: with_registered_saver(prefix, "tf.TPUEmbeddingCallback")})]
        for start, stop in [(0, 4), (4, 8), (8, 11)]:
            specs = dict.fromkeys(rows_of, f"11 5 {start},{stop - start}:-")
            parts.append(save(tmp_path / f"host{start}", {k: v[start:stop] for k, v in rows_of.items()}, specs))
        tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=parts, destination_prefix=str(tmp_path / "ckpt"))
        return Case(tmp_path / "ckpt", {"a": Truth(whole["parameters"], {"accumulators": whole["accumulators"]})})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
class TestHalfWidthOnSparseCores(CheckpointConformance):
    """A stack of two tables and of their slots, each row where TensorFlow's map_indices_in_shard puts it."""

    @pytest.fixture
    def case(self, dtype: str, tmp_path: Path) -> Case:
        fields = [layout_fields(), layout_fields("b", sparse_core_shard_row_offset=8, sparse_core_shard_rotation=2)]
        layouts = {one["table_name"]: sparse_core_layout_pb2.SparseCoreTableLayout(**one) for one in fields}
        roles = {
            "parameters": {"a": random_table(20, 6, dtype), "b": random_table(20, 6, dtype) * 2},
            "momenta": {"a": random_table(20, 6, dtype) + 1, "b": random_table(20, 6, dtype) - 1},
        }
        stacks = {role: tf.Variable(stack_tables(held, layouts, (96, 8)).astype(dtype)) for role, held in roles.items()}
        serialized = tf.Variable(serialized_layouts(*fields))
        node = mid_level({"a_b": stacks}, a_b=stacks["parameters"], _sparse_core_table_layouts=serialized)
        tf.train.Checkpoint(layer=node).write(str(tmp_path / "ckpt"))
        tables = {name: Truth(roles["parameters"][name], {"momenta": roles["momenta"][name]}) for name in ("a", "b")}
        return Case(tmp_path / "ckpt", tables)
