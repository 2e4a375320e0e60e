"""What the environment may ask of the exporter of traces. Spans: tests/e2e/test_serve_traces.py."""

import importlib.util
from collections.abc import Iterator

import pytest

from tests.support.messages import refused
from tpuembed.errors import ConfigError, MissingExtraError
from tpuembed_serving.telemetry.tracing import check_tracing, make_provider


def _has(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


HAS_SDK = _has("opentelemetry.sdk") and _has("opentelemetry.exporter.otlp.proto")
needs_sdk = pytest.mark.skipif(not HAS_SDK, reason="opentelemetry-sdk and its OTLP exporter are not installed")


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)
    return iter([None])


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
def test_a_service_has_a_name_of_its_own() -> None:
    provider = make_provider()
    assert provider.resource.attributes["service.name"] == "tpuembed-serving"
    provider.shutdown()


def test_a_missing_extra_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpuembed_serving.telemetry.tracing.importlib.util.find_spec", lambda _: None)
    with refused(MissingExtraError, match=r"'tpuembed\[otel\]'"):
        check_tracing()
