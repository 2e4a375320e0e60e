"""Tables, features and random batches for the numbers of SparseCores."""

from collections.abc import Mapping
from typing import Final

import numpy as np

from tests.unit.testing.simulated import EXAMPLES, Array, Ids, random_ids
from tpuembed import TableConfig

__all__ = ["FEATURES", "TABLES", "batch", "rows_of"]

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
