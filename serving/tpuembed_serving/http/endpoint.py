"""The base of raw ASGI handlers: reads a body within its limit, answers, and informs observers."""

import abc
import logging
import urllib.parse
import zlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, NamedTuple

from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.http.json import encode_error
from tpuembed_serving.telemetry.observers import Telemetry
from tpuembed_serving.telemetry.request_record import REQUEST_ID, REST, RequestRecord, sane_request_id

__all__ = [
    "HTTP_STATUS",
    "HttpEndpoint",
    "Message",
    "Receive",
    "Reply",
    "Scope",
    "Send",
    "header",
    "raw_path",
    "raw_target",
    "refusal",
    "reply_headers",
    "send_reply",
]

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

HTTP_STATUS = {
    Code.OK: 200,
    Code.CANCELLED: 499,
    Code.UNKNOWN: 500,
    Code.INVALID_ARGUMENT: 400,
    Code.DEADLINE_EXCEEDED: 504,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.PERMISSION_DENIED: 403,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.FAILED_PRECONDITION: 400,
    Code.ABORTED: 409,
    Code.OUT_OF_RANGE: 400,
    Code.UNIMPLEMENTED: 501,
    Code.INTERNAL: 500,
    Code.UNAVAILABLE: 503,
    Code.DATA_LOSS: 500,
    Code.UNAUTHENTICATED: 401,
}
"""HTTP status by code, as in ToHTTPStatusCode of TensorFlow Serving's http_server.cc."""

_BODY_TOO_LARGE: Final = 413
_MAX_INFLATED_BYTES: Final = 100 * 2**20
_JSON: Final = b"application/json"
_RETRY_AFTER: Final = (b"retry-after", b"1")
"""The header of answers to an overload. Most queues are empty again after a second."""


class Reply(NamedTuple):
    """An answer. `code` is the status code of which `status` is the HTTP form."""

    status: int
    body: bytes
    code: Code = Code.OK
    content_type: bytes = _JSON


class _DisconnectedError(Exception):
    """The client disconnected before its request was complete."""


class _BodyTooLargeError(Exception):
    """The request body is larger than the limit."""


class HttpEndpoint(abc.ABC):
    """Answers HTTP requests. A StatusError becomes its HTTP status and a JSON object with the error."""

    def __init__(self, max_body_bytes: int | None, telemetry: Telemetry | None = None) -> None:
        self._max_body_bytes = max_body_bytes
        self._telemetry = telemetry if telemetry is not None and telemetry.observes else None

    @abc.abstractmethod
    async def answer(self, scope: Scope, receive: Receive) -> Reply:
        """Return the answer to a request.

        Raises:
            StatusError: the answer is an error.
        """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        try:
            if self._telemetry is None:
                reply, request_id = await self._reply(scope, receive), sane_request_id(header(scope, REQUEST_ID))
            else:
                reply, request_id = await self._observed(self._telemetry, scope, receive)
        except _DisconnectedError:
            return
        await send_reply(send, reply, request_id)

    async def _observed(self, telemetry: Telemetry, scope: Scope, receive: Receive) -> tuple[Reply, str]:
        record = telemetry.begin(REST, scope["method"], raw_target(scope), scope["headers"])
        reply = await self._reply(scope, self._noting(receive, record))
        record.answered(reply.code, reply.status, len(reply.body))
        telemetry.finish(record)
        return reply, record.request_id or sane_request_id(record.request_header(REQUEST_ID))

    def _noting(self, receive: Receive, record: RequestRecord) -> Receive:
        """Return `receive`, extended to note the size and the time of the body in the record."""
        size = 0

        async def noted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            record.body(size)
            return message

        return noted

    async def _reply(self, scope: Scope, receive: Receive) -> Reply:
        try:
            return await self.answer(scope, receive)
        except _DisconnectedError:
            raise
        except _BodyTooLargeError:
            text = f"the request body is larger than the limit of {self._max_body_bytes} bytes"
            return Reply(_BODY_TOO_LARGE, encode_error(text), Code.RESOURCE_EXHAUSTED)
        except Exception as error:
            return refusal(error)

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """Read the body, and decompress it if it is gzip."""
        length = header(scope, b"content-length")
        if length.isdigit():
            self._check_size(int(length))  # before the body is read
        body, more = await self._read_part(receive, 0)
        if more:
            body = await self._read_rest(receive, body)
        if b"gzip" not in header(scope, b"content-encoding"):
            return body
        inflated = _inflate(body)
        self._check_size(len(inflated))
        return inflated

    def _check_size(self, size: int) -> None:
        if self._max_body_bytes is not None and size > self._max_body_bytes:
            raise _BodyTooLargeError

    async def _read_rest(self, receive: Receive, first: bytes) -> bytes:
        parts, size, more = [first], len(first), True
        while more:
            part, more = await self._read_part(receive, size)
            parts.append(part)
            size += len(part)
        return b"".join(parts)

    async def _read_part(self, receive: Receive, size: int) -> tuple[bytes, bool]:
        """Read the next part of a body after `size` bytes. Returns it, and True if more follows."""
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _DisconnectedError
        part = message.get("body", b"")
        self._check_size(size + len(part))
        return part, message.get("more_body", False)


def refusal(error: Exception) -> Reply:
    """Return the answer to a request that failed. An unexpected error is logged, and the client sees "internal error"."""
    if isinstance(error, StatusError):
        return Reply(HTTP_STATUS[error.code], encode_error(error.message), error.code)
    logger.error("a request failed", exc_info=error)
    return Reply(HTTP_STATUS[Code.INTERNAL], encode_error("internal error"), Code.INTERNAL)


def reply_headers(reply: Reply, request_id: str = "") -> list[tuple[bytes, bytes]]:
    """Return the headers of `reply` to a request with this ID, if it has one."""
    headers = [(b"content-type", reply.content_type), (b"content-length", b"%d" % len(reply.body))]
    if reply.code is Code.UNAVAILABLE:
        headers.append(_RETRY_AFTER)
    if request_id:
        headers.append((REQUEST_ID, request_id.encode("ascii")))
    return headers


async def send_reply(send: Send, reply: Reply, request_id: str = "", *more: tuple[bytes, bytes]) -> None:
    """Send `reply`, with `more` headers."""
    headers = [*reply_headers(reply, request_id), *more]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})


def raw_target(scope: Scope) -> bytes:
    """Return path and query as they were sent. TensorFlow Serving matches its patterns against both."""
    path, query = raw_path(scope), scope.get("query_string", b"")
    return path + b"?" + query if query else path


def raw_path(scope: Scope) -> bytes:
    """Return the path as it was sent."""
    return scope.get("raw_path") or urllib.parse.quote(scope["path"]).encode("ascii")


def header(scope: Scope, name: bytes) -> bytes:
    """Return the first header of that name (in lower case), or empty bytes."""
    value: bytes
    for key, value in scope["headers"]:
        if key == name:
            return value
    return b""


def _inflate(body: bytes) -> bytes:
    """Decompress gzip. Invalid or too large bodies become empty, and are refused as such, as in TensorFlow Serving."""
    inflater = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        inflated = inflater.decompress(body, _MAX_INFLATED_BYTES)
    except zlib.error:
        return b""
    return inflated if inflater.eof else b""
