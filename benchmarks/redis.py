"""Rows from Redis, on one server and on a cluster of three masters: the clients, and lookups from end to end.

    python -m benchmarks.redis [--rounds N] [--rows N]

A request has one id, or 256, of each of 26 tables of 64 float32. Everything runs against the same servers and rows, in turns.
Times are medians of the rounds' medians. `read` is what the server calls; `lookup` is a front of `tpuembed publish` in the
server's process, with its keys, the read and the pooling, without HTTP or gRPC. valkey-glide is measured if it is installed
(`valkey-glide-sync`).
"""

import argparse
import contextlib
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.support import redis_servers
from tpuembed.row_store import RowKeys, RowStore, connect

TABLES, DIM = 26, 64
BATCHES = (1, 256)
SECONDS = 3.0
Read = Callable[[Any], Any]
"""Takes ids, int64 [tables, batch], and returns their rows, float32 [tables * batch, dim]."""


def run(
    rounds: int = 3, rows: int = 20_000, more: Callable[[str, Path], dict[str, Read]] | None = None
) -> dict[str, Any]:
    """Measure requests of each size, on both kinds of servers. `more` returns further ways for a URL and a front."""
    found: dict[str, Any] = {"tables": TABLES, "rows": rows, "dim": DIM, "rounds": rounds}
    with tempfile.TemporaryDirectory(prefix="tpuembed-redis-") as made:
        folder = Path(made)
        values = np.random.default_rng(0).normal(size=(TABLES, rows, DIM)).astype(np.float32)
        _export(folder, values)
        with redis_servers.server(folder / "one") as server:
            found["one server"] = _measure(server.url, [server], folder / "of_one", values, rounds, more)
        with redis_servers.cluster(folder / "cluster") as cluster:
            found["cluster"] = _measure(cluster.url, cluster.nodes[:3], folder / "of_cluster", values, rounds, more)
    return found


def _export(folder: Path, values: Any) -> None:
    from tests.support.export.fakes import write_checkpoint
    from tpuembed import export_saved_model

    write_checkpoint(folder / "ckpt", {f"t{number}": table for number, table in enumerate(values)})
    features = {f"t{number}": {"table": f"t{number}", "input": "id"} for number in range(TABLES)}
    export_saved_model(folder / "ckpt", folder / "rec", serving_config={"features": features}, layout="mmap", workers=1)


def _measure(
    url: str, servers: Sequence[redis_servers.Server], front: Path, values: Any, rounds: int, more: Any
) -> dict[str, Any]:
    from tpuembed.export.publish_rows import publish_rows

    publish_rows(front.parent / "rec", url, front, name="rec")
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as opened:
        store = opened.enter_context(contextlib.closing(connect(url)))
        ways = {"redis-py, read": _read(store, front), "redis-py, lookup": opened.enter_context(lookup(url, front))}
        if importlib.util.find_spec("glide_sync") is not None:
            ways["valkey-glide, read"] = _glide(url, front, is_cluster=len(servers) > 1)
        ways |= more(url, front) if more is not None else {}
        for batch in BATCHES:
            found[f"{TABLES} x {batch} rows"] = _timed(ways, servers, values, batch, rounds)
    return found


def keys_of(front: Path) -> Callable[[Any], RowKeys]:
    """Return a function that returns the keys of the front's rows."""
    from tpuembed.manifest import Manifest

    manifest = Manifest.read(front / "1")
    assert manifest is not None
    assert manifest.row_store is not None
    (array,) = manifest.row_store.arrays.values()
    places = {table.name: table.row_offset for table in manifest.tables}
    offsets = np.array([places[f"t{number}"] for number in range(TABLES)])
    return lambda ids: RowKeys.of("rec", [(array, (ids + offsets[:, None]).reshape(-1))])


def _read(store: RowStore, front: Path) -> Read:
    keys = keys_of(front)
    return lambda ids: _joined(store.read(keys(ids)))


def _joined(found: Sequence[Any]) -> Any:
    return np.frombuffer(b"".join(found), np.float32).reshape(-1, DIM)


def _glide(url: str, front: Path, *, is_cluster: bool) -> Read:
    import glide_sync  # type: ignore[import-not-found, unused-ignore]

    host, _, port = url.removeprefix("redis://").partition(":")
    kind = "GlideCluster" if is_cluster else "Glide"
    addresses = [glide_sync.NodeAddress(host, int(port))]
    configuration = getattr(glide_sync, f"{kind}ClientConfiguration")(addresses, request_timeout=10_000)
    client = getattr(glide_sync, f"{kind}Client").create(configuration)
    keys = keys_of(front)
    return lambda ids: _joined(client.mget(keys(ids).texts()))


@contextlib.contextmanager
def lookup(url: str, front: Path) -> Iterator[Read]:
    """Yield lookups of the front by the server's own classes."""
    from tpuembed_serving.tensorflow import session
    from tpuembed_serving.tensorflow.row_store import RowStoreOptions

    options = session.RunOptions(row_store=RowStoreOptions(url, 5.0, 1 << 30))
    with contextlib.closing(session.load(front / "1", options=options)) as servable:
        signature = servable.signatures["serving_default"]
        order = [int(info.alias[1:]) for info in signature.inputs]

        def run_one(ids: Any) -> Any:
            found = servable.run(signature, [ids[number] for number in order])
            by_table = dict(zip(order, found, strict=True))
            return np.concatenate([by_table[number] for number in range(TABLES)])

        yield run_one


def _timed(
    ways: Mapping[str, Read], servers: Sequence[redis_servers.Server], values: Any, batch: int, rounds: int
) -> dict[str, Any]:
    random = np.random.default_rng(batch)
    medians: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    server_cpu = dict.fromkeys(ways, 0.0)
    calls = dict.fromkeys(ways, 0)
    for _ in range(rounds):
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        ends, turn = time.perf_counter() + SECONDS * len(ways), 0
        while time.perf_counter() < ends:
            ids = random.integers(0, values.shape[1], (TABLES, batch))
            for name in list(ways)[:: 1 if turn % 2 else -1]:
                used = _used(servers)
                cpu, started = time.process_time(), time.perf_counter()
                rows = ways[name](ids)
                taken[name].append((time.perf_counter() - started, time.process_time() - cpu))
                server_cpu[name] += _used(servers) - used
                calls[name] += 1
                if turn == 0:
                    np.testing.assert_array_equal(rows, np.concatenate([values[n][ids[n]] for n in range(TABLES)]))
            turn += 1
        for name, times in taken.items():
            medians[name].append(tuple(map(statistics.median, zip(*times, strict=True))))  # type: ignore[arg-type]
    return {
        name: {
            "ms": round(1e3 * statistics.median(wall for wall, _ in found), 3),
            "client CPU ms": round(1e3 * statistics.median(cpu for _, cpu in found), 3),
            "server CPU ms": round(1e3 * server_cpu[name] / calls[name], 3),
        }
        for name, found in medians.items()
    }


def _used(servers: Sequence[redis_servers.Server]) -> float:
    """Return the processor time of the servers so far, in seconds. See proc_pid_schedstat."""
    return sum(int(Path(f"/proc/{one.process.pid}/schedstat").read_text().split()[0]) for one in servers) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=20_000)
    print(json.dumps(run(**vars(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
