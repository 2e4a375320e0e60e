"""The gRPC server: TensorFlow Serving's services, the Open Inference Protocol's, and health.

It runs on the event loop of the REST API. Methods receive requests as bytes. So the port can listen before TensorFlow, which has
the messages of TensorFlow Serving, is imported.

When a gRPC server stops, it sends GOAWAY to its clients, and cancels calls that arrive before a client has received it.
So a stop has steps. First, answers are delayed for a moment, in which waiting clients send nothing. Then the server stops,
which sends GOAWAY and closes its port. Then the answers are sent. During the lame duck stage, a second server with the
same methods listens on the port.
"""

import asyncio
import contextlib
import functools
import logging
import math
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tpuembed.errors import ServingError
from tpuembed_serving.core.api_keys import ADMIN_REFUSAL, KEY_REFUSAL, ApiKeys
from tpuembed_serving.core.pipeline import Pipeline, Prediction
from tpuembed_serving.core.request_record import (
    GRPC,
    REQUEST_ID,
    Headers,
    RequestRecord,
    sane_request_id,
)
from tpuembed_serving.core.security import SecuritySettings
from tpuembed_serving.core.service import ModelService
from tpuembed_serving.core.status import Code, StatusError, still_loading
from tpuembed_serving.core.tls import TlsSettings
from tpuembed_serving.grpc.arrivals import Arrivals
from tpuembed_serving.grpc.open_inference import GrpcInfer, open_inference_calls
from tpuembed_serving.grpc.open_inference_messages import SERVICE as _OPEN_INFERENCE
from tpuembed_serving.telemetry.observers import Telemetry
from tpuembed_serving.tensorflow.import_lock import IMPORTING_TENSORFLOW
from tpuembed_serving.workers.sockets import listeners_of_port, refuse_new_connections

if TYPE_CHECKING:
    from tpuembed_serving.grpc.model_service import Reloadable

__all__ = ["GrpcServer", "truncated"]

logger = logging.getLogger(__name__)


_PREDICTION = "tensorflow.serving.PredictionService"
_MODEL = "tensorflow.serving.ModelService"
_METHODS: Final = {
    _PREDICTION: ("Predict", "Classify", "Regress", "MultiInference", "GetModelMetadata"),
    _MODEL: ("GetModelStatus", "HandleReloadConfigRequest"),
    _OPEN_INFERENCE: ("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer"),
}
_PREDICTIONS: Final = frozenset(
    {*(f"/{_PREDICTION}/{name}" for name in ("Predict", "Classify", "Regress", "MultiInference"))}
    | {f"/{_OPEN_INFERENCE}/ModelInfer"}
)
"""The paths of the methods whose calls share runs."""
_HEALTH_NAMES: Final = ("", *_METHODS, *(service.rpartition(".")[2] for service in _METHODS))
_CHANGES: Final = frozenset({"HandleReloadConfigRequest"})
_FOR_ADMINS: Final = frozenset(f"/{_MODEL}/{name}" for name in _CHANGES)
_INT32_MAX: Final = 2**31 - 1
_MAX_TEXT: Final = 1024
_HOLD_SECONDS: Final = 0.1
"""How long answers are delayed before a server stops."""
_GOAWAY_SECONDS: Final = 0.05
"""How long they are delayed after it, until clients have received GOAWAY and the port is closed."""
_LEAST_SECONDS: Final = 1.0
"""The answer to a call with a deadline sooner than this is not delayed."""
_LAST_SECONDS: Final = 0.5
_HEALTH: Final = "/grpc.health.v1.Health/"
_HEALTH_SECONDS: Final = 0.1
_FOREVER_SECONDS: Final = 1e6
_GIVEN_UP: Final = "the server is stopping. Send this call to another server"
_OPEN: Final = SecuritySettings()
_REQUEST_ID: Final = REQUEST_ID.decode("ascii")
_STATUS_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}


def truncated(message: str) -> str:
    """Return a message as TensorFlow Serving sends it over gRPC (grpc_status_util.cc)."""
    data = message.encode("utf-8", "surrogateescape")
    text = data[:_MAX_TEXT].decode("utf-8", "replace")
    return f"{text}...TRUNCATED" if len(data) > _MAX_TEXT else text


class _Port:
    """A grpc.aio server with its listening port and its current calls."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._listeners: list[socket.socket] = []
        self._calls: set[asyncio.Task[Any]] = set()
        self._released = asyncio.Event()
        self._released.set()
        self._stopped: asyncio.Task[None] | None = None
        self.is_given_up = False

    async def start(self, host: str, port: int, tls: TlsSettings | None) -> int:
        """Listen, and return the port. See GrpcServer.start."""
        others = {one.fileno(): one for one in listeners_of_port(port)} if port else {}
        inodes = {os.fstat(number).st_ino for number in others}
        for one in others.values():
            one.close()
        bound = _bind(self._server, f"[{host}]:{port}" if ":" in host else f"{host}:{port}", tls)
        await self._server.start()
        for one in listeners_of_port(bound):
            if os.fstat(one.fileno()).st_ino in inodes:
                one.close()
            else:
                self._listeners.append(one)
        return bound

    async def answer(self, call: Awaitable[bytes], context: Any) -> bytes:
        """Return the answer to a call. Answers and errors are delayed while the server is about to stop."""
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        try:
            return await call
        finally:
            if not self._released.is_set() and (context.time_remaining() or math.inf) > _LEAST_SECONDS:
                await self._released.wait()
            self._calls.discard(task)

    async def retire(self, seconds: float) -> None:
        """Close the port and send GOAWAY. Calls in progress may take `seconds`."""
        if self._stopped is not None:
            return
        for one in self._listeners:
            refuse_new_connections(one)
            one.close()
        self._released.clear()
        await asyncio.sleep(_HOLD_SECONDS)
        self._stopped = asyncio.create_task(self._server.stop(seconds))
        await asyncio.sleep(_GOAWAY_SECONDS)
        self._released.set()

    async def end(self, until: float) -> None:
        """Wait for all calls. Those not answered by `until` (`time.monotonic`) are answered UNAVAILABLE."""
        await self.retire(until - time.monotonic())
        assert self._stopped is not None
        await asyncio.wait([self._stopped], timeout=max(0.0, until - time.monotonic()))
        self.is_given_up = True
        for call in self._calls:
            call.cancel()
        await asyncio.wait([self._stopped], timeout=_LAST_SECONDS)
        await self._server.stop(None)


class GrpcServer:
    """Listens from `start` to `stop`. The event loop that serves calls its methods."""

    def __init__(self, pipeline: Pipeline, models: "Reloadable", telemetry: Telemetry | None = None) -> None:
        self._pipeline, self._service = pipeline, pipeline.service
        self._models = models
        self._telemetry = telemetry if telemetry is not None and telemetry.observes else None
        self._metrics = telemetry.metrics.snapshot if telemetry is not None and telemetry.metrics else dict
        self._loading: asyncio.Task[_Methods] | None = None
        self._open: Callable[[int], Awaitable[tuple[_Port, int]]] | None = None
        self._port = 0
        self._current: _Port | None = None
        self._retired: list[_Port] = []
        self._arrivals = Arrivals()
        self._health = _Health(pipeline.service)
        self._open_inference = open_inference_calls(self._service, lambda: bool(self._health.serves("")))

    async def start(
        self,
        host: str,
        port: int,
        max_request_bytes: int | None = None,
        security: SecuritySettings = _OPEN,
    ) -> int:
        """Listen, and return the port. Port 0 is any free port.

        Raises:
            ServingError: the port cannot be bound.
        """
        options = [
            ("grpc.max_receive_message_length", max_request_bytes or _INT32_MAX),
            ("grpc.max_send_message_length", _INT32_MAX),
        ]
        keys, withdraw = security.api_keys, self._arrivals.withdraw
        interceptors = [_KeyInterceptor(keys, self._telemetry, withdraw)] if keys else []

        async def open_port(number: int) -> tuple[_Port, int]:
            server = grpc.aio.server(options=options, interceptors=interceptors)
            opened = _Port(server)
            for service, names in _METHODS.items():
                handlers = {
                    name: grpc.unary_unary_rpc_method_handler(self._handler(service, name, opened)) for name in names
                }
                server.add_generic_rpc_handlers((_Service(service, handlers, self._arrivals.announce),))
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
            return opened, await opened.start(host, number, security.tls)

        self._open = open_port
        self._current, self._port = await open_port(port)
        self._loading = asyncio.create_task(asyncio.to_thread(self._load))
        return self._port

    async def leave(self) -> None:
        """Report the coming stop in health checks and by GOAWAY. Calls and new connections are still answered."""
        self._health.is_stopping = True
        if self._current is None or self._open is None:
            return
        try:
            successor, _ = await self._open(self._port)
        except ServingError:  # this system does not share ports: clients get GOAWAY at the end
            return
        before, self._current = self._current, successor
        self._retired.append(before)
        await before.retire(_FOREVER_SECONDS)
        self._health.end_watches()

    async def stop(self, grace_seconds: float) -> None:
        """Refuse new calls, and wait up to `grace_seconds` for those in progress."""
        if self._current is None:
            return
        current, self._current = self._current, None
        until = time.monotonic() + grace_seconds
        self._health.is_stopping = True
        await current.retire(grace_seconds)
        self._health.end_watches()
        await asyncio.gather(*(port.end(until) for port in (*self._retired, current)))

    def _load(self) -> "_Methods":
        """Import the messages. The first import of TensorFlow takes seconds."""
        with IMPORTING_TENSORFLOW:
            from tpuembed_serving.grpc.model_service import model_calls
            from tpuembed_serving.grpc.prediction_service import PREDICTIONS, model_metadata

        calls = dict(model_calls(self._service, self._models, self._metrics))
        calls["GetModelMetadata"] = functools.partial(model_metadata, self._service)
        return _Methods(PREDICTIONS, calls)

    def _handler(self, service: str, name: str, port: _Port) -> Callable[[bytes, Any], Awaitable[bytes]]:
        path = f"/{service}/{name}".encode("ascii")
        is_prediction = f"/{service}/{name}" in _PREDICTIONS

        async def handle(request: bytes, context: Any) -> bytes:
            record = self._begin(path, name, context, len(request))
            call = self._predict if is_prediction else self._answer
            try:
                response = await port.answer(call(name, request, context, record), context)
            except StatusError as error:
                self._finish(record, error.code, 0)
                await context.abort(_STATUS_CODES[error.code], truncated(error.message))
                raise AssertionError("abort raises") from None
            except asyncio.CancelledError:
                if port.is_given_up:
                    self._finish(record, Code.UNAVAILABLE, 0)
                    await context.abort(grpc.StatusCode.UNAVAILABLE, _GIVEN_UP)
                is_late = (context.time_remaining() or 1.0) <= 0
                self._finish(record, Code.DEADLINE_EXCEEDED if is_late else Code.CANCELLED, 0)
                raise
            self._finish(record, Code.OK, len(response))
            return response

        return handle

    async def _predict(self, name: str, request: bytes, context: Any, record: RequestRecord | None) -> bytes:
        """Answer a call that is started together with others."""
        try:
            await self._arrivals.enter()
            return await self._answer(name, request, context, record)
        finally:
            self._arrivals.leave()

    async def _answer(self, name: str, request: bytes, context: Any, record: RequestRecord | None) -> bytes:
        remaining = context.time_remaining()
        if remaining is not None and remaining <= 0:
            raise StatusError(Code.DEADLINE_EXCEEDED, "Deadline Exceeded")
        try:
            if name == "ModelInfer":
                return await self._pipeline.answer(GrpcInfer(), request, record, remaining)
            if name in self._open_inference:
                return await self._open_inference[name](request)
            assert self._loading is not None
            if self._service.loading and name not in _CHANGES:
                raise still_loading()  # before the await: the classes of the messages may still be loading
            methods = self._loading.result() if self._loading.done() else await asyncio.shield(self._loading)
            prediction = methods.predictions.get(name)
            if prediction is None:
                return await methods.calls[name](request)
            return await self._pipeline.answer(prediction(), request, record, context.time_remaining())
        except StatusError:
            raise
        except Exception:
            logger.exception("a call of %s failed", name)
            raise StatusError(Code.INTERNAL, "internal error") from None

    def _begin(self, path: bytes, name: str, context: Any, size: int) -> RequestRecord | None:
        """Create a record if the server has an observer, and return the client's request ID to it."""
        metadata = context.invocation_metadata() or ()
        if self._telemetry is None:  # nobody needs the other headers
            metadata = [pair for pair in metadata if pair[0] == _REQUEST_ID]
        headers, record = _as_bytes(metadata), None
        request_id = sane_request_id(next((value for key, value in headers if key == REQUEST_ID), b""))
        if self._telemetry is not None:
            record = self._telemetry.begin(GRPC, "POST", path, headers, name)
            record.body(size)
            request_id = record.request_id or request_id
        if request_id:
            context.set_trailing_metadata(((_REQUEST_ID, request_id),))
        return record

    def _finish(self, record: RequestRecord | None, code: Code, size: int) -> None:
        if record is not None and self._telemetry is not None:
            record.answered(code, int(code), size)
            self._telemetry.finish(record)


class _Service(grpc.GenericRpcHandler):
    """Finds the handler of a call. gRPC asks for it when the call's headers have arrived, before it reads the message."""

    def __init__(self, service: str, handlers: Mapping[str, Any], announce: Callable[[], None]) -> None:
        self._handlers = {f"/{service}/{name}": handler for name, handler in handlers.items()}
        self._announce = announce

    def service(self, handler_call_details: Any) -> Any:
        """Return the handler of a method, or None if this is the method of another service."""
        handler = self._handlers.get(handler_call_details.method)
        if handler is not None and handler_call_details.method in _PREDICTIONS:
            self._announce()
        return handler


class _Methods(NamedTuple):
    """The methods by name: predictions, which the pipeline answers, and other calls."""

    predictions: Mapping[str, Callable[[], Prediction]]
    calls: Mapping[str, Callable[[bytes], Awaitable[bytes]]]


class _KeyInterceptor(grpc.aio.ServerInterceptor):
    """Answers UNAUTHENTICATED to calls without a key, and PERMISSION_DENIED to those whose key is not enough.

    Health checks need none.
    """

    def __init__(self, keys: ApiKeys, telemetry: Telemetry | None, withdraw: Callable[[], None]) -> None:
        self._keys, self._telemetry, self._withdraw = keys, telemetry, withdraw

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        """Return the handler of a call; see gRPC."""
        handler = await continuation(details)
        metadata = details.invocation_metadata or ()
        if handler is None or details.method.startswith(_HEALTH):
            return handler
        is_known = self._keys.accept(metadata) is not None
        if is_known and (details.method not in _FOR_ADMINS or self._keys.accept_admin(metadata)):
            return handler
        code, text = (Code.PERMISSION_DENIED, ADMIN_REFUSAL) if is_known else (Code.UNAUTHENTICATED, KEY_REFUSAL)
        if details.method in _PREDICTIONS:
            self._withdraw()

        async def refuse(_: Any, context: Any) -> None:
            if self._telemetry is not None:
                path = details.method.encode("utf-8", "replace")
                record = self._telemetry.begin(GRPC, "POST", path, _as_bytes(metadata))
                record.answered(code, int(code), 0)
                self._telemetry.finish(record)
            await context.abort(_STATUS_CODES[code], text)

        return grpc.unary_unary_rpc_method_handler(refuse)


def _as_bytes(metadata: Any) -> Headers:
    """Return a call's metadata as bytes. gRPC returns text values as `str`."""
    return [
        (key.encode("ascii", "replace"), value if isinstance(value, bytes) else value.encode("utf-8", "replace"))
        for key, value in metadata
    ]


def _bind(server: Any, address: str, tls: TlsSettings | None) -> int:
    try:
        if tls is not None:
            return int(server.add_secure_port(address, tls.grpc_credentials()))
        return int(server.add_insecure_port(address))
    except RuntimeError:
        raise ServingError(f"cannot listen on {address} for gRPC. Choose another port with --grpc-port") from None


class _Health(health_pb2_grpc.HealthServicer):
    """The service grpc.health.v1.

    - `""` is SERVING if every model has an available version, as in /readyz.
    - A service is SERVING once the first load of each model has ended. TensorFlow Serving listens only from then on.
    - A model is SERVING while it has an available version.
    - All are NOT_SERVING during a stop.
    """

    def __init__(self, service: ModelService) -> None:
        self._service = service
        self._ended = asyncio.Event()
        self.is_stopping = False

    def serves(self, name: str) -> bool | None:
        """Returns True if a service or a model is SERVING. None if there is no model of that name."""
        if self.is_stopping or self._service.loading:
            return False
        if name in _HEALTH_NAMES:
            return bool(name) or self._service.ready
        try:
            statuses = self._service.versions(name)
        except StatusError:  # the model runs in another server, which does not answer
            return False
        return any(status.state.name == "AVAILABLE" for status in statuses) if statuses else None

    def end_watches(self) -> None:
        """End the streams of Watch. Each would keep its connection, and the server, until the end of the drain."""
        self._ended.set()
        self._ended = asyncio.Event()

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Return the status of a service or of a model; see the protocol."""
        found = self._status(request.service)
        if found.status == found.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return found

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802
        """Stream the status; see the protocol. A client whose stream ends opens another one."""
        ended, sent = self._ended, None
        while True:
            is_last, found = ended.is_set(), self._status(request.service)
            if found != sent:
                await context.write(found)
                sent = found
            if is_last:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is stopping")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), _HEALTH_SECONDS)

    def _status(self, name: str) -> Any:
        response, serves = health_pb2.HealthCheckResponse, self.serves(name)
        if serves is None:
            return response(status=response.SERVICE_UNKNOWN)
        return response(status=response.SERVING if serves else response.NOT_SERVING)
