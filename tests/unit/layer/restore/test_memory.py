"""A 128 MiB table restored in a few pieces of memory: the table is counted before, and nothing of its size after."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.support.checkpoint.strings import encode_strings
from tpuembed.formats.tensor_bundle import Entry, Slice, crc, shard_path, write_index

GRAPH_KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"
ROWS, DIM = 1 << 19, 64
SCRIPT = """
import ctypes
import sys
from pathlib import Path
import numpy as np
import tensorflow as tf
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding
def kilobytes(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))
def make(rows):
    return TPUEmbedding(FeatureConfig(TableConfig(rows, 64, "table", initializer=INITIALIZER)), optimizer="sgd")
def train(layer):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.constant([1])))
    layer.apply_gradients(tape.gradient(loss, layer.trainable_variables))
INITIALIZER = sys.argv[3] if sys.argv[3:] else None
make(3).assign_rows("table", 0, np.ones((3, 64), np.float32))
layer = make(int(sys.argv[2]))
train(layer)  # a trained table is copied by some ways to write it
ctypes.CDLL("libc.so.6").malloc_trim(0)  # memory that was freed would hide a copy
Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
before = kilobytes("VmRSS")
layer.restore_tables(sys.argv[1], resize={"table": "grow"})
print(kilobytes("VmHWM") - before)
rows = next(iter(layer.embedding_tables.values()))
print(float(tf.reduce_max(tf.abs(tf.gather(rows, [0, 1, 1 << 18, (1 << 19) - 1])))))
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
    command = [sys.executable, "-c", SCRIPT, str(prefix), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    grown, largest = done.stdout.split()
    assert int(grown) < 100 << 10, "KiB; the table has 131,072, and how many pieces wait depends on the machine"
    assert float(largest) == 0.0
