"""A request-response cycle without ASGI, which uvicorn's connections use in place of their own."""

from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tpuembed_serving.http.direct_predict import DirectPredict, PredictRequest
from tpuembed_serving.http.endpoint import Reply, reply_headers

__all__ = ["DirectCycle"]


class _NeverNotified:
    """The event that uvicorn sets when a piece of a body arrives."""

    def set(self) -> None:
        """Do nothing: nothing waits for the event."""


_NEVER_NOTIFIED: Final = _NeverNotified()


class DirectCycle:
    """One request and its answer. Has the attributes of uvicorn's RequestResponseCycle that connections use."""

    __slots__ = (
        "_body",
        "_protocol",
        "_request",
        "disconnected",
        "keep_alive",
        "response_complete",
        "response_started",
    )

    message_event = _NEVER_NOTIFIED

    def __init__(self, protocol: HttpToolsProtocol, request: PredictRequest) -> None:
        self._protocol, self._request = protocol, request
        self._body = bytearray()
        self.disconnected = self.response_started = self.response_complete = False
        self.keep_alive = True

    def add(self, body: bytes) -> None:
        """Append a piece of the body. Often it is the whole body."""
        self._body += body

    def answer(self, direct: DirectPredict) -> None:
        """Answer the request. Called once the body is complete."""
        direct.answer(self._request, bytes(self._body), self._send)

    def _send(self, reply: Reply) -> None:
        protocol: Any = self._protocol
        self.response_started = self.response_complete = True
        if self.disconnected or protocol.transport.is_closing():
            return
        parts = [STATUS_LINE[reply.status]]
        for name, value in protocol.server_state.default_headers:
            parts += (name, b": ", value, b"\r\n")
        for name, value in reply_headers(reply, self._request.request_id):
            parts += (name, b": ", value, b"\r\n")
        parts += (b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n", reply.body)
        protocol.transport.write(b"".join(parts))
        if not self.keep_alive:
            protocol.transport.close()
        protocol.on_response_complete()
