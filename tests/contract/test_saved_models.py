"""SavedModels and `.keras` files that Keras and TensorFlow write: the numbers of the model, or an error that names the export."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import capi
from tests.support.checkpoint.orbax_trees import write_tree
from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_saved_model
from tpuembed.compat.tfrs import PartialTPUEmbedding
from tpuembed.errors import CheckpointMismatchError, ConfigError

Array = np.ndarray[Any, Any]

USERS, VIDEOS = 40, 60
USER = np.array([3, 0, 39, 7])
LISTS = [[4, 59, 4], [], [17], [1, 2, 3, 4, 5]]
WATCHED = tf.ragged.constant(LISTS, tf.int64)
WEIGHTS = tf.ragged.constant([[0.5, 2.0, 1.0], [], [3.0], [1.0, 0.0, 1.0, 1.0, 2.0]], tf.float32)
KINDS: Mapping[str, Callable[[Any], Any]] = {"ragged": lambda lists: lists, "sparse": lambda lists: lists.to_sparse()}


def features() -> dict[str, FeatureConfig]:
    videos = TableConfig(VIDEOS, 4, "videos", combiner="mean")
    return {"user": FeatureConfig(TableConfig(USERS, 3, "users")), "watched": FeatureConfig(videos)}


@keras.saving.register_keras_serializable("tests")
class Ranker(keras.Model):
    """As in TFRS' guide, with a feature of its own that is computed of the lists."""

    kind: Any = TPUEmbedding

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.embedding = self.kind(features(), "adagrad")
        self.heads = [keras.layers.Dense(1)]

    def call(self, inputs: Any) -> Any:
        weights = inputs.get("weights")
        ids = {"user": inputs["user"], "watched": inputs["watched"]}
        rows = self.embedding(ids) if weights is None else self.embedding(ids, {"user": None, "watched": weights})
        return self.heads[0](tf.concat([rows["user"], rows["watched"]], 1))

    def get_config(self) -> dict[str, Any]:
        return {}


@keras.saving.register_keras_serializable("tests")
class PartialRanker(Ranker):
    kind = PartialTPUEmbedding


def functional(kind: str, *, weighted: bool = False) -> Any:
    inputs = {"user": keras.Input((), dtype="int64", name="user")}
    for name, dtype in (("watched", "int64"), *((("weights", "float32"),) if weighted else ())):
        inputs[name] = keras.Input((None,), dtype=dtype, name=name, **{kind: True})
    weights = {"user": None, "watched": inputs["weights"]} if weighted else None
    rows = TPUEmbedding(features(), "adagrad")({name: inputs[name] for name in ("user", "watched")}, weights)
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()([rows["user"], rows["watched"]])))


def given(kind: str, *, weighted: bool = False) -> dict[str, Any]:
    lists = {"watched": WATCHED, **({"weights": WEIGHTS} if weighted else {})}
    return {"user": tf.constant(USER), **{name: KINDS[kind](values) for name, values in lists.items()}}


def trained(style: str, kind: str, *, weighted: bool = False) -> Any:
    """A model after a step, so that its tables differ from a new one's."""
    model = functional(kind, weighted=weighted) if style == "functional" else Ranker()
    model.compile("sgd", "mse")
    model.train_on_batch(given(kind, weighted=weighted), np.ones((4, 1)))
    return model


def layer_of(model: Any) -> Any:
    return next(layer for layer in model.layers if isinstance(layer, TPUEmbedding))


def truth(model: Any, *, weighted: bool = False) -> Array:
    """The outputs, computed by numpy from the weights."""
    users, videos = (table.numpy() for table in layer_of(model).embedding_tables.values())
    head = next(weight.numpy() for weight in model.trainable_variables if weight.path.endswith("kernel"))
    bias = next(weight.numpy() for weight in model.trainable_variables if weight.path.endswith("bias"))
    weights = WEIGHTS.to_list() if weighted else [[1.0] * len(ids) for ids in LISTS]
    rows = [
        np.sum([w * videos[i] for i, w in zip(ids, w_of, strict=True)], 0) / max(sum(w_of), 1e-9)
        if ids
        else np.zeros(4, np.float32)
        for ids, w_of in zip(LISTS, weights, strict=True)
    ]
    found: Array = np.concatenate([users[USER], np.stack(rows)], 1) @ head + bias
    return found


def by_export(model: Any, path: Path) -> None:
    model.export(path, verbose=False)


def by_archive(model: Any, path: Path) -> None:
    dense = {
        name: keras.InputSpec(dtype="int64", shape=(None, None)[: 1 + (name != "user")]) for name in ("user", "watched")
    }
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serve", lambda inputs: model(inputs, training=False), [dense])
    archive.write_out(path, verbose=False)


def by_save(model: Any, path: Path) -> None:
    tf.saved_model.save(model, str(path))


CASES = [
    (style, kind, way)
    for way in (by_export, by_archive, by_save)
    for style in ("functional", "subclassed")
    for kind in KINDS
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("style", "kind", "way"), CASES)
def test_a_default_signature_that_would_look_ids_up_one_by_one_is_refused(
    tmp_path: Path, style: str, kind: str, way: Any
) -> None:
    model = trained(style, kind)
    for _ in range(2):  # a refusal is not a call
        with refused(ConfigError):
            way(model, tmp_path / "m")


def test_a_default_signature_without_weights_is_refused(tmp_path: Path) -> None:
    model = trained("functional", "ragged", weighted=True)
    with refused(ConfigError):
        by_export(model, tmp_path / "m")


@pytest.mark.parametrize(("style", "weighted"), [("functional", False), ("subclassed", False), ("functional", True)])
def test_a_model_is_saved_with_a_signature_of_examples(tmp_path: Path, style: str, weighted: bool) -> None:
    """The recipe of TFRS' layer. TensorFlow traces Keras' own signature beside it."""
    model = trained(style, "ragged", weighted=weighted)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="examples")])
    def serve(examples: Any) -> Any:
        parsed = tf.io.parse_example(
            examples,
            {
                "user": tf.io.FixedLenFeature([], tf.int64),
                "watched": tf.io.RaggedFeature(tf.int64),
                "weights": tf.io.RaggedFeature(tf.float32),
            },
        )
        return model(parsed if weighted else {name: parsed[name] for name in ("user", "watched")})

    def example(user: int, watched: Any, weights: Any) -> Any:
        integers = {
            name: tf.train.Feature(int64_list=tf.train.Int64List(value=value))
            for name, value in (("user", [user]), ("watched", watched))
        }
        floats = {"weights": tf.train.Feature(float_list=tf.train.FloatList(value=weights))}
        return tf.train.Example(features=tf.train.Features(feature={**integers, **floats})).SerializeToString()

    tf.saved_model.save(model, str(tmp_path / "m"), signatures={"serving": serve})
    loaded = tf.saved_model.load(str(tmp_path / "m"))
    examples = [example(*row) for row in zip(USER, LISTS, WEIGHTS.to_list(), strict=True)]
    found = loaded.signatures["serving"](examples=tf.constant(examples))["output_0"]
    np.testing.assert_allclose(found, model(given("ragged", weighted=weighted)), atol=1e-6)
    np.testing.assert_allclose(found, truth(model, weighted=weighted), atol=1e-5)


def test_a_model_of_two_features_is_saved_whatever_its_call_does_with_lists(tmp_path: Path) -> None:
    class Counting(Ranker):
        def call(self, inputs: Any) -> Any:
            return super().call(inputs) + tf.cast(inputs["watched"].row_lengths()[:, None], tf.float32)

    model = Counting()
    want = model(given("ragged"))

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, None], tf.int64)])
    def serve(user: Any, watched: Any) -> Any:
        return model({"user": user, "watched": tf.RaggedTensor.from_tensor(watched, padding=-1)})

    root = tf.Module()
    root.model = model
    tf.saved_model.save(root, str(tmp_path / "m"), signatures=serve)
    loaded = tf.saved_model.load(str(tmp_path / "m"))
    found = loaded.signatures["serving_default"](user=tf.constant(USER), watched=WATCHED.to_tensor(-1))
    np.testing.assert_allclose(found["output_0"], want, atol=1e-6)


@pytest.mark.parametrize(("style", "weighted"), [("functional", True), ("subclassed", False)])
def test_the_export_takes_a_model_in_memory(tmp_path: Path, style: str, weighted: bool) -> None:
    model = trained(style, "ragged", weighted=weighted)
    specs = {"user": tf.TensorSpec([None], tf.int64), "watched": tf.RaggedTensorSpec([None, None], tf.int64)}
    path = export_saved_model(model if style == "functional" else (model, specs), tmp_path / "m").path
    lists = {
        "watched": WATCHED.to_tensor(-1).numpy(),
        **({"weights": WEIGHTS.to_tensor(0.0).numpy()} if weighted else {}),
    }
    (found,) = capi.predict(path, {"user": USER, **lists}).values()
    np.testing.assert_allclose(found, truth(model, weighted=weighted), atol=1e-5)


def test_a_session_finds_the_tables_of_a_saved_layer(tmp_path: Path) -> None:
    layer = TPUEmbedding(features(), "adagrad")
    rows = layer.embedding_tables[next(iter(layer.embedding_tables))].numpy()

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64, name="user")])
    def serve(user: Any) -> Any:
        return layer({"user": user, "watched": WATCHED})["user"]

    tf.saved_model.save(layer, str(tmp_path / "m"), signatures=serve)
    (found,) = capi.predict(tmp_path / "m", {"user": USER}).values()
    np.testing.assert_array_equal(found, rows[USER])


# ---- files of Keras


@pytest.mark.filterwarnings("ignore:Model '.*ranker.*' had a build config:UserWarning")
@pytest.mark.filterwarnings("ignore:Skipping:UserWarning")
@pytest.mark.parametrize("kind", [Ranker, PartialRanker])
def test_a_file_of_which_keras_cannot_build_the_model_is_refused(tmp_path: Path, kind: type[Any]) -> None:
    """It warned, and left the head as it was made."""
    model = kind()
    want = model(given("ragged"))
    model.save(tmp_path / "m.keras")
    with refused(ValueError, match="dense"):
        keras.models.load_model(tmp_path / "m.keras")
    again = kind()
    again(given("ragged"))
    again.load_weights(tmp_path / "m.keras")
    np.testing.assert_array_equal(again(given("ragged")), want)


def test_a_subclassed_model_of_dense_features_comes_back(tmp_path: Path) -> None:
    @keras.saving.register_keras_serializable("tests")
    class Dense(Ranker):
        def call(self, inputs: Any) -> Any:
            return super().call({"user": inputs["user"], "watched": inputs["watched"]})

    ids = {"user": tf.constant(USER), "watched": tf.constant(USER)}
    model = Dense()
    want = model(ids)
    model.save(tmp_path / "m.keras")
    np.testing.assert_array_equal(keras.models.load_model(tmp_path / "m.keras")(ids), want)


@pytest.mark.filterwarnings("ignore:Skipping nested container:UserWarning")
def test_a_layer_that_two_models_share_is_refused_with_the_way_out(tmp_path: Path) -> None:
    def towers() -> Any:
        layer = TPUEmbedding(FeatureConfig(TableConfig(20, 4, "t")), "adagrad", name="shared")
        inputs = {name: keras.Input((), dtype="int64", name=name) for name in ("ask", "item")}
        sides = []
        for name in inputs:
            ids = keras.Input((), dtype="int64")
            sides.append(keras.Model(ids, keras.layers.Dense(3)(layer(ids)), name=f"{name}_tower")(inputs[name]))
        return keras.Model(inputs, keras.layers.Dot(1)(sides))

    ids = {"ask": np.arange(9), "item": np.arange(9) + 11}
    model = towers()
    model.save(tmp_path / "m.keras")
    with refused(ValueError, match="shared"):
        keras.models.load_model(tmp_path / "m.keras")
    again = towers()
    again.load_weights(tmp_path / "m.keras")
    np.testing.assert_array_equal(again.predict(ids, verbose=0), model.predict(ids, verbose=0))


def two_layers() -> Any:
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in ("user", "video")}
    rows = [
        TPUEmbedding(FeatureConfig(TableConfig(9, 4, f"{name}s")), "adam", name=f"{name}_rows")(ids)
        for name, ids in inputs.items()
    ]
    model = keras.Model(inputs, keras.layers.Dense(1, name="score")(keras.layers.Concatenate()(rows)))
    model.compile("sgd", "mse")  # Keras numbers the optimizers of a process, and finds their state by name
    return model


def test_a_model_of_two_layers_comes_back_from_a_state_tree() -> None:
    """As `keras.callbacks.OrbaxCheckpoint` saves and loads a model."""
    ids = {"user": np.arange(9), "video": np.arange(9)[::-1].copy()}
    model, again = two_layers(), two_layers()
    model.fit(ids, np.ones((9, 1)), epochs=3, verbose=0, shuffle=False)
    again.optimizer.build(again.trainable_variables)
    again.set_state_tree(model.get_state_tree(value_format="numpy_array"))
    for one in (model, again):
        one.fit(ids, np.ones((9, 1)), epochs=2, verbose=0, shuffle=False)
    np.testing.assert_array_equal(again.predict(ids, verbose=0), model.predict(ids, verbose=0))
    assert [int(again.get_layer(f"{name}_rows").updates.numpy()) for name in ids] == [5, 5]


def test_a_state_tree_that_a_model_cannot_hold_is_refused() -> None:
    model = Ranker(name="ranker")
    model.compile("adam", "mse")
    model.train_on_batch(given("ragged"), np.ones((4, 1)))
    state = model.get_state_tree(value_format="numpy_array")
    with refused(ConfigError):
        Ranker().set_state_tree(state)


@pytest.mark.parametrize("model", [None, two_layers], ids=["lookups", "model"])
def test_an_export_of_keras_orbax_checkpoint_names_the_way_out(tmp_path: Path, model: Any) -> None:
    """The names are those of Keras 3.15 and Orbax 0.12. Without save_weights_only=True, `pytree/` stands before them."""
    state = two_layers().get_state_tree(value_format="numpy_array")
    flat = two_layers()._flatten_nested_dict(state)
    leaves = {tuple(path.split("/")): np.asarray(value) for path, value in flat.items() if np.ndim(value) == 2}
    write_tree(tmp_path / "5" / "pytree", leaves)
    with refused(ConfigError):
        export_saved_model(tmp_path / "5", tmp_path / "m", model=model, workers=1)
    features = {"user": {"table": "non_trainable_variables/users", "input": "id"}}
    path = export_saved_model(tmp_path / "5", tmp_path / "m", serving_config={"features": features}, workers=1).path
    (found,) = capi.predict(path, {"user": np.arange(9)}).values()
    np.testing.assert_array_equal(found, flat["non_trainable_variables/users"])


def test_a_checkpoint_that_was_written_asynchronously_names_the_way_out(tmp_path: Path) -> None:
    """Its copies of Keras' weights have no names. Its tables do."""
    ids = {"user": np.arange(9), "video": np.arange(9)}
    model = two_layers()
    checkpoint = tf.train.Checkpoint(model=model)
    prefix = checkpoint.write(str(tmp_path / "ckpt"), tf.train.CheckpointOptions(enable_async=True))
    checkpoint.sync()
    with refused(CheckpointMismatchError):
        export_saved_model(prefix, tmp_path / "m", model=two_layers, workers=1)
    again = two_layers()
    tf.train.Checkpoint(model=again).read(prefix).expect_partial()
    (found,) = capi.predict(export_saved_model(again, tmp_path / "m").path, ids).values()
    np.testing.assert_allclose(found, model.predict(ids, verbose=0), atol=1e-6)
