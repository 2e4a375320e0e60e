"""A client that asks what is right while others do not."""

import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import httpx

__all__ = ["GoodClient"]


class GoodClient(threading.Thread):
    """Posts `body` to `url` again and again; at the end of `with`, every answer was 200 with `answer`."""

    def __init__(self, url: str, body: bytes, answer: Mapping[str, Any]) -> None:
        super().__init__()
        self._url, self._body, self._answer = url, body, answer
        self._stop_asking = threading.Event()
        self.answers = 0
        self.failure: Any = None

    def run(self) -> None:
        with httpx.Client(timeout=300) as client:
            while not self._stop_asking.is_set() and self.failure is None:
                try:
                    reply = client.post(self._url, content=self._body)
                    if (reply.status_code, reply.json()) != (200, self._answer):
                        self.failure = (reply.status_code, reply.text)
                except (httpx.HTTPError, ValueError) as error:
                    self.failure = error
                self.answers += 1
                time.sleep(0.002)

    def __enter__(self) -> Self:
        self.start()
        deadline = time.monotonic() + 60
        while not self.answers and self.failure is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_asking.set()
        self.join(300)
        assert self.failure is None, self.failure
