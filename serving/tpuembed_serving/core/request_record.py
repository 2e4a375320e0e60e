"""The record of a request that observers receive. Records are kept only if the server has an observer."""

import os
import re
import time
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from tpuembed_serving.core.status import Code

__all__ = [
    "GRPC",
    "HTTP",
    "REQUEST_ID",
    "REST",
    "STAGES",
    "Headers",
    "Observer",
    "RequestLogging",
    "RequestRecord",
    "sane_request_id",
    "stage_seconds",
]

REST: Final = "REST"
GRPC: Final = "GRPC"
"""Entry points, as TensorFlow Serving's metrics name them."""
HTTP: Final = "HTTP"
"""The entry point of requests for pages, and of those without a valid key. Only the access log has them."""

REQUEST_ID: Final = b"x-request-id"
_SANE_ID: Final = re.compile(rb"[!-~]{1,128}")

Headers = Sequence[tuple[bytes, bytes]]


STAGES: Final = ("read", "parse", "queue", "run", "encode")
"""The stages of a request.

- read: until its body has arrived.
- parse: until it is queued, or until its end if it never is.
- queue: until its batch starts, and from the batch's end until the event loop resumes.
- run: the model.
- encode: the answer.
"""


class RequestLogging(NamedTuple):
    """How requests of a model are logged; see `grpc.request_log`.

    Attributes:
        filename_prefix: folder and start of the files' names.
        sampling_rate: the part of the requests that is logged, from 0 to 1.
    """

    filename_prefix: str
    sampling_rate: float


class RequestRecord:
    """One request. Times are in seconds, by `time.perf_counter`.

    Attributes:
        entrypoint: REST, GRPC or HTTP.
        method: the HTTP method, or the service's.
        path: path and query as they were sent, or the path of the gRPC method.
        api: predict, classify, regress (REST) or Predict, ... (gRPC); empty for other requests.
        model: the model that the request names; empty if none.
        version: the version that answered; None if none did.
        rows: the rows of the inputs; None if it was not run, or if the inputs differ in it.
        request_id: the client's request ID if it is valid, or a new one; empty before `ensure_request_id`.
        headers: the request's headers, with names in lower case.
        code: the status code of the answer; `status` is the HTTP status, or the code's number.
    """

    __slots__ = (
        "_left", "_queue", "_run", "api", "bytes_in", "bytes_out", "code", "ended", "entrypoint", "headers",
        "method", "model", "path", "received", "request_id", "rows", "started", "status", "version",
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
        """Note that the body has arrived, and its size."""
        self.bytes_in, self.received = size, time.perf_counter()

    def ran(self, rows: int | None, queue: float, run: float) -> None:
        """Note that the request was run, and the seconds that it waited and ran."""
        self.rows, self._queue, self._run, self._left = rows, queue, run, time.perf_counter()

    def answered(self, code: Code, status: int, size: int) -> None:
        """Note the answer: its code, HTTP status and size."""
        self.code, self.status, self.bytes_out, self.ended = code, status, size, time.perf_counter()

    @property
    def has_run(self) -> bool:
        """Returns True if the request was run."""
        return self._left > 0

    def request_header(self, name: bytes) -> bytes:
        """Return the first header of that name (in lower case), or empty bytes."""
        return next((value for key, value in self.headers if key == name), b"")

    def ensure_request_id(self) -> str:
        """Return the request ID: the client's if it is valid, else a new one."""
        if not self.request_id:
            self.request_id = sane_request_id(self.request_header(REQUEST_ID)) or os.urandom(8).hex()
        return self.request_id


def stage_seconds(record: RequestRecord) -> tuple[float, ...]:
    """Return the seconds of each stage of an answered request. 0.0 for a stage that was not reached."""
    started, queue, run, left, ended = record.started, record._queue, record._run, record._left, record.ended
    received = record.received or started
    if not record.has_run:
        return received - started, ended - received, queue, run, 0.0
    return received - started, max(0.0, left - queue - run - received), queue, run, ended - left


class Observer(Protocol):
    """Counts, logs or traces requests."""

    wants_request_id: bool

    def finish(self, record: RequestRecord) -> None:
        """Take the record of an answered request. The event loop's thread calls it, so it must be quick."""

    def close(self) -> None:
        """Write all queued records. No more requests follow."""


def sane_request_id(value: bytes) -> str:
    """Return a client's request ID, or an empty string if a log or a header should not carry it."""
    return value.decode("ascii") if _SANE_ID.fullmatch(value) else ""
