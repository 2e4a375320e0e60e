"""The JSON of the Open Inference Protocol, with binary tensors after it: parses requests, and writes answers.

Tensors of a request may be nested lists of their shape, or flat. Those of an answer are flat, or binary.
"""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from tpuembed_serving.core.pipeline import Check
from tpuembed_serving.core.servable import Array, cannot_hold
from tpuembed_serving.core.service import ModelSpec
from tpuembed_serving.core.status import invalid_argument
from tpuembed_serving.http.json.document import long_integers, parse_document
from tpuembed_serving.http.json.responses import numbers, write_json
from tpuembed_serving.open_inference.inference import (
    INPUT_PARAMETERS,
    OUTPUT_PARAMETERS,
    REQUEST_PARAMETERS,
    InferInput,
    InferOutput,
    InferRequest,
    RequestedOutput,
    check_datatype,
    check_parameters,
)
from tpuembed_serving.open_inference.tensors import DTYPES, Content, check_shape, read_binary, write_binary, wrong_size

__all__ = ["EncodedInference", "encode_inference", "parse_inference"]

_MEMBERS: Final = frozenset({"id", "inputs", "model_name", "model_version", "outputs", "parameters"})
"""The members of a request. Clients send the model's name and version too, but the URL has them."""
_TYPE_NAMES: Final[Mapping[Any, str]] = {str: "a string", dict: "an object", list: "a list"}
_LEAF_TYPES: Final[Mapping[str, set[type]]] = {"BOOL": {bool}, "BYTES": {str}}


class EncodedInference(NamedTuple):
    """The body of an answer. `header_bytes` is the size of its JSON; None if no tensor follows."""

    body: bytes
    header_bytes: int | None


def parse_inference(body: bytes, header_bytes: int | None, spec: ModelSpec, check: Check) -> InferRequest:
    """Parse a request.

    Args:
        body: the request's JSON, and its binary tensors.
        header_bytes: the size of the JSON; None if it is the whole body.
        spec: the model that the URL names.
        check: called before slow work.

    Raises:
        StatusError: INVALID_ARGUMENT, the body is malformed, or has fewer or more bytes than its tensors.
    """
    if header_bytes is not None and header_bytes > len(body):
        raise invalid_argument(
            f"Inference-Header-Content-Length is {header_bytes}, and the body has {len(body)} bytes. Send the size of its JSON"
        )
    members = _given(parse_document(body if header_bytes is None else body[:header_bytes], check).members)
    if unknown := sorted(set(members) - _MEMBERS):
        raise invalid_argument(f"the request has the member {unknown[0]}. Use {', '.join(sorted(_MEMBERS))}")
    parameters = _parameters(members, "the request", REQUEST_PARAMETERS)
    reader = _InputReader(body, header_bytes)
    inputs = [reader.read(one) for one in _objects(members, "inputs")]
    reader.check_end()
    is_binary = parameters.get("binary_data_output")
    outputs = [_output(one) for one in _objects(members, "outputs")] if "outputs" in members else []
    return InferRequest(
        spec,
        _member(members, "id", str, "the request") if "id" in members else "",
        parameters.get("signature_name", ""),
        inputs,
        outputs,
        binary_outputs=bool(is_binary),
    )


def _given(members: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members that are not null: clients send null for what they leave out."""
    return {key: value for key, value in members.items() if value is not None}


def _member(members: Mapping[str, Any], key: str, kind: Any, owner: str) -> Any:
    if key not in members:
        raise invalid_argument(f"{owner} has no {key}. Send {_TYPE_NAMES[kind]}")
    if not isinstance(members[key], kind):
        raise invalid_argument(f"{owner}: {key} is not {_TYPE_NAMES[kind]}. Send one")
    return members[key]


def _objects(members: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    found = _member(members, key, list, "the request")
    if not all(isinstance(one, dict) for one in found):
        raise invalid_argument(f"the request: an element of {key} is not an object. Send objects with a name")
    return [_given(one) for one in found]


def _parameters(members: Mapping[str, Any], owner: str, known: Mapping[str, type]) -> dict[str, Any]:
    found = _given(_member(members, "parameters", dict, owner)) if "parameters" in members else {}
    check_parameters(owner, found, known)
    return found


def _output(members: Mapping[str, Any]) -> RequestedOutput:
    name = _member(members, "name", str, "an output")
    return RequestedOutput(name, _parameters(members, f"output {name}", OUTPUT_PARAMETERS).get("binary_data"))


class _InputReader:
    """Reads inputs in their order, which is also that of their binary data."""

    def __init__(self, body: bytes, header_bytes: int | None) -> None:
        self._body, self._header_bytes = body, header_bytes
        self._at = len(body) if header_bytes is None else header_bytes

    def read(self, members: Mapping[str, Any]) -> InferInput:
        """Return an input."""
        name = _member(members, "name", str, "an input")
        owner = f"input {name}"
        datatype = _member(members, "datatype", str, owner)
        check_datatype(name, datatype)
        shape = check_shape(name, _member(members, "shape", list, owner))
        size = _parameters(members, owner, INPUT_PARAMETERS).get("binary_data_size")
        if size is None:
            data = _member(members, "data", list, owner)
            text = memoryview(self._body)[: self._header_bytes]
            return InferInput(name, datatype, functools.partial(_read_json, name, datatype, shape, data, text))
        if "data" in members:
            raise invalid_argument(f"{owner} has data and binary_data_size. Send one of them")
        left = len(self._body) - self._at
        if not 0 <= size <= left:
            raise invalid_argument(
                f"{owner} has the binary_data_size {size}, and {left} bytes follow the JSON and the inputs before it. "
                "Send the JSON's size as Inference-Header-Content-Length, then the tensors in order"
            )
        content = Content(self._body, self._at, self._at + size)
        self._at += size
        return InferInput(name, datatype, functools.partial(read_binary, name, datatype, shape, content))

    def check_end(self) -> None:
        """Check that no bytes follow the last input."""
        if left := len(self._body) - self._at:
            raise invalid_argument(f"{left} bytes follow the last binary tensor. Send the tensors' bytes alone")


def _read_json(name: str, datatype: str, shape: tuple[int, ...], data: list[Any], text: memoryview, _: Check) -> Array:
    """Return the tensor of lists that are nested as the shape says, or of one flat list. `text` is the request's JSON."""
    values, types = data, set(map(type, data))
    for size in shape[1:] if types == {list} else ():
        if types != {list} or not set(map(len, values)) <= {size}:
            raise wrong_size(
                name, datatype, shape, "lists of other lengths. Nest them as the shape says, or send one list"
            )
        values = list(itertools.chain.from_iterable(values))
        types = set(map(type, values)) if values else {list}  # an empty list has no more levels to compare
    if len(values) != math.prod(shape) or (values is not data and len(data) != shape[0]):
        raise wrong_size(name, datatype, shape, f"{len(values)} values")
    dtype, types = DTYPES[datatype], set(map(type, values))
    allowed = _LEAF_TYPES.get(datatype, {int} if "INT" in datatype else {int, float})
    if "INT" in datatype and types <= {int, float}:
        _check_integers(name, datatype, values, text)
    if not types <= allowed:
        raise invalid_argument(
            f"input {name} is {datatype}, and its data has {', '.join(sorted(map(_json_type, types - allowed)))}. "
            f"Send {', '.join(sorted(map(_json_type, allowed)))}"
        )
    if datatype == "BYTES":
        array = np.empty(len(values), object)
        array[:] = [value.encode("utf-8", "surrogateescape") for value in values]
        return array.reshape(shape)
    try:
        if "INT" in datatype:
            return np.array(values, dtype).reshape(shape)
        with np.errstate(over="raise"):
            return np.array(values, np.float64 if datatype != "BOOL" else dtype).astype(dtype).reshape(shape)
    except (OverflowError, FloatingPointError):
        raise invalid_argument(f"input {name} is {datatype}, and a number of its data does not fit into it") from None


def _check_integers(name: str, datatype: str, values: list[int | float], text: memoryview) -> None:
    """Raise INVALID_ARGUMENT if a number is outside the range of an integer datatype. Fractions are refused elsewhere."""
    limits = np.iinfo(DTYPES[datatype])
    if not values or (limits.min <= min(values) <= max(values) <= limits.max and float not in map(type, values)):
        return
    for value in values:
        is_long = type(value) is float and abs(value) >= 2**63
        if is_long or not limits.min <= value <= limits.max:
            sent = long_integers(text).get(value) if is_long else None
            raise cannot_hold(name, datatype, sent or repr(value), limits.dtype)


def _json_type(kind: type) -> str:
    names = {
        list: "lists",
        bool: "booleans",
        int: "integers",
        float: "fractions",
        str: "strings",
        dict: "objects",
    }
    return names.get(kind, "null")


def encode_inference(
    request: InferRequest, version: int, results: Sequence[InferOutput], check: Check
) -> EncodedInference:
    """Return the answer to a request.

    Raises:
        StatusError: INVALID_ARGUMENT, a string is not UTF-8 and was not asked for as binary data.
    """
    head = {"model_name": request.spec.name, "model_version": str(version)}
    if request.request_id:
        head["id"] = request.request_id
    outputs, tensors = [], list[memoryview]()
    for output, datatype, array in results:
        check()
        about = write_json({"name": output.name, "shape": list(array.shape), "datatype": datatype})[:-1]
        if request.is_binary(output):
            tensors.append(write_binary(array, datatype, check))
            outputs.append(b'%b,"parameters":{"binary_data_size":%d}}' % (about, tensors[-1].nbytes))
        else:
            outputs.append(b'%b,"data":%b}' % (about, _data(output.name, datatype, array.reshape(-1), check)))
    text = b'%b,"outputs":[%b]}' % (write_json(head)[:-1], b",".join(outputs))
    return EncodedInference(b"".join([text, *tensors]), len(text) if tensors else None)


def _data(name: str, datatype: str, values: Array, check: Check) -> bytes:
    if datatype == "BYTES":
        try:
            return write_json([value.decode("utf-8") for value in values.tolist()])
        except UnicodeDecodeError:
            raise invalid_argument(
                f"output {name} has bytes that are not UTF-8. Ask for it with the parameter binary_data"
            ) from None
    # orjson does not know bfloat16
    return numbers(values.astype(np.float32) if datatype in ("FP16", "BF16") else values, check)
