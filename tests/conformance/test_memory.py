"""Every reader delivers a table of 256 MiB, a megabyte at a time, in memory that does not know the table's size."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tensorflow as tf

from benchmarks.sparse_core_files import write_sparse_core_checkpoint
from tests.support.checkpoint.keras_files import write_archive, write_sparse_table
from tests.support.checkpoint.objects import mid_level, with_registered_saver
from tests.support.checkpoint.orbax_trees import write_tree
from tests.support.checkpoint.strings import encode_strings
from tpuembed.formats.tensor_bundle import Entry, Slice, index_path, shard_path, write_index

ROWS, DIM = 1 << 20, 64
SIZE = 4 * ROWS * DIM
GRAPH_KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"
LAST = np.arange(1, DIM + 1, dtype=np.float32)
"""The last row; all others are holes in a sparse file, which take no disk."""


def slices(count: int) -> tuple[Slice, ...]:
    step = ROWS // count
    return tuple(
        Slice(
            start=(step * part, 0),
            shape=(step, DIM),
            shard=0,
            offset=SIZE // count * part,
            size=SIZE // count,
            crc32c=0,
        )
        for part in range(count)
    )


def write_bundle(prefix: Path, key: str = "table", parts: int = 0, graph: bytes | None = None) -> None:
    """One table in `parts` slices of rows; an object graph after it."""
    entries = {
        key: Entry(dtype="float32", shape=(ROWS, DIM), **({"slices": slices(parts)} if parts else {"size": SIZE}))
    }
    text, crc32c = encode_strings([graph]) if graph else (b"", 0)
    if graph:
        entries[GRAPH_KEY] = Entry(dtype="string", shape=(), offset=SIZE, size=len(text), crc32c=crc32c)
    with open(shard_path(prefix, 0, 1), "wb") as file:
        file.seek(SIZE - LAST.nbytes)
        file.write(LAST.tobytes() + text)
    write_index(index_path(prefix), entries, 1)


def saved_model(folder: Path) -> Path:
    (folder / "variables").mkdir()
    (folder / "saved_model.pb").touch()
    write_bundle(folder / "variables" / "variables")
    return folder


def tpu_hosts(folder: Path) -> Path:
    small = str(
        tf.train.Checkpoint(layer=mid_level({"table": {"parameters": tf.Variable(tf.ones((2, 2)))}})).write(
            str(folder / "small")
        )
    )
    [key] = [name for name, shape in tf.train.list_variables(small) if shape]
    write_bundle(folder / "ckpt", key, 4, with_registered_saver(small, "tf.TPUEmbeddingCallback"))
    return folder / "ckpt"


def sparse_cores(folder: Path) -> Path:
    """Row ROWS - 1 is the last of the last of 32 shards."""
    write_sparse_core_checkpoint(folder / "ckpt", ROWS, DIM, 32)
    with open(shard_path(folder / "ckpt", 0, 2), "wb") as file:
        file.seek(SIZE - LAST.nbytes)
        file.write(LAST.tobytes())
    return folder / "ckpt"


def columns(folder: Path) -> Path:
    """The halves of every row are in two data files."""
    half = DIM // 2
    parts = tuple(
        Slice(start=(0, half * part), shape=(ROWS, half), shard=part, offset=0, size=SIZE // 2, crc32c=0)
        for part in (0, 1)
    )
    write_index(index_path(folder / "ckpt"), {"table": Entry(dtype="float32", shape=(ROWS, DIM), slices=parts)}, 2)
    for part in (0, 1):
        with open(shard_path(folder / "ckpt", part, 2), "wb") as file:
            file.seek(SIZE // 2 - LAST.nbytes // 2)
            file.write(LAST[half * part :][:half].tobytes())
    return folder / "ckpt"


def bundle(folder: Path, parts: int = 0) -> Path:
    write_bundle(folder / "ckpt", parts=parts)
    return folder / "ckpt"


def weights_h5(folder: Path) -> Path:
    return write_sparse_table(folder / "m.weights.h5", "table", ROWS, LAST)


def weights_json(folder: Path) -> Path:
    path = weights_h5(folder).rename(folder / "m_00000.weights.h5")
    with h5py.File(path) as file:
        groups: list[str] = []
        file.visit(lambda name: groups.append(f"/{name}") if name.endswith("vars") else None)
    index = folder / "m.weights.json"
    index.write_text(json.dumps({"metadata": {"total_size": SIZE}, "weight_map": dict.fromkeys(groups, path.name)}))
    return index


def orbax(folder: Path) -> Path:
    """An array is written out, in chunks of a megabyte, compressed."""
    rows = np.zeros((ROWS, DIM), np.float32)
    rows[-1] = LAST
    return write_tree(folder / "tree", {("table",): rows}, chunks=(4096, DIM))


READERS: dict[str, tuple[Callable[[Path], Path], Mapping[str, str]]] = {
    "dense": (bundle, {}),
    "saved_model": (saved_model, {}),
    "tpu_v1": (tpu_hosts, {}),
    "sparsecore": (sparse_cores, {}),
    "columns": (columns, {}),
    "partitioned_div": (lambda folder: bundle(folder, 4), {"partition_strategy": "div"}),
    "partitioned_mod": (lambda folder: bundle(folder, 4), {"partition_strategy": "mod"}),
    "weights_h5": (weights_h5, {}),
    "weights_json": (weights_json, {}),
    "keras": (lambda folder: write_archive(folder / "m.keras", weights_h5(folder)), {}),
    "orbax": (orbax, {}),
}
LIMITS_MIB = {"orbax": 112}
"""Where it is not 80: tensorstore itself takes a part."""

SCRIPT = """
import json, re, resource, sys
import numpy as np
from tpuembed.checkpoint import open_checkpoint
with open_checkpoint(sys.argv[1], **json.loads(sys.argv[2])) as checkpoint:
    [(name, info)] = checkpoint.tables().items()
    big, out, total = np.ones((1 << 18, info.dim), info.dtype), np.empty((4096, info.dim), info.dtype), 0.0
    for start in range(0, info.rows, len(out)):
        checkpoint.read_into(name, start, out)
        total += float(out.sum())
    checkpoint.read_into(name, 7, big)  # of 64 MiB, which are not counted
    assert not big.any()
assert "tensorflow" not in sys.modules and "keras" not in sys.modules
peak = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]
print(info.rows, total, out[-1].tolist(), peak, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, sep="|")
"""


@pytest.mark.parametrize("name", READERS)
@pytest.mark.sampled(2)
def test_peak_memory_of_a_whole_table(name: str, tmp_path: Path) -> None:
    make, options = READERS[name]
    command: list[Any] = [sys.executable, "-c", SCRIPT, make(tmp_path), json.dumps(dict(options))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows, total, last, *peaks = done.stdout.split("|")  # its own and, where it starts one, its child's
    assert (int(rows), float(total), json.loads(last)) == (ROWS, LAST.sum(), LAST.tolist())
    assert max(map(int, peaks)) < (64 + LIMITS_MIB.get(name, 80)) * 1024
