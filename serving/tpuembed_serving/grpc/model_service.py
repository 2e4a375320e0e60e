"""TensorFlow Serving's ModelService, from bytes to bytes. Importing this module imports TensorFlow."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from tensorflow_serving.apis import (
    get_model_status_pb2,
    model_management_pb2,
)

from tpuembed.errors import ConfigError
from tpuembed_serving.core.service import ModelService
from tpuembed_serving.core.status import Code, StatusError, invalid_argument
from tpuembed_serving.grpc.prediction_service import model_spec, parse, register_service
from tpuembed_serving.models.config import models_from_message
from tpuembed_serving.settings import ModelSettings
from tpuembed_serving.telemetry.metrics import Snapshot

__all__ = ["ModelApi", "Reloadable"]

register_service("model_service")

logger = logging.getLogger(__name__)


class Reloadable(Protocol):
    """A repository whose models can be replaced."""

    def reload_by_client(self, models: Sequence[ModelSettings]) -> None:
        """Serve `models` and no others. Returns once they are available.

        Raises:
            StatusError: a client may not choose them, or a model did not become available.
        """


class ModelApi:
    """The methods of ModelService."""

    def __init__(self, service: ModelService, models: Reloadable, metrics: Callable[[], Snapshot] = dict) -> None:
        """Answer from `service`, and reload `models`. `metrics` returns the metrics of this process."""
        self._service = service
        self._models = models
        self._metrics = metrics

    @property
    def methods(self) -> Mapping[str, Callable[[bytes], Awaitable[bytes]]]:
        """Return the methods by name."""
        return {
            "GetModelStatus": self.get_model_status,
            "HandleReloadConfigRequest": self.handle_reload_config_request,
        }

    async def get_model_status(self, data: bytes) -> bytes:
        """Answer a GetModelStatusRequest."""
        request = parse(get_model_status_pb2.GetModelStatusRequest, data)
        response = get_model_status_pb2.GetModelStatusResponse()
        for status in self._service.status(model_spec(request)):
            one = response.model_version_status.add(version=status.version, state=int(status.state))
            one.status.error_code = Code.OK if status.error is None else status.error.code
            one.status.error_message = "" if status.error is None else _utf8(status.error.message)
        return bytes(response.SerializeToString())

    async def handle_reload_config_request(self, data: bytes) -> bytes:
        """Answer a ReloadConfigRequest. An error is the status of the call."""
        request = parse(model_management_pb2.ReloadConfigRequest, data)
        models = _models(request.config)
        before = self._counts(request.metric_names)
        await asyncio.to_thread(self._models.reload_by_client, models)
        logger.info("reloaded: %s", ", ".join(model.name for model in models))
        response = model_management_pb2.ReloadConfigResponse()
        response.status.error_code = Code.OK
        for name, count in self._counts(request.metric_names).items():
            response.metric.add(name=name, int64_value_increase=count - before[name])
        return bytes(response.SerializeToString())

    def _counts(self, names: Sequence[str]) -> dict[str, int]:
        """Return the sum of each counter over all its labels, or 0 for an unknown name."""
        if not names:
            return {}
        counters = {family.name: values for family, values in self._metrics().items() if family.kind == "counter"}
        found = {name: counters.get(name.replace("/", ":"), {}) for name in names}
        return {name: int(sum(values.values())) for name, values in found.items()}


def _models(config: Any) -> Sequence[ModelSettings]:
    if config.WhichOneof("config") != "model_config_list":
        text = "ServerModelConfig type not supported by HandleReloadConfigRequest."
        raise invalid_argument(f"{text} Only ModelConfigList is currently supported")
    for model in config.model_config_list.config:
        if "://" in model.base_path and ".." in model.base_path.split("/"):
            raise invalid_argument(
                f"model {model.name}: base_path {model.base_path} has '..'. Write the URL without it"
            )
    try:
        return models_from_message(config)
    except ConfigError as error:
        raise StatusError(Code.INVALID_ARGUMENT, str(error)) from None


def _utf8(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")
