"""`tpuembed serve`: a SavedModel folder over TensorFlow Serving's REST and gRPC APIs."""

import importlib.util
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from tpuembed.errors import ConfigError, MissingExtraError
from tpuembed.files import UrlPath, as_path
from tpuembed.runtime.cpus import available_cpus
from tpuembed_cli.command import Command
from tpuembed_cli.options import SIZE
from tpuembed_cli.platforms import Platform

if TYPE_CHECKING:  # only this command imports the server's package
    from tpuembed_serving import ServerSettings

__all__ = ["serve"]

_PACKAGES = ("tensorflow", "tensorflow_serving", "fastapi", "uvicorn", "orjson")
_GRPC_PACKAGES = ("grpc", "grpc_health")
_GRPC_PORT = 8500
_OF_LOADING = {
    *("config", "config_poll_seconds", "keep_versions", "run_threads", "lookups", "row_store", "cache_dir"),
    *("enable_batching", "batching_parameters_file", "max_batch_rows"),
}
"""Options without a meaning if another server loads and runs the models."""
_SECTIONS = {
    title: flags.split()
    for title, flags in {
        "Models and versions": "--name --config --config-poll-seconds --poll-seconds --keep-versions --cache-dir --lookups "
        "--row-store --default-model",
        "Ports, processes and stop": "--host --rest-port --grpc-port --no-grpc --workers --lame-duck-seconds --drain-seconds",
        "Batching and requests": "--run-threads --max-queued-requests --rest-timeout-ms --enable-batching "
        "--batching-parameters-file --max-batch-rows",
        "Log and telemetry": "--log-format --verbose --quiet --access-log --metrics --otel",
        "Access and limits": "--api-key-file --tls-cert --tls-key --tls-client-ca --enable-cors --max-request-memory "
        "--max-body-bytes --max-connections --max-header-bytes --receive-seconds",
        "TensorFlow Serving": "--target",
    }.items()
}
_GIVEN = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
VARIABLES = "TPUEMBED_SERVE_"
_FILE = click.Path(path_type=Path)
_POSITIVE = click.IntRange(min=1)
_POSITIVE_FLOAT = click.FloatRange(min=0, min_open=True)


@click.command(
    cls=Command,
    short_help="Serve models over HTTP and gRPC.",
    sections=_SECTIONS,
    variables=VARIABLES,
    api_names={
        "health_route": "AIP_HEALTH_ROUTE",
        "predict_route": "AIP_PREDICT_ROUTE",
    },
    examples=(
        "tpuembed serve models/rec",
        "tpuembed serve models/rec --name rec --host 0.0.0.0 --workers 4 --log-format json",
        "tpuembed serve --config models.config --config-poll-seconds 10 --metrics",
        "tpuembed serve s3://bucket/models/rec --cache-dir /var/cache/rec",
        "tpuembed serve models/rec --rest-port 8443 --tls-cert cert.pem --tls-key key.pem",
        "tpuembed serve --config models.config --default-model rec --host 0.0.0.0 --rest-port 8080",
    ),
)
@click.argument(
    "model_dir",
    type=click.Path(),
    required=False,
    callback=lambda _, __, text: None if text is None else _model_dir(text),
)
@click.option("--name", help="The model's name in URLs; the default is the folder's name.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--rest-port",
    type=click.IntRange(0, 65535),
    default=8501,
    show_default=True,
    help="The REST port; 0 picks a free one.",
)
@click.option(
    "--grpc-port",
    type=click.IntRange(0, 65535),
    help=f"The gRPC port; 0 picks a free one.  [default: {_GRPC_PORT}, if it is free]",
)
@click.option("--no-grpc", is_flag=True, help="Serve only the REST API.")
@click.option("--config", type=_FILE, help="A models.config, instead of MODEL_DIR.")
@click.option(
    "--keep-versions",
    type=_POSITIVE,
    metavar="N",
    help="Serve the newest N versions of MODEL_DIR.  [default: 1]",
)
@click.option(
    "--config-poll-seconds",
    type=click.FloatRange(min=0),
    callback=lambda _, __, seconds: seconds or None,
    help="How often --config is read again; 0 is never.  [default: 0]",
)
@click.option("--workers", type=_POSITIVE, default=1, show_default=True, help="Processes that share the ports.")
@click.option(
    "--poll-seconds", type=_POSITIVE_FLOAT, default=1.0, show_default=True, help="How often to look for a new version."
)
@click.option(
    "--rest-timeout-ms",
    type=_POSITIVE,
    default=30_000,
    show_default=True,
    help="Requests that take longer are answered 504.",
)
@click.option(
    "--cache-dir",
    type=_FILE,
    help="The folder into which versions are pulled from stores.  [default: tpuembed/serve in the user's cache folder]",
)
@click.option(
    "--run-threads", type=_POSITIVE, help="Parallel executions of the model, per worker.  [default: CPUs / workers]"
)
@click.option(
    "--max-queued-requests",
    type=_POSITIVE,
    default=1000,
    show_default=True,
    help="The most requests that may wait; more are answered 503.",
)
@click.option(
    "--max-body-bytes",
    type=SIZE,
    help="Larger request bodies are answered 413.  [default: 32MiB over REST, no limit over gRPC]",
)
@click.option(
    "--max-request-memory",
    type=SIZE,
    default="1GiB",
    show_default=True,
    help="Estimated memory that one request, and all requests in flight together, may take in a process.",
)
@click.option(
    "--lame-duck-seconds",
    type=click.FloatRange(min=0),
    default=5.0,
    show_default=True,
    help="After SIGTERM, how long to answer requests before the ports are closed. /readyz is 503 meanwhile.",
)
@click.option(
    "--drain-seconds",
    type=_POSITIVE_FLOAT,
    default=30.0,
    show_default=True,
    help="How long to wait for requests after the ports are closed.",
)
@click.option(
    "--lookups",
    type=click.Choice(("auto", "native", "tensorflow")),
    default="auto",
    show_default=True,
    help="What runs the lookups of exports with layout mmap: the C library, TensorFlow, or for each request the faster one.",
)
@click.option(
    "--enable-batching/--disable-batching",
    "--enable_batching/--disable_batching",
    "enable_batching",
    default=None,
    help="Always or never batch requests.  [default: batch if the graph proves that this changes no answer]",
)
@click.option(
    "--batching-parameters-file",
    "--batching_parameters_file",
    type=_FILE,
    help="TensorFlow Serving's BatchingParameters; needs --enable-batching.",
)
@click.option(
    "--max-batch-rows",
    type=_POSITIVE,
    default=512,
    show_default=True,
    help="The most rows of a batch of several requests. Batching parameters take its place.",
)
@click.option(
    "--target", metavar="HOST:PORT", help="Forward the requests for --name to this gRPC port of TensorFlow Serving."
)
@click.option(
    "--row-store",
    metavar="URL",
    help="Where the rows of versions are that tpuembed publish wrote: redis://[USER@]HOST:PORT, or rediss:// for TLS.",
)
@click.option(
    "--metrics", is_flag=True, help="Metrics for Prometheus at /monitoring/prometheus/metrics, on the REST port."
)
@click.option(
    "--access-log",
    metavar="FILE",
    help="Append a line of JSON for every request to FILE; - is stderr.  [default: none]",
)
@click.option(
    "--log-format",
    type=click.Choice(("text", "json")),
    default="text",
    show_default=True,
    help="The server's log on stderr: lines of text, or an object of JSON per line.",
)
@click.option("--verbose", "-v", is_flag=True, help="Also log debug messages, and show TensorFlow's own messages.")
@click.option("--quiet", "-q", is_flag=True, help="Log warnings and errors only.")
@click.option("--otel", is_flag=True, help="Export a trace of every request by OTLP, as the OTEL_* variables say.")
@click.option(
    "--default-model",
    metavar="NAME",
    help="The model for POST /invocations and AIP_PREDICT_ROUTE, whose requests name no model.  [default: the only one]",
)
@click.option(
    "--api-key-file",
    type=_FILE,
    help="A file with one KEY, 'NAME: KEY' or 'NAME admin: KEY' per line; requests need one ('Authorization: Bearer KEY' or "
    "'X-API-Key: KEY'), and gRPC's reload an admin's.",
)
@click.option("--tls-cert", type=_FILE, help="The server's certificate and its chain, PEM: TLS on both ports.")
@click.option("--tls-key", type=_FILE, help="The private key of the certificate, PEM, without a password.")
@click.option(
    "--tls-client-ca",
    type=_FILE,
    help="Certificate authorities, PEM. Clients need a certificate of one of them.  [default: none]",
)
@click.option(
    "--enable-cors",
    "--rest_api_enable_cors_support",
    "cors",
    is_flag=True,
    help="Allow requests from pages of other sites.",
)
@click.option(
    "--max-connections",
    type=_POSITIVE,
    help="The most open connections per worker; more are answered 503.  [default: no limit]",
)
@click.option(
    "--max-header-bytes",
    type=_POSITIVE,
    default=64 << 10,
    show_default=True,
    help="Longer request lines and headers are answered 431.",
)
@click.option(
    "--receive-seconds",
    type=_POSITIVE_FLOAT,
    default=60.0,
    show_default=True,
    help="Time limit for a request to arrive, and for a client to read some of its answer.",
)
@click.pass_context
def serve(
    context: click.Context,
    /,
    model_dir: Path | UrlPath | None,
    name: str | None,
    target: str | None,
    grpc_port: int | None,
    no_grpc: bool,
    config: Path | None,
    keep_versions: int | None,
    cache_dir: Path | None,
    run_threads: int | None,
    **options: Any,
) -> None:
    """Serve MODEL_DIR/<version>/, or the models of --config, over TensorFlow Serving's REST and gRPC APIs.

    MODEL_DIR is a folder, s3://BUCKET/KEY or gs://BUCKET/KEY. Versions in a store are pulled into --cache-dir. The newest
    version is loaded. When a newer one appears, it replaces the old one without a gap.

    The ports listen at once. GET /readyz is 200 when the model is loaded. Until then, requests for models are answered
    503. After SIGTERM, /readyz is 503 and the server answers for --lame-duck-seconds. Then it finishes the accepted
    requests and exits 0. SIGINT skips the waiting.

    Without MODEL_DIR and --config, the model is AIP_STORAGE_URI of Vertex AI, or /opt/ml/model of SageMaker if it exists.
    On these platforms the server listens on 0.0.0.0 and on their port, unless --host or --rest-port is given.
    """
    needs_model = all(each is None for each in (model_dir, config, target))
    platform = Platform.of(os.environ, needs_model=needs_model)
    options |= _of_platform(context, platform)
    if platform.model_dir is not None:
        model_dir = _platform_model_dir(platform.model_dir)
    if no_grpc and grpc_port is not None:
        raise click.UsageError("--grpc-port and --no-grpc contradict each other. Leave one out.")
    no_grpc = no_grpc or (platform.no_grpc and grpc_port is None)
    if target is not None:
        _check_target(context, model_dir, name, target)
    else:
        _check_what(model_dir, name, config, options["config_poll_seconds"])
    if not no_grpc:  # the default port is optional: a server for REST clients works without it
        options |= {"grpc_port": _GRPC_PORT if grpc_port is None else grpc_port, "grpc_optional": grpc_port is None}
    _check_extra(() if no_grpc else _GRPC_PACKAGES)
    from tpuembed_serving import ServerSettings

    options["batching"] = _take_batching(options)
    options["telemetry"] = _take_telemetry(options)
    options["log"] = _take_log(options)
    options["security"] = _take_security(options)
    options["run_threads"] = run_threads or max(1, available_cpus() // options["workers"])
    if target is not None:
        assert name is not None
        _serve(context, ServerSettings.for_target(target, name=name, **options))
    elif config is None:
        assert model_dir is not None
        options["cache"] = _cache(cache_dir, [model_dir])
        _serve(context, ServerSettings.for_model_dir(model_dir, name=name, keep_versions=keep_versions or 1, **options))
    elif keep_versions is not None:
        raise click.UsageError("--keep-versions: not supported with --config. Write its model_version_policy there")
    else:
        from tpuembed_serving.models.config import read_models

        models = read_models(config)
        options["cache"] = _cache(cache_dir, [model.base_path for model in models])
        _serve(context, ServerSettings(models=models, config_file=config, **options))


def _model_dir(text: str) -> Path | UrlPath:
    """Return a folder or a URL, or raise BadParameter."""
    try:
        return as_path(text)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from None


def _cache(folder: Path | None, base_paths: Sequence[Path | UrlPath]) -> Path | None:
    """Return the cache for models in stores. None if no model is in one, and no folder is given for a later one."""
    stores = [path for path in base_paths if isinstance(path, UrlPath)]
    if stores and importlib.util.find_spec("obstore") is None:
        raise MissingExtraError(f"serving {stores[0]}", "obstore", "cloud")
    if folder is None and not stores:
        return None
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpuembed" / "serve"
    return (folder or default).absolute()


def _take_batching(options: dict[str, Any]) -> Any:
    """Remove the options of batching from `options`, and return their settings."""
    from tpuembed_serving.batching.parameters import read_parameters
    from tpuembed_serving.settings import BatchingSettings

    file = options.pop("batching_parameters_file")
    return BatchingSettings(
        enabled=options.pop("enable_batching"),
        parameters=None if file is None else read_parameters(file),
        max_rows=options.pop("max_batch_rows"),
    )


def _take_telemetry(options: dict[str, Any]) -> Any:
    """Remove the options of telemetry from `options`, and return their settings."""
    from tpuembed_serving import TelemetrySettings
    from tpuembed_serving.telemetry.metrics import DEFAULT_PATH

    path = DEFAULT_PATH if options.pop("metrics") else None
    return TelemetrySettings(metrics_path=path, access_log=options.pop("access_log"), traces=options.pop("otel"))


def _take_log(options: dict[str, Any]) -> Any:
    """Remove the options of the log from `options`, and return their settings."""
    from tpuembed_serving import LogSettings

    verbose, quiet = options.pop("verbose"), options.pop("quiet")
    if verbose and quiet:
        source = click.get_current_context().get_parameter_source
        from_flags = [source(name) is ParameterSource.COMMANDLINE for name in ("verbose", "quiet")]
        if any(from_flags) and not all(from_flags):  # a flag wins over a variable
            verbose, quiet = from_flags
    if verbose and quiet:
        raise click.UsageError("--verbose and --quiet contradict each other. Leave one out.")
    level = logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO
    return LogSettings(format=options.pop("log_format"), level=level)


def _take_security(options: dict[str, Any]) -> Any:
    """Remove the options of keys, TLS and connections from `options`, and return their settings."""
    from tpuembed_serving.core.api_keys import ApiKeys
    from tpuembed_serving.core.security import ConnectionLimits, SecuritySettings
    from tpuembed_serving.core.tls import TlsSettings

    limits = ConnectionLimits(
        connections=options.pop("max_connections"),
        header_bytes=options.pop("max_header_bytes"),
        receive_seconds=options.pop("receive_seconds"),
    )
    keys, tls = options.pop("api_key_file"), None
    certificate, key, client_ca = (options.pop(name) for name in ("tls_cert", "tls_key", "tls_client_ca"))
    if certificate is not None and key is not None:
        tls = TlsSettings(certificate=certificate, key=key, client_ca=client_ca)
    elif (certificate, key, client_ca) != (None, None, None):
        raise click.UsageError("TLS needs both --tls-cert and --tls-key")
    return SecuritySettings(
        api_keys=None if keys is None else ApiKeys.read(keys), tls=tls, cors=options.pop("cors"), limits=limits
    )


def _serve(context: click.Context, settings: "ServerSettings") -> None:
    from tpuembed_serving import serve as run_server

    assert isinstance(context.command, Command)
    if links := context.command.service_links:
        _warn(settings, f"ignored, because Kubernetes set them for a Service and not for an option: {', '.join(links)}")
    if unknown := context.command.unknown_variables(os.environ):
        _warn(settings, f"no option of tpuembed serve has these environment variables: {', '.join(unknown)}")
    run_server(settings)


def _warn(settings: "ServerSettings", text: str) -> None:
    """Write a warning to the log of the server, before it starts."""
    from tpuembed_serving.telemetry.server_log import log_to_stderr

    log_to_stderr(settings.log)
    logging.getLogger("tpuembed_serving").warning(text)


def _of_platform(context: click.Context, platform: Platform) -> dict[str, Any]:
    """Return the options that `platform` has, unless the command line has them."""
    found: dict[str, Any] = {"health_route": platform.health_route, "predict_route": platform.predict_route}
    for option in ("host", "rest_port"):
        value = getattr(platform, option)
        if value is not None and context.get_parameter_source(option) not in _GIVEN:
            found[option] = value
    return found


def _platform_model_dir(text: str) -> Path | UrlPath:
    try:
        return _model_dir(text)
    except click.BadParameter as error:
        raise click.UsageError(f"AIP_STORAGE_URI: {error.message}") from None


def _check_what(
    model_dir: Path | UrlPath | None, name: str | None, config: Path | None, poll_seconds: float | None
) -> None:
    if (model_dir is None) == (config is None):
        raise click.UsageError("give either MODEL_DIR or --config")
    if config is not None and name is not None:
        raise click.UsageError("--name is for MODEL_DIR; --config has the names of its models")
    if config is None and poll_seconds is not None:
        raise click.UsageError("--config-poll-seconds needs --config")


def _check_target(context: click.Context, model_dir: Path | UrlPath | None, name: str | None, target: str) -> None:
    """Raise UsageError if the options for a TensorFlow Serving are wrong, or include options about loading and running
    models.
    """
    if not name:
        raise click.UsageError("--target needs --name, the model's name there. Give it.")
    host, _, port = target.rpartition(":")
    if not host or not port.isdecimal():
        raise click.UsageError(f"--target is {target!r}. Give HOST:PORT of TensorFlow Serving's gRPC API.")
    given = [] if model_dir is None else ["MODEL_DIR"]
    for parameter in context.command.params:
        is_given = context.get_parameter_source(parameter.name or "") in _GIVEN
        if is_given and parameter.name in _OF_LOADING:
            given.append(parameter.opts[0])
    if given:
        text = "not supported with --target, where another server loads the models"
        raise click.UsageError(f"{', '.join(given)}: {text}")


def _check_extra(more: Sequence[str]) -> None:
    for package in (*_PACKAGES, *more):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError("tpuembed serve", package, "serve")
