"""What two towers are trained and measured with: in-batch sampled softmax, and the accuracy of the best candidates."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tpuembed.config.checks import check_count
from tpuembed.errors import ConfigError

__all__ = ["FactorizedTopK", "in_batch_softmax"]

Tensor = Any


def in_batch_softmax(
    queries: Tensor,
    candidates: Tensor,
    *,
    sampling_probability: Tensor | None = None,
    candidate_ids: Tensor | None = None,
    temperature: float | Tensor = 1.0,
) -> Tensor:
    """Return the loss of each query, float32 [batch]: the cross entropy of its own candidate among those of the batch.

    Candidate i is that of query i. The others are its negatives. Average or sum the losses, with weights if there are any.

    A candidate that is often in the data is often a negative. `sampling_probability` corrects for it: the logarithm is
    subtracted from the scores (logQ correction; Yi et al., "Sampling-bias-corrected neural modeling for large corpus item
    recommendations", 2019). It is not clipped.

    With several replicas, the negatives of a query are those of its own replica.

    Args:
        queries: float [batch, dim].
        candidates: float [n, dim], n >= batch. Those after the first `batch` are negatives of all queries.
        sampling_probability: float [n], above 0: how probable it is that an example of the data has this candidate.
        candidate_ids: integers or strings, [n]. A negative with the id of a query's own candidate is not counted.
        temperature: divides the scores, above 0. A number, or a scalar tensor, which is not checked.

    Raises:
        ConfigError: a shape or an argument is wrong.
        tf.errors.InvalidArgumentError: a probability is 0 or less.

    Source: `tfrs.tasks.Retrieval` of TensorFlow Recommenders, which clips probabilities to 1e-6 and takes the sum.
    """
    # XLA drops assertions. `bias_add` and `Select` compare shapes there too, where `+` and `where` would broadcast.
    queries, candidates = (tf.cast(tf.convert_to_tensor(each), tf.float32) for each in (queries, candidates))
    shapes = queries.shape, candidates.shape
    if shapes[0].rank != 2 or shapes[1].rank != 2 or not shapes[0][1:].is_compatible_with(shapes[1][1:]):
        raise ConfigError(
            f"in_batch_softmax: queries must be [batch, dim] and candidates [n, dim], got {shapes[0]} and {shapes[1]}."
        )
    if shapes[0][0] is not None and shapes[1][0] is not None and shapes[1][0] < shapes[0][0]:
        raise ConfigError(
            f"in_batch_softmax: {shapes[0][0]} queries have {shapes[1][0]} candidates. Give each query its own, in its order."
        )
    if isinstance(temperature, int | float | np.number) and not temperature > 0:
        raise ConfigError(f"in_batch_softmax: temperature must be above 0, got {temperature!r}.")
    scores = tf.matmul(queries, candidates, transpose_b=True) / tf.cast(temperature, tf.float32)
    count = tf.shape(scores)[0]
    if sampling_probability is not None:
        probability = _of_candidates("sampling_probability", sampling_probability, candidates)
        probability = tf.cast(probability, tf.float32)
        with tf.control_dependencies(
            [tf.debugging.assert_positive(probability, "in_batch_softmax: sampling_probability must be above 0.")]
        ):
            scores = tf.nn.bias_add(scores, -tf.math.log(probability))
    if candidate_ids is not None:
        ids = _of_candidates("candidate_ids", candidate_ids, candidates)
        same = tf.equal(ids[:count, None], ids[None, :])
        is_own = tf.equal(tf.range(count)[:, None], tf.range(tf.shape(scores)[1])[None, :])
        others = tf.raw_ops.Select(condition=same, x=tf.fill(tf.shape(scores), scores.dtype.min), y=scores)
        scores = tf.where(is_own, scores, others)
    # TensorFlow's own cross entropy fails on the empty batch of a replica.
    scores -= tf.stop_gradient(tf.reduce_max(scores, 1, keepdims=True))
    own = tf.linalg.diag_part(scores)
    return tf.nn.bias_add(tf.math.log(tf.reduce_sum(tf.exp(scores), 1))[None, :], -own)[0]


def _of_candidates(what: str, values: Tensor, candidates: Tensor) -> Tensor:
    values, shape = tf.convert_to_tensor(values), candidates.shape
    if not values.shape.is_compatible_with(shape[:1]):
        raise ConfigError(f"in_batch_softmax: {what} must be [n] as the candidates, {shape}, got {values.shape}.")
    return _as_many(values, candidates, f"in_batch_softmax: {what} must be one for each candidate.")


def _as_many(values: Tensor, others: Tensor, message: str) -> Tensor:
    """Return `values`, which must be as many as `others`: one alone would be taken for all."""
    with tf.control_dependencies([tf.debugging.assert_equal(tf.shape(values)[0], tf.shape(others)[0], message)]):
        return tf.identity(values)


class FactorizedTopK(keras.metrics.Metric):
    """How often a query's own candidate is among the best 1, 5, 10, 50 and 100 of all candidates.

    The result is {"<name>/top_<k>_categorical_accuracy": value}, as in TensorFlow Recommenders. Candidates are compared by their
    ids, so equal scores and rounding change nothing. A candidate that is not among `candidates` is never found.

    Each update computes the scores of all candidates. So update it in evaluation, and not in each step of training. A dataset is
    not read in code that XLA compiles: leave `jit_compile` out of `compile`.
    """

    def __init__(
        self,
        candidates: tf.data.Dataset,
        ks: Sequence[int] = (1, 5, 10, 50, 100),
        name: str = "factorized_top_k",
        **options: Any,
    ) -> None:
        """Measure among `candidates`.

        Args:
            candidates: a dataset of batches (ids [n], vectors float32 [n, dim]), which is read anew in each update. To compute
                the vectors by a tower, map it: then they are those of the moment.
            ks: the numbers of best candidates to look among, ascending.
            name: of the metric.
            options: of `keras.metrics.Metric`.

        Raises:
            ConfigError: an argument is wrong.
        """
        super().__init__(name=name, **options)
        for k in ks:
            check_count("ks", k)
        if not ks or list(ks) != sorted(set(ks)):
            raise ConfigError(f"FactorizedTopK: ks must be different and ascending, got {list(ks)}.")
        spec = candidates.element_spec
        if not isinstance(spec, tuple) or len(spec) != 2:
            raise ConfigError(f"FactorizedTopK: candidates must be batches (ids, vectors), got {spec}. Add the ids.")
        self.ks, self._candidates = tuple(int(k) for k in ks), candidates
        self.hits = self.add_variable((len(self.ks),), "zeros", name="hits")
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, queries: Tensor, true_ids: Tensor, sample_weight: Tensor | None = None) -> None:
        """Count the queries whose candidate is found.

        Args:
            queries: float32 [batch, dim], the queries' vectors.
            true_ids: the id of each query's candidate, [batch] or [batch, 1].
            sample_weight: how much each query counts, [batch] or [batch, 1]. None for 1.
        """
        queries = tf.cast(tf.convert_to_tensor(queries), tf.float32)
        scores, ids = self._best(queries)
        wanted = tf.reshape(tf.convert_to_tensor(true_ids), [-1, 1])
        wanted = _as_many(wanted, queries, "FactorizedTopK: true_ids must be one for each query.")
        if wanted.dtype != ids.dtype:
            if not (wanted.dtype.is_integer and ids.dtype.is_integer):
                raise ConfigError(
                    f"FactorizedTopK: true_ids are {wanted.dtype.name}, and the candidates' ids {ids.dtype.name}. Give one type."
                )
            wanted, ids = tf.cast(wanted, tf.int64), tf.cast(ids, tf.int64)
        is_hit = tf.equal(ids, wanted) & (scores > float("-inf"))
        hits = tf.stack([tf.reduce_any(is_hit[:, :k], 1) for k in self.ks], 1)
        weights = tf.ones(tf.shape(wanted)) if sample_weight is None else sample_weight
        weights = tf.cast(tf.reshape(tf.convert_to_tensor(weights), [-1, 1]), tf.float32)
        weights = _as_many(weights, queries, "FactorizedTopK: sample_weight must be one for each query.")
        self.hits.assign_add(tf.reduce_sum(tf.cast(hits, tf.float32) * weights, 0))
        self.total.assign_add(tf.reduce_sum(weights))

    def _best(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores and the ids of the best candidates, [batch, k] for the largest k. Places without one score -infinity.

        Of equal scores the first in the dataset comes first. Memory holds the scores of one batch of candidates.
        """
        k, shape = self.ks[-1], [tf.shape(queries)[0], self.ks[-1]]

        def merged(state: tuple[Tensor, Tensor], batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            ids, vectors = batch
            ids = _as_many(ids, vectors, "candidates: a batch must have as many ids as vectors.")
            found = tf.matmul(queries, tf.cast(vectors, tf.float32), transpose_b=True)
            found = tf.where(tf.math.is_nan(found), float("-inf"), found)  # `top_k` does not order NaN
            found, places = tf.math.top_k(found, tf.minimum(k, tf.shape(vectors)[0]))
            scores, order = tf.math.top_k(tf.concat([state[0], found], 1), k)
            return scores, tf.gather(tf.concat([state[1], tf.gather(ids, places)], 1), order, batch_dims=1)

        start = tf.fill(shape, float("-inf")), tf.zeros(shape, self._candidates.element_spec[0].dtype)
        scores, ids = self._candidates.reduce(start, merged)
        return tf.ensure_shape(scores, [None, k]), tf.ensure_shape(ids, [None, k])

    def result(self) -> dict[str, Tensor]:
        """Return the share of queries whose candidate is among the best k, for each k."""
        shares = tf.math.divide_no_nan(tf.convert_to_tensor(self.hits), tf.convert_to_tensor(self.total))
        return {f"{self.name}/top_{k}_categorical_accuracy": shares[at] for at, k in enumerate(self.ks)}
