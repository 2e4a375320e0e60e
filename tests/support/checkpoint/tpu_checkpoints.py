"""Checkpoints as TPUs write them, by TensorFlow's own classes: the TPUs are stand-ins, all else is real.

What runs without a TPU: variables and their shards, how SparseCores stack and lay out tables (C++), saving. What does not,
loading tables into a TPU and retrieving them, is left out: the shards hold what the test puts there.
"""

import contextlib
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf
from tensorflow.core.tpu.kernels import sparse_core_layout_pb2
from tensorflow.python.tpu import tpu_embedding_v2, tpu_embedding_v3

Array = np.ndarray[Any, Any]
Values = dict[str, dict[str, Array]]
"""Table -> "parameters" and slots -> its rows."""

EMBEDDING = tf.tpu.experimental.embedding
SHAPES = {"a": (100, 16), "b": (37, 12), "c": (3, 6), "d": (1000, 16), "video/e.1": (9, 130)}
"""Tables of different sizes and widths, of which a, b and d share a stack."""

OPTIMIZERS = {
    "sgd": EMBEDDING.SGD(0.1),
    "adagrad": EMBEDDING.Adagrad(0.1),
    "adam": EMBEDDING.Adam(0.1),
    "ftrl": EMBEDDING.FTRL(0.1),
    "adagrad_momentum": EMBEDDING.AdagradMomentum(0.1, momentum=0.9),
}
SLOTS = {
    "sgd": (),
    "adagrad": ("accumulators",),
    "adam": ("momenta", "velocities"),
    "ftrl": ("accumulators", "linears"),
    "adagrad_momentum": ("accumulators", "momenta"),
}
_CPU = "/job:localhost/replica:0/task:0/device:CPU:0"


def features(shapes: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    return {
        name.replace("/", "_"): EMBEDDING.FeatureConfig(
            table=EMBEDDING.TableConfig(vocabulary_size=rows, dim=dim, name=name), output_shape=[8]
        )
        for name, (rows, dim) in shapes.items()
    }


def random_values(shapes: Mapping[str, tuple[int, int]], optimizer: str) -> Values:
    random = np.random.default_rng(0)
    return {
        name: {role: random.normal(size=shape).astype(np.float32) for role in ("parameters", *SLOTS[optimizer])}
        for name, shape in shapes.items()
    }


@contextlib.contextmanager
def _devices(count: int, sparse_cores: int) -> Iterator[None]:
    """A TPUStrategy of `count` devices, as far as variables are concerned."""
    names = np.array([[_CPU]] * count)
    hardware = types.SimpleNamespace(num_embedding_devices_per_chip=sparse_cores)
    extended = types.SimpleNamespace(
        _tpu_devices=names, worker_devices=tuple(names[:, 0]), tpu_hardware_feature=hardware
    )
    strategy = types.SimpleNamespace(extended=extended, num_replicas_in_sync=count)
    strategies = types.SimpleNamespace(TPUStrategy=types.SimpleNamespace, TPUStrategyV2=types.SimpleNamespace)
    distribute = types.SimpleNamespace(get_strategy=lambda: strategy)
    with (
        mock.patch.object(tpu_embedding_v3, "tpu_strategy", strategies),
        mock.patch.object(tpu_embedding_v3, "distribute_lib", distribute),
    ):
        yield


def sparse_core_embedding(
    values: Values, optimizer: str, *, devices: int, sparse_cores: int = 4, stacked: bool = True
) -> Any:
    """A TPUEmbeddingV2 that holds `values`; `sparse_cores` per device."""
    shapes = {name: roles["parameters"].shape for name, roles in values.items()}
    config = None if stacked else EMBEDDING.SparseCoreEmbeddingConfig(disable_table_stacking=True)
    with (
        _devices(devices, sparse_cores),
        warnings.catch_warnings(action="ignore"),
    ):  # TensorFlow's own, on disabling stacks
        embedding = tpu_embedding_v3.TPUEmbeddingV2(features(shapes), OPTIMIZERS[optimizer], False, config)
        embedding.build()
    layouts = embedding.embedding_layouts
    for stack, roles in embedding._variables.items():
        for role, variable in roles.items():
            inside = {name: values[name][role] for name in values if layouts[name].stacked_table_name == stack}
            whole = stack_tables(inside, layouts, tuple(variable.shape))
            for shard, rows in zip(variable.values, np.split(whole, len(variable.values)), strict=True):
                shard.assign(rows)
    return embedding


def stack_tables(tables: Mapping[str, Array], layouts: Mapping[str, Any], shape: tuple[int, ...]) -> Array:
    """Row by row where TensorFlow's map_indices_in_shard puts it; padding is NaN."""
    from tensorflow.python.tpu.tpu_embedding_v3_utils import map_indices_in_shard

    whole = np.full(shape, np.nan, np.float32)
    for name, rows in tables.items():
        layout = layouts[name]
        shard, position = map_indices_in_shard(
            layout.num_sparse_cores,
            layout.sparse_core_shard_row_offset,
            layout.sparse_core_shard_rotation,
            np.arange(len(rows)),
        )
        whole[shard * layout.total_rows_per_sparse_core_shard + position, : rows.shape[1]] = rows
    return whole


def host_embedding(values: Values, optimizer: str, hosts: int) -> Any:
    """A TPUEmbedding, the class for TPU v2 to v4, whose `hosts` hold `values` in runs."""
    shapes = {name: roles["parameters"].shape for name, roles in values.items()}
    embedding = tpu_embedding_v2.TPUEmbedding(features(shapes), OPTIMIZERS[optimizer])
    embedding._using_tpu, embedding._hosts = True, [_CPU] * hosts
    embedding._load_variables = embedding._retrieve_variables = lambda: None
    embedding._variables, embedding._built = embedding._create_variables_and_slots(), True
    for name, roles in embedding._variables.items():
        for role, variable in roles.items():
            ends = np.cumsum([shard.shape[0] for shard in variable.variables])[:-1]
            for shard, rows in zip(variable.variables, np.split(values[name][role], ends), strict=True):
                shard.assign(rows)
    return embedding


def serving_embedding(values: Values, optimizer: str) -> Any:
    """A TPUEmbeddingForServing, the class for CPUs, that holds `values`."""
    shapes = {name: roles["parameters"].shape for name, roles in values.items()}
    embedding = EMBEDDING.TPUEmbeddingForServing(features(shapes), OPTIMIZERS[optimizer])
    embedding.build()
    for name, roles in embedding._variables.items():
        for role, variable in roles.items():
            variable.assign(values[name][role])
    return embedding


def write(path: Path, embedding: Any) -> Path:
    return Path(tf.train.Checkpoint(model=tf.train.Checkpoint(emb=embedding)).write(str(path)))


def serialized_layouts(*layouts: Mapping[str, Any]) -> bytes:
    """A SparseCoreTableLayouts of hand-made layouts, by the proto's field names."""
    proto = sparse_core_layout_pb2.SparseCoreTableLayouts()
    for layout in layouts:
        proto.tables.add(**layout)
    serialized: bytes = proto.SerializeToString()
    return serialized


def layout_fields(table: str = "a", stack: str = "a_b", **changed: Any) -> dict[str, Any]:
    """Table [20, 6] on 4 SparseCores of 2 devices, in a stack of 24 rows a SparseCore and 8 columns."""
    shapes: dict[str, Sequence[int]] = {"unsharded_shape": [20, 6], "unsharded_padded_shape": [32, 8]}
    numbers = {"num_sparse_cores": 4, "num_partitions": 2, "total_rows_per_sparse_core_shard": 24}
    return {"table_name": table, "stacked_table_name": stack, **numbers, **shapes, **changed}
