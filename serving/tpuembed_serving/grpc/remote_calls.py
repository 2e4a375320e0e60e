"""A client of TensorFlow Serving's gRPC API. Importing this module imports TensorFlow, which has the messages."""

import asyncio
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import grpc
from google.protobuf import wrappers_pb2  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tensorflow_serving.apis import get_model_metadata_pb2, get_model_status_pb2, predict_pb2

from tpuembed_serving.core.pipeline import INLINE_BYTES, INLINE_ELEMENTS
from tpuembed_serving.core.servable import Array, Signature, State, VersionStatus
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.grpc.prediction_service import SHARD_ID_FIELD, shard_field
from tpuembed_serving.grpc.tensor_proto import decode_tensor, encode_input
from tpuembed_serving.tensorflow.signatures import signature_json, signature_of

__all__ = ["Access", "Definitions", "RemotePredictions", "RemoteStates"]

Definitions = tuple[dict[str, Signature], dict[str, Any]]
"""The signatures by name, and their JSON form."""

_OPTIONS: Final = [("grpc.max_receive_message_length", 2**31 - 1), ("grpc.max_send_message_length", 2**31 - 1)]
_PREPARED_SECONDS: Final = 0.01
_PREDICTION: Final = "/tensorflow.serving.PredictionService/"
_MODEL: Final = "/tensorflow.serving.ModelService/"


class Access(NamedTuple):
    """How the other server is called.

    Attributes:
        options: of gRPC's channel.
        credentials: grpc.ChannelCredentials; None is plain text.
        metadata: of each call, such as an API key.
        server: what messages call it.
        remedy: ends the message of a query that no server answers.
    """

    options: Sequence[tuple[str, Any]] = ()
    credentials: Any = None
    metadata: Sequence[tuple[str, str]] = ()
    server: str = "TensorFlow Serving"
    remedy: str = ""


_PLAIN: Final = Access()
_closing: Final[set["asyncio.Future[None]"]] = set()
"""Channels that close. The event loop does not keep their tasks."""
_POLL: Final = ("x-request-id", "poll")
"""Our server returns this with each answer, errors included. So an answer can be told from an error of the connection."""


class RemoteStates:
    """Queries the versions of models and their signatures. Its methods block."""

    def __init__(self, target: str, timeout_seconds: float, access: Access = _PLAIN) -> None:
        """Open a channel to `target`, HOST:PORT."""
        self._target, self._timeout, self._access = target, timeout_seconds, access
        self._channel = _channel(grpc, target, access)

    def versions(self, model: str) -> list[VersionStatus]:
        """Return every version of `model`, newest first.

        Raises:
            StatusError: the server's status, or UNAVAILABLE if it cannot be reached.
        """
        request = get_model_status_pb2.GetModelStatusRequest()
        request.model_spec.name = model
        found, _ = self._call(f"{_MODEL}GetModelStatus", request, get_model_status_pb2.GetModelStatusResponse)
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
        found, is_tpuembed = self._call(
            f"{_PREDICTION}GetModelMetadata", request, get_model_metadata_pb2.GetModelMetadataResponse
        )
        signatures = get_model_metadata_pb2.SignatureDefMap()
        found.metadata["signature_def"].Unpack(signatures)
        named = sorted(signatures.signature_def.items())
        shard_id = wrappers_pb2.StringValue()
        if SHARD_ID_FIELD in found.metadata:
            found.metadata[SHARD_ID_FIELD].Unpack(shard_id)
        is_known = bool(shard_id.value) or (is_tpuembed and SHARD_ID_FIELD not in found.metadata)
        by_name = {
            name: dataclasses.replace(signature_of(name, definition), shard_id=shard_id.value, is_export_known=is_known)
            for name, definition in named
        }
        in_json = {name: signature_json(definition) for name, definition in named}
        return found.model_spec.version.value, (by_name, in_json)

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def _call(self, method: str, request: Any, response: Any) -> tuple[Any, bool]:
        """Return the answer, and whether the server is one of tpuembed."""
        call = self._channel.unary_unary(method, request.SerializeToString, response.FromString)
        try:
            found, done = call.with_call(request, timeout=self._timeout, metadata=(*self._access.metadata, _POLL))
            return found, any(tuple(pair) == _POLL for pair in done.trailing_metadata() or ())
        except (grpc.RpcError, ValueError) as error:
            if isinstance(error, ValueError) or error.code() is grpc.StatusCode.CANCELLED:  # the channel is closed
                text = f"the connection to {self._target} was replaced. Send the request again"
                raise StatusError(Code.UNAVAILABLE, text) from None
            raise _status_error(error, self._target, self._access.server, self._access.remedy) from None


def _channel(module: Any, target: str, access: Access) -> Any:
    """Open a channel of grpc, or of grpc.aio."""
    options = [*_OPTIONS, *access.options]
    if access.credentials is None:
        return module.insecure_channel(target, options)
    return module.secure_channel(target, access.credentials, options)


def _version_status(found: Any) -> VersionStatus:
    code = found.status.error_code
    error = StatusError(Code(code), found.status.error_message) if code else None
    return VersionStatus(found.version, State(found.state) if found.state else State.START, error)


class RemotePredictions:
    """Runs signatures in the other server. One event loop calls its methods."""

    def __init__(self, target: str, access: Access = _PLAIN) -> None:
        """Open a channel to `target`, HOST:PORT."""
        self._target, self._access, self._preparing = target, access, 0
        self._channel = _channel(grpc.aio, target, access)
        self._predict = self._channel.unary_unary(f"{_PREDICTION}Predict")

    async def run(
        self, model: str, version: int, signature: Signature, inputs: Sequence[Array], timeout_seconds: float
    ) -> list[Array]:
        """Return the signature's outputs for `inputs`, both in the signature's order.

        A server that has another shard than the signature's answers ABORTED. Older servers, and TensorFlow Serving, do not see it.

        Raises:
            StatusError: the server's status, or UNAVAILABLE if it cannot be reached.
        """
        self._preparing += 1
        try:
            if _is_large(inputs):  # the event loop does only short work
                request = await asyncio.to_thread(_predict_request, model, version, signature, inputs)
            else:
                request = _predict_request(model, version, signature, inputs)
            call = self._predict(request, timeout=timeout_seconds, metadata=self._access.metadata)
        finally:
            self._preparing -= 1
        try:
            answer = await call
        except grpc.RpcError as error:
            raise _status_error(error, self._target, self._access.server) from None
        if len(answer) > INLINE_BYTES:
            return await asyncio.to_thread(_outputs, answer, signature, self._target)
        return _outputs(answer, signature, self._target)

    def close(self, seconds: float | None = None) -> None:
        """Start to close the channel. Requests in progress may take `seconds`; None cancels them."""
        closing = asyncio.ensure_future(self._close(seconds))
        _closing.add(closing)
        closing.add_done_callback(_closing.discard)

    async def _close(self, seconds: float | None) -> None:
        while self._preparing and seconds is not None:  # these have no call yet that the channel would wait for
            await asyncio.sleep(_PREPARED_SECONDS)
        await self._channel.close(seconds)


def _is_large(inputs: Sequence[Array]) -> bool:
    """Returns True if it takes long to encode `inputs`."""
    if sum([array.size for array in inputs]) > INLINE_ELEMENTS:
        return True
    return sum([sum(map(len, array.flat)) for array in inputs if array.dtype.kind == "O"]) > INLINE_BYTES


def _predict_request(model: str, version: int, signature: Signature, inputs: Sequence[Array]) -> bytes:
    # Serialized examples are strings, whatever the signature takes. The other server refuses them if they do not fit.
    named = [
        encode_input(info.alias, array, "string" if array.dtype.kind == "O" else info.dtype)
        for info, array in zip(signature.inputs, inputs, strict=True)
    ]
    return _request_head(model, version, signature.name, signature.shard_id) + b"".join(named)


@functools.lru_cache(maxsize=256)
def _request_head(model: str, version: int, signature: str, shard_id: str) -> bytes:
    """Return a serialized PredictRequest without inputs."""
    request = predict_pb2.PredictRequest()
    request.model_spec.name, request.model_spec.version.value = model, version
    request.model_spec.signature_name = signature
    return bytes(request.SerializeToString()) + shard_field(shard_id)


def _outputs(answer: bytes, signature: Signature, target: str) -> list[Array]:
    try:
        found = dict(predict_pb2.PredictResponse.FromString(answer).outputs.items())
    except DecodeError:
        raise StatusError(Code.INTERNAL, f"{target} sent an answer that is not a PredictResponse") from None
    missing = [info.alias for info in signature.outputs if info.alias not in found]
    if missing:
        raise StatusError(Code.INTERNAL, f"{target} sent an answer without the outputs {', '.join(missing)}")
    return [decode_tensor(found[info.alias], info.alias) for info in signature.outputs]


def _status_error(error: Any, target: str, server: str, remedy: str = "") -> StatusError:
    code = Code(error.code().value[0])
    has_answered = error.initial_metadata() or error.trailing_metadata()
    if code is Code.UNAVAILABLE and not has_answered:
        ending = f". {remedy}" if remedy and "DNS" not in error.details() else ""
        # An answer without metadata may be of the server behind this one.
        return StatusError(code, f"{server} at {target} is unavailable: {error.details().rstrip('.')}{ending}")
    return StatusError(code, error.details())
