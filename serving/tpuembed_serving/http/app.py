"""The application: FastAPI for /healthz, /readyz and the documentation, with the raw REST API in front of it."""

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse

from tpuembed_serving.batching.scheduler import ModelExecutor
from tpuembed_serving.core.changed_files import follow_files
from tpuembed_serving.core.noop import noop
from tpuembed_serving.core.pipeline import MemoryBudget, Pipeline
from tpuembed_serving.core.servable import VersionProgress
from tpuembed_serving.core.service import ModelService
from tpuembed_serving.grpc.request_log import RequestLog
from tpuembed_serving.http.direct import DirectPredict
from tpuembed_serving.http.endpoint import ApiHandler, BodyReader, HttpEndpoint, Receive, Scope, Send, raw_path
from tpuembed_serving.http.open_inference import OpenInferenceApi
from tpuembed_serving.http.openapi import HEALTH, MODELS, complete_document
from tpuembed_serving.http.pages import add_pages
from tpuembed_serving.http.platforms import PING, PlatformApi
from tpuembed_serving.http.rest import RestApi
from tpuembed_serving.models.repository import Loader, ModelRepository
from tpuembed_serving.settings import REST_BODY_BYTES, ModelSettings, ServerSettings
from tpuembed_serving.telemetry.metrics import DEFAULT_PATH
from tpuembed_serving.telemetry.observers import Telemetry
from tpuembed_serving.tensorflow.loading import load_version
from tpuembed_serving.tf_serving.proxy import RemoteExecutor, RemoteModels, TensorFlowServing
from tpuembed_serving.workers.link import SingleProcess, WorkerGroup, WorkerLink
from tpuembed_serving.workers.messages import States
from tpuembed_serving.workers.repository import WorkerRepository

if TYPE_CHECKING:
    from tpuembed_serving.grpc.server import GrpcServer

__all__ = ["ServingApp", "create_app"]

OnChange = Callable[[Sequence[VersionProgress], bool], None]


class ServingApp(FastAPI):
    """A FastAPI application. Requests of TensorFlow Serving's API bypass it and go to their own handler."""

    def __init__(
        self,
        settings: ServerSettings,
        load: Loader | None,
        link: WorkerLink | None = None,
        load_first: bool = False,
        on_change: OnChange | None = None,
        on_configured: Callable[[Sequence[ModelSettings]], None] = noop,
    ) -> None:
        self.stopping = threading.Event()
        self._server = None if settings.target is None else TensorFlowServing(settings.target)
        self.executor = _executor(settings, self._server)
        self.worker_group: WorkerGroup = link or SingleProcess()
        self.telemetry = Telemetry(settings.telemetry, self.runs_here, self.worker_group, settings.security.api_keys)
        load = load or functools.partial(
            load_version, settings=settings, stopping=self.stopping, warmed_up=self.telemetry.warmed_up
        )
        self.settings, self._on_change, self._on_configured = settings, on_change, on_configured
        self.repository = self._models(self.telemetry.watching(load), link)
        self.loads_first = load_first
        self.leaving = False
        guard = settings.security
        self.pipeline = Pipeline(
            ModelService(self.repository),
            self.executor,
            timeout_seconds=settings.rest_timeout_ms / 1000,
            memory=MemoryBudget(settings.max_request_memory),
        )
        self.request_log = RequestLog(self.telemetry.logged, processes=settings.workers)
        self.pipeline.log = self.request_log.log
        self._grpc: GrpcServer | None = None
        self._grpc_stop: asyncio.Task[None] | None = None
        self._grpc_leave: asyncio.Task[None] | None = None
        super().__init__(
            title="tpuembed serving",
            version="v1",
            lifespan=_lifespan,
            docs_url=None,
            redoc_url=None,
            openapi_url=None,
        )
        read = BodyReader(settings.max_body_bytes or REST_BODY_BYTES, self.pipeline.memory)
        self._rest = RestApi(self.pipeline, read)
        self._open_inference = OpenInferenceApi(self.pipeline, read, self._is_ready)
        self._platforms = PlatformApi(self.pipeline, read, settings.default_model, settings.predict_route)
        self._http = HttpEndpoint(
            self._find_api,
            super().__call__,
            telemetry=self.telemetry,
            keys=guard.api_keys,
            cors=guard.cors,
            health_route=settings.health_route,
        )
        self.direct = self._direct_predict()
        self._add_routes()

    def _add_routes(self) -> None:
        """Add what FastAPI answers: health, metrics, and pages for people."""
        settings = self.settings
        named: dict[str, Any] = {"tags": [HEALTH]}
        self.add_api_route("/healthz", _healthz, summary="The server answers", operation_id="healthz", **named)
        self.add_api_route("/healthz", _healthz, methods=["HEAD"], include_in_schema=False)
        busy: dict[int | str, dict[str, Any]] = {503: {"description": "Not every model has one"}}
        summary = "Every model has an available version"
        ready = {"/readyz": "readyz", PING: "ping"} | (
            {settings.health_route: "health"} if settings.health_route else {}
        )
        for path, name in ready.items():
            self.add_api_route(path, self._readyz, summary=summary, responses=busy, operation_id=name, **named)
            self.add_api_route(path, self._readyz, methods=["HEAD"], include_in_schema=False)
        add_pages(self, self.pipeline.service)
        self.add_exception_handler(404, _no_route)
        if settings.telemetry.metrics_path is not None:
            self.add_api_route(
                settings.telemetry.metrics_path,
                self._metrics,
                summary="Metrics for Prometheus",
                operation_id="metrics",
                tags=[MODELS],
                response_class=PlainTextResponse,
                responses={503: {"description": "A worker is busy"}},
            )

    def _direct_predict(self) -> DirectPredict | None:
        """Return the handler of requests without ASGI. None if answers have CORS headers, which it does not send."""
        guard = self.settings.security
        if guard.cors:
            return None
        return DirectPredict(
            self.pipeline,
            self.telemetry,
            self._platforms,
            keys=guard.api_keys,
            max_body_bytes=self.settings.max_body_bytes,
        )

    def _models(self, load: Loader, link: WorkerLink | None) -> ModelRepository | RemoteModels:
        settings, server = self.settings, self._server
        if server is not None:
            names = [model.name for model in settings.models]
            return RemoteModels(names, server, settings.poll_seconds, changed=functools.partial(self._changed, link))
        if link is not None:
            return WorkerRepository(
                link,
                settings.models,
                load,
                settings.poll_seconds,
                cache=settings.cache,
                check=settings.check_served,
                within=settings.reload_paths,
            )
        return ModelRepository(
            settings.models,
            load,
            settings.poll_seconds,
            changed=self._changed,
            cache=settings.cache,
            configured=self._on_configured,
            check=settings.check_served,
            within=settings.reload_paths,
        )

    @property
    def runs_here(self) -> ModelExecutor | None:
        """Return what runs models here; None if another server runs them."""
        return self.executor if isinstance(self.executor, ModelExecutor) else None

    @property
    def local(self) -> ModelRepository | None:
        """Return the versions that are loaded here; None if another server loads them."""
        return self.repository if isinstance(self.repository, ModelRepository) else None

    def _changed(self, link: WorkerLink | None = None) -> None:
        """Report the states of the models to the supervisor, or to the log of the only process."""
        models = self.repository
        progress = [] if self.local is None else self.local.progress()
        if link is not None:
            link.push(States({}, models.ready, progress))
        elif self._on_change is not None:
            self._on_change(progress, models.ready)

    async def load_first(self) -> None:
        """Wait for the first load of every model, if the server must load before it listens."""
        if self.loads_first:
            await asyncio.to_thread(self.repository.wait_for_first_poll, self.stopping.is_set)

    async def start_grpc(self) -> None:
        """Listen for gRPC calls if the settings have a port and it does not listen yet."""
        settings = self.settings
        if settings.grpc_port is not None and self._grpc is None:
            from tpuembed_serving.grpc.server import GrpcServer

            self._grpc = GrpcServer(self.pipeline, self.repository, self.telemetry)
            await self._grpc.start(settings.host, settings.grpc_port, settings.max_body_bytes, settings.security)

    def leave(self, *, hands_over: bool) -> None:
        """Report the coming stop in health checks, and with `hands_over` to gRPC clients. Requests are still answered."""
        self.leaving = True
        if self._grpc is not None and hands_over:
            self._grpc_leave = asyncio.create_task(self._grpc.leave())

    async def stop_grpc(self) -> None:
        """Refuse new gRPC calls, and return once those in progress are done. May be called more than once."""
        if self._grpc is not None:
            if self._grpc_stop is None:
                self._grpc_stop = asyncio.create_task(self._stop_grpc(self._grpc))
            await self._grpc_stop

    async def _stop_grpc(self, grpc: "GrpcServer") -> None:
        if self._grpc_leave is not None:
            await self._grpc_leave
        await grpc.stop(self.settings.drain_seconds)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; see ASGI. The REST API skips FastAPI's middleware, which costs more than a prediction."""
        await (self._http if scope["type"] == "http" else super().__call__)(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document of all routes."""
        has_keys = self.settings.security.api_keys is not None
        return complete_document(super().openapi(), has_keys=has_keys, predict_route=self.settings.predict_route)

    async def _metrics(self) -> PlainTextResponse:
        try:
            return PlainTextResponse(await self.telemetry.metrics_text(self.pipeline.service.all_versions))
        except TimeoutError:
            return PlainTextResponse("a worker is busy", status_code=503)

    def _find_api(self, scope: Scope) -> ApiHandler | None:
        path = scope["path"]
        if path in self._platforms.paths:
            return self._platforms
        if path == self.settings.health_route:  # it may begin with /v1/
            return None
        start = raw_path(scope)[:4]
        if start.lower() == b"/v1/":
            return self._rest
        return self._open_inference if start in (b"/v2/", b"/v2") else None

    def _is_ready(self) -> bool:
        return self.repository.ready and not self.leaving

    async def _readyz(self) -> JSONResponse:
        if self.leaving:
            return JSONResponse({"status": "stopping"}, status_code=503)
        if self.repository.ready:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready"}, status_code=503)


def _executor(settings: ServerSettings, server: TensorFlowServing | None) -> ModelExecutor | RemoteExecutor:
    timeout_seconds = settings.rest_timeout_ms / 1000
    if server is not None:
        return RemoteExecutor(server, timeout_seconds, settings.max_queued_requests)
    return ModelExecutor(
        settings.run_threads,
        settings.max_queued_requests,
        timeout_seconds,
        settings.batching,
        processes=settings.workers,
    )


async def _no_route(request: Request, _: Exception) -> JSONResponse:
    path = request.url.path
    text = f"there is no {path}. /docs and /openapi.json have the routes of this server"
    if path == DEFAULT_PATH:
        text = "there are no metrics here. Start the server with --metrics"
    return JSONResponse({"error": text}, status_code=404)


async def _healthz() -> dict[str, str]:
    return {"status": "ok"}


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Load and poll models in the background while the server runs."""
    assert isinstance(app, ServingApp)
    if not app.loads_first:  # before the import of TensorFlow, which takes seconds
        await app.start_grpc()
    app.repository.start()
    keys = app.settings.security.api_keys
    following = [asyncio.create_task(follow_files([keys.path], keys.reload))] if keys and keys.path else []
    try:
        await app.load_first()
        await app.start_grpc()
        yield
    finally:
        for each in following:
            each.cancel()
        await app.stop_grpc()
        app.stopping.set()
        app.executor.close()
        app.pipeline.close()
        await asyncio.to_thread(app.repository.stop)
        await asyncio.to_thread(app.telemetry.close)
        await asyncio.to_thread(app.request_log.close)


def create_app(
    settings: ServerSettings,
    load: Loader | None = None,
    *,
    link: WorkerLink | None = None,
    load_first: bool = False,
    on_change: OnChange | None = None,
    on_configured: Callable[[Sequence[ModelSettings]], None] = noop,
) -> ServingApp:
    """Create the ASGI application that serves `settings.models`.

    Args:
        settings: the settings of the server.
        load: loads a version's folder as a servable; the default loads SavedModels with TensorFlow.
        link: the link to the supervisor, if this is one of several processes.
        load_first: whether startup waits until all versions are loaded or have failed.
        on_change: called after each change of a version, with how far all are, and whether each model has one.
        on_configured: called with the models of a reload, before their versions are looked for.
    """
    return ServingApp(settings, load, link, load_first, on_change, on_configured)
