"""Which names a feature gets: those that are given, those of the checkpoint, or an error that says what to do."""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, Vocabulary
from tpuembed.checkpoint import TableInfo
from tpuembed.config import ServingConfig, ServingFeature, feature_config_from_dict, feature_config_to_dict
from tpuembed.errors import ConfigError
from tpuembed.export.graph.signature import served_features
from tpuembed.export.graph.stacked_tables import StackedTables
from tpuembed.lookup.names import find_names
from tpuembed.runtime.table_scope import current_source, deferred_tables

TABLES = {name: TableInfo(name, 10, 4, np.dtype(np.float32)) for name in ("users", "items")}
NAMES = Vocabulary(["a", "b", "c"], oov_buckets=1)


def served(
    features: Mapping[str, Mapping[str, Any]], saved: Mapping[str, Vocabulary] | None = None
) -> dict[str, Vocabulary | None]:
    config = ServingConfig(features={name: ServingFeature(**options) for name, options in features.items()})
    found = served_features(config, TABLES, None, (saved or {}).get)
    return {feature.name: feature.spec.vocabulary for feature in found}


def user(vocabulary: Vocabulary | None, kind: str = "id") -> dict[str, Any]:
    return {"table": "users", "input": kind, "vocabulary": vocabulary}


def test_names_are_given_or_those_of_the_checkpoint() -> None:
    empty = Vocabulary(oov_buckets=1)
    same = Vocabulary(["a", "b", "c"], oov_buckets=1)
    assert served({"f": user(NAMES)}) == {"f": NAMES}
    assert served({"f": user(empty)}, {"users": NAMES}) == {"f": NAMES}
    assert served({"f": user(same)}, {"users": NAMES}) == {"f": NAMES}
    assert served({"f": user(None)}, {"users": NAMES}) == {"f": NAMES}
    assert served({"f": user(None)}, {"items": NAMES}) == {"f": None}
    assert served({"f": {**user(None), "takes_rows": True}}, {"users": NAMES}) == {"f": None}
    with refused(ConfigError, match="takes_rows: true with a vocabulary"):
        served({"f": {**user(NAMES), "takes_rows": True}})


def test_a_feature_that_was_trained_with_rows_takes_rows() -> None:
    table = TableConfig(10, 4, "users")
    layer = {"named": FeatureConfig(table, vocabulary=NAMES), "numbered": FeatureConfig(table)}
    own = feature_config_to_dict(layer)

    def vocabularies(features: Mapping[str, ServingFeature]) -> dict[str, Vocabulary | None]:
        found = served_features(ServingConfig(features=features), TABLES, own, {"users": NAMES}.get)
        return {feature.name: feature.spec.vocabulary for feature in found}

    assert vocabularies(ServingConfig.from_features(feature_config_from_dict(own)).features) == {
        "named": NAMES,
        "numbered": None,
    }
    given = {name: ServingFeature(table="users") for name in ("named", "numbered", "new")}
    assert vocabularies(given) == {"named": NAMES, "numbered": None, "new": NAMES}
    moved = {"numbered": ServingFeature(table="items")}
    assert vocabularies(moved) == {"numbered": None}


def test_features_of_a_table_share_its_names() -> None:
    empty = Vocabulary(oov_buckets=1)
    found = served({"f": user(empty), "g": user(NAMES, "ids"), "h": user(None), "i": user(empty)})
    assert found == {"f": NAMES, "g": NAMES, "h": None, "i": NAMES}


@pytest.mark.parametrize(
    ("given", "saved"),
    [
        (Vocabulary(), None),
        (Vocabulary(), Vocabulary()),
        (Vocabulary(dtype="int64"), NAMES),
        (Vocabulary(oov_buckets=2), NAMES),
        (Vocabulary(["a", "b"], oov_buckets=1), NAMES),
        (Vocabulary(["a", "c", "b"], oov_buckets=1), NAMES),
        (Vocabulary(map(str, range(10)), oov_buckets=1), None),
    ],
)
def test_names_that_do_not_fit_are_refused(given: Vocabulary, saved: Vocabulary | None) -> None:
    with refused(ConfigError, match="'f'"):
        served({"f": user(given)}, {} if saved is None else {"users": saved})


def test_two_vocabularies_of_a_table_are_refused() -> None:
    with refused(ConfigError, match="'g'"):
        served({"f": user(NAMES), "g": user(Vocabulary(["a", "b", "d"], oov_buckets=1))})


@pytest.mark.parametrize(
    "vocabulary", [Vocabulary(["a", ""]), Vocabulary([5, -1], dtype="int64"), Vocabulary(["", "b"], oov_buckets=2)]
)
def test_padding_is_no_name_of_lists(vocabulary: Vocabulary) -> None:
    assert served({"f": user(vocabulary)}) == {"f": vocabulary}
    with refused(ConfigError, match="'f'"):
        served({"f": user(vocabulary, "ids")})


def test_the_names_of_a_whole_model_are_those_of_the_checkpoint() -> None:
    source = StackedTables(TABLES, {"users": NAMES}.get)
    assert source.vocabularies == {}
    with deferred_tables(source):
        found = current_source()
        assert found is not None
        arrays = found.name_arrays("users")
    assert find_names(tf.constant(["a", "b"]), arrays).numpy().tolist() == [-1, -1]  # a stand-in has no names
    assert source.vocabularies == {"users": NAMES}
    with source.rows_of_zeros():
        arrays = source.name_arrays("users")
        assert find_names(tf.constant(["c", "x", "a"]), arrays).numpy().tolist() == [2, -1, 0]
    assert source.name_arrays("users", Vocabulary(oov_buckets=1)).buckets == 1
    with refused(ConfigError, match="items"):
        source.name_arrays("items")
    with refused(ConfigError, match="users"):
        source.name_arrays("users", Vocabulary(["a"], oov_buckets=1))
    given = Vocabulary(["q"])
    source.name_arrays("items", given)
    assert source.vocabularies == {"users": NAMES, "items": given}


def test_a_model_that_takes_rows_of_a_table_with_names_is_refused() -> None:
    """A lookup layer in the factory may number the names in another order than the vocabulary that was trained."""

    def make(vocabulary: Vocabulary | None, takes_rows: bool = False) -> None:
        with deferred_tables(StackedTables(TABLES, {"users": NAMES}.get)):
            features = {
                "user": FeatureConfig(
                    TableConfig(TABLES["users"].rows, TABLES["users"].dim, "users"), vocabulary=vocabulary
                ),
                "item": FeatureConfig(TableConfig(TABLES["items"].rows, TABLES["items"].dim, "items")),
            }
            TPUEmbedding(features, "sgd", takes_rows=takes_rows)

    with refused(ConfigError, match="'users'"):
        make(None)
    with refused(ConfigError, match="'users'"):
        make(None, takes_rows=True)
    make(Vocabulary(oov_buckets=1))
    make(Vocabulary(oov_buckets=1), takes_rows=True)


def test_keras_agrees_on_buckets() -> None:
    layer: Any = keras.layers.StringLookup(vocabulary=["a", "b", "c"], num_oov_indices=1)
    assert np.array(layer(tf.constant(["a", "c"]))).tolist() == NAMES.lookup(["a", "c"]).tolist()
