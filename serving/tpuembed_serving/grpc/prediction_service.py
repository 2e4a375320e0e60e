"""TensorFlow Serving's PredictionService, from bytes to bytes: decodes a message, calls the service, encodes the answer.

Importing this module imports TensorFlow, whose package has the classes of the messages. So `server` imports it in a thread.
"""

import contextlib
import importlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from google.protobuf import json_format  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tensorflow_serving.apis import (
    classification_pb2,
    get_model_metadata_pb2,
    inference_pb2,
    predict_pb2,
    regression_pb2,
)

from tpuembed_serving.core.classify_regress import Classification, InferenceResult, Method
from tpuembed_serving.core.off_loop import run_sized
from tpuembed_serving.core.servable import Array, Servable, Signature
from tpuembed_serving.core.service import DEFAULT_SIGNATURE, InferenceTask, ModelSpec, PredictionService
from tpuembed_serving.core.status import Code, StatusError, invalid_argument
from tpuembed_serving.grpc.inputs import decode_inputs, output_aliases
from tpuembed_serving.grpc.tensor_proto import encode_tensor

__all__ = ["PredictionApi", "model_spec", "parse", "register_service"]

_SIGNATURE_DEF = "signature_def"


def register_service(name: str) -> None:
    """Register a service of TensorFlow Serving for gRPC's reflection.

    The module of tensorflow-serving-api 2.19 fails under protobuf 5, but only after it has registered the service.
    """
    with contextlib.suppress(AttributeError):
        importlib.import_module(f"tensorflow_serving.apis.{name}_pb2")


register_service("prediction_service")


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


class PredictionApi:
    """The methods of PredictionService."""

    def __init__(self, service: PredictionService) -> None:
        self._service = service

    @property
    def methods(self) -> Mapping[str, Callable[[bytes], Awaitable[bytes]]]:
        """Return the methods by name."""
        return {
            "Predict": self.predict,
            "Classify": self.classify,
            "Regress": self.regress,
            "MultiInference": self.multi_inference,
            "GetModelMetadata": self.get_model_metadata,
        }

    async def predict(self, data: bytes) -> bytes:
        """Answer a PredictRequest."""
        request = await run_sized(len(data), parse, predict_pb2.PredictRequest, data)
        with self._service.lease(model_spec(request)) as loaded:
            signature = _find_signature(loaded.servable, request.model_spec.signature_name)
            inputs = await run_sized(len(data), decode_inputs, request, loaded.servable, signature)
            aliases = output_aliases(request, signature)
            outputs = await self._service.predict(loaded.servable, signature, inputs)
        response = predict_pb2.PredictResponse()
        _describe(response.model_spec, request.model_spec, loaded.version)
        chosen = {alias: outputs[alias] for alias in aliases}
        return await run_sized(sum(array.nbytes for array in chosen.values()), _encode, response, chosen, signature)

    async def classify(self, data: bytes) -> bytes:
        """Answer a ClassificationRequest."""
        request = parse(classification_pb2.ClassificationRequest, data)
        return await self._infer(request, Method.CLASSIFY, classification_pb2.ClassificationResponse())

    async def regress(self, data: bytes) -> bytes:
        """Answer a RegressionRequest."""
        request = parse(regression_pb2.RegressionRequest, data)
        return await self._infer(request, Method.REGRESS, regression_pb2.RegressionResponse())

    async def _infer(self, request: Any, method: Method, response: Any) -> bytes:
        with self._service.lease(model_spec(request)) as loaded:
            name = request.model_spec.signature_name
            result = await self._service.infer(loaded.servable, name, method, _examples(request.input))
        _describe(response.model_spec, request.model_spec, loaded.version)
        _fill(response.result, result)
        return _serialized(response)

    async def multi_inference(self, data: bytes) -> bytes:
        """Answer a MultiInferenceRequest. Its first task selects the version of the model."""
        request = parse(inference_pb2.MultiInferenceRequest, data)
        specs = [task.model_spec for task in request.tasks]
        tasks = [
            InferenceTask(task.model_spec.name, task.model_spec.signature_name, task.method_name)
            for task in request.tasks
        ]
        with self._service.lease(_spec(specs[0]) if specs else ModelSpec("")) as loaded:
            results = await self._service.multi_infer(loaded.servable, tasks, _examples(request.input))
        response = inference_pb2.MultiInferenceResponse()
        for spec, result in zip(specs, results, strict=True):
            one = response.results.add()
            _describe(one.model_spec, spec, loaded.version)
            is_class = isinstance(result, Classification)
            _fill(one.classification_result if is_class else one.regression_result, result)
        return _serialized(response)

    async def get_model_metadata(self, data: bytes) -> bytes:
        """Answer a GetModelMetadataRequest."""
        request = parse(get_model_metadata_pb2.GetModelMetadataRequest, data)
        spec = model_spec(request)
        _check_fields(request.metadata_field)
        metadata = self._service.metadata(spec)
        signatures = json_format.ParseDict(
            {_SIGNATURE_DEF: dict(metadata.signature_defs)}, get_model_metadata_pb2.SignatureDefMap()
        )
        response = get_model_metadata_pb2.GetModelMetadataResponse()
        response.model_spec.name = metadata.name
        response.model_spec.version.value = metadata.version
        response.metadata[_SIGNATURE_DEF].Pack(signatures)
        return _serialized(response)


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


def _encode(response: Any, outputs: Mapping[str, Array], signature: Signature) -> bytes:
    dtypes = {info.alias: info.dtype for info in signature.outputs}
    for alias, array in outputs.items():
        encode_tensor(array, dtypes[alias], response.outputs[alias])
    return _serialized(response)


def _serialized(response: Any) -> bytes:
    return bytes(response.SerializeToString())


def _examples(source: Any) -> list[bytes]:
    """Return the serialized tf.Examples of an Input, each with the context before its own features."""
    kind = source.WhichOneof("kind")
    if kind is None:
        return []
    chosen = getattr(source, kind)
    context = chosen.context.SerializeToString() if kind == "example_list_with_context" else b""
    return [context + example.SerializeToString() for example in chosen.examples]


def _fill(message: Any, result: InferenceResult) -> None:
    if isinstance(result, Classification):
        for labels, scores in zip(result.labels.tolist(), result.scores.tolist(), strict=True):
            classes = message.classifications.add().classes
            for label, score in zip(labels, scores, strict=True):
                classes.add(label=label.decode("utf-8", "replace"), score=score)
    else:
        for value in result.values.tolist():
            message.regressions.add(value=value)


def _check_fields(fields: Any) -> None:
    if not fields:
        raise invalid_argument("GetModelMetadataRequest must specify at least one metadata_field")
    for field in fields:
        if field != _SIGNATURE_DEF:
            raise invalid_argument(f"Metadata field {field} is not supported")
