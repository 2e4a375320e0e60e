"""Ids outside of their tables: the same numbers in training, in predict, in whole-model and lookup exports, and by hand."""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_saved_model
from tpuembed.errors import ConfigError

Array = np.ndarray[Any, Any]
ROWS = {"users": 7, "items": 11, "ünïts": 5}
DIM = 3
RATE = 0.5
BATCH = 6
REMEDY = "; correct the id or set out_of_vocabulary"
OUTSIDE = (-(2**63), -9, -2, 2**31, 2**40, 2**63 - 1)


@dataclasses.dataclass(frozen=True)
class Case:
    """A feature: the form of its ids, its table, and what an id outside of it does."""

    form: str
    table: str
    combiner: str
    policy: str | int
    length: int = 0

    def config(self, tables: dict[tuple[str, str], TableConfig]) -> FeatureConfig:
        # A combiner is the table's: tables of one name share their rows in `rows`, not in the layer.
        table = tables[self.table, self.combiner]
        return FeatureConfig(table, max_sequence_length=self.length, out_of_vocabulary=self.policy)

    @property
    def is_dense(self) -> bool:
        return self.form.startswith("dense")


def cases() -> dict[str, Case]:
    """Every form with every policy; features of one table have different policies."""
    found: dict[str, Case] = {}
    for policy in ("zeros", 2, "error"):
        for rank in (1, 2, 3):
            found[f"dense{rank}_{policy}"] = Case(f"dense{rank}", "users", "mean", policy)
        for combiner in ("sum", "mean", "sqrtn"):
            for form in ("sparse", "ragged", "weighted_sparse", "weighted_ragged"):
                found[f"{form}_{combiner}_{policy}"] = Case(form, "items", combiner, policy)
        for form in ("sparse", "ragged"):
            found[f"sequence_{form}_{policy}"] = Case(form, "ünïts", "mean", policy, length=2)
    return found


CASES = cases()
TABLES = {(case.table, case.combiner) for case in CASES.values()}


def layer(cases: dict[str, Case]) -> Any:
    tables = {key: TableConfig(ROWS[key[0]], DIM, f"{key[0]}_{key[1]}", combiner=key[1]) for key in sorted(TABLES)}
    return TPUEmbedding(
        {name: case.config(tables) for name, case in cases.items()}, {"kind": "sgd", "learning_rate": RATE}
    )


def fill(embedding: Any) -> dict[str, Array]:
    """Give the tables rows, and return them."""
    rows = {}
    for config, variable in embedding.embedding_tables.items():
        rows[config.name] = np.random.default_rng(len(config.name)).normal(size=variable.shape).astype(np.float32)
        variable.assign(rows[config.name])
    return rows


def draw(rng: np.random.Generator, case: Case, hot: int) -> tuple[Any, Any]:
    """(ids, weights): an array of dense ids, lists of sparse and ragged ones; -1 is padding there."""
    rows = ROWS[case.table]
    outside = [rows, rows + 3, *OUTSIDE] if case.policy != "error" else []

    def ids(count: int) -> list[int]:
        known = rng.integers(0, rows, count).tolist()
        return [int(rng.choice(outside)) if outside and rng.random() < 0.4 else one for one in known]

    if case.is_dense:
        shape = (BATCH, 2, 3)[: int(case.form[-1])]
        values = [-1 if outside and rng.random() < 0.1 else one for one in ids(int(np.prod(shape)))]
        return np.array(values, np.int64).reshape(shape), None
    lists = [ids(int(count)) for count in rng.integers(0, hot + 1, BATCH)]
    lists[0] = ids(hot)
    weights = [[float(rng.uniform(0.1, 2)) for _ in one] for one in lists] if "weighted" in case.form else None
    return lists, weights


def tensors(case: Case, ids: Any, weights: Any) -> tuple[Any, Any]:
    if case.is_dense:
        return tf.constant(ids, tf.int64), None
    found = [None if lists is None else tf.ragged.constant(lists, dtype, ragged_rank=1)
             for lists, dtype in ((ids, tf.int64), (weights, tf.float32))]  # fmt: skip
    if "sparse" in case.form:
        found = [None if one is None else one.to_sparse() for one in found]
    return found[0], found[1]


def entries(case: Case, ids: Sequence[int], weights: Sequence[float] | None) -> Iterable[tuple[int | None, float]]:
    """(row, or None for zeros; factor) of each id of one example that counts, by the formulas of the documentation."""
    rows = ROWS[case.table]
    given = [1.0] * len(ids) if weights is None else weights
    kept = [(one, weight) for one, weight in zip(ids, given, strict=True) if case.is_dense or one != -1]
    sums = {"sum": 1.0, "mean": sum(w for _, w in kept), "sqrtn": float(np.sqrt(sum(w * w for _, w in kept)))}
    divisor = 1.0 if case.is_dense or case.length else sums[case.combiner]
    for one, weight in kept:
        row = one if 0 <= one < rows else None if case.policy == "zeros" else int(case.policy)
        yield row, weight / divisor


def by_hand(case: Case, table: Array, ids: Any, weights: Any, gradient: Array | None = None) -> tuple[Array, Array]:
    """(activations, gradient of the table), in float64; the latter for a `gradient` of the activations."""
    table, of_table = table.astype(np.float64), np.zeros(table.shape)

    def one(examples: Any, example_weights: Any, upstream: Array | None) -> Array:
        total = np.zeros(DIM)
        for row, factor in entries(case, examples, example_weights):
            if row is not None:
                total += factor * table[row]
                if upstream is not None:
                    of_table[row] += factor * upstream
        return total

    if case.is_dense:
        flat = None if gradient is None else gradient.reshape(-1, DIM)
        found = [one([i], None, None if flat is None else flat[k]) for k, i in enumerate(ids.reshape(-1).tolist())]
        return np.array(found).reshape(*ids.shape, DIM), of_table
    if case.length:
        out = np.zeros((BATCH, case.length, DIM))
        for index, example in enumerate(ids):
            for place, i in enumerate(example[: case.length]):
                out[index, place] = one([i], None, None if gradient is None else gradient[index, place])
        return out, of_table
    found = [
        one(example, None if weights is None else weights[index], None if gradient is None else gradient[index])
        for index, example in enumerate(ids)
    ]
    return np.array(found), of_table


def drawn(seed: int, cases: dict[str, Case], hot: int = 4) -> tuple[dict[str, Any], dict[str, Any]]:
    rng = np.random.default_rng(seed)
    pairs = {name: draw(rng, case, hot) for name, case in cases.items()}
    return {name: ids for name, (ids, _) in pairs.items()}, {name: weights for name, (_, weights) in pairs.items()}


def as_tensors(cases: dict[str, Case], ids: Any, weights: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    made = {name: tensors(case, ids[name], weights[name]) for name, case in cases.items()}
    return {name: one for name, (one, _) in made.items()}, {name: one for name, (_, one) in made.items()}


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_step_of_every_form_by_hand(mode: str) -> None:
    embedding = layer(CASES)

    def step(features: Any, weights: Any, upstream: Any) -> Any:
        with tf.GradientTape() as tape:
            found = embedding(features, weights)
            loss = tf.add_n([tf.reduce_sum(found[name] * upstream[name]) for name in CASES])
        tape.gradient(loss, embedding.trainable_variables)
        return found

    run = step if mode == "eager" else tf.function(step, reduce_retracing=True)
    for seed in range(2 if mode == "eager" else 4):
        rows = fill(embedding)
        ids, weights = drawn(seed, CASES)
        upstream = {}
        for name, case in CASES.items():
            shape = by_hand(case, rows[f"{case.table}_{case.combiner}"], ids[name], weights[name])[0].shape
            upstream[name] = np.asarray(np.random.default_rng(seed).normal(size=shape), np.float32)
        found = run(*as_tensors(CASES, ids, weights), {name: tf.constant(g) for name, g in upstream.items()})
        gradients = {name: np.zeros(table.shape) for name, table in rows.items()}
        for name, case in CASES.items():
            table = f"{case.table}_{case.combiner}"
            wanted, gradient = by_hand(case, rows[table], ids[name], weights[name], upstream[name])
            np.testing.assert_allclose(found[name], wanted, atol=1e-5, err_msg=name)
            gradients[table] += gradient
        for config, variable in embedding.embedding_tables.items():
            wanted = rows[config.name] - RATE * gradients[config.name]
            np.testing.assert_allclose(variable, wanted, atol=1e-4, err_msg=config.name)


def test_zeros_touch_no_row_and_no_slot() -> None:
    table = TableConfig(5, 2, "t", combiner="mean", out_of_vocabulary="zeros")
    embedding = TPUEmbedding({"a": FeatureConfig(table), "b": FeatureConfig(table)}, "adam")
    before = {name: variable.numpy() for name, variable in embedding.named_variables().items()}
    features = {"a": tf.constant([5, -1, 2**40]), "b": tf.ragged.constant([[7, 9], [-5], []], tf.int64)}
    with tf.GradientTape() as tape:
        found = embedding(features)
        loss = tf.reduce_sum(found["a"]) + tf.reduce_sum(found["b"])
    tape.gradient(loss, embedding.trainable_variables)
    assert not np.any(found["a"])
    assert not np.any(found["b"])
    assert int(embedding.updates) == 1
    for name, variable in embedding.named_variables().items():
        np.testing.assert_array_equal(variable, before[name], err_msg=name)


def two_tables() -> tuple[Any, Any]:
    """A model over two tables whose losses have nothing to do with each other, and its layer."""
    tables = {name: TableConfig(ROWS[name], DIM, name) for name in ("users", "ünïts")}
    inputs = {name: keras.Input((), dtype="int64", name=key) for name, key in (("users", "user"), ("ünïts", "unit"))}
    embedding = TPUEmbedding({name: FeatureConfig(table) for name, table in tables.items()}, "adam")
    made = keras.Model(list(inputs.values()), list(embedding(inputs).values()))
    made.compile("sgd", loss=["mse", "mse"])
    return made, embedding


@pytest.mark.nightly
@pytest.mark.parametrize("bad", ["users", "ünïts"])
def test_fit_names_the_id_and_updates_no_table(bad: str) -> None:
    """One sentence between TensorFlow's header and the names of its operations; without the stack of every layer."""
    made, embedding = two_tables()
    ids = {"users": np.array([1, 2, 3]), "ünïts": np.array([4, 0, 1])}
    truth = [np.ones((3, DIM), np.float32)] * 2
    made.fit(list(ids.values()), truth, verbose=0, shuffle=False)
    before = {name: variable.numpy() for name, variable in embedding.named_variables().items()}
    ids[bad][1] = 1000
    sentence = f"feature {bad}: id 1000 of row 1 is not in table {bad}, which has {ROWS[bad]} rows{REMEDY}"
    calls: list[Any] = [
        lambda: made.fit(list(ids.values()), truth, verbose=0, shuffle=False),
        lambda: made.predict(list(ids.values()), verbose=0),
    ]
    for call in calls:
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            call()
        assert f"[{sentence}]" in str(caught.value)
        assert len(str(caught.value)) < 600
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        embedding({name: tf.constant(one) for name, one in ids.items()})
    assert str(caught.value) == sentence
    for name, variable in embedding.named_variables().items():
        np.testing.assert_array_equal(variable, before[name], err_msg=name)


@pytest.mark.nightly
def test_the_row_of_every_form() -> None:
    """Sparse ids of rank 3, sequences, ids laid out by an output_shape: the row is the first index of the ids."""
    table = TableConfig(10, DIM, "t")
    ragged = tf.ragged.constant([[1], [2, 3], [4, 99]], tf.int64)
    rank3 = tf.sparse.from_dense(np.array([[[1, 2], [3, 4]], [[5, 6], [7, 99]]]))
    given: dict[str, tuple[FeatureConfig, Any, int]] = {
        "dense": (FeatureConfig(table), tf.constant([[[1, 2]], [[3, 99]]]), 1),
        "ragged": (FeatureConfig(table), ragged, 2),
        "sequence": (FeatureConfig(table, max_sequence_length=2), ragged.to_sparse(), 2),
        "laid out": (FeatureConfig(table, output_shape=(3, 2)), ragged, 2),
        "rank 3": (FeatureConfig(table), rank3, 1),
    }
    for name, (config, ids, row) in given.items():
        embedding = TPUEmbedding({name: config}, "sgd")
        for call in (embedding, tf.function(embedding)):
            with pytest.raises(
                tf.errors.InvalidArgumentError, match=f"feature {name}: id 99 of row {row} is not in table t"
            ):
                call({name: ids})


@pytest.mark.parametrize("policy", ["error", "zeros", 4])
def test_an_unchecked_negative_id_of_a_sequence_is_no_padding(policy: str | int) -> None:
    """It was row 0."""
    table = TableConfig(5, DIM, "t")
    config = FeatureConfig(table, max_sequence_length=2, validate_weights_and_indices=False, out_of_vocabulary=policy)
    embedding = TPUEmbedding({"x": config}, "sgd")
    rows = fill(embedding)["t"]
    features = {"x": tf.ragged.constant([[1, -1, 7], [3]], tf.int64)}
    for call in (embedding, tf.function(embedding)):
        if policy == "error":
            with pytest.raises(tf.errors.InvalidArgumentError, match="feature x: id -1 of row 0 is not in table t"):
                call(features)
        else:
            instead = np.zeros(DIM) if policy == "zeros" else rows[4]
            np.testing.assert_array_equal(call(features)["x"], [[rows[1], instead], [rows[3], np.zeros(DIM)]])


def test_a_serving_config_overrides_lookups_and_is_refused_for_a_model(tmp_path: Path) -> None:
    def build() -> Any:
        ids = keras.Input((), dtype="int64", name="dense1_zeros")
        config = {"dense1_zeros": FeatureConfig(TableConfig(7, DIM, "users_mean"), out_of_vocabulary="zeros")}
        return keras.Model(ids, TPUEmbedding(config, "sgd")({"dense1_zeros": ids}))

    made = build()
    rows = fill(next(one for one in made.layers if isinstance(one, TPUEmbedding)))
    checkpoint = tf.train.Checkpoint(model=made).write(str(tmp_path / "ckpt"))
    feature = {"table": "users_mean", "input": "id"}
    config = {"features": {"dense1_zeros": feature | {"out_of_vocabulary": 4}, "new": feature}}
    path = export_saved_model(checkpoint, tmp_path / "overridden", serving_config=config).path
    call = tf.saved_model.load(str(path)).signatures["serving_default"]
    found = call(dense1_zeros=tf.constant([99, 1], tf.int64), new=tf.constant([0, 1], tf.int64))
    np.testing.assert_array_equal(found["dense1_zeros"], rows["users_mean"][[4, 1]])
    with pytest.raises(tf.errors.InvalidArgumentError, match="feature new: id 7 of row 1 is not in table users_mean"):
        call(dense1_zeros=tf.constant([99, 1], tf.int64), new=tf.constant([0, 7], tf.int64))
    stated = {"features": {"dense1_zeros": feature | {"out_of_vocabulary": "error"}}}
    with refused(ConfigError):
        export_saved_model(checkpoint, tmp_path / "refused", model=build, serving_config=stated)
