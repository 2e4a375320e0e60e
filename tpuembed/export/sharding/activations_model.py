"""The lookups of a whole model as a model of their own, whose outputs are the activations that `from_activations` takes.

It looks up as the model's layers do. An export of lookups alone does not: it divides sums where a layer divides weights, and it
knows neither ids of any shape nor a layer's rules for negative ids and odd weights.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tpuembed.backends.deferred import DeferredBackend
from tpuembed.config import FeatureConfig
from tpuembed.export.graph.from_activations import LookedUp
from tpuembed.lookup import ids_of
from tpuembed.runtime.table_scope import current_source

if TYPE_CHECKING:
    from tpuembed.export.graph.keras_model import Factory
    from tpuembed.export.graph.model_inputs import InputForm

__all__ = ["activations_factory"]


def activations_factory(
    lookups: Sequence[LookedUp], forms: Mapping[str, "InputForm"], split: Collection[str] = ()
) -> "Factory":
    """Return a factory of a model with these lookups. Their features are its outputs, and with `_weights` behind it its inputs.

    Args:
        lookups: of a whole model.
        forms: of its inputs.
        split: the tables of which an export has a part of the rows. Other ids give rows of zeros.
    """
    specs = {}
    for entry in (lookup.entry for lookup in lookups):
        specs[entry.name] = _spec(forms[entry.ids])
        if entry.weighted:
            specs[f"{entry.name}_weights"] = _spec(forms[entry.weights])
    return lambda: (_Activations(lookups, split), specs)


def _spec(form: "InputForm") -> tf.TypeSpec:
    if form.kind == "dense":
        return tf.TensorSpec(form.spec.shape, form.dtype)
    shape = [None, form.width]
    if form.kind == "sparse":
        return tf.SparseTensorSpec(shape, form.dtype)
    return tf.RaggedTensorSpec(shape, form.dtype, row_splits_dtype=form.row_splits_dtype)


class _Activations(keras.Model):
    """The model. The features of one call of the whole model's layers are looked up together, as there."""

    def __init__(self, lookups: Sequence[LookedUp], split: Collection[str]) -> None:
        super().__init__(name="activations", dtype="float32")  # weights stay as they come in
        source = current_source()
        assert source is not None, "a factory is called in the scope of an export"
        self._calls = []
        self._weighted = set[str]()
        for _, group in groupby(lookups, attrgetter("call")):
            own = list(group)
            features = {lookup.entry.name: _config(lookup, split) for lookup in own}
            self._weighted |= {lookup.entry.name for lookup in own if lookup.entry.weighted}
            tables = {config.table.name: config.table for config in features.values()}
            self._calls.append((DeferredBackend(list(tables.values()), source), features))

    def call(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the activations."""
        found: dict[str, Any] = {}
        for backend, features in self._calls:
            given = [
                ids_of(name, config, inputs[name], inputs[f"{name}_weights"] if name in self._weighted else None)
                for name, config in features.items()
            ]
            ids = [
                each
                if each.config.vocabulary is None
                else each.from_names(partial(backend.rows_of, each.config.vocabulary, each.table))
                for each in given
            ]
            found.update(zip(features, backend.lookup(ids), strict=True))
        return found


def _config(lookup: LookedUp, split: Collection[str]) -> FeatureConfig:
    is_part = lookup.entry.table in split
    return dataclasses.replace(
        lookup.config,
        name=None,
        output_shape=None,
        vocabulary=lookup.config.vocabulary if lookup.entry.names else None,
        oov_buckets=None,
        out_of_vocabulary="zeros" if is_part else lookup.config.out_of_vocabulary,
    )
