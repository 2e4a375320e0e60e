"""Reads of rows from Redis beside redis-py's own MGET, on one server and on a cluster of three masters.

    python -m benchmarks.redis [--rounds N] [--rows N]

All run in one process against the same servers and rows, in turns. A row is 64 float32. Times are medians. CPU is that of the
client and of the servers, per request. redis-py reads with `mget`, or in a cluster
`mget_nonatomic`, and its values are joined by numpy.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.support import redis_servers
from tpuembed.row_store import ArrayKeys, RowStore, connect
from tpuembed.row_store.client import Keys

DIM = 64
BATCHES = (26, 6_656)
SECONDS = 6.0


def run(rounds: int = 3, rows: int = 200_000) -> dict[str, Any]:
    """Measure requests of each number of rows, on both kinds of servers."""
    found: dict[str, Any] = {"rows": rows, "dim": DIM, "rounds": rounds}
    with tempfile.TemporaryDirectory(prefix="tpuembed-redis-") as made:
        with redis_servers.server(Path(made) / "one") as server:
            found["one server"] = _measure(server.url, [server], rounds, rows)
        with redis_servers.cluster(Path(made) / "cluster") as cluster:
            found["cluster"] = _measure(cluster.url, cluster.nodes[:3], rounds, rows)
    return found


def _measure(url: str, servers: Sequence[redis_servers.Server], rounds: int, rows: int) -> dict[str, Any]:
    store, keys = connect(url), ArrayKeys("rec", "0123456789ab")
    values = np.random.default_rng(0).normal(size=(rows, DIM)).astype(np.float32)
    for start in range(0, rows, 10_000):
        numbers = np.arange(start, min(start + 10_000, rows))
        store.write(Keys.of([(keys, numbers)]), values[numbers].view(np.uint8), 60.0)
    found = {}
    for batch in BATCHES:
        ways = {"tpuembed": _ours(store, keys), "redis-py": _theirs(store, keys)}
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        random = np.random.default_rng(batch)
        for _ in range(rounds):
            ends, names = time.perf_counter() + SECONDS, list(ways)
            for turn in itertools.count():
                ids = random.integers(0, rows, batch)
                for name in names if turn % 2 else names[::-1]:
                    before, started = time.process_time(), time.perf_counter()
                    rows_read = ways[name](ids)
                    seconds, cpu = time.perf_counter() - started, time.process_time() - before
                    taken[name].append((seconds, cpu))
                    if turn == 0:
                        np.testing.assert_array_equal(rows_read, values[ids])
                if time.perf_counter() > ends:
                    break
        server_cpu = {name: _server_cpu(way, servers, rows, batch) for name, way in ways.items()}
        found[f"{batch} rows"] = _summary(taken, server_cpu, batch)
    store.close()
    return found


def _ours(store: RowStore, keys: ArrayKeys) -> Callable[[Any], Any]:
    def read(ids: Any) -> Any:
        found = store.read(Keys.of([(keys, ids)]), 10.0)
        return np.frombuffer(b"".join(found), np.float32).reshape(len(ids), DIM)

    return read


def _theirs(store: RowStore, keys: ArrayKeys) -> Callable[[Any], Any]:
    client = store.client
    mget = client.mget_nonatomic if store.is_cluster else client.mget

    def read(ids: Any) -> Any:
        found = mget([key.tobytes() for key in keys.of(ids)])
        return np.frombuffer(b"".join(found), np.float32).reshape(len(ids), DIM)

    return read


def _server_cpu(way: Callable[[Any], Any], servers: Sequence[redis_servers.Server], rows: int, batch: int) -> float:
    """Return the seconds of the servers' processors for a request."""
    requests, random = max(20, 40_000 // batch), np.random.default_rng(1)
    before = _used(servers)
    for _ in range(requests):
        way(random.integers(0, rows, batch))
    return (_used(servers) - before) / requests


def _used(servers: Sequence[redis_servers.Server]) -> float:
    total = 0.0
    for server in servers:
        with server.client() as client:
            info = client.info("cpu")
            total += float(info["used_cpu_user"]) + float(info["used_cpu_sys"])
    return total


def _summary(taken: dict[str, list[tuple[float, float]]], server_cpu: dict[str, float], batch: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, times in taken.items():
        cpu = statistics.median(cpu for _, cpu in times)
        found |= {
            f"{name} ms": round(1e3 * statistics.median(seconds for seconds, _ in times), 3),
            f"{name} client CPU ms": round(1e3 * cpu, 3),
            f"{name} server CPU ms": round(1e3 * server_cpu[name], 3),
            f"{name} rows/s of a client core": round(batch / cpu),
            f"{name} rows/s of a core, client and server": round(batch / (cpu + server_cpu[name])),
        }
    return found | {
        f"redis-py / tpuembed, {what}": round(found[f"redis-py {what}"] / found[f"tpuembed {what}"], 2)
        for what in ("ms", "client CPU ms", "server CPU ms")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=200_000)
    print(json.dumps(run(**vars(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
