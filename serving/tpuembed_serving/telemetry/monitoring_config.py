"""Reads TensorFlow Serving's --monitoring_config_file: a MonitoringConfig in protobuf's text format.

Source: tensorflow_serving/config/monitoring_config.proto.
"""

from pathlib import Path
from typing import Final

from tpuembed.errors import ConfigError, reason
from tpuembed.protobuf import MalformedError
from tpuembed.protobuf_text import message_class, parse_text
from tpuembed_serving.telemetry.metrics import DEFAULT_PATH

__all__ = ["read_metrics_path"]

_MESSAGES: Final = {
    "MonitoringConfig": {"prometheus_config": "PrometheusConfig"},
    "PrometheusConfig": {"enable": "bool", "path": "string"},
}
"""The messages, which tensorflow-serving-api does not include."""


def read_metrics_path(path: Path) -> str | None:
    """Return the URL path of the metrics that the file at `path` configures, or None if it does not enable them.

    Raises:
        ConfigError: the file cannot be read, or is not a MonitoringConfig. The message names the file.
    """
    try:
        message = parse_text(path.read_text(encoding="utf-8"), message_class("MonitoringConfig", _MESSAGES)())
    except OSError as error:
        raise ConfigError(f"monitoring config {path}: cannot be read: {reason(error)}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"monitoring config {path}: is not UTF-8 text. Save it as UTF-8") from None
    except MalformedError as error:
        raise ConfigError(f"monitoring config {path}: {error}") from None
    config = message.prometheus_config
    return (config.path or DEFAULT_PATH) if config.enable else None
