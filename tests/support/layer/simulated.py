"""Layers, batches and what plain numpy finds for them; the same for a simulated TPU and for the host."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tpuembed import FeatureConfig, TableConfig, TPUEmbedding

Array = npt.NDArray[Any]

EXAMPLES = 8
"""Of one replica's batch."""


@dataclasses.dataclass(frozen=True)
class Ids:
    """One feature's ids for all replicas: example by example, with weights where it has them."""

    kind: str
    ids: Sequence[Sequence[int]]
    weights: Sequence[Sequence[float]] | None = None

    def of(self, examples: slice) -> tuple[Any, Any]:
        """(ids, weights) of some examples as TensorFlow's tensors."""
        ids = self.ids[examples]
        if self.kind == "dense":
            return tf.constant([row[0] for row in ids], tf.int64), None
        ragged = tf.RaggedTensor.from_row_lengths(
            tf.constant([i for row in ids for i in row], tf.int64), [len(row) for row in ids]
        )
        weights = None
        if self.weights is not None:
            flat = [w for row in self.weights[examples] for w in row]
            weights = ragged.with_values(tf.constant(flat, tf.float32))
        if self.kind == "ragged":
            return ragged, weights
        return ragged.to_sparse(), None if weights is None else weights.to_sparse()

    def lookup(self, rows: Array, combiner: str) -> Array:
        """Activations [examples, dim] of a table's `rows`, in float64. Source: tf.nn.embedding_lookup_sparse."""
        weights = self.weights or [[1.0] * len(row) for row in self.ids]
        pairs = zip(self.ids, weights, strict=True)
        return np.stack([_combine(rows[np.array(ids, int)].astype(float), np.array(w), combiner) for ids, w in pairs])


def _combine(rows: Array, weights: Array, combiner: str) -> Array:
    if not len(rows):
        return np.zeros(rows.shape[1])
    total = (rows * weights[:, None]).sum(0)
    divisor: float = {"sum": 1.0, "mean": weights.sum(), "sqrtn": np.sqrt((weights**2).sum())}[combiner]
    return np.asarray(total / divisor)


def random_ids(random: np.random.Generator, kind: str, rows: int, examples: int, weighted: bool = False) -> Ids:
    """Up to four ids of an example, of which some are twice in it, and in others."""
    counts = [1] * examples if kind == "dense" else random.integers(0, 5, examples)
    ids = [random.integers(0, rows, count).tolist() for count in counts]
    ids = [row[:2] + row[:1] + row[3:] if kind != "dense" and len(row) > 2 else row for row in ids]
    return Ids(kind, ids, [(random.random(len(row)) + 0.1).tolist() for row in ids] if weighted else None)


def make_layer(features: Mapping[str, TableConfig], values: Mapping[str, Array], **options: Any) -> TPUEmbedding:
    """A layer whose tables hold `values`."""
    config = {name: FeatureConfig(table, output_shape=(EXAMPLES,)) for name, table in features.items()}
    if not tf.distribute.has_strategy():
        config = {name: FeatureConfig(table) for name, table in features.items()}
    layer = TPUEmbedding(config, **options)
    for table, variable in layer.embedding_tables.items():
        variable.assign(values[table.name])
    return layer


def inputs(strategy: Any, batch: Mapping[str, Ids]) -> Any:
    """(features, weights) of each replica: its share of the examples."""

    def of_replica(context: Any) -> Any:
        share = len(next(iter(batch.values())).ids) // context.num_replicas_in_sync
        first = context.replica_id_in_sync_group * share
        leaves = {name: ids.of(slice(first, first + share)) for name, ids in batch.items()}
        features, weights = ({name: leaf[which] for name, leaf in leaves.items()} for which in (0, 1))
        return features, weights if any(ids.weights for ids in batch.values()) else None

    return strategy.experimental_distribute_values_from_function(of_replica)
