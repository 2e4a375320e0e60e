"""uvicorn's HTTP connections with limits that it does not have: on their number, on headers, and on clients that take forever.
They also end without a lost request when the server stops.

A client that opens a connection and says nothing, that sends its request byte by byte, or that does not read its answer, holds
memory and a file descriptor for as long as it likes. Here all three have a deadline. One look at every connection now and then
is what that costs: a request sets two fields and no timer.

An `Upgrade` header is ignored, as RFC 9110, section 7.8 allows. The parser ends a request with that header at its headers and
would read the body as the next request. So the same head is parsed once more, without the header, before what follows it.

With `direct_cycle` the only module that knows uvicorn's protocol classes from the inside.
"""

import asyncio
import time
from collections.abc import Iterable
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tpuembed_serving.core.security import ConnectionLimits
from tpuembed_serving.http.direct_cycle import DirectCycle
from tpuembed_serving.http.direct_predict import DirectPredict
from tpuembed_serving.http.json import encode_error

__all__ = ["close_slow_connections", "protocol_class"]

_LOOK_SECONDS: Final = 1.0
_TEXTS: Final = {
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    501: "Not Implemented",
    503: "Service Unavailable",
}
_SILENT_SECONDS: Final = 1.0
"""How long a connection without a request is kept open once the server drains: the client may be about to send one."""
_OF_UPGRADES: Final = frozenset({b"upgrade", b"http2-settings"})


def protocol_class(limits: ConnectionLimits, direct: DirectPredict | None = None) -> type[HttpToolsProtocol]:
    """What uvicorn takes as `http`: its own protocol, within `limits`; `direct` answers what it can without ASGI."""
    return type("GuardedProtocol", (_GuardedProtocol,), {"limits": limits, "direct": direct})


async def close_slow_connections(connections: Iterable[Any]) -> None:
    """Look at uvicorn's set of connections again and again, and close those whose clients are too slow."""
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        now = time.monotonic()
        for connection in [one for one in connections if isinstance(one, _GuardedProtocol)]:
            connection.close_if_slow(now)


class _GuardedProtocol(HttpToolsProtocol):
    """See the module.

    `_since` is when the client was last asked to send something, None while it need not; `_unread` what it had not read of its
    answer at the last look, and since when it is so much.
    """

    limits: ConnectionLimits
    direct: DirectPredict | None
    is_leaving = False
    """Set on the class: each answer from then on is its connection's last."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._since: float | None = None
        self._unread, self._unread_since = 0, 0.0
        self._header_bytes = 0
        self._in_headers, self._is_refused = True, False
        self._asks_upgrade = self._has_begun = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """See asyncio."""
        super().connection_made(transport)
        self._since = time.monotonic()
        most = self.limits.connections
        if most is not None and len(self.connections) > most:
            self._refuse(503, f"{most} connections are open, and no more may be")

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        if self._is_refused:
            return
        self._header_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserError:
            if not (self._in_headers and self._is_behind_another()):
                self.send_400_response("Invalid HTTP request received.")
        if self._in_headers and self._header_bytes > self.limits.header_bytes:
            self._refuse_headers()

    def _feed(self, data: bytes) -> None:
        """Parse `data`; the parser raises at the end of each head that asks for an upgrade."""
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
        """A request's first byte."""
        super().on_message_begin()
        self._since, self._has_begun = time.monotonic(), True

    def on_headers_complete(self) -> None:
        """Its headers came in one piece with what follows, or in several."""
        self._in_headers = False
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > self.limits.header_bytes:
            self._refuse_headers()
        elif self.parser.get_method() == b"CONNECT":
            self._refuse_head(501, "this server is no proxy: it has no CONNECT")
        elif self.parser.should_upgrade():
            self._asks_upgrade = True
        else:
            if not self._begin_direct():
                super().on_headers_complete()
            if self.is_leaving:
                self.cycle.keep_alive = False

    def _begin_direct(self) -> bool:
        """Whether this request needs no ASGI. One that another's answer must come before does: uvicorn makes it wait."""
        cycle: Any = self.cycle  # None before the first request
        if self.direct is None or self.flow.write_paused or not (cycle is None or cycle.response_complete):
            return False
        if self.parser.get_method() != b"POST" or self.parser.get_http_version() != "1.1":
            return False
        request = self.direct.begin(self.url, self.headers)
        if request is not None:
            self.cycle = DirectCycle(self, request)  # type: ignore[assignment]
        return request is not None

    def on_body(self, body: bytes) -> None:
        """A piece of it."""
        cycle: Any = self.cycle
        if self._is_refused:
            return
        if type(cycle) is DirectCycle:
            cycle.add(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Now it is our turn; the next bytes are of another request."""
        if self._asks_upgrade:
            return
        self._since, self._in_headers, self._header_bytes, self._has_begun = None, True, 0, False
        cycle: Any = self.cycle
        if self._is_refused:
            return
        if type(cycle) is DirectCycle:
            assert self.direct is not None
            cycle.answer(self.direct)
        else:
            super().on_message_complete()

    def close_if_slow(self, now: float) -> None:
        """Whether the client keeps us waiting for too long, to send or to read."""
        if self.transport.is_closing():
            return
        if self._since is not None and now - self._since > self.limits.receive_seconds:
            self._refuse(408, f"the request did not come within {self.limits.receive_seconds:g} seconds")
            return
        unread = self.transport.get_write_buffer_size()
        if unread != self._unread or not unread:
            self._unread, self._unread_since = unread, now
        elif now - self._unread_since > self.limits.receive_seconds:
            self.transport.abort()

    def leave(self) -> None:
        """Have the answer that is being made be the connection's last."""
        cycle: Any = self.cycle  # None before the first request
        if cycle is not None and not cycle.response_started:
            cycle.keep_alive = False

    def close_if_silent(self, draining_since: float, now: float) -> None:
        """Close the connection if it has no request, and if none has begun for a while."""
        if self._is_asked or self.transport.is_closing():
            return
        if now - max(draining_since, self._since or 0.0) > _SILENT_SECONDS:
            self.transport.close()

    def give_up(self) -> None:
        """Answer 503 to a request that cannot be finished, and close."""
        if self.transport.is_closing():
            return
        if self._is_asked:
            self._refuse(503, "the server is stopping. Send this request to another server")
        else:
            self.transport.close()

    @property
    def _is_asked(self) -> bool:
        """Returns True if a request has begun to come, or is not answered yet."""
        cycle: Any = self.cycle  # None before the first request
        return self._has_begun or not (cycle is None or cycle.response_complete)

    def _refuse_headers(self) -> None:
        self._refuse_head(431, f"the request's line and headers are longer than {self.limits.header_bytes} bytes")

    def _refuse_head(self, status: int, text: str) -> None:
        """Refuse a request before its cycle begins; `self.cycle` is that of the request before it."""
        if not self._is_behind_another():
            self._refuse(status, text)

    def _is_behind_another(self) -> bool:
        """Returns True if another request is being answered, after whose answer the connection is then closed."""
        cycle: Any = self.cycle  # None before the first request
        if cycle is None or cycle.response_complete:
            return False
        self._is_refused, self._since = True, None
        cycle.keep_alive = False
        return True

    def _refuse(self, status: int, text: str) -> None:
        """Answer, unless another answer has begun, and close."""
        self._is_refused = True
        cycle: Any = self.cycle  # None before the first request
        if cycle is None or cycle.response_complete or not cycle.response_started:
            body = encode_error(text)
            head = f"HTTP/1.1 {status} {_TEXTS[status]}\r\ncontent-type: application/json\r\nconnection: close\r\n"
            retry = "retry-after: 1\r\n" if status == 503 else ""
            self.transport.write(f"{head}{retry}content-length: {len(body)}\r\n\r\n".encode() + body)
        self._unset_keepalive_if_required()
        self.transport.close()
