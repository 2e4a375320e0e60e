"""Streaming throughput of an export beside `cp` and fsync of the same bytes.

    python benchmarks/export.py [--rounds N] [--gib N] [--folder DIR]

All read a table from the page cache and end when the copy is on the disk; rates are of the source's bytes, whatever is
stored. Rounds are interleaved, so that a slow moment of the machine meets all contenders; medians are reported. Everything it
makes is deleted.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tpuembed.checkpoint import open_checkpoint
from tpuembed.export.engines import choose_engine
from tpuembed.export.execute import StreamReport, stream_tables
from tpuembed.export.plan import plan_export
from tpuembed.export.stream import Source
from tpuembed.tensor_bundle import Entry, crc, index_path, shard_path, write_index

DIM = 64
PIECE_ROWS = 1 << 16
CONTENDERS = ((1, "float32"), (2, "float32"), (2, "bfloat16"), (2, "float16"), (2, "int8"))


def run(rounds: int = 5, gib: int = 2, folder: str | None = None) -> dict[str, Any]:
    """Medians in MB/s and as a ratio to cp, and the workers' peak memory, for a table of `gib` GiB in `folder`."""
    with tempfile.TemporaryDirectory(prefix="tpuembed-bench-", dir=folder) as made:
        place = Path(made)
        size = write_table(place / "table", gib << 30)
        contenders: dict[str, Callable[[], float]] = {"cp": partial(copy, place)}
        reports: dict[str, list[StreamReport]] = {}
        for workers, storage in CONTENDERS:
            name = f"export, {workers} worker{'s' if workers > 1 else ''}, {storage}"
            reports[name] = []
            contenders[name] = partial(export, place, workers, storage, reports[name])
        seconds = interleave(contenders, rounds)
    return {"bytes": size, "rounds": rounds, "contenders": summary(size, seconds, reports)}


def interleave(contenders: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for index in range(rounds + 1):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:  # each comes first in turn: deleting a file has its price for the next
            took = contenders[name]()
            os.sync()
            if index:  # the first round warms up
                seconds[name].append(took)
    return seconds


def summary(size: int, seconds: dict[str, list[float]], reports: dict[str, list[StreamReport]]) -> list[dict[str, Any]]:
    base = statistics.median(seconds["cp"])
    return [
        {
            "name": name,
            "seconds": round(statistics.median(taken), 3),
            "seconds_min_max": [round(min(taken), 3), round(max(taken), 3)],
            "mb_per_second": round(size / statistics.median(taken) / 1e6),
            "bytes_written": reports[name][0].bytes_written if name in reports else size,
            "times_cp": round(base / statistics.median(taken), 2),
            "worker_peak_rss_mb": max((r.worker_peak_rss_bytes / 1e6 for r in reports.get(name, [])), default=None),
        }
        for name, taken in seconds.items()
    ]


def write_table(prefix: Path, size: int) -> int:
    """A checkpoint of one [rows, DIM] float32 table of about `size` bytes; its exact size."""
    piece = np.random.default_rng(0).standard_normal((PIECE_ROWS, DIM), np.float32)
    pieces, checksum = size // piece.nbytes, 0
    with open(shard_path(prefix, 0, 1), "wb") as file:
        for _ in range(pieces):
            checksum = crc.extend(checksum, piece.reshape(-1).view(np.uint8))
            file.write(piece.data)
        os.fsync(file.fileno())
    shape = (pieces * PIECE_ROWS, DIM)
    entry = Entry(dtype="float32", shape=shape, size=pieces * piece.nbytes, crc32c=checksum)
    write_index(index_path(prefix), {"table": entry}, 1)
    return pieces * piece.nbytes


def copy(place: Path) -> float:
    target = place / "copy"
    started = time.monotonic()
    subprocess.run(["cp", "--reflink=never", shard_path(place / "table", 0, 1), target], check=True)
    with open(target, "rb") as file:
        os.fsync(file.fileno())
    took = time.monotonic() - started
    target.unlink()
    return took


def export(place: Path, workers: int, storage: str, reports: list[StreamReport]) -> float:
    prefix = place / "table"
    with open_checkpoint(prefix) as checkpoint:
        plan = plan_export(list(checkpoint.tables().values()), workers=workers, storage=storage)
        source = Source(path=str(prefix), fingerprint=checkpoint.fingerprint())
    reports.append(stream_tables(plan, source, place / "tables", choose_engine("local", workers)))
    shutil.rmtree(place / "tables")
    return reports[-1].seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gib", type=int, default=2)
    parser.add_argument("--folder", help="where to write: the disk to measure")
    print(json.dumps(run(**vars(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
