"""A vocabulary in another order than in training gives the rows of other words: it is recorded, and compared where it can be."""

import hashlib
import json
import random
import warnings
from pathlib import Path
from typing import Any, ClassVar

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_saved_model
from tpuembed.checkpoint.tools import describe_export
from tpuembed.errors import CheckpointCorruptError, CheckpointMismatchError, ConfigError
from tpuembed.export.graph.vocabularies import compare_vocabularies, vocabularies_of
from tpuembed.manifest import Manifest

WORDS = ["ant", "bee", "cow", "doe", "eel"]


def digest(entries: list[Any]) -> str:
    """A second telling of the rule."""
    text = b"".join(str(len(str(e).encode())).encode() + b":" + str(e).encode() + b"," for e in entries)
    return hashlib.sha256(text).hexdigest()


def lookup(words: list[Any], adapt: bool = False, **options: Any) -> Any:
    """A layer that maps words[0] to its first number, and so on, given them or adapted to them."""
    kind = keras.layers.StringLookup if isinstance(words[0], str) else keras.layers.IntegerLookup
    if not adapt:
        return kind(vocabulary=words, **options)
    layer = kind(**options)
    layer.adapt(np.repeat(words, range(len(words), 0, -1)))
    return layer


def model_of(*layers: Any) -> Any:
    inputs, outputs = [], []
    for number, layer in enumerate(layers):
        dtype = getattr(layer, "vocabulary_dtype", "string")
        inputs.append(keras.Input((), dtype=dtype, name=f"in_{number}"))
        outputs.append(layer(inputs[-1]))
    return keras.Model(inputs, outputs)


def test_what_is_recorded() -> None:
    text = keras.layers.TextVectorization(name="text")
    text.adapt(["ant bee ant"])
    layers = [
        lookup(["a", "ü\n"], name="plain"),
        lookup(["a", "b"], name="masked", mask_token="", num_oov_indices=2),
        lookup([5, 3], name="numbers"),
        lookup(["a", "b"], name="hot", mask_token="", output_mode="multi_hot"),
        lookup(["a", "b"], name="back", invert=True, adapt=False),
        text,
    ]
    inputs = [keras.Input((), dtype="int64" if layer.name in ("numbers", "back") else "string") for layer in layers]
    model = keras.Model(inputs, [layer(x) for layer, x in zip(layers, inputs, strict=True)])
    found = {entry.layer: entry for entry in vocabularies_of(model)}
    assert found.keys() == {layer.name for layer in layers}
    for layer in layers:
        listed = layer.get_vocabulary()
        assert (found[layer.name].size, found[layer.name].sha256) == (len(listed), digest(listed)), layer.name


@pytest.mark.parametrize("adapt", [True, False])
@pytest.mark.parametrize("name", ["users", None])
def test_another_order_than_in_training_is_refused(adapt: bool, name: str | None, tmp_path: Path) -> None:
    options: dict[str, Any] = {} if name is None else {"name": name}
    model_of(lookup(WORDS, adapt, **options)).save(tmp_path / "m.keras")
    compare_vocabularies(model_of(lookup(WORDS, **options)), tmp_path / "m.keras")
    other = model_of(lookup(["ant", "cow", "bee", "doe", "eel"], **options))
    with refused(CheckpointMismatchError, match="'cow'"):
        compare_vocabularies(other, tmp_path / "m.keras")
    with refused(CheckpointMismatchError, match="Entry 5"):
        compare_vocabularies(model_of(lookup(WORDS[:4], **options)), tmp_path / "m.keras")


def test_more_numbers_for_unknown_words_move_every_row(tmp_path: Path) -> None:
    model_of(lookup(WORDS, name="users")).save(tmp_path / "m.keras")
    with refused(CheckpointMismatchError, match="layer 'users'"):
        compare_vocabularies(model_of(lookup(WORDS, name="users", num_oov_indices=2)), tmp_path / "m.keras")


def test_integers_text_and_boundaries(tmp_path: Path) -> None:
    def build(numbers: list[int], texts: list[str], values: list[float]) -> Any:
        text, bins = keras.layers.TextVectorization(name="text"), keras.layers.Discretization(num_bins=3, name="bins")
        text.adapt(texts)
        bins.adapt(np.array(values, np.float32))
        x = keras.Input((1,), name="x")
        inner = model_of(lookup(numbers, True, name="numbers"), text)
        return keras.Model([*inner.inputs, x], [*inner(inner.inputs), bins(x)])

    given: Any = ([7, 5, 3], ["ant bee ant"], [1.0, 2.0, 3.0, 4.0])
    build(*given).save(tmp_path / "m.keras")
    compare_vocabularies(build(*given), tmp_path / "m.keras")
    for place, other in enumerate(([5, 7, 3], ["bee ant bee"], [1.0, 5.0, 6.0, 7.0])):
        changed = [*given[:place], other, *given[place + 1 :]]
        with refused(CheckpointMismatchError, match=f"layer {['numbers', 'text', 'bins'][place]!r}"):
            compare_vocabularies(build(*changed), tmp_path / "m.keras")


class Own(keras.layers.Layer):
    """Keeps its lookups where no config of a lookup is."""

    def __init__(self, given: list[str], adapted: list[str], **options: Any) -> None:
        super().__init__(**options)
        self.given = lookup(given)
        self.adapted = lookup(adapted, adapt=True)

    def call(self, x: Any) -> Any:
        return self.given(x) + self.adapted(x)


@pytest.mark.filterwarnings("ignore:model file")
def test_lookups_inside_of_other_layers(tmp_path: Path) -> None:
    def build(given: list[str], adapted: list[str]) -> Any:
        x = keras.Input((), dtype="string")
        return keras.Model(x, Own(given, adapted, name="own")(x))

    build(WORDS[:2], WORDS).save(tmp_path / "m.keras")
    found = compare_vocabularies(build(WORDS[:2], WORDS), tmp_path / "m.keras")
    assert [(entry.size, entry.compared) for entry in found] == [(3, False), (6, True)]
    with refused(CheckpointMismatchError, match="'eel'"):
        compare_vocabularies(build(WORDS[:2], WORDS[::-1]), tmp_path / "m.keras")


def test_a_lookup_that_the_factory_adds_is_its_own(tmp_path: Path) -> None:
    model_of(lookup(WORDS, name="users")).save(tmp_path / "m.keras")
    with pytest.warns(
        UserWarning, match="vocabulary of layer 'countries' of the factory cannot be compared.*not say it. If"
    ):
        compare_vocabularies(
            model_of(lookup(WORDS, name="users"), lookup(["x", "y"], name="countries")), tmp_path / "m.keras"
        )
    compare_vocabularies(model_of(lookup(["x", "y"])), tmp_path / "other.keras")  # there is no such file
    x = keras.Input((2,))
    keras.Model(x, keras.layers.Dense(1)(x)).save(tmp_path / "none.keras")
    with pytest.warns(UserWarning, match="cannot be compared with the training"):
        compare_vocabularies(model_of(lookup(["x", "y"])), tmp_path / "none.keras")


def test_names_beside_numbers(tmp_path: Path) -> None:
    model_of(lookup(WORDS), lookup(WORDS[::-1], name="kept")).save(tmp_path / "m.keras")
    same, other, kept = lookup(WORDS), lookup(["x", "y"], name="new"), lookup(WORDS[::-1], name="kept")
    with pytest.warns(UserWarning, match="the vocabulary of layer 'new' of the factory"):
        compare_vocabularies(
            model_of(other, same, kept), tmp_path / "m.keras"
        )  # the new one stands in front of the others
    compare_vocabularies(model_of(lookup(WORDS, name="renamed"), kept), tmp_path / "m.keras")
    with pytest.warns(UserWarning, match="the vocabulary of layer 'renamed' of the factory"):
        compare_vocabularies(model_of(lookup(WORDS[1:], name="renamed"), kept), tmp_path / "m.keras")
    with refused(CheckpointMismatchError, match="'bee'"):
        compare_vocabularies(model_of(other, lookup(WORDS[1:]), kept), tmp_path / "m.keras")


# ---- what a file holds, and what it does not


@keras.saving.register_keras_serializable(package="tests")
class Subclassed(keras.Model):
    """Makes lookups in its code: one of an argument, and others that its config says nothing of."""

    def __init__(self, words: list[str], others: str = "", adapt: bool = False, name: str | None = None) -> None:
        super().__init__(name="subclassed")
        self.arguments = {"words": words, "others": others, "adapt": adapt, "name": name}
        options: dict[str, Any] = {} if name is None else {"name": name}
        self.look = lookup(words, adapt, **options)
        if others == "list":
            self.others: Any = [lookup(["x", "y"], adapt, name="inside")]
        if others == "dict":
            self.others = {"a": lookup(["x", "y"], adapt, name="inside")}
        if others == "attribute":
            self.others = lookup(["x", "y"], adapt, name="inside")

    def build(self, shape: Any) -> None:
        self.built = True

    def call(self, x: Any) -> Any:
        return self.look(x)

    def get_config(self) -> dict[str, Any]:
        return self.arguments


def functional(layer: Any) -> Any:
    x = keras.Input((), dtype="string")
    return keras.Model(x, layer(x))


def compared(model: Any, path: Path) -> dict[str, bool]:
    """By layer; the warning names those that are not."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = {entry.layer: entry.compared for entry in compare_vocabularies(model, path)}
    said = " ".join(str(warning.message) for warning in caught)
    assert {layer for layer in found if repr(layer) in said.partition("cannot be compared")[0]} == {
        layer for layer, is_compared in found.items() if not is_compared
    }
    return found


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "build",
    [
        lambda words: functional(lookup(words, name="words")),
        lambda words: functional(lookup(words, True, name="words")),
        lambda words: keras.Sequential([keras.Input((), dtype="string"), lookup(words, name="words")]),
        lambda words: functional(functional(lookup(words, name="words"))),
        lambda words: Subclassed(words, adapt=True, name="words"),
    ],
)
def test_vocabularies_that_a_file_holds(build: Any, zipped: bool, tmp_path: Path) -> None:
    model = build(WORDS)
    model(tf.constant(WORDS))
    path = tmp_path / ("m.keras" if zipped else "m")
    model.save(path, zipped=zipped)
    path = path if zipped else path / "model.weights.h5"
    assert compared(build(WORDS), path) == {"words": True}
    for other in (WORDS[::-1], [*WORDS, "fox"], WORDS[:4]):
        with refused(CheckpointMismatchError, match="layer 'words'"):
            compare_vocabularies(build(other), path)


@pytest.mark.parametrize("others", ["list", "dict", "attribute"])
@pytest.mark.parametrize("adapt", [True, False])
@pytest.mark.parametrize("name", [None, "words"])
def test_lookups_that_code_makes(others: str, adapt: bool, name: str | None, tmp_path: Path) -> None:
    def build(words: list[str]) -> Any:
        return Subclassed(words, others, adapt, name)

    model = build(WORDS)
    model(tf.constant(WORDS))
    model.save(tmp_path / "m.keras")
    model = build(WORDS)
    # A layer that is given its vocabulary by the code of a class leaves none in the file.
    assert compared(model, tmp_path / "m.keras") == {model.look.name: adapt, "inside": adapt}
    if adapt:
        with refused(CheckpointMismatchError, match="'eel'"):
            compare_vocabularies(build(WORDS[::-1]), tmp_path / "m.keras")


def test_a_renamed_layer(tmp_path: Path) -> None:
    functional(lookup(WORDS, name="words")).save(tmp_path / "m.keras")
    assert compared(functional(lookup(WORDS, name="wordz")), tmp_path / "m.keras") == {"wordz": True}
    with pytest.warns(
        UserWarning, match=r"layer 'wordz' of the factory.*has the vocabulary of 'words' \(6 entries\) in the file"
    ):
        compare_vocabularies(functional(lookup(WORDS[::-1], name="wordz")), tmp_path / "m.keras")
    model_of(lookup(WORDS, name="words"), lookup(["x", "y"], name="cities")).save(tmp_path / "two.keras")
    # It may be that of the other one.
    assert compared(functional(lookup(WORDS, name="wordz")), tmp_path / "two.keras") == {"wordz": False}


def test_more_layers_without_names_than_the_file_has(tmp_path: Path) -> None:
    functional(lookup(WORDS)).save(tmp_path / "m.keras")
    for new in ([WORDS, ["x", "y"]], [["x", "y"], WORDS]):
        model = model_of(*map(lookup, new))
        names = [entry.layer for entry in vocabularies_of(model)]
        assert set(compared(model, tmp_path / "m.keras").items()) == {
            (name, words is WORDS) for name, words in zip(sorted(names, key=len_and_text), new, strict=True)
        }
    with refused(CheckpointMismatchError, match="string_lookup"):
        compare_vocabularies(model_of(lookup(["x", "y"]), lookup(WORDS[::-1])), tmp_path / "m.keras")


def len_and_text(name: str) -> tuple[int, str]:
    """Sorts the names that Keras has numbered."""
    return len(name), name


@keras.saving.register_keras_serializable(package="tests")
class Silent(keras.layers.Layer):
    """Makes a lookup of which no config says anything, as of words in the code."""

    WORDS: ClassVar[list[str]] = []

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.look = lookup(Silent.WORDS)

    def call(self, x: Any) -> Any:
        return self.look(x)


@pytest.mark.nightly
def test_what_is_called_compared_is_equal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Random models, and factories of which one vocabulary is another one, or is left out: refused, or said to be unknown."""

    def build(kinds: list[str], words: list[list[str]], names: list[str | None]) -> Any:
        layers: list[Any] = []
        for kind, listed, name in zip(kinds, words, names, strict=True):
            options: dict[str, Any] = {} if name is None else {"name": name}
            monkeypatch.setattr(Silent, "WORDS", listed)
            if kind in ("given", "adapted"):
                layers.append(lookup(listed, kind == "adapted", **options))
            else:
                layers.append(Silent(**options) if kind == "silent" else Own(listed, ["x", "y"], **options))
        x = keras.Input((), dtype="string")
        return keras.Model(x, [layer(x) for layer in layers])

    outcomes = {"refused": 0, "unknown": 0}
    for seed in range(30):
        rng = random.Random(seed)
        count = rng.randint(1, 3)
        kinds = [rng.choice(["given", "adapted", "silent", "own"]) for _ in range(count)]
        words = [rng.sample(WORDS, rng.randint(3, 5)) for _ in range(count)]
        names = [rng.choice([None, f"name_{number}"]) for number in range(count)]
        path = tmp_path / f"{seed}.keras"
        build(kinds, words, names).save(path)
        same = compared(build(kinds, words, names), path)
        assert list(same.values()).count(False) <= kinds.count("silent") + kinds.count("own"), (seed, kinds, names)
        changed = rng.randrange(count)
        words[changed] = words[changed][::-1]
        wrong = digest(["[UNK]", *words[changed]])
        if rng.random() < 0.3:
            names[changed] = "renamed"
        try:
            with warnings.catch_warnings(action="ignore"):
                found = compare_vocabularies(build(kinds, words, names), path)
        except CheckpointMismatchError:
            outcomes["refused"] += 1
            continue
        outcomes["unknown"] += 1
        assert [entry.compared for entry in found if entry.sha256 == wrong] == [False], (seed, kinds, names, changed)
    assert min(outcomes.values()) > 5, outcomes


def test_a_damaged_vocabulary_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "m.keras"
    functional(lookup(WORDS, True, name="words")).save(path)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"bee\ncow", b"bef\ncow"))
    with refused(CheckpointCorruptError, match="vocabulary.txt"):
        compare_vocabularies(functional(lookup(WORDS, name="words")), path)


# ---- in exports


def build(words: list[str] = WORDS) -> Any:
    x = keras.Input((), dtype="string", name="word")
    ids = lookup(words, name="words")(x)
    rows = TPUEmbedding(FeatureConfig(TableConfig(len(WORDS) + 1, 4, "t")), optimizer="sgd")(ids)
    return keras.Model(x, keras.layers.Dense(1, name="score")(rows))


def test_manifest_report_and_description_have_it(tmp_path: Path) -> None:
    entries = ["[UNK]", *WORDS]
    truth: dict[str, Any] = {"layer": "words", "size": 6, "sha256": digest(entries)}
    model = build()
    checkpoint = tf.train.Checkpoint(model=model).write(str(tmp_path / "ckpt"))
    model.save(tmp_path / "m.keras")
    reports = {
        "live": export_saved_model(model, tmp_path / "a"),
        "bundle": export_saved_model(checkpoint, tmp_path / "b", model=build),
        "keras": export_saved_model(tmp_path / "m.keras", tmp_path / "c", model=build),
    }
    for source, report in reports.items():
        truth["compared"] = source != "bundle"
        assert json.loads(json.dumps(report.to_dict()))["vocabularies"] == [truth]
        manifest = Manifest.read(report.path)
        assert manifest is not None
        assert [vars(entry) for entry in manifest.vocabularies] == [truth]
        assert describe_export(report.path, manifest)["vocabularies"] == (truth,)


def test_a_keras_file_is_compared_before_anything_is_written(tmp_path: Path) -> None:
    build().save(tmp_path / "m.keras")
    with refused(CheckpointMismatchError, match="layer 'words'"):
        export_saved_model(tmp_path / "m.keras", tmp_path / "m", model=lambda: build(WORDS[::-1]))
    assert not (tmp_path / "m").exists()


def test_an_export_says_what_is_not_compared(tmp_path: Path) -> None:
    """On stderr, in the report and in the manifest; also of layers in lists, which Keras alone tracks."""

    def build(words: list[str]) -> Any:
        class Coded(keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.looks = [lookup(words, name="words")]
                self.rows = TPUEmbedding(FeatureConfig(TableConfig(len(WORDS) + 1, 4, "t")), optimizer="sgd")
                self.score = keras.layers.Dense(1)

            def call(self, x: Any) -> Any:
                return {"score": self.score(self.rows(self.looks[0](x["word"])))}

        return Coded(), {"word": tf.TensorSpec([None], tf.string)}

    model, _ = build(WORDS)
    inputs = {"word": tf.constant([*WORDS, "?"])}
    truth = model(inputs)["score"]
    model.save(tmp_path / "m.keras")
    with pytest.warns(
        UserWarning, match="the vocabulary of layer 'words' of the factory cannot be compared with the training"
    ):
        report = export_saved_model(tmp_path / "m.keras", tmp_path / "m", model=lambda: build(WORDS))
    manifest = Manifest.read(report.path)
    assert manifest is not None
    assert [entry.compared for entry in (*report.vocabularies, *manifest.vocabularies)] == [False, False]
    served = tf.saved_model.load(str(report.path)).signatures["serving_default"](**inputs)["score"]
    np.testing.assert_allclose(served, truth, rtol=1e-6)


def test_a_layer_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    x = keras.Input((), dtype="string", name="word")
    rows = TPUEmbedding(FeatureConfig(TableConfig(6, 4, "t")), optimizer="sgd")(
        keras.layers.StringLookup(name="words")(x)
    )
    with refused(ConfigError, match="layer 'words'"):
        export_saved_model(keras.Model(x, rows), tmp_path / "m")
