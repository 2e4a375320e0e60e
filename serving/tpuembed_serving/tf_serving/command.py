"""Prints how to serve the same models with TensorFlow Serving: a command, a models.config and a compose file.

Flags: tensorflow_serving/model_servers/main.cc; the container's: tensorflow_serving/tools/docker/Dockerfile.
"""

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

import yaml

from tpuembed.errors import ServingError, reason
from tpuembed.protobuf import MalformedError
from tpuembed.saved_model import GRAPH_FILE, mapped_tensors
from tpuembed_serving.models.policies import AllVersions, LatestVersions, SpecificVersions
from tpuembed_serving.models.versions import find_versions
from tpuembed_serving.settings import ModelSettings, ServerSettings

__all__ = ["IMAGE", "not_carried_over", "tf_serving_files"]

IMAGE: Final = "tensorflow/serving:2.19.1"
_CONFIG: Final = PurePosixPath("models.config")
_IN_CONTAINER: Final = PurePosixPath("/models")
_SETTINGS: Final = PurePosixPath("/settings")
_SOCKETS: Final = PurePosixPath("/sockets")
_GRPC_PORT, _REST_PORT = 8500, 8501
_ALL_ADDRESSES: Final = ("0.0.0.0", "::")
_CARRIED: Final = frozenset(
    {
        *("--name", "--config", "--config-poll-seconds", "--keep-versions"),
        *("--rest-port", "--grpc-port", "--grpc-socket-path"),
        *("--grpc-channel-arguments", "--poll-seconds", "--rest-timeout-ms"),
        *("--max-load-retries", "--load-retry-seconds", "--listen-when-loaded"),
        *("--allow-version-labels-for-unavailable-models", "--enable-batching", "--batching-parameters-file"),
        *("--enable-per-model-batching-parameters", "--monitoring-config-file", "--enable-cors"),
        *("--backend", "--print-tf-serving"),
    }
)
"""Options whose setting the output has. TensorFlow Serving always listens when its models are loaded."""
_NO_LIMIT: Final = "TensorFlow Serving has no such limit"
_NO_TLS: Final = (
    "TensorFlow Serving reads keys and certificates from the file of its --ssl_config_file, for gRPC alone. Its REST API "
    "has no TLS"
)
_WHY: Final[Mapping[str, str]] = {
    "--api-key-file": "TensorFlow Serving has no API keys",
    **dict.fromkeys(("--tls-cert", "--tls-key", "--tls-client-ca"), _NO_TLS),
    **dict.fromkeys(
        (
            *("--max-body-bytes", "--max-request-memory", "--max-connections", "--max-header-bytes", "--max-rows"),
            *("--max-json-depth", "--receive-seconds"),
        ),
        _NO_LIMIT,
    ),
    "--metrics": "TensorFlow Serving reads a file for its metrics. Give --monitoring-config-file instead",
    "--no-console": "TensorFlow Serving has no console",
    "--request-log-bytes": "TensorFlow Serving does not write such files",
    "--default-model": "each request to TensorFlow Serving names its model",
    "--access-log": "TensorFlow Serving has no access log",
    "--log-format": "TensorFlow Serving's log has one format",
    **dict.fromkeys(("--verbose", "--quiet"), "TensorFlow Serving has the variable TF_CPP_MIN_LOG_LEVEL"),
    "--otel": "TensorFlow Serving exports no OpenTelemetry traces",
    "--host": "TensorFlow Serving listens on all addresses",
    "--workers": "TensorFlow Serving is one process",
    "--run-threads": "TensorFlow Serving has --tensorflow_inter_op_parallelism and num_batch_threads of its batching parameters",
    "--max-queued-requests": "TensorFlow Serving has max_enqueued_batches of its batching parameters",
    "--max-batch-rows": "TensorFlow Serving has max_batch_size of its batching parameters",
    "--lame-duck-seconds": "TensorFlow Serving has no lame duck",
    "--drain-seconds": "TensorFlow Serving ends at once on SIGTERM",
    "--prewarm": "TensorFlow Serving does not read mapped tables before a version is available",
    "--lookups": "TensorFlow Serving runs lookups by the graph",
    "--random-access": "TensorFlow Serving does not change the readahead of mapped tables",
    "--verify-on-load": "TensorFlow Serving does not compare files with their checksums",
    **dict.fromkeys(("--cache-dir", "--cache-bytes"), "TensorFlow Serving has no cache of versions from stores"),
    "--no-grpc": f"TensorFlow Serving does not start without gRPC. The command has port {_GRPC_PORT}",
}


def not_carried_over(settings: ServerSettings, given: Iterable[str]) -> Iterator[str]:
    """Yield a line for each option, and each field of a config, that `tf_serving_files` cannot express, or not exactly.

    Args:
        settings: what the options were read as.
        given: the options that were given, such as "--api-key-file".
    """
    given = set(given)
    carried = set(_CARRIED)
    if settings.host in _ALL_ADDRESSES:
        carried.add("--host")
    if settings.workers == 1:
        carried.add("--workers")
    reasons = {option: _WHY.get(option, "TensorFlow Serving has no such option") for option in given - carried}
    for option, port, default in (
        ("--rest-port", settings.rest_port, _REST_PORT),
        ("--grpc-port", settings.grpc_port, _GRPC_PORT),
    ):
        if option in given and port == 0:
            reasons[f"{option} 0"] = f"port 0 of TensorFlow Serving is off. The command has port {default}"
    for option, seconds in (
        ("--poll-seconds", settings.poll_seconds),
        ("--config-poll-seconds", settings.config_poll_seconds),
    ):
        if option in given and seconds is not None and seconds != _whole(seconds):
            reasons[f"{option} {seconds:g}"] = (
                f"TensorFlow Serving takes whole seconds. The output has {_whole(seconds)}"
            )
    for variable, route in (("AIP_HEALTH_ROUTE", settings.health_route), ("AIP_PREDICT_ROUTE", settings.predict_route)):
        if route is not None:
            reasons[variable] = f"TensorFlow Serving has no route {route}"
    for option, why in sorted(reasons.items()):
        yield f"not carried over: {option} ({why})"
    for model in settings.models:
        if model.request_logging is not None:
            yield f"not carried over: logging_config of model {model.name} (TensorFlow Serving's binary has no log collector)"


def tf_serving_files(
    settings: ServerSettings,
    *,
    batching_parameters_file: Path | None = None,
    monitoring_config_file: Path | None = None,
) -> str:
    """Return a text of three parts, each after a line of `#`: a command, a models.config, a compose file.

    A comment names the addresses on which TensorFlow Serving listens, and others the versions whose mapped tables it would
    not find. `not_carried_over` has the settings that TensorFlow Serving has no flag for.

    Args:
        settings: the settings of the server.
        batching_parameters_file: the file of `settings.batching.parameters`.
        monitoring_config_file: the file of `settings.telemetry.metrics_path`.

    Raises:
        ServingError: a model's folder cannot be read.
    """
    files = {
        "--batching_parameters_file": batching_parameters_file,
        "--monitoring_config_file": monitoring_config_file,
    }
    here = {flag: path.absolute() for flag, path in files.items() if path is not None}
    notes = [note for model in settings.models for note in _mapped_elsewhere(model)]
    if settings.host not in _ALL_ADDRESSES:
        notes.insert(0, "TensorFlow Serving listens on all addresses. Publish its ports on the address that you want")
    parts = [
        *(f"# Note: {note}" for note in notes),
        f"# The command, where {_CONFIG} lies in the current folder:",
        shlex.join(_command(settings, here)),
        f"# {_CONFIG}:",
        _models_config(settings.models, [_folder(model) for model in settings.models]),
        f"# compose.yaml, with a {_CONFIG} of its own inside:",
        # A dollar sign begins a variable in a compose file.
        yaml.safe_dump(_compose(settings, here), sort_keys=False).rstrip().replace("$", "$$"),
    ]
    return "\n".join(parts) + "\n"


def _command(settings: ServerSettings, files: Mapping[str, Path]) -> list[str]:
    # Port 0 is off in TensorFlow Serving. Without gRPC it does not start (server.cc).
    ports = [f"--port={settings.grpc_port or _GRPC_PORT}", f"--rest_api_port={settings.rest_port or _REST_PORT}"]
    named = [f"{flag}={path}" for flag, path in files.items()]
    if settings.grpc_socket_path is not None:
        named.append(f"--grpc_socket_path={settings.grpc_socket_path}")
    return ["tensorflow_model_server", *ports, f"--model_config_file={_CONFIG}", *_flags(settings), *named]


def _flags(settings: ServerSettings) -> Iterator[str]:
    """Yield the flags of both the command and the container."""
    yield f"--rest_api_timeout_in_ms={settings.rest_timeout_ms}"
    yield f"--file_system_poll_wait_seconds={_whole(settings.poll_seconds)}"
    yield f"--max_num_load_retries={settings.load.max_retries}"
    yield f"--load_retry_interval_micros={round(settings.load.retry_seconds * 1e6)}"
    yield "--enable_model_warmup=true"
    if settings.load.labels_for_unavailable or any(model.labels for model in settings.models):
        yield "--allow_version_labels_for_unavailable_models=true"  # without it, labels of a first config are refused
    if settings.config_poll_seconds is not None:
        yield f"--model_config_file_poll_wait_seconds={_whole(settings.config_poll_seconds)}"
    if settings.batching.enabled:
        yield "--enable_batching=true"
    if settings.batching.per_model:
        yield "--enable_per_model_batching_parameters=true"
    if settings.security.cors:
        yield "--rest_api_enable_cors_support=true"
    if settings.grpc_channel_arguments:
        yield "--grpc_channel_arguments=" + ",".join(f"{key}={value}" for key, value in settings.grpc_channel_arguments)


def _whole(seconds: float) -> int:
    """Return the whole number of seconds that TensorFlow Serving takes."""
    return max(1, round(seconds))


def _mapped_elsewhere(model: ModelSettings) -> Iterator[str]:
    """Yield notes about versions that map their tables from other folders than their own, here or in the container."""
    for number, folder in sorted(_served(model).items()):
        try:
            mapped = {tensor.path for tensor in mapped_tensors((folder / GRAPH_FILE).read_bytes())}
        except (OSError, MalformedError):
            continue
        places = {"here": PurePosixPath(folder), "in the container": _IN_CONTAINER / model.name / folder.name}
        for where, place in places.items():
            if any(place not in PurePosixPath(path).parents for path in mapped):
                root = shlex.quote(str(place.parent))
                yield (
                    f"{model.name} version {number} does not map its tables from {place}. To serve it {where}, run: "
                    f"tpuembed relocate {shlex.quote(str(folder))} {root}"
                )


def _folder(model: ModelSettings) -> Path:
    """Return the folder of a model. Raises ServingError for a store."""
    if isinstance(model.base_path, Path):
        return model.base_path
    raise ServingError(
        f"model {model.name}: {model.base_path} is in a store. Pull it into a folder, and print the command for the folder"
    )


def _served(model: ModelSettings) -> dict[int, Path]:
    base_path = _folder(model)
    try:
        found = find_versions(base_path)
    except OSError as error:
        raise ServingError(f"MODEL_DIR {base_path}: cannot be read: {reason(error)}") from None
    return {number: found[number] for number in model.policy.wanted(found)}


def _models_config(models: Iterable[ModelSettings], base_paths: Iterable[PurePosixPath | Path]) -> str:
    configs = (_config(model, path) for model, path in zip(models, base_paths, strict=True))
    return "model_config_list {\n" + "".join(configs) + "}"


def _config(model: ModelSettings, base_path: PurePosixPath | Path) -> str:
    lines = [
        f"    name: {_quoted(model.name)}",
        f"    base_path: {_quoted(str(base_path))}",
        f"    model_platform: {_quoted('tensorflow')}",
        *_policy(model.policy),
        *(f"    version_labels {{ key: {_quoted(label)} value: {number} }}" for label, number in model.labels.items()),
    ]
    return "  config {\n" + "\n".join(lines) + "\n  }\n"


def _policy(policy: Any) -> Iterator[str]:
    match policy:
        case LatestVersions(count) if count > 1:
            yield f"    model_version_policy {{ latest {{ num_versions: {count} }} }}"
        case AllVersions():
            yield "    model_version_policy { all {} }"
        case SpecificVersions(versions):
            numbers = " ".join(f"versions: {number}" for number in sorted(versions))
            yield f"    model_version_policy {{ specific {{ {numbers} }} }}"


def _quoted(text: str) -> str:
    """Return a string literal of protobuf's text format, which allows UTF-8."""
    return json.dumps(text, ensure_ascii=False)


def _compose(settings: ServerSettings, files: Mapping[str, Path]) -> dict[str, Any]:
    inside = [_IN_CONTAINER / model.name for model in settings.models]
    config = _models_config(settings.models, inside)
    ports = [f"127.0.0.1:{settings.rest_port or _REST_PORT}:{_REST_PORT}"]
    if settings.grpc_port is not None:
        ports.append(f"127.0.0.1:{settings.grpc_port or _GRPC_PORT}:{_GRPC_PORT}")
    flags = [*_flags(settings), *(f"{flag}={_inside(flag)}" for flag in files)]
    mounts = [_mount(_folder(model), place) for model, place in zip(settings.models, inside, strict=True)]
    mounts += [_mount(path, _inside(flag)) for flag, path in files.items()]
    if settings.grpc_socket_path is not None:
        flags.append(f"--grpc_socket_path={_SOCKETS / settings.grpc_socket_path.name}")
        mounts.append({**_mount(settings.grpc_socket_path.parent, _SOCKETS), "read_only": False})
    service = {
        "image": IMAGE,
        "command": [f"--model_config_file={_IN_CONTAINER / _CONFIG}", *flags],
        "configs": [{"source": "models", "target": str(_IN_CONTAINER / _CONFIG)}],
        "volumes": mounts,
        "ports": ports,
        "read_only": True,
    }
    return {"services": {"tf-serving": service}, "configs": {"models": {"content": config}}}


def _inside(flag: str) -> PurePosixPath:
    """Return the path in the container of a flag's file."""
    return _SETTINGS / flag.removeprefix("--")


def _mount(source: Path, target: PurePosixPath) -> dict[str, Any]:
    return {"type": "bind", "source": str(source), "target": str(target), "read_only": True}
