"""Redis processes on the loopback: one server, or a cluster of three masters with a replica each."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

__all__ = ["Cluster", "Server", "cluster", "needs_redis", "server"]

_START_SECONDS = 20.0
_NODE_TIMEOUT_MS = 15_000
"""Long, because a node that a busy machine holds up is otherwise replaced by its replica in the middle of a test."""

needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None and "CI" not in os.environ,
    reason="redis-server is not installed: apt-get install redis-server",
)


class Server:
    """One redis-server without files of data."""

    def __init__(
        self, folder: Path, *options: str, tls: dict[str, Path] | None = None, port: int | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = _free_port() if port is None else port
        ports = ["--port", str(self.port)]
        self.url = f"redis://127.0.0.1:{self.port}"
        if tls is not None:
            ports = ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no"]
            ports += [word for name, path in tls.items() for word in (f"--tls-{name}-file", str(path))]
            self.url = f"rediss://localhost:{self.port}?ssl_ca_certs={tls['ca-cert']}"
        command = [
            "redis-server",
            "--bind",
            "127.0.0.1",
            *ports,
            "--save",
            "",
            "--appendonly",
            "no",
            "--dir",
            str(folder),
            *options,
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def client(self, **options: Any) -> Any:
        return redis.Redis(port=self.port, **options)

    def wait(self) -> None:
        ends = time.monotonic() + _START_SECONDS
        while time.monotonic() < ends:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            assert self.process.poll() is None, "redis-server has ended"
            time.sleep(0.02)
        raise AssertionError("redis-server did not start")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait()


class Cluster:
    """Six nodes: masters first, in the order of their slots, then the replica of each."""

    def __init__(self, folder: Path) -> None:
        options = "--cluster-enabled", "yes", "--cluster-node-timeout", str(_NODE_TIMEOUT_MS)
        self.nodes = [Server(folder / str(number), *options) for number in range(6)]
        self.url = self.nodes[0].url

    def form(self) -> None:
        for node in self.nodes:
            node.wait()
        ids = []
        bounds = [0, 5461, 10923, 16384]
        for number, node in enumerate(self.nodes):
            with node.client() as client:
                ids.append(client.execute_command("CLUSTER", "MYID").decode())
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
                if number < 3:
                    client.execute_command("CLUSTER", "ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1)
                client.execute_command("CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port)
        # A node counts as known before its id is known, and REPLICATE needs the id.
        self._until("NODES", lambda nodes: all(each.encode() in nodes for each in ids))
        for number in range(3, 6):
            with self.nodes[number].client() as client:
                client.execute_command("CLUSTER", "REPLICATE", ids[number - 3])
        self._until("INFO", lambda info: b"cluster_state:ok\r" in info)
        ends = time.monotonic() + _START_SECONDS
        for node in self.nodes[3:]:
            with node.client() as client:
                while client.info("replication").get("master_link_status") != "up":
                    assert time.monotonic() < ends, "a replica has not synchronised"
                    time.sleep(0.05)

    def _until(self, command: str, holds: Any) -> None:
        """Wait until the answer of each node to a command CLUSTER is as it has to be."""
        ends = time.monotonic() + _START_SECONDS
        for node in self.nodes:
            with node.client() as client:
                while not holds(client.execute_command("CLUSTER", command)):
                    assert time.monotonic() < ends, "the cluster has not formed"
                    time.sleep(0.05)

    @contextlib.contextmanager
    def moving(self, slot: int) -> Iterator[None]:
        """Move half of the keys of a slot from the first master to the third; the other half at the end."""
        source, target = self.nodes[0], self.nodes[2]
        with source.client() as old, target.client() as new:
            ids = [client.execute_command("CLUSTER", "MYID").decode() for client in (old, new)]
            new.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
            old.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])

            def move(count: int) -> None:
                keys = old.execute_command("CLUSTER", "GETKEYSINSLOT", slot, count)
                assert keys
                old.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)

            move(old.execute_command("CLUSTER", "COUNTKEYSINSLOT", slot) // 2)
            yield
            move(1 << 20)
            for client in (new, old):
                client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[1])

    def replicate(self) -> None:
        """Wait until each replica has what its master has."""
        ends = time.monotonic() + _START_SECONDS
        for master, replica in zip(self.nodes[:3], self.nodes[3:], strict=True):
            with master.client() as one, replica.client() as other:
                while one.dbsize() != other.dbsize():
                    assert time.monotonic() < ends, "a replica has not all keys"
                    time.sleep(0.05)

    def views(self) -> list[bytes | str]:
        """Return what each node says of the cluster, for the message of a test that fails."""
        found: list[bytes | str] = []
        for node in self.nodes:
            try:
                with node.client() as client:
                    found.append(client.execute_command("CLUSTER", "NODES"))
            except redis.RedisError as error:
                found.append(str(error))
        return found

    def promote(self, master: int) -> None:
        """Put the replica of a master in its place, without the vote for which a cluster first waits until the master is silent."""
        with self.nodes[master + 3].client() as client:
            client.execute_command("CLUSTER", "FAILOVER", "TAKEOVER")

    def close(self) -> None:
        for node in self.nodes:
            node.close()


def _free_port() -> int:
    """Return a port that is free, and whose port of a cluster's bus is free too."""
    for _ in range(100):
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port: int = one.getsockname()[1] % 20000 + 20000
            with contextlib.suppress(OSError):
                other.bind(("127.0.0.1", port + 10000))
                with socket.socket() as third:
                    third.bind(("127.0.0.1", port))
                    return port
    raise AssertionError("no port is free")


@contextlib.contextmanager
def server(
    folder: Path, *options: str, tls: dict[str, Path] | None = None, port: int | None = None
) -> Iterator[Server]:
    """Start a server, on a free port unless `port` is given, and end it."""
    running = Server(folder, *options, tls=tls, port=port)
    try:
        running.wait()
        yield running
    finally:
        running.close()


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Start a cluster, and end it."""
    running = Cluster(folder)
    try:
        running.form()
        yield running
    finally:
        running.close()
