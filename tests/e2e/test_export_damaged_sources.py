"""A bit that is flipped in a table's bytes never becomes a version, however the table's rows lie in its files."""

import dataclasses
import json
import re
import shutil
import tracemalloc
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import google_crc32c
import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.checkpoint.partitioned import partitioned
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding
from tpuembed.checkpoint.keras.archive import check_crc32
from tpuembed.checkpoint.keras.weights import open_window
from tpuembed.errors import CheckpointCorruptError
from tpuembed.export import export_saved_model
from tpuembed.formats.tensor_bundle import Bundle

pytestmark = pytest.mark.usefixtures("exports_in_this_process")

GOLDEN = Path(__file__).parents[1] / "golden" / "tpu"
SPARSE_CORES = ("sparse_cores_1_sgd", "sparse_cores_2_adagrad_momentum", "sparse_cores_8_adam")
HOSTS = ("hosts_2_adagrad", "hosts_4_ftrl")


def copy_of(name: str, folder: Path) -> Path:
    """A golden's prefix, in `folder`."""
    shutil.copytree(GOLDEN / name, folder / name)
    return folder / name / json.loads((GOLDEN / name / "truth.json").read_text())["checkpoint"]


def flip(prefix: Path, key: str, part: int = -1, byte: int = -1) -> str:
    """Flip one bit of a slice of tensor `key`; what an error must say of it, by an index that is read with its bytes."""
    with Bundle.open(prefix) as bundle:
        piece = bundle.entries[key].parts()[part]
        path = Path(str(bundle.data_path(piece.shard)))
    data = bytearray(path.read_bytes())
    data[piece.offset + byte % piece.size] ^= 16
    path.write_bytes(data)
    found = google_crc32c.value(bytes(data[piece.offset : piece.offset + piece.size]))
    return re.escape(
        f"data file {path}: tensor {key!r}: bytes [{piece.offset}, {piece.offset + piece.size}) have CRC32C "
        f"{found:#010x}, but the index has {piece.crc32c:#010x}. Restore it from another copy."
    )


def lookups(*tables: str) -> dict[str, Any]:
    return {"features": {f"feature_{n}": {"table": table, "input": "id"} for n, table in enumerate(tables)}}


def export(prefix: Path, tables: tuple[str, ...], options: Mapping[str, Any] | None = None) -> Path:
    """The version that was made of `tables`."""
    return export_saved_model(
        prefix, prefix.parent / "model", serving_config=lookups(*tables), checkpoint_options=options, workers=1
    ).path


def check_refused(
    prefix: Path, message: str, tables: tuple[str, ...], options: Mapping[str, Any] | None = None
) -> None:
    with pytest.raises(CheckpointCorruptError, match=f"^{message}$"):
        export(prefix, tables, options)
    assert [path.name for path in (prefix.parent / "model").iterdir() if path.name.isdecimal()] == []


def key_of(prefix: Path, ending: str) -> str:
    """The one tensor whose key ends so."""
    with Bundle.open(prefix) as bundle:
        (key,) = (key for key in bundle.entries if key.endswith(f"{ending}/.ATTRIBUTES/VARIABLE_VALUE"))
    return key


@pytest.mark.parametrize(("name", "part"), list(zip(SPARSE_CORES, (0, 0, -1), strict=True)))
def test_a_flipped_bit_in_a_stack_is_refused(tmp_path: Path, name: str, part: int) -> None:
    prefix = copy_of(name, tmp_path)
    check_refused(prefix, flip(prefix, key_of(prefix, "/lone"), part), ("lone", "a"))


@pytest.mark.parametrize(("name", "part"), list(zip(HOSTS, (0, -1), strict=True)))
def test_a_flipped_bit_in_a_hosts_table_is_refused(tmp_path: Path, name: str, part: int) -> None:
    prefix = copy_of(name, tmp_path)
    check_refused(prefix, flip(prefix, key_of(prefix, "/a"), part), ("a",))


@pytest.mark.parametrize("strategy", ["mod", "div"])
def test_a_flipped_bit_in_a_partition_is_refused(tmp_path: Path, strategy: str) -> None:
    prefix = copy_of(f"partitioned_{strategy}", tmp_path)
    with Bundle.open(prefix) as bundle:
        key = next(key for key, entry in bundle.entries.items() if entry.slices)
    check_refused(prefix, flip(prefix, key, 1), (key,), {"partition_strategy": strategy})


def test_a_flipped_bit_in_slices_of_columns_is_refused(tmp_path: Path) -> None:
    prefix = partitioned(tmp_path, "-:0,1", "-:1,1")
    check_refused(prefix, flip(prefix, "emb", 1), ("emb",))


def test_slices_by_rows_and_columns(tmp_path: Path) -> None:
    """As TensorFlow's own sharding policy cuts a variable."""
    options = tf.train.CheckpointOptions(
        experimental_sharding_callback=tf.train.experimental.MaxShardSizePolicy(max_shard_size=200)
    )
    table = np.random.default_rng(0).normal(size=(5, 70)).astype(np.float32)
    prefix = Path(tf.train.Checkpoint(table=tf.Variable(table)).write(str(tmp_path / "ckpt"), options=options))
    key = key_of(prefix, "table")
    with Bundle.open(prefix) as bundle:
        assert all(piece.shape[1] < 70 for piece in bundle.entries[key].slices)
    check_refused(prefix, flip(prefix, key, 2), ("table",))


def test_dense_weights_in_keras_archives(tmp_path: Path) -> None:
    """They are compared before they are restored, also where the tables are those of an earlier version."""

    def build() -> Any:
        ids = keras.Input((), dtype="int64", name="ids")
        rows = TPUEmbedding(FeatureConfig(TableConfig(6, 4, "t")), optimizer="sgd")(ids)
        return keras.Model(ids, keras.layers.Dense(1, name="score")(rows))

    model = build()
    model.save(tmp_path / "m.keras")
    kernel = model.get_layer("score").kernel.numpy().tobytes()
    data = bytearray((tmp_path / "m.keras").read_bytes())
    assert data.count(kernel) == 1
    export_saved_model(tmp_path / "m.keras", tmp_path / "model", model=build, workers=1)
    data[data.index(kernel) + 5] ^= 1
    (tmp_path / "m.keras").write_bytes(data)
    with pytest.raises(CheckpointCorruptError, match="its bytes have the CRC32"):
        export_saved_model(tmp_path / "m.keras", tmp_path / "model", model=build, workers=1)
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["1"]


def test_archives_are_compared_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "m.keras"
    with zipfile.ZipFile(path, "w") as archive, archive.open("model.weights.h5", "w") as member:
        for _ in range(64):
            member.write(bytes(1 << 20))
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("model.weights.h5")
    window = open_window(path)
    start = info.header_offset + 30 + len(info.filename)
    weights = dataclasses.replace(window, start=start, size=info.file_size)
    tracemalloc.start()
    try:
        check_crc32(weights, info.CRC)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()
        window.file.close()


@pytest.mark.parametrize("name", [SPARSE_CORES[2], HOSTS[1]])
def test_what_was_not_read_may_be_damaged(tmp_path: Path, name: str) -> None:
    """Slots, and tables that lie elsewhere."""
    prefix = copy_of(name, tmp_path)
    with Bundle.open(prefix) as bundle:
        others = [key for key, entry in bundle.entries.items() if len(entry.shape) == 2 and "/lone/" not in key]
    for key in others:
        flip(prefix, key)
    version = export(prefix, ("lone",))
    serve = tf.saved_model.load(str(version)).signatures["serving_default"]
    truth = np.load(prefix.parent / json.loads((prefix.parent / "truth.json").read_text())["tables"]["lone"]["rows"])
    np.testing.assert_array_equal(serve(feature_0=tf.range(len(truth), dtype=tf.int64))["feature_0"], truth)
