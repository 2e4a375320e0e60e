"""Reads TensorFlow Serving's models.config: a ModelServerConfig, as text or as a message.

Source: tensorflow_serving/config/model_server_config.proto. The error texts are those of model_servers/server_core.cc.
"""

from pathlib import Path
from typing import Any, Final

from tpuembed.errors import ConfigError, reason
from tpuembed.files import FilePath, as_path
from tpuembed.formats.protobuf import MalformedError
from tpuembed.formats.protobuf_text import message_class, parse_text
from tpuembed_serving.core.request_record import RequestLogging
from tpuembed_serving.models.policies import AllVersions, LatestVersions, SpecificVersions, VersionPolicy
from tpuembed_serving.settings import ModelSettings

__all__ = ["FieldError", "models_from_message", "parse_models", "read_models"]

_PLATFORM = "tensorflow"
_COLLECTOR = "tfrecord"
"""The type of log collector that `grpc.request_log` is. TensorFlow Serving's are registered by those who build it."""
_PARSING = "Error parsing text-format tensorflow.serving.ModelServerConfig"
"""What TensorFlow Serving logs then."""
_UNSPECIFIED, _TENSORFLOW = 0, 1
"""Values of the deprecated enumeration ModelType."""


class FieldError(ConfigError):
    """A field of a ModelServerConfig is wrong or not supported."""

    def __init__(self, field: str, text: str) -> None:
        """Store the message, and the path of the field, such as `model_config_list.config[1].base_path`."""
        super().__init__(text)
        self.field = field


def read_models(path: Path) -> tuple[ModelSettings, ...]:
    """Return the models that the file at `path` configures.

    A file without a `model_config_list` is refused. It may be a file that another program is writing, which is empty for a
    moment: a server must not start without models then, or unload those that it has.

    Raises:
        ConfigError: the file cannot be read, or is not a models.config. The message names the file and the field.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"config {path}: cannot be read: {reason(error)}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"config {path}: is not UTF-8 text. Save it as UTF-8") from None
    return parse_models(text, str(path))


def parse_models(text: str, source: str) -> tuple[ModelSettings, ...]:
    """Return the models of a ModelServerConfig in protobuf's text format. Error messages call it `source`.

    Raises:
        ConfigError: see `read_models`.
    """
    from tensorflow_serving.config import model_server_config_pb2  # it does not import TensorFlow

    try:
        message = parse_text(text, model_server_config_pb2.ModelServerConfig())
    except MalformedError as error:
        where, _, reason = str(error).partition(": ")
        raise ConfigError(
            f"config {source}, {where}: {_PARSING}: {reason}" if reason else f"config {source}, {error}"
        ) from None
    if message.WhichOneof("config") is None:
        raise ConfigError(
            f"config {source}: has no model_config_list. To serve no model, write: model_config_list {{}}"
        )
    try:
        _check_labels_differ(message, text)
        return models_from_message(message)
    except FieldError as error:
        raise ConfigError(f"config {source}, field {error.field}: {error}") from None


def models_from_message(message: Any) -> tuple[ModelSettings, ...]:
    """Return the models of a ModelServerConfig.

    Raises:
        FieldError: a field is missing, wrong, or not supported.
    """
    if message.WhichOneof("config") == "custom_model_config":
        raise FieldError(
            "custom_model_config", "custom model configs are not supported. Write a model_config_list instead"
        )
    configs = message.model_config_list.config
    models = tuple(_model(config, f"model_config_list.config[{index}]") for index, config in enumerate(configs))
    _check_names(models)
    return models


def _model(config: Any, field: str) -> ModelSettings:
    if not config.name:
        raise FieldError(f"{field}.name", "a model has no name. Give it one")
    _check_platform(config, field)
    return ModelSettings(
        name=config.name,
        base_path=_base_path(config, field),
        policy=_policy(config.model_version_policy, f"{field}.model_version_policy"),
        labels=_labels(config, field),
        request_logging=_request_logging(config, f"{field}.logging_config"),
    )


def _check_platform(config: Any, field: str) -> None:
    if config.model_type != _UNSPECIFIED and config.model_platform:
        text = "Illegal setting both ModelServerConfig::model_type (deprecated) and ModelServerConfig::model_platform"
        raise FieldError(f"{field}.model_type", f"{text}, model name is {config.name}")
    if config.model_type not in (_UNSPECIFIED, _TENSORFLOW):
        text = f"ModelServerConfig::model_type choice {config.model_type} not supported."
        raise FieldError(f"{field}.model_type", text)
    if config.model_type == _UNSPECIFIED and not config.model_platform:
        text = (
            "Illegal setting neither ModelServerConfig::model_type (deprecated) nor ModelServerConfig::model_platform"
        )
        raise FieldError(f"{field}.model_platform", f'{text}, model name is {config.name}. Write "{_PLATFORM}"')
    if config.model_platform not in ("", _PLATFORM):
        text = f"Model {config.name} requests unsupported platform {config.model_platform}"
        raise FieldError(f"{field}.model_platform", text)


def _base_path(config: Any, field: str) -> FilePath:
    path = config.base_path
    if "://" in path:
        try:
            return as_path(path)
        except ConfigError as error:
            raise FieldError(f"{field}.base_path", f"Model {config.name}: {error}") from None
    if "\0" in path or not Path(path).is_absolute():
        text = f"Expected model {config.name} to have an absolute path or URI; got base_path()={path}"
        raise FieldError(f"{field}.base_path", text)
    return Path(path)


def _policy(policy: Any, field: str) -> VersionPolicy:
    choice = policy.WhichOneof("policy_choice")
    if choice == "all":
        return AllVersions()
    if choice == "specific":
        if not policy.specific.versions:
            raise FieldError(f"{field}.specific", "it names no version. Name at least one")
        return SpecificVersions(frozenset(policy.specific.versions))
    return LatestVersions(max(1, policy.latest.num_versions))


def _request_logging(config: Any, field: str) -> RequestLogging | None:
    if not config.HasField("logging_config"):
        return None
    asked = config.logging_config
    collector, sampling = asked.log_collector_config, asked.sampling_config
    known = {"log_collector_config": ("type", "filename_prefix"), "sampling_config": ("sampling_rate",)}
    for found, _ in asked.ListFields():
        if found.name not in known:
            raise FieldError(f"{field}.{found.name}", f"model {config.name}: it is not supported. Remove it")
        for inner, _ in getattr(asked, found.name).ListFields():
            if inner.name not in known[found.name]:
                text = f"model {config.name}: it is not supported. Remove it"
                raise FieldError(f"{field}.{found.name}.{inner.name}", text)
    if collector.type not in ("", _COLLECTOR):
        text = f'model {config.name}: log collector {collector.type!r} is not known. Write type: "{_COLLECTOR}"'
        raise FieldError(f"{field}.log_collector_config.type", text)
    prefix = collector.filename_prefix
    if "\0" in prefix or not Path(prefix).is_absolute() or prefix.endswith("/"):
        text = f"model {config.name}: filename_prefix is {prefix!r}. Give an absolute path, such as /var/log/requests/{config.name}"
        raise FieldError(f"{field}.log_collector_config.filename_prefix", text)
    if not 0 <= sampling.sampling_rate <= 1:
        text = f"model {config.name}: sampling_rate is {sampling.sampling_rate:g}. Give a number from 0 to 1"
        raise FieldError(f"{field}.sampling_config.sampling_rate", text)
    return RequestLogging(prefix, sampling.sampling_rate)


def _labels(config: Any, field: str) -> dict[str, int]:
    if "" in config.version_labels:
        raise FieldError(f"{field}.version_labels", f"model {config.name}: a label is empty. Give it a name")
    return dict(sorted(config.version_labels.items()))  # the order of a map differs between processes


def _check_names(models: tuple[ModelSettings, ...]) -> None:
    seen: set[str] = set()
    for index, model in enumerate(models):
        if model.name in seen:
            text = f"Illegal to list model {model.name} multiple times in config list"
            raise FieldError(f"model_config_list.config[{index}].name", text)
        seen.add(model.name)


def _check_labels_differ(message: Any, text: str) -> None:
    """Raise FieldError if a label is given twice: protobuf silently keeps the last of two entries with one key."""
    listed = parse_text(text, message_class("ModelServerConfig", _LABEL_LISTS)(), allow_unknown=True)
    for index, (config, given) in enumerate(
        zip(message.model_config_list.config, listed.model_config_list.config, strict=True)
    ):
        if len(given.version_labels) > len(config.version_labels):
            field = f"model_config_list.config[{index}].version_labels"
            raise FieldError(field, f"model {config.name}: a label is given twice")


_LABEL_LISTS: Final = {
    "ModelServerConfig": {"model_config_list": "ModelConfigList"},
    "ModelConfigList": {"config": "repeated ModelConfig"},
    "ModelConfig": {"version_labels": "repeated Label"},
    "Label": {"key": "string", "value": "int64"},
}
"""A ModelServerConfig with labels as a list."""
