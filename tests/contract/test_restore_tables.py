"""`layer.restore_tables`: rows of every format, by number and by name, and what it refuses."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.contract_refusals import assert_each_is_refused
from tests.support.goldens import FOLDER, read_golden
from tests.support.layer.restored import TRAINED_BY, Tables, assert_held, layer_for, updates
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, open_checkpoint
from tpuembed.errors import CheckpointMismatchError, CheckpointNotFoundError, TpuEmbedError

Array = np.ndarray[Any, Any]

GOLDENS = sorted(
    f"{folder.parent.name}/{folder.name}"
    for group in ("keras_rs", "orbax", "tensorflow", "tfrs", "tpu")
    for folder in (FOLDER / group).iterdir()
)

STEPS = {"tfrs/keras_a": 1, "tfrs/keras_f": 1, "keras_rs/checkpoint_": 1, "keras_rs/keras_": 1, "tfrs/schedule_": 5}
"""By the beginning of a golden's name: the steps that a Keras optimizer in it counted."""


def layer_of(tables: Mapping[str, tuple[int, int]], optimizer: Any = "sgd", **options: Any) -> TPUEmbedding:
    features = {f"f{n}": FeatureConfig(TableConfig(*shape, name)) for n, (name, shape) in enumerate(tables.items())}
    return TPUEmbedding(features, optimizer, **options)


def tables_of(layer: TPUEmbedding) -> dict[str, Array]:
    return {config.name: variable.numpy() for config, variable in layer.embedding_tables.items()}


def random(rows: int, dim: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, rows, dim]).normal(size=(rows, dim)).astype(np.float32)


@pytest.mark.parametrize("name", GOLDENS)
def test_rows_slots_and_steps_of_every_writer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpuembed.backends.table_rows.PIECE_BYTES", 100)  # some rows at a time
    golden = read_golden(name)
    slots = all(frozenset(slot for slot in table if slot) in TRAINED_BY for table in golden.tables.values())
    truth: Tables = golden.tables
    if not slots:
        truth = {table: {None: rows[None]} for table, rows in golden.tables.items()}
    layer = layer_for(truth)
    report = layer.restore_tables(golden.path, slots=slots, **golden.options)
    assert_held(layer, truth)
    assert [plan.table for plan in report.tables] == list(truth)
    counted = (steps for start, steps in STEPS.items() if name.startswith(start))
    steps = 0 if name == "tensorflow/own_layer" else next(counted, None) if slots else None
    assert report.updates == steps
    assert updates(layer) == (steps or 0)


def test_the_list_of_goldens_has_every_order_of_slots() -> None:
    """Else the test above would restore rows alone."""
    seen = {frozenset(s for s in table if s) for name in GOLDENS for table in read_golden(name).tables.values()}
    assert seen >= set(TRAINED_BY)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Array]]:
    """A checkpoint of variables without a layer, by TensorFlow."""
    rows = {"a": random(6, 3), "b": random(4, 2)}
    variables = {name: tf.Variable(values) for name, values in rows.items()}
    return tf.train.Checkpoint(**variables).write(str(tmp_path_factory.mktemp("plain") / "ckpt")), rows


def test_tables_of_other_names_are_mapped(plain: tuple[str, dict[str, Array]]) -> None:
    path, rows = plain
    layer = layer_of({"mine": (6, 3), "other": (4, 2)})
    other = tables_of(layer)["other"]
    layer.restore_tables(path, {"mine": "a"})
    np.testing.assert_array_equal(tables_of(layer)["mine"], rows["a"])
    np.testing.assert_array_equal(tables_of(layer)["other"], other)


def test_narrower_floats_are_exact(tmp_path: Path) -> None:
    for dtype in ("float16", "bfloat16"):
        rows = tf.cast(random(6, 3), dtype)
        path = tf.train.Checkpoint(t=tf.Variable(rows)).write(str(tmp_path / dtype))
        layer = layer_of({"t": (6, 3)})
        layer.restore_tables(path)
        np.testing.assert_array_equal(tables_of(layer)["t"], tf.cast(rows, tf.float32), err_msg=dtype)


@pytest.mark.parametrize(("rows", "way"), [(9, "grow"), (4, "shrink")])
def test_a_table_grows_and_shrinks(plain: tuple[str, dict[str, Array]], rows: int, way: str) -> None:
    """New rows have the values of the initializer, even if the layer was trained before."""
    path, truth = plain
    sevens = keras.initializers.Constant(7.0)
    layer = TPUEmbedding(FeatureConfig(TableConfig(rows, 3, "a", initializer=sevens)), "sgd")
    next(iter(layer.embedding_tables.values())).assign(np.full((rows, 3), 5.0))
    layer.restore_tables(path, ["a"], resize={"a": way})
    expected = np.full((rows, 3), 7.0, np.float32)
    expected[: min(rows, 6)] = truth["a"][:rows]
    np.testing.assert_array_equal(tables_of(layer)["a"], expected)


# ---- refusals


def test_a_disagreement_moves_nothing(plain: tuple[str, dict[str, Array]]) -> None:
    def restore(options: Mapping[str, Any] = MappingProxyType({}), **tables: tuple[int, int]) -> Callable[[], None]:
        layer = layer_of(tables)
        before = tables_of(layer)

        def act() -> None:
            try:
                layer.restore_tables(plain[0], **options)
            finally:
                for name, rows in before.items():
                    np.testing.assert_array_equal(tables_of(layer)[name], rows)

        return act

    cases = [
        (restore(a=(6, 3)), "has 'b', which layer .* does not have. The layer has 'a'"),
        (restore(a=(6, 3), b=(4, 2), c=(2, 2)), "has no table 'c' of layer .* has 'a', 'b'. Name the"),
        (restore(a=(6, 4), b=(4, 2)), "table 'a' has rows of 3 columns. Table 'a' .* has 4. .* dim=3"),
        (
            restore(a=(7, 3), b=(4, 2)),
            "has 6 rows. Table 'a' .* 7. .*vocabulary_size=6, .*{'a': 'grow'} to initialize rows 6 to 6",
        ),
        (restore({"resize": {"a": "grow"}}, a=(5, 3), b=(4, 2)), "'a'.* 6 .* 5.*grow"),
        (restore(a=(5, 3), b=(4, 2)), "has 6 rows. .* 5. .*resize={'a': 'shrink'} to drop its rows from 5 on"),
        (restore({"by": "name"}, a=(6, 3), b=(4, 2)), "vocabulary"),
    ]
    assert_each_is_refused(CheckpointMismatchError, cases)


def test_slots_that_the_checkpoint_lacks_are_asked_for(plain: tuple[str, dict[str, Array]]) -> None:
    layer = layer_of({"a": (6, 3), "b": (4, 2)}, "adagrad")
    with pytest.raises(CheckpointMismatchError, match=r"slots 'accumulators'.*slots=False"):
        layer.restore_tables(plain[0])
    layer.restore_tables(plain[0], slots=False)
    np.testing.assert_array_equal(tables_of(layer)["a"], plain[1]["a"])


def test_a_path_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="none"):
        layer_of({"a": (6, 3)}).restore_tables(tmp_path / "none")


# ---- counts of updates


def schedule() -> Any:
    return keras.optimizers.schedules.PiecewiseConstantDecay([0, 6], [1.0, 0.5, 0.25])


def one_update(layer: TPUEmbedding, row: int) -> Array:
    """Return how far the row moves under a gradient of 1."""
    (table,) = layer.embedding_tables.values()
    before = table.numpy()[row]
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer({"f0": tf.constant([row])})["f0"])
    layer.apply_gradients(tape.gradient(loss, layer.trainable_variables))
    return np.asarray(before - table.numpy()[row])


def embedding_model(**optimizers: tuple[Any, int]) -> Any:
    """Return a checkpoint's objects: a model with a Keras Embedding, and optimizers that made so many steps."""
    model = keras.Sequential([keras.Input((), dtype="int64"), keras.layers.Embedding(6, 2, name="t")])
    other = keras.Variable(np.ones(3, np.float32))
    for number, (optimizer, steps) in enumerate(optimizers.values()):
        for _ in range(steps):
            optimizer.apply(
                [tf.ones([3])] if number else [tf.ones([6, 2])], [other] if number else model.trainable_variables
            )
    return tf.train.Checkpoint(model=model, **{name: optimizer for name, (optimizer, _) in optimizers.items()})


def test_schedules_go_on_at_the_steps_of_the_optimizer_that_trained_the_tables(tmp_path: Path) -> None:
    path = embedding_model(optimizer=(keras.optimizers.SGD(0.1), 4)).write(str(tmp_path / "ckpt"))
    layer = layer_of({"t": (6, 2)}, keras.optimizers.SGD(schedule()))
    (source,) = open_checkpoint(path).tables()
    assert layer.restore_tables(path, {"t": source}).updates == 4
    np.testing.assert_allclose(one_update(layer, 1), 0.5, atol=1e-6)
    layer.restore_tables(path, {"t": source}, updates=9)
    np.testing.assert_allclose(one_update(layer, 1), 0.25, atol=1e-6)
    layer.restore_tables(path, {"t": source}, slots=False)
    assert int(layer.updates.numpy()) == 10


@pytest.mark.filterwarnings("ignore:a TableConfig without a name")
@pytest.mark.parametrize("rule", ["sgd", "adagrad"])
@pytest.mark.parametrize("by", ["restore_tables", "Checkpoint"])
def test_a_schedule_of_tfrs_goes_on(rule: str, by: str) -> None:
    """Its optimizer made five steps. Its learning rate is no variable in the file, because it is a schedule."""
    golden = read_golden(f"tfrs/schedule_{rule}")
    rates = keras.optimizers.schedules.PiecewiseConstantDecay([3, 5], [0.5, 0.25, 0.125])
    optimizer = {"sgd": keras.optimizers.SGD, "adagrad": keras.optimizers.Adagrad}[rule](rates)
    shapes = {name: arrays[None].shape for name, arrays in golden.tables.items()}
    tables = [TableConfig(rows, dim, name) for name, (rows, dim) in shapes.items()]
    layer = TPUEmbedding([FeatureConfig(table) for table in tables], optimizer)
    if by == "Checkpoint":
        tf.train.Checkpoint(model=layer).restore(str(golden.path)).expect_partial()
    else:
        layer.restore_tables(golden.path)
    (user,) = (variable for table, variable in layer.embedding_tables.items() if table.name == "user")
    sums = golden.tables["user"].get("accumulators", np.ones(shapes["user"]))[1].copy()
    for rate in (0.25, 0.125):
        before = user.numpy()[1]
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(rows) for rows in layer([tf.constant([1])] * 3)])
        layer.apply_gradients(tape.gradient(loss, layer.trainable_variables))
        sums += rule == "adagrad"
        np.testing.assert_allclose(before - user.numpy()[1], rate / np.sqrt(sums), rtol=1e-5)


@pytest.mark.parametrize("steps", [(), (1, 2)], ids=["none", "different"])
def test_a_schedule_without_a_count_in_the_file_is_warned_of(steps: tuple[int, ...], tmp_path: Path) -> None:
    optimizers = {f"optimizer{number}": (keras.optimizers.SGD(0.1), count) for number, count in enumerate(steps)}
    path = embedding_model(**optimizers).write(str(tmp_path / "ckpt"))
    (source,) = open_checkpoint(path).tables()
    layer = layer_of({"t": (6, 2)}, keras.optimizers.SGD(schedule()))
    with pytest.warns(UserWarning, match=r"schedule of 't' goes on at the layer's count\. Give .*updates=N"):
        layer.restore_tables(path, {"t": source})
    layer.restore_tables(path, {"t": source}, updates=3)
    assert int(layer.updates.numpy()) == 3
    for wrong in (-1, 1.5, True, "4"):
        with pytest.raises(TpuEmbedError, match="updates must be"):
            layer.restore_tables(path, {"t": source}, updates=wrong)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:a TableConfig without a name")
@pytest.mark.parametrize("rule", ["sgd", keras.optimizers.SGD(schedule())], ids=["number", "schedule"])
def test_a_checkpoint_whose_count_cannot_be_read_is_restored(rule: Any, tmp_path: Path) -> None:
    """In a graph of TensorFlow 1 the layer's count is not written. Only a schedule needs it, and warns."""
    golden = read_golden("tfrs/schedule_sgd")
    shapes = {name: arrays[None].shape for name, arrays in golden.tables.items()}

    def layer() -> TPUEmbedding:
        tables = [TableConfig(rows, dim, name) for name, (rows, dim) in shapes.items()]
        return TPUEmbedding([FeatureConfig(table) for table in tables], rule)

    graph, found = tf.Graph(), layer()
    with contextlib.ExitStack() as stack:
        if rule != "sgd":
            stack.enter_context(pytest.warns(UserWarning, match="cannot be read: .*Give .*updates=N"))
        with graph.as_default():
            inside = layer()
            tf.train.Checkpoint(model=inside).restore(str(golden.path)).expect_partial()
    tf.train.Checkpoint(model=found).restore(str(golden.path)).expect_partial()
    for table, variable in found.embedding_tables.items():
        np.testing.assert_array_equal(variable, golden.tables[table.name][None])
