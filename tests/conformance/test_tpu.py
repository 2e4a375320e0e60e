"""The conformance suite over checkpoints as TPUs and TensorFlow 1 clusters write them."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.checkpoint.conformance import Case, CheckpointConformance, Truth, random_table, truths
from tests.support.checkpoint.tpu_checkpoints import (
    OPTIMIZERS,
    SHAPES,
    host_embedding,
    random_values,
    sparse_core_embedding,
    write,
)

SPARSE_CORES = [
    (1, "adagrad", True),
    (2, "ftrl", True),
    (8, "adagrad_momentum", True),
    (2, "adam", False),
    (8, "sgd", False),
]
HOSTS = [(1, "adam"), (2, "ftrl"), (4, "adagrad_momentum")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every case is written once."""
    return tmp_path_factory.mktemp("tpu")


@functools.cache
def sparse_core_case(folder: Path, devices: int, optimizer: str, stacked: bool) -> Case:
    values = random_values(SHAPES, optimizer)
    embedding = sparse_core_embedding(values, optimizer, devices=devices, stacked=stacked)
    return Case(write(folder / f"cores-{devices}-{optimizer}", embedding), truths(values, optimizer))


@pytest.mark.parametrize(("devices", "optimizer", "stacked"), SPARSE_CORES)
class TestSparseCores(CheckpointConformance):
    """Written by TPUEmbeddingV2 from `devices` of four SparseCores; the layouts are the C++ stacker's."""

    @pytest.fixture
    def case(self, devices: int, optimizer: str, stacked: bool, folder: Path) -> Case:
        return sparse_core_case(folder, devices, optimizer, stacked)


@functools.cache
def host_case(folder: Path, hosts: int, optimizer: str) -> Case:
    values = random_values(SHAPES, optimizer)
    embedding = host_embedding(values, optimizer, hosts)
    return Case(write(folder / f"hosts-{hosts}", embedding), truths(values, optimizer))


@pytest.mark.parametrize(("hosts", "optimizer"), HOSTS)
class TestTpuHosts(CheckpointConformance):
    """Written by TPUEmbedding, the class for TPU v2 to v4; table c has fewer rows than four hosts."""

    @pytest.fixture
    def case(self, hosts: int, optimizer: str, folder: Path) -> Case:
        return host_case(folder, hosts, optimizer)


@functools.cache
def partitioned_case(folder: Path, strategy: str, dtype: str) -> Case:
    """Three variables in 4, 8 and 1 parts; the truth is what tf.nn.embedding_lookup finds in them."""
    whole = {"emb": random_table(23, 5, dtype), "deep/emb": random_table(8, 3, dtype), "few": random_table(2, 2, dtype)}
    looked_up: dict[str, Any] = {}
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variables = {
            name: tf.compat.v1.get_variable(
                name, initializer=tf.constant(rows), partitioner=tf.compat.v1.fixed_size_partitioner(parts)
            )
            for (name, rows), parts in zip(whole.items(), [4, 8, 1], strict=True)
        }
        session.run(tf.compat.v1.global_variables_initializer())
        for name, variable in variables.items():
            ids = np.arange(len(whole[name]))
            rows = tf.compat.v1.nn.embedding_lookup(variable, ids, partition_strategy=strategy)
            looked_up[name] = session.run(rows)
        tf.compat.v1.train.Saver().save(session, str(folder / f"{strategy}-{dtype}"), global_step=3)
    tables = {name: Truth(rows) for name, rows in looked_up.items()}
    return Case(folder / f"{strategy}-{dtype}-3", tables, {"partition_strategy": strategy})


@pytest.mark.parametrize("strategy", ["mod", "div"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
class TestPartitionedVariables(CheckpointConformance):
    """A TensorFlow 1 Saver's file."""

    @pytest.fixture
    def case(self, strategy: str, dtype: str, folder: Path) -> Case:
        return partitioned_case(folder, strategy, dtype)


def test_every_optimizer_is_among_the_cases() -> None:
    assert {optimizer for _, optimizer, _ in SPARSE_CORES} == set(OPTIMIZERS)
    assert {optimizer for _, optimizer in HOSTS} < set(OPTIMIZERS)
