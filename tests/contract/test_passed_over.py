"""Restores by `tf.train.Checkpoint` that pass over tables: errors before the old rows are used, and only then."""

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.goldens import read_golden
from tpuembed import TPUEmbedding, export_saved_model
from tpuembed.compat import tfrs
from tpuembed.errors import CheckpointMismatchError, UnknownTableError
from tpuembed.testing import simulated_tpu

E = tf.tpu.experimental.embedding


def whole_layer() -> TPUEmbedding:
    """The layer that wrote tests/golden/tfrs/keras_model, without the tables of other kinds."""
    ones = tf.constant_initializer(1.0)
    user = E.TableConfig(7, 3, ones, name="user", combiner="sqrtn")
    return TPUEmbedding({"ids": E.FeatureConfig(user)}, E.Adagrad(0.1), name="rows")


def partial_layer() -> Any:
    """The one that wrote tests/golden/tfrs/partial_model, with one of its large tables and one of its small ones."""
    user, kind = E.TableConfig(9, 3, name="user", combiner="sum"), E.TableConfig(7, 3, name="kind")
    return tfrs.PartialTPUEmbedding(
        {"ids": E.FeatureConfig(user), "kind": E.FeatureConfig(kind)}, E.Adagrad(0.1), size_threshold=7, name="rows"
    )


def functional(layer: Any) -> keras.Model:
    inputs = {name: keras.Input((), dtype="int32", name=name) for name in ("ids", "kind")}
    rows = layer(inputs if isinstance(layer, tfrs.PartialTPUEmbedding) else {"ids": inputs["ids"]})["ids"]
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()([rows, inputs["kind"][:, None]])))


class Attributes(keras.Model):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.rows, self.score = layer, keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        ids = inputs if isinstance(self.rows, tfrs.PartialTPUEmbedding) else {"ids": inputs["ids"]}
        return self.score(self.rows(ids)["ids"])


IDS = {"ids": np.array([0, 3, 6]), "kind": np.array([0, 1, 2])}
PASSED_OVER = "has not restored its tables .* from .* have other places in the model, or .* Tables of the checkpoint: .*user.* Call"


@pytest.mark.parametrize(("layer_of", "golden"), [(whole_layer, "keras_model"), (partial_layer, "partial_model")])
@pytest.mark.parametrize("model_of", [functional, Attributes, lambda layer: keras.Sequential([functional(layer)])])
@pytest.mark.parametrize("how", ["call", "predict", "fit", "function"])
def test_a_restore_that_passes_over_the_tables_is_an_error_of_the_next_call(
    layer_of: Any, golden: str, model_of: Any, how: str
) -> None:
    layer, file = layer_of(), read_golden(f"tfrs/{golden}")
    model, path = model_of(layer), str(file.path)
    model.compile("sgd", "mse")
    tensors = {name: tf.constant(ids) for name, ids in IDS.items()}
    calls: dict[str, Any] = {
        "call": lambda: model(tensors),
        "predict": lambda: model.predict(IDS, verbose=0),
        "fit": lambda: model.fit(IDS, np.zeros([3, 1]), verbose=0),
        "function": lambda: tf.function(lambda ids: model(ids))(tensors),
    }
    model(tensors)
    if golden == "keras_model":  # Keras 2 saved it by save_weights
        tf.train.Checkpoint(root=model).read(path).expect_partial()
    else:
        tf.train.Checkpoint(model=model).restore(path).expect_partial()
    for _ in range(2):  # also if a notebook runs the cell again
        with pytest.raises(CheckpointMismatchError, match=PASSED_OVER):
            calls[how]()
    layer.restore_tables(path, ["user", "kind"] if "partial" in golden else ["user"], slots=False)
    expected = file.tables["user"][None][IDS["ids"]]
    np.testing.assert_array_equal(layer(tensors if "partial" in golden else {"ids": tensors["ids"]})["ids"], expected)
    calls[how]()


@pytest.mark.parametrize("when", ["before its layers", "after"])
def test_a_restore_that_finds_the_tables_is_none(when: str, tmp_path: Path) -> None:
    """Also if it finds only those of a layer that the model has beside new ones."""

    class Late(keras.Model):
        def build(self, _: Any) -> None:
            self.new, self.old = TPUEmbedding({"ids": E.FeatureConfig(E.TableConfig(7, 3, name="new"))}), whole_layer()

        def call(self, ids: Any) -> Any:
            return self.old({"ids": ids}), self.new({"ids": ids})

    saved = tf.Module()
    saved.old = whole_layer()
    saved.old.assign_rows("user", 0, np.full([7, 3], 7, np.float32))
    path = tf.train.Checkpoint(model=saved).write(str(tmp_path / "ckpt"))
    model = Late()
    if when == "after":
        model(tf.constant([2]))
    tf.train.Checkpoint(model=model).restore(path).expect_partial()
    np.testing.assert_array_equal(model(tf.constant([2]))[0]["ids"], np.full([1, 3], 7))


def test_dense_layers_alone_are_restored_for_new_tables(tmp_path: Path) -> None:
    """From a checkpoint without tables, or by the objects that the caller names."""
    old, ids = Attributes(whole_layer()), {name: tf.constant(ids) for name, ids in IDS.items()}
    old(ids)
    old.score.set_weights([np.full([3, 1], 3, np.float32), np.zeros(1, np.float32)])
    whole = tf.train.Checkpoint(model=old).write(str(tmp_path / "whole"))
    dense = tf.train.Checkpoint(score=old.score).write(str(tmp_path / "dense"))
    for part_of_model, path in ((False, dense), (True, whole)):
        model = Attributes(whole_layer())
        model(ids)
        parts = {"score": model.score, "rows": model.rows}
        if part_of_model:
            parts = {"model": tf.train.Checkpoint(score=model.score)}
        tf.train.Checkpoint(**parts).restore(path).expect_partial()
        np.testing.assert_array_equal(model(ids), np.full([3, 1], 9))


@pytest.mark.parametrize("how", ["predict", "evaluate", "fit"])
@pytest.mark.parametrize("model_of", [functional, Attributes])
def test_a_model_that_was_traced_before_the_restore(model_of: Any, how: str, tmp_path: Path) -> None:
    """Also if it is restored twice, or in the callback of a step. The right restore lets it go on without a new trace."""
    old, model = model_of(whole_layer()), model_of(whole_layer())
    calls: dict[str, Callable[[], Any]] = {
        "predict": lambda: model.predict(IDS, verbose=0),
        "evaluate": lambda: model.evaluate(IDS, np.zeros([3, 1]), verbose=0),
        "fit": lambda: model.fit(IDS, np.zeros([3, 1]), verbose=0),
    }
    old({name: tf.constant(ids) for name, ids in IDS.items()})
    model.compile("sgd", "mse")
    calls[how]()
    name = {"predict": "predict_function", "evaluate": "test_function", "fit": "train_function"}[how]
    traced = getattr(model, name)
    wrong = tf.train.Checkpoint(other=old).write(str(tmp_path / "wrong"))
    right = tf.train.Checkpoint(model=old).write(str(tmp_path / "right"))
    for _ in range(2):
        tf.train.Checkpoint(model=model).read(wrong).expect_partial()
        for _ in range(2):
            with pytest.raises(CheckpointMismatchError, match="/wrong, where"):
                calls[how]()
    tf.train.Checkpoint(model=model).read(right).expect_partial()
    calls[how]()
    assert getattr(model, name) is traced
    read = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda *_, **__: tf.train.Checkpoint(model=model).read(right).expect_partial()
    )
    model.fit(IDS, np.zeros([3, 1]), verbose=0, callbacks=[read])


class Layers(keras.Model):
    """A layer with one table for each attribute."""

    def __init__(self, **tables: str) -> None:
        super().__init__()
        self.names, self.score = list(tables), keras.layers.Dense(1)
        for name, table in tables.items():
            setattr(self, name, TPUEmbedding(E.FeatureConfig(E.TableConfig(9, 2, name=table)), "sgd", name=name))

    def call(self, ids: Any) -> Any:
        return self.score(tf.add_n([getattr(self, name)(ids) for name in self.names]))

    def scores(self, ids: Any) -> Any:
        return getattr(self, self.names[0])(ids)


def written(folder: Path, **tables: str) -> str:
    model = Layers(**tables)
    model(tf.constant([1]))
    for number, (name, table) in enumerate(tables.items(), 5):
        getattr(model, name).assign_rows(table, 0, np.full([9, 2], number, np.float32))
    return str(tf.train.Checkpoint(model=model).write(str(folder / "-".join(tables) / "ckpt")))


def test_the_last_restore_counts(tmp_path: Path) -> None:
    """Also if the file before it was a wrong one, which left its mark on the model."""
    wrong, right = written(tmp_path, other="users"), written(tmp_path, first="users")
    model = Layers(first="users")
    for path in (wrong, right):
        tf.train.Checkpoint(model=model).restore(path).expect_partial()
    np.testing.assert_array_equal(model.scores(tf.constant([2])), [[5, 5]])
    model(tf.constant([2]))
    tf.train.Checkpoint(model=model).restore(wrong).expect_partial()
    with pytest.raises(CheckpointMismatchError, match=r"other/ckpt"):
        model(tf.constant([2]))


def test_a_layer_that_is_gone_and_a_new_one(tmp_path: Path) -> None:
    """Nothing says whether the new one has its rows under another name."""
    path = written(tmp_path, first="users", second="ads")
    model = Layers(first="users", third="items")
    tf.train.Checkpoint(model=model).restore(path).expect_partial()
    with pytest.raises(CheckpointMismatchError, match=r"tables items from .* Tables of the checkpoint: ads\."):
        model(tf.constant([2]))
    model = Layers(first="users", third="items")
    chosen = tf.train.Checkpoint(model=tf.train.Checkpoint(first=model.first))
    chosen.restore(path).expect_partial()
    model(tf.constant([2]))
    np.testing.assert_array_equal(model.scores(tf.constant([2])), [[5, 5]])


class Two(keras.Model):
    """A layer with two tables."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        tables = {"a": E.TableConfig(9, 2, name=first), "b": E.TableConfig(9, 2, name=second)}
        self.rows = TPUEmbedding(
            {name: E.FeatureConfig(table) for name, table in tables.items()}, "adagrad", name="rows"
        )

    def call(self, ids: Any) -> Any:
        return self.rows({"a": ids, "b": ids})

    def get_config(self) -> dict[str, Any]:
        return {}


USES: dict[str, Callable[[Any, Path], Any]] = {
    "call": lambda model, _: model(tf.constant([2])),
    "weights": lambda model, path: model.save_weights(path.with_suffix(".weights.h5")),
    "checkpoint": lambda model, path: tf.train.Checkpoint(model=model).write(str(path)),
    "export": lambda model, path: export_saved_model((model, tf.TensorSpec([None], tf.int32, name="ids")), path),
}
OF_A_BUILT_MODEL: dict[str, Callable[[Any, Path], Any]] = {
    "layer": lambda model, _: model.rows({"a": tf.constant([2]), "b": tf.constant([2])}),
    "keras": lambda model, path: model.save(path.with_suffix(".keras")),
    "lookups": lambda model, path: export_saved_model(model.rows, path),
}


@pytest.mark.parametrize("name", [*USES, *OF_A_BUILT_MODEL])
def test_one_table_of_another_name_among_those_of_a_layer(name: str, tmp_path: Path) -> None:
    """Its rows are neither looked up nor saved, because they are those that the layer began with."""
    old, new, use = Two("users", "ads"), Two("users", "banners"), (USES | OF_A_BUILT_MODEL)[name]
    rows = {name: np.asarray(each) for name, each in old(tf.constant([2])).items()}
    new(tf.constant([2]))
    path = tf.train.Checkpoint(model=old).write(str(tmp_path / "ckpt"))
    tf.train.Checkpoint(model=new).restore(path).expect_partial()
    with pytest.raises(CheckpointMismatchError, match=r"tables banners from .* Tables of the checkpoint: ads\."):
        use(new, tmp_path / "out")
    new.rows.restore_tables(path, tables={"users": "users", "banners": "ads"})
    use(new, tmp_path / "out")
    for name, each in new(tf.constant([2])).items():
        np.testing.assert_array_equal(each, rows[name])


def test_a_table_of_a_model_that_is_gone_was_restored(tmp_path: Path) -> None:
    saved, model, other = (Layers(first="users"), Layers(first="users", third="items"), Layers(first="ads"))
    beside = Layers(first="ads")
    for each in (saved, model, other, beside):
        each(tf.constant([2]))
    path = tf.train.Checkpoint(a=saved, b=other).write(str(tmp_path / "ckpt"))
    tf.train.Checkpoint(a=model, b=beside).read(path).expect_partial()
    del beside
    gc.collect()
    model(tf.constant([2]))


@pytest.mark.parametrize(
    ("saved", "tables"),
    [
        ({"first": "users"}, {"first": "members"}),
        ({"first": "users", "second": "ads"}, {"first": "ads", "second": "users"}),
        ({"first": "users", "second": "ads"}, {"first": "members", "second": "ads"}),
    ],
)
@pytest.mark.parametrize("method", ["__call__", "scores"])
def test_tables_of_other_names_at_their_place_are_passed_over(
    saved: dict[str, str], tables: dict[str, str], method: str, tmp_path: Path
) -> None:
    """TensorFlow finds the layer, and none of its tables."""
    path, model = written(tmp_path, **saved), Layers(**tables)
    tf.train.Checkpoint(model=model).restore(path).expect_partial()
    with pytest.raises(CheckpointMismatchError, match=r"Tables of the checkpoint: .*users"):
        getattr(model, method)(tf.constant([2]))


@pytest.mark.parametrize(
    ("saved", "restored"),
    [("root", "model"), ("model", "root"), ("model", "other"), ("root", "inside")],
)
@pytest.mark.parametrize("is_held", [False, True])
def test_no_place_of_the_checkpoint_is_one_of_the_model(
    saved: str, restored: str, is_held: bool, tmp_path: Path
) -> None:
    def checkpoint(model: Any, form: str) -> Any:
        if form == "root":
            return tf.train.Checkpoint(model)
        return tf.train.Checkpoint(**{form: [model] if form == "inside" else model})

    models = [Layers(first="users"), Layers(first="users")]
    trained, scores = [model(tf.constant([2])) for model in models]
    assert not np.array_equal(trained, scores)
    path = checkpoint(models[0], saved).write(str(tmp_path / "ckpt"))
    restoring = checkpoint(models[1], restored)
    restoring.restore(path).expect_partial()
    if not is_held:
        del restoring
    for _ in range(2):
        with pytest.raises(CheckpointMismatchError, match=r"Tables of the checkpoint: users\. Call"):
            models[1](tf.constant([2]))
    models[1].first.restore_tables(path)
    models[1].score.set_weights(models[0].score.get_weights())
    np.testing.assert_array_equal(models[1](tf.constant([2])), trained)


def test_a_checkpoint_of_one_model_restores_beside_a_new_one(tmp_path: Path) -> None:
    old, new, made = Layers(first="users"), Layers(first="users"), Layers(first="users")
    wanted, started = made(tf.constant([2])), new(tf.constant([2]))
    old(tf.constant([2]))
    path = tf.train.Checkpoint(old=made).write(str(tmp_path / "ckpt"))
    tf.train.Checkpoint(old=old, new=new).restore(path).expect_partial()
    np.testing.assert_array_equal(old(tf.constant([2])), wanted)
    np.testing.assert_array_equal(new(tf.constant([2])), started)


def test_rows_that_are_refused_were_not_given(tmp_path: Path) -> None:
    model, path = Layers(first="users"), written(tmp_path, other="users")
    tf.train.Checkpoint(model=model).restore(path).expect_partial()
    with pytest.raises(UnknownTableError):
        model.first.restore_tables(path, {"users": "absent"})
    with pytest.raises(CheckpointMismatchError, match="has not restored its tables"):
        model(tf.constant([2]))


ROWS = np.full([9, 2], 3, np.float32)


def other_layers() -> Layers:
    other = Layers(first="users")
    other(tf.constant([1]))
    return other


def loaded(model: Layers, folder: Path) -> None:
    other_layers().save_weights(folder / "other.weights.h5")
    model.load_weights(folder / "other.weights.h5")


@pytest.mark.parametrize(
    ("give", "settles"),
    [
        (lambda model, _: model.first.assign_rows("users", 0, ROWS), True),
        (lambda model, _: model.first.update_embedding_table("users", ROWS), True),
        (loaded, True),
        (lambda model, _: model.set_weights(other_layers().get_weights()), True),
        (
            lambda model, _: [model.first.assign_rows("users", start, ROWS[start : start + 4]) for start in (0, 4, 8)],
            True,
        ),
        (lambda model, folder: model.first.restore_tables(written(folder, third="users")), True),
        (lambda model, _: model.first.assign_rows("users", 1, ROWS[1:]), False),
    ],
    ids=["rows", "table", "file", "weights", "pieces", "restore", "some rows"],
)
def test_rows_given_before_a_restore_do_not_settle_it(give: Any, settles: bool, tmp_path: Path) -> None:
    """The restore was asked for later, and the rows of its file are nowhere. Given after it, they settle it if they are all."""
    model, path = Layers(first="users"), written(tmp_path, other="users")
    model(tf.constant([2]))
    give(model, tmp_path)
    tf.train.Checkpoint(model=model).restore(path).expect_partial()
    for _ in range(2):
        with pytest.raises(CheckpointMismatchError, match=r"other/ckpt"):
            model(tf.constant([2]))
    give(model, tmp_path)
    if settles:
        model(tf.constant([2]))
        return
    with pytest.raises(CheckpointMismatchError, match=r"other/ckpt"):
        model(tf.constant([2]))


def partial_of(small: str, large: str, threshold: int | None) -> Any:
    tables = {"small": E.TableConfig(5, 2, name=small), "large": E.TableConfig(9, 2, name=large)}
    features = {name: E.FeatureConfig(table) for name, table in tables.items()}
    return tfrs.PartialTPUEmbedding(features, E.Adagrad(0.1), size_threshold=threshold, name="rows")


@pytest.mark.filterwarnings("ignore:.*are not changed:UserWarning")  # a small table has no slots
@pytest.mark.parametrize(("small", "large"), [("kind", "members"), ("sort", "users")])
@pytest.mark.parametrize(("before", "after"), [(7, None), (None, 7), (0, None), (0, 7), (7, 0), (None, 0)])
def test_a_partial_layer_with_a_renamed_table_and_another_threshold(
    small: str, large: str, before: int | None, after: int | None, tmp_path: Path
) -> None:
    old, new = partial_of("kind", "users", before), partial_of(small, large, after)
    ids = {"small": tf.constant([1]), "large": tf.constant([2])}
    wanted, _ = old(ids), new(ids)
    path = tf.train.Checkpoint(model=old).write(str(tmp_path / "ckpt"))
    tf.train.Checkpoint(model=new).read(path).expect_partial()
    renamed = {small: "kind", large: "users"}
    with pytest.raises(
        CheckpointMismatchError, match=f"has not restored its tables {'sort|members'} from .*: .*{'kind|users'}"
    ):
        new(ids)
    new.restore_tables(path, tables=renamed, slots=False)
    for name, rows in new(ids).items():
        np.testing.assert_array_equal(rows, wanted[name])


def test_a_partial_layer_with_another_threshold_and_a_new_table(tmp_path: Path) -> None:
    """Nothing is left over of the checkpoint."""
    users, kind, ads = (E.TableConfig(9, 2, name=name) for name in ("users", "kind", "ads"))
    features = {name: E.FeatureConfig(table) for name, table in (("user", users), ("kind", kind), ("ad", ads))}
    old = tfrs.PartialTPUEmbedding({"user": features["user"], "kind": features["kind"]}, "sgd", size_threshold=None)
    new = tfrs.PartialTPUEmbedding(features, "sgd", size_threshold=7, name=old.name)
    ids = {name: tf.constant([1]) for name in features}
    wanted, _ = old({"user": ids["user"], "kind": ids["kind"]}), new(ids)
    path = tf.train.Checkpoint(model=old).write(str(tmp_path / "ckpt"))
    tf.train.Checkpoint(model=new).read(path).expect_partial()
    found = new(ids)
    for name, rows in wanted.items():
        np.testing.assert_array_equal(found[name], rows)


def trained_on_tpu(path: str, **tables: str) -> None:
    model = tf.Module()
    with simulated_tpu() as strategy, strategy.scope():
        for name, table in tables.items():
            config = E.FeatureConfig(E.TableConfig(9, 2, name=table))
            setattr(model, name, TPUEmbedding(config, "sgd", batch_size=8, name=name))
        tf.train.Checkpoint(model=model).write(path)


def test_a_wrong_restore_after_one_of_other_hardware(tmp_path: Path) -> None:
    wrong, right = written(tmp_path, other="users"), str(tmp_path / "tpu" / "ckpt")
    trained_on_tpu(right, first="users")
    model = Layers(first="users")
    tf.train.Checkpoint(model=model).read(right).expect_partial()
    model(tf.constant([2]))
    tf.train.Checkpoint(model=model).read(wrong).expect_partial()
    with pytest.raises(CheckpointMismatchError, match=r"other/ckpt"):
        model(tf.constant([2]))


def test_a_restore_of_tables_of_other_hardware_names_tables(tmp_path: Path) -> None:
    trained_on_tpu(str(tmp_path / "ckpt"), first="users", second="ads")
    model = Layers(other="users")
    tf.train.Checkpoint(model=model).read(str(tmp_path / "ckpt")).expect_partial()
    with pytest.raises(CheckpointMismatchError, match=r"Tables of the checkpoint: [^_]*\. Call"):
        model(tf.constant([2]))


# ---- several restores


def test_a_later_restore_of_other_layers_does_not_answer_an_earlier_one(tmp_path: Path) -> None:
    """Two towers are trained each in its file, and one of them has another attribute since."""
    towers, of_users, of_items = tf.Module(), tf.Module(), tf.Module()
    towers.user, towers.item = Layers(new="users"), Layers(items="items")
    of_users.user, of_items.item = Layers(old="users"), Layers(items="items")
    user, item = towers.user, towers.item
    for model in (user, item, of_users.user, of_items.item):
        model(tf.constant([1]))
    for saved, name in ((of_users, "users"), (of_items, "items")):
        path = tf.train.Checkpoint(model=saved).write(str(tmp_path / name))
        tf.train.Checkpoint(model=towers).read(path).expect_partial()
    np.testing.assert_array_equal(item.scores(tf.constant([1])), of_items.item.scores(tf.constant([1])))
    with pytest.raises(CheckpointMismatchError, match="/users, where"):
        user(tf.constant([2]))


def test_a_choice_of_tables_covers_one_restore_of_its_file(tmp_path: Path) -> None:
    """Not one that comes after the rows were trained, or restored from another file."""
    first, second = written(tmp_path / "1", other="users"), written(tmp_path / "2", other="users")
    model = Layers(first="users")
    model(tf.constant([2]))
    whole = tf.train.Checkpoint(model=model)
    for path in (first, second):
        model.first.restore_tables(path)
        whole.read(path).expect_partial()
        model(tf.constant([2]))
    whole.read(first).expect_partial()
    with pytest.raises(CheckpointMismatchError, match=r"1/other/ckpt"):
        model(tf.constant([2]))


def test_rows_of_two_files_in_any_order(tmp_path: Path) -> None:
    """The first file has one of two tables, and one that is gone; the second has the other one."""
    for order in ((0, 1), (1, 0)):
        folder = tmp_path / str(order[0])
        files = [written(folder / "1", first="users", gone="ads"), written(folder / "2", second="banners")]
        model = Layers(first="users", second="banners")
        model(tf.constant([2]))
        for number in order:
            tf.train.Checkpoint(model=model).read(files[number]).expect_partial()
        if order == (0, 1):
            model(tf.constant([2]))  # all rows are restored since the first file's question
        else:
            with pytest.raises(CheckpointMismatchError, match="tables banners"):
                model(tf.constant([2]))


# ---- layers that come after the restore


class Late(keras.Model):
    """A model that makes its layer when it is built."""

    def __init__(self, attribute: str, table: str) -> None:
        super().__init__()
        self.attribute, self.table, self.score = attribute, table, keras.layers.Dense(1)

    def build(self, _: Any) -> None:
        setattr(self, self.attribute, TPUEmbedding(E.FeatureConfig(E.TableConfig(9, 2, name=self.table)), "sgd"))
        self.score.build((None, 2))
        self.built = True

    def call(self, ids: Any) -> Any:
        return self.score(getattr(self, self.attribute)(ids))

    def get_config(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    ("saved", "attribute", "table"),
    [("model", "rows", "users"), ("model", "old", "members"), ("root", "old", "users"), ("root", "rows", "users")],
)
def test_a_layer_that_is_made_after_the_restore(
    use: str, saved: str, attribute: str, table: str, tmp_path: Path
) -> None:
    old = Late("old", "users")
    old(tf.constant([1]))
    path = tf.train.Checkpoint(**{saved: old}).write(str(tmp_path / "ckpt"))
    if saved == "root":
        path = tf.train.Checkpoint(old).write(str(tmp_path / "ckpt"))
    model = Late(attribute, table)
    tf.train.Checkpoint(model=model).restore(path).expect_partial()
    model.build((None,))
    with pytest.raises(
        CheckpointMismatchError, match=rf"tables {table} from .* Tables of the checkpoint: users\. Call"
    ):
        USES[use](model, tmp_path / "out")


def test_the_right_file_and_then_a_wrong_one_before_the_layer_is_made(tmp_path: Path) -> None:
    models = {name: Late(name, "users") for name in ("right", "wrong")}
    files = {}
    for name, model in models.items():
        model(tf.constant([1]))
        files[name] = tf.train.Checkpoint(model=model).write(str(tmp_path / name))
    for order, is_right in ((("right", "wrong"), False), (("wrong", "right"), True)):
        model = Late("right", "users")
        for name in order:
            tf.train.Checkpoint(model=model).read(files[name]).expect_partial()
        if not is_right:
            with pytest.raises(CheckpointMismatchError, match="/wrong"):
                model(tf.constant([2]))
            continue
        np.testing.assert_array_equal(model(tf.constant([2])), models["right"](tf.constant([2])))


def test_a_module_that_gets_its_layer_after_the_restore(tmp_path: Path) -> None:
    saved, module = tf.Module(), tf.Module()
    saved.embedding, saved.scale = whole_layer(), tf.Variable(3.0)
    path = tf.train.Checkpoint(net=saved).write(str(tmp_path / "ckpt"))
    module.scale = tf.Variable(0.0)
    tf.train.Checkpoint(net=module).read(path).expect_partial()
    module.rows = whole_layer()
    for _ in range(2):
        with pytest.raises(CheckpointMismatchError, match="Tables of the checkpoint: user"):
            module.rows({"ids": tf.constant([1])})
    module.embedding = module.rows  # TensorFlow restores it now
    found = module.rows({"ids": tf.constant([1])})
    np.testing.assert_array_equal(found["ids"], saved.embedding({"ids": tf.constant([1])})["ids"])


def test_a_model_apart_from_the_restored_one_is_free(tmp_path: Path) -> None:
    model, path = Layers(first="users"), written(tmp_path, first="users", gone="ads")
    model(tf.constant([1]))
    tf.train.Checkpoint(model=model).read(path).expect_partial()
    apart = Layers(first="items")
    apart(tf.constant([1]))
    apart.save_weights(tmp_path / "apart.weights.h5")
    full = keras.Sequential([model.first, keras.layers.Dense(1)])  # a new model over a restored layer
    full(tf.constant([1]))


# ---- names, stacks, parts


@pytest.mark.parametrize(
    ("saved", "now"), [(("user", "user/history"), ("user", "user/past")), (("user", "past"), ("user", "user/history"))]
)
def test_tables_that_are_called_like_slots(saved: tuple[str, str], now: tuple[str, str], tmp_path: Path) -> None:
    old, new = Two(*saved), Two(*now)
    old(tf.constant([2]))
    new(tf.constant([2]))
    tf.train.Checkpoint(model=new).read(tf.train.Checkpoint(model=old).write(str(tmp_path / "ckpt"))).expect_partial()
    with pytest.raises(CheckpointMismatchError, match=f"tables {now[1]} from .* checkpoint: {saved[1]}"):
        new(tf.constant([2]))


def stacked(*tables: str) -> Any:
    features = {name: E.FeatureConfig(E.TableConfig(64, 2, name=name), output_shape=[8]) for name in tables}
    return TPUEmbedding(features, "sgd", name="rows")


@pytest.mark.parametrize("options", [{"sparse_cores": 2}, {"replicas": 2}, {"sparse_cores": 4}, None])
@pytest.mark.parametrize("tables", [("users", "items", "ads"), ("users", "items"), ("users",)])
def test_other_sparse_cores_and_tables_that_are_gone(
    options: dict[str, int] | None, tables: tuple[str, ...], tmp_path: Path
) -> None:
    """With a new layer beside it, which has no part in the file."""
    rows = {name: np.random.default_rng(1).random((64, 2), np.float32) + n for n, name in enumerate("uia")}
    by_table = dict(zip(("users", "items", "ads"), rows.values(), strict=True))
    saved, model = tf.Module(), tf.Module()
    with simulated_tpu() as strategy, strategy.scope():
        saved.rows = stacked("users", "items", "ads")
        for name, values in by_table.items():
            saved.rows.assign_rows(name, 0, values)
        path = tf.train.Checkpoint(model=saved).write(str(tmp_path / "ckpt"))
    ids = {name: tf.constant(range(8)) for name in tables}
    if options is None:
        model.rows, model.new = stacked(*tables), TPUEmbedding(E.FeatureConfig(E.TableConfig(9, 2, name="new")))
        tf.train.Checkpoint(model=model).read(path).expect_partial()
        found = {name: np.asarray(each) for name, each in model.rows(ids).items()}
        if len(tables) == 3:
            model.new(tf.constant([1]))
        for name, each in found.items():
            np.testing.assert_array_equal(each, by_table[name][:8])
    else:
        with simulated_tpu("V2", **options) as strategy, strategy.scope():
            model.rows = stacked(*tables)
            tf.train.Checkpoint(model=model).read(path).expect_partial()
            strategy.run(lambda: model.rows(ids))
            again = tf.train.Checkpoint(model=model).write(str(tmp_path / "again"))
        model = tf.Module()
        model.rows = stacked(*tables)
        tf.train.Checkpoint(model=model).read(again).expect_partial()
        for name, each in model.rows(ids).items():
            np.testing.assert_array_equal(each, by_table[name][:8])


@pytest.mark.filterwarnings("ignore:.*are not changed:UserWarning")
@pytest.mark.parametrize(("before", "after"), [(None, 7), (7, None), (0, None)])
def test_a_new_layer_beside_a_partial_layer_of_another_threshold(
    before: int | None, after: int | None, tmp_path: Path
) -> None:
    saved, model = tf.Module(), tf.Module()
    saved.rows, model.rows = partial_of("kind", "users", before), partial_of("kind", "users", after)
    model.new = TPUEmbedding(E.FeatureConfig(E.TableConfig(9, 2, name="new")), "sgd")
    tf.train.Checkpoint(m=model).read(tf.train.Checkpoint(m=saved).write(str(tmp_path / "ckpt"))).expect_partial()
    ids = {"small": tf.constant([1]), "large": tf.constant([2])}
    wanted = saved.rows(ids)
    for name, rows in model.rows(ids).items():
        np.testing.assert_array_equal(rows, wanted[name])
    model.new(tf.constant([1]))


# ---- what else gives rows, and what else happens


def test_a_thread_that_looks_up_while_the_model_is_restored(tmp_path: Path) -> None:
    """The model has a new table, so the restore would be open until it has found the other one."""
    model, path = Layers(first="users", new="items"), written(tmp_path, first="users")
    model(tf.constant([1]))
    errors, stop = list[Exception](), threading.Event()

    def look_up() -> None:
        while not stop.is_set():
            try:
                model(tf.constant([1]))
            except Exception as error:
                errors.append(error)

    thread = threading.Thread(target=look_up)
    thread.start()
    for _ in range(10):
        tf.train.Checkpoint(model=model).read(path).expect_partial()
    stop.set()
    thread.join()
    assert not errors


def test_restores_and_their_models_are_freed(tmp_path: Path) -> None:
    from tensorflow.python.checkpoint.checkpoint import _CheckpointRestoreCoordinator

    right, wrong = written(tmp_path, first="users", gone="ads"), written(tmp_path, other="users")
    model = Layers(first="users")
    model(tf.constant([1]))
    for _ in range(10):
        tf.train.Checkpoint(model=model).read(right).expect_partial()
        model(tf.constant([1]))
        dropped = Layers(first="users")
        tf.train.Checkpoint(model=dropped).read(wrong).expect_partial()
        del dropped
    gc.collect()
    alive = [type(one) for one in gc.get_objects()]
    assert alive.count(Layers) == 1
    assert alive.count(_CheckpointRestoreCoordinator) < 12  # TensorFlow keeps those of `gone` at the model


# ---- one restore and another


def test_rows_of_one_model_answer_for_no_other(tmp_path: Path) -> None:
    """Not even from the same file, however the other one was restored."""
    path, model, other = written(tmp_path, old="users"), Layers(first="users"), Layers(first="users")
    for each in (model, other):
        each(tf.constant([1]))
        tf.train.Checkpoint(model=each).read(path).expect_partial()
    other.first.restore_tables(path)
    alone = TPUEmbedding(E.FeatureConfig(E.TableConfig(9, 2, name="users")), "sgd")
    alone.restore_tables(path)
    right = Layers(old="users")
    tf.train.Checkpoint(model=right).read(path).expect_partial()
    other(tf.constant([2]))
    with pytest.raises(CheckpointMismatchError, match=r"old/ckpt"):
        model(tf.constant([2]))


def test_rows_of_tfrs_that_another_model_takes() -> None:
    """Its slots are restored row by row, in the other model alone."""
    golden = read_golden("tfrs/schedule_adagrad")
    path, shapes = str(golden.path), {name: arrays[None].shape for name, arrays in golden.tables.items()}
    tables = {name: E.TableConfig(*shape, name=name) for name, shape in shapes.items()}
    configs = {name: E.FeatureConfig(table) for name, table in tables.items()}
    ids = {name: tf.constant([1]) for name in configs}
    model, other = tf.Module(), tf.Module()
    model.rows, other.rows = (TPUEmbedding(configs, keras.optimizers.Adagrad(0.1)) for _ in range(2))
    tf.train.Checkpoint(other=model.rows).read(path).expect_partial()
    tf.train.Checkpoint(model=other.rows).read(path).expect_partial()
    other.rows(ids)
    with pytest.raises(CheckpointMismatchError, match="has not restored its tables"):
        model.rows(ids)


def test_pieces_before_a_restore_are_not_those_after_it(tmp_path: Path) -> None:
    model, path = Layers(first="users"), written(tmp_path, old="users")
    model(tf.constant([1]))
    model.first.assign_rows("users", 0, ROWS[:8])
    tf.train.Checkpoint(model=model).read(path).expect_partial()
    model.first.assign_rows("users", 8, ROWS[8:])
    with pytest.raises(CheckpointMismatchError, match=r"old/ckpt"):
        model(tf.constant([2]))


def test_a_choice_of_tables_ends_with_the_next_training(tmp_path: Path) -> None:
    """A later restore of the file is to bring its rows back."""
    model, path = Layers(first="users"), written(tmp_path, old="users")
    model.compile("sgd", "mse")
    model(tf.constant([1]))
    model.first.restore_tables(path)
    model.fit(np.array([1, 2]), np.ones([2, 1]), verbose=0)
    tf.train.Checkpoint(model=model).read(path).expect_partial()
    with pytest.raises(CheckpointMismatchError, match=r"old/ckpt"):
        model(tf.constant([2]))


@pytest.mark.parametrize("part", ["layer", "inner"])
def test_functions_of_a_model_around_the_restored_part(part: str, tmp_path: Path) -> None:
    inner = Layers(first="users")
    outer = keras.Sequential([inner])
    outer.compile("sgd", "mse")
    outer.fit(np.array([1, 2]), np.ones([2, 1]), verbose=0)
    restored = inner if part == "inner" else inner.first
    saved = Layers(old="users")
    saved(tf.constant([1]))
    path = tf.train.Checkpoint(elsewhere=saved).write(str(tmp_path / "ckpt"))
    tf.train.Checkpoint(part=restored).read(path).expect_partial()
    with pytest.raises(CheckpointMismatchError, match="/ckpt, where"):
        outer.fit(np.array([1, 2]), np.ones([2, 1]), verbose=0)


def test_an_object_that_cannot_be_saved_is_no_reason_to_refuse(tmp_path: Path) -> None:
    """TensorFlow restores it. A model apart from it is free in any case."""
    path, holder = written(tmp_path, first="users", gone="ads"), tf.Module()
    holder.first = TPUEmbedding(E.FeatureConfig(E.TableConfig(9, 2, name="users")), "sgd", name="first")
    holder.heads = {1: tf.Variable(1.0)}
    tf.train.Checkpoint(model=holder).read(path).expect_partial()
    np.testing.assert_array_equal(holder.first(tf.constant([1])), [[5, 5]])
    apart = Layers(first="items")
    apart(tf.constant([1]))
    tf.train.Checkpoint(model=apart).write(str(tmp_path / "apart"))


def test_a_compile_after_a_restore_stays(tmp_path: Path) -> None:
    model = Layers(first="users")
    model.compile(keras.optimizers.SGD(0.5), "mse")
    model.fit(np.array([1, 2]), np.ones([2, 1]), verbose=0)
    tf.train.Checkpoint(model=model).read(written(tmp_path, first="users")).expect_partial()
    held = model.train_function
    model.compile(keras.optimizers.SGD(0.0), "mse")
    held(iter(tf.data.Dataset.from_tensors((tf.constant([1, 2]), tf.ones([2, 1])))))
    kernel = np.asarray(model.score.kernel)
    model.fit(np.array([1, 2]), np.ones([2, 1]), verbose=0)
    np.testing.assert_array_equal(model.score.kernel, kernel)
