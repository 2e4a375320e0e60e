"""Checkpoints of TensorFlow Recommenders and keras-rs, and of layers that place their tables otherwise, restored."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.goldens import read_golden
from tests.support.messages import refused
from tpuembed import (
    Adagrad,
    FeatureConfig,
    TableConfig,
    TPUEmbedding,
    Vocabulary,
    open_checkpoint,
)
from tpuembed.compat import keras_rs, tfrs
from tpuembed.errors import CheckpointMismatchError, UnknownTableError
from tpuembed.testing import simulated_tpu

pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'warn' function is deprecated:DeprecationWarning"),
]  # TensorFlow's logging

Array = np.ndarray[Any, Any]
E = tf.tpu.experimental.embedding
BATCH = 16


def held(*layers: TPUEmbedding | None) -> dict[str, Array]:
    """Every table and slot, by its name in checkpoints."""
    found = {
        name: variable for layer in layers if layer is not None for name, variable in layer.named_variables().items()
    }
    return {name: variable.numpy() for name, variable in found.items()}


def parts(layer: Any) -> dict[str, Array]:
    return held(*(layer.part(place) for place in layer.PLACES))


def assert_same(found: Mapping[str, Array], truth: Mapping[str, Array]) -> None:
    assert found.keys() == truth.keys()
    for name, rows in truth.items():
        np.testing.assert_array_equal(found[name], rows, err_msg=name)


# ---- TensorFlow Recommenders


def features_of_partial_model() -> dict[str, Any]:
    """As generate_tfrs_partial.py has them."""
    country, kind = E.TableConfig(5, 2, name="country"), E.TableConfig(7, 3, name="kind")
    video, user = E.TableConfig(11, 4, name="video"), E.TableConfig(9, 3, name="user", combiner="sum")
    tables = {"born": country, "fav": video, "kind": kind, "lives": country, "user": user}
    return {name: E.FeatureConfig(table) for name, table in tables.items()}


SOURCES = {"country": "born", "kind": "kind", "user": "user", "video": "video"}
"""Table -> what the checkpoint calls it."""


class Model(keras.Model):
    """The model that wrote tfrs/partial_model, its imports changed."""

    def __init__(self, threshold: int | None, optimizer: Any = "adagrad") -> None:
        super().__init__()
        self.embedding_layer = tfrs.PartialTPUEmbedding(
            features_of_partial_model(), optimizer, size_threshold=threshold
        )
        self.logits = keras.layers.Dense(1)

    def call(self, ids: Any) -> Any:
        return self.logits(tf.concat(tf.nest.flatten(self.embedding_layer(ids)), axis=1))


def truth_of_partial_model(layer: Any) -> dict[str, Array]:
    """Tables, and the slots of those that are large in `layer`."""
    golden, large = read_golden("tfrs/partial_model"), layer.part("tpu_embedding")
    trained = {config.name for config in large.embedding_tables} if large is not None else set()
    truth: dict[str, Array] = {}
    for table, source in SOURCES.items():
        truth[table] = golden.tables[source][None]
        if table in trained:
            truth[f"{table}/accumulators"] = golden.tables[source]["accumulators"]
    return truth


@pytest.mark.parametrize("threshold", [7, 6, 9, 0, None])
@pytest.mark.parametrize("by", ["tf.train.Checkpoint", "restore_tables"])
def test_a_trained_partial_model_of_tfrs_is_restored(threshold: int | None, by: str) -> None:
    """At TFRS' own threshold and at others, at which other tables are small; with the slots that its optimizer keeps."""
    path, model = read_golden("tfrs/partial_model").path, Model(threshold)
    layer = model.embedding_layer
    if by == "restore_tables":
        report = layer.restore_tables(path, slots=threshold == 0)
        assert {plan.table: plan.source for plan in report.tables} == SOURCES
        truth = {
            name: rows for name, rows in truth_of_partial_model(layer).items() if threshold == 0 or "/" not in name
        }
        assert_same({name: rows for name, rows in parts(layer).items() if name in truth}, truth)
        return
    tf.train.Checkpoint(model=model).restore(str(path)).expect_partial()
    assert_same(parts(layer), truth_of_partial_model(layer))


@pytest.mark.filterwarnings("ignore:a TableConfig without a name")
def test_a_bare_partial_layer_of_tfrs_is_restored() -> None:
    golden = read_golden("tfrs/partial")
    tables = [E.TableConfig(11, 4, name="video/table.v1"), E.TableConfig(7, 3, name="user"), E.TableConfig(5, 2)]
    features = dict(zip(("fav", "friends", "tags", "watched"), [*tables, tables[0]], strict=True))
    layer = tfrs.PartialTPUEmbedding(
        {name: E.FeatureConfig(table) for name, table in features.items()}, E.Adam(0.1), size_threshold=7
    )
    tf.train.Checkpoint(model=layer).read(str(golden.path)).expect_partial()
    video = golden.tables["video/table.v1"]
    truth = {
        "video/table.v1": video[None],
        "user": golden.tables["friends"][None],
        "table_2": golden.tables["tags"][None],
    }
    slots = {f"video/table.v1/{slot}": video[slot] for slot in ("momenta", "velocities")}
    assert_same(parts(layer), truth | slots)


@pytest.mark.parametrize("name", ["keras_adagrad", "keras_adam", "keras_ftrl"])
@pytest.mark.filterwarnings("ignore:a TableConfig without a name")
def test_slots_that_a_keras_optimizer_kept_are_restored(name: str) -> None:
    """TensorFlow finds them beside the optimizer, and leaves the layer's as they were."""
    golden = read_golden(f"tfrs/{name}")
    features = [
        E.FeatureConfig(E.TableConfig(11, 4, name="video/table.v1")),
        E.FeatureConfig(E.TableConfig(7, 3, name="user")),
    ]
    features.append(E.FeatureConfig(E.TableConfig(5, 2)))
    layer = TPUEmbedding(features, name.removeprefix("keras_"))
    tf.train.Checkpoint(model=layer).read(str(golden.path)).expect_partial()
    truth = {
        table if slot is None else f"{table}/{slot}": rows
        for table, arrays in golden.tables.items()
        for slot, rows in arrays.items()
    }
    assert_same(held(layer), truth)


@pytest.mark.filterwarnings("ignore:a TableConfig without a name")
def test_slots_of_another_keras_optimizer_are_refused() -> None:
    path = str(read_golden("tfrs/keras_adam").path)
    layer = TPUEmbedding({"user": FeatureConfig(TableConfig(7, 3, "user"))}, "adagrad")
    with refused(CheckpointMismatchError, match="'momenta'"):
        tf.train.Checkpoint(model=layer).read(path)
    bare = TPUEmbedding({"user": FeatureConfig(TableConfig(7, 3, "user"))})
    tf.train.Checkpoint(model=bare).read(path).expect_partial()
    assert_same(held(bare), {"user": read_golden("tfrs/keras_adam").tables["user"][None]})


# ---- other thresholds


def partial(threshold: int | None, optimizer: Any = "adam") -> Any:
    tables = {name: TableConfig(rows, 8, f"{name}.v/1") for name, rows in (("a", 10), ("b", 20), ("c", 30))}
    features = {name: FeatureConfig(table) for name, table in tables.items()}
    return tfrs.PartialTPUEmbedding(features, optimizer, size_threshold=threshold)


def randomise(layer: Any) -> None:
    random = np.random.default_rng(5)
    for place in layer.PLACES:
        for variable in {} if layer.part(place) is None else layer.part(place).named_variables().values():
            variable.assign(random.normal(size=variable.shape).astype(np.float32))


@pytest.mark.parametrize(("before", "after"), [(15, 25), (15, None), (0, 15), (0, None)])
def test_fewer_large_tables_than_were_saved(tmp_path: Path, before: int | None, after: int | None) -> None:
    old, new = partial(before), partial(after)
    randomise(old)
    path = tf.train.Checkpoint(model=old).write(str(tmp_path / "ckpt"))
    tf.train.Checkpoint(model=new).read(path).expect_partial()
    truth = parts(old)
    assert_same(parts(new), {name: truth[name] for name in parts(new)})


def test_more_large_tables_than_were_saved_begin_with_new_slots(tmp_path: Path) -> None:
    old, new = partial(25), partial(15)
    randomise(old)
    path = tf.train.Checkpoint(model=old).write(str(tmp_path / "ckpt"))
    with pytest.warns(
        UserWarning, match=r"'b\.v/1' has no slots\. The slots of table 'b\.v/1' of layer .* are not changed"
    ):
        tf.train.Checkpoint(model=new).read(path).expect_partial()
    zeros = np.zeros((20, 8), np.float32)
    assert_same(parts(new), parts(old) | {"b.v/1/momenta": zeros, "b.v/1/velocities": zeros})


# ---- keras-rs


def configs(**fields: Any) -> dict[str, Any]:
    tables = {
        name: keras_rs.TableConfig(f"{name}_table", 40, 8, placement=place, **fields)
        for name, place in (("u", "auto"), ("m", "auto"), ("d", "default_device"))
    }
    return {name: keras_rs.FeatureConfig(name, table, (BATCH,), (BATCH, 8)) for name, table in tables.items()}


class Ratings(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.lookup = keras_rs.DistributedEmbedding(configs())
        self.dense = keras.layers.Dense(1)

    def call(self, ids: Any) -> Any:
        return self.dense(keras.ops.concatenate(keras.tree.flatten(self.lookup(ids)), axis=1))


IDS = {name: tf.range(BATCH // 2) * step for name, step in (("d", 1), ("m", 2), ("u", 0))}
"""Of one of two replicas."""


def train(strategy: Any, steps: int) -> Ratings:
    with strategy.scope():
        model = Ratings()

    def step(ids: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(ids) ** 2)
        weights = model.lookup.trainable_variables
        model.lookup.apply_gradients(tape.gradient(loss, weights))

    for _ in range(steps):
        strategy.run(step, args=(IDS,))
    return model


def save_and_load(path: Path, how: str, save: Any = None, load: Any = None) -> None:
    if save is not None:
        tf.train.Checkpoint(model=save).write(f"{path}/c") if how == "tf" else save.save_weights(path / "w.weights.h5")
    if load is not None:
        if how == "tf":
            tf.train.Checkpoint(model=load).read(f"{path}/c").expect_partial()
        else:
            load.load_weights(path / "w.weights.h5")


@pytest.mark.parametrize("how", ["tf", "weights"])
@pytest.mark.parametrize("direction", ["to the host", "to SparseCores"])
@pytest.mark.sampled(2)
def test_tables_move_between_placements(tmp_path: Path, how: str, direction: str) -> None:
    """Under SparseCores two of the tables are the hardware's; elsewhere all lie beside the model."""
    host = tf.distribute.get_strategy()
    with simulated_tpu(replicas=2) as tpu:
        first, second = (tpu, host) if direction == "to the host" else (host, tpu)
        saved, other = train(first, 2), train(second, 1)
        truth, kernel = parts(saved.lookup), saved.dense.kernel.numpy()
        save_and_load(tmp_path, how, save=saved)
        save_and_load(tmp_path, how, load=other)
        assert_same(parts(other.lookup), truth)
        np.testing.assert_array_equal(other.dense.kernel.numpy(), kernel)
        layers = [layer for place in other.lookup.PLACES if (layer := other.lookup.part(place)) is not None]
        counts = {int(layer.updates.numpy()) for layer in layers}
        assert counts == {2}
    with open_checkpoint(tmp_path / ("c" if how == "tf" else "w.weights.h5")) as checkpoint:
        for name, info in checkpoint.tables().items():
            np.testing.assert_array_equal(checkpoint.read(name), truth[name])
            assert info.slots == ("momenta", "velocities")


@pytest.mark.parametrize("name", ["checkpoint_adam", "keras_adam", "checkpoint_ftrl", "weights_h5"])
def test_checkpoints_of_keras_rs_are_restored(name: str) -> None:
    golden = read_golden(f"keras_rs/{name}")
    kind, slots = name.split("_")[-1], name != "weights_h5"
    features = {}
    for number, (table, arrays) in enumerate(golden.tables.items()):
        rows, dim = arrays[None].shape
        config = keras_rs.TableConfig(table, rows, dim, optimizer=kind if slots else "sgd")
        features[str(number)] = keras_rs.FeatureConfig("f", config, (2,), (2, dim))
    layer = keras_rs.DistributedEmbedding(features)
    layer.restore_tables(golden.path, slots=slots)
    truth = {
        table if slot is None else f"{table}/{slot}": rows
        for table, arrays in golden.tables.items()
        for slot, rows in arrays.items()
        if slots or slot is None
    }
    assert_same(parts(layer), truth)


# ---- what is refused leaves all places as they were


def test_a_refused_restore_writes_no_place(tmp_path: Path) -> None:
    with simulated_tpu(replicas=2) as tpu:
        path = tf.train.Checkpoint(model=train(tpu, 1)).write(str(tmp_path / "c"))
    wider = configs()
    wider["d"] = keras_rs.FeatureConfig("d", keras_rs.TableConfig("d_table", 40, 9), (BATCH,), (BATCH, 9))
    with simulated_tpu() as tpu, tpu.scope():
        layer = keras_rs.DistributedEmbedding(wider)
        before = parts(layer)
        with refused(CheckpointMismatchError, match="table 'd_table'"):
            layer.restore_tables(path)
        with refused(UnknownTableError, match="table 'x_table'"):
            layer.restore_tables(path, ["u_table", "x_table"])
        assert_same(parts(layer), before)


def test_rows_are_assigned_where_their_table_is() -> None:
    layer = partial(15)
    rows = np.full((2, 8), 7, np.float32)
    for table, slot in (("a.v/1", None), ("c.v/1", None), ("c.v/1", "momenta")):
        layer.assign_rows(table, 3, rows, slot)
        np.testing.assert_array_equal(parts(layer)[table if slot is None else f"{table}/{slot}"][3:5], rows)
    with refused(UnknownTableError, match="table 'd'"):
        layer.assign_rows("d", 0, rows)


def test_weight_files_of_other_tables_are_refused(tmp_path: Path) -> None:
    for rows in (9, 8):
        table = keras_rs.TableConfig("t", rows, 2, optimizer=Adagrad())
        model = keras.Sequential([keras_rs.DistributedEmbedding(keras_rs.FeatureConfig("f", table, (2,), (2, 2)))])
        model(np.array([0, 1]))
        if rows == 9:
            model.save_weights(tmp_path / "m.weights.h5")
    before = parts(model.layers[0])
    with pytest.raises(ValueError, match=r"the file holds .*'t': \(9, 2\).* The layer .*\(8, 2\).*restore_tables"):
        model.load_weights(tmp_path / "m.weights.h5")
    assert_same(parts(model.layers[0]), before)


@pytest.mark.parametrize("other", [35, None, -1])
def test_names_saved_with_another_threshold_are_refused_before_a_row_is_written(
    other: int | None, tmp_path: Path
) -> None:
    """TensorFlow failed with NotFoundError after rows were written. `restore_tables` restores them."""

    def make(threshold: int | None) -> Any:
        features = {
            name: FeatureConfig(TableConfig(rows, 2, name), vocabulary=Vocabulary(["x", "y"], oov_buckets=1))
            for name, rows in (("a", 20), ("b", 30), ("c", 40))
        }
        return tfrs.PartialTPUEmbedding(features, "sgd", size_threshold=threshold)

    trained, layer = make(25), make(other)
    path = tf.train.Checkpoint(layer=trained).write(str(tmp_path / "ckpt"))
    before = {name: tf.convert_to_tensor(rows).numpy() for name, rows in layer.table_variables().items()}
    with refused(CheckpointMismatchError):
        tf.train.Checkpoint(layer=layer).restore(path)
    for name, rows in layer.table_variables().items():
        np.testing.assert_array_equal(tf.convert_to_tensor(rows), before[name])
    layer.restore_tables(path)
    for name, rows in layer.table_variables().items():
        np.testing.assert_array_equal(tf.convert_to_tensor(rows), tf.convert_to_tensor(trained.table_variables()[name]))
    tf.train.Checkpoint(layer=make(25)).restore(path).expect_partial()
