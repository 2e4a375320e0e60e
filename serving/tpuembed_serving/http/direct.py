"""Answers common predict and infer requests without ASGI.

ASGI's task, scope and messages cost a request of one row more than its prediction. So uvicorn's connections pass the common
case to this module: a small body of known length on a keep-alive connection. All other requests, also those without a valid
API key, go through ASGI (`endpoint`). The pipeline and the answers are the same.
"""

import asyncio
import functools
import logging
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tpuembed_serving.core.api_keys import ApiKeys
from tpuembed_serving.core.pipeline import INLINE_BYTES, Call, Pipeline
from tpuembed_serving.core.request_record import REQUEST_ID, REST, Headers, RequestRecord, sane_request_id
from tpuembed_serving.core.service import ModelSpec
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.http.endpoint import HTTP_STATUS, Reply, refusal, reply_headers
from tpuembed_serving.http.open_inference import HEADER_BYTES, RestInfer, find_infer, parse_header_bytes
from tpuembed_serving.http.platforms import DefaultPredict, PlatformApi
from tpuembed_serving.http.rest import RestPredict, find_post
from tpuembed_serving.telemetry.observers import Telemetry

__all__ = ["DirectCycle", "DirectPredict"]

logger = logging.getLogger(__name__)

_UNUSUAL: Final = frozenset({b"connection", b"content-encoding", b"expect", b"transfer-encoding", b"upgrade"})
"""Headers that this module does not handle, except `connection: keep-alive`."""
_COPIED_BYTES: Final = 2**20
"""A larger body is written on its own: to copy it would delay others."""


class DirectPredict:
    """Begins cycles for the requests that can be answered here."""

    def __init__(
        self,
        pipeline: Pipeline,
        telemetry: Telemetry,
        platforms: PlatformApi,
        *,
        keys: ApiKeys | None = None,
        max_body_bytes: int | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.telemetry = telemetry if telemetry.observes else None
        self._platforms, self._keys = platforms, keys
        self._in_progress = 0
        self._unsent: list[tuple[DirectCycle, Reply]] = []
        self._max_bytes = INLINE_BYTES if max_body_bytes is None else min(INLINE_BYTES, max_body_bytes)

    def begin(self, protocol: HttpToolsProtocol, target: bytes, headers: Headers) -> "DirectCycle | None":
        """Return the cycle of a POST request if it can be answered here, else None. Names of `headers` are in lower case."""
        found = _find_target(target)
        spec, api = found or (self._platforms.find_post(target), "predict")
        if spec is None:
            return None
        size, request_id, header_bytes = -1, None, b""
        for name, value in headers:
            if name == b"content-length" and value.isdigit():
                size = int(value)
            elif name == REQUEST_ID and request_id is None:
                request_id = sane_request_id(value)
            elif name == HEADER_BYTES and not header_bytes:
                header_bytes = value
            elif name in _UNUSUAL and (name != b"connection" or value.lower() != b"keep-alive"):
                return None
        if not 0 <= size <= self._max_bytes or (self._keys is not None and self._keys.accept(headers) is None):
            return None
        prediction: RestPredict | RestInfer
        if found is None:
            prediction = DefaultPredict(spec)
        elif api == "predict":
            prediction = RestPredict(spec)
        else:
            try:
                prediction = RestInfer(spec, parse_header_bytes(header_bytes))
            except StatusError:
                return None
        record = None
        if self.telemetry is not None:
            record = self.telemetry.begin(REST, "POST", target, headers)
            record.model, record.api = spec.name, api
            request_id = record.request_id or request_id
        return DirectCycle(self, protocol, prediction, request_id or "", record)

    def start(
        self, cycle: "DirectCycle", prediction: RestPredict | RestInfer, body: bytes, record: RequestRecord | None
    ) -> Call:
        """Start to answer a request. `cycle.respond` takes the answer."""
        self._in_progress += 1
        return self.pipeline.start(prediction, body, cycle.respond, record)

    def end(self, cycle: "DirectCycle", reply: Reply) -> None:
        """Send an answer, together with the other answers of its batch.

        Between answers that leave one by one a client falls asleep, and to wake it takes longer than to write.
        """
        self._in_progress -= 1
        self._unsent.append((cycle, reply))
        if not self._in_progress:
            self._send_all()
        elif len(self._unsent) == 1:
            asyncio.get_running_loop().call_soon(self._send_all)

    def give_up(self, call: Call) -> None:
        """Stop the work for a client that has left. Nothing is sent to it."""
        self._in_progress -= 1
        self.pipeline.give_up(call)

    def _send_all(self) -> None:
        unsent, self._unsent = self._unsent, []
        for cycle, reply in unsent:
            try:
                cycle.send(reply)
            except Exception:  # the other answers must still be sent
                logger.exception("the answer to a request was lost")


class _NeverNotified:
    """The event that uvicorn sets when a piece of a body arrives, or when the client disconnects."""

    def set(self) -> None:
        """Do nothing: nothing waits for the event."""


class DirectCycle:
    """One request and its answer. Has the attributes of uvicorn's RequestResponseCycle that connections use."""

    __slots__ = (
        "_body",
        "_call",
        "_direct",
        "_prediction",
        "_protocol",
        "_record",
        "_request_id",
        "disconnected",
        "keep_alive",
        "response_complete",
        "response_started",
    )

    message_event = _NeverNotified()

    def __init__(
        self,
        direct: DirectPredict,
        protocol: HttpToolsProtocol,
        prediction: RestPredict | RestInfer,
        request_id: str,
        record: RequestRecord | None,
    ) -> None:
        self._direct, self._protocol, self._prediction = direct, protocol, prediction
        self._request_id, self._record = request_id, record
        self._body = bytearray()
        self._call: Call | None = None
        self.disconnected = self.response_started = self.response_complete = False
        self.keep_alive = True

    def add(self, body: bytes) -> None:
        """Append a piece of the body. Often it is the whole body."""
        self._body += body

    def answer(self) -> None:
        """Start to answer the request. Called once the body is complete."""
        record = self._record
        if record is not None:
            record.body(len(self._body))
        self._call = self._direct.start(self, self._prediction, bytes(self._body), record)

    def give_up(self) -> None:
        """Stop the work for a client that has left."""
        if self.response_complete:
            return
        self.response_complete = True
        if self._call is not None:
            if self._call.is_over:  # its answer is about to be sent
                return
            self._direct.give_up(self._call)
        self._note(Code.CANCELLED, HTTP_STATUS[Code.CANCELLED], 0)

    def respond(self, answer: bytes | Exception) -> None:
        """Take the answer; see `core.pipeline.Respond`."""
        reply = self._prediction.reply(answer) if isinstance(answer, bytes) else refusal(answer)
        self._note(reply.code, reply.status, len(reply.body))
        self._direct.end(self, reply)

    def _note(self, code: Code, status: int, size: int) -> None:
        record, telemetry = self._record, self._direct.telemetry
        if record is not None and telemetry is not None:
            record.answered(code, status, size)
            telemetry.finish(record)

    def send(self, reply: Reply) -> None:
        """Write the answer."""
        protocol: Any = self._protocol
        self.response_started = self.response_complete = True
        if protocol.transport.is_closing():
            return
        headers = [*protocol.server_state.default_headers, *reply_headers(reply, self._request_id)]
        lines = b"".join([b"%b: %b\r\n" % header for header in headers])
        end = b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n"
        if len(reply.body) < _COPIED_BYTES:
            protocol.transport.write(b"%b%b%b%b" % (STATUS_LINE[reply.status], lines, end, reply.body))
        else:
            protocol.transport.write(b"%b%b%b" % (STATUS_LINE[reply.status], lines, end))
            protocol.transport.write(reply.body)
        if not self.keep_alive:
            protocol.transport.close()
        protocol.on_response_complete()


@functools.lru_cache(maxsize=1024)
def _find_target(target: bytes) -> tuple[ModelSpec, str] | None:
    """Return the model of a request, and its API: "predict" or "infer". None for any other."""
    try:
        found = find_post(target)
    except StatusError:
        return None
    if found is not None:
        return found if found[1] == "predict" else None
    spec = find_infer(target.partition(b"?")[0])
    return None if spec is None else (spec, "infer")
