"""Spans as OpenTelemetry's own SDK exports them, into memory; and what the environment may ask for."""

import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.support.messages import refused
from tpuembed.errors import ConfigError, MissingExtraError
from tpuembed_serving.core.request_record import REST, RequestRecord
from tpuembed_serving.core.status import Code
from tpuembed_serving.telemetry.tracing import Tracing, check_tracing, make_provider


def _has(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


HAS_SDK = _has("opentelemetry.sdk") and _has("opentelemetry.exporter.otlp.proto")
needs_sdk = pytest.mark.skipif(not HAS_SDK, reason="opentelemetry-sdk and its OTLP exporter are not installed")

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)
    return iter([None])


def record(
    *,
    entrypoint: str = REST,
    path: bytes = b"/v1/models/m:predict",
    headers: Sequence[tuple[bytes, bytes]] = (),
    code: Code = Code.OK,
    status: int = 200,
) -> RequestRecord:
    """A request with a run, whose stages took 1, 4, 2, 3 and 1 milliseconds."""
    one = RequestRecord(entrypoint, "POST", path, headers, "predict")
    one.model, one.version, one.rows = "m", 7, 5
    start = one.started
    one.received, one._queue, one._run, one._left = start + 0.001, 0.002, 0.003, start + 0.010
    one.code, one.status, one.ended = code, status, start + 0.011
    return one


def spans(*records: RequestRecord) -> dict[str, Any]:
    """Name -> span, as they are exported."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing(provider)
    for one in records:
        tracing.finish(one)
    tracing.close()
    return {span.name: span for span in exporter.get_finished_spans()}


@needs_sdk
@pytest.mark.parametrize("value", [b"00-0-0-01", b"", b"\xff"])
def test_a_broken_traceparent_begins_a_trace(value: bytes) -> None:
    (root,) = (span for span in spans(record(headers=[(b"traceparent", value)])).values() if span.parent is None)
    assert root.name == "POST /v1/models/{model}:predict"


@needs_sdk
@pytest.mark.parametrize(
    ("code", "status", "is_error"),
    [(Code.INTERNAL, 500, True), (Code.UNAVAILABLE, 503, True), (Code.INVALID_ARGUMENT, 400, False)],
)
def test_the_servers_faults_are_errors(code: Code, status: int, is_error: bool) -> None:
    root = spans(record(code=code, status=status))["POST /v1/models/{model}:predict"]
    assert (root.status.status_code.name == "ERROR") == is_error


@needs_sdk
@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_the_exporter_is_what_the_environment_says(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    check_tracing()
    provider = make_provider()
    (processor,) = provider._active_span_processor._span_processors
    module = type(processor.span_exporter).__module__
    assert protocol.split("/")[0] in module
    assert provider.resource.attributes["service.name"] == "mine"
    provider.shutdown()


@needs_sdk
@pytest.mark.parametrize(
    ("variable", "value"),
    [("OTEL_TRACES_EXPORTER", "zipkin"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")],
)
def test_what_is_not_spoken_is_refused(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    with refused(ConfigError, match=f"{variable} is {value}"):
        check_tracing()


@needs_sdk
@needs_sdk
def test_routes_that_name_no_model() -> None:
    for path in (b"/invocations", b"/predict?x=1"):
        route = path.partition(b"?")[0].decode()
        assert spans(record(path=path))[f"POST {route}"].attributes["tpuembed.model"] == "m"


def test_a_service_has_a_name_of_its_own() -> None:
    provider = make_provider()
    assert provider.resource.attributes["service.name"] == "tpuembed-serving"
    provider.shutdown()


def test_a_missing_extra_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpuembed_serving.telemetry.tracing.importlib.util.find_spec", lambda _: None)
    with refused(MissingExtraError, match=r"'tpuembed\[otel\]'"):
        check_tracing()
