"""A client of TensorFlow Serving's gRPC API. Importing this module imports TensorFlow, which has the messages."""

import asyncio
import functools
from collections.abc import Sequence
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tensorflow_serving.apis import get_model_metadata_pb2, get_model_status_pb2, predict_pb2

from tpuembed_serving.core.pipeline import INLINE_BYTES, INLINE_ELEMENTS
from tpuembed_serving.core.servable import Array, Signature, State, VersionStatus
from tpuembed_serving.core.status import Code, StatusError, stopping
from tpuembed_serving.grpc.tensor_proto import decode_tensor, encode_input
from tpuembed_serving.tensorflow.signatures import signature_json, signature_of

__all__ = ["Definitions", "RemotePredictions", "RemoteStates"]

Definitions = tuple[dict[str, Signature], dict[str, Any]]
"""The signatures by name, and their JSON form."""

_OPTIONS: Final = [("grpc.max_receive_message_length", 2**31 - 1), ("grpc.max_send_message_length", 2**31 - 1)]
_PREDICTION: Final = "/tensorflow.serving.PredictionService/"
_MODEL: Final = "/tensorflow.serving.ModelService/"


_closing: Final[set["asyncio.Future[None]"]] = set()
"""Channels that close. The event loop does not keep their tasks."""


class RemoteStates:
    """Queries the versions of models and their signatures. Its methods block."""

    def __init__(self, target: str, timeout_seconds: float) -> None:
        """Open a channel to `target`, HOST:PORT."""
        self._target, self._timeout = target, timeout_seconds
        self._channel = grpc.insecure_channel(target, _OPTIONS)

    def versions(self, model: str) -> list[VersionStatus]:
        """Return every version of `model`, newest first.

        Raises:
            StatusError: the server's status, or UNAVAILABLE if it cannot be reached.
        """
        request = get_model_status_pb2.GetModelStatusRequest()
        request.model_spec.name = model
        found = self._call(f"{_MODEL}GetModelStatus", request, get_model_status_pb2.GetModelStatusResponse)
        return sorted(map(_version_status, found.model_version_status), key=lambda status: -status.version)

    def definitions(self, model: str, version: int | None, label: str = "") -> tuple[int, Definitions]:
        """Return the number and the signatures of a version, selected by its number or by a label.

        Raises:
            StatusError: the server's status, or UNAVAILABLE if it cannot be reached.
        """
        request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
        request.model_spec.name = model
        if version is not None:
            request.model_spec.version.value = version
        else:
            request.model_spec.version_label = label
        found = self._call(f"{_PREDICTION}GetModelMetadata", request, get_model_metadata_pb2.GetModelMetadataResponse)
        signatures = get_model_metadata_pb2.SignatureDefMap()
        found.metadata["signature_def"].Unpack(signatures)
        named = sorted(signatures.signature_def.items())
        by_name = {name: signature_of(name, definition) for name, definition in named}
        in_json = {name: signature_json(definition) for name, definition in named}
        return found.model_spec.version.value, (by_name, in_json)

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def _call(self, method: str, request: Any, response: Any) -> Any:
        call = self._channel.unary_unary(method, request.SerializeToString, response.FromString)
        try:
            return call(request, timeout=self._timeout)
        except (grpc.RpcError, ValueError) as error:
            if isinstance(error, ValueError) or error.code() is grpc.StatusCode.CANCELLED:  # the channel is closed
                raise stopping() from None
            raise _status_error(error, self._target) from None


def _version_status(found: Any) -> VersionStatus:
    code = found.status.error_code
    error = StatusError(Code(code), found.status.error_message) if code else None
    return VersionStatus(found.version, State(found.state) if found.state else State.START, error)


class RemotePredictions:
    """Runs signatures in the other server. One event loop calls its methods."""

    def __init__(self, target: str) -> None:
        """Open a channel to `target`, HOST:PORT."""
        self._target = target
        self._channel = grpc.aio.insecure_channel(target, _OPTIONS)
        self._predict = self._channel.unary_unary(f"{_PREDICTION}Predict")

    async def run(
        self, model: str, version: int, signature: Signature, inputs: Sequence[Array], timeout_seconds: float
    ) -> list[Array]:
        """Return the signature's outputs for `inputs`, both in the signature's order.

        Raises:
            StatusError: the server's status, or UNAVAILABLE if it cannot be reached.
        """
        make = functools.partial(_predict_request, model, version, signature, inputs)
        request = await asyncio.to_thread(make) if _is_large(inputs) else make()  # the event loop does only short work
        try:
            answer = await self._predict(request, timeout=timeout_seconds)
        except grpc.RpcError as error:
            raise _status_error(error, self._target) from None
        read = functools.partial(_outputs, answer, signature, self._target)
        return await asyncio.to_thread(read) if len(answer) > INLINE_BYTES else read()

    def close(self) -> None:
        """Start to close the channel. Requests in progress are cancelled."""
        closing = asyncio.ensure_future(self._channel.close())
        _closing.add(closing)
        closing.add_done_callback(_closing.discard)


def _is_large(inputs: Sequence[Array]) -> bool:
    """Returns True if it takes long to encode `inputs`."""
    if sum([array.size for array in inputs]) > INLINE_ELEMENTS:
        return True
    return sum([sum(map(len, array.flat)) for array in inputs if array.dtype.kind == "O"]) > INLINE_BYTES


def _predict_request(model: str, version: int, signature: Signature, inputs: Sequence[Array]) -> bytes:
    request = predict_pb2.PredictRequest()
    request.model_spec.name, request.model_spec.version.value = model, version
    request.model_spec.signature_name = signature.name
    for info, array in zip(signature.inputs, inputs, strict=True):
        # Serialized examples are strings, whatever the signature takes. The other server refuses them if they do not fit.
        encode_input(array, "string" if array.dtype.kind == "O" else info.dtype, request.inputs[info.alias])
    return bytes(request.SerializeToString())


def _outputs(answer: bytes, signature: Signature, target: str) -> list[Array]:
    try:
        found = dict(predict_pb2.PredictResponse.FromString(answer).outputs.items())
    except DecodeError:
        raise StatusError(Code.INTERNAL, f"{target} sent an answer that is not a PredictResponse") from None
    missing = [info.alias for info in signature.outputs if info.alias not in found]
    if missing:
        raise StatusError(Code.INTERNAL, f"{target} sent an answer without the outputs {', '.join(missing)}")
    return [decode_tensor(found[info.alias], info.alias) for info in signature.outputs]


def _status_error(error: Any, target: str) -> StatusError:
    code = Code(error.code().value[0])
    has_answered = error.initial_metadata() or error.trailing_metadata()
    if code is Code.UNAVAILABLE and not has_answered:
        # An answer without metadata may be of the server behind this one.
        return StatusError(code, f"TensorFlow Serving at {target} is unavailable: {error.details().rstrip('.')}")
    return StatusError(code, error.details())
