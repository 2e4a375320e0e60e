"""serving_config: nested features, checkpoints that do not say what their tables are, and mistakes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.contract_lookups import Lookups, answers
from tpuembed import FeatureConfig, TableConfig, export_saved_model
from tpuembed.errors import CheckpointMismatchError, ConfigError, TpuEmbedError

Export = Callable[..., Path]


@pytest.fixture(scope="module")
def export(lookups: Lookups, tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Return a function that exports the checkpoint with a serving_config. The versions share the files of the tables."""
    folder = tmp_path_factory.mktemp("configs")

    def write(config: Any) -> Path:
        return export_saved_model(lookups.prefix, folder / "m", serving_config=config, workers=1).path

    return write


def test_nested_features_are_joined_with_slashes(lookups: Lookups, export: Export) -> None:
    users, videos = TableConfig(50, 4, "users"), TableConfig(40, 6, "videos", combiner="sum")
    version = export({"viewer": {"me": FeatureConfig(users)}, "seen": [FeatureConfig(videos)]})
    loaded = tf.saved_model.load(str(version))
    outputs = loaded.signatures["serving_default"].structured_outputs
    assert {name: spec.shape.as_list() for name, spec in outputs.items()} == {
        "viewer/me": [None, 4],
        "seen/0": [None, 6],
    }
    examples = tf.train.Example()
    examples.features.feature["viewer/me"].int64_list.value.append(1)
    examples.features.feature["seen/0"].int64_list.value.extend([3, 5])
    found = answers(version, {"examples": [examples.SerializeToString()]}, "serving_examples")
    np.testing.assert_array_equal(found["viewer/me"], lookups.rows["users"][[1]])
    np.testing.assert_allclose(found["seen/0"][0], lookups.rows["videos"][[3, 5]].sum(0), rtol=1e-6)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of a plain variable, which no embedding layer wrote."""
    rows = tf.Variable(np.arange(30, dtype=np.float32).reshape(10, 3))
    prefix = tmp_path_factory.mktemp("foreign") / "ckpt"
    return Path(tf.train.Checkpoint(items=rows).write(str(prefix)))


def test_tables_state_what_a_foreign_checkpoint_does_not(foreign: Path, tmp_path: Path) -> None:
    config = {
        "features": {"item": {"table": "items"}},
        "tables": {"items": {"vocabulary_size": 10, "dim": 3, "combiner": "sum"}},
    }
    version = export_saved_model(foreign, tmp_path / "m", serving_config=config, workers=1).path
    found = answers(version, {"item": [[0, 9, -1], [-1, -1, 1]]})
    np.testing.assert_array_equal(found["item"], [[27, 29, 31], [3, 4, 5]])


@pytest.mark.parametrize(
    ("table", "both"), [({"vocabulary_size": 11}, ("11", "10")), ({"dim": 4}, ("4", "3"))], ids=str
)
def test_a_size_that_contradicts_the_checkpoint_is_refused(
    foreign: Path, tmp_path: Path, table: Any, both: tuple[str, str]
) -> None:
    config = {"features": {"item": {"table": "items"}}, "tables": {"items": table}}
    with pytest.raises(CheckpointMismatchError) as raised:
        export_saved_model(foreign, tmp_path / "m", serving_config=config)
    assert all(word in str(raised.value) for word in ("items", *both)), str(raised.value)


def test_a_foreign_checkpoint_without_a_config_is_refused(foreign: Path, tmp_path: Path) -> None:
    with pytest.raises(TpuEmbedError, match="serving_config"):
        export_saved_model(foreign, tmp_path / "m")
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("feature", "words"),
    [
        ({"table": "users", "inputs": "id"}, ["'inputs'", "'input'"]),
        ({"table": "users", "input": "list"}, ["list"]),
        ({"table": "users", "combiner": "max"}, ["max", "sum, mean, sqrtn"]),
        ({"table": "users", "out_of_vocabulary": 50}, ["50", "users"]),
        ({"table": "users", "out_of_vocabulary": "drop"}, ["drop"]),
        ({"table": "users", "input": "id", "weighted": True}, ["weighted"]),
        ({}, ["table"]),
    ],
    ids=str,
)
def test_a_wrong_feature_is_named_with_its_value(export: Export, feature: Mapping[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        export({"features": {"wrong": feature}})
    assert isinstance(raised.value, ValueError)
    assert all(word in str(raised.value) for word in ["wrong", *words]), str(raised.value)


def test_an_unknown_table_is_a_key_error_with_a_suggestion(export: Export) -> None:
    with pytest.raises(KeyError, match=r"'user'.*'users'") as raised:
        export({"features": {"x": {"table": "user"}}})
    assert isinstance(raised.value, TpuEmbedError)
