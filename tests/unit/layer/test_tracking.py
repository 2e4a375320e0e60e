"""`track_rows=True`: the stamps of rows against a numpy simulation of which rows each step touched."""

import itertools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tpuembed.testing
from tests.support.messages import refused
from tpuembed import SGD, FeatureConfig, TableConfig, TPUEmbedding, open_checkpoint
from tpuembed.backends.tf_config import SavedNode
from tpuembed.checkpoint.tools import describe_checkpoint
from tpuembed.errors import CheckpointCorruptError, ConfigError
from tpuembed.live.tables import live_checkpoint
from tpuembed.manifest.row_history import UNKNOWN, RowHistory

ROWS = {"a": 11, "b": 7}
Array = np.ndarray[Any, Any]


def make(optimizer: Any = "adam", track_rows: bool = True, policy: str | None = None, **table: Any) -> TPUEmbedding:
    """A layer of two tables; two features share the first one."""
    tables = {name: TableConfig(rows, 3, name, **table) for name, rows in ROWS.items()}
    features = {
        "one": FeatureConfig(tables["a"], out_of_vocabulary="zeros"),
        "bag": FeatureConfig(tables["a"], out_of_vocabulary="zeros"),
        "other": FeatureConfig(tables["b"], out_of_vocabulary="zeros"),
    }
    return TPUEmbedding(features, optimizer, track_rows=track_rows, dtype=policy, name="embedding")


def stamps_of(layer: TPUEmbedding) -> dict[str, Array]:
    live, found = live_checkpoint(layer), {}
    for name, rows in ROWS.items():
        found[name] = np.empty(rows, np.int32)
        live.stamps[name].read(0, found[name])
    return found


def history_of(layer: TPUEmbedding) -> RowHistory:
    found = live_checkpoint(layer).stamps["a"].history
    assert found is not None
    return found


def step(layer: TPUEmbedding, ids: Any, weights: Any = None) -> None:
    with tf.GradientTape() as tape:
        activations = layer(ids, weights)
        loss = tf.add_n([tf.reduce_sum(rows * rows + rows) for rows in tf.nest.flatten(activations)])
    layer.apply_gradients(tape.gradient(loss, layer.trainable_variables))


KINDS: dict[str, Callable[[list[list[int]]], Any]] = {
    "ragged": lambda rows: tf.ragged.constant(rows, dtype=tf.int64, ragged_rank=1),
    "sparse": lambda rows: tf.ragged.constant(rows, dtype=tf.int64, ragged_rank=1).to_sparse(),
    "padded": lambda rows: tf.RaggedTensor.from_tensor(
        tf.ragged.constant(rows, dtype=tf.int64, ragged_rank=1).to_tensor(-1), padding=-1
    ),
    "dense": lambda rows: tf.constant([row[0] if row else -1 for row in rows], tf.int64),
}


def touched(kind: str, rows: list[list[int]], vocabulary: int) -> set[int]:
    """The rows that a step touches; ids outside of the table touch none."""
    ids = [row[0] for row in rows if row] if kind == "dense" else [i for row in rows for i in row]
    return {i for i in ids if 0 <= i < vocabulary}


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "tf.function"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_stamps_the_rows_that_it_looked_up(kind: str, traced: bool) -> None:
    layer, random = make(), np.random.default_rng(7)
    run = tf.function(lambda ids: step(layer, ids), reduce_retracing=True) if traced else lambda ids: step(layer, ids)
    expected = {name: np.zeros(rows, np.int32) for name, rows in ROWS.items()}
    for update in range(1, 9):
        drawn = {
            key: [random.integers(-2, 13, random.integers(0, 4)).tolist() for _ in range(3)]
            for key in ("one", "bag", "other")
        }
        run({key: KINDS[kind](rows) for key, rows in drawn.items()})
        for key, rows in drawn.items():
            table = "b" if key == "other" else "a"
            expected[table][list(touched(kind, rows, ROWS[table]))] = update
        for table, found in stamps_of(layer).items():
            np.testing.assert_array_equal(found, expected[table])
    assert history_of(layer).updates == 8


def test_ids_of_weight_0_are_stamped_too() -> None:  # momentum moves their rows
    layer = make()
    ids = {key: tf.ragged.constant([[1, 2], [3]], dtype=tf.int64) for key in ("one", "bag", "other")}
    weights = {key: tf.ragged.constant([[0.0, 1.0], [0.5]]) for key in ids}
    step(layer, ids, weights)
    np.testing.assert_array_equal(stamps_of(layer)["b"], [0, 1, 1, 1, 0, 0, 0])


def test_fit_stamps_and_xla_stamps_the_same() -> None:
    layer = make()
    inputs = {key: keras.Input((), dtype="int64", name=key) for key in ("one", "bag", "other")}
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()([*layer(inputs).values()])))
    model.compile("sgd", "mse")
    model.fit({key: np.array([1, 5, 1, 2]) for key in inputs}, np.ones((4, 1)), batch_size=2, shuffle=False, verbose=0)
    np.testing.assert_array_equal(stamps_of(layer)["b"], [0, 2, 2, 0, 0, 1, 0])
    np.testing.assert_array_equal(stamps_of(layer)["a"], [0, 2, 2, 0, 0, 1, 0, 0, 0, 0, 0])
    compiled = tf.function(lambda ids: step(layer, ids), jit_compile=True)
    compiled({"one": tf.constant([1, 20]), "bag": tf.constant([3, -1]), "other": tf.constant([6, 6])})
    np.testing.assert_array_equal(stamps_of(layer)["b"], [0, 2, 2, 0, 0, 1, 3])
    np.testing.assert_array_equal(stamps_of(layer)["a"], [0, 3, 2, 3, 0, 1, 0, 0, 0, 0, 0])


def test_a_step_whose_gradients_overflow_stamps_no_row() -> None:
    layer = make(policy="mixed_float16")
    inputs = {key: keras.Input((), dtype="int64", name=key) for key in ("one", "bag", "other")}
    model = keras.Model(inputs, keras.layers.Concatenate()([*layer(inputs).values()]))
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=2.0**120), "mse")
    data = {key: np.array([1]) for key in inputs}
    model.train_on_batch(data, np.full((1, 9), 1e4))
    assert not stamps_of(layer)["a"].any()
    model.optimizer.dynamic_scale.assign(1.0)
    model.train_on_batch(data, np.ones((1, 9)))
    assert np.flatnonzero(stamps_of(layer)["a"]).tolist() == [1]


# ---- refusals


def test_updates_beyond_int32_fail_before_they_touch_a_row() -> None:
    layer = make(SGD())
    layer.updates.assign(UNKNOWN - 2)
    ids = {key: tf.constant([1]) for key in ("one", "bag", "other")}
    step(layer, ids)
    assert stamps_of(layer)["a"][1] == UNKNOWN - 1
    before = [table.numpy() for table in layer.embedding_tables.values()]
    for run in (lambda: step(layer, ids), tf.function(lambda: step(layer, ids))):
        with pytest.raises(tf.errors.InvalidArgumentError, match="numbers updates as int32, up to 2147483646"):
            run()
    with refused(ConfigError, match="2147483646"):
        layer.assign_rows("a", 0, np.zeros((1, 3), np.float32))
    for table, old in zip(layer.embedding_tables.values(), before, strict=True):
        np.testing.assert_array_equal(table.numpy(), old)


# ---- writes


def test_writes_stamp_the_rows_that_they_write() -> None:
    layer = make()
    step(layer, {key: tf.constant([1]) for key in ("one", "bag", "other")})
    layer.assign_rows("a", 3, np.ones((2, 3), np.float32))
    np.testing.assert_array_equal(stamps_of(layer)["a"], [0, 1, 0, 2, 2, 0, 0, 0, 0, 0, 0])
    layer.update_embedding_table("b", np.ones((7, 3), np.float32))
    np.testing.assert_array_equal(stamps_of(layer)["b"], [2] * 7)


# ---- saved


def model_of(layer: TPUEmbedding) -> Any:
    inputs = {key: keras.Input((), dtype="int64", name=key) for key in ("one", "bag", "other")}
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()([*layer(inputs).values()])))


def save(layer: TPUEmbedding, kind: str, folder: Path) -> Path:
    path = folder / {"ckpt": "ckpt", "keras": "m.keras", "h5": "m.weights.h5"}[kind]
    if kind == "ckpt":
        tf.train.Checkpoint(model=model_of(layer)).write(str(path))
    else:
        model = model_of(layer)
        model.save(path) if kind == "keras" else model.save_weights(path)
    return path


def load(kind: str, path: Path, track_rows: bool = True) -> TPUEmbedding:
    layer = make(track_rows=track_rows)
    step(layer, {key: tf.constant([0]) for key in ("one", "bag", "other")})
    if kind == "ckpt":
        tf.train.Checkpoint(model=model_of(layer)).read(str(path)).expect_partial()
    elif kind == "keras" and track_rows:
        layer = keras.models.load_model(path).get_layer("embedding")
    elif kind == "h5":
        model_of(layer).load_weights(path)
    else:
        layer.restore_tables(path)
    return layer


def trained(track_rows: bool = True) -> TPUEmbedding:
    layer, random = make(track_rows=track_rows), np.random.default_rng(1)
    for _ in range(5):
        step(layer, {key: tf.constant(random.integers(0, 7, 2)) for key in ("one", "bag", "other")})
    return layer


@pytest.mark.parametrize("how", ["restore", "restore_tables"])
@pytest.mark.parametrize("kind", ["ckpt", "keras", "h5"])
def test_stamps_and_history_are_saved_and_restored(tmp_path: Path, kind: str, how: str) -> None:
    layer = trained()
    path = save(layer, kind, tmp_path)
    saved, stamps = history_of(layer), stamps_of(layer)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.stamps["a"].history == checkpoint.stamps["b"].history == saved
        out = np.empty(4, np.int32)
        checkpoint.stamps["a"].read(5, out)
        np.testing.assert_array_equal(out, stamps["a"][5:9])
    if how == "restore":
        found = load(kind, path)
    else:
        found = make()
        found.restore_tables(path)
    for table, expected in stamps.items():
        np.testing.assert_array_equal(stamps_of(found)[table], expected)
    assert history_of(found).spans[:-1] == saved.spans
    assert history_of(found).since(saved)
    assert not history_of(layer).since(history_of(found))
    assert describe_checkpoint(path)["tables"][0]["tracked_updates"] == 5


@pytest.mark.parametrize(("saves", "loads"), [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("kind", ["ckpt", "keras", "h5"])
def test_tracking_and_other_layers_restore_each_others_files(
    tmp_path: Path, kind: str, saves: bool, loads: bool
) -> None:
    layer = trained(saves)
    found = load(kind, save(layer, kind, tmp_path), loads) if kind != "keras" else make(track_rows=loads)
    if kind == "keras":
        found.restore_tables(save(layer, kind, tmp_path))
    for (config, mine), (_, other) in zip(layer.embedding_tables.items(), found.embedding_tables.items(), strict=True):
        np.testing.assert_array_equal(mine.numpy(), other.numpy(), config.name)
    if loads:
        assert len(history_of(found).spans) == 1
        assert not stamps_of(found)["a"].any()


def test_a_new_table_counts_as_changed_after_a_restore(tmp_path: Path) -> None:
    table, other = TableConfig(11, 3, "a"), TableConfig(7, 3, "b")
    old = TPUEmbedding([FeatureConfig(table)], "sgd", track_rows=True)
    path = tf.train.Checkpoint(layer=old).write(str(tmp_path / "ckpt"))
    both = TPUEmbedding([FeatureConfig(table), FeatureConfig(other)], "sgd", track_rows=True)
    tf.train.Checkpoint(layer=both).read(path).expect_partial()
    assert history_of(both).since(history_of(old))
    assert not stamps_of(both)["a"].any()
    assert (stamps_of(both)["b"] == 1).all()


def test_a_restore_that_fails_halfway_begins_a_new_history(tmp_path: Path) -> None:
    old = TPUEmbedding([FeatureConfig(TableConfig(11, 3, "a"))], "sgd", track_rows=True)
    path = tf.train.Checkpoint(layer=old).write(str(tmp_path / "ckpt"))
    wide = TPUEmbedding([FeatureConfig(TableConfig(11, 4, "a"))], "sgd", track_rows=True)
    with pytest.raises(ValueError, match="shape"):
        tf.train.Checkpoint(layer=wide).read(path)
    assert not history_of(wide).since(history_of(old))


def test_a_grown_table_counts_its_new_rows_as_changed(tmp_path: Path) -> None:
    layer = trained()
    path = save(layer, "ckpt", tmp_path)
    grown = TPUEmbedding(
        [FeatureConfig(TableConfig(n, 3, name)) for name, n in (("a", 13), ("b", 7))], "adam", track_rows=True
    )
    grown.restore_tables(path, resize={"a": "grow"})
    live, out = live_checkpoint(grown), np.empty(13, np.int32)
    live.stamps["a"].read(0, out)
    np.testing.assert_array_equal(out, [*stamps_of(layer)["a"], 6, 6])
    assert history_of(grown).since(history_of(layer))


class _Gate(SavedNode):
    """Holds an asynchronous save, after it has copied the variables, until `open` is set."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def _serialize_to_tensors(self) -> dict[str, Any]:
        assert self.open.wait(60)
        return {}

    def _restore_from_tensors(self, restored: Any) -> Any:
        return tf.no_op()

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        object_map[self] = self


def _rows_of(layer: TPUEmbedding) -> Array:
    rows: Array = next(table.numpy() for config, table in layer.embedding_tables.items() if config.name == "a")
    return rows


def test_an_asynchronous_save_has_the_history_of_its_rows(tmp_path: Path) -> None:
    """Steps while it is written are none of the checkpoint's."""
    layer, gate, ids = make(), _Gate(), {key: tf.constant([1, 2]) for key in ("one", "bag", "other")}
    step(layer, ids)
    checkpoint = tf.train.Checkpoint(gate=gate, layer=layer)
    options = tf.train.CheckpointOptions(enable_async=True)
    for _ in range(3):  # the first save takes another way than the later ones
        gate.open.clear()
        rows, stamps, history = _rows_of(layer), stamps_of(layer), history_of(layer)
        path = checkpoint.save(str(tmp_path / "c"), options)
        for _ in range(3):
            step(layer, ids)
        gate.open.set()
        checkpoint.sync()
        with open_checkpoint(path) as saved:
            assert saved.stamps["a"].history == history
            found = np.empty(ROWS["a"], np.int32)
            saved.stamps["a"].read(0, found)
        np.testing.assert_array_equal(found, stamps["a"])
        restored = make()
        tf.train.Checkpoint(layer=restored).restore(path).expect_partial()
        np.testing.assert_array_equal(_rows_of(restored), rows)
        assert int(restored.updates.numpy()) == history.updates


def test_tables_under_other_names_have_a_new_history(tmp_path: Path) -> None:
    tables = [TableConfig(7, 3, "a"), TableConfig(7, 3, "b")]
    layer = TPUEmbedding([FeatureConfig(table) for table in tables], "sgd", track_rows=True)
    path = tf.train.Checkpoint(layer=layer).write(str(tmp_path / "ckpt"))
    swapped = TPUEmbedding([FeatureConfig(table) for table in tables], "sgd", track_rows=True)
    swapped.restore_tables(path, {"a": "b", "b": "a"})
    assert not history_of(swapped).since(history_of(layer))


def test_a_checkpoint_has_the_stamps_beside_the_keys_of_tfrs(tmp_path: Path) -> None:
    keys = {}
    for track_rows in (False, True):
        path = tf.train.Checkpoint(layer=trained(track_rows)).write(str(tmp_path / f"{track_rows}"))
        keys[track_rows] = {key: tuple(shape) for key, shape in tf.train.list_variables(path)}
    own = {
        "layer/_row_stamps/a/.ATTRIBUTES/VARIABLE_VALUE": (11,),
        "layer/_row_stamps/b/.ATTRIBUTES/VARIABLE_VALUE": (7,),
        "layer/_row_stamps/.ATTRIBUTES/history": (),
    }
    assert keys[True] == keys[False] | own


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"spans": [], "updates": 0, "shapes": {}}',
        '{"spans": [["x", 3]], "updates": 2, "shapes": {}}',
        '{"spans": [["x", 0]], "updates": true, "shapes": {}}',
        '{"spans": [["x", 0]], "updates": 1, "shapes": {"a": [1]}}',
    ],
)
def test_a_text_that_is_no_history_is_refused(text: str) -> None:
    with refused(CheckpointCorruptError, match="checkpoint c"):
        RowHistory.from_json(text, "checkpoint c")


def test_damaged_stamps_are_refused(tmp_path: Path) -> None:
    path = tf.train.Checkpoint(layer=trained()).write(str(tmp_path / "ckpt"))
    data = tmp_path / "ckpt.data-00000-of-00001"
    with open_checkpoint(path) as checkpoint:
        entry = checkpoint.bundle.entries["layer/_row_stamps/a/.ATTRIBUTES/VARIABLE_VALUE"]  # type: ignore[attr-defined]
    damaged = bytearray(data.read_bytes())
    damaged[entry.offset] ^= 1
    data.write_bytes(damaged)
    with open_checkpoint(path) as checkpoint, refused(CheckpointCorruptError, match="_row_stamps/a"):
        checkpoint.stamps["a"].read(0, np.empty(1, np.int32))


def test_a_history_knows_the_points_that_it_passed() -> None:
    spans = (("x", 0), ("y", 5), ("z", 9))
    history = RowHistory(spans, 12)
    passed = {(n, u) for n, u in itertools.product(range(4), range(15)) if history.since(RowHistory(spans[:n], u))}
    assert passed == {*((1, u) for u in range(6)), *((2, u) for u in range(5, 10)), *((3, u) for u in range(9, 13))}
    assert not history.since(RowHistory((("x", 0), ("other", 5)), 6))
    assert RowHistory.from_json(history.to_json({"a": [1, 2]}), "c") == (history, {"a": [1, 2]})
    assert not RowHistory((("x", 0),), UNKNOWN + 1).since(RowHistory((("x", 0),), UNKNOWN))
    assert json.loads(history.to_json({}))["updates"] == 12


def test_replicated_tables_on_simulated_tpus_are_tracked() -> None:
    with tpuembed.testing.simulated_tpu(replicas=2, feature="UNSUPPORTED") as strategy:
        with strategy.scope():
            layer = TPUEmbedding(FeatureConfig(TableConfig(9, 4, "a")), "adam", track_rows=True)

        def replica_step(ids: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(ids))
            gradients = tape.gradient(loss, layer.trainable_variables)
            layer.apply_gradients(gradients)
            return gradients

        for ids in ([[1, 2], [2, 3]], [[5, 1], [7, 7]]):
            of_replicas = [tf.constant(part) for part in ids]
            strategy.run(
                replica_step,
                args=(
                    strategy.experimental_distribute_values_from_function(
                        lambda context, of_replicas=of_replicas: of_replicas[context.replica_id_in_sync_group]
                    ),
                ),
            )
        (state,) = layer.live_tables("test").states.values()
        for copy in getattr(state.stamps, "values", (state.stamps,)):
            np.testing.assert_array_equal(copy.numpy(), [0, 2, 1, 1, 0, 2, 0, 2, 0])
