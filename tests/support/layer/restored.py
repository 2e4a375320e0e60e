"""Layers for a set of tables, and what they hold."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tpuembed import FeatureConfig, TableConfig, TPUEmbedding

Array = np.ndarray[Any, Any]
Tables = Mapping[str, Mapping[str | None, Array]]

TRAINED_BY: Mapping[frozenset[str], str] = {
    frozenset(): "sgd",
    frozenset({"accumulators"}): "adagrad",
    frozenset({"accumulators", "momenta"}): "adagrad_momentum",
    frozenset({"momenta", "velocities"}): "adam",
    frozenset({"accumulators", "linears"}): "ftrl",
}
"""The one rule that has just these slots."""


def layer_for(tables: Tables, **options: Any) -> TPUEmbedding:
    """A layer with the tables of that truth; the optimizer of each is told by its slots, "sgd" where none has just them."""
    features = {}
    for index, (name, arrays) in enumerate(tables.items()):
        rows, dim = arrays[None].shape
        optimizer = TRAINED_BY.get(frozenset(slot for slot in arrays if slot is not None), "sgd")
        features[f"f{index}"] = FeatureConfig(TableConfig(rows, dim, name, optimizer=optimizer))
    return TPUEmbedding(features, **options)


def held(layer: TPUEmbedding) -> dict[str, dict[str | None, Array]]:
    """Every table and slot of a layer."""
    found: dict[str, dict[str | None, Array]] = {config.name: {} for config in layer.embedding_tables}
    for name, variable in layer.named_variables().items():
        table, _, slot = (name, "", None) if name in found else name.rpartition("/")
        found[table][slot] = variable.numpy()
    return found


def assert_held(layer: TPUEmbedding, truth: Tables) -> None:
    """Raise unless the layer holds just these numbers."""
    found = held(layer)
    assert found.keys() == truth.keys()
    for name, arrays in truth.items():
        assert found[name].keys() == arrays.keys()
        for slot, values in arrays.items():
            np.testing.assert_array_equal(found[name][slot], values.astype(np.float32), err_msg=f"{name}: {slot}")


def updates(layer: TPUEmbedding) -> int:
    """How many updates the layer counts."""
    return int(layer.updates.numpy())
