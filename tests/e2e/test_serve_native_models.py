"""Whole models whose lookups the C library runs in the server: the answers and the errors of TensorFlow's graph."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.export import named_model, whole_model
from tests.support.export.in_process import exports_in_this_process
from tests.support.export.overlays import overlays_of_any_size
from tests.support.messages import said
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, compact_version, export_saved_model
from tpuembed.manifest import MANIFEST_PATH, Manifest
from tpuembed.native.lookup import available
from tpuembed_serving.core.status import StatusError
from tpuembed_serving.tensorflow import native
from tpuembed_serving.tensorflow import session as runtime
from tpuembed_serving.tensorflow.activations import NativeActivations

pytestmark = [
    pytest.mark.usefixtures("exports_here"),
    pytest.mark.filterwarnings("ignore:no requests to warm up", "ignore:Leaving out the signature serving_examples"),
    pytest.mark.skipif(bool(available()), reason=f"the C library of native lookups: {available()}"),
]

Array = npt.NDArray[Any]
SETTINGS = settings(max_examples=25, deadline=None, derandomize=True)
COPIED = [name for name, spec in whole_model.FEATURES.items() if "combiner" not in spec]


@pytest.fixture(scope="module", autouse=True)
def exports_here() -> Iterator[None]:
    with exports_in_this_process():
        yield


def load(version: Path, lookups: native.Lookups, **options: Any) -> Any:
    return runtime.load(version, options=runtime.RunOptions(lookups=lookups), **options)


@contextlib.contextmanager
def both(version: Path) -> Iterator[tuple[Any, Any]]:
    """The version run by the C library, and by TensorFlow."""
    with contextlib.closing(load(version, "native")) as ours, contextlib.closing(load(version, "tensorflow")) as theirs:
        yield ours, theirs


def run(servable: Any, inputs: Mapping[str, Any], name: str = "serving_default") -> Any:
    """Outputs by alias, or the error's code and text."""
    signature = servable.signatures[name]
    try:
        found = servable.run(signature, [inputs[info.alias] for info in signature.inputs])
    except StatusError as error:
        return error.code, error.message
    return {info.alias: array for info, array in zip(signature.outputs, found, strict=True)}


class Counts:
    """Counts the requests that were looked up natively, and those that TensorFlow answered after all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.native = self.refused = 0
        real = NativeActivations.look_up

        def look_up(activations: NativeActivations, inputs: Mapping[str, Array]) -> Any:
            self.refused += 1
            found = real(activations, inputs)
            if found is not None:
                self.refused -= 1
                self.native += 1
            return found

        monkeypatch.setattr(NativeActivations, "look_up", look_up)


def assert_same(found: Any, expected: Any, magnitudes: Mapping[str, Array] | None = None) -> None:
    """Sums differ by at most 1e-6 of the sum of |weight x value|; copies not at all."""
    assert type(found) is type(expected), (found, expected)
    if isinstance(expected, tuple):
        assert found == expected
        return
    assert list(found) == list(expected)
    for name, rows in expected.items():
        assert (found[name].shape, found[name].dtype) == (rows.shape, rows.dtype)
        feature = name.removesuffix("_out")
        if feature in COPIED or feature == "price":
            np.testing.assert_array_equal(found[name], rows, err_msg=name)
        elif magnitudes is None:
            np.testing.assert_allclose(found[name], rows, rtol=1e-5, atol=1e-5, err_msg=name)
        else:
            assert (np.abs(found[name] - rows) <= 1e-6 * magnitudes[feature]).all(), name


class Pair:
    """Both servables of an export whose outputs are its activations. No dataclass: hypothesis would print it."""

    def __init__(self, servables: tuple[Any, Any], rows: Mapping[str, Array]) -> None:
        self.ours, self.theirs = servables
        self.rows = rows


@pytest.fixture(
    scope="module",
    params=[
        "float32",
        *(pytest.param(one, marks=pytest.mark.nightly) for one in ("bfloat16", "float16", "int8")),
        "overlay",
    ],
)
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    model = whole_model.build(is_lazy=True)
    folder = tmp_path_factory.mktemp("models") / "m"
    storage = "int8" if request.param == "overlay" else request.param
    version = export_saved_model(model, folder, layout="mmap", storage=storage).path
    if request.param == "overlay":
        change(model)
        with overlays_of_any_size():
            version = export_saved_model(model, folder, layout="mmap", storage=storage, base="latest").path
        manifest = Manifest.read(version)
        assert manifest is not None
        assert manifest.base is not None
    with both(version) as servables:
        yield Pair(servables, whole_model.rows_of(model))


def change(model: Any) -> None:
    """Change a few rows of all tables."""
    for layer in model.layers:
        if isinstance(layer, TPUEmbedding):
            for config in layer.embedding_tables:
                layer.assign_rows(config.name, 3, np.full((2, config.dim), 0.25, np.float32))


@pytest.mark.sampled(2)
@given(seed=st.integers(0, 2**32), batch=st.integers(0, 6), hot=st.sampled_from([0, 1, 2, 5, 30]))
@SETTINGS
def test_answers_are_those_of_tensorflow(pair: Pair, seed: int, batch: int, hot: int) -> None:
    inputs = whole_model.draw(np.random.default_rng(seed), batch, hot)
    with pytest.MonkeyPatch.context() as monkeypatch:
        counts = Counts(monkeypatch)
        found = run(pair.ours, inputs)
    assert (counts.native, counts.refused) == (1, 0)
    # Storage rounds rows: its values are at most 1% larger than those of the layer.
    magnitudes = {name: 1.01 * whole_model.look_up(name, rows, inputs)[1] + 1e-3 for name, rows in pair.rows.items()}
    assert_same(found, run(pair.theirs, inputs), magnitudes)


@given(seed=st.integers(0, 2**32), batch=st.integers(1, 4), hot=st.integers(1, 4))
@SETTINGS
@pytest.mark.sampled(2)
def test_errors_are_those_of_tensorflow(pair: Pair, seed: int, batch: int, hot: int) -> None:
    """One request with ids outside of their tables, some of which the graph drops. Others are larger than the model's type."""
    inputs = whole_model.draw(np.random.default_rng(seed), batch, hot, bad=0.1)
    assert_same(run(pair.ours, inputs), run(pair.theirs, inputs))


def weights_like(inputs: Mapping[str, Array], name: str, where: Any, value: float) -> dict[str, Array]:
    weights = inputs[f"{name}_weights"].copy()
    weights[where] = value
    return {f"{name}_weights": weights}


IDS = np.array([[1, 2, -1], [3, -1, -1]])
WEIGHTS = np.array([[1, 2, np.nan], [3, 0, 0]], np.float32)
PLAIN = {
    **whole_model.draw(np.random.default_rng(0), 2, 3),
    "heavy": IDS,
    "light": IDS,
    "heavy_weights": WEIGHTS,
    "light_weights": WEIGHTS,
}
ODD: dict[str, Mapping[str, Any]] = {
    "padding before an id, and its weight": {"heavy": IDS[:, ::-1], "heavy_weights": WEIGHTS[:, ::-1]},
    "no weight where a ragged list has padding": {
        "heavy": np.array([[1, -1, 2], [3, -1, -1]]),
        "heavy_weights": np.array([[1, np.nan, 2], [3, np.nan, np.nan]], np.float32),
    },
    "a weight where a ragged list has padding": {
        "heavy": np.array([[1, -1, 2], [3, -1, -1]]),
        "heavy_weights": np.array([[1, 7, 2], [3, np.nan, np.nan]], np.float32),
    },
    "padding in a sparse list": {
        "light": np.array([[1, -1, 2], [3, -1, -1]]),
        "light_weights": np.array([[1, 0, 2], [3, np.nan, np.nan]], np.float32),
    },
    "a missing weight": weights_like(PLAIN, "heavy", (0, 1), np.nan),
    "an infinite weight": weights_like(PLAIN, "light", (0, 1), np.inf),
    "a weight too many": weights_like(PLAIN, "heavy", (0, 2), 2.0),
    "a weight of padding of a sparse list": weights_like(PLAIN, "light", (1, 2), 2.0),
    "weights of another shape": {"heavy_weights": WEIGHTS[:, :2]},
    "fewer examples": {"ragged": PLAIN["ragged"][:1]},
    "fewer examples of one id": {"one": PLAIN["one"][:1]},
    "another rank": {"one": PLAIN["one"][:, None]},
    "another width": {"pair": PLAIN["pair"][:, :1]},
    "a dropped id": {"ragged": np.array([[-2, 1, -7], [0, 3, -1]])},
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.sampled(4)
def test_odd_inputs_are_answered_by_the_graph(pair: Pair, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counts(monkeypatch)
    inputs = PLAIN | dict(ODD[name])
    assert_same(run(pair.ours, PLAIN), run(pair.theirs, PLAIN))
    assert (counts.native, counts.refused) == (1, 0)
    assert_same(run(pair.ours, inputs), run(pair.theirs, inputs))
    assert counts.native <= 2


@pytest.mark.nightly
def test_ragged_lists_may_have_padding_before_an_id(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counts(monkeypatch)
    inputs = PLAIN | {"ragged": np.array([[-1, 1, -1, 2], [-1, -1, -1, -1]]), "sparse": IDS[:, ::-1]}
    assert_same(run(pair.ours, inputs), run(pair.theirs, inputs))
    assert (counts.native, counts.refused) == (1, 0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_saved_model(whole_model.build(), tmp_path_factory.mktemp("whole") / "m", layout="mmap").path


@pytest.mark.nightly
def test_the_dense_part_is_run_by_tensorflow(whole: Path) -> None:
    """Two loaders and native lookups agree, also for a large request, on several threads."""
    module = tf.saved_model.load(str(whole))  # its tables live as long as it
    loaded = module.signatures["serving_default"]
    with both(whole) as (ours, theirs):
        for batch, hot in ((1, 1), (3, 4), (2000, 20)):
            inputs = whole_model.draw(np.random.default_rng(batch), batch, hot)
            expected = {k: v.numpy() for k, v in loaded(**{k: tf.constant(v) for k, v in inputs.items()}).items()}
            assert_same(run(ours, inputs), expected)
            assert_same(run(theirs, inputs), expected)


@pytest.mark.nightly
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_weights_that_add_up_to_nothing(tmp_path: Path, combiner: str, kind: str) -> None:
    """Of rows that are not finite too, where the order of a division and a sum shows."""
    inputs = {
        name: keras.Input((None,), dtype=dtype, name=name, **{kind: True})
        for name, dtype in (("x", "int64"), ("x_weights", "float32"))
    }
    layer = TPUEmbedding({"x": FeatureConfig(TableConfig(20, 3, "t", combiner=combiner))}, optimizer="sgd")
    model = keras.Model(inputs, layer({"x": inputs["x"]}, {"x": inputs["x_weights"]}))
    rows = np.random.default_rng(0).standard_normal((20, 3), np.float32)
    rows[2], rows[5] = np.nan, np.inf
    layer.assign_rows("t", 0, rows)
    version = export_saved_model(model, tmp_path / "m", layout="mmap").path
    with both(version) as (ours, theirs):
        for first in ([0, 0, 0], [1, -1, 0], [-1, -2, 3], [0, 1, 0], [1e-20] * 3, [1e-40] * 3, [-0.5] * 3, [0.5] * 3):
            weights = np.array([first, [*first[:2], 0]], np.float32)
            for ids in ([[1, 2, 3], [4, 5, -1]], [[1, 6, 3], [4, 7, -1]]):
                asked = {"x": np.array(ids), "x_weights": weights}
                found, expected = run(ours, asked), run(theirs, asked)
                np.testing.assert_allclose(found["x"], expected["x"], rtol=1e-6, atol=1e-6, err_msg=str(asked))


@pytest.mark.nightly
@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
def test_weights_and_rows_of_any_size(combiner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer divides each weight before it multiplies: a product of a weight and a row could be too large or too small."""
    inputs = {
        name: keras.Input((None,), dtype=dtype, name=name, ragged=True)
        for name, dtype in (("x", "int64"), ("x_weights", "float32"))
    }
    layer = TPUEmbedding({"x": FeatureConfig(TableConfig(6, 3, "t", combiner=combiner))}, optimizer="sgd")
    model = keras.Model(inputs, layer({"x": inputs["x"]}, {"x": inputs["x_weights"]}))
    rows = np.random.default_rng(0).uniform(0.5, 1, (6, 3)).astype(np.float32)
    rows *= np.array([[1e-40], [1e-30], [1e-30], [1e30], [1e30], [1]], np.float32)
    layer.assign_rows("t", 0, rows)
    version = export_saved_model(model, tmp_path / "m", layout="mmap").path
    counts = Counts(monkeypatch)
    with both(version) as (ours, theirs):
        for ids in ([0, -1], [1, 2], [2, 1], [3, 4], [5, 0]):
            for weights in ([0.3, 0.7], [1e-17, 1e-17], [1e10, 1e12], [1e17, 1e18], [2e38, 1.5e38]):
                given = np.where(np.array(ids) == -1, 0, np.array(weights, np.float32))
                asked = {"x": np.array([ids]), "x_weights": given[None].astype(np.float32)}
                found, expected = run(ours, asked), run(theirs, asked)
                np.testing.assert_allclose(found["x"], expected["x"], rtol=1e-6, atol=0, err_msg=str(asked))
    assert counts.refused == 0


def checked(layer: Any, inputs: Any) -> Any:
    """The error names the operation that looks up, which `from_activations` does not have."""
    rows = layer({"x": inputs["x"]})["x"]
    tf.debugging.assert_less(rows, inputs["y"][:, None])
    return rows


class Subclassed(keras.Model):
    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        super().__init__(name="subclassed")
        self.function = function
        self.embedding = TPUEmbedding({"x": FeatureConfig(TableConfig(20, 3, "t"))}, optimizer="sgd")

    def call(self, inputs: Any) -> Any:
        return self.function(self.embedding, inputs)


@pytest.mark.nightly
def test_an_error_of_the_dense_part_is_that_of_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = {"x": tf.TensorSpec([None], tf.int64), "y": tf.TensorSpec([None], tf.float32)}
    model = (Subclassed(checked), specs)
    with pytest.warns(UserWarning, match="fails for zeros"):
        version = export_saved_model(model, tmp_path / "m", layout="mmap").path
    counts = Counts(monkeypatch)
    with both(version) as (ours, theirs):
        for y in (1.0, -1.0):
            inputs = {"x": np.array([3, 4]), "y": np.full(2, y, np.float32)}
            assert_same(run(ours, inputs), run(theirs, inputs))
        assert isinstance(run(ours, inputs), tuple)
    assert (counts.native, counts.refused) == (3, 0)


@pytest.mark.nightly
@overlays_of_any_size()
def test_a_compacted_overlay_has_the_signature_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = whole_model.build()
    export_saved_model(model, tmp_path / "m", layout="mmap")
    change(model)
    overlay = export_saved_model(model, tmp_path / "m", layout="mmap", base="latest").path
    compacted = Path(str(compact_version(tmp_path / "m").path))
    manifests = [Manifest.read(path) for path in (overlay, compacted)]
    assert manifests[0] is not None
    assert manifests[1] is not None
    assert (manifests[0].base, manifests[1].base) != (None, None)
    assert manifests[0].from_activations == manifests[1].from_activations
    inputs = whole_model.draw(np.random.default_rng(3), 5, 4)
    counts = Counts(monkeypatch)
    with both(overlay) as (ours, theirs):
        found = [run(ours, inputs), run(theirs, inputs)]
    with contextlib.closing(load(compacted, "native")) as servable:
        found.append(run(servable, inputs))
    assert (counts.native, counts.refused) == (2, 0)
    assert_same(found[0], found[1])
    assert_same(found[2], found[1])


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    model = named_model.build()
    version = export_saved_model(model, tmp_path_factory.mktemp("names") / "m", layout="mmap").path
    # A server that would take names for rows refuses it.
    assert json.loads((version / MANIFEST_PATH).read_text())["requires"] == ["names"]
    with both(version) as servables:
        yield servables


def assert_same_of_names(found: Any, expected: Any) -> None:
    assert type(found) is type(expected), (found, expected)
    if isinstance(expected, tuple):
        assert found == expected
        return
    for name, value in expected.items():
        if "combiner" in named_model.FEATURES[name.removesuffix("_out")]:
            np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(found[name], value, err_msg=name)


@given(seed=st.integers(0, 2**32), batch=st.integers(0, 6), hot=st.sampled_from([0, 1, 2, 5, 30]))
@SETTINGS
@pytest.mark.nightly
def test_names_are_found_as_tensorflow_finds_them(names: tuple[Any, Any], seed: int, batch: int, hot: int) -> None:
    inputs = named_model.draw(np.random.default_rng(seed), batch, hot)
    with pytest.MonkeyPatch.context() as monkeypatch:
        counts = Counts(monkeypatch)
        found = run(names[0], inputs)
    assert (counts.native, counts.refused) == (1, 0)
    assert_same_of_names(found, run(names[1], inputs))


@given(seed=st.integers(0, 2**32), batch=st.integers(1, 4), hot=st.integers(1, 4))
@SETTINGS
@pytest.mark.nightly
def test_unknown_names_and_odd_requests_are_answered_by_the_graph(
    names: tuple[Any, Any], seed: int, batch: int, hot: int
) -> None:
    random = np.random.default_rng(seed)
    inputs = named_model.draw(random, batch, hot, bad=0.3)
    match seed % 4:
        case 0:  # padding anywhere
            inputs["friends"][random.random((batch, hot)) < 0.5] = b""
            inputs["items"][random.random((batch, hot)) < 0.5] = -1
            inputs["heavy"][random.random((batch, hot)) < 0.2] = b""
        case 1:
            inputs["pair"] = inputs["pair"][:, :1]
        case 2:
            inputs["heavy_weights"][0, 0] = np.inf
    assert_same_of_names(run(names[0], inputs), run(names[1], inputs))


def test_what_is_not_run_natively_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    x = keras.Input((), dtype="int64", name="x")
    layer = TPUEmbedding({"x": FeatureConfig(TableConfig(20, 3, "t"))}, optimizer="sgd")
    version = export_saved_model(
        keras.Model({"x": x}, {**layer({"x": x}), "id": x}), tmp_path / "m", layout="mmap"
    ).path
    with contextlib.closing(load(version, "native")) as servable:
        assert servable._native is None
        assert run(servable, {"x": np.array([3])})["id"] == 3
    said(caplog.messages[-1])
