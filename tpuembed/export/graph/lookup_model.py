"""The functions of a lookup-only export, which map the ids of each feature to activations."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tpuembed.errors import ConfigError
from tpuembed.export.graph.feature_groups import FeatureGroup, group_features
from tpuembed.export.graph.saved_model import ExportableModel
from tpuembed.export.graph.signature import ServedFeature
from tpuembed.export.graph.stacked_tables import StackedTables
from tpuembed.export.graph.warmup import BATCHES, sample_inputs
from tpuembed.lookup.names import NamedIds, check_names, find_keys, name_keys, row_numbers
from tpuembed.manifest import LOOKUP_SCOPE, FeatureEntry, PackedInput, PackedOutput, Packing
from tpuembed.vocabulary import Vocabulary

__all__ = ["LookupModel"]

Tensor = Any


class LookupModel(ExportableModel):
    """A callable over named tensors, and the specs of its inputs."""

    def __init__(self, features: Sequence[ServedFeature], tables: StackedTables) -> None:
        self._features, self._tables = features, tables

    def input_specs(self) -> dict[str, tf.TensorSpec]:
        """Return int64 or string [batch] or [batch, hot] per feature, and float32 [batch, hot] for its weights."""
        specs = {}
        for feature in self._features:
            shape = [None] if feature.spec.input == "id" else [None, None]
            specs[feature.name] = tf.TensorSpec(shape, feature.names or "int64", name=feature.name)
            if feature.spec.weighted:
                specs[feature.weights_name] = tf.TensorSpec(shape, tf.float32, name=feature.weights_name)
        return specs

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return feature -> float32 [batch, dim], or [batch, max_sequence_length, dim]."""
        found: dict[str, Tensor] = {}
        with tf.name_scope(LOOKUP_SCOPE):
            rows = self._rows(inputs)
            for group in group_features(self._features, self._tables):
                found |= group.named(rows)
        return {feature.name: found[feature.name] for feature in self._features}

    def _rows(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `inputs` with row numbers in place of names. All names of a table are found together.

        The names of features are the first that fail a request. The check costs a few operations for all of them.
        """
        named = [feature for feature in self._features if feature.names]
        if not named:
            return dict(inputs)
        found: dict[str, Tensor] = {}
        strict = []
        for table in dict.fromkeys(feature.table for feature in named):
            members = [feature for feature in named if feature.table == table]
            arrays, names = self._tables.name_arrays(table), [inputs[feature.name] for feature in members]
            # Only ids that are looked up one by one may be reshaped themselves (row_proof/walk.py of the server).
            flat = [tf.reshape(name_keys(each, arrays.salt) + 0, [-1]) for each in names]
            sizes = tf.concat(tf.shape_n(flat, tf.int64), 0)
            parts = tf.split(find_keys(tf.concat(flat, 0), arrays), sizes, num=len(flat))
            for feature, each, part in zip(members, names, parts, strict=True):
                vocabulary, padded = feature.spec.vocabulary, feature.spec.input == "ids"
                assert vocabulary is not None
                rows = row_numbers(each, tf.reshape(part, tf.shape(each)), vocabulary, padded)
                found[feature.name] = rows
                if feature.policy == "error" and not vocabulary.oov_buckets:
                    strict.append(NamedIds(feature.name, table, len(vocabulary), each, rows))
        with tf.control_dependencies(check_names(strict)):
            return {**inputs, **{name: tf.identity(rows) for name, rows in found.items()}}

    def samples(self, vocabularies: Mapping[str, Vocabulary]) -> list[dict[str, Any]]:  # noqa: ARG002 - its features have them
        """Return requests for the first row of each table, or the first that has a name."""
        ids = {feature.name: self._sample(feature)[0] for feature in self._features}
        return [sample_inputs(self.input_specs(), ids, batch) for batch in BATCHES]

    def packed_sample(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Return a sample with row numbers."""
        ids = {feature.name: self._sample(feature)[1] for feature in self._features}
        batch = len(next(iter(sample.values())))
        specs = {name: tf.TensorSpec(spec.shape, tf.int64) for name, spec in self.input_specs().items() if name in ids}
        return sample_inputs(specs, ids, batch)

    def _sample(self, feature: ServedFeature) -> tuple[Any, int]:
        """Return what a feature takes for a row, and that row.

        Raises:
            ConfigError: no exported row has a name.
        """
        place, vocabulary = self._tables.place(feature.table)[1], feature.spec.vocabulary
        if vocabulary is None:
            return 0, 0
        row = vocabulary.oov_buckets
        if row >= min(place.rows, vocabulary.rows):
            raise ConfigError(
                f"feature {feature.name!r}: none of the {place.rows} rows of table {feature.table!r} has a name. Adapt the "
                "vocabulary, or leave it out."
            )
        return vocabulary.names([row])[0], row

    def features(self) -> tuple[FeatureEntry, ...]:
        """Return the features as the manifest lists them."""
        return tuple(feature.entry for feature in self._features)

    def packing(self) -> Packing:
        """Return how the signature `packed` takes the features: group by group, so that each group's columns are
        adjacent. It takes row numbers of all features, also of those with names.

        One matrix of all inputs is faster, because each input of a request costs as much as a small lookup. Its first columns are
        ids. Then come lists of `hot` columns each, padded with -1; they share the remaining width equally.
        """
        if weighted := [feature.name for feature in self._features if feature.spec.weighted]:
            return Packing(left_out=f"feature {weighted[0]!r} has weights, which are not integers")
        features = [feature for group in group_features(self._features, self._tables) for feature in group.features]
        inputs, outputs, start = [], [], 0
        for feature in features:
            inputs.append(PackedInput(name=feature.name, columns=1 if feature.spec.input == "id" else None))
            length = feature.spec.max_sequence_length
            shape = (length, feature.dim) if length else (feature.dim,)
            outputs.append(PackedOutput(name=feature.name, start=start, stop=start + math.prod(shape), shape=shape))
            start += math.prod(shape)
        return Packing(inputs=tuple(inputs), outputs=tuple(outputs))

    def packed(self, ids: Tensor) -> dict[str, Tensor]:
        """Return `activations`, float32 [batch, width], of all features' ids in one matrix."""
        with tf.name_scope(LOOKUP_SCOPE):
            groups = group_features(self._features, self._tables)
            members = [[group for group in groups if (group.kind == "id") == is_id] for is_id in (True, False)]
            found = [
                group.packed(columns)
                for part, together in zip(_split_matrix(ids, self.packing()), members, strict=True)
                for group, columns in zip(together, _split(part, together), strict=True)
            ]
            return {"activations": found[0] if len(found) == 1 else tf.concat(found, 1)}


def _split(ids: Tensor, groups: Sequence[FeatureGroup]) -> Sequence[Tensor]:
    """Split `ids` [batch, features] or [batch, features, hot] into the features of each group."""
    sizes = [len(group.features) for group in groups]
    return [ids] if len(sizes) == 1 else tf.split(ids, sizes, 1) if sizes else []


def _split_matrix(ids: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    """Split a matrix [batch, S + P * hot] into its fixed columns, int64 [batch, S], and P lists, [batch, P, hot]."""
    fixed = sum(packed.columns or 0 for packed in packing.inputs)
    lists = sum(packed.columns is None for packed in packing.inputs)
    if not lists:
        return ids, None
    first, rest = (ids[:, :fixed], ids[:, fixed:]) if fixed else (ids[:, :0], ids)
    batch, width = tf.unstack(tf.shape(rest))
    # The batch size is given, so that a width that the lists cannot share equally fails.
    return first, tf.reshape(rest, tf.stack([batch, lists, width // lists]))
