"""Reading a table of a checkpoint beside plain `pread` of the same bytes: rows one after another, and SparseCore stacks.

    python -m benchmarks.read_checkpoint [--rounds N] [--gib N] [--folder DIR] [--cold]

One data file stands behind every checkpoint: dense, and as if 8, 32 and 256 SparseCores had saved it. All contenders read
it into one buffer of 64 MiB, in turn, so that a slow moment of the machine meets them all; medians are reported, and the
ratios to pread. `--cold` drops the file from the page cache before every turn. TensorFlow's own restore of such a stack
runs beside them for scale, in a process of its own. Everything it makes is deleted.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.sparse_core_files import write_sparse_core_checkpoint
from tpuembed.checkpoint import Checkpoint, open_checkpoint
from tpuembed.export.stream.shard import peak_rss_bytes
from tpuembed.formats.tensor_bundle import Entry, crc, index_path, shard_path, write_index

DIM = 64
ROW_BYTES = 4 * DIM
BUFFER_BYTES = 64 << 20
PIECE_BYTES = 1 << 20
SPARSE_CORES = (8, 32, 256)
TENSORFLOW_GIB = 1

Array = np.ndarray[Any, Any]


def run(rounds: int = 5, gib: int = 4, folder: str | None = None, cold: bool = False) -> dict[str, Any]:
    """GB/s and ratios to pread for a table of `gib` GiB (1 at least) in `folder`, peak memory, and TensorFlow's own restore."""
    with tempfile.TemporaryDirectory(prefix="tpuembed-bench-", dir=folder) as made:
        place = Path(made)
        prefixes = write_checkpoints(place, gib << 30)
        started_at = peak_rss_bytes()
        seconds = interleave(place / "dense", prefixes, rounds, cold)
        peak = peak_rss_bytes()
        tensorflow = restore_with_tensorflow(place)
    base = statistics.median(seconds["pread"])
    speeds = {f"{name} GB/s": (gib << 30) / statistics.median(taken) / 1e9 for name, taken in seconds.items()}
    ratios = {f"{name} / pread": base / statistics.median(taken) for name, taken in seconds.items() if name != "pread"}
    memory = {"peak RSS MB": peak / 1e6, "of which before the first read MB": started_at / 1e6}
    return {"GiB": gib, "rounds": rounds, "cold": int(cold), **speeds, **ratios, **memory, "TensorFlow": tensorflow}


def write_checkpoints(place: Path, size: int) -> dict[str, Path]:
    """Prefixes by contender: one data file of `size` random bytes, and an index for every way to see it."""
    data = shard_path(place / "dense", 0, 1)
    random = np.random.default_rng(0)
    with open(data, "wb") as file:
        for _ in range(size // PIECE_BYTES):
            file.write(random.standard_normal(PIECE_BYTES // 4, np.float32).data)
        os.fsync(file.fileno())
    rows = size // ROW_BYTES
    write_index(index_path(place / "dense"), {"table": Entry(dtype="float32", shape=(rows, DIM), size=size)}, 1)
    prefixes = {"dense": place / "dense"}
    for cores in SPARSE_CORES:
        prefix = prefixes[f"{cores} SparseCores"] = place / f"cores{cores}"
        write_sparse_core_checkpoint(prefix, rows, DIM, cores)
        os.link(data, shard_path(prefix, 0, 2))
    return prefixes


def interleave(data: Path, prefixes: dict[str, Path], rounds: int, cold: bool) -> dict[str, list[float]]:
    """Seconds per contender and round; every round begins with another one."""
    out = np.empty((BUFFER_BYTES // ROW_BYTES, DIM), np.float32)
    contenders: dict[str, Callable[[], None]] = {"pread": partial(pread, shard_path(data, 0, 1), out)}
    for name, prefix in prefixes.items():
        checkpoint = open_checkpoint(prefix)
        check_rows(checkpoint, shard_path(data, 0, 1), 1 if name == "dense" else int(name.split()[0]))
        contenders[name] = partial(read, checkpoint, out)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for index in range(rounds + 1):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            if cold:
                drop_from_cache(shard_path(data, 0, 1))
            started = time.perf_counter()
            contenders[name]()
            if index:  # the first round warms up
                seconds[name].append(time.perf_counter() - started)
    return seconds


def check_rows(checkpoint: Checkpoint, data: Path, cores: int) -> None:
    """A thousand rows lie where the formula of TensorFlow's source puts them."""
    rows = checkpoint.tables()["table"].rows
    with open(data, "rb") as file:
        for row in np.random.default_rng(1).integers(0, rows, 1000).tolist():
            file.seek((row % cores * (rows // cores) + row // cores) * ROW_BYTES)
            assert checkpoint.read("table", row, row + 1).tobytes() == file.read(ROW_BYTES)


def pread(path: Path, out: Array) -> None:
    view = out.reshape(-1).view(np.uint8).data
    descriptor = os.open(path, os.O_RDONLY)
    for offset in range(0, os.fstat(descriptor).st_size, len(view)):
        assert os.preadv(descriptor, [view], offset) == len(view)
    os.close(descriptor)


def read(checkpoint: Checkpoint, out: Array) -> None:
    for start in range(0, checkpoint.tables()["table"].rows, len(out)):
        checkpoint.read_into("table", start, out)


def drop_from_cache(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def restore_with_tensorflow(place: Path) -> dict[str, float]:
    """A table of TENSORFLOW_GIB from 32 SparseCores on 8 devices, restored by TPUEmbeddingForServing."""
    size, checksums = TENSORFLOW_GIB << 30, [0] * 8
    with (
        open(shard_path(place / "dense", 0, 1), "rb") as source,
        open(place / "small.data-00000-of-00002", "wb") as file,
    ):
        for offset in range(0, size, PIECE_BYTES):
            piece = source.read(PIECE_BYTES)
            file.write(piece)
            device = offset * len(checksums) // size
            checksums[device] = crc.extend(checksums[device], piece)
    write_sparse_core_checkpoint(place / "small", size // ROW_BYTES, DIM, 32, checksums)
    command = [sys.executable, "-c", _RESTORE, str(place / "small"), str(size // ROW_BYTES), str(DIM)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return {"restore GB/s": size / found["seconds"] / 1e9, "peak memory over table": found["bytes"] / size}


_RESTORE = """
import json, os, sys, time
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import tensorflow as tf
from tpuembed.export.stream.shard import peak_rss_bytes
prefix, rows, dim = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
embedding = tf.tpu.experimental.embedding
table = embedding.TableConfig(rows, dim, name="table", initializer=tf.zeros_initializer())
layer = embedding.TPUEmbeddingForServing(embedding.FeatureConfig(table), None)
before, started = peak_rss_bytes(), time.perf_counter()
tf.train.Checkpoint(layer=layer).restore(prefix)
layer.build()
print(json.dumps({"seconds": time.perf_counter() - started, "bytes": peak_rss_bytes() - before}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gib", type=int, default=4)
    parser.add_argument("--folder", help="where to write: the disk to measure")
    parser.add_argument("--cold", action="store_true", help="from the disk instead of the page cache")
    print(json.dumps(run(**vars(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
