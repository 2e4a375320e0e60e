"""Whole models: whatever a factory returns computes the trained model's numbers, or is refused."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, open_checkpoint
from tpuembed.errors import CheckpointMismatchError
from tpuembed.export.graph.dense_weights import restore_dense_weights
from tpuembed.lookup import FlatIds, gather_grouped
from tpuembed.runtime.table_scope import deferred_tables

HEADS = ("click", "like", "watch")
DIM = 3
IDS = np.arange(5)


@dataclasses.dataclass(frozen=True)
class Spec:
    """A model: a trunk of hidden layers and heads, all of one shape, so that every wrong pairing fits.

    Attributes:
        hidden: how many hidden layers.
        heads: in the order in which they are made.
        outputs: those that the model returns, in that order.
        kind: what a head is.
        named_hidden, named_heads: whether their layers have names of their own.
        shared: whether all heads end in one layer.
        as_dict: whether the outputs are a dict.
        form: how the model is put together.
        made_before: layers that the process made before, so that Keras numbers others.
    """

    hidden: int = 1
    heads: tuple[str, ...] = HEADS
    outputs: tuple[str, ...] = HEADS
    kind: str = "dense"
    named_hidden: bool = True
    named_heads: bool = True
    shared: bool = False
    as_dict: bool = True
    form: str = "functional"
    made_before: int = 0


class Tower(keras.layers.Layer):
    """A layer of layers."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.first, self.last = keras.layers.Dense(DIM, activation="tanh", name="first"), keras.layers.Dense(DIM)

    def call(self, x: Any) -> Any:
        return self.last(self.first(x))


def _head(spec: Spec, name: str) -> Any:
    options = {"name": name} if spec.named_heads else {}
    if spec.kind == "dense":
        return keras.layers.Dense(DIM, **options)
    if spec.kind == "flat":  # an unnamed layer before each head, in the list that the head is in
        first, last = keras.layers.Dense(DIM, activation="tanh"), keras.layers.Dense(DIM, **options)
        return lambda x: last(first(x))
    if spec.kind == "sequential":
        return keras.Sequential([keras.layers.Dense(DIM, activation="tanh"), keras.layers.Dense(DIM)], **options)
    if spec.kind == "tower":
        return Tower(**options)
    x = keras.Input((DIM,))
    first, last = ({"name": "first"}, {"name": "proj"}) if spec.kind != "automatic" else ({}, {})
    hidden = keras.layers.Dense(DIM, activation="tanh", **(first if spec.kind == "namesakes" else {}))(x)
    return keras.Model(x, keras.layers.Dense(DIM, **last)(hidden), **options)


class Subclassed(keras.Model):
    """Heads as attributes."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = _embedding()
        for number in range(spec.hidden):
            setattr(self, f"hidden{number}", keras.layers.Dense(DIM, activation="tanh"))
        for name in spec.heads:
            setattr(self, f"{name}_head", _head(spec, name))
        if spec.shared:
            self.last = keras.layers.Dense(DIM, name="last" if spec.named_hidden else None)

    def call(self, ids: Any) -> Any:
        x = self.embedding({"id": ids})["id"]
        for number in range(self.spec.hidden):
            x = getattr(self, f"hidden{number}")(x)
        return _outputs(self.spec, {name: getattr(self, f"{name}_head") for name in self.spec.heads}, x, self)


def _embedding() -> Any:
    return TPUEmbedding({"id": FeatureConfig(TableConfig(len(IDS), DIM, "t"))}, optimizer="sgd")


def _outputs(spec: Spec, heads: Mapping[str, Any], x: Any, last: Any) -> Any:
    end = last.last if spec.shared else (lambda value: value)
    made = {name: end(heads[name](x)) for name in spec.outputs}
    return made if spec.as_dict else list(made.values())


def build(spec: Spec) -> Any:
    """The model of `spec`."""
    for _ in range(spec.made_before):
        keras.layers.Dense(1), keras.Sequential(), Tower()
    if spec.form == "subclassed":
        return Subclassed(spec)
    ids = keras.Input((), dtype="int64", name="ids")
    x = _embedding()({"id": ids})["id"]
    for number in range(spec.hidden):
        x = keras.layers.Dense(DIM, activation="tanh", name=f"hidden{number}" if spec.named_hidden else None)(x)
    heads = {name: _head(spec, name) for name in spec.heads}

    class Last:
        last = keras.layers.Dense(DIM, name="last" if spec.named_hidden else None) if spec.shared else None

    model = keras.Model(ids, _outputs(spec, heads, x, Last))
    if spec.form == "functional":
        return model
    numbers = keras.Input((), dtype="int32", name="numbers")  # an outer model around the trained one
    return keras.Model(numbers, model(keras.ops.cast(numbers, "int64")))


def by_name(spec: Spec, outputs: Any) -> dict[str, np.ndarray[Any, Any]]:
    """The outputs of a model of `spec` by the heads' names."""
    named = (
        outputs
        if spec.as_dict
        else dict(zip(spec.outputs, outputs if isinstance(outputs, list) else [outputs], strict=True))
    )
    return {name: np.asarray(value) for name, value in named.items()}


class Rows:
    """A source of rows in memory."""

    def __init__(self, tables: Mapping[str, Any]) -> None:
        self._tables = tables

    def register(self, table: Any) -> None:
        """Any will do."""

    def lookup(self, features: Sequence[FlatIds], tables: Sequence[str]) -> list[Any]:
        """As the protocol says."""
        return gather_grouped(list(features), list(tables), lambda table, ids: tf.gather(self._tables[table], ids))

    def answer(self, features: Sequence[Any], look_up: Callable[[], list[Any]]) -> list[Any]:
        """Those of the lookup."""
        return look_up()

    def name_arrays(self, table: str, given: Any = None) -> Any: ...

    def note_numbers(self, table: str, feature: str | None = None) -> None: ...

    def table(self, name: str) -> Any:
        """All of it."""
        return self._tables[name]


def trained(spec: Spec, form: str, folder: Path) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Where a model of `spec` with random weights was saved, its outputs, and its tables."""
    keras.backend.clear_session()
    model = build(spec)
    model(tf.constant(IDS))
    random = np.random.default_rng(7)
    for weight in model.weights:
        if "int" not in weight.dtype:
            weight.assign(random.normal(size=weight.shape))
    truth = by_name(spec, model(tf.constant(IDS)))
    path = str(folder / ("w.weights.h5" if form == "h5" else "w.keras" if form == "keras" else "ckpt"))
    if form == "h5":
        model.save_weights(path)
    elif form == "keras":
        model.save(path)
    else:
        held = tf.train.Checkpoint(model) if form == "root" else tf.train.Checkpoint(model=model)
        path = held.write(path)
    with open_checkpoint(path) as checkpoint:
        return path, truth, {name: tf.constant(checkpoint.read(name)) for name in checkpoint.tables()}


def restored(spec: Spec, path: str, tables: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """The outputs of the factory's model of `spec` with the weights from `path`."""
    keras.backend.clear_session()
    with deferred_tables(Rows(tables)), open_checkpoint(path) as checkpoint:
        model = build(spec)
        if spec.form == "subclassed":
            tf.function(
                model, input_signature=[tf.TensorSpec([None], tf.int64)], autograph=False
            ).get_concrete_function()
        restore_dense_weights(model, checkpoint, checkpoint.tables(), **options)
        return by_name(spec, model(tf.constant(IDS, tf.int32 if spec.form == "outer" else tf.int64)))


def check(name: str, found: Mapping[str, Any], truth: Mapping[str, Any]) -> None:
    for head, values in found.items():
        np.testing.assert_allclose(values, truth[head], atol=1e-5, err_msg=f"{name}: {head}")


@st.composite
def specs(draw: st.DrawFn) -> tuple[Spec, Spec]:
    """A trained model and a factory's, which is it or differs."""
    kinds = st.sampled_from(["dense", "flat", "sequential", "tower", "repeated", "namesakes", "automatic"])
    heads = tuple(draw(st.permutations(HEADS)))
    model = Spec(
        hidden=draw(st.integers(1, 3)),
        heads=heads,
        outputs=tuple(draw(st.permutations(HEADS))),
        kind=draw(kinds),
        named_hidden=draw(st.booleans()),
        named_heads=draw(st.booleans()),
        shared=draw(st.booleans()),
        as_dict=draw(st.booleans()),
        form=draw(st.sampled_from(["functional", "functional", "subclassed"])),
        made_before=draw(st.integers(0, 2)),
    )
    model = dataclasses.replace(model, form="functional") if model.kind == "flat" else model
    some = st.lists(st.sampled_from(HEADS), min_size=1, max_size=3, unique=True).map(tuple)
    change: dict[str, Any] = {"made_before": draw(st.integers(0, 2))}
    outputs = draw(st.one_of(st.just(model.outputs), some))
    change |= {"outputs": outputs}
    if draw(st.booleans()):
        change |= {"heads": draw(st.sampled_from([tuple(name for name in model.heads if name in outputs), outputs]))}
    if draw(st.integers(0, 3)) == 0:
        change |= {"hidden": draw(st.integers(1, 3))}
    if model.form == "functional" and draw(st.booleans()):
        change |= {"form": "outer"}
    return model, dataclasses.replace(model, **change)


def _is_renamed(model: Spec, factory: Spec) -> bool:
    """Returns True if the heads' names, which no file has, are all that tells the models apart."""
    if model.named_heads or model.as_dict or model.form == "subclassed" or model.outputs == factory.outputs:
        return False
    names = dict(zip(model.outputs, factory.outputs, strict=False))
    renamed = tuple(names.get(name) for name in model.heads)
    return len(model.outputs) == len(factory.outputs) and renamed == factory.heads


def _compare(folder: Path, model: Spec, factory: Spec, form: str) -> None:
    """Train `model`, restore `factory`'s from what was saved, and compare; or see it refused."""
    if form == "keras" and model.form == "subclassed":
        form = "h5"
    if _is_renamed(model, factory):
        return  # no file has the heads' names, so both are one model: docs/export.md
    path, truth, tables = trained(model, form, folder)
    is_same = dataclasses.replace(factory, form=model.form, made_before=0) == dataclasses.replace(model, made_before=0)
    try:
        check("all", restored(factory, path, tables), truth)
    except CheckpointMismatchError:
        assert not is_same or (model.kind == "namesakes" and form in ("model", "root"))
    if factory.hidden != model.hidden:  # a part of the trained model, which computes something else
        return
    try:
        check("a part", restored(factory, path, tables, allow_unused_weights=True), truth)
    except CheckpointMismatchError:
        kinds = ("dense", "tower", "sequential")
        assert not (model.named_heads and model.named_hidden and model.form == "functional" and model.kind in kinds)


_FORMS = st.sampled_from(["model", "root", "h5", "keras"])


_UNUSED_HEADS = "ignore:`build..` was called on layer 'subclassed:UserWarning"
"""Keras warns where a model has heads that its call does not use."""


@pytest.mark.filterwarnings(_UNUSED_HEADS)
@pytest.mark.parametrize("outputs", [("like",), ("watch", "click")])
@pytest.mark.sampled(1)
def test_a_subclassed_model_may_return_some_of_its_heads(tmp_path: Path, outputs: tuple[str, ...]) -> None:
    model = Spec(form="subclassed", named_heads=False)
    _compare(tmp_path, model, dataclasses.replace(model, outputs=outputs), "model")


@pytest.mark.filterwarnings(_UNUSED_HEADS)
@pytest.mark.nightly
@pytest.mark.timeout(3600)
@given(specs(), _FORMS)
@settings(deadline=None, max_examples=150)
def test_many_factories_compute_the_trained_models_numbers_or_are_refused(
    tmp_path_factory: pytest.TempPathFactory, pair: tuple[Spec, Spec], form: str
) -> None:
    _compare(tmp_path_factory.mktemp("model"), *pair, form)


_TWO = Spec(hidden=0, heads=("click", "watch"), outputs=("click", "watch"), as_dict=False)


@pytest.mark.parametrize(
    ("model", "change"),
    [
        ({"kind": "flat"}, {"outputs": ("watch", "click"), "heads": ("watch", "click")}),
        ({"named_heads": False}, {"outputs": ("watch",)}),
        ({"named_heads": False}, {"outputs": ("watch", "click")}),
        ({"named_hidden": False, "hidden": 3}, {"hidden": 2}),
        ({"kind": "tower", "named_heads": False}, {"outputs": ("watch", "click")}),
        ({"kind": "namesakes"}, {"outputs": ("watch", "click")}),
        ({"kind": "namesakes"}, {"outputs": ("watch",)}),
    ],
)
def test_places_alone_prove_nothing(tmp_path: Path, model: Any, change: Any) -> None:
    spec = dataclasses.replace(_TWO, **model)
    path, _, tables = trained(spec, "model", tmp_path)
    with refused(CheckpointMismatchError):
        restored(dataclasses.replace(spec, **change), path, tables, allow_unused_weights=True)


Step = Callable[[Any], Any]


def _nested(x: Any) -> Any:
    inner = keras.Input((DIM,))
    hidden = keras.layers.Dense(DIM, activation="tanh")(inner)
    return keras.Model(inner, keras.layers.Dense(DIM)(hidden))(x)


def _of_two_outputs(x: Any, turned: bool) -> Any:
    inner = keras.Input((DIM,))
    first, second = keras.Model(inner, [keras.layers.Dense(DIM)(inner), keras.layers.Dense(DIM)(inner)])(x)
    return keras.layers.Subtract()([second, first] if turned else [first, second])


STEPS: Mapping[str, Step] = {
    "tanh": lambda x: keras.layers.Dense(DIM, activation="tanh")(x),
    "dense": lambda x: keras.layers.Dense(DIM)(x),
    "einsum": lambda x: keras.layers.EinsumDense("ab,bc->ac", DIM)(x),
    "relu": lambda x: keras.layers.ReLU()(x),
    "op": lambda x: x * 2.0,
    "sequential": lambda x: keras.Sequential([keras.layers.Dense(DIM, activation="tanh"), keras.layers.Dense(DIM)])(x),
    "nested": _nested,
    "two": lambda x: _of_two_outputs(x, False),
    "two, turned": lambda x: _of_two_outputs(x, True),
    "minus": lambda x: keras.layers.Subtract()([x, keras.layers.Dense(DIM)(x)]),
    "from": lambda x: keras.layers.Subtract()([keras.layers.Dense(DIM)(x), x]),
}
"""What a layer in a head may be. None has a name of its own."""


@dataclasses.dataclass(frozen=True)
class Head:
    """A chain of unnamed layers over one feature, and its last layer.

    Attributes:
        feature: that it is computed from.
        steps: in order.
        end: whether its last layer is named: a Dense, or one without weights. Without a name it is a Dense.
        shared: whether it goes through the layer that all such heads share.
    """

    feature: str
    steps: tuple[str, ...]
    end: str
    shared: bool


def build_heads(heads: Mapping[str, Head], outputs: Sequence[str], as_dict: bool, made_before: int, outer: bool) -> Any:
    """A model of `heads`, made in their order, which returns `outputs` in theirs."""
    for _ in range(made_before):
        keras.layers.Dense(1), keras.layers.EinsumDense("ab,bc->ac", 1), keras.layers.ReLU(), keras.Sequential()
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in ("u", "v")}
    table = TableConfig(len(IDS), DIM, "t")
    rows = TPUEmbedding({name: FeatureConfig(table) for name in inputs}, optimizer="sgd")(inputs)
    rows = {name: value * (1.0 if name == "u" else -1.5) for name, value in rows.items()}
    shared = keras.layers.Dense(DIM, activation="tanh") if any(head.shared for head in heads.values()) else None
    made = {}
    for name, head in heads.items():
        x = rows[head.feature] if shared is None or not head.shared else shared(rows[head.feature])
        for step in head.steps:
            x = STEPS[step](x)
        if head.end == "activation":
            x = keras.layers.Activation("sigmoid", name=name)(x)
        else:
            x = keras.layers.Dense(2, name=name if head.end == "dense" else None)(x)
        made[name] = x
    model = keras.Model(inputs, {name: made[name] for name in outputs} if as_dict else [made[name] for name in outputs])
    if not outer:
        return model
    numbers = {name: keras.Input((), dtype="int32", name=name) for name in inputs}
    return keras.Model(numbers, model({name: keras.ops.cast(value, "int64") for name, value in numbers.items()}))


def _compare_heads(
    folder: Path, heads: Mapping[str, Head], options: Mapping[str, Any], order: Sequence[str], kept: Sequence[str]
) -> None:
    """Train a model of `heads`, and restore one of `kept` of them, made in another order, or see it refused."""
    ids = {"u": tf.constant(IDS), "v": tf.constant(IDS[::-1].copy())}
    keras.backend.clear_session()
    model = _random(build_heads(heads, list(heads), options["as_dict"], 0, False), 3)
    named = list(heads)

    def by_head(outputs: Any, names: Sequence[str]) -> dict[str, Any]:
        listed = outputs if isinstance(outputs, list) else [outputs]
        return dict(outputs) if isinstance(outputs, Mapping) else dict(zip(names, listed, strict=True))

    truth = by_head(model(ids), named)
    path = str(folder / "w.keras")
    model.save(path)

    def served(built: Mapping[str, Head], outputs: Sequence[str], **kwargs: Any) -> dict[str, Any]:
        keras.backend.clear_session()
        with open_checkpoint(path) as checkpoint:
            rows = {name: tf.constant(checkpoint.read(name)) for name in checkpoint.tables()}
            with deferred_tables(Rows(rows)):
                factory = build_heads(built, outputs, **kwargs)
                restore_dense_weights(factory, checkpoint, checkpoint.tables(), allow_unused_weights=True)
                given = {name: tf.cast(value, factory.inputs[0].dtype) for name, value in ids.items()}
                return by_head(factory(given), outputs)

    same = {"as_dict": options["as_dict"], "made_before": options["made_before"], "outer": False}
    check("the same", served(heads, named, **same), truth)
    try:
        found = served({name: heads[name] for name in order if name in kept}, kept, **{**same, **options})
    except CheckpointMismatchError:
        assert not list(heads) == list(order) == list(kept)
        return
    check("another order", found, truth)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Head("u", ("tanh",), "dense", True), Head("u", ("tanh",), "activation", False)),  # other heads
        (Head("u", ("tanh",), "none", False), Head("v", ("tanh",), "none", False)),  # other features
        (Head("u", ("relu", "tanh"), "none", False), Head("u", ("op", "tanh"), "none", False)),  # other layers before
        (
            Head("u", ("dense", "two"), "none", False),
            Head("u", ("dense", "two, turned"), "none", False),
        ),  # merged in turn
        (Head("u", ("nested", "sequential"), "dense", False), Head("v", ("nested", "sequential"), "activation", False)),
    ],
)
@pytest.mark.sampled(2)
def test_a_config_tells_unnamed_layers_apart(tmp_path: Path, first: Head, second: Head) -> None:
    options = {"as_dict": False, "made_before": 1, "outer": False}
    _compare_heads(tmp_path, {"h0": first, "h1": second}, options, ["h1", "h0"], ["h1", "h0"])


def test_a_file_without_names_is_matched_one_to_one_only(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    path, truth, tables = trained(_TWO, "h5", tmp_path)
    with h5py.File(path, "r+") as file:
        file.visititems(lambda _, item: item.attrs.pop("name", None) and None)
    check("all", restored(_TWO, path, tables), truth)
    with refused(CheckpointMismatchError):
        restored(dataclasses.replace(_TWO, outputs=("watch",)), path, tables, allow_unused_weights=True)


def _random(model: Any, seed: int) -> Any:
    random = np.random.default_rng(seed)
    for weight in model.weights:
        if "int" not in weight.dtype:
            weight.assign(random.normal(size=weight.shape))
    return model


def _served(
    folder: Path, train: Any, serve: Any, form: str = "model", beside: Any = None, **options: Any
) -> tuple[Any, Any]:
    """The outputs of a trained model, and of a factory's with its weights; a model `beside` is saved too, as `ema`."""
    keras.backend.clear_session()
    model = train()
    model(tf.constant(IDS))
    truth = _random(model, 5)(tf.constant(IDS))
    if form == "model":
        held = {"ema": _random(beside(model), 9)} if beside else {}
        path = tf.train.Checkpoint(model=model, **held).write(str(folder / "ckpt"))
    else:
        path = str(folder / ("w.weights.h5" if form == "h5" else "w.keras"))
        model.save_weights(path) if form == "h5" else model.save(path)
    keras.backend.clear_session()
    with open_checkpoint(path, **options) as checkpoint:
        rows = {name: tf.constant(checkpoint.read(name)) for name in checkpoint.tables()}
        with deferred_tables(Rows(rows)):
            factory = serve()
            factory(tf.constant(IDS))
            restore_dense_weights(factory, checkpoint, checkpoint.tables(), allow_unused_weights=beside is None)
            return truth, factory(tf.constant(IDS))


def _inputs(lookup: Any = None) -> tuple[Any, Any]:
    ids = keras.Input((), dtype="int64", name="ids")
    return ids, (lookup or _embedding())({"id": ids})["id"]


def _with_aux(aux: bool, lookup: Any = None, looks_up: bool = True) -> Any:
    ids, x = _inputs(lookup) if looks_up else (keras.Input((DIM,)),) * 2
    hidden = keras.layers.Dense(DIM, activation="tanh", name="hidden")(x)
    outputs = {"score": keras.layers.Dense(2, name="score")(hidden)}
    return keras.Model(ids, outputs | ({"aux": keras.layers.Dense(1, name="aux")(hidden)} if aux else {}))


def test_the_average_beside_a_model_is_not_taken_for_it(tmp_path: Path) -> None:
    with refused(CheckpointMismatchError, match="2 saved weights"):
        _served(
            tmp_path,
            lambda: _with_aux(True),
            lambda: _with_aux(False),
            beside=lambda _: _with_aux(False, looks_up=False),
        )


def test_an_exact_fit_and_one_with_more_are_both_listed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMismatchError, match=r"2 saved models fit this one: .*root=(model|ema)"):
        _served(
            tmp_path,
            lambda: _with_aux(True),
            lambda: _with_aux(False),
            beside=lambda model: _with_aux(
                False, next(layer for layer in model.layers if isinstance(layer, TPUEmbedding))
            ),
        )


def _tower_of(name: str | None, aux: bool = False) -> Any:
    x = keras.Input((DIM,))
    hidden = keras.layers.Dense(DIM, activation="tanh", name="h")(x)
    last = keras.layers.Dense(DIM, name="o")(hidden)
    return keras.Model(x, [last, keras.layers.Dense(1, name="aux")(hidden)] if aux else last, name=name)


@pytest.mark.parametrize(("named", "form"), [(1, "model"), (0, "model"), (1, "h5"), (0, "h5"), (0, "keras")])
@pytest.mark.sampled(2)
def test_a_tower_without_its_extra_head_is_not_the_other_tower(tmp_path: Path, named: int, form: str) -> None:
    def train() -> Any:
        ids, x = _inputs()
        query, aux = _tower_of("query" if named else None, True)(x)
        item = _tower_of("item" if named else None)(x)
        return keras.Model(ids, {"q": keras.layers.Dense(2, name="score")(query), "aux": aux, "i": item})

    def serve() -> Any:
        ids, x = _inputs()
        return keras.Model(ids, {"q": keras.layers.Dense(2, name="score")(_tower_of("query" if named else None)(x))})

    try:
        truth, found = _served(tmp_path, train, serve, form)
    except CheckpointMismatchError:
        return
    np.testing.assert_allclose(found["q"], truth["q"], atol=1e-5)


@keras.saving.register_keras_serializable("tests")
class Renamed(keras.Model):
    """Its layer's name is chosen, and a TensorFlow checkpoint does not hold it."""

    def __init__(self, inner: str) -> None:
        super().__init__()
        self.inner = keras.layers.Dense(DIM, activation="tanh", name=inner)

    def call(self, x: Any) -> Any:
        return self.inner(x)


def _renamed(order: Sequence[int]) -> Any:
    ids, x = _inputs()
    return keras.Model(ids, [keras.layers.Dense(2, name=f"head{n}")(Renamed(f"t{n}_l0")(x)) for n in order])


def test_names_that_the_checkpoint_has_lost_tell_no_layers_apart(tmp_path: Path) -> None:
    truth, found = _served(tmp_path, lambda: _renamed([0, 1]), lambda: _renamed([0, 1]))
    np.testing.assert_allclose(found, truth, atol=1e-5)
    with refused(CheckpointMismatchError):
        _served(tmp_path, lambda: _renamed([0, 1]), lambda: _renamed([1, 0]))


class Ranker(keras.Model):
    """Unnamed layers in one list, and named ones in a dict."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.embedding, self.order = _embedding(), list(names)
        self.towers = [keras.layers.Dense(DIM, activation="tanh") for _ in names]
        self.heads = {name: keras.layers.Dense(2, name=name) for name in names}

    def call(self, ids: Any) -> Any:
        x = self.embedding({"id": ids})["id"]
        return {name: self.heads[name](tower(x)) for name, tower in zip(self.order, self.towers, strict=True)}


def _uneven(order: Sequence[str]) -> Any:
    """Heads at other depths."""
    ids, x = _inputs()
    outputs = []
    for name in order:
        hidden = keras.layers.Dense(DIM, activation="tanh")(x)
        if name == "click":
            head = keras.layers.Dense(2, name=name)(hidden)
            outputs.append(keras.layers.Activation("sigmoid", name="probability")(head))
        else:
            outputs.append(keras.layers.Dense(2, name=name)(keras.layers.ReLU()(hidden)))
    return keras.Model(ids, outputs)


def _of_two_classes(order: Sequence[str]) -> Any:
    ids, x = _inputs()
    hidden = {name: keras.layers.Dense(DIM, activation="tanh")(x) for name in order}
    heads = {
        "click": keras.layers.Dense(2, name="click"),
        "watch": keras.layers.EinsumDense("ab,bc->ac", 2, name="watch"),
    }
    return keras.Model(ids, [heads[name](hidden[name]) for name in order])


def _with_named_activations(order: Sequence[str]) -> Any:
    """Heads that have names in layers without weights alone."""
    ids, x = _inputs()
    hidden = {name: keras.layers.Dense(DIM, activation="tanh")(x) for name in order}
    return keras.Model(ids, [keras.layers.Activation("sigmoid", name=name)(hidden[name]) for name in order])


@pytest.mark.parametrize(
    ("make", "form"),
    [
        (Ranker, "h5"),
        (_uneven, "model"),
        (_of_two_classes, "model"),
        (_with_named_activations, "h5"),
        (_of_two_classes, "keras"),
        (_uneven, "keras"),
    ],
)
@pytest.mark.sampled(1)
def test_named_layers_anywhere_keep_their_order_beside_unnamed_ones_of_one_form(
    tmp_path: Path, make: Any, form: str
) -> None:
    truth, found = _served(tmp_path, lambda: make(["click", "watch"]), lambda: make(["click", "watch"]), form)
    for values, true in zip(tf.nest.flatten(found), tf.nest.flatten(truth), strict=True):
        np.testing.assert_allclose(values, true, atol=1e-5)
    with refused(CheckpointMismatchError):
        _served(tmp_path, lambda: make(["click", "watch"]), lambda: make(["watch", "click"]), form)


def test_the_config_of_the_object_at_root_counts(tmp_path: Path) -> None:
    def inside() -> Any:
        model = _of_two_classes(["click", "watch"])
        ids = keras.Input((), dtype="int64", name="user")
        return keras.Model(ids, model(ids))

    root = "layers/functional"
    truth, found = _served(tmp_path, inside, lambda: _of_two_classes(["click", "watch"]), "keras", root=root)
    np.testing.assert_allclose(found, truth, atol=1e-5)
    with refused(CheckpointMismatchError, match="'dense_1'"):
        _served(tmp_path, inside, lambda: _of_two_classes(["watch", "click"]), "keras", root=root)


@keras.saving.register_keras_serializable("tests")
class Words(keras.layers.Layer):
    """A word for each id."""

    def call(self, ids: Any) -> Any:
        return tf.gather(tf.constant([["like"], ["click"], ["other"], ["like"], ["watch"]]), ids)


def _words(make: Any, ids: Any, weights: Sequence[float]) -> Any:
    lookup = make(output_mode="tf_idf", vocabulary=list(HEADS), idf_weights=weights)
    return keras.layers.Dense(DIM, name="of_words")(lookup(Words()(ids)))


@pytest.mark.parametrize("form", ["model", "h5", "keras"])
@pytest.mark.parametrize("make", [keras.layers.TextVectorization, keras.layers.StringLookup])
@pytest.mark.sampled(2)
def test_the_weights_of_tf_idf_are_those_of_training(tmp_path: Path, make: Any, form: str) -> None:
    def build(weights: Sequence[float]) -> Any:
        ids, x = _inputs()
        return keras.Model(ids, keras.layers.Dense(2, name="head")(x + _words(make, ids, weights)))

    truth, found = _served(tmp_path, lambda: build([0.5, 1.5, 2.5]), lambda: build([7.0, 8.0, 9.0]), form)
    np.testing.assert_allclose(found, truth, atol=1e-5)


def test_a_plain_variable_beside_tf_idf_is_still_refused(tmp_path: Path) -> None:
    class Scaled(keras.layers.Layer):
        def build(self, _: Any) -> None:
            self.scale = tf.Variable(2.0, name="scale")

        def call(self, x: Any) -> Any:
            return x * self.scale

    def build() -> Any:
        ids, x = _inputs()
        return keras.Model(ids, Scaled()(x + _words(keras.layers.StringLookup, ids, [0.5, 1.5, 2.5])))

    with refused(CheckpointMismatchError):
        _served(tmp_path, build, build, "h5")
