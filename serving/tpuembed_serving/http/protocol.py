"""uvicorn's HTTP connections with more limits: on their number, on headers, and on slow clients.

They also end without losing a request when the server stops.

A client that sends nothing, sends its request byte by byte, or does not read its answer, holds memory and a file
descriptor. All three have a deadline here. All connections are checked periodically, so a request only sets two fields
and no timer.

An `Upgrade` header is ignored, as RFC 9110, section 7.8 allows. The parser ends a request with that header after its
headers, and would read the body as the next request. So the head is parsed again without the header, before the body.

Only this module and `direct` use internals of uvicorn's protocol classes.
"""

import asyncio
import collections
import time
from collections.abc import Iterable
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tpuembed_serving.core.security import ConnectionLimits
from tpuembed_serving.http.direct import DirectCycle, DirectPredict
from tpuembed_serving.http.json import encode_error

__all__ = ["close_slow_connections", "protocol_class"]

_CHECK_SECONDS: Final = 1.0
_TEXTS: Final = {
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    501: "Not Implemented",
    503: "Service Unavailable",
}
_SILENT_SECONDS: Final = 1.0
"""How long a connection without a request stays open during the drain, because its client may be about to send one."""
_OF_UPGRADES: Final = frozenset({b"upgrade", b"http2-settings"})


def protocol_class(limits: ConnectionLimits, direct: DirectPredict | None = None) -> type[HttpToolsProtocol]:
    """Return the class for uvicorn's option `http`: its protocol with `limits`. `direct` answers requests without ASGI."""
    return type("GuardedProtocol", (_GuardedProtocol,), {"limits": limits, "direct": direct})


async def close_slow_connections(connections: Iterable[Any]) -> None:
    """Check uvicorn's set of connections periodically, and close those whose clients are too slow. Never returns."""
    while True:
        await asyncio.sleep(_CHECK_SECONDS)
        now = time.monotonic()
        for connection in [one for one in connections if isinstance(one, _GuardedProtocol)]:
            connection.close_if_slow(now)


class _GuardedProtocol(HttpToolsProtocol):
    """A connection with limits.

    `_since` is when the server began to wait for bytes of a request; None if it does not wait. `_idle_since` is when the last
    answer was written, if no byte came after it. `_unread` is how many bytes of an answer the client had not read at the
    last check, and `_unread_since` when that number last changed.
    `_earlier` has the requests before the newest one that are not answered yet, in their order.
    """

    limits: ConnectionLimits
    direct: DirectPredict | None
    is_leaving = False
    """Set on the class: every later answer closes its connection."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._since: float | None = None
        self._idle_since: float | None = None
        self._unread, self._unread_since = 0, 0.0
        self._header_bytes = 0
        self._in_headers, self._is_refused = True, False
        self._asks_upgrade = self._has_begun = False
        self._earlier: collections.deque[Any] = collections.deque()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Check the number of connections; see asyncio."""
        super().connection_made(transport)
        self._since = time.monotonic()
        most = self.limits.connections
        if most is not None and len(self.connections) > most:
            self._refuse(503, f"too many connections (limit: {most})")

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the work for the client; see asyncio."""
        super().connection_lost(exc)
        for cycle in (*self._earlier, self.cycle):
            if type(cycle) is DirectCycle:
                cycle.give_up()
            elif cycle is not None:
                cycle.disconnected = True
                cycle.message_event.set()

    def eof_received(self) -> bool:  # type: ignore[override]  # as asyncio's
        """Answer a client that has closed its side after its request; see asyncio. TLS has no half-closed connections."""
        cycle: Any = self.cycle  # None before the first request
        if cycle is None or cycle.response_complete or self._has_begun or self.scheme == "https":
            return False
        cycle.keep_alive = False
        return True

    def data_received(self, data: bytes) -> None:
        """Parse bytes of the client; see asyncio."""
        if self._is_refused:
            return
        self._header_bytes += len(data)
        self._idle_since = None
        try:
            self._feed(data)
        except httptools.HttpParserError:
            if not (self._in_headers and self._is_behind_another()):
                self.send_400_response("Invalid HTTP request received.")
        if self._in_headers and self._header_bytes > self.limits.header_bytes:
            self._refuse_headers()

    def _feed(self, data: bytes) -> None:
        """Parse `data`. The parser raises at the end of each head with an `Upgrade` header."""
        try:
            self.parser.feed_data(data)
            return
        except httptools.HttpParserUpgrade as stop:
            rest = memoryview(data)[stop.args[0] :]
        while not self._is_refused:
            self._asks_upgrade = False
            self.parser.feed_data(self._head_without_upgrade())
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as stop:
                rest = rest[stop.args[0] :]

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode("ascii")
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                kept = [part for part in value.split(b",") if part.strip().lower() not in _OF_UPGRADES]
                if kept:
                    lines.append(b"connection: " + b",".join(kept))
            elif name not in _OF_UPGRADES:
                lines.append(name + b": " + value)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_message_begin(self) -> None:
        """Note the time of a request's first byte."""
        super().on_message_begin()
        self._since, self._has_begun = time.monotonic(), True

    def on_headers_complete(self) -> None:
        """Check the headers, and begin the request."""
        cycle: Any = self.cycle  # None before the first request
        self._in_headers = False
        if len(self.url) + sum([len(name) + len(value) + 4 for name, value in self.headers]) > self.limits.header_bytes:
            self._refuse_headers()
        elif self._begin_direct():
            if self.is_leaving:
                self.cycle.keep_alive = False
        elif self.parser.get_method() == b"CONNECT":
            self._refuse_head(501, "CONNECT is not supported: this server is not a proxy")
        elif coding := self._unknown_coding():
            text = (
                f"transfer coding {coding} is not supported. Send the body chunked, with Content-Encoding if it is gzip"
            )
            self._refuse_head(501, text)
        elif self.parser.should_upgrade():
            self._asks_upgrade = True
        else:
            if not (cycle is None or cycle.response_complete):
                self._earlier.append(cycle)
            super().on_headers_complete()
            if self.parser.get_http_version() == "1.0" and self.parser.should_keep_alive() and not self.is_leaving:
                self.cycle.keep_alive = True
                self.cycle.default_headers = [*self.cycle.default_headers, (b"connection", b"keep-alive")]
            if self.is_leaving:
                self.cycle.keep_alive = False

    def _unknown_coding(self) -> str:
        """Return the transfer codings of the request if they are others than `chunked`."""
        for name, value in self.headers:
            if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
                return value.decode("ascii", "replace")
        return ""

    def _begin_direct(self) -> bool:
        """Begin a request without ASGI, and return True, if possible. A pipelined request must wait, so it uses ASGI."""
        cycle: Any = self.cycle  # None before the first request
        if self.direct is None or self.flow.write_paused or not (cycle is None or cycle.response_complete):
            return False
        if self.parser.get_method() != b"POST" or self.parser.get_http_version() != "1.1":
            return False
        begun = self.direct.begin(self, self.url, self.headers)
        if begun is not None:
            self.cycle = begun  # type: ignore[assignment]
        return begun is not None

    def on_body(self, body: bytes) -> None:
        """Pass on a piece of the body."""
        cycle: Any = self.cycle
        if self._is_refused:
            return
        if type(cycle) is DirectCycle:
            cycle.add(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Answer a complete request. The next bytes belong to another request."""
        if self._asks_upgrade:
            return
        self._since, self._in_headers, self._header_bytes, self._has_begun = None, True, 0, False
        cycle: Any = self.cycle
        if self._is_refused:
            return
        if type(cycle) is DirectCycle:
            cycle.answer()
        else:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Begin the next request; see uvicorn. Without one the connection is idle. It has no timer, unlike uvicorn's."""
        if self._earlier:
            self._earlier.popleft()
        if self.pipeline:
            super().on_response_complete()
        else:
            self.server_state.total_requests += 1
            self._idle_since = time.monotonic()
            if not self.transport.is_closing():
                self.flow.resume_reading()

    def close_if_slow(self, now: float) -> None:
        """Close the connection if it is idle for long, or its client too slow to send its request or to read its answer."""
        if self.transport.is_closing():
            return
        if self._idle_since is not None and now - self._idle_since > self.timeout_keep_alive:
            self.transport.close()
            return
        if self._since is not None and now - self._since > self.limits.receive_seconds:
            self._refuse(408, f"the request did not arrive within {self.limits.receive_seconds:g} seconds")
            return
        unread = self.transport.get_write_buffer_size()
        if unread != self._unread or not unread:
            self._unread, self._unread_since = unread, now
        elif now - self._unread_since > self.limits.receive_seconds:
            self.transport.abort()

    def leave(self) -> None:
        """Make the current answer the last one of the connection."""
        cycle: Any = self.cycle  # None before the first request
        if cycle is not None and not cycle.response_started:
            cycle.keep_alive = False

    def close_if_silent(self, draining_since: float, now: float) -> None:
        """Close the connection if it has been without a request for a while."""
        if self._is_asked or self.transport.is_closing():
            return
        if now - max(draining_since, self._since or 0.0) > _SILENT_SECONDS:
            self.transport.close()

    def give_up(self) -> None:
        """Answer 503 to an unfinished request, and close the connection."""
        if self.transport.is_closing():
            return
        if self._is_asked:
            self._refuse(503, "the server is stopping. Send this request to another server")
        else:
            self.transport.close()

    @property
    def _is_asked(self) -> bool:
        """Returns True if a request has begun to arrive, or is not answered yet."""
        cycle: Any = self.cycle  # None before the first request
        return self._has_begun or not (cycle is None or cycle.response_complete)

    def _refuse_headers(self) -> None:
        self._refuse_head(431, f"the request's line and headers are longer than {self.limits.header_bytes} bytes")

    def _refuse_head(self, status: int, text: str) -> None:
        """Refuse a request before its cycle begins. `self.cycle` is still the cycle of the previous request."""
        if not self._is_behind_another():
            self._refuse(status, text)

    def _is_behind_another(self) -> bool:
        """Returns True if the previous request is being answered. Its answer then closes the connection."""
        cycle: Any = self.cycle  # None before the first request
        if cycle is None or cycle.response_complete:
            return False
        self._is_refused, self._since = True, None
        cycle.keep_alive = False
        return True

    def _refuse(self, status: int, text: str) -> None:
        """Answer with an error, unless another answer has begun, and close the connection."""
        self._is_refused = True
        cycle: Any = self.cycle  # None before the first request
        if cycle is None or cycle.response_complete or not cycle.response_started:
            body = encode_error(text)
            head = f"HTTP/1.1 {status} {_TEXTS[status]}\r\ncontent-type: application/json\r\nconnection: close\r\n"
            retry = "retry-after: 1\r\n" if status == 503 else ""
            self.transport.write(f"{head}{retry}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()
