"""The loss and the accuracy of two towers, against numpy."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.messages import refused
from tpuembed.errors import ConfigError
from tpuembed.retrieval.training import FactorizedTopK, in_batch_softmax

Array = np.ndarray[Any, Any]


def loss_of(
    queries: Array, candidates: Array, probability: Array | None, ids: Array | None, temperature: float
) -> Array:
    """Return the loss of each query, in float64, one query after the other."""
    found = []
    for number, query in enumerate(queries.astype(np.float64)):
        scores = candidates.astype(np.float64) @ query / temperature
        if probability is not None:
            scores = scores - np.log(probability.astype(np.float64))
        if ids is not None:
            scores = scores[(ids != ids[number]) | (np.arange(len(ids)) == number)]
            number = int(np.sum(ids[:number] != ids[number]))
        found.append(np.log(np.exp(scores - scores.max()).sum()) + scores.max() - scores[number])
    return np.array(found)


@pytest.mark.parametrize("seed", range(12))
def test_the_loss_is_numpy_s(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch, more, dim = (int(rng.integers(low, 30)) for low in (1, 0, 1))
    queries, candidates = (rng.normal(size=(n, dim)).astype(np.float32) for n in (batch, batch + more))
    probability = (rng.random(batch + more).astype(np.float32) ** 8 + 1e-12) if seed % 2 else None
    ids: Any = rng.integers(0, 12, batch + more) if seed % 3 else None
    if ids is not None and seed % 4 < 2:
        ids = ids.astype(str).astype(object)
    temperature = float(rng.choice([0.05, 1.0, 3.0]))
    options = {"sampling_probability": probability, "candidate_ids": ids, "temperature": temperature}
    truth = loss_of(queries, candidates, probability, ids, temperature)
    np.testing.assert_allclose(in_batch_softmax(queries, candidates, **options), truth, rtol=1e-4, atol=1e-4)
    traced = tf.function(lambda queries, candidates: in_batch_softmax(queries, candidates, **options))
    dynamic = [tf.TensorSpec([None, None])] * 2
    np.testing.assert_allclose(
        traced.get_concrete_function(*dynamic)(tf.constant(queries), tf.constant(candidates)),
        truth,
        rtol=1e-4,
        atol=1e-4,
    )
    with tf.GradientTape() as tape:
        tape.watch(watched := tf.constant(queries))
        loss = in_batch_softmax(watched, candidates, **options)
    assert np.isfinite(tape.gradient(loss, watched)).all()


@pytest.mark.parametrize("more", [0, 5])
def test_an_empty_batch_of_a_replica_has_no_loss(more: int) -> None:
    queries, candidates = tf.zeros([0, 3]), tf.Variable(np.ones((more, 3), np.float32))
    with tf.GradientTape() as tape:
        loss = in_batch_softmax(queries, candidates, candidate_ids=tf.range(more))
    assert loss.shape == (0,)
    assert not np.any(tape.gradient(tf.reduce_sum(loss), candidates))


def test_compiled_code_refuses_what_other_code_refuses() -> None:
    shapes = [tf.TensorSpec([None, 3]), tf.TensorSpec([None, 3]), tf.TensorSpec([None], tf.int64)]
    compiled = tf.function(
        lambda queries, candidates, ids: in_batch_softmax(queries, candidates, candidate_ids=ids),
        input_signature=shapes,
        jit_compile=True,
    )
    rng, ids = np.random.default_rng(0), np.array([3, 1, 3, 2])
    queries, candidates = (rng.normal(size=(4, 3)).astype(np.float32) for _ in range(2))
    truth = loss_of(queries, candidates, None, ids, 1.0)
    np.testing.assert_allclose(compiled(queries, candidates, ids), truth, rtol=1e-5)
    for number, few in ((1, ids[:1]), (1, ids), (2, ids[:2])):
        with pytest.raises(tf.errors.InvalidArgumentError):
            compiled(queries, candidates[:number] if few is not ids else candidates, few[:number])


def test_a_temperature_may_be_trained() -> None:
    ones, temperature = np.eye(3, dtype=np.float32), tf.Variable(2.0)
    run = tf.function(lambda: in_batch_softmax(ones, ones, temperature=temperature))
    np.testing.assert_allclose(run(), in_batch_softmax(ones, ones, temperature=2.0))


@pytest.mark.nightly
def test_the_correction_makes_up_for_the_sampling() -> None:
    """Trained on pairs where queries choose evenly among what they are shown, and some candidates are shown more often."""
    rng = np.random.default_rng(0)
    shown = np.array([0.7, 0.1, 0.1, 0.1], np.float32)
    scores = {}
    for corrected in (True, False):
        logits = tf.Variable(tf.zeros([4, 1]))
        optimizer = keras.optimizers.SGD(0.5)
        for _ in range(300):
            chosen = rng.choice(4, 256, p=shown)
            with tf.GradientTape() as tape:
                loss = in_batch_softmax(
                    tf.ones([256, 1]),
                    tf.gather(logits, chosen),
                    sampling_probability=shown[chosen] if corrected else None,
                    candidate_ids=chosen,
                )
                loss = tf.reduce_mean(loss)
            optimizer.apply(tape.gradient(loss, [logits]), [logits])
        scores[corrected] = logits.numpy()[:, 0] - logits.numpy().mean()
    # Corrected scores are the logarithm of how often each is chosen. Others lose the share of the sampling.
    np.testing.assert_allclose(scores[True] - scores[False], np.log(shown) - np.log(shown).mean(), atol=0.2)


def test_wrong_arguments_of_the_loss_are_refused() -> None:
    ones = np.ones((3, 2), np.float32)
    for arguments, options in (
        ((ones[0], ones), {}),
        ((ones, ones[:, :1]), {}),
        ((ones, ones[:2]), {}),
        ((ones, ones), {"temperature": 0.0}),
        ((ones, ones), {"temperature": np.float32(0)}),
        ((ones, ones), {"sampling_probability": np.ones(2)}),
        ((ones, ones), {"candidate_ids": np.ones((3, 1), np.int64)}),
    ):
        with refused(ConfigError):
            in_batch_softmax(*arguments, **options)
    one = tf.function(
        lambda ids: in_batch_softmax(ones, ones, candidate_ids=ids), input_signature=[tf.TensorSpec([None])]
    )
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"each candidate|same shape"
    ):  # one would be the id of all
        one(tf.ones([1]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="above 0"):
        in_batch_softmax(ones, ones, sampling_probability=np.array([1, 0, 1], np.float32))


@pytest.mark.parametrize("is_text", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_accuracy_is_numpy_s(seed: int, is_text: bool) -> None:
    rng = np.random.default_rng(seed)
    count, dim = int(rng.integers(1, 80)), int(rng.integers(1, 4))
    ids: Any = rng.permutation(1000)[:count]
    names = ids.astype(str).astype(object) if is_text else ids
    vectors = rng.integers(-2, 3, (count, dim)).astype(np.float32)  # with ties
    dataset = tf.data.Dataset.from_tensor_slices((names, vectors)).batch(int(rng.integers(1, 30)))
    ks = sorted({1, *rng.integers(1, 100, 3).tolist()})
    metric, hits, total = FactorizedTopK(dataset, ks), np.zeros(len(ks)), 0.0
    for _ in range(3):
        batch = int(rng.integers(0, 9))
        queries = rng.integers(-2, 3, (batch, dim)).astype(np.float32)
        wanted = rng.choice([*names, "nobody" if is_text else -1], batch)
        wanted = wanted.astype(object) if is_text else wanted.astype(np.int64)
        weights = rng.integers(0, 4, batch).astype(np.float32) if seed % 2 else None
        update = metric.update_state if seed < 2 else tf.function(metric.update_state)
        update(queries, wanted.reshape(-1, 1) if seed == 1 else wanted, sample_weight=weights)
        best = np.argsort(-(queries @ vectors.T), axis=1, kind="stable")
        for query in range(batch):
            weight = 1.0 if weights is None else float(weights[query])
            total += weight
            for place, k in enumerate(ks):
                hits[place] += weight * (wanted[query] in names[best[query, :k]].tolist())
    result = metric.result()
    assert list(result) == [f"factorized_top_k/top_{k}_categorical_accuracy" for k in ks]
    np.testing.assert_allclose([*result.values()], hits / total if total else hits, rtol=1e-6)
    metric.reset_state()
    assert not np.any([*metric.result().values()])


class Towers(keras.Model):
    """Two tables, trained and measured as the documentation says."""

    def __init__(self, items: int) -> None:
        super().__init__()
        self.queries, self.items = keras.layers.Embedding(20, 8), keras.layers.Embedding(items, 8)
        ids = tf.data.Dataset.range(items).batch(7)
        self.top_k = FactorizedTopK(ids.map(lambda batch: (batch, self.items(batch))), ks=(1, 3))

    def call(self, inputs: Any) -> Any:
        return self.queries(inputs["user"]), self.items(inputs["item"])

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, **_: Any
    ) -> Any:
        return tf.reduce_mean(in_batch_softmax(*y_pred, candidate_ids=x["item"]))

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        self.top_k.update_state(y_pred[0], x["item"])
        return self.get_metrics_result()


@pytest.mark.nightly
def test_a_model_that_learns_its_pairs_finds_them() -> None:
    keras.utils.set_random_seed(0)
    model = Towers(20)
    model.compile(keras.optimizers.Adam(0.05))
    pairs = {"user": np.arange(20), "item": np.random.default_rng(0).permutation(20)}
    before = model.evaluate(pairs, batch_size=20, return_dict=True, verbose=0)
    model.fit(pairs, batch_size=20, epochs=60, verbose=0)
    after = model.evaluate(pairs, batch_size=20, return_dict=True, verbose=0)
    assert before["factorized_top_k/top_3_categorical_accuracy"] < 0.5
    assert after["factorized_top_k/top_1_categorical_accuracy"] == 1.0


def test_a_vector_that_is_nan_hides_no_other() -> None:
    vectors = np.eye(100)
    vectors[37] = np.nan
    for dtype in (np.float16, np.float64):
        candidates = tf.data.Dataset.from_tensors((np.arange(100, dtype=np.uint64), vectors.astype(dtype)))
        metric = FactorizedTopK(candidates, ks=(1,))
        metric.update_state(np.eye(100, dtype=np.float32), np.arange(100))
        assert float(metric.hits[0]) == 99


def test_ids_and_vectors_of_other_batches_are_refused() -> None:
    ids, vectors = (tf.data.Dataset.from_tensor_slices(each) for each in (np.arange(20), np.eye(20, dtype=np.float32)))
    metric = FactorizedTopK(tf.data.Dataset.zip(ids.batch(10), vectors.batch(7)), ks=(1,))
    with pytest.raises(tf.errors.InvalidArgumentError, match="as many ids as vectors"):
        metric.update_state(np.eye(20, dtype=np.float32), np.arange(20))


def test_wrong_arguments_of_the_metric_are_refused() -> None:
    vectors = np.ones((4, 2), np.float32)
    pairs = tf.data.Dataset.from_tensor_slices((np.arange(4), vectors)).batch(2)
    for candidates, ks in ((pairs, (0,)), (pairs, (5, 1)), (pairs, ()), (pairs.map(lambda _, vectors: vectors), (1,))):
        with refused(ConfigError):
            FactorizedTopK(candidates, ks)
    metric = FactorizedTopK(pairs, (1,))
    with refused(ConfigError):
        metric.update_state(vectors, np.array(["a"] * 4, object))
    for ids, weights in ((np.arange(1), None), (np.arange(4), np.ones(1)), (np.arange(5), np.ones(4))):
        with pytest.raises(tf.errors.InvalidArgumentError, match="one for each query"):
            metric.update_state(vectors, ids, sample_weight=weights)
    assert not metric.total.numpy()
