"""A table of 16 GB is served by a process that may use 1 GiB of memory, its page cache included."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

from tests.support.serving.process import ServerProcess
from tpuembed import export_saved_model
from tpuembed.formats.tensor_bundle import Entry, index_path, shard_path, write_index
from tpuembed.native.lookup import available

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(available()), reason=f"native/src/lookup.c is not compiled: {available()}"),
]

DIM, LIMIT = 64, 1 << 30
ROWS = 16 * LIMIT // (4 * DIM)
REPEAT = 1 << 16
"""All values of row r are r % REPEAT, so that sums of a request's rows are exact."""
CLIENTS, REQUESTS, EXAMPLES, IDS = 4, 100, 16, 64


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of 1 GiB, of version 1 or 2."""
    root = Path("/sys/fs/cgroup")
    parent, limit = (root / "memory", "memory.limit_in_bytes") if (root / "memory").is_dir() else (root, "memory.max")
    made = parent / f"tpuembed-test-{os.getpid()}"
    try:
        made.mkdir()
        (made / limit).write_text(str(LIMIT))
    except OSError as error:
        if made.is_dir():
            made.rmdir()
        pytest.skip(f"no control group can be made: {error}")
    try:
        yield made
    finally:
        deadline = time.monotonic() + 30
        while (made / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        made.rmdir()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    size = 4 * DIM * ROWS
    if shutil.disk_usage(tmp_path).free < 2.2 * size:
        pytest.skip(f"{tmp_path} has no room for {2.2 * size / 2**30:.0f} GiB")
    piece = np.repeat(np.arange(REPEAT, dtype=np.float32), DIM).tobytes()
    crc = 0
    with open(shard_path(tmp_path / "ckpt", 0, 1), "wb") as file:
        for _ in range(ROWS // REPEAT):
            file.write(piece)
            crc = google_crc32c.extend(crc, piece)
    entry = Entry(dtype="float32", shape=(ROWS, DIM), size=size, crc32c=crc)
    write_index(index_path(tmp_path / "ckpt"), {"table": entry}, 1)
    config = {"features": {"x": {"table": "table", "combiner": "sum"}}}
    version = export_saved_model(tmp_path / "ckpt", tmp_path / "m", serving_config=config, layout="mmap").path
    shard_path(tmp_path / "ckpt", 0, 1).unlink()
    for path in version.rglob("*"):  # pages that another group has read are not counted in the server's
        if path.is_file():
            with path.open("rb") as data:
                os.fsync(data.fileno())
                os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return version.parent


def test_a_table_of_sixteen_times_the_memory(group: Path, model: Path, tmp_path: Path) -> None:
    """Every answer is right, with ids at random and with popular ids, and the process is never killed."""
    with ServerProcess(model, tmp_path / "log", group=group) as server:
        server.wait_for(1)
        assert "map 16.00 GiB of tables" in server.log
        assert "native lookups read all pages of a request at once" in server.log

        def ask(seed: int) -> list[float]:
            random, connection, seconds = np.random.default_rng(seed), server.connect(), []
            for _ in range(REQUESTS):
                ids = random.integers(0, ROWS, (EXAMPLES, IDS))
                if seed % 2:
                    ids = (random.zipf(1.2, (EXAMPLES, IDS)) * 40_503) % ROWS
                body = json.dumps({"signature_name": "serving_default", "inputs": {"x": ids.tolist()}})
                started = time.perf_counter()
                connection.request("POST", f"{server.path}:predict", body)
                found = json.loads(connection.getresponse().read())
                seconds.append(time.perf_counter() - started)
                expected = np.repeat((ids % REPEAT).sum(1)[:, None], DIM, 1)
                np.testing.assert_array_equal(np.asarray(found["outputs"], np.float32), expected)
            connection.close()
            return seconds

        for kind, first in (("uniform", 0), ("Zipf", 1)):
            started = time.perf_counter()
            with ThreadPoolExecutor(CLIENTS) as pool:
                taken = np.sort(np.concatenate(list(pool.map(ask, range(first, first + 2 * CLIENTS, 2), timeout=900))))
            rate = len(taken) / (time.perf_counter() - started)
            p50, p99 = taken[len(taken) // 2] * 1000, taken[int(0.99 * len(taken))] * 1000
            print(f"{kind}: {rate:.0f} requests per second of {EXAMPLES * IDS} ids, p50 {p50:.1f} ms, p99 {p99:.1f} ms")
        assert server.process.poll() is None
        events = (group / "memory.oom_control", group / "memory.events")
        [counts] = [dict(line.split() for line in path.read_text().splitlines()) for path in events if path.exists()]
        assert counts.get("oom_kill", "0") == "0"
        assert server.stop() == 0
