"""What is remembered of one request while it is answered, for operators. Nothing is, unless the server has an observer."""

import contextvars
import itertools
import operator
import os
import re
import time
from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from tpuembed_serving.core.status import Code

__all__ = [
    "GRPC",
    "REQUEST_ID",
    "REST",
    "STAGES",
    "Headers",
    "Observer",
    "RequestRecord",
    "current_record",
    "name_request",
    "sane_request_id",
    "set_current_record",
    "stage_seconds",
]

REST: Final = "REST"
GRPC: Final = "GRPC"
"""Entry points, as TensorFlow Serving's metrics name them."""

REQUEST_ID: Final = b"x-request-id"
_SANE_ID: Final = re.compile(rb"[!-~]{1,128}")

Headers = Sequence[tuple[bytes, bytes]]


STAGES: Final = ("read", "parse", "queue", "run", "encode")
"""Of a request: until its body is there; until it waits for a run, or to the end where it never does; until the run begins, and
from its end until the event loop goes on; the model; the answer."""


class RequestRecord:
    """One request. Times are those of `time.perf_counter`, in seconds, unless they say otherwise.

    Attributes:
        entrypoint: REST or GRPC.
        method: of HTTP, or of the service.
        path: as it was sent, without what a URL must not show.
        api: predict, classify, regress (REST) or Predict, ... (gRPC); empty for what has no such name.
        model: as the request names it; empty where it names none.
        version: that answered; None where none did.
        rows: of the inputs; None where it never came to a run, or they do not agree about it.
        request_id: the client's own, where it is sane.
        headers: the request's, names in lower case.
        code: of the answer; `status` is HTTP's, or the code's number.
    """

    __slots__ = (
        "_left", "_queue", "_run", "api", "bytes_in", "bytes_out", "code", "ended", "entrypoint", "headers", "method",
        "model", "path", "received", "request_id", "rows", "started", "status", "version",
    )  # fmt: skip

    def __init__(self, entrypoint: str, method: str, path: bytes, headers: Headers, api: str = "") -> None:
        self.started = time.perf_counter()
        self.entrypoint, self.method, self.path, self.headers, self.api = entrypoint, method, path, headers, api
        self.model = ""
        self.version: int | None = None
        self.rows: int | None = None
        self.request_id = ""
        self.code = Code.OK
        self.status = self.bytes_in = self.bytes_out = 0
        self.received = self.ended = self._left = 0.0
        self._queue = self._run = 0.0

    def body(self, size: int) -> None:
        """The request is there, with so many bytes."""
        self.bytes_in, self.received = size, time.perf_counter()

    def ran(self, rows: int | None, queue: float, run: float) -> None:
        """A run answered it, after so many seconds of waiting and running."""
        self.rows, self._queue, self._run, self._left = rows, queue, run, time.perf_counter()

    def answered(self, code: Code, status: int, size: int) -> None:
        """The answer is there, with so many bytes."""
        self.code, self.status, self.bytes_out, self.ended = code, status, size, time.perf_counter()

    @property
    def has_run(self) -> bool:
        """Whether a run answered it."""
        return self._left > 0

    def request_header(self, name: bytes) -> bytes:
        """The first header of that name, in lower case; empty where there is none."""
        return next((value for key, value in self.headers if key == name), b"")

    def ensure_request_id(self) -> str:
        """The client's, or a new one."""
        if not self.request_id:
            self.request_id = sane_request_id(self.request_header(REQUEST_ID)) or os.urandom(8).hex()
        return self.request_id


_TIMES: Final = operator.attrgetter("started", "received", "_queue", "_run", "_left", "ended")


def stage_seconds(records: Sequence[RequestRecord]) -> npt.NDArray[np.float64]:
    """[records, stages]: how long each stage of answered requests took; 0.0 for what one never came to."""
    flat = np.fromiter(itertools.chain.from_iterable(map(_TIMES, records)), np.float64, 6 * len(records))
    started, received, queue, run, left, ended = flat.reshape(-1, 6).T
    has_run = left > 0
    received = np.where(received > 0, received, started)
    parse = np.where(has_run, np.maximum(0.0, left - queue - run - received), ended - received)
    encode = np.where(has_run, ended - left, 0.0)
    return np.stack([received - started, parse, queue, run, encode], axis=1)


class Observer(Protocol):
    """Who looks at requests: counts them, logs them, traces them."""

    wants_request_id: bool

    def finish(self, record: RequestRecord) -> None:
        """A request was answered. Called by the event loop's thread, and quick."""

    def close(self) -> None:
        """No more requests come; what is not written yet is."""


_CURRENT: contextvars.ContextVar[RequestRecord | None] = contextvars.ContextVar("request_record", default=None)

current_record = _CURRENT.get
"""The record of the request that is being answered; None where nobody observes."""

set_current_record = _CURRENT.set
"""From here on, what this task and its children do belongs to a record."""


def name_request(model: str, api: str) -> None:
    """What the request that is being answered asks of which model."""
    record = _CURRENT.get()
    if record is not None:
        record.model, record.api = model, api


def sane_request_id(value: bytes) -> str:
    """A client's name for its request; empty where it is none that a log or a header should carry."""
    return value.decode("ascii") if _SANE_ID.fullmatch(value) else ""
