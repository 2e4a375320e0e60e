"""The lookup on CPUs, from ids and weights to activations. Layer, whole-model exports, lookup-only exports and tests share it.

A feature's ids, of any kind (`ids`), become one flat vector (`flat_ids`). The caller gathers the rows from a table or from
a stack of tables, together with other features' rows. `pool` (`pooling`) turns the rows into activations. `spread` is its
transpose, from gradients of activations to gradients of rows. `check_range` (`ranges`) keeps ids inside their tables.
A lookup-only export gets matrices of several features: `export/graph/feature_groups.py` arranges them for `pool`.
"""

from tpuembed.lookup.flat_ids import FlatIds, gather_grouped
from tpuembed.lookup.ids import Ids, as_tensors, ids_of
from tpuembed.lookup.pooling import pool
from tpuembed.lookup.ranges import OUTSIDE, check_range

__all__ = ["OUTSIDE", "FlatIds", "Ids", "as_tensors", "check_range", "gather_grouped", "ids_of", "pool"]
