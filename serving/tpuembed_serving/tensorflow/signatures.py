"""Converts TensorFlow's SignatureDef to the server's `Signature`. Importing this module imports TensorFlow."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from google.protobuf import json_format  # type: ignore[import-untyped]
from tensorflow.core.framework import types_pb2

from tpuembed_serving.core.servable import Signature, TensorInfo

__all__ = ["signature_json", "signature_of"]


def signature_of(name: str, definition: Any, *, is_export: bool = False) -> Signature:
    """Return the signature called `name` from its SignatureDef.

    The graph of an export relies on the shapes of its signatures, so the server checks them. As in TensorFlow Serving, other
    graphs decide which shapes they accept.
    """
    outputs = _tensor_infos(definition.outputs)
    shapes = [_shape(definition.outputs[info.alias]) for info in outputs]
    return Signature(
        name,
        _tensor_infos(definition.inputs),
        outputs,
        shapes=tuple(_shape(definition.inputs[alias]) for alias in sorted(definition.inputs)) if is_export else (),
        row_bytes=sum(map(_row_bytes, outputs, shapes)),
    )


def _shape(info: Any) -> tuple[int, ...] | None:
    shape = info.tensor_shape
    return None if shape.unknown_rank else tuple(dim.size for dim in shape.dim)


def _row_bytes(info: TensorInfo, shape: tuple[int, ...] | None) -> int:
    """Return the bytes of a row of an output. 0 if they are not known."""
    if not shape or min(shape[1:], default=0) < 0 or info.numpy_dtype is None:
        return 0
    return math.prod(shape[1:]) * info.numpy_dtype.itemsize


def _tensor_infos(infos: Mapping[str, Any]) -> tuple[TensorInfo, ...]:
    return tuple(_tensor_info(alias, infos[alias]) for alias in sorted(infos))


def _tensor_info(alias: str, info: Any) -> TensorInfo:
    try:
        numpy_dtype = np.dtype(tf.as_dtype(info.dtype).as_numpy_dtype)
    except (KeyError, TypeError):  # resource, variant
        numpy_dtype = None
    return TensorInfo(alias, info.name, types_pb2.DataType.Name(info.dtype).removeprefix("DT_").lower(), numpy_dtype)


def signature_json(definition: Any) -> dict[str, Any]:
    """Return a SignatureDef as protobuf's C++ JSON printer writes it with every field."""
    return {
        "inputs": {alias: _info_json(definition.inputs[alias]) for alias in sorted(definition.inputs)},
        "outputs": {alias: _info_json(definition.outputs[alias]) for alias in sorted(definition.outputs)},
        "method_name": definition.method_name,
        "defaults": {alias: _as_dict(definition.defaults[alias]) for alias in sorted(definition.defaults)},
    }


def _info_json(info: Any) -> dict[str, Any]:
    shape = info.tensor_shape
    dims = [{"size": str(dim.size), "name": dim.name} for dim in shape.dim]
    fields = {
        "dtype": types_pb2.DataType.Name(info.dtype),
        "tensor_shape": {"dim": dims, "unknown_rank": shape.unknown_rank},
    }
    return {**_as_dict(info), **fields} if info.WhichOneof("encoding") != "name" else {**fields, "name": info.name}


def _as_dict(message: Any) -> dict[str, Any]:
    return json_format.MessageToDict(message, preserving_proto_field_name=True)
