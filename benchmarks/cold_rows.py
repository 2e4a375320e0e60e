"""Rows that are not in memory: 1,024 rows of 256 bytes, at random in a mapped table, which is not in the page cache.

    python -m benchmarks.cold_rows [--rounds N] [--gb N] [--folder DIR]

The same native lookup in three ways, in turns: with the kernel's readahead, with one page for each page fault (MADV_RANDOM),
and with all pages of the request read at once before (read-ahead). Beside them is what the disk can do: as many pages read by 32
threads past the page cache, without a lookup. Each request has rows of its own.
"""

import argparse
import ctypes
import functools
import gc
import json
import mmap
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.stats import DIM, write_checkpoint
from tpuembed.manifest import Manifest
from tpuembed.native.lookup import NativeLookups

EXAMPLES, IDS = 16, 64
WAYS = ("the kernel's readahead", "one page for each fault", "read-ahead")
LIMIT = "the disk"


def run(rounds: int = 7, gb: int = 4, folder: str | None = None) -> dict[str, Any]:
    """Measure with a table of `gb` GB."""
    from tpuembed import export_saved_model

    with tempfile.TemporaryDirectory(prefix="tpuembed-bench-", dir=folder) as made:
        rows = gb * 10**9 // (4 * DIM)
        write_checkpoint(Path(made) / "ckpt", 4 * DIM * rows)
        config = {"features": {"x": {"table": "table", "combiner": "sum"}}}
        version = export_saved_model(
            Path(made) / "ckpt", Path(made) / "m", serving_config=config, layout="mmap", workers=2
        ).path
        random, found = np.random.default_rng(0), {way: list[float]() for way in (*WAYS, LIMIT)}
        for _ in range(rounds):
            for way, seconds in found.items():
                seconds.append(_seconds(version, way, random.integers(0, rows, (EXAMPLES, IDS))))
    medians = {way: statistics.median(seconds) for way, seconds in found.items()}
    return {
        "GB": gb,
        "rows": EXAMPLES * IDS,
        "rounds": rounds,
        "ms": {way: round(1000 * seconds, 1) for way, seconds in medians.items()},
        "least and most ms": {
            way: [round(1000 * least(seconds), 1) for least in (min, max)] for way, seconds in found.items()
        },
        **{
            f"{way} / read-ahead": round(
                statistics.median(one / ours for one, ours in zip(found[way], found["read-ahead"], strict=True)), 2
            )
            for way in WAYS[:-1]
        },
        f"read-ahead / {LIMIT}": round(
            statistics.median(ours / one for ours, one in zip(found["read-ahead"], found[LIMIT], strict=True)), 2
        ),
    }


def _seconds(version: Path, way: str, ids: np.ndarray[Any, Any]) -> float:
    """Return how long one lookup takes whose table is not in the page cache."""
    manifest = Manifest.read(version)
    assert manifest is not None
    for array in manifest.arrays:
        with open(version / array.file, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if way == LIMIT:
        return _direct_seconds(max((version / array.file for array in manifest.arrays), key=os.path.getsize), ids)
    native = NativeLookups(manifest, version, threads=1)
    native.reads_ahead = way == "read-ahead"
    if way != WAYS[0]:
        for mapped in native._arrays.values():
            mapped._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]
    started = time.perf_counter()
    native.named({"x": ids})
    taken = time.perf_counter() - started
    del native
    gc.collect()  # the kernel keeps pages of a file that is mapped
    return taken


def _direct_seconds(table: Path, ids: np.ndarray[Any, Any]) -> float:
    """Return how long the disk takes for a page of each row."""
    pages = np.ascontiguousarray(ids.reshape(-1) * (4 * DIM) // mmap.PAGESIZE)
    read = _read_pages()
    started = time.perf_counter()
    failed = read(os.fsencode(table), pages.ctypes.data, pages.size)
    taken = time.perf_counter() - started
    assert failed == 0, failed
    return taken


@functools.cache
def _read_pages() -> Any:
    source = Path(__file__).with_name("direct_reads.c")
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/direct_reads.so"
        subprocess.run(["cc", "-O2", "-pthread", "-shared", "-fPIC", "-o", library, str(source)], check=True)
        read = ctypes.CDLL(library).read_pages
    read.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64]
    read.restype = ctypes.c_int64
    return read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gb", type=int, default=4, help="of the table")
    parser.add_argument("--folder", help="where to write the table")
    print(json.dumps(run(**vars(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
