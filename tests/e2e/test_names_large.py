"""100 million names, from a file to a server, in bounded memory."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.memory import resident_bytes
from tests.support.serving.process import ServerProcess

pytestmark = pytest.mark.nightly

COUNT = int(os.environ.get("TPUEMBED_NAMES", "100_000_000"))
PEAK_BYTES_PER_NAME = 135
"""The file, the names, the hash table while it is made, and what TensorFlow and the table take."""

EXPORT = """
import json, resource, sys, time
import numpy as np
import tensorflow as tf
from tpuembed import Vocabulary, export_saved_model
from tpuembed.config import ServingConfig, ServingFeature

folder, count = sys.argv[1], int(sys.argv[2])
table = tf.Variable(np.stack(np.divmod(np.arange(count + 1), 4096), 1).astype(np.float32), name="table")
tf.train.Checkpoint(table=table).write(folder + "/ckpt")
del table
started = time.perf_counter()
vocabulary = Vocabulary.from_file(folder + "/names.txt", oov_buckets=1)
read = time.perf_counter()
feature = ServingFeature(table="table", input="id", vocabulary=vocabulary)
config = ServingConfig(features={"name": feature})
export_saved_model(folder + "/ckpt", folder + "/model", serving_config=config, layout="mmap")
done = time.perf_counter()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"read s": read - started, "export s": done - read, "peak bytes": peak}))
"""


def name_of(number: int) -> str:
    return f"item_{number:09d}"


def write_names(path: Path) -> None:
    """Write COUNT lines of 14 characters, some at a time."""
    with open(path, "wb") as out:
        for start in range(0, COUNT, 1 << 20):
            numbers = np.arange(start, min(start + (1 << 20), COUNT), dtype=np.int64)
            lines = np.zeros((len(numbers), 15), np.uint8)
            lines[:, :5], lines[:, 14] = np.frombuffer(b"item_", np.uint8), 10
            for place in range(9):
                lines[:, 13 - place] = ord("0") + numbers // 10**place % 10
            out.write(lines.tobytes())


def test_names_of_a_file_are_exported_and_served(tmp_path: Path) -> None:
    write_names(tmp_path / "names.txt")
    done = subprocess.run(
        [sys.executable, "-c", EXPORT, str(tmp_path), str(COUNT)], stdout=subprocess.PIPE, check=True, text=True
    )
    took = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(took))
    assert took["peak bytes"] < PEAK_BYTES_PER_NAME * COUNT + 1.5e9
    asked = [0, 1, COUNT // 2, COUNT - 1, *np.random.default_rng(0).integers(0, COUNT, 200).tolist()]
    started = time.perf_counter()
    with ServerProcess(tmp_path / "model", tmp_path / "log", fresh=True) as server:
        server.wait_for(1)
        took["load s"] = time.perf_counter() - started
        instances = [{"name": name_of(number)} for number in asked] + [{"name": "nobody"}]
        status, answer = server.predict({"instances": instances})
        took["server's own bytes"] = resident_bytes(server.process.pid, "RssAnon")
    assert status == 200
    rows = np.array([*(number + 1 for number in asked), 0])
    np.testing.assert_array_equal(answer["predictions"], np.stack(np.divmod(rows, 4096), 1))
    assert took["server's own bytes"] < 1e9
    print(json.dumps(took))
