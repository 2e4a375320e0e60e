"""Converts a PredictRequest to the inputs of a signature, with TensorFlow Serving's checks and texts (predict_util.cc)."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from google.protobuf import json_format  # type: ignore[import-untyped]
from tensorflow.core.framework import tensor_pb2, types_pb2

from tpuembed_serving.core.servable import Array, Columns, Servable, Signature, TensorInfo
from tpuembed_serving.core.status import StatusError, invalid_argument
from tpuembed_serving.grpc.tensor_proto import decode_tensor, dtype_name

__all__ = ["decode_inputs", "int64_columns", "output_aliases"]

_MOST_VALUES: Final = 2**12
"""More values that are not in `tensor_content` are converted piece by piece."""


def int64_columns(request: Any, signature: Signature) -> Columns | None:
    """Return inputs that are int64 vectors of one length, as most requests have. None if they are not, or are malformed.

    To convert them together takes a fraction of the time of `decode_inputs`.
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


def decode_inputs(request: Any, servable: Servable, signature: Signature) -> list[Array]:
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


def output_aliases(request: Any, signature: Signature) -> list[str]:
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
