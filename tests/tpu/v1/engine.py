"""What the V1 engine is documented to make of an enqueued batch, in float64: the contract of the op, not its code.

Sources: the documentation of EnqueueTPUEmbeddingArbitraryTensorBatch (sample indices, row splits or nothing for dense ids;
empty weights are ones; combiners by table), of FeatureDescriptor.input_shape, and of FeatureConfig.max_sequence_length
(longer sequences are cut).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["activations", "samples"]

Array = np.ndarray[Any, Any]


def activations(
    configuration: Any, combiners: Sequence[str], arrays: Mapping[str, Sequence[Array]], tables: Sequence[Array]
) -> list[Array]:
    """Of every feature, [*input_shape, dim].

    Args:
        configuration: the TPUEmbeddingConfiguration.
        combiners: of every table, the op's attribute.
        arrays: the op's inputs by their names, a list with an array for each feature.
        tables: [rows, dim] of every table.
    """
    inputs = zip(
        configuration.feature_descriptor,
        arrays["sample_indices_or_row_splits"],
        arrays["embedding_indices"],
        arrays["aggregation_weights"],
        strict=True,
    )
    return [
        _feature(tables[feature.table_id], combiners[feature.table_id], list(feature.input_shape), where, ids, weights)
        for feature, where, ids, weights in inputs
    ]


def _feature(table: Array, combiner: str, shape: list[int], where: Array, ids: Array, weights: Array) -> Array:
    sample, inside = samples(where, len(ids), shape)
    gains = (np.ones(len(ids)) if not len(weights) else weights.astype(np.float64))[inside]
    count = int(np.prod(shape))
    divisor = {
        "sum": np.ones(count),
        "mean": np.bincount(sample, gains, count),
        "sqrtn": np.sqrt(np.bincount(sample, gains**2, count)),
    }[combiner]
    out = np.zeros((count, table.shape[1]))
    np.add.at(out, sample, gains[:, None] * table[ids[inside]].astype(np.float64))
    return (out / np.where(divisor == 0.0, 1.0, divisor)[:, None]).reshape(*shape, -1)


def samples(where: Array, ids: int, shape: Sequence[int]) -> tuple[Array, Array]:
    """(number of the sample of each id that is inside of `shape`, [ids] which are inside)."""
    if where.ndim == 1:
        number = np.arange(ids) if not len(where) else np.repeat(np.arange(len(where) - 1), np.diff(where))
        return number, np.ones(ids, bool)
    places = where[:, : len(shape)]
    inside: Array = np.all(places < np.array(shape), axis=1)
    return np.ravel_multi_index(tuple(places[inside].T), tuple(shape)), inside
