"""Exports beside `cp` and fsync of the same bytes, and beside TensorFlow's own restore-and-save.

    python -m benchmarks.export [--quick] [--rounds N] [--gib N] [--sizes N]... [--folder DIR]

Streaming: all read a table from the page cache and end when the copy is on the disk; rates are of the source's bytes, whatever
is stored. Workers are started before, as an export starts them while it saves its graph. Rounds are interleaved, so that a
slow moment of the machine meets all contenders; medians are reported. The SparseCores' checkpoint is the same bytes, dealt out
to 32 SparseCores. Before every contender the machine rests, the same time for all: a deleted file's blocks are discarded and,
on a virtual machine, its memory goes back to the host, which takes seconds. Whoever came at once would find that memory still
there, and whoever came a second later would pay for the other's return. It is worth more to `cp`, whose copy stays in memory:
6 GiB took it 4.2 s straight after a copy that was deleted, and 5.7 s after a rest; the export 3.6 s and 3.2 s (four rounds).
Whole exports: the command, in a process of its own, by sizes: its memory must not grow. TensorFlow's way, in a process of its
own too, reads the table into a variable and saves that; its import is not in its time, and is in its memory, as in ours. Both
are run in turns. What is first written to a part of a disk may take longer than what is written there again: the first round of
all contenders is not counted.
Everything it makes is deleted. It needs four times the largest table of room.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.sparse_core_files import SPARSE_CORES_PER_DEVICE, write_sparse_core_checkpoint
from tpuembed.checkpoint import open_checkpoint
from tpuembed.export.options import ExportOptions
from tpuembed.export.plan.planner import plan_export
from tpuembed.export.publish.folder import FolderWriter
from tpuembed.export.report import StreamReport
from tpuembed.export.stream.engines.local import LocalEngine
from tpuembed.export.stream.execute import stream_tables
from tpuembed.export.stream.shard import Source
from tpuembed.formats.tensor_bundle import Entry, crc, index_path, shard_path, write_index

DIM = 64
PIECE_ROWS = 1 << 16
CONTENDERS = (
    (1, "float32", "table"),
    (2, "float32", "table"),
    (2, "bfloat16", "table"),
    (2, "float16", "table"),
    (2, "int8", "table"),
    (2, "float32", "sparse_cores"),
)
SPARSE_CORES = 32
REST_SECONDS = 3
STARTING_SECONDS = 1
"""About as long as saving a graph takes."""


def run(
    rounds: int = 5, gib: int = 6, sizes: Sequence[int] = (1, 6, 12), folder: str | None = None, quick: bool = False
) -> dict[str, Any]:
    """Streaming of a table of `gib` GiB, and whole exports of tables of `sizes` GiB, in `folder`; `quick`: of 1 GiB, twice."""
    if quick:
        rounds, gib, sizes = 2, 1, (1,)
    streaming = stream_beside_cp(rounds, gib, folder)
    whole = [whole_export(size, folder) for size in sizes]
    beside = beside_tensorflow(min(rounds, 3), gib, folder)
    found: dict[str, Any] = {
        "streaming": streaming,
        "whole exports": whole,
        "beside TensorFlow's restore-and-save": beside,
    }
    found["ratio to cp"] = {contender["name"]: contender["times_cp"] for contender in streaming["contenders"]}
    return found


def stream_beside_cp(rounds: int, gib: int, folder: str | None) -> dict[str, Any]:
    """Medians in MB/s and as a ratio to cp, and the workers' peak memory."""
    with tempfile.TemporaryDirectory(prefix="tpuembed-bench-", dir=folder) as made:
        place = Path(made)
        size = write_table(place / "table", gib << 30)
        contenders: dict[str, Callable[[], float]] = {"cp": partial(copy, place)}
        reports: dict[str, list[StreamReport]] = {}
        for workers, storage, source in CONTENDERS:
            origin = "" if source == "table" else f", from {SPARSE_CORES} SparseCores"
            name = f"export, {workers} worker{'s' if workers > 1 else ''}, {storage}{origin}"
            reports[name] = []
            contenders[name] = partial(export, place, source, workers, storage, reports[name])
        seconds = interleave(contenders, rounds)
    return {"bytes": size, "rounds": rounds, "contenders": summary(size, seconds, reports)}


def whole_export(gib: int, folder: str | None) -> dict[str, Any]:
    """Seconds and peak memory of the command."""
    with tempfile.TemporaryDirectory(prefix="tpuembed-bench-", dir=folder) as made:
        place = Path(made)
        write_table(place / "table", gib << 30)
        return {"gib": gib} | run_command(place)


def run_command(place: Path) -> dict[str, float]:
    """`tpuembed export` of `place`/table; the model is deleted after it."""
    rest()
    config = json.dumps({"features": {"x": {"table": "table"}}})
    (place / "serving.json").write_text(config)
    command = [
        sys.executable,
        "-m",
        "tpuembed_cli.main",
        "export",
        str(place / "table"),
        str(place / "model"),
        "--json",
    ]
    done = subprocess.run(
        [*command, "--serving-config", str(place / "serving.json")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
        text=True,
    )
    shutil.rmtree(place / "model")
    report = json.loads(done.stdout)
    return {
        "seconds": round(report["seconds"], 2),
        "stream_seconds": round(report["stream_seconds"], 2),
        "peak_rss_mb": round(report["peak_rss_bytes"] / 1e6),
        "worker_peak_rss_mb": round(report["worker_peak_rss_bytes"] / 1e6, 1),
    }


RESTORE_AND_SAVE = """
import json, os, sys, time
from pathlib import Path
import tensorflow as tf
from tpuembed.export.stream.shard import peak_rss_bytes

prefix, folder = sys.argv[1:]
started = time.monotonic()
module = tf.Module()
(table,) = tf.raw_ops.RestoreV2(prefix=prefix, tensor_names=["table"], shape_and_slices=[""], dtypes=[tf.float32])
module.table = tf.Variable(table)
del table
lookup = tf.function(lambda ids: tf.gather(module.table, ids), input_signature=[tf.TensorSpec([None], tf.int64)])
tf.saved_model.save(module, folder, signatures=lookup)
for path in Path(folder).rglob("*"):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
print(json.dumps({"seconds": time.monotonic() - started, "peak_rss_bytes": peak_rss_bytes()}))
"""


def beside_tensorflow(rounds: int, gib: int, folder: str | None) -> dict[str, Any]:
    """Medians of the command and of what one does without us, and how many times faster and smaller the command is."""
    with tempfile.TemporaryDirectory(prefix="tpuembed-bench-", dir=folder) as made:
        place = Path(made)
        write_table(place / "table", gib << 30)
        taken = [(run_command(place), restore_and_save(place)) for _ in range(rounds + 1)][1:]
    ours, theirs = (
        {key: statistics.median(run[key] for run in runs) for key in runs[0]} for runs in zip(*taken, strict=True)
    )
    ratio = {key: round(theirs[key] / ours[key], 2) for key in theirs}
    return {"gib": gib, "rounds": rounds, "export": ours, "TensorFlow": theirs, "ratio": ratio}


def restore_and_save(place: Path) -> dict[str, float]:
    """TensorFlow's way with `place`/table; its model is deleted after it."""
    rest()
    command = [sys.executable, "-c", RESTORE_AND_SAVE, str(place / "table"), str(place / "model")]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, text=True)
    shutil.rmtree(place / "model")
    report = json.loads(done.stdout.splitlines()[-1])
    return {"seconds": round(report["seconds"], 2), "peak_rss_mb": round(report["peak_rss_bytes"] / 1e6)}


def interleave(contenders: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for index in range(rounds + 1):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:  # each comes first in turn: deleting a file has its price for the next
            rest()
            took = contenders[name]()
            if index:  # the first round warms up
                seconds[name].append(took)
    return seconds


def rest() -> None:
    os.sync()
    time.sleep(REST_SECONDS)


def summary(size: int, seconds: dict[str, list[float]], reports: dict[str, list[StreamReport]]) -> list[dict[str, Any]]:
    base = statistics.median(seconds["cp"])
    return [
        {
            "name": name,
            "seconds": round(statistics.median(taken), 3),
            "seconds_min_max": [round(min(taken), 3), round(max(taken), 3)],
            "seconds_of_rounds": [round(took, 3) for took in taken],
            "mb_per_second": round(size / statistics.median(taken) / 1e6),
            "bytes_written": reports[name][0].bytes_written if name in reports else size,
            "times_cp": round(base / statistics.median(taken), 2),
            "worker_peak_rss_mb": max((r.worker_peak_rss_bytes / 1e6 for r in reports.get(name, [])), default=None),
        }
        for name, taken in seconds.items()
    ]


def write_table(prefix: Path, size: int) -> int:
    """A checkpoint of one [rows, DIM] float32 table of about `size` bytes; its exact size.

    Beside it `sparse_cores`: the same bytes as they would lie there if they came from SparseCores.
    """
    devices = SPARSE_CORES // SPARSE_CORES_PER_DEVICE
    piece = np.random.default_rng(0).standard_normal((PIECE_ROWS, DIM), np.float32)
    pieces = size // piece.nbytes // devices
    checksum = reduce(lambda value, _: crc.extend(value, piece.reshape(-1).view(np.uint8)), range(pieces), 0)
    with open(shard_path(prefix, 0, 1), "wb") as file:
        for _ in range(devices * pieces):
            file.write(piece.data)
        os.fsync(file.fileno())
    shape, written = (devices * pieces * PIECE_ROWS, DIM), devices * pieces * piece.nbytes
    whole = reduce(lambda value, _: crc.combine(value, checksum, written // devices), range(devices), 0)
    write_index(index_path(prefix), {"table": Entry(dtype="float32", shape=shape, size=written, crc32c=whole)}, 1)
    dealt = prefix.with_name("sparse_cores")
    write_sparse_core_checkpoint(dealt, *shape, SPARSE_CORES, [checksum] * devices)
    shard_path(dealt, 0, 2).hardlink_to(shard_path(prefix, 0, 1))
    return written


def copy(place: Path) -> float:
    target = place / "copy"
    started = time.monotonic()
    subprocess.run(["cp", "--reflink=never", shard_path(place / "table", 0, 1), target], check=True)
    with open(target, "rb") as file:
        os.fsync(file.fileno())
    took = time.monotonic() - started
    target.unlink()
    return took


def export(place: Path, source_name: str, workers: int, storage: str, reports: list[StreamReport]) -> float:
    prefix = place / source_name
    with open_checkpoint(prefix) as checkpoint:
        plan = plan_export(
            list(checkpoint.tables().values()),
            workers=workers,
            storage=storage,
            read_buffers=checkpoint.read_buffer_bytes,
        )
        source = Source(path=str(prefix), fingerprint=checkpoint.fingerprint())
    engine = LocalEngine(workers)
    with engine.starting(source, workers):
        time.sleep(STARTING_SECONDS)
        with FolderWriter(place / "models", plan, ExportOptions(), source) as writer:
            reports.append(stream_tables(source, writer, engine))
    shutil.rmtree(place / "models")
    return reports[-1].seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gib", type=int, default=6)
    parser.add_argument("--sizes", type=int, nargs="+", default=(1, 6, 12), help="GiB, of whole exports")
    parser.add_argument("--quick", action="store_true", help="1 GiB, two rounds")
    parser.add_argument("--folder", help="where to write: the disk to measure")
    print(json.dumps(run(**vars(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
