"""The load client that needs no other program: `python -m tpuembed_cli.load.client`, with the load as JSON on stdin.

It prints "begin" when the measured time begins, and then one JSON object: {"seconds", "milliseconds", "cpu"}, or {"error"}. It is
a process of its own, so that its processor time is known. Each connection sends its next request when it has the answer to
the last one.
"""

import asyncio
import base64
import itertools
import json
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

__all__ = ["main"]

_MOST_OF_ERROR: Final = 500


class _LoadError(Exception):
    """A request failed, so the load ends."""


class _Taken:
    """The durations of the requests that were answered in the measured time."""

    def __init__(self, warm_seconds: float, seconds: float) -> None:
        self.seconds = seconds
        self.milliseconds: list[float] = []
        self._begin = time.perf_counter() + warm_seconds
        self._end = self._begin + seconds
        self._cpu = 0.0

    def add(self, started: float) -> None:
        """Count a request that was sent at `started` and has just been answered."""
        now = time.perf_counter()
        if self._begin <= now < self._end:
            self.milliseconds.append(1e3 * (now - started))

    async def wait(self) -> None:
        """Return when the measured time is over."""
        await asyncio.sleep(self._begin - time.perf_counter())
        _write("begin")
        before = time.process_time()
        await asyncio.sleep(self._end - time.perf_counter())
        self._cpu = time.process_time() - before

    def result(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "milliseconds": self.milliseconds, "cpu": self._cpu}


class _Connection(asyncio.Protocol):
    """A keep-alive connection of HTTP/1.1."""

    def __init__(self, requests: Iterator[bytes], taken: _Taken, fail: Callable[[Exception], None]) -> None:
        self._requests, self._taken, self._fail = requests, taken, fail
        self._answer = bytearray()
        self._size = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request; see asyncio."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send()

    def _send(self) -> None:
        self._started = time.perf_counter()
        self._transport.write(next(self._requests))

    def data_received(self, data: bytes) -> None:
        """Take a part of an answer; see asyncio."""
        self._answer += data
        if self._size < 0:
            head, end, _ = self._answer.partition(b"\r\n\r\n")
            if not end:
                return
            lines = bytes(head).split(b"\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
            size = headers.get(b"content-length", b"")
            if not size.isdigit():
                self._fail(_LoadError("an answer has no Content-Length"))
                return
            self._is_good, self._start = lines[0].split(b" ")[1:2] == [b"200"], len(head) + len(end)
            self._size = self._start + int(size)
        if len(self._answer) < self._size:
            return
        if not self._is_good:
            status, body = self._answer.partition(b"\r\n")[0], self._answer[self._start : self._start + _MOST_OF_ERROR]
            self._fail(_LoadError(f"{status.decode('latin-1')}: {' '.join(body.decode('utf-8', 'replace').split())}"))
            return
        self._taken.add(self._started)
        del self._answer[:]
        self._size = -1
        self._send()

    def connection_lost(self, error: Exception | None) -> None:
        """End the load; see asyncio."""
        self._fail(
            _LoadError(
                f"the server closed a connection{f': {error}' if error else ''}. Check that it runs, and whether it is https"
            )
        )


async def _http(load: Mapping[str, Any], taken: _Taken) -> None:
    loop = asyncio.get_running_loop()
    failed: asyncio.Future[None] = loop.create_future()

    def fail(error: Exception) -> None:
        if not failed.done():
            failed.set_exception(error)

    head = f"POST {load['path']} HTTP/1.1\r\nHost: {load['address']}\r\nContent-Type: application/json\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in load["headers"].items())
    bodies = [base64.b64decode(one) for one in load["requests"]]
    requests = itertools.cycle([f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body for body in bodies])
    tls = ssl.create_default_context(cafile=load["tls_ca"]) if load["tls"] else None
    for _ in range(load["concurrency"]):
        await loop.create_connection(lambda: _Connection(requests, taken, fail), load["host"], load["port"], ssl=tls)
    ended = asyncio.ensure_future(taken.wait())
    await asyncio.wait([ended, failed], return_when=asyncio.FIRST_COMPLETED)
    if failed.done():
        failed.result()


async def _grpc(load: Mapping[str, Any], taken: _Taken) -> None:
    import grpc

    requests = itertools.cycle([base64.b64decode(one) for one in load["requests"]])
    metadata = [(name.lower(), value) for name, value in load["headers"].items()]

    async def client() -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        async with grpc.aio.insecure_channel(load["address"], options) as channel:
            ask = channel.unary_unary(load["path"])  # bytes in, bytes out
            while True:
                started = time.perf_counter()
                await ask(next(requests), metadata=metadata)
                taken.add(started)

    clients = [asyncio.ensure_future(client()) for _ in range(load["concurrency"])]
    ended = asyncio.ensure_future(taken.wait())
    done, _ = await asyncio.wait([ended, *clients], return_when=asyncio.FIRST_COMPLETED)
    for one in done:
        try:
            one.result()
        except grpc.aio.AioRpcError as error:
            raise _LoadError(f"{error.code().name}: {error.details()}") from None


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Run the load of stdin."""
    load = json.load(sys.stdin)
    taken = _Taken(load["warm_seconds"], load["seconds"])
    try:
        asyncio.run((_grpc if load["grpc"] else _http)(load, taken))
    except _LoadError as error:
        _write(json.dumps({"error": str(error)}))
        return
    except OSError as error:
        _write(json.dumps({"error": f"{error}. Check that the server runs."}))
        return
    _write(json.dumps(taken.result()))


if __name__ == "__main__":
    main()
