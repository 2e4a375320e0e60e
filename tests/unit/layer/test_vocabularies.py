"""Features of names: the layer against Keras' own lookups in front of a layer of ids, and against a dictionary of rows."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, Vocabulary, export_saved_model
from tpuembed.errors import CheckpointMismatchError, ConfigError
from tpuembed.testing import simulated_tpu

ROWS, DIM = 40, 3
Array = np.ndarray[Any, Any]

STRINGS = [b"name %d" % i for i in range(20)] + [b"\0", b"\xff\xfe", "é".encode(), b"x" * 1000]


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


def batch(seed: int) -> dict[str, Any]:
    rng, names = np.random.default_rng(seed), np.array([*STRINGS, None], object)
    lists = names[rng.integers(0, len(STRINGS), (8, 4))]
    lists[rng.random(lists.shape) < 0.3] = b""
    one, ids = names[rng.integers(0, len(STRINGS), 8)], rng.integers(0, ROWS, 8)
    return {"bag": tf.RaggedTensor.from_tensor(lists, padding=b""), "one": tf.constant(one), "ids": tf.constant(ids)}


def step(layer: TPUEmbedding, inputs: Any) -> Any:
    with tf.GradientTape() as tape:
        activations = layer(inputs)
        loss = tf.add_n([tf.reduce_sum(rows * tf.cast(tf.range(1, 4), tf.float32)) for rows in activations.values()])
    layer.apply_gradients(tape.gradient(loss, layer.trainable_variables))
    return activations


def tables(layer: TPUEmbedding) -> dict[str, Array]:
    return {name: variable.numpy() for name, variable in layer.named_variables().items()}


def as_ids(inputs: dict[str, Any], lookup: Any) -> dict[str, Any]:
    """Return `inputs` as a layer of ids takes them. Padding is -1."""
    names = inputs["bag"].flat_values
    rows = tf.where(names == b"", np.int64(-1), lookup(names))
    return {"bag": inputs["bag"].with_values(rows), "one": lookup(inputs["one"]), "ids": inputs["ids"]}


def test_a_graph_reads_the_index_at_once() -> None:
    """Between two reads, another thread's restore may assign a larger index. A known name was unknown in it."""
    layer = make(Vocabulary(STRINGS), takes_rows=True)
    assert layer._vocabularies is not None
    cells = layer._vocabularies.copies["named"].cells
    function = tf.function(
        lambda names: layer.names_to_rows({"one": names, "bag": names[:, None], "ids": tf.size(names)})
    )
    graph = function.get_concrete_function(tf.TensorSpec([None], tf.string)).graph
    [handle] = [inside for outside, inside in graph.captures if outside is cells.handle]
    assert [reader.type for reader in handle.consumers()] == ["ReadVariableOp"] * 2  # of `one` and of `bag`


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


@pytest.mark.parametrize(
    "other",
    [Vocabulary(oov_buckets=1), Vocabulary(dtype="int64", oov_buckets=2)],
    ids=["buckets", "type"],
)
@pytest.mark.parametrize("kind", ["weights", "checkpoint"])
@pytest.mark.filterwarnings("ignore:Skipping nested container")
def test_a_save_of_another_vocabulary_is_refused(kind: str, other: Vocabulary, tmp_path: Path) -> None:
    made, _ = model(Vocabulary(["a", "b"], oov_buckets=2))
    path = str(tmp_path / ("m.weights.h5" if kind == "weights" else "ckpt-1"))
    made.save_weights(path) if kind == "weights" else tf.train.Checkpoint(model=made).write(path)
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


def test_tables_of_one_vocabulary_get_names_of_their_own(tmp_path: Path) -> None:
    def two(one: Vocabulary, other: Vocabulary) -> TPUEmbedding:
        given = {"a": one, "b": other}
        features = {name: FeatureConfig(TableConfig(9, DIM, name), vocabulary=its) for name, its in given.items()}
        return TPUEmbedding(features, "sgd", name="embedding")

    saved = two(Vocabulary(["x", "y"]), Vocabulary(["y", "x"]))
    path, shared, names = (
        tf.train.Checkpoint(layer=saved).save(str(tmp_path / "ckpt")),
        Vocabulary(),
        tf.constant(["x"]),
    )
    by_tensorflow, ours = two(shared, shared), two(shared, shared)
    tf.train.Checkpoint(layer=by_tensorflow).restore(path)
    ours.restore_tables(path)
    for layer in (by_tensorflow, ours):
        for name, rows in saved({"a": names, "b": names}).items():
            np.testing.assert_array_equal(layer({"a": names, "b": names})[name], rows)
        assert [each.get_vocabulary() for each in layer.vocabularies.values()] == [["x", "y"], ["y", "x"]]
    assert not len(shared)


@pytest.mark.parametrize("kind", ["ckpt", "model.weights.h5"])
def test_a_restore_does_not_rename_the_rows_of_another_layer(kind: str, tmp_path: Path) -> None:
    """Two models of one vocabulary object, as of a module's features. The rows of the second are not restored."""

    class Model(keras.Model):
        def __init__(self, vocabulary: Vocabulary) -> None:
            super().__init__()
            features = {"f": FeatureConfig(TableConfig(9, 1, "t"), vocabulary=vocabulary)}
            self.layer, self.built = TPUEmbedding(features, "sgd", name="embedding"), True
            self.layer.update_embedding_table("t", np.arange(9, dtype=np.float32)[:, None])

        def call(self, names: Any) -> Any:
            return self.layer({"f": names})["f"]

    def save(model: Model, name: str) -> str:
        (tmp_path / name).mkdir()
        if kind == "ckpt":
            return str(tf.train.Checkpoint(model=model).write(str(tmp_path / name / kind)))
        model.save_weights(str(tmp_path / name / kind))
        return str(tmp_path / name / kind)

    def restore(model: Model, path: str) -> None:
        tf.train.Checkpoint(model=model).restore(path) if kind == "ckpt" else model.load_weights(path)

    names, shared = tf.constant(["ann", "bob"]), Vocabulary(["ann", "bob"])
    other = save(Model(Vocabulary(["bob", "ann"])), "other")
    model, second = Model(shared), Model(shared)
    in_graph = tf.function(model.call)
    assert in_graph(names)[:, 0].numpy().tolist() == [0, 1]
    restore(model, other)
    assert in_graph(names)[:, 0].numpy().tolist() == model(names)[:, 0].numpy().tolist() == [1, 0]
    assert second(names)[:, 0].numpy().tolist() == [0, 1]
    assert model.layer.vocabularies["t"].get_vocabulary() == ["bob", "ann"]
    assert shared.get_vocabulary() == ["ann", "bob"]
    export_saved_model((model, tf.TensorSpec([None], tf.string, name="names")), tmp_path / "export")
    served = tf.saved_model.load(str(tmp_path / "export" / "1")).signatures["serving_default"]
    (rows,) = served(names=names).values()
    assert rows[:, 0].numpy().tolist() == [1, 0]
    again = Model(Vocabulary())
    restore(again, save(model, "again"))
    assert again(names)[:, 0].numpy().tolist() == [1, 0]


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


def test_refusals() -> None:
    layer = make(Vocabulary(["x", ""]))
    with refused(ConfigError):
        layer({"bag": tf.ragged.constant([["x"]]), "one": tf.constant([""]), "ids": tf.constant([0])})
    layer = make(Vocabulary(["x"]), takes_rows=True)
    with refused(ConfigError, match="names_to_rows"):
        layer({"bag": tf.ragged.constant([["x"]]), "one": tf.constant(["x"]), "ids": tf.constant([0])})


@pytest.mark.parametrize("size_threshold", [None, ROWS])
def test_on_tpus_the_input_pipeline_makes_the_rows(size_threshold: int | None) -> None:
    """On simulated SparseCores, and beside them in replicated tables, against a layer of ids on the host."""
    vocabulary, host = Vocabulary(STRINGS[:20], oov_buckets=3), make(None)
    names = [batch(seed) for seed in range(3)]
    lookup = keras.layers.StringLookup(vocabulary=tf.constant(STRINGS[:20]), num_oov_indices=3, mask_token=None)
    for inputs in names:
        step(host, as_ids(inputs, lookup))
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
