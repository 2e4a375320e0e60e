"""The messages of the service inference.GRPCInferenceService, from a table of their fields.

Source: open_inference_grpc.proto of github.com/kserve/open-inference-protocol. ModelStreamInfer is Triton's (grpc_service.proto).

They have a pool of their own: in the default one they would conflict with the modules of clients, which have the same names.
"""

from typing import Any, Final

from google.protobuf import (  # type: ignore[import-untyped]
    descriptor_pb2,
    descriptor_pool,
    message_factory,
)

__all__ = ["SERVICE", "message"]

_PACKAGE: Final = "inference"
SERVICE: Final = "inference.GRPCInferenceService"
_TENSOR: Final = "string name, string datatype, int64* shape, InferParameter@ parameters, InferTensorContents contents"
_FIELDS: Final = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "bool live",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "bool ready",
    "ModelReadyRequest": "string name, string version",
    "ModelReadyResponse": "bool ready",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "string name, string version, string* extensions",
    "ModelMetadataRequest": "string name, string version",
    "ModelMetadataResponse": "string name, string* versions, string platform, ModelMetadataResponse.TensorMetadata* inputs, "
    "ModelMetadataResponse.TensorMetadata* outputs, string@ properties",
    "ModelMetadataResponse.TensorMetadata": "string name, string datatype, int64* shape",
    "ModelInferRequest": "string model_name, string model_version, string id, InferParameter@ parameters, "
    "ModelInferRequest.InferInputTensor* inputs, ModelInferRequest.InferRequestedOutputTensor* outputs, bytes* raw_input_contents",
    "ModelInferRequest.InferInputTensor": _TENSOR,
    "ModelInferRequest.InferRequestedOutputTensor": "string name, InferParameter@ parameters",
    "ModelInferResponse": "string model_name, string model_version, string id, InferParameter@ parameters, "
    "ModelInferResponse.InferOutputTensor* outputs, bytes* raw_output_contents",
    "ModelInferResponse.InferOutputTensor": _TENSOR,
    "InferParameter": "bool bool_param, int64 int64_param, string string_param, double double_param, uint64 uint64_param",
    "InferTensorContents": "bool* bool_contents, int32* int_contents, int64* int64_contents, uint32* uint_contents, "
    "uint64* uint64_contents, float* fp32_contents, double* fp64_contents, bytes* bytes_contents",
}
"""The fields of each message, numbered from 1: * is a repeated field, and @ a map from strings."""
_ONEOF: Final = {"InferParameter": "parameter_choice"}
"""The messages whose fields exclude one another, and the name of the choice."""
_FIELD: Final = descriptor_pb2.FieldDescriptorProto


def _file() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="open_inference_grpc.proto", package=_PACKAGE, syntax="proto3")
    found: dict[str, Any] = {}
    for name, fields in _FIELDS.items():
        outer, _, inner = name.rpartition(".")
        found[name] = one = (found[outer].nested_type if outer else file.message_type).add(name=inner)
        if name in _ONEOF:
            one.oneof_decl.add(name=_ONEOF[name])
        for field in filter(None, fields.split(", ")):
            kind, label = field.split()
            added = one.field.add(name=label, number=len(one.field) + 1, label=_FIELD.LABEL_OPTIONAL)
            if kind.endswith("@"):
                entry = one.nested_type.add(name=f"{label.title().replace('_', '')}Entry")
                entry.options.map_entry = True
                _set_type(entry.field.add(name="key", number=1, label=_FIELD.LABEL_OPTIONAL), "string")
                _set_type(entry.field.add(name="value", number=2, label=_FIELD.LABEL_OPTIONAL), kind[:-1])
                kind = f"{name}.{entry.name}*"
            if kind.endswith("*"):
                added.label = _FIELD.LABEL_REPEATED
            elif name in _ONEOF:
                added.oneof_index = 0
            _set_type(added, kind.removesuffix("*"))
    return file


def _set_type(field: Any, kind: str) -> None:
    if kind[0].isupper():
        field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    else:
        field.type = _FIELD.Type.Value(f"TYPE_{kind.upper()}")


_POOL: Final = descriptor_pool.DescriptorPool()
_POOL.AddSerializedFile(_file().SerializeToString())


def message(name: str) -> Any:
    """Return the class of a message."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
