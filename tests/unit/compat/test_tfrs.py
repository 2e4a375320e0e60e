"""TensorFlow Recommenders' names with their meanings; training numbers against the rules written out in numpy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.fake_tpu import fake_tpu
from tests.support.messages import refused
from tpuembed import Adagrad, FeatureConfig, TableConfig, Vocabulary, open_checkpoint
from tpuembed.compat import tfrs
from tpuembed.errors import CheckpointMismatchError, ConfigError

embedding = tf.tpu.experimental.embedding
LARGE, SMALL = 20, 5


def configs(**small: Any) -> dict[str, Any]:
    """Two features share the large table; the small table has exactly SMALL rows."""
    large = embedding.TableConfig(LARGE, 4, name="large", combiner="sum")
    return {
        "item": embedding.FeatureConfig(large),
        "items": embedding.FeatureConfig(large),
        "kind": embedding.FeatureConfig(embedding.TableConfig(SMALL, 3, name="small", combiner="sum", **small)),
    }


def partial(threshold: int | None = SMALL, optimizer: Any = "adagrad", **small: Any) -> tfrs.PartialTPUEmbedding:
    return tfrs.PartialTPUEmbedding(configs(**small), optimizer, size_threshold=threshold)


IDS = {"item": np.array([1, 2, 1]), "items": np.array([3, 1, 1]), "kind": np.array([0, 4, 4])}


def tables(layer: Any) -> dict[str, Any]:
    return {config.name: variable.numpy() for config, variable in layer.embedding_tables.items()}


def step(layer: Any, optimizer: Any) -> None:
    """The gradient of every activation is 1."""
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(activation) for activation in layer(IDS).values()])
    optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)


# ---- which table is large


@pytest.mark.parametrize(
    ("threshold", "large"),
    [
        (SMALL, {"large"}),
        (SMALL - 1, {"large", "small"}),
        (0, {"large", "small"}),
        (-1, {"large", "small"}),
        (None, set()),
    ],
)
def test_tables_of_more_rows_than_the_threshold_are_large(threshold: int | None, large: set[str]) -> None:
    layer = partial(threshold)
    found = set() if layer.tpu_embedding is None else {c.name for c in layer.tpu_embedding.embedding_tables}
    assert found == large
    assert set(layer.keras_embedding_layers) == {n for n, c in configs().items() if c.table.name not in large}


def test_the_default_threshold_is_ten_thousand_rows() -> None:
    features = {
        "at": FeatureConfig(TableConfig(10_000, 1, "at")),
        "above": FeatureConfig(TableConfig(10_001, 1, "above")),
    }
    layer = tfrs.PartialTPUEmbedding(features, "sgd")
    assert list(layer.keras_embedding_layers) == ["at"]
    assert layer.get_config()["size_threshold"] == 10_000


def test_small_tables_combine_ragged_ids() -> None:
    layer = partial()
    ragged = tf.ragged.constant([[1, 2], [], [4, 4, 4]], dtype=tf.int64)
    rows = tables(layer)["small"]
    truth = [rows[1] + rows[2], np.zeros(3), 3 * rows[4]]
    np.testing.assert_allclose(layer({**IDS, "kind": ragged})["kind"], truth, rtol=1e-6, atol=1e-7)


# ---- who trains which


def test_with_threshold_none_the_models_optimizer_trains_all() -> None:
    layer = partial(None, optimizer=embedding.SGD(0.5))
    before = tables(layer)["large"]
    step(layer, keras.optimizers.SGD(0.1))
    np.testing.assert_allclose(tables(layer)["large"][1], before[1] - 0.4, rtol=1e-5, atol=1e-6)


def test_a_small_tables_own_optimizer_is_not_ignored() -> None:
    layer = partial(optimizer=embedding.SGD(0.5))
    own = tfrs.PartialTPUEmbedding(configs(optimizer=embedding.SGD(2.0)), embedding.SGD(0.5), size_threshold=SMALL)
    assert [v.path.split("/")[-1] for v in layer.trainable_variables] == ["gradient_trap", "large_rows", "small"]
    before = tables(own)["small"]
    step(own, keras.optimizers.SGD(0.1))
    np.testing.assert_allclose(tables(own)["small"][4], before[4] - 4.0, rtol=1e-5, atol=1e-6)


def test_under_a_tpu_large_tables_are_the_accelerators() -> None:
    with fake_tpu("V2", replicas=2) as strategy:
        with strategy.scope():
            layer = tfrs.PartialTPUEmbedding(configs(), "adagrad", batch_size=32, size_threshold=SMALL)
        ids = {name: tf.compat.v1.placeholder(tf.int32, [16]) for name in IDS}

        def run(ids: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(activation) for activation in layer(ids).values()])
            return tape.gradient(loss, layer.trainable_variables)

        strategy.run(run, args=(ids,))
        found = {node.op for node in tf.compat.v1.get_default_graph().as_graph_def().node}
        assert "XlaSparseDenseMatmulGradWithAdagradAndStaticBufferSize" in found
        shapes = [tuple(variable.shape) for variable in layer.trainable_variables]
    assert (SMALL, 3) in shapes, shapes
    assert (LARGE, 4) not in shapes


def test_a_global_batch_that_replicas_cannot_share_is_refused() -> None:
    with fake_tpu("V2", replicas=2) as strategy, strategy.scope(), refused(ConfigError, match="all 2 replicas"):
        tfrs.PartialTPUEmbedding(configs(), "adagrad", batch_size=33, size_threshold=SMALL)


# ---- saving


def test_config_round_trip() -> None:
    layer = partial(optimizer=keras.optimizers.Adam(0.3))
    again = tfrs.PartialTPUEmbedding.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
    assert again.get_config()["optimizer"]["learning_rate"] == pytest.approx(0.3)


def test_saved_models_come_back(tmp_path: Path) -> None:
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in IDS}
    joined = keras.ops.concatenate(list(partial()(inputs).values()), 1)
    model = keras.Model(inputs, keras.layers.Dense(1)(joined))
    model.save(tmp_path / "m.keras")
    again = keras.models.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(again(IDS), model(IDS))


def test_checkpoints_have_the_keys_of_large_tables_and_every_table(tmp_path: Path) -> None:
    layer = partial()
    prefix = tf.train.Checkpoint(layer=layer).write(str(tmp_path / "ckpt"))
    names = [name for name, _ in tf.train.list_variables(prefix)]
    assert "layer/_tpu_embedding/_tpu_embedding/large/.ATTRIBUTES/VARIABLE_VALUE" in names  # TFRS' own key
    assert set(open_checkpoint(prefix).tables()) == {"large", "small"}


# ---- refusals


@pytest.mark.parametrize("structure", [[configs()["item"]], {"a": {"b": configs()["item"]}}, configs()["item"]])
def test_only_flat_dicts(structure: Any) -> None:
    with refused(ConfigError):
        tfrs.PartialTPUEmbedding(structure, "adagrad")


@pytest.mark.parametrize("threshold", ["10", 0.5])
def test_thresholds_are_integers(threshold: Any) -> None:
    with refused(ConfigError, match="size_threshold"):
        partial(threshold)


def test_small_tables_look_like_keras_embeddings() -> None:
    """They were the one layer that holds them all, which has no input_dim, output_dim and embeddings."""
    tables = {"a": FeatureConfig(small := TableConfig(5, 3, "s")), "b": FeatureConfig(TableConfig(7, 2, "t"))}
    layer = tfrs.PartialTPUEmbedding({**tables, "c": FeatureConfig(small)}, "sgd")
    found = layer.keras_embedding_layers
    assert {name: (one.input_dim, one.output_dim) for name, one in found.items()} == {
        "a": (5, 3),
        "b": (7, 2),
        "c": (5, 3),
    }
    assert found["a"].embeddings is found["c"].embeddings is layer.embedding_tables[small]
    assert found["a"].weights == [found["a"].embeddings]
    rows = found["b"].embeddings.numpy()
    np.testing.assert_array_equal(found["b"].get_weights()[0], rows)
    np.testing.assert_array_equal(found["b"](tf.constant([[6], [0]])), rows[[[6], [0]]])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(found["a"](tf.constant([4, 4])))
    assert tf.convert_to_tensor(tape.gradient(loss, found["a"].embeddings)).numpy()[4].tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("threshold", [None, SMALL, 0])
def test_pythons_integers_are_ids(threshold: int | None) -> None:
    layer = partial(threshold)
    rows = tables(layer)
    found = layer({"item": 3, "items": [1, 2], "kind": 4})
    np.testing.assert_array_equal(found["item"], rows["large"][3])
    np.testing.assert_array_equal(found["items"], rows["large"][[1, 2]])
    np.testing.assert_array_equal(found["kind"], rows["small"][4])


def test_inputs_must_name_every_feature() -> None:
    with refused(ConfigError):
        partial()({"item": np.array([1])})


# ---- translate_keras_optimizer


def test_what_only_the_translated_optimizer_has_is_honoured() -> None:
    translated = tfrs.translate_keras_optimizer(keras.optimizers.SGD(1.0))
    translated.clip_weight_max = -5.0
    layer = tfrs.TPUEmbedding(configs()["item"], translated)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(np.array([7])))
    layer.apply_gradients(tape.gradient(loss, layer.trainable_variables))
    (variable,) = layer.embedding_tables.values()
    np.testing.assert_array_equal(variable.numpy()[7], -5.0)


def test_a_translated_schedule_follows_the_layers_updates() -> None:
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0], [1.0, 0.25])
    layer = tfrs.TPUEmbedding(configs()["item"], tfrs.translate_keras_optimizer(keras.optimizers.SGD(schedule)))
    (variable,) = layer.embedding_tables.values()
    rows = [variable.numpy()[7]]
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(np.array([7])))
        layer.apply_gradients(tape.gradient(loss, layer.trainable_variables))
        rows.append(variable.numpy()[7])
    np.testing.assert_allclose(np.diff(rows, axis=0)[:, 0], [-1.0, -0.25], rtol=1e-5, atol=1e-6)


def _with_names(names: Callable[[str], list[str]], small: int = 1, large: int = 1) -> Any:
    """Return a layer whose tables have these names and so many buckets."""
    features = {
        table: FeatureConfig(TableConfig(rows, 2, table), vocabulary=Vocabulary(names(table), oov_buckets=buckets))
        for table, rows, buckets in (("small", 9, small), ("large", 200, large))
    }
    return tfrs.PartialTPUEmbedding(features, optimizer=Adagrad(0.1), size_threshold=100)


@pytest.mark.parametrize("way", ["checkpoint", "restore_tables", "without slots", "by name", "weights"])
def test_names_come_back_with_their_rows(way: str, tmp_path: Path) -> None:
    trained = _with_names(lambda table: [f"{table} {number}" for number in range(5)])
    new = _with_names(lambda table: [f"{table} {number}" for number in (4, 2, 0, 1, 3)] if way == "by name" else [])
    names = {name: tf.constant([f"{name} {number}" for number in range(5)]) for name in ("small", "large")}
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(rows) for rows in trained(names).values()])
    keras.optimizers.SGD(0.1).apply(tape.gradient(loss, trained.trainable_variables), trained.trainable_variables)
    path = tf.train.Checkpoint(layer=trained).write(str(tmp_path / "ckpt"))
    if way == "checkpoint":
        tf.train.Checkpoint(layer=new).restore(path)
    elif way == "weights":
        store: dict[str, Any] = {}
        trained.save_own_variables(store)
        new.load_own_variables(store)
    elif way == "by name":
        new.restore_tables(path, by="name")
    else:
        new.restore_tables(path, slots=way != "without slots")
    for name, rows in trained(names).items():
        np.testing.assert_array_equal(new(names)[name], rows)
        assert len(new.vocabularies[name]) == 5


@pytest.mark.parametrize("buckets", [{"small": 2}, {"large": 2}])
def test_a_refused_weight_file_changes_no_names_of_any_table(buckets: dict[str, int]) -> None:
    saved, new = _with_names(lambda _: ["ann", "bob"]), _with_names(lambda _: ["bob", "ann"], **buckets)
    store: dict[str, Any] = {}
    saved.save_own_variables(store)
    with refused(CheckpointMismatchError):
        new.load_own_variables(store)
    for vocabulary in new.vocabularies.values():
        assert vocabulary.get_vocabulary()[vocabulary.oov_buckets :] == ["bob", "ann"]
