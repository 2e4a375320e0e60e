"""A 128 MiB table restored in a few pieces of memory: the table is counted before, and nothing of its size after."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.support.checkpoint.named import named_layer, write_named
from tests.support.checkpoint.strings import encode_strings
from tpuembed import Vocabulary
from tpuembed.formats.tensor_bundle import Entry, Slice, crc, shard_path, write_index

GRAPH_KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"
ROWS, DIM = 1 << 19, 64
LIMIT_KILOBYTES = 100 << 10
"""The table has 131,072. How many pieces wait depends on the machine; names and their index take some 20,000."""
BEGIN = """
import ctypes
import sys
from pathlib import Path
import numpy as np
import tensorflow as tf
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, Vocabulary
def kilobytes(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))
def restore(layer, **options):
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # memory that was freed would hide a copy
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = kilobytes("VmRSS")
    layer.restore_tables(sys.argv[1], **options)
    print(kilobytes("VmHWM") - before)
    return next(iter(layer.embedding_tables.values()))
"""
BY_NUMBER = """
def make(rows):
    return TPUEmbedding(FeatureConfig(TableConfig(rows, 64, "table", initializer=INITIALIZER)), optimizer="sgd")
INITIALIZER = sys.argv[3] if sys.argv[3:] else None
make(3).assign_rows("table", 0, np.ones((3, 64), np.float32))
layer = make(int(sys.argv[2]))
with tf.GradientTape() as tape:  # a trained table is copied by some ways to write it
    loss = tf.reduce_sum(layer(tf.constant([1])))
layer.apply_gradients(tape.gradient(loss, layer.trainable_variables))
rows = restore(layer, resize={"table": "grow"})
assert not tf.gather(rows, [0, 1, 1 << 18, (1 << 19) - 1]).numpy().any()
"""
BY_NAME = """
ROWS = int(sys.argv[2])
order = np.random.default_rng(3).permutation(ROWS)
vocabulary = Vocabulary(order[: ROWS // 2].tolist() + list(range(-ROWS // 2, 0)), dtype="int64")
table = TableConfig(ROWS, 64, "films", initializer="zeros")
layer = TPUEmbedding(FeatureConfig(table, vocabulary=vocabulary), optimizer="sgd")
layer.assign_rows("films", 0, np.zeros((3, 64), np.float32))
rows = restore(layer, by="name")
found = tf.gather(rows, np.arange(ROWS // 2)).numpy()[:, 7]
assert (found == order[: ROWS // 2]).all()
assert not tf.gather(rows, np.arange(ROWS // 2, ROWS)).numpy().any()
"""


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of zeros that takes no disk."""
    folder = tmp_path_factory.mktemp("big")
    small = tf.train.Checkpoint(table=tf.Variable([[0.0]])).write(str(folder / "small"))
    graph, checksum = encode_strings([tf.train.load_checkpoint(small).get_tensor(GRAPH_KEY)])
    size, zeros, of_table = ROWS * DIM * 4, np.zeros(1 << 24, np.uint8), 0
    for _ in range(size >> 24):
        of_table = crc.extend(of_table, zeros)
    with open(shard_path(folder / "big", 0, 2), "wb") as file:
        file.truncate(size)
    shard_path(folder / "big", 1, 2).write_bytes(graph)
    table = Slice(start=(0, 0), shape=(ROWS, DIM), shard=0, offset=0, size=size, crc32c=of_table)
    entries = {
        "table/.ATTRIBUTES/VARIABLE_VALUE": Entry(dtype="float32", shape=(ROWS, DIM), slices=(table,)),
        GRAPH_KEY: Entry(dtype="string", shape=(), shard=1, size=len(graph), crc32c=checksum),
    }
    write_index(folder / "big.index", entries, 2)
    return folder / "big"


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param([str(ROWS), "ones"], id="same"),
        pytest.param([str(ROWS + ROWS // 4)], id="grown", marks=pytest.mark.nightly),
    ],
)
def test_memory_beyond_the_table_is_a_few_pieces(prefix: Path, arguments: list[str]) -> None:
    assert_small(BY_NUMBER, str(prefix), *arguments)


@pytest.mark.nightly
def test_by_name_too(tmp_path: Path) -> None:
    """Each row of the checkpoint holds its name, which is a number."""
    rows = np.repeat(np.arange(ROWS, dtype=np.float32)[:, None], DIM, 1)
    names = {"films": Vocabulary(range(ROWS), dtype="int64")}
    assert_small(BY_NAME, write_named(tmp_path / "ckpt", named_layer({"films": {None: rows}}), names), str(ROWS))


def assert_small(script: str, *arguments: str) -> None:
    done = subprocess.run([sys.executable, "-c", BEGIN + script, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < LIMIT_KILOBYTES
