"""`require_finite`: nothing with a NaN or an infinity is published, whatever it is stored as, and whatever was done before."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from click.testing import CliRunner

from tests.support.export.fakes import Array, random_table, write_checkpoint
from tests.support.export.in_process import exports_in_this_process
from tests.support.messages import refused, said
from tpuembed import ExportCallback, FeatureConfig, TableConfig, TPUEmbedding, export_saved_model
from tpuembed.errors import ExportError
from tpuembed.export.plan import planner
from tpuembed.export.plan.plan import ShardTask
from tpuembed.export.stream import resume_log, shard
from tpuembed.manifest import Manifest
from tpuembed_cli.main import cli

ROWS, DIM = 1000, 8
CONFIG = {"features": {"user": {"table": "users", "input": "id"}}}


def spoilt(value: float, row: int = 700, dtype: Any = np.float32) -> Array:
    rows = random_table(ROWS, DIM, dtype)
    rows[row, 3] = value
    return rows


def export(folder: Path, table: Array | None = None, **options: Any) -> Any:
    if table is not None:
        write_checkpoint(folder / "ckpt", {"users": table})
    options = {"require_finite": True, "workers": 1, **options}
    with exports_in_this_process():
        return export_saved_model(folder / "ckpt", folder / "rec", serving_config=CONFIG, **options)


def published(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "rec").glob("[0-9]*"))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("storage", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.sampled(3)
def test_every_source_and_storage(tmp_path: Path, dtype: Any, storage: str, value: float) -> None:
    with refused(ExportError, match="'users': row 700"):
        export(tmp_path, spoilt(value, dtype=dtype), storage=storage)
    assert published(tmp_path) == []


def test_finite_tables_are_published(tmp_path: Path) -> None:
    rows = random_table(ROWS, DIM)
    rows[0] = np.finfo(np.float32).max
    rows[1] = -np.finfo(np.float32).max
    rows[2] = np.float32(1e-45)
    report = export(tmp_path, rows)
    manifest = Manifest.read(report.path)
    assert manifest is not None
    assert manifest.finite
    loaded = tf.saved_model.load(str(report.path))
    answer = loaded.signatures["serving_default"](user=tf.range(ROWS, dtype=tf.int64))["user"]
    np.testing.assert_array_equal(answer, rows)


def test_it_is_off_where_nobody_asks(tmp_path: Path) -> None:
    manifest = Manifest.read(export(tmp_path, spoilt(np.nan), require_finite=False).path)
    assert manifest is not None
    assert not manifest.finite


def test_the_clipping_of_quantized_training_hides_nothing(tmp_path: Path) -> None:
    quantized = {"num_buckets": 16, "lower": -1.0, "upper": 1.0}
    config = CONFIG | {"tables": {"users": {"quantization_config": quantized}}}
    write_checkpoint(tmp_path / "ckpt", {"users": spoilt(np.inf)})
    with exports_in_this_process(), refused(ExportError, match="row 700"):
        export_saved_model(
            tmp_path / "ckpt", tmp_path / "rec", serving_config=config, storage="int8", require_finite=True
        )


@pytest.fixture
def in_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten shards of 100 rows, each recorded at once."""
    monkeypatch.setattr(planner, "_SHARD_BYTES", 100 * DIM * 4)
    monkeypatch.setattr(resume_log, "_SECONDS_BETWEEN_FLUSHES", 0)


def recorded_in(folder: Path) -> Callable[[int, int], None]:
    """Wait until every finished shard is on the disk."""

    def wait(done: int, total: int) -> None:
        (record,) = (folder / "rec").glob(".staging-*/tables/record")
        while len(record.read_bytes().splitlines()) <= done / (100 * DIM * 4):
            time.sleep(0.01)

    return wait


@pytest.mark.usefixtures("in_shards")
def test_a_finished_shard_stays_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check resumes as the export does: the shards before the bad row are neither written nor read again."""
    written, write = list[int](), shard.write_shard

    def noting(task: ShardTask, *arguments: Any) -> Any:
        written.append(task.start)
        return write(task, *arguments)

    monkeypatch.setattr(shard, "write_shard", noting)
    with refused(ExportError, match="row 950.* 9 finished shards"):
        export(tmp_path, spoilt(np.nan, row=950), on_progress=recorded_in(tmp_path))
    assert written == list(range(0, ROWS, 100))
    with refused(ExportError, match="row 950"):
        export(tmp_path)
    assert written[10:] == [900]
    report = export(tmp_path, require_finite=False)
    assert report.bytes_reused == 900 * DIM * 4


@pytest.mark.usefixtures("in_shards")
def test_a_shard_that_was_not_checked_is_read_again(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "ckpt", {"users": spoilt(np.nan, row=50)})

    class Stop(Exception):  # noqa: N818 - no error
        pass

    wait = recorded_in(tmp_path)

    def stop(done: int, total: int) -> None:
        wait(done, total)
        if done > total / 2:
            raise Stop

    with pytest.raises(Stop):
        export(tmp_path, require_finite=False, on_progress=stop)
    with refused(ExportError, match="row 50"):
        export(tmp_path, on_progress=wait)
    assert published(tmp_path) == []


def test_worker_processes_refuse_too(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "ckpt", {"users": spoilt(np.nan)})
    with refused(ExportError, match="row 700"):
        export_saved_model(tmp_path / "ckpt", tmp_path / "rec", serving_config=CONFIG, require_finite=True)
    assert published(tmp_path) == []


def test_the_command_names_its_option(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "ckpt", {"users": spoilt(np.inf)})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    arguments = ["export", str(tmp_path / "ckpt"), str(tmp_path / "rec")]
    arguments += ["--serving-config", str(tmp_path / "config.json")]
    with exports_in_this_process():
        failed = CliRunner().invoke(cli, [*arguments, "--require-finite"])
        assert CliRunner().invoke(cli, arguments).exit_code == 0
    assert failed.exit_code == 1
    said(failed.stderr)


# ---- Models


def model_of(table: Array, kernel: float = 0.5) -> Any:
    ids = keras.Input((), dtype="int64", name="user")
    layer = TPUEmbedding(FeatureConfig(TableConfig(20, 4, "users")), optimizer="adagrad")
    model = keras.Model(ids, keras.layers.Dense(2, name="score")(layer(ids)), name="ranker")
    model.compile("sgd", "mse")
    layer.assign_rows("users", 0, table)
    weights = np.full((4, 2), 0.5, np.float32)
    weights[2, 1] = kernel
    model.get_layer("score").kernel.assign(weights)
    return model


@pytest.mark.parametrize("kernel", [np.nan, -np.inf])
def test_a_dense_weight_of_a_live_model(tmp_path: Path, kernel: float) -> None:
    model = model_of(np.ones((20, 4), np.float32), kernel)
    with refused(ExportError, match=r"\[2, 1\]"):
        export_saved_model(model, tmp_path / "rec", require_finite=True)
    assert published(tmp_path) == []
    assert export_saved_model(model, tmp_path / "rec").version == 1


def test_a_dense_weight_of_a_checkpoint(tmp_path: Path) -> None:
    model = model_of(np.ones((20, 4), np.float32), np.nan)
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "ckpt"))

    def build() -> Any:
        ids = keras.Input((), dtype="int64", name="user")
        layer = TPUEmbedding(FeatureConfig(TableConfig(20, 4, "users")), optimizer="adagrad")
        return keras.Model(ids, keras.layers.Dense(2, name="score")(layer(ids)), name="ranker")

    with exports_in_this_process():
        with refused(ExportError, match=r"\[2, 1\]"):
            export_saved_model(path, tmp_path / "rec", model=build, require_finite=True)
        assert export_saved_model(path, tmp_path / "rec", model=build).version == 1


def test_a_table_of_a_live_model(tmp_path: Path) -> None:
    table = np.ones((20, 4), np.float32)
    table[13] = np.nan
    with refused(ExportError, match="'users': row 13"):
        export_saved_model(model_of(table), tmp_path / "rec", require_finite=True)


def test_the_callback_asks_for_finite_values_by_itself(tmp_path: Path) -> None:
    table = np.ones((20, 4), np.float32)
    table[13] = np.inf

    def fit(**options: Any) -> list[Any]:
        model = model_of(table)
        callback = ExportCallback(tmp_path / "rec", keep=2, **options)
        model.fit(np.arange(2), np.ones((2, 2)), epochs=3, verbose=0, callbacks=[callback])
        return callback.reports

    with refused(ExportError, match="'users': row 13"):
        fit()
    assert published(tmp_path) == []
    reports = fit(require_finite=False)
    assert [report.removed for report in reports] == [(), (), (1,)]
    assert published(tmp_path) == ["2", "3"]
