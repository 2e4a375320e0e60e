"""Optional middleware: API keys and CORS for HTTP, API keys for gRPC."""

from collections.abc import Awaitable, Callable
from typing import Any, Final

from tpuembed_serving.core.api_keys import ApiKeys
from tpuembed_serving.core.status import Code
from tpuembed_serving.http.endpoint import HTTP_STATUS, Message, Receive, Reply, Scope, Send, send_reply
from tpuembed_serving.http.json import encode_error

__all__ = ["OPEN_PATHS", "AuthMiddleware", "key_interceptor"]

App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

OPEN_PATHS: Final = frozenset({"/healthz", "/readyz"})
"""Health checks need no key."""
_HEALTH: Final = "/grpc.health.v1.Health/"
_REFUSAL: Final = "no valid API key. Send one as 'Authorization: Bearer KEY' or 'X-API-Key: KEY'"


class AuthMiddleware:
    """ASGI middleware. Passes requests with a valid API key to `app`, and adds CORS headers to answers."""

    def __init__(self, app: App, keys: ApiKeys | None, *, cors: bool) -> None:
        self._app, self._keys = app, keys
        self._cors = _cors_headers(keys is not None) if cors else []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; see ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = self._with_headers(send) if self._cors else send
        if self._allows(scope):
            await self._app(scope, receive, answer)
        else:
            code = Code.UNAUTHENTICATED
            reply = Reply(HTTP_STATUS[code], encode_error(_REFUSAL), code)
            await send_reply(answer, reply, "", (b"www-authenticate", b"Bearer"))

    def _allows(self, scope: Scope) -> bool:
        """Returns True if a request may pass. CORS preflights have no key, and their answers reveal nothing."""
        if self._keys is None or scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return True
        return self._keys.accept(scope["headers"])

    def _with_headers(self, send: Send) -> Send:
        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *self._cors]}
            await send(message)

        return answer


def _cors_headers(has_keys: bool) -> Headers:
    """Return TensorFlow Serving's CORS headers (http_rest_api_util.cc). They also allow the headers of API keys."""
    allowed = b"Content-Type, Authorization, X-API-Key" if has_keys else b"Content-Type"
    return [
        (b"access-control-allow-origin", b"*"),
        (b"access-control-allow-methods", b"POST, GET"),
        (b"access-control-allow-headers", allowed),
    ]


def key_interceptor(keys: ApiKeys) -> Any:
    """Return a grpc.aio.ServerInterceptor that answers UNAUTHENTICATED to calls without a key. Health checks need none."""
    import grpc

    async def refuse(_: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, _REFUSAL)

    class KeyInterceptor(grpc.aio.ServerInterceptor):
        async def intercept_service(self, continuation: Any, details: Any) -> Any:
            handler = await continuation(details)
            if handler is None or details.method.startswith(_HEALTH) or keys.accept(details.invocation_metadata or ()):
                return handler
            if handler.request_streaming:
                return grpc.stream_stream_rpc_method_handler(refuse)
            return grpc.unary_unary_rpc_method_handler(refuse)

    return KeyInterceptor()
