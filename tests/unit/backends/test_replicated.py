"""Tables replicated on TPUs: what their program computes, run by XLA on the CPU.

Only where the ids are densified differs: on a TPU its host does it.
"""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from tpuembed import FeatureConfig, TableConfig, TPUEmbedding
from tpuembed.backends import host
from tpuembed.lookup.ids import PaddedIds

ROWS, DIM, BATCH = 20, 3, 6
TABLE = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)


@pytest.fixture
def on_tpu() -> Iterator[None]:
    """Features are flattened as in a TPU's program."""

    def densify(given: Any) -> Any:
        weights = None if given.weights is None else given.to_dense(given.weights, 0.0)
        return PaddedIds(given.path, given.config, given.to_dense(given.ids, -1), weights)

    with (
        mock.patch.object(host, "tpu_call", object),
        mock.patch.object(host, "check_same_strategy"),
        mock.patch.object(host, "densify_on_host", densify),
    ):
        yield


def random_ids(seed: int) -> tuple[Any, Any]:
    """Ragged ids, with an empty example and duplicates, and weights."""
    random = np.random.default_rng(seed)
    lengths = [0, *random.integers(1, 5, BATCH - 1)]
    ids = tf.RaggedTensor.from_row_lengths(random.integers(0, 8, sum(lengths)), lengths)
    return ids, ids.with_values(tf.constant(random.uniform(0.5, 2, sum(lengths)), tf.float32))


def layer(**feature: Any) -> Any:
    combiner = feature.pop("combiner", "sum")
    made = TPUEmbedding(FeatureConfig(TableConfig(ROWS, DIM, "t", combiner=combiner), **feature), "adagrad")
    made.assign_rows("t", 0, TABLE)
    return made


def train(made: Any, ids: Any, weights: Any, jit: bool) -> Any:
    @tf.function(jit_compile=jit)
    def step() -> Any:
        with tf.GradientTape() as tape:
            activations = made(ids, weights)
            loss = tf.reduce_sum(activations**2)
        tape.gradient(loss, made.trainable_variables)
        return activations

    first = step().numpy()
    step()
    return first, *(v.numpy() for v in made._parts.backend.states["t"].named_variables().values())


@pytest.mark.nightly
@pytest.mark.parametrize(  # XLA itself cannot densify ragged ids
    ("form", "jit"), [("ragged", False), ("sparse", False), ("sparse", True), ("sparse of rank 3", True)]
)
@pytest.mark.parametrize(
    ("feature", "weighted"),
    [
        ({"combiner": "sum"}, False),
        ({"combiner": "mean"}, True),
        ({"combiner": "sqrtn"}, True),
        ({"max_sequence_length": 2}, False),
    ],
)
def test_equal_to_the_host(on_tpu: None, feature: dict[str, Any], weighted: bool, form: str, jit: bool) -> None:
    ids, weights = random_ids(1)
    if form != "ragged":
        ids, weights = ids.to_sparse(), weights.to_sparse()
    if form == "sparse of rank 3":
        if "max_sequence_length" in feature:
            return  # sequences are of rank 2
        ids, weights = (tf.sparse.reshape(t, [2, BATCH // 2, t.dense_shape[-1]]) for t in (ids, weights))
    found = train(layer(**feature), ids, weights if weighted else None, jit)
    with mock.patch.object(host, "tpu_call", return_value=None):
        expected = train(layer(**feature), ids, weights if weighted else None, False)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    assert np.abs(expected[1] - TABLE).max() > 1e-3, "the table was trained"
