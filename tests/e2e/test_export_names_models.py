"""Whole models that find rows by names of the exporter's tables, through `TableSource.name_arrays`."""

import contextlib
import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.messages import refused
from tpuembed import (
    FeatureConfig,
    TableConfig,
    TPUEmbedding,
    Vocabulary,
    export_retrieval,
    export_saved_model,
)
from tpuembed.checkpoint.keras.given_names import check_names_in
from tpuembed.errors import CheckpointCorruptError, CheckpointMismatchError, ConfigError

pytestmark = pytest.mark.usefixtures("exports_in_this_process")

USERS = Vocabulary([f"user {number}" for number in range(40)])
ITEMS = Vocabulary(range(2**53, 2**53 + 30), dtype="int64")
SIZES = {"users": (40, 4), "items": (30, 4)}


def model() -> Any:
    user, item = keras.Input((), dtype="string", name="user"), keras.Input((), dtype="int64", name="item")
    names = {"users": USERS, "items": ITEMS}
    features = {name: FeatureConfig(TableConfig(*size, name), vocabulary=names[name]) for name, size in SIZES.items()}
    found = TPUEmbedding(features, optimizer="sgd")({"users": user, "items": item})
    return keras.Model({"user": user, "item": item}, {"score": keras.ops.sum(found["users"] * found["items"], -1)})


@pytest.mark.parametrize("names", [["ann", "bob", "eve"], ["bob", "ann", "eve"], ["ann", "bob"]])
@pytest.mark.sampled(1)
def test_names_for_a_model_that_was_trained_with_a_lookup_layer(tmp_path: Path, names: list[str]) -> None:
    """The `.keras` file has the vocabulary of the StringLookup. Other names, or another order, would be other rows."""
    trained = ["ann", "bob", "eve"]

    def build(lookup: bool) -> keras.Model:
        inputs = keras.Input((), dtype="string", name="user")
        vocabulary = None if lookup else Vocabulary(names, oov_buckets=1)
        config = FeatureConfig(TableConfig(8, 2, "users"), vocabulary=vocabulary)
        ids = keras.layers.StringLookup(vocabulary=trained)(inputs) if lookup else inputs
        return keras.Model(
            {"user": inputs}, TPUEmbedding({"user": config}, optimizer="sgd", name="e")({"user": ids})["user"]
        )

    layer = build(lookup=True)
    layer.save(tmp_path / "m.keras")
    if names != trained:
        with refused(CheckpointMismatchError):
            export_saved_model(tmp_path / "m.keras", tmp_path / "m", model=lambda: build(lookup=False))
        return
    with pytest.warns(UserWarning, match="cannot be compared with the training.*'users'"):
        version = export_saved_model(tmp_path / "m.keras", tmp_path / "m", model=lambda: build(lookup=False)).path
    found = tf.saved_model.load(str(version)).signatures["serving_default"](user=tf.constant(["eve", "ann", "x"]))
    wanted = layer({"user": tf.constant(["eve", "ann", "x"])})
    np.testing.assert_array_equal(next(iter(found.values())), wanted)


TRAINED: dict[str, Any] = {
    "plain": (["ann", "bob", "eve"], {"num_oov_indices": 3}),
    "salted": (["ann", "bob", "eve"], {"num_oov_indices": 3, "salt": [1, 2]}),
    "token": (["ann", "bob", "eve"], {"oov_token": "<unk>"}),
    "integers": ([7, 5, 6], {"num_oov_indices": 3}),
    "hashed": ([7, 5, 6], {"num_oov_indices": 3, "oov_method": "farmhash"}),
    "subclass": (["ann", "bob", "eve"], {"num_oov_indices": 3}),
    "masked": (["ann", "bob", "eve"], {"mask_token": ""}),
    "shifted": (["ann", "bob", "eve"], {"mask_token": ""}),
}


@keras.saving.register_keras_serializable("tests")
class OwnLookup(keras.layers.StringLookup):
    """A user's subclass."""


@pytest.mark.parametrize(
    ("trained", "given", "fits"),
    [
        ("plain", "plain", True),
        ("salted", "plain", False),
        ("token", "plain", True),
        ("integers", "plain", True),
        ("hashed", "plain", False),
        ("hashed", "lookup", False),
        ("salted", "lookup", False),
        ("subclass", "plain", True),
        ("subclass", "trained", True),
        ("masked", "unknown is a name", False),
        ("shifted", "plain", False),
    ],
)
@pytest.mark.sampled(3)
def test_unknown_names_have_the_rows_of_the_trained_lookup(
    tmp_path: Path, trained: str, given: str, fits: bool
) -> None:
    """Names of one order may choose the row of an unknown name in another way. "lookup" is the trained one without options."""
    names, options = TRAINED[trained]
    dtype = "string" if isinstance(names[0], str) else "int64"
    kind: Any = keras.layers.StringLookup if dtype == "string" else keras.layers.IntegerLookup
    if trained == "subclass":
        kind = OwnLookup

    def build(how: str) -> keras.Model:
        inputs, buckets = keras.Input((), dtype=dtype, name="user"), options.get("num_oov_indices", 1)
        vocabulary = Vocabulary(names, dtype=dtype, oov_buckets=buckets) if how == "plain" else None  # type: ignore[arg-type]
        if how == "unknown is a name":
            vocabulary = Vocabulary(["[UNK]", *names], oov_buckets=buckets)
        config = FeatureConfig(TableConfig(8, 2, "users"), vocabulary=vocabulary)
        lookup = kind(vocabulary=names, **({"num_oov_indices": buckets} if how == "lookup" else options), name="lookup")
        ids = lookup(inputs) if vocabulary is None else inputs
        if vocabulary is None and trained == "shifted":
            ids = ids - 1  # the table has no row of the mask
        return keras.Model(
            {"user": inputs}, TPUEmbedding({"user": config}, optimizer="sgd", name="e")({"user": ids})["user"]
        )

    model = build("trained")
    model.get_layer("e").assign_rows("users", 0, np.arange(16, dtype=np.float32).reshape(8, 2))
    model.save(tmp_path / "m.keras")
    if not fits:
        with refused(CheckpointMismatchError):
            export_saved_model(tmp_path / "m.keras", tmp_path / "m", model=lambda: build(given))
        return
    with contextlib.nullcontext() if given == "trained" else pytest.warns(UserWarning, match="cannot be compared"):
        version = export_saved_model(tmp_path / "m.keras", tmp_path / "m", model=lambda: build(given)).path
    unknown = [f"x{number}" for number in range(20)] if dtype == "string" else range(100, 120)
    users = tf.constant([*names, *unknown], dtype)
    found = tf.saved_model.load(str(version)).signatures["serving_default"](user=users)
    np.testing.assert_array_equal(next(iter(found.values())), model({"user": users}))


@keras.saving.register_keras_serializable("tests")
class Hidden(keras.layers.Layer):
    """A lookup that no config has."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.lookup = keras.layers.StringLookup(vocabulary=["ann", "bob", "eve"])

    def call(self, names: Any) -> Any:
        return self.lookup(names)

    def compute_output_spec(self, names: Any) -> Any:
        return keras.KerasTensor(names.shape, "int64")


@pytest.mark.parametrize("words", [None, "given", "line-end"])
def test_names_that_a_file_does_not_hold_are_taken_with_a_warning(tmp_path: Path, words: str | None) -> None:
    user = keras.Input((), dtype="string", name="user")
    lookup: Any = Hidden() if words in (None, "given") else keras.layers.StringLookup()
    if words == "line-end":
        lookup.adapt(np.array(["a\nb", "c"]))
    ids = [lookup(user), *([keras.layers.StringLookup(vocabulary=["x", "y"])(user)] if words == "given" else [])]
    layer = TPUEmbedding([FeatureConfig(TableConfig(8, 2, f"t{n}")) for n in range(len(ids))], "sgd", name="e")
    keras.Model(user, layer(ids)).save(tmp_path / "m.keras")
    with pytest.warns(UserWarning, match="cannot be compared with the training.*'t0'"):
        check_names_in({"t0": Vocabulary(["eve", "ann", "bob"])}, tmp_path / "m.keras", "factory")


def test_names_of_a_serving_config_are_those_of_the_lookup(tmp_path: Path) -> None:
    user = keras.Input((), dtype="string", name="user")
    layer = TPUEmbedding({"user": FeatureConfig(TableConfig(8, 2, "users"))}, optimizer="sgd", name="e")
    ids = keras.layers.StringLookup(vocabulary=["ann", "bob", "eve"])(user)
    model = keras.Model(user, layer({"user": ids})["user"])
    layer.assign_rows("users", 0, np.arange(16, dtype=np.float32).reshape(8, 2))
    model.save(tmp_path / "m.keras")

    def export(*names: str) -> Any:
        (tmp_path / "names.txt").write_text("\n".join(names))
        vocabulary = {"file": str(tmp_path / "names.txt"), "oov_buckets": 1}
        config = {"features": {"user": {"table": "users", "input": "id", "vocabulary": vocabulary}}}
        return export_saved_model(tmp_path / "m.keras", tmp_path / "m", serving_config=config).path

    with refused(CheckpointMismatchError):
        export("eve", "bob", "ann")
    with pytest.warns(UserWarning, match="cannot be compared"):
        version = export("ann", "bob", "eve")
    found = tf.saved_model.load(str(version)).signatures["serving_default"]
    users = tf.constant(["eve", "x", "ann"])
    np.testing.assert_array_equal(found(user=users)["user"], model(users))


def test_a_config_that_cannot_be_read_is_damage(tmp_path: Path) -> None:
    user = keras.Input((), dtype="string", name="user")
    layer = TPUEmbedding({"user": FeatureConfig(TableConfig(8, 2, "users"))}, optimizer="sgd", name="e")
    keras.Model(user, layer({"user": keras.layers.StringLookup(vocabulary=["ann"])(user)})).save(tmp_path / "m.keras")
    with zipfile.ZipFile(tmp_path / "m.keras") as whole, zipfile.ZipFile(tmp_path / "d.keras", "w") as damaged:
        for name in whole.namelist():
            content = whole.read(name)
            damaged.writestr(name, content.replace(b'"num_oov_indices": 1', b'"num_oov_indices": "x"'))
    with refused(CheckpointCorruptError):
        check_names_in({"users": Vocabulary(["ann"], oov_buckets=1)}, tmp_path / "d.keras", "factory")


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:model file:UserWarning")  # a file does not say whose names an own lookup's are
@pytest.mark.parametrize("kind", ["lookup", "names"])
@pytest.mark.parametrize("of", ["query", "candidates"])
def test_a_tower_of_another_order_than_the_trained_one_is_refused(tmp_path: Path, of: str, kind: str) -> None:
    """The `.keras` file has the vocabulary of the StringLookup, for the towers of a retrieval too."""
    trained = ["ann", "bob", "eve"]

    def build(names: list[str], lookup: bool) -> keras.Model:
        inputs = keras.Input((), dtype="string", name="user")
        config = FeatureConfig(
            TableConfig(8, 4, "users"), vocabulary=None if lookup else Vocabulary(names, oov_buckets=1)
        )
        ids = keras.layers.StringLookup(vocabulary=names, name="lookup")(inputs) if lookup else inputs
        return keras.Model(
            {"user": inputs}, TPUEmbedding({"user": config}, optimizer="sgd", name="e")({"user": ids})["user"]
        )

    def candidates(names: list[str]) -> Any:
        return build(names, kind == "lookup"), tf.data.Dataset.from_tensors({"user": trained, "id": trained})

    def export(name: str, for_query: list[str], for_candidates: list[str]) -> Any:
        return export_retrieval(
            tmp_path / "m.keras",
            tmp_path / name,
            query=lambda: build(for_query, kind == "lookup"),
            candidates=lambda: candidates(for_candidates),
            k=1,
            index="exact",
        )

    model = build(trained, lookup=True)
    (layer,) = [one for one in model.layers if isinstance(one, TPUEmbedding)]
    layer.update_embedding_table("users", np.eye(8, 4, dtype=np.float32))
    model.save(tmp_path / "m.keras")
    other = ["bob", "ann", "eve"]
    with refused(CheckpointMismatchError):
        export("refused", *((other, trained) if of == "query" else (trained, other)))
    with contextlib.nullcontext() if kind == "lookup" else pytest.warns(UserWarning, match="cannot be compared"):
        version = export("m", trained, trained).path
    loaded = tf.saved_model.load(str(version))
    found = loaded.signatures["serving_default"](user=tf.constant(trained))
    assert found["ids"].numpy()[:, 0].tolist() == [b"ann", b"bob", b"eve"]


@pytest.mark.parametrize("trained_with", ["names", "both"])
@pytest.mark.sampled(1)
def test_a_feature_takes_row_numbers_beside_names_if_it_did_in_training(tmp_path: Path, trained_with: str) -> None:
    """Row numbers of a lookup layer may be of another order than the names."""
    trained = ["ann", "bob", "eve"]

    def build(names: list[str], numbered: str | None) -> keras.Model:
        inputs = {name: keras.Input((), dtype="string", name=name) for name in ("user", "friend")}
        table, vocabulary = TableConfig(3, 4, "users"), Vocabulary(names)
        lookup = keras.layers.StringLookup(vocabulary=["eve", "bob", "ann"], num_oov_indices=0, name="lookup")
        features = {name: FeatureConfig(table, vocabulary=None if name == numbered else vocabulary) for name in inputs}
        given = {name: lookup(ids) if name == numbered else ids for name, ids in inputs.items()}
        found = TPUEmbedding(features, optimizer="sgd", name="e")(given)
        return keras.Model(inputs, keras.layers.Concatenate()([found["user"], found["friend"]]))

    model = build(trained, numbered="friend" if trained_with == "both" else None)
    prefix = tf.train.Checkpoint(model=model).write(str(tmp_path / "ckpt"))
    with refused(ConfigError):
        export_saved_model(prefix, tmp_path / "m", model=lambda: build([], numbered="user"))
    if trained_with == "names":
        return
    users = {"user": tf.constant(["eve", "ann"]), "friend": tf.constant(["ann", "bob"])}
    for version in (
        export_saved_model(prefix, tmp_path / "m", model=lambda: build([], numbered="friend")).path,
        export_saved_model(model, tmp_path / "live").path,
    ):
        found = tf.saved_model.load(str(version)).signatures["serving_default"](**users)
        np.testing.assert_array_equal(next(iter(found.values())), model(users))


def test_a_call_takes_no_row_numbers_of_a_table_with_names(tmp_path: Path) -> None:
    """With the vocabulary in the layer, other features of its tables took the numbers of any lookup."""

    def build(numbered: bool) -> keras.Model:
        inputs = keras.Input((), dtype="string", name="user")
        table, vocabulary = TableConfig(3, 4, "users"), Vocabulary(["ann", "bob", "eve"])
        layer = TPUEmbedding({"user": FeatureConfig(table, vocabulary=vocabulary)}, optimizer="sgd", name="e")
        lookup = keras.layers.StringLookup(vocabulary=["eve", "bob", "ann"], num_oov_indices=0, name="lookup")
        own = layer({"user": inputs})["user"]
        served = {"served": FeatureConfig(table, vocabulary=None if numbered else vocabulary)}
        other = layer({"served": lookup(inputs) if numbered else inputs}, serving_config=served)["served"]
        return keras.Model({"user": inputs}, keras.layers.Concatenate()([own, other]))

    model = build(numbered=False)
    prefix = tf.train.Checkpoint(model=model).write(str(tmp_path / "ckpt"))
    with refused(ConfigError):
        export_saved_model(prefix, tmp_path / "m", model=lambda: build(numbered=True))
    version = export_saved_model(prefix, tmp_path / "m", model=lambda: build(numbered=False)).path
    users = {"user": tf.constant(["eve", "ann"])}
    found = tf.saved_model.load(str(version)).signatures["serving_default"](**users)
    np.testing.assert_array_equal(next(iter(found.values())), model(users))
