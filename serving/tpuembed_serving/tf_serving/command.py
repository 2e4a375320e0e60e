"""Prints how to serve the same models with TensorFlow Serving: a command, a models.config and a compose file.

Flags: tensorflow_serving/model_servers/main.cc; the container's: tensorflow_serving/tools/docker/Dockerfile.
"""

import json
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Final

import yaml

from tpuembed.errors import ServingError
from tpuembed.protobuf import MalformedError
from tpuembed.saved_model import GRAPH_FILE, mapped_tensors
from tpuembed_serving.models.policies import AllVersions, LatestVersions, SpecificVersions
from tpuembed_serving.models.versions import find_versions
from tpuembed_serving.settings import ModelSettings, ServerSettings

__all__ = ["IMAGE", "tf_serving_files"]

IMAGE: Final = "tensorflow/serving:2.19.1"
_CONFIG: Final = PurePosixPath("models.config")
_IN_CONTAINER: Final = PurePosixPath("/models")
_GRPC_PORT, _REST_PORT = 8500, 8501


def tf_serving_files(settings: ServerSettings) -> str:
    """Return a text of three parts, each after a line of `#`: a command, a models.config, a compose file.

    Comments name the settings that TensorFlow Serving has no flag for, and the versions whose mapped tables it would not
    find.

    Raises:
        ServingError: a model's folder cannot be read.
    """
    notes = [*_unknown(settings), *(note for model in settings.models for note in _mapped_elsewhere(model))]
    parts = [
        *(f"# Note: {note}" for note in notes),
        f"# The command, where {_CONFIG} lies in the current folder:",
        shlex.join(_command(settings)),
        f"# {_CONFIG}:",
        _models_config(settings.models, [model.base_path for model in settings.models]),
        f"# compose.yaml, with a {_CONFIG} of its own inside:",
        # A dollar sign begins a variable in a compose file.
        yaml.safe_dump(_compose(settings), sort_keys=False).rstrip().replace("$", "$$"),
    ]
    return "\n".join(parts) + "\n"


def _command(settings: ServerSettings) -> list[str]:
    grpc_port = settings.grpc_port if settings.grpc_port is not None else 0
    ports = [f"--port={grpc_port}", f"--rest_api_port={settings.rest_port}"]
    return ["tensorflow_model_server", *ports, f"--model_config_file={_CONFIG}", *_flags(settings)]


def _flags(settings: ServerSettings) -> Iterator[str]:
    """Yield the flags of both the command and the container."""
    yield f"--rest_api_timeout_in_ms={settings.rest_timeout_ms}"
    yield f"--file_system_poll_wait_seconds={max(1, round(settings.poll_seconds))}"
    yield f"--max_num_load_retries={settings.load.max_retries}"
    yield f"--load_retry_interval_micros={round(settings.load.retry_seconds * 1e6)}"
    yield "--enable_model_warmup=true"
    if settings.load.labels_for_unavailable or any(model.labels for model in settings.models):
        yield "--allow_version_labels_for_unavailable_models=true"  # without it, labels of a first config are refused
    if settings.config_poll_seconds is not None:
        yield f"--model_config_file_poll_wait_seconds={max(1, round(settings.config_poll_seconds))}"
    if settings.batching.enabled:
        yield "--enable_batching=true"
    if settings.batching.per_model:
        yield "--enable_per_model_batching_parameters=true"


def _unknown(settings: ServerSettings) -> Iterator[str]:
    """Yield notes about the settings that TensorFlow Serving does not have, or takes in another way."""
    asked = {
        "--workers": settings.workers > 1,
        "--prewarm": settings.prewarm,
        "--random-access": settings.random_access,
        "--verify-on-load": settings.verify_on_load,
        "--lame-duck-seconds": settings.lame_duck_seconds != ServerSettings.lame_duck_seconds,
        "--max-body-bytes": settings.max_body_bytes is not None,
        "--host": settings.host not in ("0.0.0.0", "::"),
    }
    words = {"--host": "it listens on all addresses. Publish its ports on the address that you want"}
    for option in (option for option, is_asked in asked.items() if is_asked):
        yield f"TensorFlow Serving has no {option}: {words.get(option, 'the option is ignored')}"
    if settings.batching.parameters is not None:
        yield "add --batching_parameters_file=FILE with the file of --batching-parameters-file"


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


def _served(model: ModelSettings) -> dict[int, Path]:
    try:
        found = find_versions(model.base_path)
    except OSError as error:
        raise ServingError(f"MODEL_DIR {model.base_path}: cannot be read: {error.strerror}") from None
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


def _compose(settings: ServerSettings) -> dict[str, Any]:
    inside = [_IN_CONTAINER / model.name for model in settings.models]
    config = _models_config(settings.models, inside)
    ports = [f"127.0.0.1:{settings.rest_port}:{_REST_PORT}"]
    if settings.grpc_port is not None:
        ports.append(f"127.0.0.1:{settings.grpc_port}:{_GRPC_PORT}")
    service = {
        "image": IMAGE,
        "command": [f"--model_config_file={_IN_CONTAINER / _CONFIG}", *_flags(settings)],
        "configs": [{"source": "models", "target": str(_IN_CONTAINER / _CONFIG)}],
        "volumes": [
            {"type": "bind", "source": str(model.base_path), "target": str(place), "read_only": True}
            for model, place in zip(settings.models, inside, strict=True)
        ],
        "ports": ports,
        "read_only": True,
    }
    return {"services": {"tf-serving": service}, "configs": {"models": {"content": config}}}
