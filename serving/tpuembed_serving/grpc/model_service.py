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
from tpuembed_serving.grpc.prediction_service import model_spec, parse
from tpuembed_serving.models.config import models_from_message
from tpuembed_serving.settings import ModelSettings
from tpuembed_serving.telemetry.metrics import Snapshot

__all__ = ["Reloadable", "model_calls"]

logger = logging.getLogger(__name__)


class Reloadable(Protocol):
    """A repository whose models can be replaced."""

    def reload_by_client(self, models: Sequence[ModelSettings]) -> None:
        """Serve `models` and no others. Returns once they are available.

        Raises:
            StatusError: a client may not choose them, or a model did not become available.
        """


def model_calls(
    service: ModelService, models: Reloadable, metrics: Callable[[], Snapshot] = dict
) -> Mapping[str, Callable[[bytes], Awaitable[bytes]]]:
    """Return the methods of ModelService by name. `metrics` returns the metrics of this process."""

    async def get_model_status(data: bytes) -> bytes:
        request = parse(get_model_status_pb2.GetModelStatusRequest, data)
        response = get_model_status_pb2.GetModelStatusResponse()
        for status in service.status(model_spec(request)):
            one = response.model_version_status.add(version=status.version, state=int(status.state))
            one.status.error_code = Code.OK if status.error is None else status.error.code
            text = "" if status.error is None else status.error.message
            one.status.error_message = text.encode("utf-8", "replace").decode("utf-8")
        return bytes(response.SerializeToString())

    async def handle_reload_config_request(data: bytes) -> bytes:
        request = parse(model_management_pb2.ReloadConfigRequest, data)
        chosen = _models(request.config)
        before = _counts(request.metric_names, metrics)
        await asyncio.to_thread(models.reload_by_client, chosen)
        logger.info("reloaded: %s", ", ".join(model.name for model in chosen))
        response = model_management_pb2.ReloadConfigResponse()
        response.status.error_code = Code.OK
        for name, count in _counts(request.metric_names, metrics).items():
            response.metric.add(name=name, int64_value_increase=count - before[name])
        return bytes(response.SerializeToString())

    return {"GetModelStatus": get_model_status, "HandleReloadConfigRequest": handle_reload_config_request}


def _counts(names: Sequence[str], metrics: Callable[[], Snapshot]) -> dict[str, int]:
    """Return the sum of each counter over all its labels, or 0 for an unknown name."""
    if not names:
        return {}
    counters = {family.name: values for family, values in metrics().items() if family.kind == "counter"}
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
