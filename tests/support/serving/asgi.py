"""Requests to an application over ASGI, without a socket."""

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator, MutableMapping
from typing import Any

from tpuembed_serving.http.app import ServingApp


@contextlib.contextmanager
def running(app: ServingApp) -> Iterator[None]:
    app.repository.start()
    yield
    app.executor.close()
    app.repository.stop()


def wait_until_ready(app: ServingApp) -> None:
    deadline = time.monotonic() + 10
    while not app.repository.ready:
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Reply:
    """What an ASGI application sent."""

    def __init__(self, messages: list[MutableMapping[str, Any]]) -> None:
        start, body = messages
        self.status: int = start["status"]
        self.headers = dict(start["headers"])
        self.body: bytes = body["body"]

    @property
    def error(self) -> str:
        value = json.loads(self.body)
        assert list(value) == ["error"]
        return str(value["error"])


def send(app: ServingApp, method: str, target: str, *parts: str | bytes, **headers: str) -> Reply:
    path, _, query = target.partition("?")
    chunks = [part.encode() if isinstance(part, str) else part for part in parts or (b"",)]
    incoming = [
        {"type": "http.request", "body": chunk, "more_body": index + 1 < len(chunks)}
        for index, chunk in enumerate(chunks)
    ]
    messages: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        if not incoming:  # the client waits for the answer
            await asyncio.Event().wait()
        return incoming.pop(0)

    async def collect(message: MutableMapping[str, Any]) -> None:
        messages.append(message)

    scope = {
        "type": "http", "http_version": "1.1", "scheme": "http", "method": method, "path": path,
        "raw_path": path.encode(), "query_string": query.encode(),
        "headers": [(key.replace("_", "-").encode(), value.encode()) for key, value in headers.items()],
    }  # fmt: skip
    asyncio.run(app(scope, receive, collect))
    return Reply(messages)
