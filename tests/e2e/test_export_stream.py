"""Tables streamed beside a graph that TensorFlow saved: TensorFlow loads the result and answers the source's rows."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tests.support.export.fakes import Array, random_table, write_checkpoint, write_large_table
from tests.support.export.streamed import export
from tests.support.export.writers import stream_tables
from tests.support.serving.process import SCRIPT, Fork
from tpuembed.checkpoint import open_checkpoint
from tpuembed.export.plan.planner import plan_export
from tpuembed.export.stream.engines import choose_engine
from tpuembed.export.stream.shard import Source
from tpuembed.tensor_bundle import crc, shard_path

MIB = 1 << 20


def small_tables() -> dict[str, Array]:
    return {
        "users": random_table(4000, 24, seed=1),
        "ads": random_table(100, 24, ml_dtypes.bfloat16, seed=2),
        "movies": random_table(333, 7, np.float16, seed=3),
    }


@pytest.fixture(scope="module", params=[False, True], ids=["tables only", "with a dense variable"])
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Array], bool]:
    """A version that no test changes, its tables, and whether it has a dense variable."""
    folder, tables = tmp_path_factory.mktemp("exported"), small_tables()
    infos = write_checkpoint(folder / "ckpt", tables)
    path, _ = export(folder / "ckpt", infos, folder / "model", dense=request.param, workers=2)
    return path, tables, request.param


def test_tensorflow_answers_the_sources_rows(exported: tuple[Path, dict[str, Array], bool]) -> None:
    path, tables, dense = exported
    stacked = np.concatenate([tables["ads"].astype(np.float32), tables["users"]])
    answers = tf.saved_model.load(str(path)).signatures["serving_default"](ids=tf.range(333, dtype=tf.int64))
    bias = np.float32(0.25 if dense else 0)
    np.testing.assert_array_equal(answers["stack_float32_24"], stacked[:333] + bias)
    np.testing.assert_array_equal(answers["stack_float32_7"], tables["movies"].astype(np.float32) + bias)


def test_tensorflow_reads_the_bundle(exported: tuple[Path, dict[str, Array], bool]) -> None:
    path, tables, dense = exported
    reader = tf.train.load_checkpoint(str(path / "variables" / "variables"))
    stacked = np.concatenate([tables["ads"].astype(np.float32), tables["users"]])
    np.testing.assert_array_equal(reader.get_tensor("stack_float32_24/.ATTRIBUTES/VARIABLE_VALUE"), stacked)
    names = {"stack_float32_7", "stack_float32_24", *(["bias"] if dense else [])}
    keys = {f"{name}/.ATTRIBUTES/VARIABLE_VALUE" for name in names}
    assert set(reader.get_variable_to_shape_map()) == {"_CHECKPOINTABLE_OBJECT_GRAPH", *keys}


def test_nothing_but_the_version_is_left(exported: tuple[Path, dict[str, Array], bool]) -> None:
    path, _, _ = exported
    assert [child.name for child in path.parent.iterdir()] == ["1"]
    assert sorted(child.name for child in (path / "variables").iterdir()) == [
        "variables.data-00000-of-00003",
        "variables.data-00001-of-00003",
        "variables.data-00002-of-00003",
        "variables.index",
    ]
    assert not (path / "tables").exists()
    assert (path / "variables" / "variables.data-00001-of-00003").stat().st_size == 333 * 7 * 4
    assert (path / "variables" / "variables.data-00002-of-00003").stat().st_size == 4100 * 24 * 4


def test_the_manifest_says_what_lies_where(exported: tuple[Path, dict[str, Array], bool]) -> None:
    path, tables, _ = exported
    manifest = json.loads((path / "assets.extra" / "tpuembed.json").read_text())
    users = next(table for table in manifest["tables"] if table["name"] == "users")
    stack = next(stack for stack in manifest["stacks"] if stack["name"] == users["stack"])
    with open(path / stack["file"], "rb") as file:
        file.seek(stack["offset"])
        data = file.read(stack["size"])
    rows = np.frombuffer(data, np.float32).reshape(stack["rows"], stack["dim"])
    offset = users["row_offset"]
    np.testing.assert_array_equal(rows[offset : offset + users["rows"]], tables["users"])
    assert stack["crc32c"] == crc.value(data)
    dtypes = {table["name"]: table["dtype"] for table in manifest["tables"]}
    assert dtypes == {"users": "float32", "ads": "bfloat16", "movies": "float16"}


@pytest.mark.nightly
def test_a_checkpoint_that_tensorflow_cut_in_slices(tmp_path: Path) -> None:
    """Rows and columns over many slices and data files, bfloat16 and float32, by the reader that users get."""
    tables = {"wide": random_table(600, 200), "half": random_table(5000, 16, ml_dtypes.bfloat16)}
    sharding = tf.train.experimental.MaxShardSizePolicy(50_000)
    options = tf.train.CheckpointOptions(experimental_sharding_callback=sharding)
    variables = {name: tf.Variable(tf.constant(values)) for name, values in tables.items()}
    prefix = tf.train.Checkpoint(**variables).write(str(tmp_path / "ckpt"), options=options)
    assert len(list(tmp_path.glob("ckpt.data-*"))) > 5
    with open_checkpoint(prefix) as checkpoint:
        plan = plan_export(list(checkpoint.tables().values()), workers=2, max_memory_bytes=100_000)
        source = Source(path=checkpoint.path, fingerprint=checkpoint.fingerprint())
    stream_tables(plan, source, tmp_path / "out", choose_engine("local", plan.workers))
    for name, stack in (("wide", "stack_float32_200"), ("half", "stack_float32_16")):
        assert (tmp_path / "out" / f"{stack}.data").read_bytes() == tables[name].astype(np.float32).tobytes()


def test_tensorflow_notices_a_flipped_byte(tmp_path: Path) -> None:
    """So the checksum that was combined from the shards' is the one TensorFlow computes."""
    infos = write_checkpoint(tmp_path / "ckpt", {"t": random_table(3000, 8)})
    path, _ = export(tmp_path / "ckpt", infos, tmp_path / "model")
    tf.saved_model.load(str(path))
    data = path / "variables" / "variables.data-00001-of-00002"
    rows = data.read_bytes()
    for position in (0, 28_800, len(rows) - 1):
        data.write_bytes(rows[:position] + bytes([rows[position] ^ 1]) + rows[position + 1 :])
        with pytest.raises(tf.errors.DataLossError, match=r"(?i)checksum"):
            tf.saved_model.load(str(path))


@pytest.mark.nightly
def test_two_exports_at_once_get_two_versions(tmp_path: Path) -> None:
    """Each in a process of its own, started together."""
    tables, config, log = {"t": random_table(50_000, 16)}, tmp_path / "config.json", tmp_path / "log"
    write_checkpoint(tmp_path / "ckpt", tables)
    log.touch()
    config.write_text(json.dumps({"features": {"t": {"table": "t", "input": "id"}}}))
    command = [str(SCRIPT), "export", str(tmp_path / "ckpt"), str(tmp_path / "model"), "--serving-config", str(config)]
    running = [Fork(command, log) for _ in range(2)]
    assert [process.wait(240) for process in running] == [0, 0], log.read_text()
    assert sorted(child.name for child in (tmp_path / "model").iterdir()) == ["1", "2"]
    for version in "12":
        data = tmp_path / "model" / version / "variables" / "variables.data-00001-of-00002"
        assert data.read_bytes() == tables["t"].tobytes()


@pytest.mark.parametrize("size", [256 * MIB, 2048 * MIB])
@pytest.mark.nightly
def test_a_large_table_streams_in_little_memory(tmp_path: Path, size: int) -> None:
    """Workers stay under 64 MB whatever the table's size, and TensorFlow gathers the very same rows."""
    rows, prefix = size // 256, tmp_path / "ckpt"
    infos = write_large_table(prefix, rows, 64)
    path, streamed = export(prefix, infos, tmp_path / "model", workers=2)
    assert streamed.bytes_written == size
    assert streamed.worker_peak_rss_bytes < 64_000_000
    ids = np.sort(np.random.default_rng(6).choice(rows, 20_000, replace=False))
    source = np.memmap(shard_path(prefix, 0, 1), np.float32, "r", shape=(rows, 64))
    gather = tf.saved_model.load(str(path)).signatures["serving_default"]
    found = gather(ids=tf.constant(ids))["stack_float32_64"].numpy()
    assert found.tobytes() == source[ids].tobytes()
    for file in (shard_path(prefix, 0, 1), path / "variables" / "variables.data-00001-of-00002"):
        file.unlink()
