"""Rows of exports, against the lookups that TensorFlow makes in them, and against the checkpoint they were made of."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from click.testing import CliRunner

from tests.support.checkpoint.bundles import write
from tests.support.messages import refused
from tpuembed import export_saved_model
from tpuembed.checkpoint.tools import diff_checkpoints, read_rows
from tpuembed.errors import CheckpointCorruptError, ConfigError, UnknownTableError
from tpuembed_cli.main import cli

ROWS = {"users": 40, "videos": 25, "wide": 30}
DIMS = {"users": 6, "videos": 6, "wide": 12}


@pytest.fixture
def tables() -> dict[str, Any]:
    random = np.random.default_rng(3)
    return {name: random.normal(size=(rows, DIMS[name])).astype(np.float32) for name, rows in ROWS.items()}


def exported(folder: Path, values: dict[str, Any], **options: Any) -> Path:
    write(folder / "ckpt", values)
    features = {name: {"table": name, "input": "id"} for name in values}
    return export_saved_model(
        folder / "ckpt", folder / "model", serving_config={"features": features}, workers=1, **options
    ).path


def looked_up(version: Path, table: str, ids: Any) -> Any:
    """What TensorFlow answers."""
    loaded = tf.saved_model.load(str(version))
    signature = loaded.signatures["serving_default"]
    inputs = {name: tf.constant(ids if name == table else np.zeros_like(ids), tf.int64) for name in ROWS}
    return signature(**inputs)[table].numpy()


@pytest.mark.nightly
def test_int8_is_compared_decoded(tmp_path: Path, tables: dict[str, Any]) -> None:
    version = exported(tmp_path, tables, storage="int8")
    for table in diff_checkpoints(tmp_path / "ckpt", version).tables:
        decoded = looked_up(version, table.name, np.arange(ROWS[table.name]))
        assert table.dtypes == ("float32", "float32")
        assert table.largest_abs is not None
        assert table.largest_abs.by == pytest.approx(np.abs(tables[table.name] - decoded).max())


def test_what_an_export_does_not_have_is_refused(tmp_path: Path, tables: dict[str, Any]) -> None:
    version = exported(tmp_path, tables)
    with refused(UnknownTableError, match="no table 'video'"):
        read_rows(version, "video")
    with refused(UnknownTableError, match="no slot 'momenta'"):
        read_rows(version, "videos", slot="momenta")
    with refused(ConfigError, match="partition_strategy"):
        read_rows(version, "videos", checkpoint_options={"partition_strategy": "div"})
    [data] = [path for path in (version / "variables").iterdir() if path.stat().st_size == 4 * 12 * 30]
    data.write_bytes(data.read_bytes()[:-100])
    with refused(CheckpointCorruptError):
        read_rows(version, "wide", 25, 30)


@pytest.mark.nightly
def test_serving_a_version_names_the_command_that_serves_its_model(tmp_path: Path, tables: dict[str, Any]) -> None:
    version = exported(tmp_path, tables)
    shown = CliRunner().invoke(cli, ["serve", str(version), "--rest-port", "0"])
    assert shown.exit_code == 1
    assert shown.stderr.rstrip().endswith(f"It is version 1. Run: tpuembed serve {version.parent}")
    moved = version.rename(tmp_path / "my export")
    shown = CliRunner().invoke(cli, ["serve", str(moved), "--rest-port", "0"])
    assert "Move the model into a folder named by an integer" in shown.stderr
