"""Checkpoints of the classes for TPU v2 to v4, beyond the conformance suite."""

import itertools
from pathlib import Path
from unittest import mock

import google_crc32c
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.tpu import tpu_embedding_v1

from tests.support.checkpoint.bundles import recorded, save
from tests.support.checkpoint.objects import mid_level
from tests.support.checkpoint.tpu_checkpoints import (
    EMBEDDING,
    SHAPES,
    features,
    host_embedding,
    random_values,
    write,
)
from tests.support.messages import refused
from tpuembed.checkpoint import open_checkpoint
from tpuembed.errors import CheckpointFormatError


@pytest.mark.parametrize("hosts", [1, 4])
def test_what_describes_a_table(tmp_path: Path, hosts: int) -> None:
    values = random_values(SHAPES, "sgd")
    prefix = write(tmp_path / "ckpt", host_embedding(values, "sgd", hosts))
    with open_checkpoint(prefix) as checkpoint:
        assert checkpoint.format == "tpu_v1"
        layouts = {name: info.layout for name, info in checkpoint.tables().items()}
        for name in SHAPES:
            assert recorded(checkpoint, name) == google_crc32c.value(values[name]["parameters"].tobytes())
    assert layouts == (
        dict.fromkeys(SHAPES, "") if hosts == 1 else {**dict.fromkeys(SHAPES, "4 row slices"), "c": "3 row slices"}
    )


def test_slices_cut_again_by_size(tmp_path: Path) -> None:
    values = random_values(SHAPES, "adagrad")
    root = tf.train.Checkpoint(emb=host_embedding(values, "adagrad", 3))
    policy = tf.train.experimental.MaxShardSizePolicy(max_shard_size=2_000)
    prefix = root.write(str(tmp_path / "ckpt"), tf.train.CheckpointOptions(experimental_sharding_callback=policy))
    with open_checkpoint(prefix) as checkpoint:
        for name, roles in values.items():
            np.testing.assert_array_equal(checkpoint.read(name, 1), roles["parameters"][1:])
            np.testing.assert_array_equal(checkpoint.read(name, slot="accumulators"), roles["accumulators"])


def test_the_replicated_class(tmp_path: Path) -> None:
    """TPUEmbeddingV0: its variables are mirrored, and saved once."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    strategies = mock.Mock(TPUStrategy=tf.distribute.MirroredStrategy, TPUStrategyV2=tf.distribute.MirroredStrategy)
    with mock.patch.object(tpu_embedding_v1, "tpu_strategy", strategies), strategy.scope():
        embedding = tpu_embedding_v1.TPUEmbeddingV0(features(SHAPES), EMBEDDING.Adam(0.1))
        embedding.build()
    values = random_values(SHAPES, "adam")
    for name, roles in embedding._variables.items():
        for role, variable in roles.items():
            variable.assign(values[name][role])
    with open_checkpoint(write(tmp_path / "ckpt", embedding)) as checkpoint:
        assert checkpoint.format == "dense"
        for name, roles in values.items():
            assert checkpoint.tables()[name].slots == ("momenta", "velocities")
            for role, rows in roles.items():
                np.testing.assert_array_equal(checkpoint.read(name, slot=None if role == "parameters" else role), rows)


def cut(tmp_path: Path, table: "np.ndarray[tuple[int, int], np.dtype[np.float32]]", parts: int) -> Path:
    """What an unsigned mid-level object would be, with its table in `parts` slices of rows."""
    prefix = tf.train.Checkpoint(layer=mid_level({"a": {"parameters": tf.Variable(table)}})).write(
        str(tmp_path / "one")
    )
    reader, (rows, dim) = tf.train.load_checkpoint(prefix), table.shape
    [key] = [name for name in reader.get_variable_to_shape_map() if not name.startswith("_CHECKPOINTABLE")]
    ends = [rows * part // parts for part in range(parts + 1)]
    written = [
        save(tmp_path / f"part{start}", {key: table[start:stop]}, {key: f"{rows} {dim} {start},{stop - start}:-"})
        for start, stop in itertools.pairwise(ends)
    ]
    graph = {"_CHECKPOINTABLE_OBJECT_GRAPH": reader.get_tensor("_CHECKPOINTABLE_OBJECT_GRAPH")}
    written.append(save(tmp_path / "graph", graph))
    tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=written, destination_prefix=str(tmp_path / "merged"))
    return tmp_path / "merged"


@pytest.mark.parametrize(("rows", "dim", "parts"), [(30, 8, 2), (32, 6, 2), (40, 8, 2), (32, 8, 1)])
def test_unsigned_slices_that_sparse_cores_never_cut(tmp_path: Path, rows: int, dim: int, parts: int) -> None:
    """A layer on CPU, saved with a policy that cuts: SparseCores pad rows, per slice, and columns to multiples of 8."""
    table = np.arange(rows * dim, dtype=np.float32).reshape(rows, dim)
    with open_checkpoint(cut(tmp_path, table, parts)) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("a"), table)


@pytest.mark.parametrize(("rows", "dim", "parts"), [(32, 8, 2), (64, 16, 4)])
def test_unsigned_slices_as_sparse_cores_cut_them(tmp_path: Path, rows: int, dim: int, parts: int) -> None:
    with refused(CheckpointFormatError, match="table 'a'"):
        open_checkpoint(cut(tmp_path, np.zeros((rows, dim), np.float32), parts))
