"""The functions of a lookup-only export: ids of each feature in, activations out."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tpuembed.errors import ConfigError
from tpuembed.export.signature import ServedFeature
from tpuembed.export.stacked_tables import StackedTables
from tpuembed.lookup import DROPPED, LookupIds, pad_ids

__all__ = ["LookupModel"]

Tensor = Any


class LookupModel:
    """A callable over named tensors, and the specs of its inputs."""

    def __init__(self, features: Sequence[ServedFeature], tables: StackedTables) -> None:
        self._features, self._tables = features, tables

    def input_specs(self) -> dict[str, tf.TensorSpec]:
        """int64 [batch] or [batch, hot] per feature, float32 [batch, hot] for its weights."""
        specs = {}
        for feature in self._features:
            shape = [None] if feature.spec.input == "id" else [None, None]
            specs[feature.name] = tf.TensorSpec(shape, tf.int64, name=feature.name)
            if feature.spec.weighted:
                specs[feature.weights_name] = tf.TensorSpec(shape, tf.float32, name=feature.weights_name)
        return specs

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """feature -> float32 [batch, dim], or [batch, max_sequence_length, dim]."""
        flat = [_lookup_ids(feature, inputs, *self._tables.row_range(feature.table)) for feature in self._features]
        activations = self._tables.lookup(flat, [feature.table for feature in self._features])
        return {feature.name: rows for feature, rows in zip(self._features, activations, strict=True)}


def _lookup_ids(feature: ServedFeature, inputs: Mapping[str, Tensor], start: int, stop: int) -> LookupIds:
    ids = inputs[feature.name]
    if feature.spec.input == "id":
        ids = ids[:, None]
        flat = dataclasses.replace(pad_ids(ids, None, "sum"), droppable=False)
        return _with_policy(feature, flat, tf.zeros_like(ids, tf.bool), start, stop)
    weights = inputs.get(feature.weights_name) if feature.spec.weighted else None
    flat = pad_ids(ids, weights, feature.combiner, feature.spec.max_sequence_length)
    return _with_policy(feature, flat, flat.ids == DROPPED, start, stop)


def _with_policy(feature: ServedFeature, flat: LookupIds, padding: Tensor, start: int, stop: int) -> LookupIds:
    """Replace ids outside of rows [start, stop) as the feature says: an id that stays outside fails in the lookup."""
    policy = feature.spec.out_of_vocabulary
    if policy == "error":
        return flat
    if isinstance(policy, int) and not start <= policy < stop:
        raise ConfigError(
            f"feature {feature.name!r}: out_of_vocabulary row {policy} is not among the exported rows [{start}, {stop}) of table "
            f"{feature.table!r}; choose one of them, or zeros"
        )
    inside = (flat.ids >= start) & (flat.ids < stop)
    instead = tf.constant(DROPPED if policy == "zeros" else policy, tf.int64)
    ids = tf.where(inside | tf.reshape(padding, [-1]), flat.ids, instead)
    return dataclasses.replace(flat, ids=ids, droppable=flat.droppable or policy == "zeros")
