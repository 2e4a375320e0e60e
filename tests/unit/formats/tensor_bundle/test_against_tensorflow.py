"""What TensorFlow writes is read, and what is written TensorFlow reads."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.checkpoint.bundles import restore, save, write
from tests.support.messages import refused
from tpuembed.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFormatError,
    ConfigError,
    RowRangeError,
    UnknownTableError,
)
from tpuembed.formats.tensor_bundle import (
    Bundle,
    Entry,
    Slice,
    crc,
    index_path,
    merge_entries,
    read_index,
    shard_path,
    write_index,
)

DTYPES = [
    "float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32",
    "uint64", "bool", "complex64", "complex128", "float8_e5m2", "float8_e4m3fn", "int4", "uint4",
]  # fmt: skip
VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"


def random_array(dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(len(shape))
    integers = rng.integers(0, 2, shape) if dtype == "bool" else rng.integers(0, 7, shape)
    return integers.astype(tf.as_dtype(dtype).as_numpy_dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(tmp_path: Path, dtype: str) -> None:
    arrays = {f"{dtype}-{len(shape)}": random_array(dtype, shape) for shape in [(), (5,), (5, 3), (2, 3, 4), (0, 4)]}
    with Bundle.open(save(tmp_path / "ckpt", arrays)) as bundle:
        for name, array in arrays.items():
            assert bundle.entries[name].dtype == dtype
            assert bundle.entries[name].shape == array.shape
            found = bundle.read(name)
            assert found.dtype == array.dtype
            np.testing.assert_array_equal(found, array)
            bundle.verify(name)


@pytest.mark.parametrize(
    "values",
    [[b""], [b"", b"\xff\x00", b"x" * 300], [], [str(index).encode() for index in range(1000)]],
    ids=["empty", "odd", "none", "many"],
)
def test_string_tensors(tmp_path: Path, values: list[bytes]) -> None:
    prefix = save(tmp_path / "ckpt", {"vector": tf.constant(values, tf.string), "scalar": tf.constant(b"\x00one")})
    with Bundle.open(prefix) as bundle:
        assert bundle.read("vector").tolist() == values
        assert bundle.read_string("scalar") == b"\x00one"
        bundle.verify("vector")
        with refused(CheckpointFormatError, match="'vector'"):
            bundle.read_string("vector")


def test_matrix_of_strings(tmp_path: Path) -> None:
    array = np.array([[b"a", b"bc"], [b"", b"d"], [b"e", b"f"]], object)
    with Bundle.open(save(tmp_path / "ckpt", {"x": array})) as bundle:
        assert bundle.read("x").tolist() == array.tolist()


@pytest.fixture(scope="module")
def sliced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray[Any, Any]]:
    """A [37, 301] table cut into row and column slices by TensorFlow's own policy, over several data files."""
    table = np.arange(37 * 301, dtype=np.float32).reshape(37, 301)
    policy = tf.train.experimental.MaxShardSizePolicy(max_shard_size=10_000)
    checkpoint = tf.train.Checkpoint(table=tf.Variable(table), scalar=tf.Variable(3))
    folder = tmp_path_factory.mktemp("sliced")
    options = tf.train.CheckpointOptions(experimental_sharding_callback=policy)
    return Path(checkpoint.write(str(folder / "ckpt"), options)), table


def test_row_and_column_slices(sliced: tuple[Path, np.ndarray[Any, Any]]) -> None:
    prefix, table = sliced
    with Bundle.open(prefix) as bundle:
        key = f"table{VALUE}"
        slices = bundle.entries[key].slices
        assert len(slices) > 4
        assert any(piece.shape[1] < 301 for piece in slices)
        assert bundle.num_shards == 5
        np.testing.assert_array_equal(bundle.read(key), table)
        bundle.verify(key)
        rng = np.random.default_rng(0)
        for start, stop in np.sort(rng.integers(0, len(table) + 1, (50, 2))):
            np.testing.assert_array_equal(bundle.read_rows(key, start, stop), table[start:stop])
            np.testing.assert_array_equal(bundle.read_rows(key, start, start), table[start:start])


def test_slices_in_every_direction_of_three(tmp_path: Path) -> None:
    cube = np.arange(5 * 4 * 3, dtype=np.int64).reshape(5, 4, 3)
    boxes = {"5 4 3 0,2:-:-": cube[:2], "5 4 3 2,3:0,1:-": cube[2:, :1], "5 4 3 2,3:1,3:0,3": cube[2:, 1:]}
    prefixes = [
        save(tmp_path / f"part{i}", {"cube": box}, {"cube": spec}) for i, (spec, box) in enumerate(boxes.items())
    ]
    tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=prefixes, destination_prefix=str(tmp_path / "ckpt"))
    with Bundle.open(tmp_path / "ckpt") as bundle:
        np.testing.assert_array_equal(bundle.read("cube"), cube)
        np.testing.assert_array_equal(bundle.read_rows("cube", 1, 3), cube[1:3])


def test_reads_into_part_of_an_array(tmp_path: Path) -> None:
    table = random_array("float32", (9, 4))
    with Bundle.open(save(tmp_path / "ckpt", {"x": table})) as bundle:
        whole = np.zeros((20, 4), np.float32)
        assert bundle.read_rows("x", 2, 7, whole[3:8]).base is whole
        np.testing.assert_array_equal(whole, np.concatenate([np.zeros((3, 4)), table[2:7], np.zeros((12, 4))]))
        wide = np.zeros((5, 8), np.float32)
        bundle.read_rows("x", 2, 7, wide[:, 2:6])
        np.testing.assert_array_equal(wide, np.pad(table[2:7], ((0, 0), (2, 2))))
        with refused(ConfigError, match=r"\(5, 4\)"):
            bundle.read_rows("x", 2, 7, np.zeros((5, 4)))


def test_partitioned_tf1_saver(tmp_path: Path) -> None:
    table = np.arange(33, dtype=np.float32).reshape(11, 3)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.compat.v1.get_variable(
            "emb", initializer=tf.constant(table), partitioner=tf.compat.v1.fixed_size_partitioner(3)
        )
        session.run(tf.compat.v1.global_variables_initializer())
        saver = tf.compat.v1.train.Saver()
        prefix = saver.save(session, str(tmp_path / "ckpt"), write_meta_graph=False)
    with Bundle.open(prefix) as bundle:
        assert list(bundle.entries) == ["emb"]
        assert len(bundle.entries["emb"].slices) == 3
        np.testing.assert_array_equal(bundle.read("emb"), table)


def test_thousands_of_variables(tmp_path: Path) -> None:
    """Several index blocks, with keys that share long prefixes."""
    arrays = {f"model/a_rather_long_name/{index}/x": np.float32(index) for index in range(6000)}
    with Bundle.open(save(tmp_path / "ckpt", arrays)) as bundle:
        assert set(bundle.entries) == set(arrays)
        assert all(bundle.read(f"model/a_rather_long_name/{index}/x") == index for index in range(0, 6000, 97))
        write_index(tmp_path / "copy.index", bundle.entries, 1)
    shutil.copy(shard_path(tmp_path / "ckpt", 0, 1), shard_path(tmp_path / "copy", 0, 1))
    reader = tf.train.load_checkpoint(str(tmp_path / "copy"))
    assert set(reader.get_variable_to_shape_map()) == set(arrays)
    assert all(reader.get_tensor(name) == value for name, value in list(arrays.items())[::97])


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensorflow_reads_every_dtype(tmp_path: Path, dtype: str) -> None:
    arrays = {f"x{len(shape)}": random_array(dtype, shape) for shape in [(), (5,), (5, 3), (0, 4)]}
    write(tmp_path / "ckpt", arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(restore(tmp_path / "ckpt", name, dtype), array)


def test_tensorflow_reads_strings(tmp_path: Path) -> None:
    values = np.array([[b"", b"\xff\x00"], [b"x" * 300, b"y"]], object)
    write(tmp_path / "ckpt", {"x": values, "scalar": np.array(b"text", object)})
    assert restore(tmp_path / "ckpt", "x", "string").tolist() == values.tolist()
    assert restore(tmp_path / "ckpt", "scalar", "string") == b"text"


def test_tensorflow_reads_slices(tmp_path: Path) -> None:
    """Rows and columns, at starts and lengths whose codes are 1, 2 and 3 bytes long."""
    table = np.arange(20_000 * 70, dtype=np.float32).reshape(-1, 70)
    boxes = [(0, 0, 63, 70), (63, 0, 9_000, 64), (63, 64, 9_000, 6), (9_063, 0, 10_937, 70)]
    slices = []
    for shard, (row, column, rows, columns) in enumerate(boxes):
        payload = table[row : row + rows, column : column + columns].tobytes()
        shard_path(tmp_path / "ckpt", shard, len(boxes)).write_bytes(b"pad" + payload)
        slices.append(
            Slice(
                start=(row, column), shape=(rows, columns), shard=shard, offset=3, size=len(payload),
                crc32c=crc.value(payload),
            )
        )  # fmt: skip
    entry = Entry(dtype="float32", shape=table.shape, slices=tuple(slices))
    write_index(tmp_path / "ckpt.index", {"odd \x01\xff name": entry}, len(boxes))
    np.testing.assert_array_equal(restore(tmp_path / "ckpt", "odd \x01\xff name", "float32"), table)
    part = restore(tmp_path / "ckpt", "odd \x01\xff name", "float32", "20000 70 60,9010:60,9")
    np.testing.assert_array_equal(part, table[60:9070, 60:69])
    with Bundle.open(tmp_path / "ckpt") as bundle:
        np.testing.assert_array_equal(bundle.read_rows("odd \x01\xff name", 60, 9070), table[60:9070])


@pytest.mark.parametrize("order", [["dense", "table"], ["table", "dense"]])
def test_merged_with_tensorflows_own_index(tmp_path: Path, order: list[str]) -> None:
    """The exporter's move: TensorFlow's dense variables, sliced ones too, plus a table of ours."""
    dense = {"dense/kernel": random_array("float32", (4, 3)), "step": np.int64(7), "graph": np.array(b"proto", object)}
    cut = np.arange(6, dtype=np.float32).reshape(2, 3)
    parts = [
        save(tmp_path / "part0", {**dense, "cut": cut[:, :1]}, {"cut": "2 3 0,2:0,1"}),
        save(tmp_path / "part1", {"cut": cut[:, 1:]}, {"cut": "2 3 0,2:1,2"}),
    ]
    tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=parts, destination_prefix=str(tmp_path / "dense"))
    table = random_array("bfloat16", (50, 4))
    write(tmp_path / "table", {"stack": table})
    merged = merge_entries([read_index(index_path(tmp_path / name)) for name in order])
    assert merged.num_shards == 3
    write_index(tmp_path / "all.index", merged.entries, 3)
    files = {"dense": [shard_path(tmp_path / "dense", shard, 2) for shard in (0, 1)]}
    files["table"] = [shard_path(tmp_path / "table", 0, 1)]
    for shard, source in enumerate(path for name in order for path in files[name]):
        shutil.copy(source, shard_path(tmp_path / "all", shard, 3))
    for name, value in {**dense, "cut": cut, "stack": table}.items():
        np.testing.assert_array_equal(restore(tmp_path / "all", name, merged.entries[name].dtype), value)


def test_a_name_in_two_bundles_to_merge(tmp_path: Path) -> None:
    index = write(tmp_path / "table", {"x": np.ones(1)})
    with refused(CheckpointCorruptError, match="'x'"):
        merge_entries([index, index])


def test_tensorflow_checks_our_crcs(tmp_path: Path) -> None:
    """The CRC that we write is the one TensorFlow compares with: a wrong one is a DataLossError."""
    entries = dict(write(tmp_path / "ckpt", {"x": random_array("float32", (4, 4))}).entries)
    entries["x"] = Entry(dtype="float32", shape=(4, 4), size=64, crc32c=entries["x"].crc32c ^ 1)
    write_index(tmp_path / "ckpt.index", entries, 1)
    with pytest.raises(tf.errors.DataLossError):
        restore(tmp_path / "ckpt", "x", "float32")


def test_variants_are_carried_and_not_read(tmp_path: Path) -> None:
    """A tf.data iterator in a checkpoint is a variant tensor: it does not keep the rest from being read."""
    iterator = iter(tf.data.Dataset.range(10))
    prefix = tf.train.Checkpoint(iterator=iterator, x=tf.Variable([1.0])).write(str(tmp_path / "ckpt"))
    with Bundle.open(prefix) as bundle:
        [variant] = [key for key, entry in bundle.entries.items() if entry.dtype == "variant"]
        assert bundle.read(f"x{VALUE}").tolist() == [1.0]
        with refused(CheckpointFormatError):
            bundle.read(variant)


def test_questions_that_have_no_answer(tmp_path: Path) -> None:
    with Bundle.open(save(tmp_path / "ckpt", {"table": random_array("float32", (5, 2)), "name": b"x"})) as bundle:
        with refused(UnknownTableError, match="'tabel'"):
            bundle.read("tabel")
        for start, stop in [(-1, 2), (3, 2), (0, 6), (6, 6)]:
            with refused(RowRangeError, match=rf"\[{start}, {stop}\)"):
                bundle.read_rows("table", start, stop)
        with refused(CheckpointFormatError, match="'name'"):
            bundle.read_rows("name", 0, 0)


def test_many_threads_share_a_bundle(sliced: tuple[Path, np.ndarray[Any, Any]]) -> None:
    prefix, table = sliced
    key = f"table{VALUE}"

    def read(seed: int) -> bool:
        ranges = np.sort(np.random.default_rng(seed).integers(0, len(table) + 1, (100, 2)))
        return all(np.array_equal(bundle.read_rows(key, start, stop), table[start:stop]) for start, stop in ranges)

    with Bundle.open(prefix) as bundle, ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(8)))


def test_files_are_opened_when_needed_and_closed(tmp_path: Path) -> None:
    def opened() -> int:
        return sum(str(tmp_path) in os.path.realpath(link) for link in Path("/proc/self/fd").iterdir())

    with Bundle.open(save(tmp_path / "ckpt", {"x": random_array("float32", (5, 2))})) as bundle:
        assert opened() == 0
        bundle.read("x")
        bundle.read("x")
        assert opened() == 1
    assert opened() == 0
    with refused(CheckpointError):
        bundle.read("x")
