"""Clients that ask a server all the time, and what they were answered when."""

import asyncio
import dataclasses
import json
import threading
import time
from types import TracebackType
from typing import Self

from tests.support.serving.process import ServerProcess

BODY = b'{"instances": [1.0, 2.0]}'


@dataclasses.dataclass(frozen=True)
class Asked:
    """One request: when it was sent and answered, on the clock of `time.monotonic`, and with what.

    Attributes:
        status: of the answer; 0 where the connection was lost.
        version: the factor that both predictions have, which is the number of a version of `save_scale`.
    """

    sent: float
    received: float
    status: int
    version: float


class Load:
    """Asks over `connections` connections from `with` to its end; one that is lost is opened anew."""

    def __init__(self, server: ServerProcess, connections: int, target: str = "") -> None:
        self._server, self._connections = server, connections
        self._target = target or f"{server.path}:predict"
        self.asked: list[Asked] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    @property
    def failed(self) -> list[Asked]:
        return [one for one in self.asked if one.status != 200]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    async def _run(self) -> None:
        await asyncio.gather(*(self._client() for _ in range(self._connections)))

    async def _client(self) -> None:
        while not self._stop.is_set():
            sent = time.monotonic()
            try:
                reader, writer = await asyncio.open_connection(self._server.host, self._server.port)
            except OSError:
                self.asked.append(Asked(sent, time.monotonic(), 0, 0.0))
                await asyncio.sleep(0.01)
                continue
            try:
                while not self._stop.is_set():
                    sent = time.monotonic()
                    status, version = await self._ask(reader, writer)
                    self.asked.append(Asked(sent, time.monotonic(), status, version))
            except (OSError, asyncio.IncompleteReadError):
                self.asked.append(Asked(sent, time.monotonic(), 0, 0.0))
            finally:
                writer.close()

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[int, float]:
        head = f"POST {self._target} HTTP/1.1\r\nHost: s\r\nContent-Length: {len(BODY)}\r\n\r\n"
        writer.write(head.encode() + BODY)
        status = int((await reader.readuntil(b"\r\n")).split()[1])
        headers = (await reader.readuntil(b"\r\n\r\n")).lower()
        size = int(headers.split(b"content-length:")[1].split()[0])
        answer = json.loads(await reader.readexactly(size))
        if status != 200:
            return status, 0.0
        one, two = answer["predictions"]
        assert two == 2 * one, answer
        return status, float(one)
