"""What an inference request asks: which signature to run on which tensors, and which outputs to return in which form."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from tpuembed_serving.core.pipeline import Check, Task
from tpuembed_serving.core.servable import Array, LoadedVersion, Servable, Signature
from tpuembed_serving.core.service import DEFAULT_SIGNATURE, ModelSpec
from tpuembed_serving.core.status import invalid_argument
from tpuembed_serving.models.versions import parse_version
from tpuembed_serving.open_inference.tensors import DTYPES, datatype_of

__all__ = [
    "INPUT_PARAMETERS",
    "OUTPUT_PARAMETERS",
    "REQUEST_PARAMETERS",
    "InferInput",
    "InferOutput",
    "InferRequest",
    "Inference",
    "RequestedOutput",
    "check_datatype",
    "check_parameters",
    "find_signature",
    "model_spec",
    "signature_names",
]

_CONTENT_TYPE: Final = "content_type"
_PLAIN_CONTENTS: Final = frozenset({"np", "pd", "str"})
"""The content types of MLServer's clients whose data is the tensor itself."""
REQUEST_PARAMETERS: Final = {"signature_name": str, "binary_data_output": bool, _CONTENT_TYPE: str}
INPUT_PARAMETERS: Final = {"binary_data_size": int, _CONTENT_TYPE: str}
OUTPUT_PARAMETERS: Final = {"binary_data": bool, _CONTENT_TYPE: str}
"""The parameters of requests, inputs and outputs, and the type of their values."""


class InferInput(NamedTuple):
    """An input of a request. `read` returns its array, or raises StatusError."""

    name: str
    datatype: str
    read: Callable[[Check], Array]


class RequestedOutput(NamedTuple):
    """An output that a request names. `is_binary` is None if the request does not say."""

    name: str
    is_binary: bool | None = None


class InferRequest(NamedTuple):
    """A parsed request.

    Attributes:
        outputs: the requested ones. Without any it asks for all.
        binary_outputs: whether outputs that do not say are binary.
    """

    spec: ModelSpec
    request_id: str
    signature_name: str
    inputs: Sequence[InferInput]
    outputs: Sequence[RequestedOutput]
    binary_outputs: bool

    def is_binary(self, output: RequestedOutput) -> bool:
        """Returns True if an output is returned as binary data."""
        return self.binary_outputs if output.is_binary is None else output.is_binary


class InferOutput(NamedTuple):
    """An output of the answer."""

    output: RequestedOutput
    datatype: str
    array: Array


class Inference:
    """The middle of an inference; see `core.pipeline.Prediction`. A transport adds `parse`, which sets `request`, and `encode`.

    Attributes:
        outputs: what the answer has, once the inputs are decoded.
    """

    request: InferRequest
    outputs: Sequence[RequestedOutput]
    log_type = "predict_log"
    is_log_message = False

    def decode(self, loaded: LoadedVersion, check: Check) -> list[Task]:
        """Return the run of the signature. Its inputs must be those of the request, and of the same datatypes."""
        request = self.request
        self._signature = signature = find_signature(loaded.servable, request.signature_name)
        self.outputs = _chosen(signature, request.outputs)
        given = {one.name: one for one in request.inputs}
        wanted = [info.alias for info in signature.inputs]
        if len(given) < len(request.inputs) or set(given) != set(wanted):
            sent, takes = (", ".join(names) or "none" for names in ([one.name for one in request.inputs], wanted))
            raise invalid_argument(
                f"the request has the inputs {sent}. Signature {signature.name} takes {takes}, each once"
            )
        for info in signature.inputs:
            datatype = given[info.alias].datatype
            if datatype != datatype_of(info):
                raise invalid_argument(
                    f"input {info.alias} is {datatype}. Signature {signature.name} takes {datatype_of(info)}"
                )
        return [Task(signature, [given[alias].read(check) for alias in wanted])]

    def results(self, outputs: Mapping[str, Array]) -> list[InferOutput]:
        """Return the outputs that the request asks for, from those of the signature by alias."""
        infos = {info.alias: info for info in self._signature.outputs}
        return [InferOutput(one, datatype_of(infos[one.name]), outputs[one.name]) for one in self.outputs]


def find_signature(servable: Servable, name: str) -> Signature:
    """Return the signature of that name; the default one if it is empty.

    Raises:
        StatusError: INVALID_ARGUMENT, there is no such signature.
    """
    signature = servable.signatures.get(name or DEFAULT_SIGNATURE)
    if signature is None:
        raise invalid_argument(
            f"the model has no signature {name or DEFAULT_SIGNATURE}. Choose one of {', '.join(signature_names(servable))} "
            "with the request's parameter signature_name"
        )
    return signature


def signature_names(servable: Servable) -> list[str]:
    """Return the names of the signatures that take inputs: the others are TensorFlow's own."""
    return sorted(name for name, one in servable.signatures.items() if one.inputs)


def _chosen(signature: Signature, asked: Sequence[RequestedOutput]) -> Sequence[RequestedOutput]:
    known = [info.alias for info in signature.outputs]
    names = [one.name for one in asked]
    for name in names:
        if name not in known:
            raise invalid_argument(f"signature {signature.name} has no output {name}. Choose from {', '.join(known)}")
        if names.count(name) > 1:
            raise invalid_argument(f"output {name} is requested twice. Name each output once")
    return asked or [RequestedOutput(name) for name in known]


def model_spec(name: str, version: str) -> ModelSpec:
    """Return the model that a request names. Its version is a number, a label, or empty for the newest one."""
    if not version:
        return ModelSpec(name)
    number = parse_version(version)
    return ModelSpec(name, label=version) if number is None else ModelSpec(name, version=number)


def check_datatype(name: str, datatype: str) -> None:
    """Check that an input has a datatype of the protocol.

    Raises:
        StatusError: INVALID_ARGUMENT, it has not.
    """
    if datatype not in DTYPES:
        raise invalid_argument(f"input {name} has the datatype {datatype!r}. Choose from {', '.join(DTYPES)}")


def check_parameters(owner: str, given: Mapping[str, Any], known: Mapping[str, type]) -> None:
    """Check the parameters of a request, an input or an output. An unknown one might change what the client means.

    Raises:
        StatusError: INVALID_ARGUMENT, one is unknown, or its value is of another type.
    """
    for name, value in sorted(given.items()):
        if name not in known:
            raise invalid_argument(f"{owner} has the parameter {name}, which is not supported. Use {', '.join(known)}")
        if type(value) is not known[name]:
            raise invalid_argument(f"{owner}: the value of parameter {name} is not of type {known[name].__name__}")
        if name == _CONTENT_TYPE and value not in _PLAIN_CONTENTS:
            raise invalid_argument(
                f"{owner} has the content_type {value!r}. Send the tensor itself: {', '.join(sorted(_PLAIN_CONTENTS))}"
            )
