"""Whole models that find rows by names of the exporter's tables, through `TableSource.name_arrays`."""

import contextlib
import warnings
import zipfile
from collections.abc import Mapping
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
    export_model,
    export_retrieval,
    export_saved_model,
)
from tpuembed.checkpoint.keras.proven_names import check_names_in
from tpuembed.errors import CheckpointCorruptError, CheckpointMismatchError, ConfigError
from tpuembed.export.graph.vocabularies import compare_vocabularies

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
        ("shifted", "plain", True),
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
    is_clear = given == "trained" or trained not in ("shifted", "subclass")
    with contextlib.nullcontext() if is_clear else pytest.warns(UserWarning, match="cannot be compared"):
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


def shifted(names: Any) -> Any:
    return keras.layers.StringLookup(vocabulary=["ann", "bob", "eve"])(names) - 1


def through_a_layer(names: Any) -> Any:
    return keras.layers.Reshape(())(keras.layers.StringLookup(vocabulary=["ann", "bob", "eve"])(names))


def of_a_subclass(names: Any) -> Any:
    return OwnLookup(vocabulary=["ann", "bob", "eve"])(names)


@keras.saving.register_keras_serializable("tests")
class Stripped(keras.layers.Layer):
    """Changes names before they are looked up."""

    def call(self, names: Any) -> Any:
        return tf.strings.strip(names)


def after_another(names: Any) -> Any:
    return keras.layers.StringLookup(vocabulary=["ann", "bob", "eve"])(Stripped()(names))


def hidden_and_adapted(names: Any) -> Any:
    """Two lookups that a class makes. The file has the entries of one alone, which is of no table."""
    return HiddenBeside(["eve", "bob", "ann"])(names)


@keras.saving.register_keras_serializable("tests")
class HiddenBeside(Hidden):
    """A hidden lookup beside an adapted one."""

    def __init__(self, words: list[str], **options: Any) -> None:
        super().__init__(**options)
        self.beside = keras.layers.StringLookup(name="beside")
        self.beside.adapt(np.array([word for number, word in enumerate(words) for _ in range(9 - number)]))
        self.built = True


@pytest.mark.parametrize("ids", [shifted, through_a_layer, of_a_subclass, after_another, hidden_and_adapted])
@pytest.mark.parametrize("names", [["ann", "bob", "eve"], ["eve", "bob", "ann"]])
@pytest.mark.sampled(2)
def test_names_are_neither_refused_nor_accepted_in_silence_if_the_file_does_not_say_them(
    tmp_path: Path, ids: Any, names: list[str]
) -> None:
    """Another lookup of the file, which is of another table, says nothing about them."""

    def build(given: list[str] | None) -> keras.Model:
        inputs = {name: keras.Input((), dtype="string", name=name) for name in ("user", "tag")}
        tag = keras.layers.StringLookup(vocabulary=["eve", "bob", "ann"], name="of_tag")(inputs["tag"])
        user = inputs["user"] if given else ids(inputs["user"])
        vocabulary = Vocabulary(given, oov_buckets=0 if ids is shifted else 1) if given else None
        features = {
            "user": FeatureConfig(TableConfig(8, 2, "users"), vocabulary=vocabulary),
            "tag": FeatureConfig(TableConfig(8, 2, "tags")),
        }
        found = TPUEmbedding(features, optimizer="sgd", name="e")({"user": user, "tag": tag})
        return keras.Model(inputs, keras.layers.Concatenate()([found["user"], found["tag"]]))

    model = build(None)
    model.get_layer("e").assign_rows("users", 0, np.arange(16, dtype=np.float32).reshape(8, 2))
    model.save(tmp_path / "m.keras")
    with pytest.warns(
        UserWarning, match="the names that the factory gives cannot be compared with the training.*'users'"
    ):
        version = export_saved_model(tmp_path / "m.keras", tmp_path / "m", model=lambda: build(names)).path
    users = {"user": tf.constant(["ann", "bob"]), "tag": tf.constant(["ann", "x"])}
    found = tf.saved_model.load(str(version)).signatures["serving_default"](**users)
    assert np.array_equal(next(iter(found.values())), model(users)) == (names == ["ann", "bob", "eve"])


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.sampled(1)
def test_names_are_not_compared_with_a_lookup_that_is_called_like_the_input_of_an_inner_model(
    tmp_path: Path, swapped: bool
) -> None:
    orders = {"a": ["ann", "bob", "eve"], "b": ["eve", "bob", "ann"]}
    given = {"user": orders["b" if swapped else "a"], "item": orders["a" if swapped else "b"]}
    tables = {name: TableConfig(8, 2, f"{name}s") for name in given}
    words = {name: keras.Input((), dtype="string", name=name) for name in given}
    ids = {name: keras.Input((), dtype="int64", name=name) for name in orders}
    layer = TPUEmbedding({name: FeatureConfig(table) for name, table in tables.items()}, optimizer="sgd", name="e")
    found = layer({"user": ids["a"], "item": ids["b"]})
    inner = keras.Model(ids, keras.layers.Concatenate()([found["user"], found["item"]]), name="inner")
    other = {"a": "b", "b": "a"}
    lookups = {name: keras.layers.StringLookup(vocabulary=order, name=other[name]) for name, order in orders.items()}
    taken = {"a": lookups["a"](words["user"]), "b": lookups["b"](words["item"])}
    keras.Model(words, inner(taken)).save(tmp_path / "m.keras")

    def build() -> keras.Model:
        inputs = {name: keras.Input((), dtype="string", name=name) for name in given}
        features = {
            name: FeatureConfig(table, vocabulary=Vocabulary(given[name], oov_buckets=1))
            for name, table in tables.items()
        }
        found = TPUEmbedding(features, optimizer="sgd", name="e")(inputs)
        return keras.Model(inputs, keras.layers.Concatenate()([found["user"], found["item"]]))

    with pytest.warns(UserWarning, match="cannot be compared with the training.*'items', 'users'"):
        export_saved_model(tmp_path / "m.keras", tmp_path / "m", model=build)


@keras.saving.register_keras_serializable("tests")
class CallsParts(keras.Model):
    """Calls a layer of a functional model with ids of its own, as no config says."""

    def __init__(self, base: Any, words: list[str], **options: Any) -> None:
        super().__init__(**options)
        self.base, self.look = base, keras.layers.StringLookup(vocabulary=words)

    def call(self, names: Any) -> Any:
        return self.base.get_layer("e")(self.look(names))

    def get_config(self) -> dict[str, Any]:
        return {"base": keras.saving.serialize_keras_object(self.base), "name": self.name}


@pytest.mark.parametrize("names", [["ann", "bob", "eve"], ["eve", "bob", "ann"]])
def test_a_functional_model_that_another_class_may_call_otherwise_proves_nothing(
    tmp_path: Path, names: list[str]
) -> None:
    def base(given: list[str] | None) -> keras.Model:
        user = keras.Input((), dtype="string", name="user")
        vocabulary = None if given is None else Vocabulary(given, oov_buckets=1)
        ids = user if given else keras.layers.StringLookup(vocabulary=["ann", "bob", "eve"])(user)
        feature = FeatureConfig(TableConfig(8, 2, "users"), vocabulary=vocabulary)
        return keras.Model(user, TPUEmbedding(feature, optimizer="sgd", name="e")(ids))

    model = CallsParts(base(None), ["eve", "bob", "ann"])
    model(tf.constant(["ann"]))
    model.save(tmp_path / "m.keras")
    with pytest.warns(UserWarning, match="cannot be compared with the training"):
        compare_vocabularies(base(names), tmp_path / "m.keras", {"users": Vocabulary(names, oov_buckets=1)})


@pytest.mark.parametrize("is_first", [True, False])
def test_the_names_of_a_model_in_a_model_are_compared_where_it_takes_inputs(tmp_path: Path, is_first: bool) -> None:
    user = keras.Input((), dtype="string", name="user")
    ids = keras.layers.StringLookup(vocabulary=["ann", "bob", "eve"])(user)
    feature = FeatureConfig(TableConfig(8, 2, "users"))
    inner = keras.Model(user, TPUEmbedding(feature, optimizer="sgd", name="e")(ids))
    outer = keras.Input((), dtype="string", name="outer")
    keras.Model(outer, inner(outer if is_first else Stripped()(outer))).save(tmp_path / "m.keras")
    given = {"users": Vocabulary(["eve", "bob", "ann"], oov_buckets=1)}
    if is_first:
        with refused(CheckpointMismatchError):
            compare_vocabularies(inner, tmp_path / "m.keras", given)
        compare_vocabularies(inner, tmp_path / "m.keras", {"users": Vocabulary(["ann", "bob", "eve"], oov_buckets=1)})
    else:
        with pytest.warns(UserWarning, match="cannot be compared with the training"):
            compare_vocabularies(inner, tmp_path / "m.keras", given)


def is_taken_in_silence(path: Path, given: Mapping[str, Vocabulary]) -> bool:
    """Return False if names are refused, or a warning says that they cannot be compared."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            check_names_in(given, path, "factory")
        except CheckpointMismatchError:
            return False
    return not warned


@keras.saving.register_keras_serializable("tests")
class InputLayer(keras.layers.Layer):
    """A user's layer that is called like Keras' own, and turns names around."""

    def call(self, names: Any) -> Any:
        return tf.strings.reduce_join(tf.reverse(tf.strings.unicode_split(names, "UTF-8").to_tensor(), [1]), 1)

    def compute_output_spec(self, names: Any) -> Any:
        return keras.KerasTensor(names.shape, "string")


@pytest.mark.parametrize(
    ("dtype", "words", "wrong", "right"),
    [
        ("string", [b"[UNK]", b"ann", b"bob", b"eve"], ["ann", "bob", "eve"], ["[UNK]", "ann", "bob", "eve"]),
        ("string", tf.constant(["[UNK]", "ann", "bob"]), ["[UNK]", "ann", "bob"], ["ann", "bob"]),
        ("string", np.array(["a\nb", "a\nb", "c"]), ["a", "b", "c"], []),
        ("string", ["ann\0", "bob"], ["ann\0", "bob"], []),
        ("float32", [2**24, 2**24 + 1, 2**24 + 2], [2**24, 2**24 + 1, 2**24 + 2], []),
        ("int32", [5, 2**32 + 5, 6], [5, 2**32 + 5, 6], []),
        ("int32", [5, 7, 6], [5, 6, 7], [5, 7, 6]),
        ("string", InputLayer, ["nna", "bob"], []),
    ],
    ids=["bytes", "tensor", "line-end", "nul", "float", "overflow", "int32", "called-like-an-input"],
)
def test_what_the_trained_model_looked_up(tmp_path: Path, dtype: str, words: Any, wrong: Any, right: Any) -> None:
    """Names are taken in silence only where the trained model itself gives each the row that it has by them."""
    kind: Any = keras.layers.StringLookup if dtype == "string" else keras.layers.IntegerLookup
    adapted = isinstance(words, np.ndarray)
    lookup = kind() if adapted else kind(vocabulary=["nna", "bob"] if words is InputLayer else words)
    if adapted:
        lookup.adapt(words)
    user = keras.Input((), dtype=dtype, name="user")
    layer = TPUEmbedding(FeatureConfig(TableConfig(8, 1, "users")), optimizer="sgd", name="e")
    model = keras.Model(user, layer(lookup(InputLayer()(user) if words is InputLayer else user)))
    layer.assign_rows("users", 0, np.arange(8, dtype=np.float32)[:, None])
    model.save(tmp_path / "m.keras")
    for names in (wrong, right):
        given = Vocabulary(names, dtype="string" if dtype == "string" else "int64", oov_buckets=1)
        is_taken = is_taken_in_silence(tmp_path / "m.keras", {"users": given})
        assert is_taken == (names is right and bool(names)), names
        if is_taken:
            np.testing.assert_array_equal(model(tf.constant(names, dtype))[:, 0], given.lookup(names))


@pytest.mark.parametrize("other", ["given", "adapted", "own"])
def test_a_lookup_is_not_taken_for_another_of_its_name(tmp_path: Path, other: str) -> None:
    """Names of layers are unique in a model, but not in all models inside of it."""

    def tower(name: str, table: str, lookup: Any) -> Any:
        word = keras.Input((), dtype="string", name=name)
        layer = TPUEmbedding(FeatureConfig(TableConfig(8, 2, table)), optimizer="sgd", name=f"e_{table}")
        return keras.Model(word, layer(lookup(word)), name=f"of_{table}")

    lookup = keras.layers.StringLookup(name="lookup")
    lookup.adapt(np.array(["ann"] * 3 + ["bob"] * 2 + ["eve"]))
    second: Any = keras.layers.StringLookup(vocabulary=["eve", "bob"], name="lookup")
    if other == "adapted":
        second = keras.layers.StringLookup(name="lookup")
        second.adapt(np.array(["eve"] * 2 + ["bob"]))
    elif other == "own":
        second = OwnLookup(vocabulary=["eve", "bob"], name="lookup")
    user, item = (keras.Input((), dtype="string", name=name) for name in ("u", "v"))
    both = [tower("user", "users", lookup)(user), tower("item", "items", second)(item)]
    keras.Model([user, item], both).save(tmp_path / "m.keras")
    assert not is_taken_in_silence(tmp_path / "m.keras", {"users": Vocabulary(["eve", "bob"], oov_buckets=1)})
    with pytest.warns(UserWarning, match="cannot be compared"):  # and not refused
        check_names_in({"users": Vocabulary(["ann", "bob", "eve"], oov_buckets=1)}, tmp_path / "m.keras", "factory")


@pytest.mark.parametrize("names", [["été"], [b"\xe9t\xe9"], ["Ã©tÃ©"]])
def test_a_lookup_of_another_encoding_proves_nothing(tmp_path: Path, names: list[Any]) -> None:
    lookup = keras.layers.StringLookup(encoding="latin-1")
    lookup.adapt(tf.constant([names[0]] if isinstance(names[0], bytes) else ["été"]))
    user = keras.Input((), dtype="string", name="user")
    layer = TPUEmbedding(FeatureConfig(TableConfig(8, 2, "users")), optimizer="sgd", name="e")
    keras.Model(user, layer(lookup(user))).save(tmp_path / "m.keras")
    with pytest.warns(UserWarning, match="cannot be compared"):
        check_names_in({"users": Vocabulary(names, oov_buckets=1)}, tmp_path / "m.keras", "factory")


@pytest.mark.parametrize(("inner", "is_proof"), [("int64", True), ("int32", False), ("uint8", False)])
def test_an_inner_model_that_casts_ids_proves_nothing(tmp_path: Path, inner: str, is_proof: bool) -> None:
    ids = keras.Input((), dtype=inner, name="ids")
    layer = TPUEmbedding(FeatureConfig(TableConfig(8, 1, "users")), optimizer="sgd", name="e")
    tower = keras.Model(ids, layer(keras.layers.IntegerLookup(vocabulary=[5, 7, 1])(ids)))
    layer.assign_rows("users", 0, np.arange(8, dtype=np.float32)[:, None])
    user = keras.Input((), dtype="int64", name="user")
    model = keras.Model(user, tower(user))
    model.save(tmp_path / "m.keras")
    given = Vocabulary([5, 7, 1], dtype="int64", oov_buckets=1)
    assert is_taken_in_silence(tmp_path / "m.keras", {"users": given}) == is_proof
    wrapped = np.array([2**32 + 5, 261])
    assert (
        np.array_equal(model(tf.constant(wrapped))[:, 0], np.maximum(given.lookup(wrapped), 0)) == is_proof
    )  # 0 is the bucket


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
    found = tf.saved_model.load(str(export("ann", "bob", "eve"))).signatures["serving_default"]
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


def test_names_of_a_sequential_model_are_those_of_the_lookup_before_the_layer(tmp_path: Path) -> None:
    def build(names: list[str] | None) -> keras.Model:
        vocabulary = None if names is None else Vocabulary(names, oov_buckets=1)
        lookup = keras.layers.StringLookup(vocabulary=["ann", "bob", "eve"])
        layer = TPUEmbedding(
            FeatureConfig(TableConfig(8, 2, "users"), vocabulary=vocabulary), optimizer="sgd", name="e"
        )
        return keras.Sequential(
            [keras.Input((), dtype="string", name="user"), *([lookup] if names is None else []), layer]
        )

    build(None).save(tmp_path / "m.keras")
    export_saved_model(tmp_path / "m.keras", tmp_path / "m", model=lambda: build(["ann", "bob", "eve"]))
    with refused(CheckpointMismatchError):
        export_saved_model(tmp_path / "m.keras", tmp_path / "n", model=lambda: build(["bob", "ann", "eve"]))


@pytest.mark.nightly
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
    loaded = tf.saved_model.load(str(export("m", trained, trained).path))
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
        export_model(model, tmp_path / "live").path,
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
