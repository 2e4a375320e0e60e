"""Features of names: the layer against Keras' own lookups in front of a layer of ids, and against a dictionary of rows."""

import gc
import threading
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, Vocabulary, export_model
from tpuembed.errors import CheckpointMismatchError, ConfigError, TrainingError
from tpuembed.testing import simulated_tpu

ROWS, DIM = 40, 3
Array = np.ndarray[Any, Any]

STRINGS = [b"name %d" % i for i in range(20)] + [b"\0", b"\xff\xfe", "é".encode(), b"x" * 1000]
INTEGERS = [int(i) for i in np.random.default_rng(0).integers(-(2**62), 2**62, 24)]
NAMES: dict[str, list[Any]] = {"string": STRINGS, "int64": INTEGERS}
PADDING: dict[str, Any] = {"string": b"", "int64": -1}


def make(vocabulary: Vocabulary | None, policy: str | int = "error", **options: Any) -> TPUEmbedding:
    """Return a layer whose features `one` and `bag` share a table, and its vocabulary. `ids` has row numbers."""
    ones = keras.initializers.Ones()
    named = TableConfig(ROWS, DIM, "named", combiner="mean", initializer=ones, out_of_vocabulary=policy)
    plain = TableConfig(ROWS, DIM, "plain", combiner="sum", initializer=ones)
    features = {
        "bag": FeatureConfig(named, vocabulary=vocabulary),
        "ids": FeatureConfig(plain),
        "one": FeatureConfig(named, vocabulary=vocabulary),
    }
    return TPUEmbedding(features, "adagrad", name="embedding", **options)


def tensor(values: Any, dtype: str) -> Any:
    return tf.constant(np.array(values, object) if dtype == "string" else values, tf.as_dtype(dtype))


def batch(pool: list[Any], dtype: str, seed: int, size: int = 8) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def pick(shape: Any) -> Any:
        return np.array([*pool, None], object)[rng.integers(0, len(pool), shape)]

    lists = pick((size, 4))
    lists[rng.random(lists.shape) < 0.3] = PADDING[dtype]
    bag = tf.RaggedTensor.from_tensor(tensor(lists.tolist(), dtype), padding=tensor(PADDING[dtype], dtype))
    if seed % 2:
        bag = bag.to_sparse()
    return {"bag": bag, "one": tensor(pick(size).tolist(), dtype), "ids": tf.constant(rng.integers(0, ROWS, size))}


def step(layer: TPUEmbedding, inputs: Any) -> Any:
    with tf.GradientTape() as tape:
        activations = layer(inputs, training=True)
        loss = tf.add_n([tf.reduce_sum(rows * tf.cast(tf.range(1, 4), tf.float32)) for rows in activations.values()])
    tape.gradient(loss, layer.trainable_variables)
    return activations


def tables(layer: TPUEmbedding) -> dict[str, Array]:
    return {name: variable.numpy() for name, variable in layer.named_variables().items()}


def keras_lookup(dtype: str, names: list[Any], oov: int) -> Any:
    kind = keras.layers.StringLookup if dtype == "string" else keras.layers.IntegerLookup
    return kind(vocabulary=tensor(names, dtype), num_oov_indices=oov, mask_token=None)


def as_ids(inputs: dict[str, Any], lookup: Any) -> dict[str, Any]:
    """Return `inputs` as a layer of ids takes them. Padding is -1."""
    bag = inputs["bag"]
    names = bag.values if isinstance(bag, tf.SparseTensor) else bag.flat_values
    is_padding = tf.equal(names, tensor(PADDING[names.dtype.name], names.dtype.name))
    present = tf.boolean_mask(names, ~is_padding)
    rows = tf.tensor_scatter_nd_update(
        tf.fill([tf.size(names)], np.int64(-1)), tf.where(~is_padding), tf.cast(lookup(present), tf.int64)
    )
    bag = (
        tf.SparseTensor(bag.indices, rows, bag.dense_shape)
        if isinstance(bag, tf.SparseTensor)
        else bag.with_values(rows)
    )
    return {"bag": bag, "one": tf.cast(lookup(inputs["one"]), tf.int64), "ids": inputs["ids"]}


def test_a_graph_reads_the_index_at_once() -> None:
    """Between two reads, another thread's training may assign a larger index. A known name was unknown in it."""
    layer = make(Vocabulary(STRINGS, grows=True), takes_rows=True)
    assert layer._vocabularies is not None
    cells = layer._vocabularies.copies["named"].variables["cells"]
    function = tf.function(
        lambda names: layer.names_to_rows({"one": names, "bag": names[:, None], "ids": tf.size(names)})
    )
    graph = function.get_concrete_function(tf.TensorSpec([None], tf.string)).graph
    [handle] = [inside for outside, inside in graph.captures if outside is cells.handle]
    assert [reader.type for reader in handle.consumers()] == ["ReadVariableOp"] * 2  # of `one` and of `bag`


@pytest.mark.nightly
def test_known_names_keep_their_rows_while_another_thread_trains() -> None:
    known = [b"k%d" % number for number in range(200)]
    wanted, ends = np.arange(1, 201), time.monotonic() + 60
    while time.monotonic() < ends:
        vocabulary = Vocabulary(known, oov_buckets=1, grows=True)
        feature = FeatureConfig(TableConfig(50_001, 1, "t"), vocabulary=vocabulary)
        layer = TPUEmbedding({"f": feature}, "sgd", takes_rows=True)
        new = tf.data.Dataset.range(24).map(
            lambda i: {"f": tf.strings.as_string(i * 2000 + tf.range(2000, dtype=tf.int64))}
        )
        old = tf.data.Dataset.from_tensors({"f": tf.constant(known)}).repeat()
        training = new.map(lambda names, layer=layer: layer.names_to_rows(names, training=True)).prefetch(4)
        validation = iter(old.map(layer.names_to_rows, num_parallel_calls=2).prefetch(2))
        thread = threading.Thread(target=lambda batches=training: [None for _ in batches])
        thread.start()
        while thread.is_alive():
            np.testing.assert_array_equal(next(validation)["f"], wanted)
        thread.join()


def test_names_get_no_row_of_unknown_names() -> None:
    vocabulary = Vocabulary(["ann", "bob"])
    layer = make(vocabulary, policy=2)
    with refused(ConfigError):
        vocabulary.add(["ann", "cid"])
    assert len(vocabulary) == 2
    assert vocabulary.add(["bob"]).tolist() == [1]
    del layer


@pytest.mark.parametrize("count", [4, ROWS + 1])
def test_no_assigned_name_has_the_row_of_unknown_names(count: int) -> None:
    vocabulary = Vocabulary(["a", "b"])
    layer = make(vocabulary, policy=3)
    other = Vocabulary([*"ab", *(f"n{number}" for number in range(2, count))])
    with refused(ConfigError):
        vocabulary.assign(other)
    vocabulary.assign(Vocabulary([*"abc"]))
    assert len(layer.vocabularies["named"]) == 3


def test_names_of_a_layer_do_not_move_under_it() -> None:
    vocabulary = Vocabulary(STRINGS)
    layer = make(vocabulary)
    vocabulary.assign(Vocabulary([*STRINGS, "more"]))
    with refused(ConfigError):
        vocabulary.assign(Vocabulary([*STRINGS[::-1], "more"]))
    assert vocabulary.lookup(["more"]).tolist() == [len(STRINGS)]
    del layer
    gc.collect()
    vocabulary.assign(Vocabulary(STRINGS[::-1]))


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("dtype", ["string", "int64"])
@pytest.mark.sampled(2)
def test_trains_the_rows_that_keras_lookups_number(dtype: str, in_graph: bool) -> None:
    names, unknown = NAMES[dtype][:20], NAMES[dtype][20:]
    lookup = keras_lookup(dtype, names, 3)
    named, plain = make(Vocabulary(names, dtype=dtype, oov_buckets=3)), make(None)  # type: ignore[arg-type]
    run = tf.function(step) if in_graph else step
    for seed in range(6):
        inputs = batch(names + unknown, dtype, seed)
        found, truth = run(named, inputs), run(plain, as_ids(inputs, lookup))
        for feature, activations in truth.items():
            np.testing.assert_array_equal(found[feature], activations)
    for name, values in tables(plain).items():
        np.testing.assert_array_equal(tables(named)[name], values)


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("dtype", ["string", "int64"])
@pytest.mark.nightly
def test_growth_keeps_each_name_on_its_own_row(dtype: str, in_graph: bool) -> None:
    vocabulary, plain = Vocabulary(dtype=dtype, oov_buckets=1, grows=True), make(None)  # type: ignore[arg-type]
    named = make(vocabulary)
    rows: dict[Any, int] = {}
    run = tf.function(step) if in_graph else step
    for seed in range(8):
        inputs = batch(NAMES[dtype][: 3 * (seed + 1)], dtype, seed)

        def number(given: Any) -> Any:
            return tf.constant([rows.setdefault(name, len(rows) + 1) for name in given.numpy().tolist()], tf.int64)

        found, truth = run(named, inputs), run(plain, as_ids(inputs, number))
        for feature, activations in truth.items():
            np.testing.assert_array_equal(found[feature], activations)
        assert vocabulary.lookup(list(rows)).min() > 0
    assert len(vocabulary) == len(rows)
    order = vocabulary.lookup(list(rows))
    for name, values in tables(plain).items():
        if name.startswith("named"):
            np.testing.assert_array_equal(tables(named)[name][order], values[list(rows.values())])


def test_a_full_table_leaves_new_names_to_their_buckets() -> None:
    vocabulary = Vocabulary(oov_buckets=2, grows=True)
    layer = make(vocabulary)
    inputs = batch([b"name %d" % i for i in range(100)], "string", 0, size=100)
    for _ in range(2):
        step(layer, inputs)
    assert vocabulary.rows == ROWS
    seen = inputs["one"].numpy()
    unknown = seen[vocabulary.lookup(seen) < 2]
    assert len(unknown)
    truth = keras_lookup("string", vocabulary.get_vocabulary()[2:], 2)(tensor(seen.tolist(), "string")).numpy()
    np.testing.assert_array_equal(vocabulary.lookup(seen), truth)


@pytest.mark.nightly
def test_names_grow_in_training_only() -> None:
    vocabulary = Vocabulary([b"a"], oov_buckets=1, grows=True)
    layer = make(vocabulary)
    inputs = {"bag": tf.ragged.constant([["b"], []]), "one": tf.constant(["c", "a"]), "ids": tf.constant([0, 1])}
    for training in (False, None):
        layer(inputs, training=training)
    tf.function(layer)(inputs, training=False)
    assert len(vocabulary) == 1
    layer.trainable = False
    layer(inputs, training=True)
    assert len(vocabulary) == 1
    layer.trainable = True
    layer(inputs, training=True)
    assert vocabulary.get_vocabulary() == ["[UNK]", "a", "b", "c"]


class SilentModel(keras.Model):
    """What users write: its `call` has no argument `training`, so Keras' fit does not tell the layers that they train."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__()
        table = TableConfig(ROWS, DIM, "named", optimizer="adagrad")
        self.embedding = TPUEmbedding({"one": FeatureConfig(table, vocabulary=vocabulary)}, name="embedding")

    def call(self, inputs: Any) -> Any:
        return tf.reduce_sum(self.embedding(inputs)["one"], 1)


class TellingModel(SilentModel):
    def call(self, inputs: Any, training: bool | None = None) -> Any:
        return tf.reduce_sum(self.embedding(inputs, training=training)["one"], 1)


@pytest.mark.nightly
def test_training_that_would_leave_new_names_out_is_refused() -> None:
    data = tf.data.Dataset.from_tensors(({"one": tf.constant(["a", "b"])}, tf.ones([2])))
    model = SilentModel(Vocabulary(oov_buckets=1, grows=True))
    model.compile("adam", "mse")
    with refused(TrainingError, match="named"):
        model.fit(data, verbose=0, shuffle=False)
    assert not len(model.embedding.vocabularies["named"])
    model.evaluate(data, verbose=0)
    telling = TellingModel(Vocabulary(oov_buckets=1, grows=True))
    telling.compile("adam", "mse")
    telling.fit(data, verbose=0, shuffle=False)
    assert telling.embedding.vocabularies["named"].get_vocabulary() == ["[UNK]", "a", "b"]
    layer = telling.embedding
    for training in (False, None):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer({"one": tf.constant(["a", "c"])}, training=training)["one"])
        if training is None:
            with pytest.raises(TrainingError, match="training=True"):
                tape.gradient(loss, layer.trainable_variables)
        else:
            tape.gradient(loss, layer.trainable_variables)
    assert int(layer.updates) == 2
    assert not layer.vocabularies["named"].has("c")
    fixed = SilentModel(Vocabulary(["a", "b"]))  # names that do not grow need no argument
    fixed.compile("adam", "mse")
    fixed.fit(data, verbose=0, shuffle=False)


def test_a_graph_finds_names_that_grew_after_it_was_traced() -> None:
    vocabulary = Vocabulary(dtype="int64", grows=True)
    table = TableConfig(3000, DIM, "named", out_of_vocabulary="zeros")
    layer = TPUEmbedding({"one": FeatureConfig(table, vocabulary=vocabulary)}, "sgd")
    look_up = tf.function(lambda names: layer({"one": names})["one"])
    for start in range(0, 3000, 500):
        names = tf.range(start, start + 500, dtype=tf.int64) * 7
        assert not look_up(names).numpy().any()
        layer({"one": names}, training=True)
        np.testing.assert_array_equal(look_up(names), layer.embedding_tables[table].numpy()[start : start + 500])


def model(vocabulary: Vocabulary) -> tuple[keras.Model, TPUEmbedding]:
    layer = make(vocabulary)
    inputs = {
        "bag": keras.Input((None,), dtype=vocabulary.dtype, ragged=True, name="bag"),
        "one": keras.Input((), dtype=vocabulary.dtype, name="one"),
        "ids": keras.Input((), dtype="int64", name="ids"),
    }
    activations = layer(inputs)
    made = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(list(activations.values()))))
    made.compile("sgd", "mse")
    return made, layer


SAVES = ("keras", "weights", "checkpoint", "async")


def write(made: keras.Model, kind: str, folder: Path) -> str:
    if kind == "keras":
        made.save(folder / "model.keras")
        return str(folder / "model.keras")
    if kind == "weights":
        made.save_weights(folder / "model.weights.h5")
        return str(folder / "model.weights.h5")
    checkpoint, options = tf.train.Checkpoint(model=made), tf.train.CheckpointOptions(enable_async=kind == "async")
    path = checkpoint.save(str(folder / "ckpt"), options=options)
    if kind == "async":
        checkpoint.sync()
    return str(path)


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("dtype", ["string", "int64"])
@pytest.mark.parametrize("kind", SAVES)
@pytest.mark.sampled(2)
def test_names_are_saved_and_restored_with_their_rows(kind: str, dtype: str, grows: bool, tmp_path: Path) -> None:
    names = NAMES[dtype]
    vocabulary = Vocabulary(() if grows else names, dtype=dtype, oov_buckets=2, grows=grows)  # type: ignore[arg-type]
    made, layer = model(vocabulary)
    for seed in range(0, 6, 2):
        made.train_on_batch(batch(names[: 5 * (seed + 1)], dtype, seed), tf.zeros((8, 1)))
    inputs = batch(names, dtype, 8)
    truth, path = made.predict(inputs, verbose=0), write(made, kind, tmp_path)
    empty = Vocabulary(dtype=dtype, oov_buckets=2, grows=grows)  # type: ignore[arg-type]
    if kind == "keras":
        other = keras.models.load_model(path)
        layer = other.get_layer("embedding")
        empty = layer.vocabularies["named"]
    else:
        other, layer = model(empty)
        other.load_weights(path) if kind == "weights" else tf.train.Checkpoint(model=other).restore(path)
    assert empty.names(range(2, empty.rows)) == vocabulary.names(range(2, vocabulary.rows))
    np.testing.assert_array_equal(other.predict(inputs, verbose=0), truth)
    assert layer.vocabularies["named"] is empty


@pytest.mark.parametrize(
    "other",
    [Vocabulary(oov_buckets=1), Vocabulary(dtype="int64", oov_buckets=2)],
    ids=["buckets", "type"],
)
@pytest.mark.parametrize("kind", ["weights", "checkpoint"])
@pytest.mark.filterwarnings("ignore:Skipping nested container")
def test_a_save_of_another_vocabulary_is_refused(kind: str, other: Vocabulary, tmp_path: Path) -> None:
    made, _ = model(Vocabulary(["a", "b"], oov_buckets=2))
    path = write(made, kind, tmp_path)
    changed, layer = model(other)
    before = tables(layer)
    if kind == "checkpoint":
        with refused(CheckpointMismatchError):
            tf.train.Checkpoint(model=changed).restore(path)
    else:
        with pytest.raises(ValueError, match="Build the layer as it was saved"):  # Keras' own, with our message in it
            changed.load_weights(path)
    for name, values in tables(layer).items():
        np.testing.assert_array_equal(values, before[name])


@pytest.mark.parametrize("track_rows", [False, True])
@pytest.mark.parametrize("dtype", ["string", "int64"])
@pytest.mark.nightly
def test_evicted_names_leave_fresh_rows_to_new_ones(dtype: str, track_rows: bool, tmp_path: Path) -> None:
    """A layer of ids, whose rows are set to their initial values by hand, says what the rows are."""
    names = NAMES[dtype]
    vocabulary, plain = Vocabulary(dtype=dtype, oov_buckets=1, grows=True), make(None)  # type: ignore[arg-type]
    named = make(vocabulary, track_rows=track_rows)
    rows: dict[Any, int] = {}

    def number(given: Any) -> Any:
        found = [
            rows.setdefault(name, 1 + min(set(range(ROWS)) - {row - 1 for row in rows.values()})) for name in given
        ]
        return tf.constant(found, tf.int64)

    def train(pool: list[Any], seed: int) -> None:
        inputs = batch(pool, dtype, seed)
        found, truth = step(named, inputs), step(plain, as_ids(inputs, lambda given: number(given.numpy().tolist())))
        for feature, activations in truth.items():
            np.testing.assert_array_equal(found[feature], activations)

    for seed in range(3):
        train(names[:10], seed)
    for seed in range(3, 6):
        train(names[5:15], seed)
    freed = vocabulary.evict(not_seen_for=3)
    old = [name for name in rows if vocabulary.lookup([name])[0] == 0]
    assert len(old) == len(freed) > 2
    for name in old:
        row = rows.pop(name)
        for slot, initial in ((None, 1.0), ("accumulators", 0.1)):
            plain.assign_rows("named", row, np.full((1, DIM), initial, np.float32), slot)
    named(batch(names[10:], dtype, 6))  # looks up, and gives no rows
    for seed in range(6, 10):
        train(names[10:], seed)
    assert set(freed.tolist()) & set(vocabulary.lookup(list(rows)).tolist())
    order = vocabulary.lookup(list(rows))
    for name, values in tables(plain).items():
        if name.startswith("named"):
            np.testing.assert_array_equal(tables(named)[name][order], values[list(rows.values())])
    path = tf.train.Checkpoint(layer=named).save(str(tmp_path / "ckpt"))
    other = Vocabulary(dtype=dtype, oov_buckets=1, grows=True)  # type: ignore[arg-type]
    restored = make(other, track_rows=track_rows)
    tf.train.Checkpoint(layer=restored).restore(path)
    np.testing.assert_array_equal(other.lookup(list(rows)), order)
    np.testing.assert_array_equal(other.counts, vocabulary.counts)
    for name, values in tables(named).items():
        np.testing.assert_array_equal(tables(restored)[name], values)


def test_names_that_are_added_by_hand_are_found() -> None:
    vocabulary = Vocabulary(["a"])
    layer = make(vocabulary, "zeros")
    look_up = tf.function(layer)
    inputs = {"bag": tf.ragged.constant([["a"]]), "one": tf.constant(["b"]), "ids": tf.constant([0])}
    assert not look_up(inputs)["one"].numpy().any()
    vocabulary.add(["b"])
    assert look_up(inputs)["one"].numpy().all()


def test_a_second_layer_sees_what_the_first_one_added() -> None:
    vocabulary = Vocabulary(grows=True)
    one, other = make(vocabulary, "zeros"), make(vocabulary, "zeros")
    inputs = {"bag": tf.ragged.constant([["a"]]), "one": tf.constant(["b"]), "ids": tf.constant([0])}
    look_up = tf.function(other)
    assert not look_up(inputs)["one"].numpy().any()
    step(one, inputs)
    assert look_up(inputs)["one"].numpy().all()
    vocabulary.grow(["c"], room=ROWS, update=2)
    assert other(inputs | {"one": tf.constant(["c"])})["one"].numpy().all()


def test_a_layer_without_names_is_refused() -> None:
    clone = TPUEmbedding.from_config(make(Vocabulary(["a", "b"], oov_buckets=1)).get_config())
    with refused(ConfigError):
        clone({"bag": tf.ragged.constant([["a"]]), "one": tf.constant(["b"]), "ids": tf.constant([0])})


def test_a_checkpoint_with_the_names_of_some_tables_is_refused(tmp_path: Path) -> None:
    def two(**names: list[str] | None) -> TPUEmbedding:
        features = {
            name: FeatureConfig(TableConfig(9, DIM, f"{name}.x/y"), vocabulary=given) for name, given in names.items()
        }
        return TPUEmbedding(features, "sgd", name="embedding")

    path = tf.train.Checkpoint(layer=two(a=["x"], b=None)).save(str(tmp_path / "ckpt"))
    layer = two(a=["p"], b=["q"])
    before = tables(layer)
    with refused(CheckpointMismatchError):
        tf.train.Checkpoint(layer=layer).restore(path)
    np.testing.assert_equal(tables(layer), before)
    assert [each.get_vocabulary() for each in layer.vocabularies.values()] == [["p"], ["q"]]
    tf.train.Checkpoint(layer=two(a=["p"], b=None)).restore(path)


def test_tables_of_one_vocabulary_get_one_set_of_names(tmp_path: Path) -> None:
    def two(one: Vocabulary, other: Vocabulary) -> TPUEmbedding:
        given = {"a": one, "b": other}
        features = {name: FeatureConfig(TableConfig(9, DIM, name), vocabulary=its) for name, its in given.items()}
        return TPUEmbedding(features, "sgd", name="embedding")

    path = tf.train.Checkpoint(layer=two(Vocabulary(["x", "y"]), Vocabulary(["y", "x"]))).save(str(tmp_path / "ckpt"))
    shared = Vocabulary()
    layer = two(shared, shared)
    before = tables(layer)
    with refused(CheckpointMismatchError):
        tf.train.Checkpoint(layer=layer).restore(path)
    with refused(CheckpointMismatchError):
        layer.restore_tables(path)
    np.testing.assert_equal(tables(layer), before)
    assert not len(shared)


@pytest.mark.parametrize("kind", ["ckpt", "model.weights.h5", "tables"])
def test_the_names_of_one_of_two_tables_do_not_rename_the_other(kind: str, tmp_path: Path) -> None:
    """Both tables have one vocabulary, and the save has names of the first alone."""

    class Model(keras.Model):
        def __init__(self, first: Vocabulary, other: Vocabulary | None) -> None:
            super().__init__()
            given = {"a": first, "b": other}
            features = {name: FeatureConfig(TableConfig(9, DIM, name), vocabulary=its) for name, its in given.items()}
            self.layer, self.built = TPUEmbedding(features, "sgd", name="embedding"), True

    model = Model(Vocabulary(["y", "x"]), None)
    model.save_weights(str(tmp_path / "model.weights.h5"))
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "ckpt"))
    shared = Vocabulary(["x", "y"])
    model = Model(shared, shared)
    if kind == "model.weights.h5":
        with pytest.raises(ValueError, match="could not be loaded"):
            model.load_weights(str(tmp_path / kind))
    else:
        with refused(CheckpointMismatchError):
            (tf.train.Checkpoint(model=model).restore if kind == "ckpt" else model.layer.restore_tables)(path)
    assert shared.get_vocabulary() == ["x", "y"]


@pytest.mark.parametrize("kind", ["ckpt", "model.weights.h5", "tables"])
@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.sampled(2)
def test_a_restore_does_not_rename_the_rows_of_another_layer(kind: str, grows: bool, tmp_path: Path) -> None:
    """Two models of one vocabulary object, as of a module's features. The rows of the second are not restored."""

    class Model(keras.Model):
        def __init__(self, vocabulary: Vocabulary) -> None:
            super().__init__()
            features = {"f": FeatureConfig(TableConfig(9, 1, "t"), vocabulary=vocabulary)}
            self.layer, self.built = TPUEmbedding(features, "sgd", name="embedding"), True
            self.layer.update_embedding_table("t", np.arange(9, dtype=np.float32)[:, None])

        def call(self, names: Any, training: bool = False) -> Any:
            return self.layer({"f": names}, training=training)["f"]

    def save(model: Model, name: str) -> str:
        folder = tmp_path / name
        folder.mkdir()
        if kind != "model.weights.h5":
            return str(tf.train.Checkpoint(model=model).write(str(folder / "ckpt")))
        model.save_weights(str(folder / kind))
        return str(folder / kind)

    def restore(model: Model, path: str) -> None:
        if kind == "ckpt":
            tf.train.Checkpoint(model=model).restore(path)
        elif kind == "tables":
            model.layer.restore_tables(path)
        else:
            model.load_weights(path)

    names = tf.constant(["ann", "bob"])
    first = save(Model(Vocabulary(["ann", "bob"], grows=grows)), "first")
    other = save(Model(Vocabulary(["bob", "ann"], grows=grows)), "other")
    shared = Vocabulary(grows=grows)
    model, second = Model(shared), Model(shared)
    restore(model, first)
    in_graph = tf.function(second.call)
    assert in_graph(names)[:, 0].numpy().tolist() == [0, 1], "names were added, and none has another row"
    if kind == "tables":  # which compares the names itself
        with refused(CheckpointMismatchError):
            restore(model, other)
        assert second(names)[:, 0].numpy().tolist() == [0, 1]
        return
    restore(model, other)
    assert model(names)[:, 0].numpy().tolist() == [1, 0]
    assert in_graph(names)[:, 0].numpy().tolist() == [0, 1], "a graph has the names of the rows"
    for use in (
        lambda: second(names),
        lambda: second(names, training=True),
        lambda: second.layer.names_to_rows({"f": names}),
        lambda: export_model(second, tmp_path / "export"),
    ):
        with refused(ConfigError):
            use()
    restore(model, first)
    assert second(names)[:, 0].numpy().tolist() == [0, 1], "the names are those of its rows again"
    restore(model, other)
    with refused(ConfigError):
        second(names)
    again = Model(Vocabulary(grows=grows))
    restore(again, save(second, "again"))
    assert again(names)[:, 0].numpy().tolist() == [0, 1], "a save has the names of the rows"
    restore(second, other)
    assert second(names)[:, 0].numpy().tolist() == [1, 0]
    assert model(names)[:, 0].numpy().tolist() == [1, 0]


def test_names_that_another_layer_learns_do_not_rename_the_rows_of_a_graph(tmp_path: Path) -> None:
    """The second layer has names of before a restore of the first, which then trains more names than a copy may lack."""

    def make_one(vocabulary: Vocabulary) -> TPUEmbedding:
        layer = TPUEmbedding({"f": FeatureConfig(TableConfig(3000, 1, "t"), vocabulary=vocabulary)}, "sgd")
        layer.update_embedding_table("t", np.arange(3000, dtype=np.float32)[:, None])
        return layer

    path = tf.train.Checkpoint(layer=make_one(Vocabulary(["bob", "ann"], grows=True))).write(str(tmp_path / "ckpt"))
    shared = Vocabulary(["ann", "bob"], grows=True)
    first, second = make_one(shared), make_one(shared)
    in_graph, names = tf.function(lambda names: second({"f": names})["f"][:, 0]), tf.constant(["ann", "bob"])
    assert in_graph(names).numpy().tolist() == [0, 1]
    tf.train.Checkpoint(layer=first).restore(path)
    step(first, {"f": tf.constant([f"new {number}" for number in range(2000)])})
    assert len(shared) == 2002
    assert in_graph(names).numpy().tolist() == [0, 1]


@pytest.mark.parametrize("by", ["name", "number"])
def test_restore_tables_refuses_a_layer_whose_names_are_those_of_another(by: str, tmp_path: Path) -> None:
    """Rows would be written at the numbers of the other layer's names, and saved with its own."""

    def make_one(names: list[str], vocabulary: Vocabulary | None = None) -> TPUEmbedding:
        own = Vocabulary(names) if vocabulary is None else vocabulary
        layer = TPUEmbedding({"f": FeatureConfig(TableConfig(9, 1, "t"), vocabulary=own)}, "sgd")
        layer.update_embedding_table("t", np.arange(9, dtype=np.float32)[:, None])
        return layer

    def write(layer: TPUEmbedding, name: str) -> str:
        return str(tf.train.Checkpoint(layer=layer).write(str(tmp_path / name)))

    other = write(make_one(["bob", "ann", "eve"]), "other")
    fewer = write(make_one(["bob", "ann"]), "fewer")
    shared = Vocabulary(["ann", "bob", "eve"])
    first, second = make_one([], shared), make_one([], shared)
    tf.train.Checkpoint(layer=first).restore(other)
    with refused(ConfigError):
        second.restore_tables(other if by == "name" else fewer, by=by)
    again = make_one([])
    tf.train.Checkpoint(layer=again).restore(write(second, "second"))
    assert again({"f": tf.constant(["ann", "bob", "eve"])})["f"][:, 0].numpy().tolist() == [0, 1, 2]
    second.restore_tables(other)
    assert second({"f": tf.constant(["ann", "bob", "eve"])})["f"][:, 0].numpy().tolist() == [1, 0, 2]


def test_a_restore_that_is_refused_too_late_says_so(tmp_path: Path) -> None:
    """Only TensorFlow knows which of two layers with a table of one name is whose, and it restores rows first."""

    class Two(keras.Model):
        def __init__(self, buckets: int) -> None:
            super().__init__()
            self.first, self.other = (
                TPUEmbedding(
                    {"f": FeatureConfig(TableConfig(9, DIM, "t"), vocabulary=Vocabulary(["a"], oov_buckets=own))}
                )
                for own in (1, buckets)
            )

    path = tf.train.Checkpoint(model=Two(1)).write(str(tmp_path / "ckpt"))
    with refused(CheckpointMismatchError, match="already"):
        tf.train.Checkpoint(model=Two(2)).restore(path)


def test_names_that_are_added_by_hand_fit_into_the_table() -> None:
    vocabulary = Vocabulary(["a"], oov_buckets=1, grows=True)
    layers = [make(vocabulary), make(vocabulary)]
    vocabulary.add(["b", "a", "b"])
    with refused(ConfigError):
        vocabulary.add([str(number) for number in range(ROWS)])
    assert vocabulary.get_vocabulary() == ["[UNK]", "a", "b"]
    vocabulary.grow([str(number) for number in range(ROWS)], room=10 * ROWS, update=1)
    assert vocabulary.rows == ROWS
    assert layers


def test_a_refused_file_changes_no_names(tmp_path: Path) -> None:
    def two(buckets: int, *names: str) -> TPUEmbedding:
        features = {
            name: FeatureConfig(TableConfig(9, DIM, name), vocabulary=Vocabulary(names, oov_buckets=own))
            for name, own in (("a", 1), ("b", buckets))
        }
        return TPUEmbedding(features, "sgd", name="embedding")

    def saved(layer: TPUEmbedding) -> dict[str, Any]:
        store: dict[str, Any] = {}
        layer.save_own_variables(store)
        return store

    layer = two(2, "x", "y")
    with refused(CheckpointMismatchError):
        layer.load_own_variables(saved(two(1, "p", "q")))
    for vocabulary in layer.vocabularies.values():
        assert vocabulary.get_vocabulary()[-2:] == ["x", "y"]


def test_rare_names_wait_in_their_buckets() -> None:
    vocabulary = Vocabulary(oov_buckets=1, grows=True, min_count=3)
    layer = make(vocabulary)
    inputs = {"bag": tf.ragged.constant([["a"]]), "one": tf.constant(["b"]), "ids": tf.constant([0])}
    for count in range(1, 4):
        step(layer, inputs)
        assert len(vocabulary) == (2 if count == 3 else 0)


def test_refusals() -> None:
    table, other = TableConfig(ROWS, DIM, "named"), TableConfig(ROWS, DIM, "other")
    growing = Vocabulary(grows=True)
    features: dict[str, dict[str, Any]] = {
        "two vocabularies of one table": {
            "a": FeatureConfig(table, vocabulary=["x"]),
            "b": FeatureConfig(table, vocabulary=["x"]),
        },
        "one that grows for two tables": {
            "a": FeatureConfig(table, vocabulary=growing),
            "b": FeatureConfig(other, vocabulary=growing),
        },
    }
    for each in features.values():
        with refused(ConfigError):
            TPUEmbedding(each, "sgd")
    with refused(ConfigError):
        FeatureConfig(TableConfig(2, DIM, "small"), vocabulary=["x", "y"], oov_buckets=1)
    layer = make(Vocabulary(["x", ""]))
    with refused(ConfigError):
        layer({"bag": tf.ragged.constant([["x"]]), "one": tf.constant([""]), "ids": tf.constant([0])})
    layer = make(Vocabulary(["x"]))
    with refused(ConfigError):
        layer({"bag": tf.ragged.constant([[1]]), "one": tf.constant(["x"]), "ids": tf.constant([0])})
    with refused(ConfigError):
        TPUEmbedding({"a": FeatureConfig(table, vocabulary=["x"])}, "sgd", takes_rows=1)  # type: ignore[arg-type]
    with refused(ConfigError, match="names_to_rows"):
        TPUEmbedding({"a": FeatureConfig(table, vocabulary=["x"])}, "sgd", takes_rows=True)({"a": tf.constant(["x"])})


@pytest.mark.parametrize("policy", ["error", "zeros", 7])
def test_an_unknown_name_follows_out_of_vocabulary(policy: str | int) -> None:
    layer = make(Vocabulary(["a", "b"]), policy)
    inputs = {"bag": tf.ragged.constant([["a"], []]), "one": tf.constant(["b", "nobody"]), "ids": tf.constant([0, 0])}
    if policy == "error":
        with refused(tf.errors.InvalidArgumentError):
            layer(inputs)
        return
    found = layer(inputs)["one"].numpy()
    np.testing.assert_array_equal(found[1], np.zeros(DIM) if policy == "zeros" else tables(layer)["named"][7])


def test_the_input_pipeline_makes_rows_for_a_layer_that_takes_them() -> None:
    vocabulary = Vocabulary(oov_buckets=1, grows=True)
    layer, direct = make(vocabulary, takes_rows=True), make(Vocabulary(oov_buckets=1, grows=True))
    names = [batch(STRINGS, "string", seed) for seed in range(0, 8, 2)]
    spec = tf.nest.map_structure(tf.type_spec_from_value, names[0])
    spec = {**spec, "bag": tf.RaggedTensorSpec([8, None], tf.string)}
    data = tf.data.Dataset.from_generator(lambda: iter(names), output_signature=spec)
    for given, inputs in zip(data.map(lambda each: layer.names_to_rows(each, training=True)), names, strict=True):
        found, truth = step(layer, given), step(direct, inputs)
        for feature, activations in truth.items():
            np.testing.assert_array_equal(found[feature], activations)
    assert len(vocabulary) > 10
    with refused(ConfigError):
        layer(names[0])


@pytest.mark.parametrize("size_threshold", [None, ROWS])
def test_on_tpus_the_input_pipeline_makes_the_rows(size_threshold: int | None) -> None:
    """On simulated SparseCores, and beside them in replicated tables, against a layer of ids on the host."""
    vocabulary, host = Vocabulary(STRINGS[:20], oov_buckets=3), make(None)
    names = [batch(STRINGS, "string", seed) for seed in range(0, 6, 2)]
    for inputs in names:
        step(host, as_ids(inputs, keras_lookup("string", STRINGS[:20], 3)))
    with simulated_tpu(replicas=1) as strategy:
        with strategy.scope():
            with refused(ConfigError):
                make(vocabulary)
            options = {"batch_size": 8} if size_threshold is None else {"size_threshold": size_threshold}
            layer = make(vocabulary, takes_rows=True, **options)
        for inputs in names:
            strategy.run(step, args=(layer, layer.names_to_rows(inputs)))
        for name, values in tables(host).items():
            np.testing.assert_allclose(tables(layer)[name], values, rtol=1e-6, err_msg=name)
