"""Inputs of whole models: each form that a factory may state, padded in the signature and as it was in the model."""

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_saved_model
from tpuembed.errors import ConfigError
from tpuembed.export.graph.keras_model import wrap_model
from tpuembed.manifest import Manifest
from tpuembed_serving.core.status import StatusError
from tpuembed_serving.tensorflow import session as runtime

WORDS = ["ant", "bee", "cow"]
LISTS = [["bee", "ant", "cow"], [], ["cow"]]
WEIGHTS = [[0.5, 0.0, 2.0], [], [3.0]]
NAN = float("nan")


def ragged(rows: list[list[Any]], dtype: Any) -> Any:
    return tf.ragged.constant(rows, dtype)


def padded(rows: list[list[Any]], pad: Any, width: int = 4) -> Any:
    return np.array([[*row, *[pad] * (width - len(row))] for row in rows])


def table(combiner: str = "sum") -> Any:
    return FeatureConfig(TableConfig(len(WORDS) + 1, 2, "t", combiner=combiner))


def weighted(ids: str = "words", weights: str = "strengths", combiner: str = "sum") -> Any:
    """Ragged text with ragged weights, by a lookup layer, into one table."""
    words = keras.Input((None,), dtype="string", ragged=True, name=ids)
    strengths = keras.Input((None,), dtype="float32", ragged=True, name=weights)
    numbers = keras.layers.StringLookup(vocabulary=WORDS, name="numbers")(words)
    rows = TPUEmbedding(table(combiner), optimizer="sgd")(numbers, strengths)
    model = keras.Model({ids: words, weights: strengths}, {"rows": rows})
    for weight in model.weights:
        if weight.dtype == "float32":
            weight.assign(np.random.default_rng(1).normal(size=weight.shape))
    return model


def run(servable: Any, signature: str = "serving_default", **inputs: Any) -> dict[str, Any]:
    called = servable.signatures[signature]
    values = servable.run(called, [np.asarray(inputs[info.alias]) for info in called.inputs])
    return {info.alias: value for info, value in zip(called.outputs, values, strict=True)}


def loaded(path: Path) -> contextlib.closing[Any]:
    """Loads an export once for several runs: TensorFlow optimizes each signature when it runs first."""
    return contextlib.closing(runtime.load(path))


def objects(rows: Any) -> Any:
    return np.array([[text.encode() for text in row] for row in rows], object)


@pytest.mark.nightly
@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_ragged_text_and_weights_are_served(combiner: str, tmp_path: Path) -> None:
    model = weighted(combiner=combiner)
    truth = model({"words": ragged(LISTS, tf.string), "strengths": ragged(WEIGHTS, tf.float32)}, training=False)["rows"]
    report = export_saved_model(model, tmp_path / "m")
    manifest = Manifest.read(report.path)
    assert manifest is not None
    assert manifest.padding == {"words": "", "strengths": "NaN"}
    in_tensorflow = tf.saved_model.load(str(report.path)).signatures["serving_default"]
    words = objects(padded(LISTS, ""))
    examples = np.array([example(words=w, strengths=s) for w, s in zip(LISTS, WEIGHTS, strict=True)], object)
    with loaded(report.path) as servable:
        for pad in (NAN, 0.0):
            strengths = padded(WEIGHTS, pad).astype(np.float32)
            np.testing.assert_allclose(run(servable, words=words, strengths=strengths)["rows"], truth, atol=1e-6)
            found = in_tensorflow(words=tf.constant(words), strengths=tf.constant(strengths))["rows"]
            np.testing.assert_allclose(found, truth, atol=1e-6)
        np.testing.assert_allclose(run(servable, "serving_examples", examples=examples)["rows"], truth, atol=1e-6)


def example(**lists: list[Any]) -> bytes:
    def feature(values: list[Any]) -> Any:
        if any(isinstance(value, str) for value in values):
            return tf.train.Feature(bytes_list=tf.train.BytesList(value=[text.encode() for text in values]))
        if any(isinstance(value, float) for value in values):
            return tf.train.Feature(float_list=tf.train.FloatList(value=values))
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values))

    features = {name: feature(values) for name, values in lists.items() if values}
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def every_kind() -> Any:
    """Returns a model of a sequence, means and weighted sums of integers, sums of text, and floats as they stand."""
    rows = TableConfig(7, 2, "rows", combiner="mean")
    words = TableConfig(len(WORDS) + 1, 2, "words", combiner="sum")
    features = {
        "sequence": FeatureConfig(rows, max_sequence_length=4),
        "mean": FeatureConfig(rows),
        "weighed": FeatureConfig(rows, out_of_vocabulary="zeros"),
        "counted": FeatureConfig(rows, out_of_vocabulary="zeros", validate_weights_and_indices=False),
        "row 2": FeatureConfig(rows, max_sequence_length=4, out_of_vocabulary=2, validate_weights_and_indices=False),
        "words": FeatureConfig(words),
    }
    ids = keras.Input((None,), dtype="int64", ragged=True, name="ids")
    strengths = keras.Input((None,), dtype="float32", ragged=True, name="strengths")
    text = keras.Input((None,), dtype="string", ragged=True, name="text")
    floats = keras.Input((None,), dtype="float32", ragged=True, name="floats")
    numbers = keras.layers.StringLookup(vocabulary=WORDS)(text)
    looked_up = {name: numbers if name == "words" else ids for name in features}
    weights = {name: strengths if name == "weighed" else None for name in features}
    found = TPUEmbedding(features, optimizer="sgd")(looked_up, weights)
    as_they_stand = keras.layers.Lambda(lambda x: x.to_tensor(7.0, shape=[None, 6]), output_shape=(6,), name="stand")(
        floats
    )
    inputs = {"ids": ids, "strengths": strengths, "text": text, "floats": floats}
    model = keras.Model(inputs, {**found, "floats": as_they_stand})
    for weight in model.weights:
        if weight.dtype == "float32":
            weight.assign(np.random.default_rng(2).normal(size=weight.shape))
    return model


TYPES: dict[str, Any] = {"ids": tf.int64, "strengths": tf.float32, "text": tf.string, "floats": tf.float32}


def drawn(seed: int) -> dict[str, list[list[Any]]]:
    """20 rows of up to six elements, of which half equal the padding; the last of a row does not."""
    rng = random.Random(seed)

    def rows(values: list[Any], pad: Any) -> list[list[Any]]:
        lengths = [rng.randint(0, 6) for _ in range(20)]
        return [
            [rng.choice([pad, rng.choice(values)]) for _ in range(n - 1)] + [rng.choice(values)] * (n > 0)
            for n in lengths
        ]

    found = {"ids": rows(list(range(7)), -1), "text": rows(WORDS, ""), "floats": rows([0.0, 1.5, -2.0], NAN)}
    return found | {"strengths": [[rng.uniform(0.5, 2.0) for _ in row] for row in found["ids"]]}


def as_matrices(lists: dict[str, list[list[Any]]], weight_padding: float = NAN) -> dict[str, Any]:
    return {
        "ids": padded(lists["ids"], -1, 8),
        "strengths": padded(lists["strengths"], weight_padding, 8).astype(np.float32),
        "text": objects(padded(lists["text"], "", 8)),
        "floats": padded(lists["floats"], NAN, 8).astype(np.float32),
    }


def trained(model: Any, lists: dict[str, list[list[Any]]]) -> dict[str, Any]:
    return dict(model({name: ragged(rows, TYPES[name]) for name, rows in lists.items()}, training=False))


def assert_same(found: Any, truth: Any) -> None:
    assert found.keys() == truth.keys()
    for name, value in truth.items():
        np.testing.assert_allclose(found[name], value, atol=1e-6, err_msg=name)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """Returns a model, and its export loaded."""
    model = every_kind()
    with loaded(export_saved_model(model, tmp_path_factory.mktemp("kinds") / "m").path) as servable:
        yield model, servable


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.sampled(1)
def test_what_equals_the_padding_within_a_row_keeps_its_place(seed: int, exported: tuple[Any, Any]) -> None:
    model, servable = exported
    lists = drawn(seed)
    truth = trained(model, lists)
    given = as_matrices(lists, [NAN, 0.0][seed % 2])
    assert_same(run(servable, **given), truth)
    rows = [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
    examples = np.array([example(**row) for row in rows], object)
    assert_same(run(servable, "serving_examples", examples=examples), truth)


def test_what_equals_the_padding_at_the_end_of_a_row_is_padding(exported: tuple[Any, Any]) -> None:
    """An id of -1 counts for nothing there, unless it is looked up; an empty string is a word, and NaN is a number."""
    model, servable = exported
    lists = drawn(9)
    longer = {name: [list(row) for row in rows] for name, rows in lists.items()}
    for name, pad in (("ids", -1), ("strengths", 0.0), ("text", ""), ("floats", NAN)):
        for row in longer[name]:
            row.append(pad)
    short, long = trained(model, lists), trained(model, longer)
    found = run(servable, **as_matrices(longer))
    assert_same(found, short)
    integers = {"sequence", "mean", "weighed"}
    assert_same({name: found[name] for name in integers}, {name: long[name] for name in integers})
    for name in ("counted", "row 2", "words", "floats"):
        assert np.nanmax(np.abs(np.nan_to_num(short[name], nan=9.0) - np.nan_to_num(long[name], nan=9.0))) > 0.1


MISMATCHES = [
    [[0.5, 0.0, NAN, NAN], [NAN] * 4, [3.0, NAN, NAN, NAN]],  # one fewer
    [[0.5, 0.0, 2.0, 1.0], [NAN] * 4, [3.0, NAN, NAN, NAN]],  # one more
    [[0.5, 0.0, 2.0], [NAN] * 3, [3.0, NAN, NAN]],  # of another width
]


def test_weights_that_do_not_belong_to_their_values_fail(tmp_path: Path) -> None:
    report = export_saved_model(weighted(), tmp_path / "m")
    assert (report.path / "assets.extra" / "tf_serving_warmup_requests").stat().st_size > 0
    with loaded(report.path) as servable:
        for strengths in MISMATCHES:
            with pytest.raises(StatusError, match="input strengths must have as many values as words"):
                run(servable, words=objects(padded(LISTS, "")), strengths=np.array(strengths, np.float32))


def test_requests_of_weighted_lists_share_runs(tmp_path: Path) -> None:
    words, strengths = objects(padded(LISTS, "")), padded([[0.5, 0.0, 2.0], [], [3.0]], NAN).astype(np.float32)
    with loaded(export_saved_model(weighted(combiner="mean"), tmp_path / "m").path) as servable:
        merging = servable.merging(servable.signatures["serving_default"])
        assert merging is not None
        assert merging.is_proven
        together = run(servable, words=words, strengths=strengths)["rows"]
        for row in range(len(words)):
            alone = run(servable, words=words[row : row + 1], strengths=strengths[row : row + 1])["rows"]
            np.testing.assert_array_equal(alone, together[row : row + 1])


def test_sparse_ids_and_weights() -> None:
    ids = keras.Input((None,), dtype="int32", sparse=True, name="ids")
    strengths = keras.Input((None,), dtype="float32", sparse=True, name="strengths")
    rows = TPUEmbedding(table("mean"), optimizer="sgd")(ids, strengths)
    model = keras.Model([ids, strengths], rows)
    given = {"ids": padded(IDS, -1), "strengths": padded([[0.5, 0.0], [], [3.0, 1.0, 1.0]], NAN).astype(np.float32)}
    (found,) = wrap_model(model, "m")({name: tf.constant(value) for name, value in given.items()}).values()
    where = np.argwhere(given["ids"] >= 0)
    values = {name: value[tuple(where.T)] for name, value in given.items()}
    values["ids"] = values["ids"].astype(np.int32)
    truth = model([tf.SparseTensor(where, values[name], given[name].shape) for name in ("ids", "strengths")])
    np.testing.assert_allclose(found, truth, atol=1e-6)


@pytest.mark.parametrize(
    ("ids", "weights", "partner"),
    [("words", "strengths", "words"), ("words", "words_weights", "words"), ("f", "w", "f")],
)
def test_partners_are_what_a_layer_takes_together(ids: str, weights: str, partner: str) -> None:
    assert wrap_model(weighted(ids, weights), "m").forms[weights].partner == partner


def test_floats_by_themselves_are_padded_with_nan() -> None:
    x = keras.Input((None,), dtype="float32", ragged=True, name="x")
    model = wrap_model(keras.Model(x, keras.layers.Lambda(lambda x: tf.reduce_mean(x, 1), output_shape=())(x)), "m")
    assert model.padding() == {"x": "NaN"}
    (found,) = model({"x": tf.constant([[1.0, 0.0, NAN], [4.0, NAN, NAN]])}).values()
    np.testing.assert_allclose(found, [0.5, 4.0])


class Echo(keras.Model):
    """Answers what it was given, so that a test sees it."""

    def __init__(self) -> None:
        super().__init__(autocast=False)

    def call(self, inputs: Any) -> Any:
        self.seen = inputs
        return {"out": tf.zeros([1])}


def seen(specs: Any, given: dict[str, Any]) -> tuple[Any, Any]:
    model = Echo()
    wrapped = wrap_model((model, specs), "m")
    wrapped(given)
    return model.seen, wrapped.input_specs()


IDS = [[3, 1], [], [2, 2, 2]]


@pytest.mark.parametrize("dtype", [tf.int64, tf.int32, tf.uint8, tf.string, tf.float32, tf.float16, tf.float64])
def test_a_ragged_spec_is_taken_padded(dtype: Any) -> None:
    rows: Any = [[str(i) for i in row] for row in IDS] if dtype == tf.string else IDS
    pad = "" if dtype == tf.string else NAN if dtype.is_floating else -1
    signature = tf.int64 if dtype.is_integer else tf.float32 if dtype == tf.float16 else dtype
    value, specs = seen(tf.RaggedTensorSpec([None, None], dtype), {"inputs": tf.constant(padded(rows, pad), signature)})
    assert (specs["inputs"].dtype, specs["inputs"].shape.rank) == (signature, 2)
    assert value.dtype == dtype
    assert value.to_list() == (objects_of(rows) if dtype == tf.string else rows)


def objects_of(rows: list[list[str]]) -> list[list[bytes]]:
    return [[text.encode() for text in row] for row in rows]


@pytest.mark.parametrize(
    ("dtype", "first", "other"), [(tf.int64, -1, 3), (tf.int32, -1, 3), (tf.string, b"", b"a"), (tf.float16, NAN, 0.0)]
)
def test_a_ragged_spec_ends_rows_behind_their_last_other_element(dtype: Any, first: Any, other: Any) -> None:
    matrix = [[first, other, first, other, first], [other, first, first, first, first], [first] * 5]
    given = tf.constant(matrix, tf.int64 if dtype.is_integer else tf.float32 if dtype.is_floating else dtype)
    value, _ = seen(tf.RaggedTensorSpec([None, None], dtype), {"inputs": given})
    assert value.dtype == dtype
    assert str(value.to_list()) == str([matrix[0][:4], matrix[1][:1], []])


def test_an_unsigned_row_has_no_negative_id_in_the_middle() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match="Input inputs must be uint8"):
        seen(tf.RaggedTensorSpec([None, None], tf.uint8), {"inputs": tf.constant([[3, -1, 4]], tf.int64)})


def test_row_splits_are_of_the_specs_type() -> None:
    spec = tf.RaggedTensorSpec([None, None], tf.int64, row_splits_dtype=tf.int32)
    value, _ = seen(spec, {"inputs": tf.constant(padded(IDS, -1))})
    assert spec.is_compatible_with(value)


def test_an_integer_that_does_not_fit_fails() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match="Input inputs must be int32"):
        seen(tf.RaggedTensorSpec([None, None], tf.int32), {"inputs": tf.constant([[1 << 40]], tf.int64)})


def test_a_sparse_spec_is_taken_padded() -> None:
    value, _ = seen({"a": tf.SparseTensorSpec([None, None], tf.string)}, {"a": tf.constant([["x", ""], ["", "y"]])})
    assert tf.sparse.to_dense(value["a"]).numpy().tolist() == [[b"x", b""], [b"", b"y"]]


@pytest.mark.parametrize(
    "specs",
    [
        tf.RaggedTensorSpec([None, None, None], tf.int64),
        tf.RaggedTensorSpec([None, None], tf.bool),
        {"x": {"y": 3}},
        [tf.TensorSpec([None], tf.int64, "x"), tf.TensorSpec([None], tf.int64, "x")],
        {"a": {"b": tf.TensorSpec([None])}, "a/b": tf.TensorSpec([None])},
    ],
)
def test_specs_that_cannot_be(specs: Any) -> None:
    with refused(ConfigError):
        wrap_model((Echo(), specs), "m")
