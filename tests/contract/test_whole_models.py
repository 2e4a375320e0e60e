"""Whole models: an export computes what the trained model in memory computes."""

import re
import sys
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import contract_models
from tests.support.contract_command import json_of, tpuembed
from tests.support.contract_lookups import answers, call, load
from tests.support.contract_models import WholeModel
from tests.support.goldens import read_golden
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_saved_model
from tpuembed.errors import CheckpointMismatchError, ConfigError, TpuEmbedError

Array = np.ndarray[Any, Any]
USERS = np.array([0, 19, 7])


@pytest.fixture(scope="module")
def loaded(whole_model: WholeModel) -> Any:
    return load(whole_model.version)


def assert_same(found: dict[str, Array], wanted: dict[str, Array]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_an_export_computes_what_the_model_computes(whole_model: WholeModel, loaded: Any) -> None:
    inputs = contract_models.draw(33, seed=1)
    assert_same(call(loaded, inputs), contract_models.predict(whole_model.model, inputs))


def test_tables_that_are_mapped_compute_the_same(whole_model: WholeModel, tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": contract_models.build, "layout": "mmap", "workers": 1}
    inputs = contract_models.draw(7, seed=4)
    mapped = export_saved_model(whole_model.prefix, tmp_path / "m", **options).path
    assert_same(answers(mapped, inputs), contract_models.predict(whole_model.model, inputs))


def test_its_signature_has_the_inputs_and_outputs_of_the_model(loaded: Any) -> None:
    signature = loaded.signatures["serving_default"]
    inputs = {
        name: (spec.dtype, spec.shape.as_list()) for name, spec in signature.structured_input_signature[1].items()
    }
    assert inputs == {
        "user": (tf.int64, [None]),
        "watched": (tf.int64, [None, None]),
        "price": (tf.float32, [None, 2]),
    }
    outputs = {name: (spec.dtype, spec.shape.as_list()) for name, spec in signature.structured_outputs.items()}
    assert outputs == {"score": (tf.float32, [None, 1]), "vector": (tf.float32, [None, 3])}


def test_from_activations_takes_rows_that_numpy_looked_up(whole_model: WholeModel, loaded: Any) -> None:
    inputs = contract_models.draw(9, seed=2)
    layer = whole_model.model.get_layer("embedding")
    rows = {table.name: variable.numpy() for table, variable in layer.embedding_tables.items()}
    present = inputs["watched"] != -1
    summed = (rows["videos"][inputs["watched"]] * present[..., None]).sum(1)
    activations = {
        "user": rows["users"][inputs["user"]],
        "watched": summed / np.sqrt(np.maximum(present.sum(1), 1))[:, None],
        "price": inputs["price"],
    }
    found = call(loaded, {name: value.astype(np.float32) for name, value in activations.items()}, "from_activations")
    assert_same(found, contract_models.predict(whole_model.model, inputs))


def tower(*heads: str, table: str = "users", rows: int = 20) -> Any:
    """Return a functional model of a user with one dense layer for each head."""
    user = keras.Input((), dtype="int64", name="user")
    found = TPUEmbedding(FeatureConfig(TableConfig(rows, 4, table)), optimizer="adagrad", name="embedding")(user)
    return keras.Model(user, {head: keras.layers.Dense(2, name=head)(found) for head in heads})


def trained(model: Any, seed: int = 0) -> dict[str, Array]:
    """Give the model weights of normal numbers, and return its outputs for USERS."""
    model({"user": tf.constant(USERS)} if not getattr(model, "inputs", None) else tf.constant(USERS))
    random = np.random.default_rng(seed)
    for weight in model.weights:
        weight.assign(random.normal(size=weight.shape))
    found = model({"user": tf.constant(USERS)} if not getattr(model, "inputs", None) else tf.constant(USERS))
    return {name: value.numpy() for name, value in found.items()}


# ---- subclassed models


class Ranker(keras.Model):
    def __init__(self) -> None:
        super().__init__(name="ranker")
        self.embedding = TPUEmbedding({"user": FeatureConfig(TableConfig(20, 4, "users"))}, optimizer="adagrad")
        self.dense = keras.layers.Dense(2)

    def call(self, inputs: Any) -> Any:
        return {"out": self.dense(self.embedding({"user": inputs["user"]})["user"])}


class Served(Ranker):
    """A class of a different name, with the same attributes."""


class OneHead(keras.Model):
    """Keras makes up its name from that of the class."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = TPUEmbedding({"user": FeatureConfig(TableConfig(20, 4, "users"))}, optimizer="adagrad")
        self.click = keras.layers.Dense(2, name="click")

    def call(self, inputs: Any) -> Any:
        return {"click": self.click(self.embedding({"user": inputs["user"]})["user"])}


class ServedOneHead(OneHead):
    pass


class TwoHeads(OneHead):
    def __init__(self) -> None:
        super().__init__()
        self.like = keras.layers.Dense(2, name="like")

    def call(self, inputs: Any) -> Any:
        rows = self.embedding({"user": inputs["user"]})["user"]
        return {"click": self.click(rows), "like": self.like(rows)}


class OtherTwoHeads(keras.Model):
    """It has nothing of TwoHeads but its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = TPUEmbedding({"user": FeatureConfig(TableConfig(20, 4, "users"))}, optimizer="adagrad")
        self.click, self.like = (keras.layers.Dense(2, name=name) for name in ("click", "like"))

    def call(self, inputs: Any) -> Any:
        rows = self.embedding({"user": inputs["user"]})["user"]
        return {"click": self.click(rows), "like": self.like(rows)}


class BuiltOutside(OneHead):
    """Its weights have the layer's name alone, and the layer has another one."""

    def __init__(self) -> None:
        super().__init__()
        self.click = keras.layers.Dense(2, name="like")
        self.click.build((None, 4))


SPECS = {"user": tf.TensorSpec([None], tf.int64)}


@pytest.mark.parametrize(("saved", "served"), [(OneHead, ServedOneHead), (TwoHeads, OtherTwoHeads)])
def test_a_class_of_another_name_takes_the_weights_of_its_attributes(saved: Any, served: Any, tmp_path: Path) -> None:
    model = saved()
    wanted = trained(model)
    prefix = tf.train.Checkpoint(model=model).write(str(tmp_path / "ckpt"))
    version = export_saved_model(prefix, tmp_path / "m", model=lambda: (served(), SPECS), workers=1).path
    assert_same(answers(version, {"user": USERS}), wanted)


@pytest.mark.filterwarnings("ignore::UserWarning:keras")  # about the layer that is built in the constructor
def test_a_layer_of_another_name_is_refused_in_a_class_of_another_name(tmp_path: Path) -> None:
    model = BuiltOutside()
    trained(model)
    prefix = tf.train.Checkpoint(model=model).write(str(tmp_path / "ckpt"))
    with pytest.raises(CheckpointMismatchError, match=r"model/click/_kernel.*'like/kernel' there"):
        export_saved_model(prefix, tmp_path / "m", model=lambda: (OneHead(), SPECS), workers=1)


def test_a_subclassed_model_comes_with_specs_and_a_bare_one_is_refused(tmp_path: Path) -> None:
    model = Ranker()
    wanted = trained(model)
    prefix = tf.train.Checkpoint(model=model).write(str(tmp_path / "ckpt"))
    version = export_saved_model(prefix, tmp_path / "m", model=lambda: (Served(), SPECS), workers=1).path
    assert_same(answers(version, {"user": USERS}), wanted)
    with pytest.raises(ConfigError, match=r"\(model, .*TensorSpec"):
        export_saved_model(prefix, tmp_path / "m", model=Ranker)


def test_root_chooses_one_of_two_models(tmp_path: Path) -> None:
    models = {"online": tower("click"), "average": tower("click")}
    wanted = {name: trained(model, seed) for seed, (name, model) in enumerate(models.items())}
    assert np.abs(wanted["online"]["click"] - wanted["average"]["click"]).min() > 1e-3
    prefix = tf.train.Checkpoint(step=tf.Variable(3), **models).write(str(tmp_path / "ckpt"))
    options: dict[str, Any] = {"model": lambda: tower("click"), "workers": 1}
    version = export_saved_model(prefix, tmp_path / "m", checkpoint_options={"root": "average"}, **options).path
    assert_same(answers(version, {"user": USERS}), wanted["average"])
    for wrong in ({}, {"root": "none"}):
        with pytest.raises(TpuEmbedError) as raised:
            export_saved_model(prefix, tmp_path / "m", checkpoint_options=wrong, **options)
        assert all(name in str(raised.value) for name in models), str(raised.value)


# ---- dense weights


@pytest.fixture(scope="module")
def two_heads(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Array]]:
    """Return a checkpoint of a model with the heads click and like, and its outputs."""
    model = tower("click", "like")
    wanted = trained(model)
    return tf.train.Checkpoint(model=model).write(str(tmp_path_factory.mktemp("heads") / "ckpt")), wanted


@pytest.mark.parametrize(
    ("heads", "words"),
    [(("click", "like", "share"), ("share/kernel", "share/bias")), (("like",), ("click", "allow_unused_weights"))],
    ids=["missing", "left over"],
)
def test_a_weight_without_its_counterpart_is_listed(
    two_heads: Any, tmp_path: Path, heads: tuple[str, ...], words: tuple[str, ...]
) -> None:
    with pytest.raises(CheckpointMismatchError) as raised:
        export_saved_model(two_heads[0], tmp_path / "m", model=lambda: tower(*heads))
    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert not list(tmp_path.glob("m/*"))


def stacked(layers: int, *, normalised: bool = False) -> Any:
    """Return a model whose dense layers Keras numbers."""
    user = keras.Input((), dtype="int64", name="user")
    rows = TPUEmbedding(FeatureConfig(TableConfig(20, 4, "users")), optimizer="adagrad", name="embedding")(user)
    for _ in range(layers):
        rows = keras.layers.Dense(4)(rows)
    rows = keras.layers.BatchNormalization()(rows) if normalised else rows
    return keras.Model(user, {"out": keras.layers.Dense(1)(rows)})


@pytest.mark.parametrize("form", ["ckpt", "m.keras", "m.weights.h5"])
def test_the_first_layer_that_differs_is_named_and_no_number_of_keras(form: str, tmp_path: Path) -> None:
    model, path = stacked(2), str(tmp_path / form)
    if form == "ckpt":
        tf.train.Checkpoint(model=model).write(path)
    else:
        (model.save if form == "m.keras" else model.save_weights)(path)
    for build, words in (
        (lambda: stacked(3), r"4 such layers. Only in the model: weights \[4, 4\], \[4\]\. "),
        (lambda: stacked(1), r"2 such layers. Only there: weights \[4, 4\], \[4\]\. "),
        (
            lambda: stacked(2, normalised=True),
            r"4 such layers. Only in the model: weights \[4\], \[4\], \[4\], \[4\]\. ",
        ),
    ):
        with pytest.raises(CheckpointMismatchError, match=words) as raised:
            export_saved_model(path, tmp_path / "m", model=build, workers=1)
        assert not re.search(r"dense_\d", str(raised.value)), str(raised.value)


def test_a_functional_model_of_keras_2_says_what_it_is(tmp_path: Path) -> None:
    golden = read_golden("tfrs/keras_model")

    def build() -> Any:
        tables = [TableConfig(*shape, name) for name, shape in GOLDEN_TABLES.items()]
        ids = [keras.Input((), dtype="int64", name=f"id{number}") for number in range(len(tables))]
        layer = TPUEmbedding([FeatureConfig(table) for table in tables], optimizer="adagrad", name="embedding")
        return keras.Model(ids, {"out": keras.layers.Dense(1)(keras.layers.Concatenate()(layer(ids)))})

    with pytest.raises(CheckpointMismatchError, match=r"It is of Keras 2.*layer_with_weights-1/kernel.*compat\.md"):
        export_saved_model(golden.path, tmp_path / "m", model=build, workers=1)


GOLDEN_TABLES = {"video/table.v1": (11, 4), "user": (7, 3), "table_2": (5, 2)}


def test_a_factory_that_fails_shows_its_own_message_and_line(
    two_heads: tuple[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    code = "import json\n\ndef build():\n    with open('names.json') as file:\n        return json.load(file)\n"
    (tmp_path / "failing_factory.py").write_text(code)
    (tmp_path / "parsing_factory.py").write_text("import json\n\ndef build():\n    return json.loads('{')\n")
    for module, words in (
        ("failing_factory", ("failing_factory.py, line 4", "No such file or directory: 'names.json'")),
        ("parsing_factory", ("parsing_factory.py, line 4", "Expecting property name")),
    ):
        refusal = tpuembed("export", two_heads[0], "m", "--model", f"{module}:build").refused()
        assert all(word in refusal for word in words), refusal


def test_the_command_imports_the_factory_from_the_current_directory(
    two_heads: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"from {__name__} import tower\ndef build():\n    return tower('click')\n"
    (tmp_path / "contract_factory.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    command = ["export", two_heads[0], "m", "--model", "contract_factory:build", "--workers", "1"]
    assert "like" in tpuembed(*command).refused()
    report = json_of(*command, "--allow-unused-weights")
    assert (report["path"], report["tables"], report["bytes_written"]) == ("m/1", ["users"], 20 * 4 * 4)
    assert_same(answers(tmp_path / "m" / "1", {"user": USERS}), {"click": two_heads[1]["click"]})


# ---- features that differ from those of the training


def by_rules(name: str = "ids", **rules: Any) -> Any:
    """Return a model of one feature by these rules, and of one that has always the same."""
    users, items = TableConfig(20, 4, "users", combiner=rules.pop("combiner", "sum")), TableConfig(20, 4, "items")
    features = {name: FeatureConfig(users, **rules), "item": FeatureConfig(items)}
    ids = keras.Input((None,), dtype="int64", name="ids", ragged=True)
    item = keras.Input((), dtype="int64", name="item")
    rows = TPUEmbedding(features, optimizer="adagrad", name="embedding")({name: ids, "item": item})
    return keras.Model({"ids": ids, "item": item}, {"out": rows[name], "item": rows["item"]})


def in_list(swapped: bool = False) -> Any:
    """Return a model whose features have no names but their places."""
    tables = [TableConfig(20, 4, "users"), TableConfig(20, 4, "items")]
    inputs = [keras.Input((), dtype="int64", name=name) for name in ("first", "second")]
    layer = TPUEmbedding([FeatureConfig(table) for table in tables[:: -1 if swapped else 1]], "adagrad", name="rows")
    return keras.Model(inputs, dict(zip(("a", "b"), layer(inputs), strict=True)))


RULES: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = (
    ({}, {"combiner": "mean"}, r"combiner 'mean', and was trained in .* with 'sum'"),
    ({"combiner": "sqrtn"}, {"combiner": "sum"}, r"combiner 'sum', and was trained in .* with 'sqrtn'"),
    ({}, {"max_sequence_length": 3}, r"max_sequence_length 3, and was trained in .* with 0"),
    ({"max_sequence_length": 5}, {"max_sequence_length": 3}, r"max_sequence_length 3, .* with 5"),
    ({}, {"out_of_vocabulary": "zeros"}, r"out_of_vocabulary 'zeros', .* with 'error'"),
    ({"out_of_vocabulary": 3}, {"out_of_vocabulary": 4}, r"out_of_vocabulary 4, .* with 3"),
    ({"max_sequence_length": 3}, {"max_sequence_length": 0}, r"max_sequence_length 0, .* with 3"),
    ({}, {"combiner": "mean", "name": "renamed"}, r"'renamed' of table 'users' has combiner 'mean'"),
)


@pytest.mark.parametrize(("trained", "built", "words"), RULES, ids=[str(number) for number in range(len(RULES))])
@pytest.mark.parametrize("form", ["ckpt", "model.keras"])
def test_a_factory_with_other_rules_than_the_training_is_refused(
    trained: dict[str, Any], built: dict[str, Any], words: str, form: str, tmp_path: Path
) -> None:
    """Unless a serving_config states the new rule: then the export computes what the new model computes."""
    model = by_rules(**trained)
    if form == "ckpt":
        path = tf.train.Checkpoint(model=model).write(str(tmp_path / form))
    else:
        model.save(path := str(tmp_path / form))
    options: dict[str, Any] = {"model": lambda: by_rules(**built), "workers": 1}
    with pytest.raises(CheckpointMismatchError, match=words):
        export_saved_model(path, tmp_path / "m", **options)
    same = export_saved_model(path, tmp_path / "m", model=lambda: by_rules(**trained), workers=1).path
    assert {each.name for each in (tmp_path / "m").iterdir() if each.name.isdecimal()} == {same.name}
    stated: dict[str, Any] = {key: value for key, value in built.items() if key != "name"}
    tables = {"users": {"combiner": stated.pop("combiner")}} if "combiner" in stated else {}
    config = {"features": {"ids": {"table": "users", **stated}}, "tables": tables}
    version = export_saved_model(path, tmp_path / "m", serving_config=config, **options).path
    other = by_rules(**built)
    other.get_layer("embedding").restore_tables(path)
    ids = tf.ragged.constant([[1, 2, 2], [19], [4, 0]], dtype=tf.int64)
    wanted = {name: value.numpy() for name, value in other({"ids": ids, "item": tf.constant(USERS)}).items()}
    assert_same(answers(version, {"ids": ids.to_tensor(-1).numpy(), "item": USERS}), wanted)


@pytest.mark.parametrize(
    "config", [{"tables": {"users": {"combiner": "mean"}}}, {"features": {"ids": {"out_of_vocabulary": "zeros"}}}]
)
def test_a_serving_config_that_contradicts_the_model_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    path = tf.train.Checkpoint(model=by_rules()).write(str(tmp_path / "ckpt"))
    given = {
        "tables": config.get("tables", {}),
        "features": {"ids": {"table": "users", **config.get("features", {}).get("ids", {})}},
    }
    with pytest.raises(ConfigError, match="and the model's layer has"):
        export_saved_model(path, tmp_path / "m", model=by_rules, serving_config=given, workers=1)


def test_features_in_another_order_are_refused(tmp_path: Path) -> None:
    """A list has no names: the ids of the one table would be looked up in the other."""
    path = tf.train.Checkpoint(model=in_list()).write(str(tmp_path / "ckpt"))
    options: dict[str, Any] = {"model": lambda: in_list(swapped=True), "workers": 1}
    with pytest.raises(CheckpointMismatchError, match=r"'0' looks up in table 'items', and in .* in table 'users'"):
        export_saved_model(path, tmp_path / "m", **options)
    stated = {name: {"table": table, "input": "id"} for name, table in (("first", "items"), ("second", "users"))}
    export_saved_model(path, tmp_path / "m", serving_config={"features": stated}, **options)
    export_saved_model(path, tmp_path / "m", model=in_list, workers=1)


def nested_rules(inner: Any, outer: Any, *, is_whole: bool = True) -> Any:
    """Return (a model whose feature `x` has the policy `outer`, and `q/x` the policy `inner`; specs)."""
    users = TableConfig(20, 4, "users")
    features: dict[str, Any] = {"x": FeatureConfig(users, out_of_vocabulary=outer)}
    if is_whole:
        features["q"] = {"x": FeatureConfig(users, out_of_vocabulary=inner)}
    ids = {"x": keras.Input((), dtype="int64", name="x")} | (
        {"q": {"x": keras.Input((), dtype="int64", name="q")}} if is_whole else {}
    )
    rows = TPUEmbedding(features, optimizer="adagrad", name="embedding")(ids)
    return keras.Model(ids, {"x": rows["x"]})


def test_a_feature_is_compared_with_that_of_its_own_path(tmp_path: Path) -> None:
    path = tf.train.Checkpoint(model=nested_rules(0, "zeros")).write(str(tmp_path / "ckpt"))
    with pytest.raises(CheckpointMismatchError, match=r"'x' of table 'users' has out_of_vocabulary 0, .* with 'zeros'"):
        export_saved_model(path, tmp_path / "m", model=lambda: nested_rules(0, 0, is_whole=False), workers=1)
    export_saved_model(path, tmp_path / "m", model=lambda: nested_rules(0, "zeros", is_whole=False), workers=1)


def test_a_serving_config_states_the_rule_of_one_feature(tmp_path: Path) -> None:
    """And none of another one of its table."""

    def two(policy: Any) -> Any:
        users = TableConfig(20, 4, "users")
        ids = {name: keras.Input((), dtype="int64", name=name) for name in ("x", "w")}
        features = {name: FeatureConfig(users, out_of_vocabulary=policy) for name in ids}
        return keras.Model(ids, TPUEmbedding(features, optimizer="adagrad", name="embedding")(ids))

    path = tf.train.Checkpoint(model=two("zeros")).write(str(tmp_path / "ckpt"))
    stated = {"table": "users", "input": "id", "out_of_vocabulary": 3}
    options: dict[str, Any] = {"model": lambda: two(3), "workers": 1}
    with pytest.raises(CheckpointMismatchError, match="feature 'x' of table 'users' has out_of_vocabulary 3"):
        export_saved_model(path, tmp_path / "m", serving_config={"features": {"w": stated}}, **options)
    export_saved_model(path, tmp_path / "m", serving_config={"features": {"w": stated, "x": stated}}, **options)


def test_sequences_of_another_combiner_are_the_same(tmp_path: Path) -> None:
    path = tf.train.Checkpoint(model=by_rules(max_sequence_length=3)).write(str(tmp_path / "ckpt"))
    model = lambda: by_rules(max_sequence_length=3, combiner="mean")  # noqa: E731
    export_saved_model(path, tmp_path / "m", model=model, workers=1)


# ---- outputs


def several() -> Any:
    """Return a model with the outputs of a sub-model, of a layer that is used twice, and of the ids themselves."""
    user = keras.Input((), dtype="int64", name="user")
    rows = keras.Input((4,), name="rows")
    heads = {name: keras.layers.Dense(2, name=name)(rows) for name in ("click", "like")}
    found = TPUEmbedding(FeatureConfig(TableConfig(20, 4, "users")), optimizer="adagrad", name="embedding")(user)
    ranked = keras.Model(rows, heads, name="ranker")(found)
    twice = keras.layers.Dense(4, name="twice")
    first = twice(found)
    return keras.Model(
        user, [ranked["click"], ranked["like"], first, twice(first), keras.layers.Identity(name="id")(user)]
    )


def test_outputs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """And there is no signature from_activations, because ids are used by more than the embedding layer."""
    keras.utils.set_random_seed(5)
    model = several()
    prefix = tf.train.Checkpoint(model=model).write(str(tmp_path / "ckpt"))
    loaded = load(export_saved_model(prefix, tmp_path / "m", model=several, workers=1).path)
    names = ("ranker/click", "ranker/like", "twice/0", "twice/1", "id")
    wanted = [value.numpy() for value in model(tf.constant(USERS))]
    assert_same(call(loaded, {"user": USERS}), dict(zip(names, wanted, strict=True)))
    assert "from_activations" not in loaded.signatures


def numbered(name: str | None = None) -> Any:
    """Return a model whose input and output have names of Keras' own, or `name`."""
    keras.layers.Dense(1)  # so that the next one has a number
    user = keras.Input((), dtype="int64", name=name and "user")
    rows = TPUEmbedding(FeatureConfig(TableConfig(20, 4, "users")), optimizer="adagrad", name="embedding")(user)
    return keras.Model(user, keras.layers.Dense(1, name=name)(rows))


def nested() -> Any:
    rows = keras.Input((4,), name="rows")
    heads = [keras.layers.Dense(1)(rows), keras.layers.Dense(1, name="like")(rows)]
    user = keras.Input((), dtype="int64", name="user")
    found = TPUEmbedding(FeatureConfig(TableConfig(20, 4, "users")), optimizer="adagrad", name="embedding")(user)
    return keras.Model(user, keras.Model(rows, heads, name="ranker")(found))


def as_dict() -> Any:
    model = numbered("dense_7")
    return keras.Model(model.inputs, {"dense_7": model.outputs[0]})


@pytest.mark.parametrize(
    ("build", "numbers"),
    [
        (numbered, ["input 'keras_tensor", "output 'dense_"]),
        (nested, ["output 'ranker/dense_"]),
        (lambda: numbered("score_2"), []),
        (as_dict, []),
    ],
    ids=["of Keras", "in a sub-model", "of the author", "keys"],
)
@pytest.mark.filterwarnings("default:model. Keras has numbered:UserWarning")
def test_names_that_keras_numbers_are_warned_of(build: Any, numbers: list[str], tmp_path: Path) -> None:
    """Another process may number them otherwise, and its version would replace this one under the feet of clients."""
    prefix = tf.train.Checkpoint(model=build()).write(str(tmp_path / "ckpt"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        export_saved_model(prefix, tmp_path / "m", model=build, workers=1)
    said = sorted(str(each.message) for each in caught if "numbered" in str(each.message))
    assert len(said) == len(numbers), said
    assert all(number in text for number, text in zip(numbers, said, strict=True)), said
