"""Reads TensorFlow Serving's --monitoring_config_file: a MonitoringConfig in protobuf's text format.

Source: tensorflow_serving/config/monitoring_config.proto.
"""

import functools
from pathlib import Path
from typing import Any

from tpuembed.errors import ConfigError
from tpuembed_serving.telemetry.metrics import DEFAULT_PATH

__all__ = ["read_metrics_path"]


def read_metrics_path(path: Path) -> str | None:
    """Return the URL path of the metrics that the file at `path` configures, or None if it does not enable them.

    Raises:
        ConfigError: the file cannot be read, or is not a MonitoringConfig. The message names the file.
    """
    from google.protobuf import text_format  # type: ignore[import-untyped]

    try:
        message = text_format.Parse(path.read_text(encoding="utf-8"), _message_class()())
    except OSError as error:
        raise ConfigError(f"monitoring config {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"monitoring config {path}: is not UTF-8 text. Save it as UTF-8") from None
    except text_format.ParseError as error:
        raise ConfigError(f"monitoring config {path}: {error}") from None
    config = message.prometheus_config
    return (config.path or DEFAULT_PATH) if config.enable else None


@functools.cache
def _message_class() -> Any:
    """Return the class of the message. tensorflow-serving-api does not include it, so it is described here."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="tpuembed/monitoring_config.proto", package="tensorflow.serving", syntax="proto3"
    )
    prometheus = file.message_type.add(name="PrometheusConfig")
    prometheus.field.add(name="enable", number=1, label=kinds.LABEL_OPTIONAL, type=kinds.TYPE_BOOL)
    prometheus.field.add(name="path", number=2, label=kinds.LABEL_OPTIONAL, type=kinds.TYPE_STRING)
    outer = file.message_type.add(name="MonitoringConfig")
    field = outer.field.add(name="prometheus_config", number=1, label=kinds.LABEL_OPTIONAL, type=kinds.TYPE_MESSAGE)
    field.type_name = ".tensorflow.serving.PrometheusConfig"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.serving.MonitoringConfig"))
