"""A 128 MiB table restored by name in a few pieces of memory."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.checkpoint.named import named_layer, write_named
from tpuembed import Vocabulary

pytestmark = pytest.mark.nightly

ROWS, DIM = 1 << 19, 64
LIMIT_KILOBYTES = 100 << 10
"""The table has 131,072. The names of the checkpoint and their index take some 20,000."""
SCRIPT = """
import ctypes
import sys
from pathlib import Path
import numpy as np
import tensorflow as tf
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, Vocabulary
def kilobytes(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))
def begin():
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # memory that was freed would hide a copy
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    return kilobytes("VmRSS")
ROWS = int(sys.argv[2])
order = np.random.default_rng(3).permutation(ROWS)
vocabulary = Vocabulary(order[: ROWS // 2].tolist() + list(range(-ROWS // 2, 0)), dtype="int64")
table = TableConfig(ROWS, 64, "films", initializer="zeros")
layer = TPUEmbedding(FeatureConfig(table, vocabulary=vocabulary), optimizer="sgd")
layer.assign_rows("films", 0, np.zeros((3, 64), np.float32))
before = begin()
report = layer.restore_tables(sys.argv[1], by="name")
print(kilobytes("VmHWM") - before)
rows = next(iter(layer.embedding_tables.values()))
found = tf.gather(rows, np.arange(ROWS // 2)).numpy()[:, 7]
assert (found == order[: ROWS // 2]).all()
assert not tf.gather(rows, np.arange(ROWS // 2, ROWS)).numpy().any()
"""


def test_memory_beyond_the_table_is_a_few_pieces(tmp_path: Path) -> None:
    """Each row of the checkpoint holds its name, which is a number."""
    rows = np.repeat(np.arange(ROWS, dtype=np.float32)[:, None], DIM, 1)
    names = {"films": Vocabulary(range(ROWS), dtype="int64")}
    prefix = write_named(tmp_path / "ckpt", named_layer({"films": {None: rows}}), names)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, prefix, str(ROWS)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < LIMIT_KILOBYTES
    print(done.stdout)
