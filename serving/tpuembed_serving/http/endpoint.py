"""HTTP requests over ASGI: observes, authenticates and routes them, reads bodies within their limits, and sends answers."""

import asyncio
import functools
import logging
import urllib.parse
import zlib
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any, Final, NamedTuple, Protocol

from tpuembed_serving.core.api_keys import KEY_REFUSAL, ApiKeys
from tpuembed_serving.core.pipeline import INLINE_BYTES, MemoryBudget
from tpuembed_serving.core.request_record import (
    HTTP,
    REQUEST_ID,
    REST,
    RequestRecord,
    sane_request_id,
)
from tpuembed_serving.core.status import Code, StatusError, TooLargeError, invalid_argument
from tpuembed_serving.http.json import LEAST_DECODING_BYTES, encode_error
from tpuembed_serving.http.static import OPEN_PATHS
from tpuembed_serving.telemetry.observers import Telemetry

__all__ = [
    "HTTP_STATUS",
    "ApiHandler",
    "App",
    "Body",
    "BodyReader",
    "ClientLeftError",
    "HttpEndpoint",
    "Message",
    "Receive",
    "Reply",
    "Scope",
    "Send",
    "UnknownCodingError",
    "answer_headers",
    "header",
    "raw_path",
    "raw_target",
    "refusal",
    "reply_headers",
]

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

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

_TOO_LARGE: Final = 413
_UNSUPPORTED: Final = 415
"""The limit of a body that was compressed, unless there is one for all bodies. It is TensorFlow Serving's."""
_PIECE_BYTES: Final = 2**20
_INFLATED_AT_ONCE: Final = 16 * 2**10
_GZIP: Final = zlib.MAX_WBITS | 16
_JOINED_BYTES: Final = 4 * 2**20
"""The parts of a larger body are joined in a thread."""
_JSON: Final = b"application/json"
_RETRY_AFTER: Final = (b"retry-after", b"1")
"""The header of answers to an overload. Most queues are empty again after a second."""
_HEALTH_PATHS: Final = frozenset({"/healthz", "/readyz", "/ping", "/v2/health/live", "/v2/health/ready"})
"""Observers do not see health checks."""


class Reply(NamedTuple):
    """An answer. `code` is the status code of which `status` is the HTTP form. `headers` are more headers of its own."""

    status: int
    body: bytes
    code: Code = Code.OK
    content_type: bytes = _JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()


class ClientLeftError(Exception):
    """The client disconnected before its answer."""


class UnknownCodingError(StatusError):
    """A body has a Content-Encoding that this server does not decode. HTTP answers 415."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.INVALID_ARGUMENT, message)


class Body(NamedTuple):
    """A body. `reserved` bytes are reserved for it, which the caller releases."""

    content: bytes
    reserved: int


class BodyReader:
    """Reads the bodies of requests."""

    def __init__(self, max_bytes: int, memory: MemoryBudget) -> None:
        """Create the reader. `max_bytes` limits bodies before and after decompression.

        `memory` is reserved for bodies.
        """
        self._max_bytes, self.memory = max_bytes, memory

    async def __call__(self, scope: Scope, receive: Receive) -> Body:
        """Return the body, decompressed if it is gzip. Memory is reserved for a large body while it arrives.

        Raises:
            StatusError: it is too large, is not valid gzip, or has another coding, or the other requests use the memory.
            ClientLeftError: the client disconnected.
        """
        is_gzip = _is_gzip(scope)
        length = header(scope, b"content-length")
        if length.isdigit():
            _check_size(int(length), self._max_bytes)  # before the body is read
        parts, size, more, reserved = [], 0, True, 0
        try:
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeftError
                part, more = message.get("body", b""), message.get("more_body", False)
                size += len(part)
                _check_size(size, self._max_bytes)
                if size > INLINE_BYTES:
                    self.memory.reserve(size - reserved, reserved)
                    reserved = size
                parts.append(part)
            join = functools.partial(b"".join, parts)  # of many bytes, it releases Python's lock
            body = parts[0] if len(parts) == 1 else join() if size < _JOINED_BYTES else await asyncio.to_thread(join)
            parts.clear()
            if not is_gzip:
                return Body(body, reserved)
            content, needed = await self._inflate(body, reserved)
            return Body(content, reserved + needed)
        except BaseException:
            self.memory.release(reserved)
            raise

    async def _inflate(self, body: bytes, reserved: int) -> Body:
        """Decompress gzip in threads. A large body is decompressed twice: first only to learn its size."""
        size, content = await asyncio.to_thread(_measure, body, self._max_bytes)
        if content is not None:
            return Body(content, 0)
        needed = size * LEAST_DECODING_BYTES
        self.memory.reserve(needed, reserved)
        try:
            return Body(await asyncio.to_thread(b"".join, _inflated(body)), needed)
        except BaseException:
            self.memory.release(needed)
            raise


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise TooLargeError(f"the request body is larger than the limit of {limit} bytes")


def _is_gzip(scope: Scope) -> bool:
    """Returns True if the body is compressed. Raises StatusError for any coding but gzip."""
    found = b",".join([value for key, value in scope["headers"] if key == b"content-encoding"])
    codings = [coding.strip().lower() for coding in found.decode("latin-1").split(",")]
    codings = [coding for coding in codings if coding not in ("", "identity")]
    if codings in ([], ["gzip"], ["x-gzip"]):
        return bool(codings)
    raise UnknownCodingError(
        f"The Content-Encoding {', '.join(codings)} is not supported. Send the body as gzip, or as it is."
    )


def _measure(body: bytes, limit: int) -> tuple[int, bytes | None]:
    """Return the size of gzip's content, and the content if it is small.

    Raises:
        StatusError: it is larger than `limit`, or the body is not gzip.
    """
    size, pieces = 0, list[bytes]()
    for piece in _inflated(body):
        size += len(piece)
        _check_size(size, limit)
        if size <= _PIECE_BYTES:
            pieces.append(piece)
    return size, b"".join(pieces) if size <= _PIECE_BYTES else None


def _inflated(body: bytes) -> Iterator[bytes]:
    """Yield the content of gzip, which may have several members, in pieces of up to `_PIECE_BYTES`.

    Raises:
        StatusError: INVALID_ARGUMENT, the body is not gzip, or ends too early.
    """
    at, inflater = 0, zlib.decompressobj(_GZIP)
    while at < len(body) or not inflater.eof:
        if inflater.eof:
            inflater = zlib.decompressobj(_GZIP)
        # zlib copies what it does not use: with all of the body, many small members take quadratic time.
        part = body[at : at + _INFLATED_AT_ONCE]
        try:
            piece = inflater.decompress(part, _PIECE_BYTES)
        except zlib.error as error:
            cause = str(error).rpartition(": ")[2]
            raise invalid_argument(
                f"The request body is not valid gzip: {cause}. Compress it again, or send it as it is."
            ) from None
        if not part and not piece:
            raise invalid_argument(f"The request body is incomplete gzip: it ends after {at} bytes. Send all of it.")
        at += len(part) - len(inflater.unconsumed_tail) - len(inflater.unused_data)
        yield piece


class ApiHandler(Protocol):
    """Answers requests of an API; see RestApi."""

    async def answer(self, scope: Scope, receive: Receive, record: RequestRecord | None) -> Reply:
        """Return the answer, or raise StatusError."""


class HttpEndpoint:
    """An ASGI application that stands before APIs and other pages.

    It tells observers of every request but health checks, refuses requests without a valid API key, and adds CORS headers.
    """

    def __init__(
        self,
        find_api: Callable[[Scope], ApiHandler | None],
        pages: App,
        *,
        telemetry: Telemetry,
        keys: ApiKeys | None = None,
        cors: bool = False,
        health_route: str | None = None,
    ) -> None:
        """`health_route` is a URL path of health checks, besides those of the server."""
        self._find_api, self._pages, self._keys = find_api, pages, keys
        self._health_paths = _HEALTH_PATHS | ({health_route} if health_route else set())
        self._open_paths = self._health_paths | OPEN_PATHS  # need no key
        self._telemetry = telemetry if telemetry.observes else None
        self._cors = _cors_headers(keys is not None) if cors else []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request; see ASGI."""
        record, allowed = None, self._allows(scope)
        api = self._find_api(scope) if allowed else None
        if self._telemetry is not None and scope["path"] not in self._health_paths:
            entrypoint = REST if api is not None else HTTP
            record = self._telemetry.begin(entrypoint, scope["method"], raw_target(scope), scope["headers"])
            receive = _noting(receive, record)
        try:
            if not allowed:
                code = Code.UNAUTHENTICATED
                reply = Reply(HTTP_STATUS[code], encode_error(KEY_REFUSAL), code)
                await self._send(send, scope, reply, record, (b"www-authenticate", b"Bearer"))
            elif api is not None:
                await self._send(send, scope, await self._reply(api, scope, receive, record), record)
            else:
                await self._pages(scope, receive, self._noted(send, record))
        except ClientLeftError:
            self._finish(record, Code.CANCELLED, HTTP_STATUS[Code.CANCELLED], 0)

    def _allows(self, scope: Scope) -> bool:
        """Returns True if a request may pass. CORS preflights have no key, and their answers reveal nothing."""
        if self._keys is None or scope["path"] in self._open_paths or scope["method"] == "OPTIONS":
            return True
        return self._keys.accept(scope["headers"]) is not None

    async def _reply(self, api: ApiHandler, scope: Scope, receive: Receive, record: RequestRecord | None) -> Reply:
        try:
            return await api.answer(scope, receive, record)
        except ClientLeftError:
            raise
        except Exception as error:
            return refusal(error)

    async def _send(
        self, send: Send, scope: Scope, reply: Reply, record: RequestRecord | None, *more: tuple[bytes, bytes]
    ) -> None:
        self._finish(record, reply.code, reply.status, len(reply.body))
        request_id = (record and record.request_id) or sane_request_id(header(scope, REQUEST_ID))
        headers = [*reply_headers(reply, request_id), *more, *self._cors]
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": reply.body})

    def _noted(self, send: Send, record: RequestRecord | None) -> Send:
        """Return `send`, extended to add CORS headers and to note the answer."""
        status, size = 0, 0

        async def noted(message: Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], *self._cors]}
            else:
                size += len(message.get("body", b""))
                if not message.get("more_body", False):
                    self._finish(record, Code.OK if status < 400 else Code.UNKNOWN, status, size)
            await send(message)

        return noted

    def _finish(self, record: RequestRecord | None, code: Code, status: int, size: int) -> None:
        if record is not None and self._telemetry is not None:
            record.answered(code, status, size)
            self._telemetry.finish(record)


def _noting(receive: Receive, record: RequestRecord) -> Receive:
    """Return `receive`, extended to note the size and the time of the body in the record."""
    size = 0

    async def noted() -> Message:
        nonlocal size
        message = await receive()
        if message["type"] == "http.request":
            size += len(message.get("body", b""))
            record.body(size)
        return message

    return noted


def _cors_headers(has_keys: bool) -> list[tuple[bytes, bytes]]:
    """Return TensorFlow Serving's CORS headers (http_rest_api_util.cc), with the headers that this server adds."""
    allowed = b"Content-Type, Authorization, X-API-Key" if has_keys else b"Content-Type"
    return [
        (b"access-control-allow-origin", b"*"),
        (b"access-control-allow-methods", b"POST, GET"),
        (b"access-control-allow-headers", allowed),
        (b"access-control-expose-headers", b"X-Model-Version"),
    ]


def refusal(error: Exception) -> Reply:
    """Return the answer to a request that failed. An unexpected error is logged, and the client sees "internal error"."""
    if isinstance(error, UnknownCodingError):
        return Reply(_UNSUPPORTED, encode_error(error.message), error.code, headers=((b"accept-encoding", b"gzip"),))
    if isinstance(error, StatusError):
        status = _TOO_LARGE if isinstance(error, TooLargeError) else HTTP_STATUS[error.code]
        return Reply(status, encode_error(error.message), error.code)
    logger.error("a request failed", exc_info=error)
    return Reply(HTTP_STATUS[Code.INTERNAL], encode_error("internal error"), Code.INTERNAL)


def reply_headers(reply: Reply, request_id: str = "") -> list[tuple[bytes, bytes]]:
    """Return the headers of `reply` to a request with this ID, if it has one."""
    headers = [(b"content-type", reply.content_type), (b"content-length", b"%d" % len(reply.body)), *reply.headers]
    if reply.code is Code.UNAVAILABLE:
        headers.append(_RETRY_AFTER)
    if request_id:
        headers.append((REQUEST_ID, request_id.encode("ascii")))
    return headers


@functools.lru_cache(maxsize=1024)
def answer_headers(version: int) -> tuple[tuple[bytes, bytes], ...]:
    """Return the headers of a prediction: the version that answered."""
    return ((b"x-model-version", b"%d" % version),)


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
