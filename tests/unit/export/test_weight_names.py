"""Whole models: whatever a factory returns computes the trained model's numbers, or is refused."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, open_checkpoint
from tpuembed.errors import CheckpointMismatchError
from tpuembed.export.dense_weights import recorded, restore_dense_weights
from tpuembed.lookup import LookupIds, gather_grouped
from tpuembed.table_scope import deferred_tables

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

    def lookup(self, features: Sequence[LookupIds], tables: Sequence[str]) -> list[Any]:
        """As the protocol says."""
        return gather_grouped(list(features), list(tables), lambda table, ids: tf.gather(self._tables[table], ids))

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
    with deferred_tables(Rows(tables)), open_checkpoint(path) as checkpoint, recorded() as made:
        model = build(spec)
        if spec.form == "subclassed":
            tf.function(
                model, input_signature=[tf.TensorSpec([None], tf.int64)], autograph=False
            ).get_concrete_function()
        restore_dense_weights(model, checkpoint, checkpoint.tables(), made=made, **options)
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


def _compare(folder: Path, model: Spec, factory: Spec, form: str) -> None:
    """Train `model`, restore `factory`'s from what was saved, and compare; or see it refused."""
    if form == "keras" and model.form == "subclassed":
        form = "h5"
    path, truth, tables = trained(model, form, folder)
    is_same = dataclasses.replace(factory, form=model.form, made_before=0) == dataclasses.replace(model, made_before=0)
    try:
        check("all", restored(factory, path, tables), truth)
    except CheckpointMismatchError:
        assert not is_same or (model.kind == "namesakes" and not model.as_dict)
    if factory.hidden != model.hidden:  # a part of the trained model, which computes something else
        return
    try:
        check("a part", restored(factory, path, tables, allow_unused_weights=True), truth)
    except CheckpointMismatchError:
        kinds = ("dense", "tower", "sequential")
        assert not (model.named_heads and model.named_hidden and model.form == "functional" and model.kind in kinds)


_FORMS = st.sampled_from(["model", "root", "h5", "keras"])


@given(specs(), _FORMS)
@settings(deadline=None, max_examples=20)
def test_a_factory_computes_the_trained_models_numbers_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, pair: tuple[Spec, Spec], form: str
) -> None:
    _compare(tmp_path_factory.mktemp("model"), *pair, form)


@pytest.mark.long
@given(specs(), _FORMS)
@settings(deadline=None, max_examples=400)
def test_many_factories_compute_the_trained_models_numbers_or_are_refused(
    tmp_path_factory: pytest.TempPathFactory, pair: tuple[Spec, Spec], form: str
) -> None:
    _compare(tmp_path_factory.mktemp("model"), *pair, form)


_TWO = Spec(hidden=0, heads=("click", "watch"), outputs=("click", "watch"), as_dict=False)


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        ({"kind": "flat"}, {"outputs": ("watch", "click"), "heads": ("watch", "click")}, "in another order"),
        ({"named_heads": False}, {"outputs": ("watch",)}, "nobody chose the names"),
        ({"named_heads": False}, {"outputs": ("watch", "click")}, "was made before or after other layers"),
        ({"named_hidden": False, "hidden": 3}, {"hidden": 2}, "have no name of their own"),
        ({"kind": "tower", "named_heads": False}, {"outputs": ("watch", "click")}, "was made before or after"),
        ({"kind": "namesakes"}, {"outputs": ("watch", "click")}, "2 saved layers and 2 of the model are called first"),
        ({"kind": "namesakes"}, {"outputs": ("watch",)}, "2 saved layers and 1 of the model are called first"),
    ],
)
def test_places_alone_prove_nothing(tmp_path: Path, model: Any, change: Any, message: str) -> None:
    spec = dataclasses.replace(_TWO, **model)
    path, _, tables = trained(spec, "model", tmp_path)
    with pytest.raises(CheckpointMismatchError, match=message):
        restored(dataclasses.replace(spec, **change), path, tables, allow_unused_weights=True)


def test_a_file_without_names_is_matched_one_to_one_only(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    path, truth, tables = trained(_TWO, "h5", tmp_path)
    with h5py.File(path, "r+") as file:
        file.visititems(lambda _, item: item.attrs.pop("name", None) and None)
    check("all", restored(_TWO, path, tables), truth)
    with pytest.raises(CheckpointMismatchError, match="lost the names of layers"):
        restored(dataclasses.replace(_TWO, outputs=("watch",)), path, tables, allow_unused_weights=True)
