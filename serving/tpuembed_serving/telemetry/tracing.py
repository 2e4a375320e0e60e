"""Exports OpenTelemetry spans of requests and their stages, as the OTEL_* environment variables configure.

Spans are created after the answer, from the times of its stages; OpenTelemetry's processor exports them in a thread. Names and
attributes follow OpenTelemetry's semantic conventions for HTTP servers and RPC.
"""

import importlib.util
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from tpuembed.errors import ConfigError, MissingExtraError
from tpuembed_serving.core.request_record import HTTP, REST, STAGES, RequestRecord, stage_seconds
from tpuembed_serving.core.status import Code

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

__all__ = ["Tracing", "check_tracing", "make_provider"]

logger = logging.getLogger(__name__)

_CLOSE_SECONDS: Final = 5.0
"""Much less than the exporter's own timeout of 30 s, in which many supervisors kill a stopping process."""
_SERVICE: Final = "tpuembed-serving"
_SERVER_FAULTS: Final = frozenset(
    {Code.UNKNOWN, Code.DEADLINE_EXCEEDED, Code.UNIMPLEMENTED, Code.INTERNAL, Code.UNAVAILABLE, Code.DATA_LOSS}
)
"""Codes that mark a server span as an error. Errors of the client do not."""
_HTTP, _GRPC = "http/protobuf", "grpc"
_EXPORTERS: Final = {
    _HTTP: "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    _GRPC: "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
}


def check_tracing() -> None:
    """Raise MissingExtraError or ConfigError if spans cannot be exported as the environment configures."""
    for package in ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter.otlp"):
        if not _is_there(package):
            raise MissingExtraError("serve --otel", package, "otel")
    _exporter_name()
    _protocol()


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def _exporter_name() -> str:
    name = os.environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    if name not in ("otlp", "console", "none"):
        raise ConfigError(f"OTEL_TRACES_EXPORTER is {name}, which is not supported. Set it to otlp, console or none")
    return name


def _protocol() -> str:
    for variable in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = os.environ.get(variable)
        if protocol and protocol not in _EXPORTERS:
            raise ConfigError(f"{variable} is {protocol}, which is not supported. Set it to {_HTTP} or {_GRPC}")
        if protocol:
            return protocol
    return _HTTP


def make_provider() -> "TracerProvider":
    """Return a provider configured by the environment variables of OpenTelemetry.

    These are OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER, OTEL_BSP_* and OTEL_EXPORTER_*.
    """
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

    named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    resource = Resource.create({} if named else {"service.name": _SERVICE})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # True would wait for the collector again
    name = _exporter_name()
    if name == "console":
        provider.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter()))
    elif name == "otlp":
        module = importlib.import_module(_EXPORTERS[_protocol()])
        provider.add_span_processor(BatchSpanProcessor(module.OTLPSpanExporter()))
    return provider


class Tracing:
    """An observer (see `request_record`). A request joins the trace that its `traceparent` header names."""

    wants_request_id = False

    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry import propagate

        self._provider = provider
        self._tracer = provider.get_tracer("tpuembed_serving")
        self._extract = propagate.extract

    def finish(self, record: RequestRecord) -> None:
        """Create the spans of a request for a prediction."""
        if record.entrypoint != HTTP:
            self._trace(record)

    def close(self) -> None:
        """Export the queued spans. Those that the collector does not accept within a few seconds are lost."""
        closing = threading.Thread(target=self._provider.shutdown, name="tracing-close", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)
        if closing.is_alive():
            logger.warning("the last traces are lost: the collector did not accept them in %g s", _CLOSE_SECONDS)

    def _trace(self, record: RequestRecord) -> None:
        from opentelemetry import trace

        parent = self._extract({key.decode("latin-1"): value.decode("latin-1") for key, value in record.headers})
        offset = time.time_ns() - time.perf_counter_ns()
        start = _ns(record.started) + offset
        span = self._tracer.start_span(
            _name(record), parent, trace.SpanKind.SERVER, _attributes(record), start_time=start
        )
        if record.code in _SERVER_FAULTS:
            span.set_status(trace.StatusCode.ERROR, record.code.name)
        if span.is_recording() and record.has_run:
            self._trace_stages(stage_seconds(record), trace.set_span_in_context(span), start)
        span.end(_ns(record.ended) + offset)

    def _trace_stages(self, stages: Sequence[float], inside: Any, start: int) -> None:
        for name, seconds in zip(STAGES, stages, strict=True):
            end = start + _ns(seconds)
            self._tracer.start_span(name, inside, start_time=start).end(end)
            start = end


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _name(record: RequestRecord) -> str:
    if record.entrypoint != REST:
        return f"{record.path.decode('ascii', 'replace').lstrip('/')}"
    if not record.path.lower().startswith((b"/v1/", b"/v2")):  # a fixed route
        return f"{record.method} {record.path.partition(b'?')[0].decode('ascii', 'replace')}"
    if record.path.startswith(b"/v2"):
        return f"{record.method} /v2/models/{{model}}{'/' * bool(record.api)}{record.api}"
    route = f"/v1/models/{{model}}:{record.api}" if record.api else "/v1/models/{model}"
    return f"{record.method} {route}"


def _attributes(record: RequestRecord) -> Mapping[str, Any]:
    found: dict[str, Any] = {"tpuembed.model": record.model}
    if record.entrypoint == REST:
        found["http.request.method"] = record.method
        found["url.path"] = record.path.decode("utf-8", "replace")
        found["http.response.status_code"] = record.status
    else:
        service, _, method = record.path.decode("ascii", "replace").lstrip("/").partition("/")
        found |= {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}
        found["rpc.grpc.status_code"] = int(record.code)
    optional = {
        "tpuembed.version": record.version,
        "tpuembed.rows": record.rows,
        "tpuembed.request_id": record.request_id,
    }
    return found | {key: value for key, value in optional.items() if value not in (None, "")}
