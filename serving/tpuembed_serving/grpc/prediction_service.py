"""TensorFlow Serving's PredictionService: converts messages to runs of signatures, and their outputs to messages.

Importing this module imports TensorFlow, whose package has the classes of the messages. So `server` imports it in a thread.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from google.protobuf import json_format  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tensorflow.core.framework import tensor_pb2, types_pb2
from tensorflow_serving.apis import (
    classification_pb2,
    get_model_metadata_pb2,
    inference_pb2,
    predict_pb2,
    regression_pb2,
)

from tpuembed_serving.core.classify_regress import (
    LOG_TYPES,
    Classification,
    InferenceResult,
    Method,
    check_context,
    check_signature,
    example_task,
    find_signature,
    interpret,
    to_tensor,
)
from tpuembed_serving.core.pipeline import Check, Prediction, Task
from tpuembed_serving.core.servable import Array, Columns, LoadedVersion, Servable, Signature, TensorInfo
from tpuembed_serving.core.service import DEFAULT_SIGNATURE, ModelService, ModelSpec
from tpuembed_serving.core.status import Code, StatusError, invalid_argument
from tpuembed_serving.grpc.tensor_proto import decode_tensor, dtype_name, encode_tensor

__all__ = [
    "PREDICTIONS",
    "GrpcMultiInference",
    "GrpcPredict",
    "fill_result",
    "int64_columns",
    "model_metadata",
    "model_spec",
    "parse",
]

_SIGNATURE_DEF = "signature_def"


def parse(message: Any, data: bytes) -> Any:
    """Parse `data` as a message of that class.

    Raises:
        StatusError: INVALID_ARGUMENT, it is not such a message.
    """
    try:
        return message.FromString(data)
    except DecodeError:
        raise invalid_argument(f"the request is not a {message.DESCRIPTOR.full_name}") from None


def model_spec(request: Any) -> ModelSpec:
    """Return the model that a request names.

    Raises:
        StatusError: it names none.
    """
    if not request.HasField("model_spec"):
        raise invalid_argument("Missing ModelSpec")
    return _spec(request.model_spec)


def _spec(spec: Any) -> ModelSpec:
    choice = spec.WhichOneof("version_choice")
    return ModelSpec(
        name=spec.name,
        version=spec.version.value if choice == "version" else None,
        label=spec.version_label if choice == "version_label" else None,
    )


_ELEMENTS_PER_SLOW_BYTE: Final = 16
"""How many elements of a tensor are filled in the time in which a slow parser reads a byte."""


class _GrpcPrediction:
    """The size of messages; see `core.pipeline.Prediction`."""

    model = ""
    log_type = "predict_log"
    is_log_message = True
    output_bytes = 24
    """An element of an output is in the message, and in its bytes."""

    def decoding_bytes(self, body: bytes) -> int:
        """Return about how many bytes it takes to parse and decode `body`: its fields, and the arrays made of them.

        A packed integer of one byte becomes eight bytes of the message and eight of the array.
        """
        return 4 * len(body)


class GrpcPredict(_GrpcPrediction):
    """A PredictRequest; see `core.pipeline.Prediction`."""

    def parse(self, body: bytes, _: Check) -> ModelSpec:
        """Parse the message."""
        self._request = parse(predict_pb2.PredictRequest, body)
        return model_spec(self._request)

    def decode(self, loaded: LoadedVersion, check: Check) -> list[Task]:
        """Convert the inputs to arrays. A tensor can have many more elements than the message has values."""
        self._signature = _find_signature(loaded.servable, self._request.model_spec.signature_name)
        inputs: Sequence[Array] | None = int64_columns(self._request, self._signature)
        if inputs is None:
            shapes = [tensor.tensor_shape.dim for tensor in self._request.inputs.values()]
            check(sum([math.prod([dim.size for dim in shape]) for shape in shapes]) // _ELEMENTS_PER_SLOW_BYTE)
            inputs = _decode_inputs(self._request, loaded.servable, self._signature)
        self._aliases = _output_aliases(self._request, self._signature)
        return [Task(self._signature, inputs)]

    def encode(self, loaded: LoadedVersion, outputs: Sequence[Mapping[str, Array]], check: Check) -> bytes:
        """Return a PredictResponse with the outputs that the request chose."""
        response = predict_pb2.PredictResponse()
        _describe(response.model_spec, self._request.model_spec, loaded.version)
        for alias in self._aliases:
            check()
            encode_tensor(outputs[0][alias], self._signature.output_dtypes[alias], response.outputs[alias])
        return bytes(response.SerializeToString())


class _GrpcInference(_GrpcPrediction):
    """A classify or regress request; see `core.pipeline.Prediction`."""

    def __init__(self, method: Method, request_class: Any, response_class: Any) -> None:
        self._method, self._request_class, self._response_class = method, request_class, response_class
        self.log_type = LOG_TYPES[method]

    def parse(self, body: bytes, _: Check) -> ModelSpec:
        """Parse the message."""
        self._request = parse(self._request_class, body)
        return model_spec(self._request)

    def decode(self, loaded: LoadedVersion, check: Check) -> list[Task]:
        """Return the run of the examples."""
        name = self._request.model_spec.signature_name or DEFAULT_SIGNATURE
        self._signature = find_signature(loaded.servable, name, self._method)
        self._examples = _examples(self._request.input, check)
        return [example_task(self._signature, self._examples)]

    def encode(self, loaded: LoadedVersion, outputs: Sequence[Mapping[str, Array]], _: Check) -> bytes:
        """Return the response with the classes or values."""
        response = self._response_class()
        result = interpret(self._method, self._signature, outputs[0], len(self._examples))
        _describe(response.model_spec, self._request.model_spec, loaded.version)
        fill_result(response.result, result)
        return bytes(response.SerializeToString())


class GrpcMultiInference(_GrpcPrediction):
    """A MultiInferenceRequest: several signatures on the same examples. Its first task selects the version of the model."""

    log_type = "multi_inference_log"

    def parse(self, body: bytes, _: Check) -> ModelSpec:
        """Parse the message."""
        self._request = parse(inference_pb2.MultiInferenceRequest, body)
        tasks = self._request.tasks
        return _spec(tasks[0].model_spec) if tasks else ModelSpec("")

    def decode(self, loaded: LoadedVersion, check: Check) -> list[Task]:
        """Return a run for each task. All tasks are checked before the first run."""
        self._chosen = list(_chosen(loaded.servable, self._request.tasks))
        self._examples = _examples(self._request.input, check)
        inputs, size = [to_tensor(self._examples)], sum(map(len, self._examples))
        return [Task(signature, inputs, size) for _, signature in self._chosen]

    def encode(self, loaded: LoadedVersion, outputs: Sequence[Mapping[str, Array]], _: Check) -> bytes:
        """Return the response with the results of all tasks."""
        response = inference_pb2.MultiInferenceResponse()
        for task, (method, signature), found in zip(self._request.tasks, self._chosen, outputs, strict=True):
            result = interpret(method, signature, found, len(self._examples))
            one = response.results.add()
            _describe(one.model_spec, task.model_spec, loaded.version)
            is_class = isinstance(result, Classification)
            fill_result(one.classification_result if is_class else one.regression_result, result)
        return bytes(response.SerializeToString())


def _chosen(servable: Servable, tasks: Sequence[Any]) -> Iterator[tuple[Method, Signature]]:
    """Yield the method and the signature of each task of a MultiInferenceRequest, checked."""
    seen: set[str] = set()
    for task in tasks:
        if not task.model_spec.name:
            raise invalid_argument("Found ModelSpec with an empty model name.")
        if task.model_spec.name != tasks[0].model_spec.name:
            raise invalid_argument("All ModelSpecs in a MultiInferenceRequest must access the same model name.")
        name = task.model_spec.signature_name or DEFAULT_SIGNATURE
        if name in seen:
            raise invalid_argument(f"Duplicate evaluation of signature: {name}")
        seen.add(name)
        signature = servable.signatures.get(name)
        if signature is None:
            raise invalid_argument(f"Requested signature not found in model graph: {name}")
        method = Method.named(task.method_name)
        check_signature(servable, signature, method)
        yield method, signature


_CLASSIFY = Method.CLASSIFY, classification_pb2.ClassificationRequest, classification_pb2.ClassificationResponse
_REGRESS = Method.REGRESS, regression_pb2.RegressionRequest, regression_pb2.RegressionResponse
PREDICTIONS: Final[Mapping[str, Callable[[], Prediction]]] = {
    "Predict": GrpcPredict,
    "Classify": lambda: _GrpcInference(*_CLASSIFY),
    "Regress": lambda: _GrpcInference(*_REGRESS),
    "MultiInference": GrpcMultiInference,
}
"""Creates the prediction of a request, by the name of its method."""


async def model_metadata(service: ModelService, data: bytes) -> bytes:
    """Answer a GetModelMetadataRequest."""
    request = parse(get_model_metadata_pb2.GetModelMetadataRequest, data)
    spec = model_spec(request)
    if not request.metadata_field:
        raise invalid_argument("GetModelMetadataRequest must specify at least one metadata_field")
    for field in request.metadata_field:
        if field != _SIGNATURE_DEF:
            raise invalid_argument(f"Metadata field {field} is not supported")
    metadata = await service.metadata(spec)
    signatures = json_format.ParseDict(
        {_SIGNATURE_DEF: dict(metadata.signature_defs)}, get_model_metadata_pb2.SignatureDefMap()
    )
    response = get_model_metadata_pb2.GetModelMetadataResponse()
    response.model_spec.name = metadata.name
    response.model_spec.version.value = metadata.version
    response.metadata[_SIGNATURE_DEF].Pack(signatures)
    return bytes(response.SerializeToString())


def _find_signature(servable: Servable, name: str) -> Signature:
    signature = servable.signatures.get(name or DEFAULT_SIGNATURE)
    if signature is None:
        text = f'Serving signature key "{name or DEFAULT_SIGNATURE}" not found.'
        raise StatusError(Code.FAILED_PRECONDITION, text)
    return signature


def _describe(response: Any, asked: Any, version: int) -> None:
    """Fill the ModelSpec of an answer: the one of the request, with the version that answered."""
    response.name = asked.name
    response.signature_name = asked.signature_name or DEFAULT_SIGNATURE
    response.version.value = version


def _examples(source: Any, check: Check) -> list[bytes]:
    """Return the serialized tf.Examples of an Input, each with the context before its own features."""
    kind = source.WhichOneof("kind")
    if kind is None:
        return []
    chosen = getattr(source, kind)
    context = chosen.context.SerializeToString() if kind == "example_list_with_context" else b""
    check_context(context, len(chosen.examples), check)
    return [context + example.SerializeToString() for example in chosen.examples]


def fill_result(message: Any, result: InferenceResult) -> None:
    """Write classes or values into the message of a result."""
    if isinstance(result, Classification):
        for labels, scores in zip(result.labels.tolist(), result.scores.tolist(), strict=True):
            classes = message.classifications.add().classes
            for label, score in zip(labels, scores, strict=True):
                classes.add(label=label.decode("utf-8", "replace"), score=score)
    else:
        for value in result.values.tolist():
            message.regressions.add(value=value)


# ---- the inputs of a PredictRequest, with the checks and texts of predict_util.cc

_MOST_VALUES: Final = 2**12
"""More values that are not in `tensor_content` are converted piece by piece."""


def int64_columns(request: Any, signature: Signature) -> Columns | None:
    """Return inputs that are int64 vectors of one length, as most requests have. None if they are not, or are malformed.

    To convert them together takes a fraction of the time of `_decode_inputs`.
    """
    sent, inputs = request.inputs, signature.inputs
    if not signature.is_int64 or len(sent) != len(inputs):
        return None
    protos = [sent[info.alias] for info in inputs if info.alias in sent]
    shape = protos[0].tensor_shape if len(protos) == len(inputs) else None
    if shape is None or shape.unknown_rank or len(shape.dim) != 1:
        return None
    if any(proto.dtype != types_pb2.DT_INT64 or proto.tensor_shape != shape for proto in protos):
        return None
    rows = shape.dim[0].size
    contents = [proto.tensor_content for proto in protos]
    sizes = set(map(len, contents))
    if rows > 0 and sizes == {8 * rows}:
        return Columns(np.frombuffer(b"".join(contents), "<i8").reshape(len(protos), rows).T)
    lists = [proto.int64_val for proto in protos]
    if sizes != {0} or set(map(len, lists)) != {rows} or not 0 < rows * len(lists) <= _MOST_VALUES:
        return None
    return Columns(np.fromiter(itertools.chain.from_iterable(lists), np.int64).reshape(len(lists), rows).T)


def _decode_inputs(request: Any, servable: Servable, signature: Signature) -> list[Array]:
    """Return the request's inputs in the signature's order. A missing input gets the signature's default, if there is one.

    Raises:
        StatusError: the inputs differ from the signature's, or one is not a tensor of its dtype.
    """
    sent, defaults = request.inputs, _defaults(servable, signature)
    wanted = [info.alias for info in signature.inputs]
    if len(sent) > len(wanted) or (len(sent) < len(wanted) and not defaults):
        raise _size_mismatch(sent, wanted)
    for alias in wanted:
        if alias not in sent and alias not in defaults:
            raise _missing(signature, alias, sent, defaults)
    if not set(sent) <= set(wanted):
        used = ",".join(sorted(set(sent) & set(wanted)))
        text = f"Inputs contains invalid name. Used request inputs: {used}, request input: {_names(sent)}"
        raise invalid_argument(text)
    return [_input(sent[info.alias] if info.alias in sent else defaults[info.alias], info) for info in signature.inputs]


def _defaults(servable: Servable, signature: Signature) -> dict[str, Any]:
    fields: Mapping[str, Any] = servable.signature_defs.get(signature.name, {}).get("defaults", {})
    return {alias: json_format.ParseDict(value, tensor_pb2.TensorProto()) for alias, value in fields.items()}


def _input(proto: Any, info: TensorInfo) -> Array:
    array = decode_tensor(proto, info.alias)
    sent = dtype_name(proto.dtype)
    if sent != info.dtype:  # TensorFlow's text for an argument of another type
        raise invalid_argument(f"Type mismatch: actual {sent} vs. expect {info.dtype}")
    return array


def _names(aliases: Iterable[str]) -> str:
    return ",".join(sorted(aliases))


def _size_mismatch(sent: Iterable[str], wanted: Sequence[str]) -> StatusError:
    found = set(sent)
    return invalid_argument(
        f"input size does not match signature: {len(found)}!={len(wanted)} len({{{_names(found)}}}) != "
        f"len({{{_names(wanted)}}}). Sent extra: {{{_names(found.difference(wanted))}}}. "
        f"Missing but required: {{{_names(set(wanted) - found)}}}."
    )


def _missing(signature: Signature, alias: str, sent: Iterable[str], defaults: Iterable[str]) -> StatusError:
    tensor = next(info.tensor for info in signature.inputs if info.alias == alias)
    return invalid_argument(
        f"Signature input alias: {alias}(feed name: {tensor}) not found in request and no default value provided. "
        f"Inputs expected to be in the request {{{_names(sent)}}}, or default input alias set: {_names(defaults)}"
    )


def _output_aliases(request: Any, signature: Signature) -> list[str]:
    """Return the aliases of the outputs in the answer.

    Raises:
        StatusError: the request's filter names an unknown output, or one twice.
    """
    known = [info.alias for info in signature.outputs]
    chosen: list[str] = []
    for alias in request.output_filter:
        if alias not in known:
            text = f"output tensor alias not found in signature: {alias} Outputs expected to be in the set "
            raise invalid_argument(f"{text}{{{_names(known)}}}.")
        if alias in chosen:
            raise invalid_argument(f"duplicate output tensor alias: {alias}")
        chosen.append(alias)
    return chosen or known
