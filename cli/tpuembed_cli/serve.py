"""`tpuembed serve`: a SavedModel folder over TensorFlow Serving's REST and gRPC APIs."""

import importlib.util
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from tpuembed.cpus import available_cpus
from tpuembed.errors import ConfigError, MissingExtraError
from tpuembed.files import UrlPath, as_path
from tpuembed_cli.command import Command
from tpuembed_cli.options import SIZE
from tpuembed_cli.platforms import Platform
from tpuembed_cli.serving_options.batching import batching_options, take_batching
from tpuembed_cli.serving_options.security import security_options, take_security
from tpuembed_cli.serving_options.telemetry import take_log, take_telemetry, telemetry_options

if TYPE_CHECKING:  # only this command imports the server's package
    from tpuembed_serving import ServerSettings

__all__ = ["serve"]

_PACKAGES = ("tensorflow", "tensorflow_serving", "fastapi", "uvicorn", "orjson")
_GRPC_PACKAGES = ("grpc", "grpc_health")
_GRPC_PORT = 8500
_OF_LOADING = {
    "config",
    "config_poll_seconds",
    "keep_versions",
    "max_load_retries",
    "load_retry_seconds",
    "labels_for_unavailable",
} | {
    *("run_threads", "prewarm", "verify_on_load", "lookups", "random_access", "row_store", "cache_dir", "cache_bytes"),
    *("enable_batching", "batching_parameters_file", "max_batch_rows"),
}
"""Options without a meaning if another server loads and runs the models."""
_SECTIONS = {
    "Models and versions": [
        "--name",
        "--config",
        "--config-poll-seconds",
        "--poll-seconds",
        "--keep-versions",
        "--cache-dir",
        "--cache-bytes",
        "--max-load-retries",
        "--load-retry-seconds",
        "--allow-version-labels-for-unavailable-models",
        "--verify-on-load",
        "--prewarm",
        "--lookups",
        "--random-access",
        "--row-store",
        "--default-model",
    ],
    "Ports, processes and stop": [
        "--host",
        "--rest-port",
        "--grpc-port",
        "--grpc-socket-path",
        "--grpc-channel-arguments",
        "--no-grpc",
        "--workers",
        "--listen-when-loaded",
        "--lame-duck-seconds",
        "--drain-seconds",
    ],
    "Batching and requests": [
        "--run-threads",
        "--max-queued-requests",
        "--rest-timeout-ms",
        "--enable-batching",
        "--batching-parameters-file",
        "--max-batch-rows",
    ],
    "Log and telemetry": [
        "--log-format",
        "--verbose",
        "--quiet",
        "--access-log",
        "--request-log-bytes",
        "--metrics",
        "--monitoring-config-file",
        "--otel",
        "--no-console",
    ],
    "Access and limits": [
        "--api-key-file",
        "--tls-cert",
        "--tls-key",
        "--tls-client-ca",
        "--enable-cors",
        "--max-request-memory",
        "--max-body-bytes",
        "--max-connections",
        "--max-header-bytes",
        "--receive-seconds",
    ],
    "TensorFlow Serving": ["--target"],
}
_GIVEN = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
VARIABLES = "TPUEMBED_SERVE_"
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
@click.option(
    "--grpc-socket-path",
    "--grpc_socket_path",
    type=click.Path(path_type=Path),
    help="A Unix socket on which gRPC listens too; needs one worker.",
)
@click.option(
    "--grpc-channel-arguments",
    "--grpc_channel_arguments",
    metavar="KEY=VALUE,...",
    callback=lambda _, __, text: () if text is None else _channel_arguments(text),
    help="gRPC's channel arguments, such as grpc.max_connection_age_ms=2000.",
)
@click.option("--no-grpc", is_flag=True, help="Serve only the REST API.")
@click.option("--config", type=click.Path(path_type=Path), help="A models.config, instead of MODEL_DIR.")
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
    type=click.Path(path_type=Path),
    help="The folder into which versions are pulled from stores.  [default: tpuembed/serve in the user's cache folder]",
)
@click.option(
    "--cache-bytes",
    type=SIZE,
    help="Also keep versions in the cache that are not served, up to this size in all.  [default: keep none]",
)
@click.option(
    "--max-load-retries",
    type=click.IntRange(min=0),
    default=5,
    show_default=True,
    help="How often loading a version is retried.",
)
@click.option(
    "--load-retry-seconds", type=_POSITIVE_FLOAT, default=60.0, show_default=True, help="The pause before each retry."
)
@click.option(
    "--allow-version-labels-for-unavailable-models",
    "--allow_version_labels_for_unavailable_models",
    "labels_for_unavailable",
    is_flag=True,
    help="New labels may name versions that are not loaded.",
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
    "--listen-when-loaded",
    is_flag=True,
    help="Listen only when the models are loaded or have failed to load. The ports are bound before.",
)
@click.option(
    "--prewarm", is_flag=True, help="Read mapped tables, and check their checksums, before a version is available."
)
@click.option(
    "--verify-on-load", is_flag=True, help="Check the checksum of every file of an export before it is loaded."
)
@click.option(
    "--lookups",
    type=click.Choice(("auto", "native", "tensorflow")),
    default="auto",
    show_default=True,
    help="What runs the lookups of exports with layout mmap: the C library, TensorFlow, or for each request the faster one.",
)
@click.option(
    "--random-access",
    is_flag=True,
    help="Read mapped tables as if they were larger than the memory: all pages of a request at once, without readahead.",
)
@batching_options
@click.option(
    "--target", metavar="HOST:PORT", help="Forward the requests for --name to this gRPC port of TensorFlow Serving."
)
@click.option(
    "--row-store",
    metavar="URL",
    help="Where the rows of versions are that tpuembed publish wrote: redis://[USER@]HOST:PORT, or rediss:// for TLS.",
)
@telemetry_options
@click.option(
    "--default-model",
    metavar="NAME",
    help="The model for POST /invocations and AIP_PREDICT_ROUTE, whose requests name no model.  [default: the only one]",
)
@click.option("--no-console", is_flag=True, help="Turn off the console for browsers at GET /.")
@security_options
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
    cache_bytes: int | None,
    max_load_retries: int,
    load_retry_seconds: float,
    labels_for_unavailable: bool,
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
    grpc_options = (grpc_port, options["grpc_socket_path"], options["grpc_channel_arguments"] or None)
    no_grpc = no_grpc or (platform.no_grpc and grpc_options == (None, None, None))
    if target is not None:
        _check_target(context, model_dir, name, target)
    else:
        _check_what(model_dir, name, config, options["config_poll_seconds"])
    socket_path, arguments = options.pop("grpc_socket_path"), options.pop("grpc_channel_arguments")
    options |= _grpc_options(grpc_port, no_grpc, socket_path, arguments, options["workers"])
    _check_extra(() if no_grpc else _GRPC_PACKAGES)
    from tpuembed_serving import LoadSettings, ServerSettings

    options["batching"] = take_batching(options)
    options["telemetry"] = take_telemetry(options)
    options["log"] = take_log(options)
    options["console"] = not options.pop("no_console")
    options["security"] = take_security(options)
    options["run_threads"] = run_threads or max(1, available_cpus() // options["workers"])
    options["load"] = LoadSettings(
        max_retries=max_load_retries, retry_seconds=load_retry_seconds, labels_for_unavailable=labels_for_unavailable
    )
    if target is not None:
        assert name is not None
        _serve(context, ServerSettings.for_target(target, name=name, **options))
    elif config is None:
        assert model_dir is not None
        options["cache"] = _cache(cache_dir, cache_bytes, [model_dir])
        _serve(context, ServerSettings.for_model_dir(model_dir, name=name, keep_versions=keep_versions or 1, **options))
    elif keep_versions is not None:
        raise click.UsageError("--keep-versions: not supported with --config. Write its model_version_policy there")
    else:
        from tpuembed_serving.models.config import read_models

        models = read_models(config)
        options["cache"] = _cache(cache_dir, cache_bytes, [model.base_path for model in models])
        _serve(context, ServerSettings(models=models, config_file=config, **options))


def _model_dir(text: str) -> Path | UrlPath:
    """Return a folder or a URL, or raise BadParameter."""
    try:
        return as_path(text)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from None


def _cache(folder: Path | None, max_bytes: int | None, base_paths: Sequence[Path | UrlPath]) -> Any:
    """Return the cache for models in stores. None if no model is in one, and no folder is given for a later one."""
    from tpuembed_serving import CacheSettings

    stores = [path for path in base_paths if isinstance(path, UrlPath)]
    if stores and importlib.util.find_spec("obstore") is None:
        raise MissingExtraError(f"serving {stores[0]}", "obstore", "cloud")
    if folder is None and not stores:
        if max_bytes is not None:
            raise click.UsageError("--cache-bytes needs a model in a store, or --cache-dir for a later one")
        return None
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpuembed" / "serve"
    return CacheSettings(folder=(folder or default).absolute(), max_bytes=max_bytes)


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


def _channel_arguments(text: str) -> Any:
    """Return gRPC's channel arguments, or raise BadParameter."""
    from tpuembed_serving.grpc.listening import parse_channel_arguments

    try:
        return parse_channel_arguments(text)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from None


def _grpc_options(
    port: int | None, off: bool, socket_path: Path | None, arguments: Any, workers: int
) -> dict[str, Any]:
    """Return the gRPC options. The default port is optional: a server for REST clients works without it."""
    given = {"--grpc-port": port, "--grpc-socket-path": socket_path, "--grpc-channel-arguments": arguments}
    for option, value in given.items():
        if off and value not in (None, ()):
            raise click.UsageError(f"{option} and --no-grpc contradict each other. Leave one out.")
    if off:
        return {"grpc_port": None}
    if socket_path is not None and workers > 1:
        raise click.UsageError(
            f"--grpc-socket-path and --workers {workers}: processes cannot share a Unix socket. Leave one out."
        )
    return {
        "grpc_port": _GRPC_PORT if port is None else port,
        "grpc_optional": port is None and socket_path is None,
        "grpc_socket_path": None if socket_path is None else socket_path.absolute(),
        "grpc_channel_arguments": arguments,
    }


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
