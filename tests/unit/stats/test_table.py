"""Statistics beside numpy's on whole tables."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, example, given, settings

from tests.support.checkpoint.bundles import write
from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_saved_model
from tpuembed.config import ServingConfig
from tpuembed.errors import ConfigError, UnknownTableError
from tpuembed.stats import PathStats, TableStats, read_stats, stats_page, table

ODD = st.sampled_from([0.0, -0.0, 1.0, np.nan, np.inf, -np.inf, 1e-45, 3e38, -3e38, 1e-20, 65520.0])
VALUES = st.floats(width=32) | ODD
TABLES = hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=12), elements=VALUES)


def stats_of(folder: Path, rows: Any) -> TableStats:
    write(folder / "ckpt", {"table": rows})
    (found,) = read_stats(folder / "ckpt").tables
    return found


def compare(found: TableStats, rows: Any) -> None:
    """Compare with figures of the whole table in float64."""
    wide = rows.astype(np.float64)
    nan, infinite = np.isnan(wide).any(1), np.isinf(wide).any(1)
    assert (found.nan.count, list(found.nan.first)) == (nan.sum(), np.flatnonzero(nan)[:10].tolist())
    assert (found.infinite.count, list(found.infinite.first)) == (
        infinite.sum(),
        np.flatnonzero(infinite)[:10].tolist(),
    )
    finite = ~nan & ~infinite
    norms = np.linalg.norm(wide[finite], axis=1)
    assert found.zero_rows == (norms == 0).sum()
    assert (found.rows, found.dim, found.bytes) == (*rows.shape, rows.nbytes)
    if not finite.any():
        assert found.norms is None
        assert found.largest == ()
        return
    assert found.norms is not None
    given = (found.norms.min, found.norms.max, found.norms.mean)
    np.testing.assert_allclose(given, (norms.min(), norms.max(), norms.mean()), rtol=1e-12)
    for percent, value in found.norms.percentiles.items():
        np.testing.assert_allclose(value, np.percentile(norms, percent, method="inverted_cdf"), rtol=0.00501)
    assert sum(one.rows for one in found.norms.histogram) == (norms > 0).sum()
    for one in found.norms.histogram:
        within = (norms >= one.start * (1 - 1e-9)) & (norms < one.stop * (1 + 1e-9))
        assert one.rows <= within.sum()
    order = sorted(zip(-norms, np.flatnonzero(finite), strict=True))[:10]
    np.testing.assert_allclose([one.norm for one in found.largest], [-norm for norm, _ in order], rtol=1e-12)
    if len(set(norms)) == len(norms):
        assert [one.row for one in found.largest] == [row for _, row in order]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=TABLES)
@example(rows=np.full((11, 3), np.nan, np.float32))
@example(rows=np.zeros((3, 2), np.float32))
def test_rows_of_any_values(tmp_path: Path, rows: Any) -> None:
    found = stats_of(tmp_path, rows)
    compare(found, rows)
    json.dumps(PathStats("path", (found,)).to_dict(), allow_nan=False)


@pytest.mark.parametrize("shape", [(0, 4), (1, 4), (1, 1), (5, 0), (0, 0)])
def test_tables_of_few_rows(tmp_path: Path, shape: tuple[int, int]) -> None:
    rows = np.ones(shape, np.float32)
    found = stats_of(tmp_path, rows)
    compare(found, rows)
    assert all(one.error is not None and one.error.max_abs == 0 for one in found.storage.values())
    stats_page(PathStats("path", (found,)))


@pytest.mark.parametrize("strategy", ["div", "mod"])
def test_shards_of_different_sizes(tmp_path: Path, strategy: str) -> None:
    """A partitioned variable of TensorFlow 1, whose partitions have 7, 6 and 6 rows. Rows are numbered by ids."""
    rows = np.random.default_rng(5).standard_normal((19, 3)).astype(np.float32)
    rows[6], rows[7, 0], rows[18] = np.inf, np.nan, 100
    parts = {"div": [range(7), range(7, 13), range(13, 19)], "mod": [range(part, 19, 3) for part in range(3)]}
    kept = rows[np.concatenate(parts[strategy])]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        partitioner = tf.compat.v1.fixed_size_partitioner(3)
        tf.compat.v1.get_variable("table", initializer=tf.constant(kept), partitioner=partitioner)
        session.run(tf.compat.v1.global_variables_initializer())
        prefix = tf.compat.v1.train.Saver().save(session, str(tmp_path / "sharded"), write_meta_graph=False)
    (found,) = read_stats(prefix, checkpoint_options={"partition_strategy": strategy}).tables
    compare(found, rows)
    assert (found.infinite.first, found.nan.first, found.largest[0].row) == ((6,), (7,), 18)


@pytest.mark.parametrize("dtype", ["float32", ml_dtypes.bfloat16, "float16"])
def test_tables_of_several_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: Any) -> None:
    monkeypatch.setattr(table, "_PIECE_BYTES", 1000)
    random = np.random.default_rng(1)
    rows = (random.lognormal(0, 2, (5000, 1)) * random.standard_normal((5000, 5))).astype(dtype)
    rows[17], rows[4000, 2], rows[3:2000:100] = np.nan, -np.inf, 0
    calls: list[tuple[int, int]] = []
    write(tmp_path / "ckpt", {"table": rows})
    (found,) = read_stats(tmp_path / "ckpt", on_progress=lambda *at: calls.append(at)).tables
    compare(found, rows)
    assert calls == sorted(calls)
    assert calls[-1] == (rows.nbytes, rows.nbytes)


def test_errors_of_storage_types(tmp_path: Path) -> None:
    rows = np.random.default_rng(3).normal(0, 2, (1000, 12)).astype(np.float32)
    wide = rows.astype(np.float64)
    low, high = wide.min(1, keepdims=True), wide.max(1, keepdims=True)
    scale, centre = (high - low) / 254, (low + high) / 2
    stored = {
        "bfloat16": rows.astype(ml_dtypes.bfloat16).astype(np.float64),
        "float16": rows.astype(np.float16).astype(np.float64),
        "int8": np.round((wide - centre) / scale) * scale + centre,
    }
    found = stats_of(tmp_path, rows).storage
    assert [*found] == ["float32", "bfloat16", "float16", "int8"]
    assert found["float32"].error is not None
    assert found["float32"].error.max_abs == 0
    for name, values in stored.items():
        error, difference = found[name].error, np.abs(values - wide)
        assert error is not None
        cosine = (values * wide).sum(1) / np.linalg.norm(values, axis=1) / np.linalg.norm(wide, axis=1)
        np.testing.assert_allclose(error.max_abs, difference.max(), rtol=1e-4)
        np.testing.assert_allclose(error.rms, np.sqrt((difference**2).mean()), rtol=1e-4)
        assert (error.cosine, error.min_cosine) == pytest.approx((cosine.mean(), cosine.min()), rel=1e-6)


def test_storage_types_that_cannot_hold_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_PIECE_BYTES", 256)
    rows = np.ones((100, 4), np.float32)
    rows[70, 1], rows[88, 2], rows[89, 2] = 1e30, np.nan, np.inf
    found = stats_of(tmp_path, rows).storage
    assert [(name, one.reason) for name, one in found.items()] == [
        ("float32", ""),
        ("bfloat16", ""),
        ("float16", "row 70 contains 1e+30, which overflows float16"),
        ("int8", "row 88 contains nan, which int8 cannot hold"),
    ]


@pytest.mark.parametrize("optimizer", ["adagrad", "adam", "ftrl", "adagrad_momentum", "sgd"])
def test_untouched_rows(tmp_path: Path, optimizer: str) -> None:
    import keras

    layer = TPUEmbedding(FeatureConfig(TableConfig(300, 4, "videos")), optimizer=optimizer)
    inputs = keras.Input((), dtype="int64")
    model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))
    model.compile("sgd", "mse")
    ids = np.array([3, 14, 159, 265])
    model.fit(ids, np.ones((4, 1)), verbose=0)
    checkpoint = tf.train.Checkpoint(model=model).write(str(tmp_path / "ckpt"))
    (found,) = read_stats(checkpoint).tables
    assert found.untouched.count == (None if optimizer == "sgd" else 296)
    assert bool(found.untouched.reason) == (optimizer == "sgd")


def test_others_checkpoints_do_not_tell_which_rows_are_untouched() -> None:
    golden = Path(__file__).parents[2] / "golden" / "tfrs" / "keras_adam"
    for found in read_stats(golden).tables:
        assert found.slots
        assert found.untouched.count is None
        assert found.untouched.reason == (
            f"the checkpoint does not say which values {', '.join(found.slots)} had at first"
        )


@pytest.mark.parametrize("storage", ["float32", "int8"])
def test_exports(tmp_path: Path, storage: str) -> None:
    """int8 rows are those that are looked up."""
    rows = np.random.default_rng(4).standard_normal((50, 8)).astype(np.float32)
    write(tmp_path / "ckpt", {"videos": rows})
    config = ServingConfig.parse({"features": {"watched": {"table": "videos"}}})
    export_saved_model(tmp_path / "ckpt", tmp_path / "m", serving_config=config, storage=storage, workers=1)
    (found,) = read_stats(tmp_path / "m").tables
    assert found.rows == 50
    norms = np.linalg.norm(rows, axis=1)
    assert found.norms is not None
    np.testing.assert_allclose(found.norms.max, norms.max(), rtol=0.02 if storage == "int8" else 1e-6)
    assert found.untouched.reason == "exports have no slots"


def test_refusals(tmp_path: Path) -> None:
    write(tmp_path / "ckpt", {"videos": np.ones((3, 2), np.float64), "users": np.ones((3, 2), np.float32)})
    with refused(UnknownTableError):
        read_stats(tmp_path / "ckpt", "user")
    with refused(ConfigError):
        read_stats(tmp_path / "ckpt")
    assert [one.name for one in read_stats(tmp_path / "ckpt", "users").tables] == ["users"]


MEMORY = """
import sys, threading
from tpuembed.stats import read_stats

def kilobytes(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))

(small,) = read_stats(sys.argv[1]).tables
before = kilobytes("VmRSS")
(found,) = read_stats(sys.argv[2]).tables
assert found.zero_rows == found.rows == 1 << 22, found
assert "tensorflow" not in sys.modules
print(kilobytes("VmHWM"), kilobytes("VmHWM") - before)
"""


def test_memory_is_bounded(tmp_path: Path) -> None:
    """A sparse file of 1 GB."""
    from tpuembed.formats.tensor_bundle import Entry, shard_path, write_index

    rows, size = 1 << 22, 1 << 30
    small, large = tmp_path / "small", tmp_path / "large"
    write(small, {"table": np.ones((10, 64), np.float32)})
    write_index(tmp_path / "large.index", {"table": Entry(dtype="float32", shape=(rows, 64), size=size)}, 1)
    with open(shard_path(large, 0, 1), "wb") as file:
        file.truncate(size)
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(small), str(large)], capture_output=True, text=True, check=True
    )
    peak, grown = (int(word) * 1024 for word in done.stdout.split())
    assert peak < 300 << 20
    assert grown < 150 << 20
