"""The service inference.GRPCInferenceService of the Open Inference Protocol: converts its messages.

Importing this module imports no TensorFlow: these methods answer as soon as the port listens.
"""

import functools
import itertools
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from tpuembed_serving.core.pipeline import Check
from tpuembed_serving.core.servable import Array, LoadedVersion, cannot_hold
from tpuembed_serving.core.service import ModelService, ModelSpec
from tpuembed_serving.core.status import Code, StatusError, invalid_argument
from tpuembed_serving.grpc.open_inference_messages import message
from tpuembed_serving.open_inference.inference import (
    INPUT_PARAMETERS,
    OUTPUT_PARAMETERS,
    REQUEST_PARAMETERS,
    Inference,
    InferInput,
    InferRequest,
    RequestedOutput,
    check_datatype,
    check_parameters,
    model_spec,
)
from tpuembed_serving.open_inference.metadata import is_ready, model_metadata, server_metadata
from tpuembed_serving.open_inference.tensors import DTYPES, Content, check_shape, read_binary, write_binary, wrong_size

__all__ = ["GrpcInfer", "open_inference_calls"]

_BYTES_FACTOR: Final = 12
"""How many bytes a byte of a BYTES tensor may take: an empty element has 4, and is an object of 33 in an array."""
_ELEMENTS_AT_ONCE: Final = 16 * 2**10
_CONTENTS: Final = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""The field of each datatype in InferTensorContents. The others are sent raw."""


def _parse(name: str, data: bytes) -> Any:
    try:
        return message(name).FromString(data)
    except DecodeError:
        raise invalid_argument(f"the request is not an inference.{name}") from None


class GrpcInfer(Inference):
    """A ModelInferRequest; see `core.pipeline.Prediction`. The outputs are raw if the inputs are."""

    output_bytes = 24
    """An element of an output is in the message, and in its bytes."""
    model = ""

    def decoding_bytes(self, body: bytes) -> int:
        """Return about how many bytes it takes to parse and decode `body`."""
        return len(body) * (_BYTES_FACTOR if b"BYTES" in body else 4)

    def parse(self, body: bytes, _: Check) -> ModelSpec:
        """Parse the message."""
        found = _parse("ModelInferRequest", body)
        raw = list(found.raw_input_contents)
        parameters = _parameters(found, "the request", REQUEST_PARAMETERS)
        if raw and len(raw) != len(found.inputs):
            raise invalid_argument(
                f"the request has {len(found.inputs)} inputs and {len(raw)} raw_input_contents. Send one for each input"
            )
        inputs = [_input(tensor, content) for tensor, content in itertools.zip_longest(found.inputs, raw)]
        outputs = [_output(tensor) for tensor in found.outputs]
        spec = model_spec(found.model_name, found.model_version)
        name = parameters.get("signature_name", "")
        self.request = InferRequest(spec, found.id, name, inputs, outputs, binary_outputs=bool(raw))
        return spec

    def encode(self, loaded: LoadedVersion, outputs: Sequence[Mapping[str, Array]], check: Check) -> bytes:
        """Return a ModelInferResponse. All outputs are raw if one of them has no other form."""
        request, results = self.request, self.results(outputs[0])
        response = message("ModelInferResponse")(
            model_name=request.spec.name, model_version=str(loaded.version), id=request.request_id
        )
        is_raw = request.binary_outputs or any(one.datatype not in _CONTENTS for one in results)
        for output, datatype, array in results:
            check()
            tensor = response.outputs.add(name=output.name, datatype=datatype, shape=array.shape)
            if is_raw:
                response.raw_output_contents.append(bytes(write_binary(array, datatype, check)))
                continue
            flat, values = array.reshape(-1), getattr(tensor.contents, _CONTENTS[datatype])
            for start in range(0, len(flat), _ELEMENTS_AT_ONCE):
                check()
                values.extend(flat[start : start + _ELEMENTS_AT_ONCE].tolist())
        return bytes(response.SerializeToString())


def _input(tensor: Any, raw: bytes | None) -> InferInput:
    name, datatype = tensor.name, tensor.datatype
    check_datatype(name, datatype)
    shape = check_shape(name, tensor.shape)
    size = _parameters(tensor, f"input {name}", INPUT_PARAMETERS).get("binary_data_size")
    fields = [field.name for field, _ in tensor.contents.ListFields()]
    if raw is None:
        if datatype not in _CONTENTS:
            raise invalid_argument(f"input {name} is {datatype}, which contents cannot carry. Send raw_input_contents")
        if fields not in ([], [_CONTENTS[datatype]]):
            raise invalid_argument(
                f"input {name} is {datatype}, and its contents have {', '.join(fields)}. Send {_CONTENTS[datatype]}"
            )
        return InferInput(name, datatype, functools.partial(_read_contents, name, datatype, shape, tensor.contents))
    if fields:
        raise invalid_argument(f"input {name} has contents, and the request raw_input_contents. Send one of them")
    if size not in (None, len(raw)):
        raise wrong_size(name, datatype, shape, f"{len(raw)} bytes, and the binary_data_size {size}")
    return InferInput(name, datatype, functools.partial(read_binary, name, datatype, shape, Content(raw, 0, len(raw))))


def _output(tensor: Any) -> RequestedOutput:
    return RequestedOutput(
        tensor.name, _parameters(tensor, f"output {tensor.name}", OUTPUT_PARAMETERS).get("binary_data")
    )


def _parameters(owner: Any, words: str, known: Mapping[str, type]) -> dict[str, Any]:
    found = {
        name: getattr(value, value.WhichOneof("parameter_choice") or "bool_param")
        for name, value in owner.parameters.items()
    }
    check_parameters(words, found, known)
    return found


def _read_contents(name: str, datatype: str, shape: tuple[int, ...], contents: Any, check: Check) -> Array:
    """Return the tensor of values in the field of its datatype."""
    values, dtype = getattr(contents, _CONTENTS[datatype]), DTYPES[datatype]
    count = math.prod(shape)
    if len(values) != count:
        raise wrong_size(name, datatype, shape, f"{len(values)} values in {_CONTENTS[datatype]}")
    array, left = np.empty(count, dtype), iter(values)
    limits = np.iinfo(dtype) if dtype.kind in "iu" else None
    for start in range(0, count, _ELEMENTS_AT_ONCE):
        check()
        block = list(itertools.islice(left, _ELEMENTS_AT_ONCE))
        if limits is not None and not limits.min <= min(block) <= max(block) <= limits.max:
            value = next(value for value in block if not limits.min <= value <= limits.max)
            raise cannot_hold(name, datatype, value, dtype)
        array[start : start + len(block)] = block
    return array.reshape(shape)


def open_inference_calls(
    service: ModelService, is_server_ready: Callable[[], bool]
) -> Mapping[str, Callable[[bytes], Awaitable[bytes]]]:
    """Return the methods of the service by name, except ModelInfer, which is a prediction. They answer in every state."""

    def respond(name: str, /, **fields: Any) -> bytes:
        return bytes(message(f"{name}Response")(**fields).SerializeToString())

    async def server_live(_: bytes) -> bytes:
        return respond("ServerLive", live=True)

    async def server_ready(_: bytes) -> bytes:
        return respond("ServerReady", ready=is_server_ready())

    async def model_ready(data: bytes) -> bytes:
        request = _parse("ModelReadyRequest", data)
        try:
            ready = await is_ready(service, model_spec(request.name, request.version))
        except StatusError as error:
            if error.code is not Code.NOT_FOUND or request.name not in service.models():
                raise
            ready = False  # of a known model, clients wait for versions to come
        return respond("ModelReady", ready=ready)

    async def describe_server(_: bytes) -> bytes:
        return respond("ServerMetadata", **server_metadata())

    async def describe_model(data: bytes) -> bytes:
        request = _parse("ModelMetadataRequest", data)
        return respond("ModelMetadata", **await model_metadata(service, model_spec(request.name, request.version)))

    return {
        "ServerLive": server_live,
        "ServerReady": server_ready,
        "ModelReady": model_ready,
        "ServerMetadata": describe_server,
        "ModelMetadata": describe_model,
    }
