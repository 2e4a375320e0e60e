"""Predict with arrays as bytes (see `binary_frames`), at URLs of our own: TensorFlow Serving's have /v1/ first."""

import re
from collections.abc import Sequence
from typing import Final

from tpuembed_serving.core.off_loop import run_sized
from tpuembed_serving.core.servable import Array, Signature
from tpuembed_serving.core.service import PredictionService
from tpuembed_serving.core.status import Code, StatusError, invalid_argument
from tpuembed_serving.http.binary_frames import CONTENT_TYPE, Frame, FrameError, decode_frame, encode_frame, wire_dtype
from tpuembed_serving.http.endpoint import HttpEndpoint, Receive, Reply, Scope, raw_path, raw_target
from tpuembed_serving.http.rest import find_signature, model_spec
from tpuembed_serving.telemetry.observers import Telemetry
from tpuembed_serving.telemetry.request_record import name_request

__all__ = ["BinaryApi", "is_binary_request"]

_URL: Final = re.compile(rb"/binary/v1/models/([^/:?]+)(?:(?:/versions/([0-9]+))|(?:/labels/([^/:?]+)))?:predict")
_MAX_INLINE_BYTES: Final = 4 * 2**20
"""A larger body is decoded off the event loop, as are larger outputs encoded: both copy memory at most."""
_CONTENT_TYPE: Final = CONTENT_TYPE.encode("ascii")


def is_binary_request(scope: Scope) -> bool:
    """Whether a connection scope is an HTTP request that this module answers."""
    return scope["type"] == "http" and raw_path(scope).startswith(b"/binary/")


class BinaryApi(HttpEndpoint):
    """Decodes a frame, calls the service, encodes a frame. Errors are what the REST API's are."""

    def __init__(
        self, service: PredictionService, max_body_bytes: int | None, telemetry: Telemetry | None = None
    ) -> None:
        super().__init__(max_body_bytes, telemetry)
        self._service = service

    async def answer(self, scope: Scope, receive: Receive) -> Reply:
        """See HttpEndpoint."""
        target = raw_target(scope)
        match = _URL.fullmatch(target)
        if scope["method"] != "POST" or match is None:
            text = f"{scope['method']} {target.decode('utf-8', 'replace')}"
            raise StatusError(Code.NOT_FOUND, f"No such binary request: {text}; POST to /binary/v1/models/NAME:predict")
        spec = model_spec(match)
        name_request(spec.name, "predict")
        body = await self.read(scope, receive)
        frame = await run_sized(len(body), _decode, body, most=_MAX_INLINE_BYTES)
        name = frame.members.get("signature_name", "")
        if not isinstance(name, str):
            raise invalid_argument("the header's signature_name is no string")
        with self._service.lease(spec) as loaded:
            signature = find_signature(loaded.servable, name)
            _check_outputs(signature)
            inputs = _inputs(frame, signature)
            outputs = await self._service.predict(loaded.servable, signature, inputs)
        members = {"model": spec.name, "version": loaded.version, "signature_name": signature.name}
        size = sum(array.nbytes for array in outputs.values())
        return Reply(
            200,
            await run_sized(size, encode_frame, outputs, members, most=_MAX_INLINE_BYTES),
            content_type=_CONTENT_TYPE,
        )


def _decode(body: bytes) -> Frame:
    try:
        return decode_frame(body)
    except FrameError as error:
        raise invalid_argument(str(error)) from None


def _check_outputs(signature: Signature) -> None:
    """Before anything is run for nothing."""
    for info in signature.outputs:
        if not wire_dtype(info.numpy_dtype):
            text = f"output {info.alias} is {info.dtype}, which has no binary form; use JSON or gRPC for it"
            raise StatusError(Code.UNIMPLEMENTED, text)


def _inputs(frame: Frame, signature: Signature) -> Sequence[Array]:
    """The signature's inputs, in its order."""
    sent, wanted = set(frame.tensors), {info.alias for info in signature.inputs}
    if sent != wanted:
        text = f"Sent extra: {{{_names(sent - wanted)}}}. Missing but required: {{{_names(wanted - sent)}}}."
        raise invalid_argument(f"input size does not match signature: {len(sent)}!={len(wanted)} {text}")
    for info in signature.inputs:
        found = frame.tensors[info.alias].dtype
        if found != info.numpy_dtype:
            expected = wire_dtype(info.numpy_dtype) or f"{info.dtype}, which has no binary form"
            raise invalid_argument(f"Type mismatch: input {info.alias} is {found.name} vs. expected {expected}")
    return [frame.tensors[info.alias] for info in signature.inputs]


def _names(names: set[str]) -> str:
    return ",".join(sorted(names))
