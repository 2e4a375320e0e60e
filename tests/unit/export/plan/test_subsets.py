"""Parts of a checkpoint: features, tables, and rows of tables under their own ids."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import capi
from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_saved_model
from tpuembed.errors import ConfigError, RowRangeError, UnknownTableError
from tpuembed.manifest import Manifest

ROWS, DIM = 40, 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Its prefix, and its tables as numpy: three of one width."""
    tables = {name: TableConfig(ROWS, DIM, name) for name in ("ads", "users", "videos")}
    layer = TPUEmbedding({name: FeatureConfig(table) for name, table in tables.items()}, optimizer="adagrad")
    prefix = tf.train.Checkpoint(model=layer).save(str(tmp_path_factory.mktemp("checkpoint") / "ckpt"))
    return prefix, {table.name: variable.numpy() for table, variable in layer.embedding_tables.items()}


def _config(policy: Any = "error", **feature: Any) -> dict[str, Any]:
    return {"features": {"seen": {"table": "videos", "out_of_vocabulary": policy, **feature}}}


def _call(path: Path, **inputs: Any) -> Any:
    signature = tf.saved_model.load(str(path)).signatures["serving_default"]
    return signature(**{name: tf.constant(ids, tf.int64) for name, ids in inputs.items()})


def test_rows_keep_their_ids(tmp_path: Path, checkpoint: Any) -> None:
    prefix, tables = checkpoint
    report = export_saved_model(prefix, tmp_path, rows={"users": (10, 30)})
    ids = np.array([[10, 29], [15, -1]])
    expected = [tables["users"][[10, 29]].mean(0), tables["users"][15]]
    inputs = {"ads": [[0], [39]], "users": ids, "videos": [[39], [1]]}
    found = _call(report.path, **inputs)
    np.testing.assert_allclose(found["users"], expected, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(found["ads"], tables["ads"][[0, 39]])
    np.testing.assert_array_equal(found["videos"], tables["videos"][[39, 1]])
    through_c = capi.predict(report.path, {name: np.array(value, np.int64) for name, value in inputs.items()})
    np.testing.assert_array_equal(through_c["users"], found["users"])
    assert report.bytes_written == 4 * DIM * (ROWS + 20 + ROWS)
    manifest = Manifest.read(report.path)
    assert manifest is not None
    assert [(table.name, table.first_row, table.rows) for table in manifest.tables] == [
        ("ads", 0, 40), ("users", 10, 20), ("videos", 0, 40),
    ]  # fmt: skip


@pytest.fixture(scope="module", params=["ids", "id"])
def part(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, checkpoint: Any) -> tuple[str, Path]:
    """Rows 10 to 29 behind a feature of each kind."""
    config = _config(input=request.param)
    folder = tmp_path_factory.mktemp("part")
    report = export_saved_model(checkpoint[0], folder, serving_config=config, rows={"videos": (10, 30)})
    return request.param, report.path


@pytest.mark.parametrize("ids", [[[9]], [[30]], [[0]], [[39]], [[10, 9]], [[29, 30, -1]], [[-2]]])
@pytest.mark.sampled(4)
def test_other_rows_are_refused(part: tuple[str, Path], ids: Any) -> None:
    kind, path = part
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"assertion|not in"):
        _call(path, seen=ids if kind == "ids" else ids[0])


def test_shards_by_row_add_up(tmp_path: Path, checkpoint: Any) -> None:
    prefix, tables = checkpoint
    ids = np.array([[0, 12, 39, -1], [13, 26, 27, 14]])
    total = np.zeros((2, DIM))
    for start, stop in ((0, 13), (13, 27), (27, 40)):
        report = export_saved_model(prefix, tmp_path, serving_config=_config("zeros"), rows={"videos": (start, stop)})
        total += _call(report.path, seen=ids)["seen"].numpy()
    rows = tables["videos"].astype(np.float64)
    np.testing.assert_allclose(total, [rows[[0, 12, 39]].mean(0), rows[ids[1]].mean(0)], rtol=1e-5, atol=1e-7)


def test_a_row_instead(tmp_path: Path, checkpoint: Any) -> None:
    prefix, tables = checkpoint
    report = export_saved_model(prefix, tmp_path, serving_config=_config(11), rows={"videos": (10, 30)})
    found = _call(report.path, seen=[[5], [30], [29]])["seen"]
    np.testing.assert_array_equal(found, tables["videos"][[11, 11, 29]])
    with refused(ConfigError, match="row 5"):
        export_saved_model(prefix, tmp_path, serving_config=_config(5), rows={"videos": (10, 30)})


def test_features_by_name(tmp_path: Path, checkpoint: Any) -> None:
    prefix, tables = checkpoint
    report = export_saved_model(prefix, tmp_path, features=["ads"])
    assert (report.tables, report.dropped_features) == (("ads",), ("users", "videos"))
    np.testing.assert_array_equal(_call(report.path, ads=[[7]])["ads"], tables["ads"][[7]])


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"features": ["adz"]}, ConfigError),
        ({"features": "ads"}, ConfigError),
        ({"features": []}, ConfigError),
        ({"features": ["ads"], "tables": ["users"]}, ConfigError),
        ({"features": ["ads"], "model": "m:f"}, ConfigError),
        ({"rows": {"adz": (0, 1)}}, UnknownTableError),
        ({"rows": {"ads": (0, 41)}}, RowRangeError),
        ({"rows": {"ads": (0, 1)}, "features": ["users"]}, UnknownTableError),
    ],
)
def test_parts_that_are_not_there(
    tmp_path: Path, checkpoint: Any, arguments: dict[str, Any], error: type[Exception]
) -> None:
    with refused(error):
        export_saved_model(checkpoint[0], tmp_path / "models", **arguments)
    assert not (tmp_path / "models").exists()
