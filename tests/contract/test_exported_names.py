"""Vocabularies in exports: signatures take names, and find the rows that Keras' lookup layers find."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.contract_command import json_of, tpuembed
from tests.support.contract_lookups import answers, call, load
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, Vocabulary, export_saved_model

Array = np.ndarray[Any, Any]
NAMES = [b"ann", b"a\0", b"\xff\xfe", "\u00e9".encode(), b"ann ", b"0"]
NUMBERS = [7, -2, 2**63 - 1, -(2**63), 2**53 + 1, 2**53]
BUCKETS = 2
SERVED: dict[str, dict[str, Any]] = {
    "user": {"table": "users", "input": "id"},
    "seen": {"table": "items", "combiner": "sum", "out_of_vocabulary": "zeros"},
    "strict": {"table": "items", "input": "id"},
}


def features() -> dict[str, FeatureConfig]:
    """Return features of names with buckets for unknown ones, and of integers, whose unknown ones are zeros."""
    users = TableConfig(10, 4, "users")
    items = TableConfig(8, 3, "items", combiner="sum")
    names, numbers = Vocabulary(NAMES, oov_buckets=BUCKETS), Vocabulary(NUMBERS, dtype="int64")
    return {
        "user": FeatureConfig(users, vocabulary=names),
        "seen": FeatureConfig(items, vocabulary=numbers, out_of_vocabulary="zeros"),
    }


def build() -> Any:
    inputs = {
        "user": keras.Input((), dtype="string", name="user"),
        "seen": keras.Input((None,), dtype="int64", ragged=True, name="seen"),
    }
    rows = TPUEmbedding(features(), optimizer="adagrad", name="embedding")(inputs)
    joined = keras.layers.Concatenate(name="rows")([rows["user"], rows["seen"]])
    return keras.Model(inputs, {"rows": joined})


class Named:
    """A checkpoint of the model, its rows, and a version of its lookups in each layout."""

    def __init__(self, folder: Path) -> None:
        model = build()
        random = np.random.default_rng(4)
        self.rows: dict[str, Array] = {}
        for table, variable in model.get_layer("embedding").embedding_tables.items():
            self.rows[table.name] = random.normal(size=variable.shape).astype(np.float32)
            variable.assign(self.rows[table.name])
        self.prefix = tf.train.Checkpoint(model=model).write(str(folder / "ckpt"))
        options: dict[str, Any] = {"serving_config": {"features": SERVED}, "workers": 1}
        self.versions = {
            layout: export_saved_model(self.prefix, folder / "m", layout=layout, **options).path
            for layout in ("variables", "mmap")
        }

    def user_rows(self, names: list[bytes]) -> Array:
        """Return rows of users by Keras' own lookup, which takes text in UTF-8 alone: the others by their places."""
        keras_names = [name for name in NAMES if b"\0" not in name and b"\xff" not in name]
        lookup = keras.layers.StringLookup(vocabulary=[name.decode() for name in keras_names], num_oov_indices=BUCKETS)
        found = np.array(lookup(tf.constant(names))).tolist()
        numbers = [BUCKETS + NAMES.index(name) if name in NAMES else at for name, at in zip(names, found, strict=True)]
        return self.rows["users"][numbers]

    def item_rows(self, numbers: list[list[int]]) -> Array:
        """Return sums of rows of items; -1 is padding, and an unknown number is zeros."""
        known = dict(zip(NUMBERS, self.rows["items"], strict=False))
        return np.stack([sum((known.get(one, np.zeros(3)) for one in line), np.zeros(3)) for line in numbers])


USERS = [*NAMES, b"nobody", b"ANN", b"a"]
SEEN = [[7, -2], [2**63 - 1, -1], [-(2**63), 2**53], [2**53 + 1, 2**53 + 2], [5, 7], [-1, -1], [7, 7], [0, 1], [-2, -1]]


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Named:
    return Named(tmp_path_factory.mktemp("named"))


@pytest.mark.parametrize("layout", ["variables", "mmap"])
def test_a_signature_takes_names(named: Named, layout: str) -> None:
    loaded = load(named.versions[layout])
    signature = loaded.signatures["serving_default"].structured_input_signature[1]
    assert {name: (spec.dtype, spec.shape.as_list()) for name, spec in signature.items()} == {
        "user": (tf.string, [None]),
        "seen": (tf.int64, [None, None]),
        "strict": (tf.int64, [None]),
    }
    found = call(loaded, {"user": USERS, "seen": SEEN, "strict": [7] * len(USERS)})
    np.testing.assert_array_equal(found["user"], named.user_rows(USERS))
    np.testing.assert_allclose(found["seen"], named.item_rows(SEEN), rtol=1e-6, atol=1e-7)


def test_serialized_examples_hold_names(named: Named) -> None:
    example = tf.train.Example()
    example.features.feature["user"].bytes_list.value.append(NAMES[2])
    example.features.feature["seen"].int64_list.value.extend([7, 2**53])
    example.features.feature["strict"].int64_list.value.append(-2)
    found = answers(named.versions["variables"], {"examples": [example.SerializeToString()]}, "serving_examples")
    np.testing.assert_array_equal(found["user"], named.user_rows([NAMES[2]]))
    np.testing.assert_allclose(found["seen"], named.item_rows([[7, 2**53]]), rtol=1e-6)
    np.testing.assert_array_equal(found["strict"], named.item_rows([[-2]]).astype(np.float32))


def test_a_whole_model_takes_names(named: Named, tmp_path: Path) -> None:
    version = export_saved_model(named.prefix, tmp_path / "m", model=build, workers=1).path
    found = answers(version, {"user": USERS, "seen": SEEN})["rows"]
    wanted = np.concatenate([named.user_rows(USERS), named.item_rows(SEEN)], 1)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("layout", ["variables", "mmap"])
def test_an_unknown_name_without_a_bucket_fails_the_request_and_is_named(named: Named, layout: str) -> None:
    unknown = r"feature strict: name \W*5\W* of row 1 is not in the vocabulary of table items"
    with pytest.raises(tf.errors.InvalidArgumentError, match=unknown):
        answers(named.versions[layout], {"user": USERS[:2], "seen": SEEN[:2], "strict": [7, 5]})


def test_head_prints_names(named: Named) -> None:
    shown = json_of("head", named.prefix, "items", "--names", "--rows", "0:2")
    assert [str(name) for name in shown["names"]] == ["7", "-2"]
    lines = tpuembed("head", named.prefix, "users", "--names", "--rows", "2:3").stdout.splitlines()
    assert "ann" in lines[0]
    (line,) = tpuembed("head", named.prefix, "users", "--name", "ann").stdout.splitlines()
    assert np.array(line.split()[-4:], np.float32).tolist() == named.rows["users"][BUCKETS].tolist()
