"""`Vocabulary.from_keras` against the layers themselves: rows of known and unknown names."""

import inspect
import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tpuembed
from tests.support.messages import refused
from tpuembed.errors import CheckpointCorruptError, CheckpointNotFoundError, ConfigError
from tpuembed.lookup.names import row_numbers
from tpuembed.vocabulary import UNKNOWN

WORDS = [*(f"word {index}" for index in range(60)), "ä", "x" * 100]
OTHERS = [*(f"other {index}" for index in range(60)), "", "[UNK]"]
IDS = np.random.default_rng(0).integers(-(2**62), 2**62, 60)


def adapted(layer: Any, data: Any) -> Any:
    layer.adapt(tf.constant(data))
    return layer


def strings(**options: Any) -> Any:
    return keras.layers.StringLookup(name="words", **options)


def integers(**options: Any) -> Any:
    return keras.layers.IntegerLookup(name="ids", **options)


HAS_OOV_METHOD = "oov_method" in inspect.signature(keras.layers.IntegerLookup.__init__).parameters
LAYERS = {
    "given": lambda: strings(vocabulary=WORDS),
    "given with its buckets": lambda: strings(vocabulary=["[UNK]", *WORDS]),
    "given as bytes": lambda: strings(vocabulary=np.array([word.encode() for word in WORDS])),
    "given as a tensor": lambda: strings(vocabulary=tf.constant(WORDS)),
    "three buckets": lambda: strings(vocabulary=WORDS, num_oov_indices=3),
    "no buckets": lambda: strings(vocabulary=WORDS, num_oov_indices=0),
    "adapted": lambda: adapted(strings(num_oov_indices=2), WORDS * 2 + WORDS[:9]),
    "another token": lambda: adapted(strings(oov_token="none"), WORDS),
    "integers": lambda: integers(vocabulary=IDS, num_oov_indices=3),
    **(
        {"one salted bucket": lambda: adapted(strings(oov_method="farmhash", salt=[7, -8]), WORDS)}
        if HAS_OOV_METHOD
        else {}
    ),
    "adapted integers": lambda: adapted(integers(num_oov_indices=2), IDS),
}


def check(found: tpuembed.Vocabulary, layer: Any) -> None:
    known = np.array(
        layer.get_vocabulary(include_special_tokens=False), object if found.dtype == "string" else np.int64
    )
    np.testing.assert_array_equal(found.lookup(known), layer(known.tolist()).numpy())
    others = np.array(OTHERS, object) if found.dtype == "string" else IDS + 1
    if layer.num_oov_indices:
        numbers = np.maximum(found.lookup(others) - found.oov_buckets, -1)
        rows = row_numbers(tf.constant(others.tolist(), found.dtype), numbers, found, padded=False)
        np.testing.assert_array_equal(rows, layer(others.tolist()).numpy())
    else:
        assert (found.lookup(others) == UNKNOWN).all()
    assert found.rows == layer.vocabulary_size()


@pytest.mark.parametrize("kind", LAYERS)
def test_rows_of_a_layer(kind: str) -> None:
    layer = LAYERS[kind]()
    check(tpuembed.Vocabulary.from_keras(layer), layer)


def model_of(layer: Any) -> Any:
    entry = keras.Input((1,), dtype="string" if isinstance(layer, keras.layers.StringLookup) else "int64")
    return keras.Model(entry, layer(entry))


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.sampled(2)
def test_rows_of_a_file(kind: str, is_nested: bool, tmp_path: Path) -> None:
    layer = LAYERS[kind]()
    model = model_of(layer)
    entry = keras.Input((1,), dtype=model.input.dtype)
    (keras.Model(entry, model(entry)) if is_nested else model).save(tmp_path / "m.keras")
    check(tpuembed.Vocabulary.from_keras(tmp_path / "m.keras"), layer)
    check(tpuembed.Vocabulary.from_keras(str(tmp_path / "m.keras"), layer.name), layer)


@pytest.mark.parametrize("is_archive", [True, False])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.sampled(2)
def test_rows_of_a_saved_model(kind: str, is_archive: bool, tmp_path: Path) -> None:
    layer = LAYERS[kind]()
    model = model_of(layer)
    model.export(tmp_path / "m", verbose=False) if is_archive else tf.saved_model.save(model, str(tmp_path / "m"))
    buckets = layer.num_oov_indices
    check(tpuembed.Vocabulary.from_keras(tmp_path / "m", oov_buckets=buckets), layer)
    for wrong in (None, buckets + 1, buckets + 2):
        with pytest.raises(ConfigError, match="num_oov_indices" if wrong is None else f"from {buckets} to"):
            tpuembed.Vocabulary.from_keras(str(tmp_path / "m"), oov_buckets=wrong)


def test_saved_models_with_several_tables_and_with_none(tmp_path: Path) -> None:
    words, others = strings(vocabulary=WORDS), integers(vocabulary=IDS)
    entries = [keras.Input((1,), dtype="string"), keras.Input((1,), dtype="int64")]
    model = keras.Model(entries, [words(entries[0]), others(entries[1])])
    model.export(tmp_path / "m", verbose=False)
    with pytest.raises(ConfigError, match="several") as error:
        tpuembed.Vocabulary.from_keras(tmp_path / "m", oov_buckets=1)
    places = [part.split("'")[1] for part in str(error.value).split(": ", 2)[2].split("; ")]
    found = [tpuembed.Vocabulary.from_keras(tmp_path / "m", place, oov_buckets=1) for place in places]
    for vocabulary in found:
        check(vocabulary, words if vocabulary.dtype == "string" else others)
    assert sorted(each.dtype for each in found) == ["int64", "string"]
    with pytest.raises(ConfigError, match="elsewhere"):
        tpuembed.Vocabulary.from_keras(tmp_path / "m", "elsewhere", oov_buckets=1)
    with pytest.raises(ConfigError, match=f"{places[0]}.* from 1 to .* from 7 to"):
        tpuembed.Vocabulary.from_keras(tmp_path / "m", places[0], oov_buckets=7)
    with refused(ConfigError):
        tpuembed.Vocabulary.from_keras(tmp_path / "m", places[0])
    tf.saved_model.save(tf.Module(), str(tmp_path / "none"))
    with refused(ConfigError):
        tpuembed.Vocabulary.from_keras(tmp_path / "none", oov_buckets=1)
    (tmp_path / "none" / "saved_model.pb").write_bytes(b"\xff" * 20)
    with refused(CheckpointCorruptError):
        tpuembed.Vocabulary.from_keras(tmp_path / "none", oov_buckets=1)
    for source in (words, tmp_path):
        with refused(ConfigError):
            tpuembed.Vocabulary.from_keras(source, oov_buckets=1)


def test_layers_that_give_columns_or_names() -> None:
    counts = strings(vocabulary=WORDS, output_mode="multi_hot")
    found = tpuembed.Vocabulary.from_keras(counts)
    for word in ["word 7", "word 8"]:
        assert found.lookup(word) == int(np.argmax(counts([word]).numpy()))
    names = strings(vocabulary=WORDS, invert=True)
    found = tpuembed.Vocabulary.from_keras(names)
    assert names(found.lookup(WORDS).tolist()).numpy().tolist() == [word.encode() for word in WORDS]


def test_a_file_with_several_layers(tmp_path: Path) -> None:
    words, others = strings(vocabulary=WORDS), adapted(keras.layers.StringLookup(name="others"), OTHERS[:5])
    entry = keras.Input((1,), dtype="string")
    keras.Model(entry, [words(entry), others(entry)]).save(tmp_path / "m.keras")
    check(tpuembed.Vocabulary.from_keras(tmp_path / "m.keras", "words"), words)
    check(tpuembed.Vocabulary.from_keras(tmp_path / "m.keras", "others"), others)
    for name in ("", "wrods"):
        with refused(ConfigError):
            tpuembed.Vocabulary.from_keras(tmp_path / "m.keras", name)


def test_two_layers_of_one_name_are_refused(tmp_path: Path) -> None:
    one, other = model_of(adapted(strings(), ["a"])), model_of(adapted(strings(), ["b"]))
    entry = keras.Input((1,), dtype="string")
    keras.Model(entry, [one(entry), other(entry)]).save(tmp_path / "m.keras")
    with refused(ConfigError):
        tpuembed.Vocabulary.from_keras(tmp_path / "m.keras", "words")


@pytest.mark.parametrize(
    "layer",
    [
        lambda: strings(vocabulary=WORDS, mask_token=""),
        pytest.param(
            lambda: integers(vocabulary=IDS, num_oov_indices=3, oov_method="farmhash"),
            marks=pytest.mark.skipif(not HAS_OOV_METHOD, reason="this Keras has no oov_method"),
        ),
        pytest.param(
            lambda: strings(vocabulary=WORDS, num_oov_indices=5, oov_method="farmhash", salt=[7, -8]),
            marks=pytest.mark.skipif(not HAS_OOV_METHOD, reason="this Keras has no oov_method"),
        ),
    ],
    ids=["mask", "hash", "salt"],
)
def test_layers_with_other_rows_are_refused(layer: Any, tmp_path: Path) -> None:
    with refused(ConfigError):
        tpuembed.Vocabulary.from_keras(layer())
    model_of(layer()).save(tmp_path / "m.keras")
    with refused(ConfigError):
        tpuembed.Vocabulary.from_keras(tmp_path / "m.keras")


def test_what_is_no_lookup_layer_is_refused(tmp_path: Path) -> None:
    line_ends = adapted(strings(), ["a\nb", "c"])
    model_of(line_ends).save(tmp_path / "lines.keras")
    check(tpuembed.Vocabulary.from_keras(line_ends), line_ends)
    model_of(strings()).save(tmp_path / "empty.keras")
    keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]).save(tmp_path / "dense.keras")
    for source in (
        strings(),
        keras.layers.Dense(3),
        keras.layers.TextVectorization(),
        5,
        tmp_path,
        tmp_path / "lines.keras",
        tmp_path / "empty.keras",
        tmp_path / "dense.keras",
    ):
        with refused(ConfigError):
            tpuembed.Vocabulary.from_keras(source)
    for missing in ("missing.keras", "missing"):
        with refused(CheckpointNotFoundError):
            tpuembed.Vocabulary.from_keras(tmp_path / missing)
    with refused(CheckpointNotFoundError):
        tpuembed.Vocabulary.from_keras(tmp_path / "missing", oov_buckets=1)


@pytest.mark.parametrize("text", ["[NO]\na\nb", "[UNK]\na\na", "[UNK]", ""], ids=["token", "twice", "no name", "empty"])
def test_damaged_files_are_refused(text: str, tmp_path: Path) -> None:
    model_of(adapted(strings(), WORDS)).save(tmp_path / "m.keras")
    with zipfile.ZipFile(tmp_path / "m.keras") as old, zipfile.ZipFile(tmp_path / "n.keras", "w") as new:
        for name in old.namelist():
            new.writestr(name, text if name.endswith("vocabulary.txt") else old.read(name))
    with refused((CheckpointCorruptError, ConfigError)):
        tpuembed.Vocabulary.from_keras(tmp_path / "n.keras")
    (tmp_path / "n.keras").write_bytes(b"PK" * 50)
    with pytest.raises(CheckpointCorruptError):
        tpuembed.Vocabulary.from_keras(tmp_path / "n.keras")
