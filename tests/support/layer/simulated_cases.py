"""Tables, features and random batches for the numbers of SparseCores, simulated or with TensorFlow's kernels on the hosts."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import tensorflow as tf

from tests.support.layer.simulated import EXAMPLES, Array, Ids, inputs, make_layer, random_ids
from tpuembed import TableConfig

__all__ = ["FEATURES", "TABLES", "SparseCoreConfig", "batch", "layer_of", "looked_up", "looked_up_in_one", "rows_of"]

SparseCoreConfig = tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig

TABLES: Final = {
    config.name: config
    for config in (
        TableConfig(37, 5, "a", combiner="mean"),
        TableConfig(300, 8, "b", combiner="sum"),
        TableConfig(9, 7, "c", combiner="sqrtn"),
        TableConfig(10, 12, "d", combiner="sqrtn"),
        TableConfig(1, 3, "e", combiner="sum"),
        TableConfig(64, 16, "f", combiner="mean"),
    )
}
"""a, b, c and e share a stack, d and f another one."""

FEATURES: Final[Mapping[str, tuple[str, str, bool]]] = {
    "a": ("a", "ragged", True),
    "a_again": ("a", "sparse", False),
    "a_dense": ("a", "dense", False),
    "b": ("b", "sparse", True),
    "c": ("c", "ragged", True),
    "d": ("d", "ragged", False),
    "d_weighted": ("d", "sparse", True),
    "e": ("e", "ragged", False),
    "f": ("f", "sparse", True),
}
"""Feature -> its table, the kind of its ids, whether it has weights."""


def rows_of(seed: int) -> dict[str, Array]:
    """Table -> float32 [rows, dim]."""
    random = np.random.default_rng(seed)
    return {
        name: random.normal(size=(table.vocabulary_size, table.dim)).astype(np.float32)
        for name, table in TABLES.items()
    }


def batch(replicas: int, seed: int) -> dict[str, Ids]:
    """Of all replicas; up to four ids of an example, some twice."""
    random = np.random.default_rng([seed, replicas])
    return {
        name: random_ids(random, kind, TABLES[table].vocabulary_size, EXAMPLES * replicas, weighted)
        for name, (table, kind, weighted) in FEATURES.items()
    }


def layer_of(rows: Mapping[str, Array], stacked: bool = True, **options: Any) -> Any:
    """A layer of all features, whose tables hold `rows`."""
    config = SparseCoreConfig(disable_table_stacking=not stacked)
    features = {name: TABLES[table] for name, (table, _, _) in FEATURES.items()}
    return make_layer(features, rows, sparse_core_embedding_config=config, **options)


def looked_up(strategy: Any, layer: Any, ids: Mapping[str, Ids]) -> dict[str, Array]:
    """All replicas' activations, one after another."""
    activations = strategy.run(lambda features, weights: layer(features, weights), args=inputs(strategy, ids))
    local = strategy.experimental_local_results
    return {name: np.concatenate([part.numpy() for part in local(of)]) for name, of in activations.items()}


def looked_up_in_one(strategy: Any, examples: list[list[int]], rows: int = 64, **options: Any) -> Array:
    """Activations [all examples, 8] of one table of distinct numbers; limits of partitions are the table's options."""
    limits = {name: options.pop(name) for name in list(options) if name.endswith("_partition")}
    with strategy.scope():
        table = TableConfig(rows, 8, "t", combiner="sum", **limits)
        values = {"t": np.arange(rows * 8, dtype=np.float32).reshape(rows, 8)}
        config = SparseCoreConfig(**options) if options else None
        layer = make_layer({"x": table}, values, optimizer="sgd", sparse_core_embedding_config=config)
    return looked_up(strategy, layer, {"x": Ids("ragged", examples)})["x"]
