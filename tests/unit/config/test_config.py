"""Configs: valid once built, the same after a trip through a dict, JSON or YAML, and clear about what is wrong."""

import dataclasses
import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import yaml

from tests.support.messages import refused
from tpuembed import (
    FTRL,
    SGD,
    Adagrad,
    AdagradMomentum,
    Adam,
    FeatureConfig,
    QuantizationConfig,
    TableConfig,
)
from tpuembed.config import (
    Optimizer,
    ServingConfig,
    ServingFeature,
    ServingTable,
    feature_config_from_dict,
    feature_config_to_dict,
    optimizer_from,
)
from tpuembed.errors import ConfigError


def _features() -> dict[str, Any]:
    videos = TableConfig(
        100,
        8,
        "videos",
        combiner="sqrtn",
        initializer={"class_name": "Zeros", "config": {}},
        optimizer=Adagrad(learning_rate=0.5),
        quantization_config=QuantizationConfig(16, -1.0, 1.0),
    )
    users = TableConfig(10, 4, "users", optimizer={"kind": "adam", "beta_1": 0.5})
    return {
        "watched": FeatureConfig(videos, max_sequence_length=5, validate_weights_and_indices=False),
        "more": [FeatureConfig(users, name="me"), {"friends": FeatureConfig(users, output_shape=(None, 3))}],
    }


def _as_read(features: dict[str, Any]) -> dict[str, Any]:
    """What a reader makes of `_features`: a table's optimizer stays the dict that it was written as."""
    videos = dataclasses.replace(features["watched"].table, optimizer=Adagrad(learning_rate=0.5).to_dict())
    return {**features, "watched": dataclasses.replace(features["watched"], table=videos)}


def test_features_survive_a_dict() -> None:
    written = feature_config_to_dict(_features())
    assert feature_config_from_dict(json.loads(json.dumps(written))) == _as_read(_features())


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_features_survive_a_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"features{suffix}"
    written = feature_config_to_dict(_features())
    path.write_text(json.dumps(written) if suffix == ".json" else yaml.safe_dump(written))
    assert feature_config_from_dict(path) == _as_read(_features())
    assert written["tables"]["users"] == {
        "vocabulary_size": 10,
        "dim": 4,
        "name": "users",
        "combiner": "mean",
        "optimizer": {"kind": "adam", "beta_1": 0.5},
    }


@pytest.mark.parametrize(
    "spec", [SGD(clipvalue=(None, 2.0)), Adagrad(initial_accumulator_value=2.0), Adam(epsilon=1e-3), FTRL(beta=1.0)]
)
def test_optimizers_survive_a_dict(spec: Optimizer) -> None:
    assert optimizer_from(json.loads(json.dumps(spec.to_dict()))) == spec


def test_a_learning_rate_that_is_code_cannot_be_written() -> None:
    spec = Adam(learning_rate=lambda: 0.1)
    with refused(ConfigError, match="learning_rate"):
        spec.to_dict()
    assert "learning_rate" not in spec.static_dict()


@pytest.mark.parametrize(
    "make",
    [
        lambda: TableConfig(True, 2, "t"),
        lambda: TableConfig(3, -1, "t"),
        lambda: TableConfig(3, 2, cast("str", None)),
        lambda: TableConfig(3, 2, "a\nb"),
        lambda: TableConfig(3, 2, "t", optimizer={"kind": "adam", "beta": 1}),
        lambda: FeatureConfig(TableConfig(3, 2, "t"), max_sequence_length=10**20),
        lambda: SGD(learning_rate=float("nan")),
        lambda: SGD(learning_rate=cast("float", "fast")),
        lambda: Adam(beta_1=1.0),
        lambda: Adam(beta_2=-0.1),
        lambda: Adam(epsilon=0.0),
        lambda: SGD(clipvalue=-1.0),
        lambda: SGD(clip_weight_min=1.0, clip_weight_max=0.0),
        lambda: SGD(weight_decay_factor=-0.1),
        lambda: SGD(multiply_weight_decay_factor_by_learning_rate=True),
        lambda: SGD(clipvalue=1.0, use_gradient_accumulation=False),
        lambda: FTRL(initial_accumulator_value=0.0),
        lambda: FTRL(l1_regularization_strength=-1.0),
        lambda: AdagradMomentum(beta2=1.1),
        lambda: AdagradMomentum(exponent=0.0),
        lambda: AdagradMomentum(epsilon=0.0),
        lambda: QuantizationConfig(1, 0.0, 1.0),
        lambda: optimizer_from({"kind": "lion"}),
        *(lambda policy=policy: TableConfig(10, 4, "t", out_of_vocabulary=policy) for policy in ("<row>", True, 1.0)),
    ],
)
def test_what_is_wrong_is_named(make: Any) -> None:
    """Beside what tests/contract/test_configs.py asks."""
    with refused(ConfigError):
        make()


@pytest.mark.parametrize(
    "change",
    [
        {"features": {"x": {"table": "user"}}},
        {"features": {"x": {"table": "users", "max_length": 3}}},
        {"features": {"x": 3}},
        {"tables": {"users": {"vocabulary_size": 3}}},
        {"tables": {"users": {"vocabulary_size": 3, "dim": 2, "rows": 3}}},
        {"tables": {"users": {"vocabulary_size": 3, "dim": 2, "name": "u"}}},
        {"tables": 3},
        {"extra": 3},
    ],
)
def test_a_wrong_dict_says_what_is_wrong(change: dict[str, Any]) -> None:
    good = {"tables": {"users": {"vocabulary_size": 3, "dim": 2}}, "features": {"x": {"table": "users"}}}
    assert feature_config_from_dict(good) == {"x": FeatureConfig(TableConfig(3, 2, "users"))}
    with refused(ConfigError):
        feature_config_from_dict({**good, **change})


# ---- serving_config

SERVING = {
    "features": {
        "watched": {"table": "videos", "input": "ids"},
        "friends": {"table": "users", "combiner": "sqrtn", "weighted": True, "out_of_vocabulary": "zeros"},
        "me": {"table": "users", "input": "id", "out_of_vocabulary": 3},
    },
    "tables": {"videos": {"vocabulary_size": 100, "dim": 8, "combiner": "sum"}},
}


def test_a_serving_config_is_read_from_a_dict_json_and_yaml(tmp_path: Path) -> None:
    config = ServingConfig.parse(SERVING)
    assert config.features["friends"] == ServingFeature(
        table="users", combiner="sqrtn", weighted=True, out_of_vocabulary="zeros"
    )
    assert config.features["watched"] == ServingFeature(table="videos", input="ids")
    assert config.tables == {"videos": ServingTable(vocabulary_size=100, dim=8, combiner="sum")}
    assert ServingConfig.parse(config) is config
    for name, text in (("c.yaml", yaml.safe_dump(SERVING)), ("c.json", json.dumps(SERVING))):
        (tmp_path / name).write_text(text)
        assert ServingConfig.parse(tmp_path / name) == ServingConfig.parse(str(tmp_path / name)) == config


def test_yaml_may_merge_what_is_given_elsewhere(tmp_path: Path) -> None:
    text = "features:\n  a: &a {table: t, combiner: sum}\n  b: {<<: *a, combiner: mean}\n"
    (tmp_path / "c.yaml").write_text(text)
    features = ServingConfig.parse(tmp_path / "c.yaml").features
    assert features["b"] == ServingFeature(table="t", combiner="mean")


def test_a_serving_config_is_made_of_nested_features() -> None:
    config = ServingConfig.parse(_features())
    assert set(config.features) == {"watched", "more/0", "more/1/friends"}
    assert config.features["watched"] == ServingFeature(
        table="videos", max_sequence_length=5, out_of_vocabulary="error"
    )
    quantization = QuantizationConfig(16, -1.0, 1.0)
    stated = ServingTable(vocabulary_size=100, dim=8, combiner="sqrtn", quantization_config=quantization)
    assert config.tables["videos"] == stated


@pytest.mark.parametrize(
    "fields",
    [
        {"num_buckets": 16, "lower": -1.0},
        {"num_buckets": 16, "lower": -1.0, "upper": 1.0, "step": 1},
        {"num_buckets": 1, "lower": -1.0, "upper": 1.0},
        16,
    ],
)
def test_a_serving_config_states_quantization_whole(fields: Any) -> None:
    tables = {"videos": {"quantization_config": fields}}
    with refused(ConfigError):
        ServingConfig.parse({"features": {"x": {"table": "videos"}}, "tables": tables})


def test_a_subset_keeps_the_features_of_its_tables() -> None:
    config = ServingConfig.parse(SERVING).only_tables(["users"])
    assert set(config.features) == {"friends", "me"}
    assert config.tables == {}
    with refused(ConfigError):
        config.only_tables(["others"])


@pytest.mark.parametrize(
    "fields",
    [
        {"input": "idx"},
        {"combiner": "max"},
        {"weighted": 1},
        {"weighted": True, "input": "id"},
        {"max_sequence_length": 3, "input": "id"},
        {"max_sequence_length": 3, "weighted": True},
        {"out_of_vocabulary": "ones"},
        {"out_of_vocabulary": -1},
        {"out_of_vocabulary": True},
        {"tabel": "t"},
    ],
)
def test_a_wrong_serving_feature_says_what_is_wrong(fields: dict[str, Any]) -> None:
    with refused(ConfigError):
        ServingConfig.parse({"features": {"x": {"table": "t", **fields}}})


@pytest.mark.parametrize(
    "config",
    [
        {"features": {}},
        {},
        {"feature": {}},
        {"features": ["x"]},
        {"features": {"x": "t"}},
        {"features": {"x": {}}},
        {"features": {"x": {"table": "t", "weighted": True}, "x_weights": {"table": "t"}}},
        {"features": {"x": {"table": "t"}}, "tables": {"t": {"rows": 3}}},
        {"features": {"x": {"table": "t"}}, "tables": {"t": {"dim": 0}}},
        [3],
    ],
)
def test_a_wrong_serving_config_says_what_is_wrong(config: Any) -> None:
    with refused(ConfigError):
        ServingConfig.parse(config)


def test_out_of_vocabulary_survives_its_dict() -> None:
    table = TableConfig(10, 4, "t", out_of_vocabulary=cast("int", np.int64(3)))
    features = {"a": FeatureConfig(table), "b": FeatureConfig(table, out_of_vocabulary="error")}
    written = feature_config_to_dict(features)
    assert json.loads(json.dumps(written)) == written
    assert written["features"] == {"a": {"table": "t"}, "b": {"table": "t", "out_of_vocabulary": "error"}}
    found = feature_config_from_dict(written)
    assert (found["a"].out_of_vocabulary, found["b"].out_of_vocabulary) == (3, "error")
