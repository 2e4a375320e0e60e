"""The messages of the Open Inference Protocol over gRPC, from its published file, for clients of a server under test.

Source: specification/protocol/open_inference_grpc.proto of github.com/kserve/open-inference-protocol. `TENSOR_CONTENTS` are the
fields that hold the values of each datatype, as the comments of that file say.
"""

from typing import Any, Final

from google.protobuf import (  # type: ignore[import-untyped]
    descriptor_pb2,
    descriptor_pool,
    message_factory,
)

__all__ = ["SERVICE", "TENSOR_CONTENTS", "message"]

SERVICE: Final = "inference.GRPCInferenceService"
TENSOR_CONTENTS: Final = {
    "BOOL": "bool_contents",
    "UINT8": "uint_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}

# A field is NUMBER TYPE NAME; the types of fields that are messages are names in this file, and of maps the types of their values.
_TENSOR = "1 string name; 2 string datatype; 3 repeated int64 shape; 4 map .InferParameter parameters; "
_MESSAGES: Final = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "1 bool live",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "1 bool ready",
    "ModelReadyRequest": "1 string name; 2 string version",
    "ModelReadyResponse": "1 bool ready",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "1 string name; 2 string version; 3 repeated string extensions",
    "ModelMetadataRequest": "1 string name; 2 string version",
    "TensorMetadata": "1 string name; 2 string datatype; 3 repeated int64 shape",
    "ModelMetadataResponse": "1 string name; 2 repeated string versions; 3 string platform; "
    "4 repeated .TensorMetadata inputs; 5 repeated .TensorMetadata outputs",
    "InferParameter": "1 bool bool_param; 2 int64 int64_param; 3 string string_param",
    "InferTensorContents": "1 repeated bool bool_contents; 2 repeated int32 int_contents; 3 repeated int64 int64_contents; "
    "4 repeated uint32 uint_contents; 5 repeated uint64 uint64_contents; 6 repeated float fp32_contents; "
    "7 repeated double fp64_contents; 8 repeated bytes bytes_contents",
    "InferTensor": _TENSOR + "5 optional .InferTensorContents contents",
    "InferRequestedOutputTensor": "1 string name; 2 map .InferParameter parameters",
    "ModelInferRequest": "1 string model_name; 2 string model_version; 3 string id; 4 map .InferParameter parameters; "
    "5 repeated .InferTensor inputs; 6 repeated .InferRequestedOutputTensor outputs; 7 repeated bytes raw_input_contents",
    "ModelInferResponse": "1 string model_name; 2 string model_version; 3 string id; 4 map .InferParameter parameters; "
    "5 repeated .InferTensor outputs; 6 repeated bytes raw_output_contents",
}
_FIELD: Final = descriptor_pb2.FieldDescriptorProto


def _describe(field: Any, kind: str) -> None:
    if kind.startswith("."):
        field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".inference{kind}"
    else:
        field.type = _FIELD.Type.Value(f"TYPE_{kind.upper()}")


def _pool() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="contract.proto", package="inference", syntax="proto3")
    for name, fields in _MESSAGES.items():
        one = file.message_type.add(name=name)
        for words in (field.split() for field in fields.split("; ") if field):
            number, kind, label = int(words[0]), words[-2], words[-1]
            repeated = words[1] in ("repeated", "map")
            added = one.field.add(name=label, number=number, label=3 if repeated else 1)
            if words[1] == "map":
                entry = one.nested_type.add(name=f"{label.title()}Entry")
                entry.options.map_entry = True
                _describe(entry.field.add(name="key", number=1, label=1), "string")
                _describe(entry.field.add(name="value", number=2, label=1), kind)
                kind = f".{name}.{entry.name}"
            _describe(added, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool


_POOL: Final = _pool()


def message(name: str) -> Any:
    """Return the class of a message."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"inference.{name}"))
