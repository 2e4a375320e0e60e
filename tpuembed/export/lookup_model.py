"""The functions of a lookup-only export: ids of each feature in, activations out."""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tpuembed.export.feature_groups import group_features
from tpuembed.export.signature import ServedFeature
from tpuembed.export.stacked_tables import StackedTables

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
        found: dict[str, Tensor] = {}
        for group in group_features(self._features, self._tables):
            found |= group.named(inputs)
        return {feature.name: found[feature.name] for feature in self._features}
