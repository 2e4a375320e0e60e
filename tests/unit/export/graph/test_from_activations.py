"""The signature `from_activations`: what it computes, and why it is left out where its inputs are not looked up alone."""

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import capi
from tests.support.export import named_model, whole_model
from tests.support.messages import said
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, Vocabulary, export_saved_model
from tpuembed.export.graph.warmup import WARMUP_PATH
from tpuembed.manifest import ActivationEntry, FromActivations, Manifest

pytestmark = [
    pytest.mark.usefixtures("exports_in_this_process"),
    pytest.mark.filterwarnings("ignore:no requests to warm up", "ignore:Leaving out the signature serving_examples"),
]


def exported(model: Any, folder: Path, **options: Any) -> tuple[Path, FromActivations]:
    path = export_saved_model(model, folder / "m", **options).path
    manifest = Manifest.read(path)
    assert manifest is not None
    return path, manifest.from_activations


def constants(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tf.constant(value) for name, value in inputs.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, FromActivations]:
    model = whole_model.build()
    return model, *exported(model, tmp_path_factory.mktemp("whole"))


def activations_of(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    rows = whole_model.rows_of(model)
    found = {name: whole_model.look_up(name, rows[name], inputs)[0] for name in whole_model.FEATURES}
    return {name: value.astype(np.float32) for name, value in found.items()} | {"price": inputs["price"]}


@pytest.mark.parametrize(("batch", "hot"), [(1, 1), (5, 4), (3, 0), (0, 2)])
@pytest.mark.sampled(2)
def test_outputs_are_those_of_the_ids(whole: Any, batch: int, hot: int) -> None:
    model, path, _ = whole
    inputs = whole_model.draw(np.random.default_rng(batch + hot), batch, hot)
    loaded = tf.saved_model.load(str(path))
    read = {variable.shape.as_list()[0] for variable in loaded.signatures["from_activations"].variables}
    assert read <= {66, 8, 1}, "only the dense layers' weights, and no table"
    expected = loaded.signatures["serving_default"](**constants(inputs))
    given = activations_of(model, inputs)
    found = loaded.signatures["from_activations"](**constants(given))
    assert found.keys() == expected.keys() == {"score"}
    np.testing.assert_allclose(found["score"], expected["score"], rtol=1e-5, atol=1e-5)
    in_c = capi.predict(path, given, "from_activations")
    np.testing.assert_allclose(in_c["score"], expected["score"], rtol=1e-5, atol=1e-5)


def test_the_manifest_describes_it(whole: Any) -> None:
    _, path, found = whole
    assert found.left_out == ""
    features = {one.name: one for one in found.features}
    assert sorted(features) == sorted(whole_model.FEATURES)
    for name, spec in whole_model.FEATURES.items():
        rows, dim = whole_model.SIZES[spec["table"]]
        assert features[name] == ActivationEntry(
            name=name,
            table=f"{spec['table']}_{spec.get('combiner', 'mean')}",
            input="ids" if "combiner" in spec or "length" in spec else "id",
            weighted="weights" in spec,
            max_sequence_length=spec.get("length", 0),
            out_of_vocabulary=spec.get("policy", "error"),
            combiner=spec.get("combiner", "mean"),
            ids=spec["ids"],
            weights=spec.get("weights", ""),
        ), (rows, dim)
    manifest = Manifest.read(path)
    assert manifest is not None
    inputs = manifest.signatures["from_activations"]["inputs"]
    assert sorted(inputs) == sorted([*features, "price"])
    assert inputs["pair"].shape == (None, 2, 4)
    assert inputs["triples"].shape == (None, None, 3, 4)
    assert inputs["steps"].shape == (None, 2, 9)
    assert inputs["light"].shape == (None, 4)
    assert {name for name, spec in inputs.items() if spec.dtype != "float32"} == set()


def test_lookups_have_none(tmp_path: Path) -> None:
    layer = TPUEmbedding({"x": FeatureConfig(TableConfig(5, 2, "t"))}, optimizer="sgd")
    path, found = exported(layer, tmp_path)
    said(found.left_out)
    assert "from_activations" not in tf.saved_model.load(str(path)).signatures


# ---- models that have it


def table(name: str = "t", **options: Any) -> TableConfig:
    return TableConfig(20, 3, name, **options)


def embedding(config: Any = None, **options: Any) -> TPUEmbedding:
    return TPUEmbedding(config or {"x": FeatureConfig(table())}, optimizer="sgd", **options)


def ids_input(name: str = "x", shape: Any = (), dtype: str = "int64", **options: Any) -> Any:
    return keras.Input(shape, dtype=dtype, name=name, **options)


class Subclassed(keras.Model):
    """A model whose `function` gets the layers and the inputs."""

    def __init__(self, function: Callable[[Any, Any], Any], *layers: Any) -> None:
        super().__init__(name="subclassed")
        self.function, self.embeddings = function, layers

    def call(self, inputs: Any) -> Any:
        return self.function(self.embeddings, inputs)


ONE = {"x": tf.TensorSpec([None], tf.int64)}
LIST = {"x": tf.RaggedTensorSpec([None, None], tf.int64)}


def subclassed(function: Callable[[Any, Any], Any], specs: Any = ONE, *layers: Any) -> Any:
    return Subclassed(function, *(layers or [embedding()])), dict(specs)


def in_a_branch(layers: Any, inputs: Any) -> Any:
    """Look up in one branch of a condition of another input."""
    return tf.cond(
        tf.reduce_sum(inputs["y"]) > 0,
        lambda: layers[0]({"x": inputs["x"]})["x"],
        lambda: tf.zeros([tf.shape(inputs["y"])[0], 3]),
    )


WITH: dict[str, Callable[[], Any]] = {
    "identity and a wider type": lambda: subclassed(
        lambda layers, inputs: layers[0]({"x": tf.cast(tf.identity(inputs["x"]), tf.int64)}),
        {"x": tf.TensorSpec([None], tf.int32)},
    ),
    "a narrower type that holds all ids": lambda: subclassed(
        lambda layers, inputs: layers[0]({"x": tf.cast(inputs["x"], tf.int16)}),
    ),
    "a condition": lambda: subclassed(in_a_branch, ONE | {"y": tf.TensorSpec([None], tf.float32)}),
    "rows of names": lambda: subclassed(
        lambda layers, inputs: layers[0](inputs),
        ONE,
        embedding({"x": FeatureConfig(table(), vocabulary=Vocabulary([*"abc"]))}, takes_rows=True),
    ),
    "one feature": lambda: subclassed(
        lambda layers, inputs: layers[0](inputs["x"]), ONE, embedding(FeatureConfig(table(), name="x"))
    ),
}


@pytest.mark.parametrize("name", WITH)
@pytest.mark.sampled(2)
def test_models_that_have_it(name: str, tmp_path: Path) -> None:
    made = WITH[name]()
    path, found = exported(made, tmp_path)
    assert found.left_out == ""
    loaded = tf.saved_model.load(str(path)).signatures
    rows = np.asarray(next(iter(made[0].embeddings[0].embedding_tables.values())))
    ids = np.array([3, 0, 19])
    for y in ([1.0, 1.0, 1.0], [-1.0, 0.0, 0.0]):
        more = {"y": tf.constant(y)} if "y" in made[1] else {}
        given = tf.constant(ids, made[1]["x"].dtype)
        expected = loaded["serving_default"](x=given, **more)
        outputs = loaded["from_activations"](x=tf.constant(rows[ids]), **more)
        for output, value in expected.items():
            np.testing.assert_array_equal(outputs[output], value)


@pytest.mark.filterwarnings("ignore:Leaving out the signature")
def test_one_id_for_all_examples(tmp_path: Path) -> None:
    """An input without a batch is in no tf.train.Example, and the warm-up has a request without one."""
    specs = {"x": tf.TensorSpec([], tf.int64), "y": tf.TensorSpec([None], tf.float32)}
    made = subclassed(lambda layers, inputs: layers[0]({"x": inputs["x"]})["x"] + inputs["y"][:, None], specs)
    path, found = exported(made, tmp_path)
    assert found.left_out == ""
    assert (path / WARMUP_PATH).stat().st_size > 0
    loaded = tf.saved_model.load(str(path)).signatures
    rows = np.asarray(next(iter(made[0].embeddings[0].embedding_tables.values())))
    y = tf.constant([1.0, 2.0])
    expected = loaded["serving_default"](x=tf.constant(3, tf.int64), y=y)
    outputs = loaded["from_activations"](x=tf.constant(rows[3]), y=y)
    for output, value in expected.items():
        np.testing.assert_array_equal(outputs[output], value)


class Scores(keras.layers.Layer):
    """Scores all rows of a table."""

    def __init__(self, layer: Any, config: Any) -> None:
        super().__init__()
        self.layer, self.config = layer, config

    def call(self, query: Any) -> Any:
        return tf.matmul(query, self.layer.embedding_tables[self.config], transpose_b=True)

    def compute_output_shape(self, shape: Any) -> Any:
        return (shape[0], self.config.vocabulary_size)


def test_a_table_that_is_read_whole_is_named(tmp_path: Path) -> None:
    config, x = table("items"), ids_input()
    layer = embedding({"x": FeatureConfig(config)})
    model = keras.Model({"x": x}, {"scores": Scores(layer, config)(layer({"x": x})["x"])})
    path, found = exported(model, tmp_path)
    assert (found.left_out, found.whole_tables) == ("", ("items",))
    loaded = tf.saved_model.load(str(path)).signatures
    rows = np.asarray(layer.embedding_tables[config])
    outputs = loaded["from_activations"](x=tf.constant(rows[[4, 5]]))
    np.testing.assert_allclose(outputs["scores"], rows[[4, 5]] @ rows.T, rtol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["variables", "mmap"])
def test_features_that_take_names(layout: str, tmp_path: Path) -> None:
    model = named_model.build()
    path, found = exported(model, tmp_path, layout=layout)
    assert found.left_out == ""
    kinds = {"users": "string", "items": "int64", "rows": ""}
    assert {one.name: (one.names, one.ids) for one in found.features} == {
        name: (kinds[spec["table"]], spec["ids"]) for name, spec in named_model.FEATURES.items()
    }
    rows = named_model.rows_of(model)
    for batch, hot in ((4, 3), (3, 0), (0, 2)):
        inputs = named_model.draw(np.random.default_rng(batch), batch, hot)
        expected = capi.predict(path, inputs)
        activations = {name: named_model.look_up(name, rows[name], inputs, lambda name: name % 2) for name in rows}
        outputs = capi.predict(path, activations, "from_activations")
        for name, value in expected.items():
            np.testing.assert_allclose(outputs[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


# ---- models that have none


def functional(function: Callable[[Any, Any], Any], x: Any, config: Any = None) -> Any:
    layer = embedding(config)
    return keras.Model({"x": x}, function(layer, x))


def twice(layers: Any, inputs: Any) -> Any:
    return layers[0](inputs)["x"] + layers[0](inputs)["x"]


def of_two_layers(layers: Any, inputs: Any) -> Any:
    return layers[0]([inputs["x"]])[0] + layers[1]([inputs["y"]])[0]


def in_a_function(layers: Any, inputs: Any) -> Any:
    return tf.function(lambda x: layers[0]({"x": x}), autograph=False)(inputs["x"])


def in_a_kept_function(with_another: bool) -> Callable[[Any, Any], Any]:
    """TensorFlow traces the function once, so only the first trace sees its lookup."""
    kept: list[Any] = []

    def call(layers: Any, inputs: Any) -> Any:
        if not kept:
            kept.append(tf.function(lambda y: layers[1](y), autograph=False))
        rows = kept[0](inputs["y"])
        return rows + layers[0](inputs["x"]) if with_another else rows

    return call


def checked(layers: Any, inputs: Any) -> Any:
    tf.debugging.assert_non_negative(inputs["x"])
    return layers[0](inputs)


def printed(layers: Any, inputs: Any) -> Any:
    """An operation with a side effect that no output depends on."""
    tf.print("ids", inputs["x"])
    return layers[0](inputs)


def weighted(layers: Any, inputs: Any) -> Any:
    return layers[0]({"x": inputs["x"]}, {"x": inputs["w"]})


def doubled(layers: Any, inputs: Any) -> Any:
    return layers[0]({"x": inputs["x"]}, {"x": inputs["x_weights"].with_values(inputs["x_weights"].values * 2)})


def weighted_and_counted(layers: Any, inputs: Any) -> Any:
    weights = inputs["x_weights"]
    return {**layers[0]({"x": inputs["x"]}), "total": tf.reduce_sum(weights, 1)}


def fails(layers: Any, inputs: Any) -> Any:
    """A model that does not take activations of another operation than a lookup."""
    rows = layers[0](inputs)["x"]
    if tf.is_symbolic_tensor(rows) and rows.op.type == "Placeholder":
        raise ValueError("where are the rows from?")
    return rows


def changing() -> Callable[[Any, Any], Any]:
    """A model that looks up other features each time."""
    count = itertools.count()

    def call(layers: Any, inputs: Any) -> Any:
        names = ("x", "y") if next(count) % 2 else ("y", "x")
        return layers[0]({"x": inputs[names[0]], "y": inputs[names[1]]})

    return call


TWO = {"x": FeatureConfig(table("t")), "y": FeatureConfig(table("u"))}
X_AND_Y = ONE | {"y": tf.TensorSpec([None], tf.int64)}
FLOATS = {"w": tf.RaggedTensorSpec([None, None], tf.float32)}
WEIGHTS = {"x_weights": tf.RaggedTensorSpec([None, None], tf.float32)}
HALF = {"x_weights": tf.RaggedTensorSpec([None, None], tf.float16)}
DOUBLE = {"x_weights": tf.RaggedTensorSpec([None, None], tf.float64)}


def numbers(x: Any) -> Any:
    return keras.layers.Hashing(20)(x)


def model_of_doubles() -> Any:
    """Keras casts the inputs of other models."""
    made, specs = subclassed(
        lambda layers, inputs: layers[0]({"x": inputs["x"]}, {"x": inputs["x_weights"]}),
        LIST | DOUBLE,
        embedding(dtype="float64"),
    )
    made.dtype_policy = "float64"
    return made, specs


STRING = {"x": tf.TensorSpec([None], tf.string)}


def named() -> TPUEmbedding:
    return embedding({"x": FeatureConfig(table(), vocabulary=Vocabulary(["a", "b"]))})


def by_number() -> TPUEmbedding:
    return embedding({"x": FeatureConfig(table("u"), vocabulary=Vocabulary([0, 1], dtype="int64", oov_buckets=1))})


def in_turns() -> Callable[[Any, Any], Any]:
    """Look up names and then rows, or the other way, of the same feature."""
    count = itertools.count()
    return lambda layers, inputs: layers[next(count) % 2](inputs)


WITHOUT: dict[str, Callable[[], Any]] = {
    "a dense layer": lambda: functional(
        lambda layer, x: {"x": layer({"x": x})["x"], "d": keras.layers.Dense(2)(keras.ops.cast(x, "float32")[:, None])},
        ids_input(),
    ),
    "an output": lambda: functional(lambda layer, x: {"r": layer({"x": x})["x"], "id": x}, ids_input()),
    "its batch size": lambda: subclassed(
        lambda layers, inputs: {**layers[0](inputs), "ones": tf.ones([tf.shape(inputs["x"])[0]])}
    ),
    "the lengths of lists": lambda: subclassed(
        lambda layers, inputs: {**layers[0](inputs), "lengths": inputs["x"].row_lengths()}, LIST
    ),
    "hashing": lambda: functional(lambda layer, x: layer({"x": numbers(x)}), ids_input()),
    "clipped": lambda: subclassed(lambda layers, inputs: layers[0]({"x": tf.clip_by_value(inputs["x"], 0, 19)})),
    "a column": lambda: subclassed(
        lambda layers, inputs: layers[0]({"x": inputs["x"][:, 0]}), {"x": tf.TensorSpec([None, 1], tf.int64)}
    ),
    "an assertion": lambda: subclassed(checked),
    "a side effect": lambda: subclassed(printed),
    "one layer twice": lambda: subclassed(twice),
    "names of two layers": lambda: subclassed(
        of_two_layers, X_AND_Y, embedding([FeatureConfig(table("t"))]), embedding([FeatureConfig(table("u"))])
    ),
    "the name of another input": lambda: subclassed(
        lambda layers, inputs: {"a": layers[0]({"age": inputs["x"]})["age"], "b": inputs["age"]},
        ONE | {"age": tf.TensorSpec([None, 1], tf.float32)},
        embedding({"age": FeatureConfig(table())}),
    ),
    "a name that TensorFlow confuses": lambda: subclassed(
        lambda layers, inputs: {"a": layers[0]({"AGE": inputs["x"]})["AGE"], "b": inputs["age"]},
        ONE | {"age": tf.TensorSpec([None, 1], tf.float32)},
        embedding({"AGE": FeatureConfig(table())}),
    ),
    "a function of its own": lambda: subclassed(in_a_function),
    "a function that is kept": lambda: subclassed(
        in_a_kept_function(with_another=True), X_AND_Y, *(embedding(FeatureConfig(table(name))) for name in "tu")
    ),
    "a function that is kept, alone": lambda: subclassed(
        in_a_kept_function(with_another=False), X_AND_Y, *(embedding(FeatureConfig(table(name))) for name in "tu")
    ),
    "no validation": lambda: subclassed(
        lambda layers, inputs: layers[0](inputs),
        LIST,
        embedding({"x": FeatureConfig(table(), validate_weights_and_indices=False)}),
    ),
    "weights with a padding of their own": lambda: subclassed(weighted, LIST | FLOATS),
    "computed weights": lambda: subclassed(doubled, LIST | WEIGHTS),
    "half weights": lambda: subclassed(
        lambda layers, inputs: layers[0](
            {"x": inputs["x"]}, {"x": inputs["x_weights"].with_values(tf.cast(inputs["x_weights"].values, tf.float32))}
        ),
        LIST | HALF,
    ),
    "weights that are not looked up": lambda: subclassed(weighted_and_counted, LIST | WEIGHTS),
    "a narrower type and a policy": lambda: subclassed(
        lambda layers, inputs: layers[0](inputs),
        {"x": tf.RaggedTensorSpec([None, None], tf.int32)},
        embedding({"x": FeatureConfig(table(), out_of_vocabulary="zeros")}),
    ),
    "a narrower type of a sequence": lambda: subclassed(
        lambda layers, inputs: layers[0](inputs),
        {"x": tf.RaggedTensorSpec([None, None], tf.int32)},
        embedding({"x": FeatureConfig(table(), max_sequence_length=2)}),
    ),
    "a type that is too narrow": lambda: subclassed(
        lambda layers, inputs: layers[0]({"x": tf.cast(inputs["x"], tf.int8)}),
        ONE,
        embedding({"x": FeatureConfig(TableConfig(129, 3, "t"))}),
    ),
    "unsigned lists": lambda: subclassed(
        lambda layers, inputs: layers[0](inputs), {"x": tf.RaggedTensorSpec([None, None], tf.uint32)}
    ),
    "floats": lambda: subclassed(lambda layers, inputs: layers[0]({"x": tf.cast(inputs["x"], tf.float32)})),
    "an input of floats": lambda: functional(lambda layer, x: layer({"x": x}), ids_input(dtype="float32")),
    "lists of floats": lambda: subclassed(
        lambda layers, inputs: layers[0](inputs),
        {"x": tf.RaggedTensorSpec([None, None], tf.float32)},
        embedding({"x": FeatureConfig(table(), out_of_vocabulary="zeros")}),
    ),
    "double weights": lambda: subclassed(
        lambda layers, inputs: layers[0]({"x": inputs["x"]}, {"x": inputs["x_weights"]}), LIST | DOUBLE
    ),
    "double weights of a model of doubles": model_of_doubles,
    "an output_shape": lambda: subclassed(
        lambda layers, inputs: layers[0](inputs), LIST, embedding({"x": FeatureConfig(table(), output_shape=(4,))})
    ),
    "names in lower case": lambda: subclassed(
        lambda layers, inputs: layers[0]({"x": tf.strings.lower(inputs["x"])}), STRING, named()
    ),
    "names and their lengths": lambda: subclassed(
        lambda layers, inputs: {**layers[0](inputs), "lengths": tf.strings.length(inputs["x"])}, STRING, named()
    ),
    "integer names of a narrower type": lambda: subclassed(
        lambda layers, inputs: layers[0](inputs),
        {"x": tf.RaggedTensorSpec([None, None], tf.int32)},
        embedding({"x": FeatureConfig(table(), vocabulary=Vocabulary([1, 2], dtype="int64"))}),
    ),
    "names that become rows after a cast": lambda: subclassed(
        lambda layers, inputs: layers[0]({"x": tf.cast(tf.cast(inputs["x"], tf.int8), tf.int64)}),
        ONE,
        embedding({"x": FeatureConfig(table(), vocabulary=Vocabulary([0, 1, 2], dtype="int64"))}),
    ),
    "names and rows in turns": lambda: subclassed(
        in_turns(), ONE, embedding({"x": FeatureConfig(table())}), by_number()
    ),
    "other lookups each time": lambda: subclassed(changing(), X_AND_Y, embedding(TWO)),
    "a failing trace": lambda: subclassed(fails),
}


@pytest.mark.parametrize("name", WITHOUT)
@pytest.mark.sampled(4)
def test_models_that_have_none(name: str, tmp_path: Path) -> None:
    path, found = exported(WITHOUT[name](), tmp_path)
    said(found.left_out)
    assert found == FromActivations(left_out=found.left_out)
    assert "from_activations" not in tf.saved_model.load(str(path)).signatures
