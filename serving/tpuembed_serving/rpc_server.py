"""The gRPC server: TensorFlow Serving's services, health and reflection, on the event loop that the REST API runs on.

Requests reach their method as bytes, so that the port listens before TensorFlow, which has the messages, is imported.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tpuembed.errors import ServingError
from tpuembed_serving.deadlines import wait_until
from tpuembed_serving.door import key_interceptor
from tpuembed_serving.observation import GRPC, REQUEST_ID, Headers, RequestRecord, sane_request_id
from tpuembed_serving.security import SecuritySettings
from tpuembed_serving.service import ModelSpec, PredictionService
from tpuembed_serving.status import Code, StatusError
from tpuembed_serving.telemetry import Telemetry
from tpuembed_serving.tensorflow_import import IMPORTING_TENSORFLOW
from tpuembed_serving.tls import TlsSettings

if TYPE_CHECKING:
    from tpuembed_serving.rpc_models import Reloadable

__all__ = ["GrpcServer", "truncated"]

logger = logging.getLogger(__name__)

Method = Callable[[bytes], Awaitable[bytes]]

_PREDICTION = "tensorflow.serving.PredictionService"
_MODEL = "tensorflow.serving.ModelService"
_METHODS: Final = {
    _PREDICTION: ("Predict", "Classify", "Regress", "MultiInference", "GetModelMetadata"),
    _MODEL: ("GetModelStatus", "HandleReloadConfigRequest"),
}
_INT32_MAX: Final = 2**31 - 1
_MAX_TEXT: Final = 1024
_OPEN: Final = SecuritySettings()
_STATUS_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}


def truncated(message: str) -> str:
    """A message as TensorFlow Serving sends it over gRPC (grpc_status_util.cc)."""
    data = message.encode("utf-8", "surrogateescape")
    text = data[:_MAX_TEXT].decode("utf-8", "replace")
    return f"{text}...TRUNCATED" if len(data) > _MAX_TEXT else text


class GrpcServer:
    """Listens from `start` to `stop`; both are called on the event loop that serves."""

    def __init__(self, service: PredictionService, models: "Reloadable", telemetry: Telemetry | None = None) -> None:
        self._service = service
        self._models = models
        self._telemetry = telemetry if telemetry is not None and telemetry.observes else None
        self._metrics = telemetry.metrics.snapshot if telemetry is not None and telemetry.metrics else dict
        self._loading: asyncio.Task[Mapping[str, Mapping[str, Method]]] | None = None
        self._server: Any = None
        self._health = _Health(service)

    async def start(
        self, host: str, port: int, max_request_bytes: int | None = None, security: SecuritySettings = _OPEN
    ) -> int:
        """Listen; the port, which 0 leaves to the system.

        Raises:
            ServingError: the port cannot be bound.
        """
        options = [
            ("grpc.max_receive_message_length", max_request_bytes or _INT32_MAX),
            ("grpc.max_send_message_length", _INT32_MAX),
        ]
        keys = security.api_keys
        server = grpc.aio.server(options=options, interceptors=[key_interceptor(keys)] if keys else [])
        for service, names in _METHODS.items():
            handlers = {name: grpc.unary_unary_rpc_method_handler(self._handler(service, name)) for name in names}
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((*_METHODS, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        bound = _bind(server, host, port, security.tls)
        await self._health.begin()
        await server.start()
        self._server = server
        self._loading = asyncio.create_task(asyncio.to_thread(self._load))
        return bound

    async def stop(self, grace_seconds: float) -> None:
        """Take no new calls, and wait so long for those in progress."""
        if self._server is None:
            return
        server, self._server = self._server, None
        await self._health.enter_graceful_shutdown()
        await server.stop(grace_seconds)

    def _load(self) -> dict[str, Mapping[str, Method]]:
        """service -> method name -> method. The import takes seconds where nothing has imported TensorFlow yet."""
        with IMPORTING_TENSORFLOW:
            from tpuembed_serving.rpc import PredictionApi
            from tpuembed_serving.rpc_models import ModelApi

        return {
            _PREDICTION: PredictionApi(self._service).methods,
            _MODEL: ModelApi(self._service, self._models, self._metrics).methods,
        }

    def _handler(self, service: str, name: str) -> Callable[[bytes, Any], Awaitable[bytes]]:
        path = f"/{service}/{name}".encode("ascii")

        async def handle(request: bytes, context: Any) -> bytes:
            record = self._begin(path, name, context, len(request))
            try:
                response = await self._answer(service, name, request, context)
            except StatusError as error:
                self._finish(record, error.code, 0)
                await context.abort(_STATUS_CODES[error.code], truncated(error.message))
                raise AssertionError("abort raises") from None
            except asyncio.CancelledError:
                is_late = (context.time_remaining() or 1.0) <= 0
                self._finish(record, Code.DEADLINE_EXCEEDED if is_late else Code.CANCELLED, 0)
                raise
            self._finish(record, Code.OK, len(response))
            return response

        return handle

    async def _answer(self, service: str, name: str, request: bytes, context: Any) -> bytes:
        remaining = context.time_remaining()
        if remaining is not None and remaining <= 0:
            raise StatusError(Code.DEADLINE_EXCEEDED, "Deadline Exceeded")
        wait_until(None if remaining is None else time.monotonic() + remaining)
        try:
            assert self._loading is not None
            methods = await asyncio.shield(self._loading)
            return await methods[service][name](request)
        except StatusError:
            raise
        except Exception:
            logger.exception("a call of %s failed", name)
            raise StatusError(Code.INTERNAL, "internal error") from None

    def _begin(self, path: bytes, name: str, context: Any, size: int) -> RequestRecord | None:
        """A record, where anybody observes; and the request's name for whoever gave it one."""
        headers = _headers(context)
        record = None
        request_id = sane_request_id(next((value for key, value in headers if key == REQUEST_ID), b""))
        if self._telemetry is not None:
            record = self._telemetry.begin(GRPC, "POST", path, headers, name)
            record.body(size)
            request_id = record.request_id or request_id
        if request_id:
            context.set_trailing_metadata(((REQUEST_ID.decode("ascii"), request_id),))
        return record

    def _finish(self, record: RequestRecord | None, code: Code, size: int) -> None:
        if record is not None and self._telemetry is not None:
            record.answered(code, int(code), size)
            self._telemetry.finish(record)


def _headers(context: Any) -> Headers:
    """A call's metadata; values that are text come as text."""
    metadata = context.invocation_metadata() or ()
    return [
        (key.encode("ascii", "replace"), value if isinstance(value, bytes) else value.encode("utf-8", "replace"))
        for key, value in metadata
    ]


def _bind(server: Any, host: str, port: int, tls: TlsSettings | None) -> int:
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if tls is not None:
            return int(server.add_secure_port(address, tls.grpc_credentials()))
        return int(server.add_insecure_port(address))
    except RuntimeError:
        raise ServingError(f"cannot listen on {address} for gRPC; choose another port with --grpc-port") from None


class _Health(health.aio.HealthServicer):
    """grpc.health.v1: the services serve from the start, as TensorFlow Serving's; a model does once it is available."""

    def __init__(self, service: PredictionService) -> None:
        super().__init__()
        self._service = service
        self._stopping = False

    async def begin(self) -> None:
        """Both names of each service: theirs, and the full one."""
        for service in _METHODS:
            for name in (service, service.rpartition(".")[2]):
                await self.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def enter_graceful_shutdown(self) -> None:
        """Nothing serves any more."""
        self._stopping = True
        await super().enter_graceful_shutdown()

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        """The status of a service, or of a model by its name."""
        available = self._available(request.service)
        if available is None:
            return await super().Check(request, context)
        serving = available and not self._stopping
        response = health_pb2.HealthCheckResponse
        return response(status=response.SERVING if serving else response.NOT_SERVING)

    def _available(self, name: str) -> bool | None:
        """Whether the newest version of a model answers; None where there is no such model."""
        try:
            statuses = self._service.status(ModelSpec(name))
        except StatusError:
            return None
        return any(status.state.name == "AVAILABLE" for status in statuses)
