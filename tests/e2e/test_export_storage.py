"""Exports of quantized tables, and bounds of errors, in Python and through the C API."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf
from click.testing import CliRunner

from tests.support import capi
from tests.support.messages import refused
from tpuembed import FeatureConfig, QuantizationConfig, TableConfig, TPUEmbedding, export_saved_model
from tpuembed.backends import host
from tpuembed.errors import CheckpointMismatchError, ExportError
from tpuembed.manifest import Manifest, QuantizationEntry
from tpuembed_cli.describe import describe as describe_command
from tpuembed_cli.export import export as export_command

pytestmark = pytest.mark.usefixtures("exports_in_this_process")

Array = npt.NDArray[Any]
ROWS, DIM = 50, 12


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Array]:
    """A checkpoint of one table, and its rows."""
    rows = np.random.default_rng(1).standard_normal((ROWS, DIM)).astype(np.float32)
    checkpoint = tf.train.Checkpoint(table=tf.Variable(rows, name="table"))
    return checkpoint.write(str(tmp_path_factory.mktemp("ckpt") / "ckpt")), rows


# ---- what training looked up

QUANTIZATION = QuantizationConfig(num_buckets=16, lower=-0.5, upper=0.75)


def _trained(rows: Array) -> Array:
    """The formula of `tf.tpu.experimental.embedding.QuantizationConfig`, for float64."""
    quantum = (0.75 - -0.5) / 15
    return np.floor((np.clip(rows.astype(np.float64), -0.5, 0.75) + 0.5) / quantum + 0.5) * quantum - 0.5


@pytest.fixture
def quantized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Array]:
    """A checkpoint whose config has a QuantizationConfig, as a layer on TPUs writes it; the table's rows."""
    monkeypatch.setattr(host, "_check_supported", lambda _: None)
    table = TableConfig(30, 6, "users", combiner="sum", quantization_config=QUANTIZATION)
    layer = TPUEmbedding({"u": FeatureConfig(table)}, optimizer="sgd")
    rows = np.random.default_rng(2).standard_normal((30, 6)).astype(np.float32)
    (variable,) = layer.embedding_tables.values()
    variable.assign(rows)
    return tf.train.Checkpoint(layer=layer).write(str(tmp_path / "ckpt")), rows


@pytest.mark.sampled(1)
@pytest.mark.parametrize("storage", ["float32", "int8"])
def test_served_rows_are_those_that_training_looked_up(quantized: Any, tmp_path: Path, storage: str) -> None:
    """Each row is quantized before rows are combined; padding and ids without a row stay zeros, which is no bucket."""
    features = {
        "sum": {"table": "users"},
        "mean": {"table": "users", "combiner": "mean"},
        "zeros": {"table": "users", "input": "id", "out_of_vocabulary": "zeros"},
    }
    report = export_saved_model(quantized[0], tmp_path / "m", serving_config={"features": features}, storage=storage)
    ids = np.array([[1, 2, -1], [-1, -1, -1], [29, 29, 0]])
    found = capi.predict(report.path, {"sum": ids, "mean": ids, "zeros": np.array([4, 30, -5])})
    rows = _trained(quantized[1])
    total = np.stack([rows[1] + rows[2], np.zeros(6), 2 * rows[29] + rows[0]])
    np.testing.assert_allclose(found["sum"], total, atol=1e-6)
    np.testing.assert_allclose(found["mean"], total / [[2], [1], [3]], atol=1e-6)
    np.testing.assert_allclose(found["zeros"], [rows[4], np.zeros(6), np.zeros(6)], atol=1e-6)
    assert report.errors["users"].max_abs < 1e-6


def test_the_manifest_says_which_tables_were_quantized(quantized: Any, tmp_path: Path) -> None:
    report = export_saved_model(quantized[0], tmp_path / "m")
    manifest = Manifest.read(report.path)
    assert manifest is not None
    assert [table.quantization for table in manifest.tables] == [
        QuantizationEntry(num_buckets=16, lower=-0.5, upper=0.75)
    ]
    shown = CliRunner().invoke(describe_command, [str(report.path)])
    assert "16 levels, -0.5 to 0.75" in shown.stdout
    told = json.loads(CliRunner().invoke(describe_command, [str(report.path), "--json"]).stdout)
    assert told["tables"][0]["quantization"] == {"num_buckets": 16, "lower": -0.5, "upper": 0.75}


def test_a_serving_config_says_what_a_foreign_checkpoint_does_not(source: Any, tmp_path: Path) -> None:
    tables = {"table": {"quantization_config": {"num_buckets": 16, "lower": -0.5, "upper": 0.75}}}
    config = {"features": {"x": {"table": "table", "input": "id"}}, "tables": tables}
    report = export_saved_model(source[0], tmp_path / "m", serving_config=config)
    found = tf.saved_model.load(str(report.path)).signatures["serving_default"](x=tf.range(50, dtype=tf.int64))["x"]
    np.testing.assert_allclose(found, _trained(source[1]), atol=1e-6)


def test_two_quantizations_of_a_table_are_refused(quantized: Any, tmp_path: Path) -> None:
    tables = {"users": {"quantization_config": {"num_buckets": 15, "lower": -0.5, "upper": 0.75}}}
    config = {"features": {"u": {"table": "users"}}, "tables": tables}
    with refused(CheckpointMismatchError):
        export_saved_model(quantized[0], tmp_path / "m", serving_config=config)


def test_a_whole_model_looks_up_what_it_was_trained_with(quantized: Any, tmp_path: Path) -> None:
    import keras

    def build() -> Any:
        table = TableConfig(30, 6, "users", combiner="sum")
        ids = keras.Input((3,), dtype="int64", sparse=True, name="u")
        return keras.Model({"u": ids}, TPUEmbedding({"u": FeatureConfig(table)}, optimizer="sgd")({"u": ids}))

    report = export_saved_model(quantized[0], tmp_path / "m", model=build, storage="int8")
    signature = tf.saved_model.load(str(report.path)).signatures["serving_default"]
    (found,) = signature(u=tf.constant([[3, -1, -1], [4, 5, -1]], tf.int64)).values()
    rows = _trained(quantized[1])
    np.testing.assert_allclose(found, [rows[3], rows[4] + rows[5]], atol=1e-6)


def test_the_command_reports_errors_and_refuses_past_a_bound(source: Any, tmp_path: Path) -> None:
    (tmp_path / "serving.json").write_text(json.dumps({"features": {"x": {"table": "table"}}}))
    command = [source[0], str(tmp_path / "m"), "--serving-config", str(tmp_path / "serving.json")]
    command += ["--storage", "table=int8"]
    with refused(ExportError):
        CliRunner().invoke(export_command, [*command, "--max-error", "1e-5"], catch_exceptions=False)
    done = CliRunner().invoke(export_command, [*command, "--max-error", "0.1"])
    assert done.exit_code == 0, done.output
    assert "\n  table: int8, largest error 0.0" in done.stdout
    assert "of 50 rows" in done.stdout
