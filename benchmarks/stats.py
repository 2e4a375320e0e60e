"""`tpuembed stats` beside `tpuembed verify` of the same checkpoint: rate, and peak memory of the commands.

    python -m benchmarks.stats [--rounds N] [--gb N] [--folder DIR]

One table of float32 rows of 64, in the page cache as far as it fits. The commands run in turns, as processes of their own.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from tpuembed.formats.tensor_bundle import Entry, index_path, shard_path, write_index

DIM = 64
PIECE_BYTES = 64 << 20


def run(rounds: int = 3, gb: int = 10, folder: str | None = None) -> dict[str, Any]:
    """Measure both commands with a table of `gb` GB."""
    with tempfile.TemporaryDirectory(prefix="tpuembed-bench-", dir=folder) as made:
        prefix, size = Path(made) / "ckpt", gb * 10**9 // (4 * DIM) * 4 * DIM
        write_checkpoint(prefix, size)
        found: dict[str, list[dict[str, float]]] = {"stats": [], "verify": []}
        for _ in range(rounds):
            for name, runs in found.items():
                runs.append(_command(name, prefix))
    seconds = {name: statistics.median(one["seconds"] for one in runs) for name, runs in found.items()}
    peaks = {name: max(one["peak MB"] for one in runs) for name, runs in found.items()}
    return {
        "GB": gb,
        "rounds": rounds,
        **{f"{name} GB/s": round(size / taken / 1e9, 3) for name, taken in seconds.items()},
        **{f"{name} peak MB": peak for name, peak in peaks.items()},
        "stats / verify": round(
            statistics.median(
                verify["seconds"] / stats["seconds"] for stats, verify in zip(*found.values(), strict=True)
            ),
            3,
        ),
    }


def write_checkpoint(prefix: Path, size: int) -> None:
    """Write a checkpoint of normal rows with its checksum."""
    random, crc = np.random.default_rng(0), 0
    block = random.standard_normal(PIECE_BYTES // 4, np.float32)
    with open(shard_path(prefix, 0, 1), "wb") as file:
        for start in range(0, size, PIECE_BYTES):
            np.multiply(block, np.float32(1 + start / size), out=block)
            data = np.roll(block, int(random.integers(1 << 20))).view(np.uint8)[: size - start]
            file.write(data.data)
            crc = google_crc32c.extend(crc, data.tobytes())
        os.fsync(file.fileno())
    entry = Entry(dtype="float32", shape=(size // (4 * DIM), DIM), size=size, crc32c=crc)
    write_index(index_path(prefix), {"table": entry}, 1)


def _command(name: str, prefix: Path) -> dict[str, float]:
    code = (
        "import atexit, sys\nfrom tpuembed_cli.main import main\ndef show():\n"
        "    from tpuembed.export.stream.shard import peak_rss_bytes\n    print(peak_rss_bytes(), file=sys.stderr)\n"
        "atexit.register(show)\nmain()"
    )
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, name, str(prefix)], check=True, capture_output=True, text=True)
    return {"seconds": time.perf_counter() - started, "peak MB": round(int(done.stderr.splitlines()[-1]) / 1e6)}


def main() -> None:
    """Print the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gb", type=int, default=10)
    parser.add_argument("--folder")
    print(json.dumps(run(**vars(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
